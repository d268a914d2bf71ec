"""The story of notebook 04: its three requests, told as tables, lanes, answers and prices.

Three requests follow one conversation. B resumes inside a block where A left a state, and C is
promised the state at that block's end.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from mambackpt.engine import (
    Allocated,
    Counts,
    Event,
    Hit,
    Keyed,
    Request,
    Run,
    Scheduled,
    Settings,
    Written,
    check_lockstep,
    simulate,
)

FIXES = ("keep-the-stop", "refuse-inside-block", "never-key-the-left-block")


def three_requests(shared: int = 139, length: int = 400, third: int = 130) -> list[Request]:
    """Return requests A, B and C: how much B shares with A, how long B is, how much C shares.

    >>> [(request.name, len(request.prompt)) for request in three_requests()]
    [('A', 100), ('B', 400), ('C', 140)]

    In tokens; A has 100 of them and an answer of 41, C adds ten of its own.
    """
    first = Request("A", range(100), range(1000, 1041))
    second = Request("B", [*first.history[:shared], *range(2000, 2000 + length - shared)])
    return [first, second, Request("C", [*first.history[:third], *range(3000, 3010)])]


def told(run: Run) -> list[tuple[str, str]]:
    """Return who did what in a run of recurrent layers, in the order in which it happened.

    >>> told(simulate([Request("A", range(100))], Settings()))[-1]
    ('allocator', 'key 96 leads to block 3')
    """
    return [row for row in map(_who_did_what, run.events) if row]


def _who_did_what(event: Event) -> tuple[str, str] | None:
    match event:
        case Scheduled(start=start, end=end):
            return "scheduler", f"tokens {start} to {end} run in this step"
        case Allocated(group=1, column=column, block=block, role=role):
            return "allocator", f"column {column} gets block {block}: {role}"
        case Written(column=column, position=position):
            return "worker", f"writes the state after {position} tokens into column {column}"
        case Keyed(group=1, block=block, position=position):
            return "allocator", f"key {position} leads to block {block}"
    return None


def violation_rows(run: Run) -> list[tuple[int, str, str, str, str]]:
    """Return what the lockstep check found: step, request, kind, promised, held.

    >>> [row[1:3] for row in violation_rows(simulate(three_requests(), Settings(max_running=1)))]
    [('B', 'mislabelled'), ('C', 'wrong restore')]
    """
    return [
        (
            found.step,
            found.request,
            found.kind,
            f"the state after {found.claimed}",
            "nothing" if found.held is None else f"the state after {found.held}",
        )
        for found in run.violations
    ]


def step_ends(run: Run, name: str) -> list[int]:
    """Return after how many tokens each query of a request ends.

    >>> step_ends(simulate([Request("A", range(100))], Settings()), "A")
    [100]
    """
    return [e.end for e in run.events if isinstance(e, Scheduled) and e.request == name]


def hits_of(run: Run) -> dict[str, int]:
    """Return after how many tokens each request resumes, where it does.

    >>> hits_of(simulate(three_requests(), Settings(max_running=1)))
    {'B': 96, 'C': 128}
    """
    return {e.request: e.position for e in run.events if isinstance(e, Hit)}


def answer_rows(settings: Settings) -> list[tuple[str, str, int]]:
    """Return C's first five tokens: alone, without checkpoints inside a step, and as released.

    >>> rows = answer_rows(Settings(max_running=1, recurrence=True))
    >>> rows[0][1] == rows[1][1] != rows[2][1]
    True

    Needs ``recurrence=True``: tokens come from the state that a request really has.
    """
    requests = three_requests()
    cases: list[tuple[str, Sequence[Request], bool]] = [
        ("C alone, no cache", requests[2:], True),
        ("all three, no checkpoints inside a step", requests, False),
        ("all three, as released", requests, True),
    ]
    rows = []
    for name, (*before, last), internal in cases:
        chosen = replace(settings, internal_checkpoints=internal)
        run = simulate([*before, replace(last, output=5)], chosen)
        tokens = " ".join(f"{token:,}" for token in run.outputs["C"])
        rows.append((name, tokens, run.counts.wrong_restores))
    return rows


def count_variants(
    chats: Sequence[Sequence[Request]], settings: Settings
) -> dict[str, dict[str, Counts]]:
    """Return the counts of five variants of the rules, under two retentions, on the same chats.

    >>> from mambackpt.engine import branching_chats
    >>> counts = count_variants([branching_chats(0)], Settings(budget=300, max_running=1))
    >>> list(counts)[0], list(counts["vllm-0.33"])
    ('vllm-0.33', ['R = 0', 'dense'])

    The released rules, the three fixes, and the released rules without checkpoints inside a step.
    """
    retentions = {"R = 0": 0, "dense": None}
    cases = {name: replace(settings, variant=name) for name in ("vllm-0.33", *FIXES)}
    cases["without checkpoints"] = replace(settings, internal_checkpoints=False)
    return {
        name: {
            word: check_lockstep(chats, replace(chosen, retention=kept), shrink=False).counts
            for word, kept in retentions.items()
        }
        for name, chosen in cases.items()
    }


def price_rows(counts: dict[str, dict[str, Counts]]) -> list[tuple[str, str, int, str, int, str]]:
    """Return what each variant costs, in prefill chunks and reused tokens, against the released.

    >>> from mambackpt.engine import branching_chats
    >>> settings = Settings(budget=300, max_running=1)
    >>> price_rows(count_variants([branching_chats(0)], settings))[0][3]
    '+0.0%'
    """
    rows = []
    for setting in counts["vllm-0.33"]:
        released = counts["vllm-0.33"][setting]
        for name, mine in counts.items():
            chunks = mine[setting].prefill_chunks
            reused = mine[setting].reused_tokens
            change = f"{chunks / released.prefill_chunks - 1:+.1%}"
            loss = f"{reused / released.reused_tokens - 1:+.2%}"
            rows.append((name, setting, chunks, change, reused, loss))
    return rows


def wrong_answers(chats: Sequence[Sequence[Request]], settings: Settings) -> tuple[int, int]:
    """Return how many requests begin with another token than under a fix, and how many restores
    were wrong.

    >>> from mambackpt.engine import branching_chats
    >>> wrong_answers([branching_chats(2)], Settings(budget=300, max_running=1, recurrence=True))
    (3, 3)

    Needs ``recurrence=True``.
    """
    differ = wrong = 0
    for chat in chats:
        served = simulate(chat, settings)
        right = simulate(chat, replace(settings, variant=FIXES[0]))
        pairs = zip(served.outputs.values(), right.outputs.values(), strict=True)
        differ += sum(one[0] != other[0] for one, other in pairs)
        wrong += served.counts.wrong_restores
    return differ, wrong


def sighting_rows(
    chats: Sequence[Sequence[Request]], settings: Settings, counts: dict[str, dict[str, Counts]]
) -> list[tuple[str, str, str]]:
    """Return five ways to look at the fault, what each shows with R = 0, and whether it catches.

    >>> from mambackpt.engine import branching_chats
    >>> settings, chats = Settings(budget=300, max_running=1), [branching_chats(0)]
    >>> [row[2] for row in sighting_rows(chats, settings, count_variants(chats, settings))]
    ['no', 'no', 'no', 'if lucky', 'yes']
    """
    broken, fixed = counts["vllm-0.33"]["R = 0"], counts[FIXES[0]]["R = 0"]
    shared = seen = 0
    for chat in chats:
        run = simulate(chat, settings)
        seen += run.counts.wrong_restores > 0
        shared += sum(_is_shared(e, chat) for e in run.events if isinstance(e, Hit))
    keys = broken.mislabelled + broken.inherited
    many: Callable[[int], str] = "{:,}".format
    return [
        ("hit rate", f"{broken.hits} hit, and {fixed.hits} with a fix", "no"),
        (
            "tokens reused",
            f"{many(broken.reused_tokens)}, and {many(fixed.reused_tokens)} with a fix",
            "no",
        ),
        ("the tokens of every hit", f"{shared} of {broken.hits} hits share them", "no"),
        ("answers of one chat", f"{seen} of {len(chats)} chats can show it", "if lucky"),
        ("promised = held, after each step", f"{keys} wrong keys, as they are entered", "yes"),
    ]


def _is_shared(hit: Hit, chat: Sequence[Request]) -> bool:
    """Whether an earlier request began with the tokens of a hit."""
    place = [request.name for request in chat].index(hit.request)
    prefix = chat[place].prompt[: hit.position]
    return any(earlier.history[: hit.position] == prefix for earlier in chat[:place])
