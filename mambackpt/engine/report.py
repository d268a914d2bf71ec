"""The lockstep check over many histories, the smallest failing one, and the price of a fix."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import takewhile
from typing import get_args

from mambackpt.engine.lockstep import Counts, Kind, Violation
from mambackpt.engine.settings import Request, Settings
from mambackpt.engine.simulation import Simulation
from mambackpt.engine.variants import VARIANTS

_GRAVER = get_args(Kind)


def _gravity(kind: Kind) -> int:
    """Order the kinds as they are declared: what reaches an output comes first."""
    return _GRAVER.index(kind)


@dataclass(frozen=True, slots=True)
class Report:
    """What `check_lockstep` found: added counts, every violation, and the smallest history.

    ``smallest`` is a shrunk history that still breaks the same promise, None where none broke;
    ``broken`` are its violations. Chunks and tokens of two reports are the price of a fix.
    """

    settings: Settings
    counts: Counts
    violations: tuple[Violation, ...]
    smallest: tuple[Request, ...] | None
    broken: tuple[Violation, ...]


def check_lockstep(
    histories: Iterable[Sequence[Request]], settings: Settings, *, shrink: bool = True
) -> Report:
    """Run each history through an engine of its own and add up what the lockstep check says.

    >>> from mambackpt.engine.chats import branching_chats
    >>> chats = [branching_chats(seed) for seed in range(3)]
    >>> report = check_lockstep(chats, Settings(max_running=1, budget=300, variant="keep-the-stop"))
    >>> report.counts.requests, report.counts.wrong_restores, report.smallest
    (72, 0, None)

    A history is what `simulate` takes. With ``shrink=False`` the smallest history is not sought.
    """
    counts, violations = Counts(), list[Violation]()
    failing: Sequence[Request] = ()
    worst = len(_GRAVER)
    for history in histories:
        simulation = Simulation(history, settings)
        for _ in simulation:
            pass
        for field in fields(Counts):
            added = getattr(counts, field.name) + getattr(simulation.counts, field.name)
            setattr(counts, field.name, added)
        violations += simulation.violations
        gravity = min((_gravity(found.kind) for found in simulation.violations), default=worst)
        if gravity < worst:
            failing, worst = history, gravity
    if not (failing and shrink):
        return Report(settings, counts, tuple(violations), None, ())
    smallest = shrink_history(failing, settings)
    return Report(
        settings, counts, tuple(violations), smallest, tuple(_violations(smallest, settings))
    )


def compare_variants(
    histories: Iterable[Sequence[Request]],
    settings: Settings,
    variants: Iterable[str] | None = None,
) -> dict[str, Report]:
    """Return a report per variant on the same histories; default: every named one.

    >>> history = [Request("A", range(100), 41)]
    >>> list(compare_variants([history], Settings(), ["vllm-0.33", "keep-the-stop"]))
    ['vllm-0.33', 'keep-the-stop']
    """
    given = list(histories)
    names = list(VARIANTS) if variants is None else list(variants)
    return {
        name: check_lockstep(given, replace(settings, variant=name), shrink=False) for name in names
    }


def _violations(requests: Sequence[Request], settings: Settings) -> list[Violation]:
    simulation = Simulation(requests, settings)
    for _ in simulation:
        pass
    return simulation.violations


def shrink_history(requests: Sequence[Request], settings: Settings) -> tuple[Request, ...]:
    """Return a smaller history that breaks the same promise: fewer requests, fewer tokens.

    >>> A = Request("A", range(100), range(200, 241))
    >>> B = Request("B", [*A.history[:139], *range(300, 700)])
    >>> C = Request("C", [*A.history[:130], *range(700, 800)])
    >>> [len(r.prompt) for r in shrink_history([A, B, C], Settings(max_running=1))]
    [34, 129, 65]

    The promise is the gravest one broken: a wrong restore before a wrong key. No single request,
    and no single token at the end of a prompt, at the end of an output or at the front of all
    prompts can be left out of the result. A history without violations is returned as it is.
    """
    found = [violation.kind for violation in _violations(requests, settings)]
    if not found:
        return tuple(requests)
    kind = min(found, key=_gravity)

    def fails(candidate: Sequence[Request]) -> bool:
        return any(violation.kind == kind for violation in _violations(candidate, settings))

    history = tuple(requests)
    while True:
        smaller = _shrink_once(history, fails)
        if smaller == history:
            return history
        history = smaller


def _shrink_once(
    history: tuple[Request, ...], fails: Callable[[Sequence[Request]], bool]
) -> tuple[Request, ...]:
    """Try each way to leave something out, large pieces first."""
    for piece in _halves(len(history)):
        place = 0
        while place < len(history):
            candidate = history[:place] + history[place + piece :]
            if candidate and fails(candidate):
                history = candidate
            else:
                place += piece
    plain = tuple(
        Request(r.name, r.prompt, r.output, abort_at=r.abort_at, preempt_at=r.preempt_at)
        for r in history
    )
    if plain != history and fails(plain):
        history = plain
    for piece in _halves(_shared(*(request.prompt for request in history))):
        while piece < _shared(*(request.prompt for request in history)):
            candidate = tuple(replace(r, prompt=r.prompt[piece:]) for r in history)
            if not fails(candidate):
                break
            history = candidate
    for place in range(len(history)):
        for shorter in (_shorter_output, _shorter_prompt):
            for piece in _halves(len(history[place].prompt) + history[place].output_length):
                while (request := shorter(history[place], piece)) is not None:
                    candidate = (*history[:place], request, *history[place + 1 :])
                    if not fails(candidate):
                        break
                    history = candidate
    return history


def _shared(*sequences: Sequence[int]) -> int:
    """Return how many tokens all of these begin with."""
    columns = zip(*sequences, strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))


def _halves(length: int) -> Iterator[int]:
    while length > 0:
        yield length
        length //= 2


def _shorter_output(request: Request, piece: int) -> Request | None:
    left = request.output_length - piece
    if left < 1:
        return None
    return replace(request, output=request.forced[:left] if request.forced else left)


def _shorter_prompt(request: Request, piece: int) -> Request | None:
    left = len(request.prompt) - piece
    return replace(request, prompt=request.prompt[:left]) if left >= 1 else None


def describe_history(requests: Sequence[Request]) -> list[str]:
    """Return a line per request that a person can rebuild the history from.

    >>> A, B = Request("A", range(100), 3), Request("B", [*range(90), *range(500, 530)])
    >>> describe_history([A, B])
    ['A: 100 tokens in, 3 out', 'B: 120 tokens in, 1 out; shares its first 90 with A']

    What is shared is counted against prompt and given output of every earlier request; the longest
    counts, of equals the first.
    """
    lines = []
    for place, request in enumerate(requests):
        line = f"{request.name}: {len(request.prompt)} tokens in, {request.output_length} out"
        shared = [
            (_shared(other.history, request.prompt), -n, other.name)
            for n, other in enumerate(requests[:place])
        ]
        length, _, name = max(shared, default=(0, 0, ""))
        lines.append(f"{line}; shares its first {length} with {name}" if length else line)
    return lines
