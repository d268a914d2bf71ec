"""Loads as benchmarks make them: shared prefixes, Zipf, turns; and the lengths of a real log.

Unlike the generators beside this module they are modelled on no trace: every number is an argument,
so that a hit rate that somebody published for such a load can be compared.
"""

from itertools import accumulate
from pathlib import Path
from random import Random

from mambackpt.errors import CheckpointValueError, checked_int
from mambackpt.replay.formats import read_lengths
from mambackpt.replay.generators import Text
from mambackpt.replay.trace import Runs, Trace, TraceRows


def generate_shared(
    requests: int = 1024,
    *,
    seed: int = 0,
    grain: int = 16,
    groups: int = 64,
    prefix: int = 2048,
    suffix: int = 128,
    output: int = 256,
    zipf: float = 0.0,
    turns: int = 1,
    turn: int = 128,
    edits: float = 0.0,
) -> Trace:
    """Return a load of groups that share a prefix each: documents, system prompts, chats.

    >>> trace = generate_shared()
    >>> round(float(trace.ceiling.sum() / trace.prompt.sum()), 4)  # 15 of 16 prompts, 2,048 tokens
    0.8824

    A conversation begins with its group's ``prefix`` and a ``suffix`` of its own (tokens), and has
    ``turns`` requests; each turn adds the ``output`` of the one before and ``turn`` new tokens. The
    part ``edits`` of these turns sends another text from some token of the conversation's own on.
    With ``zipf`` 0 all groups have equally many conversations, else the group of rank k is drawn
    with a weight of 1 / k**zipf. The order is shuffled; all first turns come first, then all second
    ones: `interleave` holds fewer at once. The same seed gives the same trace.

    The parameters of others, all lengths in tokens: SGLang's ``generated-shared-prefix`` is the
    default (64 groups of 16 prompts, 2,048 + 128, output 256); vLLM's ``prefix_repetition`` is
    ``requests=1000, groups=10, prefix=256, suffix=256, output=128``. Raises CheckpointValueError
    for a number that is none.
    """
    checked_int("requests", requests, unit="requests")
    checked_int("suffix", suffix)
    checked_int("turns", turns, unit="turns")
    for name, tokens in (("prefix", prefix), ("output", output), ("turn", turn)):
        checked_int(name, tokens, least=0)
    _part("edits", edits)
    rng, used = Random(seed), [0]
    chosen = _groups(rng, -(-requests // turns), groups, zipf)
    shared = []
    for _ in range(groups):
        text = Text(used, checked_int("grain", grain))
        text.grow(prefix)
        shared.append(text)
    texts = [shared[group].copy() for group in chosen]
    rows = TraceRows(f"shared:{requests}", grain)
    for at in range(turns):
        for chat, text in enumerate(texts[: requests - len(rows.prompt)]):
            if at and rng.random() < edits:
                tokens = text.tokens
                text.cut(rng.randint(prefix + 1, tokens))
                text.grow(tokens - text.tokens)
            before = text.tokens
            text.grow(turn if at else suffix)
            runs = [list(run) for run in text.runs]
            rows.add(
                *(len(rows.prompt), text.tokens, output),
                runs=runs,
                conversation=chat,
                message=before,
            )
            text.grow(output)
    return rows.link()


def _part(name: str, part: float) -> None:
    if not 0 <= part <= 1:
        raise CheckpointValueError(f"{name} is {part}; expected a part from 0 to 1. Try 0.5.")


def _groups(rng: Random, conversations: int, groups: int, zipf: float) -> list[int]:
    """The group of each conversation."""
    checked_int("groups", groups, unit="groups")
    if not zipf >= 0:
        raise CheckpointValueError(f"zipf is {zipf}; expected a number of at least 0. Try 1.0.")
    if zipf:
        weights = list(accumulate(1 / rank**zipf for rank in range(1, groups + 1)))
        return rng.choices(range(groups), cum_weights=weights, k=conversations)
    chosen = [number % groups for number in range(conversations)]
    rng.shuffle(chosen)
    return chosen


def generate_lengths(
    path: str | Path,
    *,
    seed: int = 0,
    grain: int = 16,
    share: float = 0.5,
    groups: int = 64,
    zipf: float = 0.0,
) -> Trace:
    """Return a load with the lengths and times of a log that has no prefixes.

    >>> generate_lengths("BurstGPT_1.csv", share=0.5, groups=64)  # doctest: +SKIP

    ``path``: a table of BurstGPT or Azure (.csv, .gz or not), or JSON rows with ``input_length``
    and ``output_length``. The sharing is made up, as in `generate_shared`: each request is of a
    group, and the first ``share`` of its prompt is that of the group's prefix. Rows of no prompt
    tokens, as failed requests have them, are left out. Sessions become conversations, whose turns
    share no more than others. The same seed gives the same trace. Raises CheckpointValueError with
    file, line and field for malformed rows, OSError for what cannot be read.
    """
    path = Path(path)
    _part("share", share)
    told = list(read_lengths(path))
    kept = [lengths for lengths in told if lengths.prompt]
    if not kept:
        raise CheckpointValueError(
            f"{path.name} has no request with prompt tokens; expected at least one. "
            "Try another file."
        )
    chosen = _groups(Random(seed), len(kept), groups, zipf)
    rows = TraceRows(f"lengths:{path.name}", checked_int("grain", grain))
    room = max(lengths.prompt for lengths in kept) // grain  # block numbers of each group
    fresh, chats = groups * room, dict[str, int]()
    for group, lengths in zip(chosen, kept, strict=True):
        blocks = lengths.prompt // grain
        common = min(int(share * lengths.prompt) // grain, blocks)
        runs: Runs = [[group * room, common], [fresh, blocks - common]]
        chat = -1
        if lengths.session is not None:
            chat = chats.setdefault(lengths.session, len(chats))
        rows.add(
            *(lengths.arrival, lengths.prompt, lengths.output),
            runs=[run for run in runs if run[1]],
            conversation=chat,
        )
        fresh += blocks - common
    notes = [f"the sharing is made up: groups={groups}, {100 * share:g} % of each prompt"]
    if len(told) > len(kept):
        notes.append(f"left out: rows of no prompt tokens ({len(told) - len(kept):,})")
    return rows.link(notes)
