"""Keys against states for llama.cpp: does a checkpoint hold the tokens that its place promises?

A checkpoint's key is its place: a prompt that shares n tokens with the context resumes at the
newest checkpoint at or below n, and takes for granted that its state has read just these tokens.
`WatchedSlot` notes what every state has really read and compares. The server erases what lies above
the resume position, but not a checkpoint exactly one token above it; that one has read a token of
another prompt, and serves whoever comes by next.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from mambackpt.replay.serve.llama_cpp import NOTHING, LlamaCppSettings, Prompt, Slot, State
from mambackpt.replay.serve.requests import Served, TokenRequest, shared_length

History: TypeAlias = "tuple[tuple[int, ...], ...]"  # prompts, in order; one output each


@dataclass(frozen=True, slots=True)
class StaleRestore:
    """A request that resumed after a state which had read other tokens than the prompt's.

    ``request`` and ``maker`` (of the state) are places in the history, from 0; ``position`` is
    where it resumed, ``token`` the first place that the state had read otherwise.
    """

    request: int
    maker: int
    position: int
    token: int

    @property
    def after_resuming(self) -> bool:
        """Whether the state outlived a prompt that resumed, and is itself the first wrong one."""
        return 1 < self.position == self.token + 1

    def __str__(self) -> str:
        return (
            f"{_name(self.request)} resumes after {self.position} tokens, but the state that "
            f"{_name(self.maker)} made has read another token {self.token}"
        )


class WatchedSlot(Slot):
    """A slot that notes which ids each state has read, and restores that were wrong."""

    def __init__(self, settings: LlamaCppSettings, *, strict: bool = False) -> None:
        super().__init__(settings)
        self.spared = 0 if strict else Slot.spared
        self.read: dict[State, tuple[int, ...]] = {}
        self.wrong: list[StaleRestore] = []
        self.resumed = NOTHING
        self.now: Sequence[int] = ()  # the ids of the prompt, then of what it leaves behind

    def serve(self, prompt: Prompt) -> Served:
        """Serve one prompt and note what its live end has read."""
        self.now = prompt.after
        served = super().serve(prompt)
        self.read[self.context.live] = self.content(prompt.live)
        return served

    def content(self, position: int) -> tuple[int, ...]:
        """What the running state has read when it comes to a position."""
        before = self.read.get(self.resumed, ())
        return (*before, *self.now[self.resumed.position : position])

    def restore(self, shared: int, prompt: Prompt) -> State:
        """Restore, and compare what the state has read with what the prompt begins with."""
        state = super().restore(shared, prompt)
        self.resumed = state if state.position < prompt.length else NOTHING
        same = shared_length(self.read.get(state, ()), prompt.ids[: state.position])
        if same < min(state.position, prompt.length - 1):
            self.wrong.append(
                StaleRestore(self.request - 1, state.request - 1, state.position, same)
            )
        return state

    def create(self, position: int) -> None:
        """Create, and note what the state has read."""
        super().create(position)
        self.read[self.context.checkpoints[-1]] = self.content(position)


def watch_states(
    history: Iterable[Sequence[int]], settings: LlamaCppSettings, *, strict: bool = False
) -> tuple[list[Served], list[StaleRestore]]:
    """Serve prompts of one output each; return the answers and the restores that were wrong.

    >>> A = range(100)
    >>> B = [*A[:99], 200, 201]
    >>> C = [*A[:96], *[210] * 104]
    >>> D = [*C[:110], 220]
    >>> settings = LlamaCppSettings(batch=64, ubatch=64)
    >>> for wrong in watch_states([A, B, C, D], settings)[1]:
    ...     print(wrong)
    D resumes after 97 tokens, but the state that B made has read another token 96
    >>> watch_states([A, B, C, D], settings, strict=True)[1]
    []

    ``strict`` erases the checkpoint right above the resume position too.
    """
    slot = WatchedSlot(settings, strict=strict)
    served = [slot.serve(Prompt.of(TokenRequest(tokens, outputs=(0,)))) for tokens in history]
    return served, slot.wrong


def random_prompts(seed: int, longest: int = 60) -> History:
    """Return four to twelve prompts, most of which go on from an earlier one or leave it.

    >>> [len(tokens) for tokens in random_prompts(1)]
    [2, 4, 6, 1, 1, 2]

    They leave it where it ends, near its end or further up; ``longest`` is the most that one adds.
    """
    random = Random(seed)
    prompts: list[tuple[int, ...]] = []
    for number in range(random.randint(4, 12)):
        earlier = random.choice(prompts[-4:]) if prompts and random.random() < 0.95 else ()
        kept = len(earlier) - random.choice((0, random.randint(0, 6), random.randint(0, 40)))
        more = random.choice((1, 2, random.randint(1, longest)))
        prompts.append((*earlier[: max(kept, 0)], *[number] * more))
    return tuple(prompts)


@dataclass(frozen=True, slots=True)
class StaleReport:
    """What `check_states` counted, and the smallest histories with a wrong restore.

    ``wrong``: restores of a state that had read other tokens; ``wrong_if_strict``: how many are
    left when the checkpoint right above the resume position is erased too. ``smallest`` is about a
    state that outlived a resume, ``from_nothing`` about one that outlived a prompt which resumed
    nowhere; each is empty where there is none.
    """

    settings: LlamaCppSettings
    histories: int
    requests: int
    hits: int
    reused_tokens: int
    wrong: int
    wrong_if_strict: int
    smallest: History
    from_nothing: History


def check_states(histories: Iterable[History], settings: LlamaCppSettings) -> StaleReport:
    """Serve each history with a slot of its own and add up what the states have read.

    >>> report = check_states(map(random_prompts, range(200)), LlamaCppSettings(batch=8, ubatch=4))
    >>> report.wrong > 0, report.wrong_if_strict, sum(map(len, report.from_nothing))
    (True, 0, 7)
    """
    count = requests = hits = reused = total = strictly = 0
    failing: dict[bool, list[History]] = {True: [], False: []}
    for history in histories:
        served, wrong = watch_states(history, settings)
        count, requests = count + 1, requests + len(history)
        hits += sum(one.reused > 0 for one in served)
        reused += sum(one.reused for one in served)
        total += len(wrong)
        strictly += len(watch_states(history, settings, strict=True)[1])
        for kind in {one.after_resuming for one in wrong}:
            failing[kind].append(history)
    smallest, from_nothing = (_smallest(failing[kind], settings, kind) for kind in (True, False))
    return StaleReport(
        settings, count, requests, hits, reused, total, strictly, smallest, from_nothing
    )


def _smallest(failing: list[History], settings: LlamaCppSettings, after_resuming: bool) -> History:
    """The smallest of what a few failing histories shrink to."""
    few = sorted(failing, key=_size)[:6]
    shrunk = [shrink(history, settings, after_resuming=after_resuming) for history in few]
    return min(shrunk, key=_size, default=())


def _size(history: History) -> tuple[int, int]:
    return len(history), sum(map(len, history))


def shrink(history: History, settings: LlamaCppSettings, *, after_resuming: bool) -> History:
    """Return a smaller history with such a restore: fewer prompts, then fewer tokens.

    Nothing that `_smaller` leaves out can be left out of the result.
    """

    def fails(candidate: History) -> bool:
        _, wrong = watch_states(candidate, settings)
        return any(one.after_resuming == after_resuming for one in wrong)

    while True:
        better = next(filter(fails, _smaller(history)), None)
        if better is None:
            return history
        history = better


def _smaller(history: History) -> Iterator[History]:
    """Ways to leave something out, the largest first: a prompt, a common beginning, an end."""
    for place in range(len(history)):
        yield history[:place] + history[place + 1 :]
    common = min(shared_length(history[0], tokens[:-1]) for tokens in history)
    for piece in _halves(common):
        yield tuple(tokens[piece:] for tokens in history)
    for place, tokens in enumerate(history):
        for piece in _halves(len(tokens) - 1):
            yield (*history[:place], tokens[:-piece], *history[place + 1 :])


def _halves(length: int) -> Iterator[int]:
    while length > 0:
        yield length
        length //= 2


def describe_prompts(history: History) -> list[str]:
    """Return a line per prompt that a person can rebuild the history from.

    >>> describe_prompts(((1, 2, 3), (1, 2, 9, 9)))
    ['A: 3 tokens', 'B: 4 tokens, the first 2 those of A']
    """
    lines = []
    for place, tokens in enumerate(history):
        shared, earlier = max(
            ((shared_length(tokens, history[n]), -n) for n in range(place)), default=(0, 0)
        )
        line = f"{_name(place)}: {len(tokens)} tokens"
        lines.append(f"{line}, the first {shared} those of {_name(-earlier)}" if shared else line)
    return lines


def _name(place: int) -> str:
    """A to Z, then A1 to Z1."""
    return chr(ord("A") + place % 26) + (str(place // 26) if place >= 26 else "")
