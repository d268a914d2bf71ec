"""The checkers of exercises: an answer, a function, or a reader's own scheduler rules."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from mambackpt.engine import (
    Query,
    Request,
    Settings,
    Simulation,
    Variant,
    check_lockstep,
    find_variant,
)
from mambackpt.errors import CheckpointValueError


@dataclass(frozen=True, slots=True, repr=False)
class Verdict:
    """What a checker says; ``right`` is None before there is an answer."""

    right: bool | None
    sentence: str

    def __bool__(self) -> bool:
        return self.right is True

    def __repr__(self) -> str:
        return self.sentence


_UNANSWERED = Verdict(None, "No answer yet. Replace the ... and run it again.")


def check_answer(answer: object, right: object, *, hint: str) -> Verdict:
    """Return whether an exercise's answer is right; where it is not, the hint.

    >>> check_answer(..., 7680, hint="Count whole blocks.")
    No answer yet. Replace the ... and run it again.
    >>> check_answer(8000, 7680, hint="Count whole blocks.")
    Not yet: 8000. Count whole blocks.
    >>> bool(check_answer(7680, 7680, hint="Count whole blocks."))
    True

    A number is right as whatever kind of number it comes (784.0, or numpy's 784), a list as a tuple
    or an array; True is no number.
    """
    if answer is ...:
        return _UNANSWERED
    mine = _plain(answer)
    if _kind(mine) == _kind(right) and mine == _plain(right):
        return Verdict(True, f"Right: {right!r}.")
    return Verdict(False, f"Not yet: {answer!r}. {hint}")


def _plain(answer: object) -> object:
    """The answer without numpy's or torch's dress: numbers, and lists of them."""
    if hasattr(answer, "tolist"):
        answer = answer.tolist()
    return [_plain(part) for part in answer] if isinstance(answer, list | tuple) else answer


def _kind(answer: object) -> object:
    """What may be compared: a number with a number, never with True, and a list part by part."""
    if isinstance(answer, list | tuple):
        return [_kind(part) for part in answer]
    return float if type(answer) in (int, float) else type(answer)


def check_function(
    mine: Callable[..., Any], truth: Callable[..., Any], cases: Sequence[tuple[Any, ...]]
) -> Verdict:
    """Return whether a function answers every case as the truth does; else the first that differs.

    >>> check_function(lambda n: n // 2, lambda n: -(-n // 2), [(2,), (3,)])
    Not yet: for (3,) yours gives 1, the rule 2.
    >>> check_function(lambda n: (n + 1) // 2, lambda n: -(-n // 2), [(2,), (3,)])
    Right: the same in all 2 cases.

    Raises CheckpointValueError without cases: that check could not fail.
    """
    if not cases:
        raise CheckpointValueError("cases is empty; expected at least one. Try [(8000, 1536)].")
    for case in cases:
        answer, right = mine(*case), truth(*case)
        if answer is ...:
            return _UNANSWERED
        if answer != right:
            words = f"for {case} yours gives {answer!r}, the rule {right!r}."
            return Verdict(False, f"Not yet: {words}")
    return Verdict(True, f"Right: the same in all {len(cases)} cases.")


_LEAST_REUSE = 0.98  # of the released rules' reused tokens: a fix that keys nothing is none


class Prefix(NamedTuple):
    """A token history: its length, and a number that only the same tokens have."""

    tokens: int
    history: int


@dataclass(frozen=True, slots=True)
class KeyedBlock:
    """One block after one step: the prefixes that its keys promise, and the one that it holds.

    ``holds`` is None where nothing was ever written.
    """

    block: int
    promises: tuple[Prefix, ...]
    holds: Prefix | None


def keeps_promises(block: KeyedBlock) -> bool:
    """Return whether a block holds what each of its keys promises.

    >>> keeps_promises(KeyedBlock(1, (Prefix(128, 7),), Prefix(128, 7)))
    True
    >>> keeps_promises(KeyedBlock(1, (Prefix(128, 7),), Prefix(96, 5)))
    False
    """
    return all(promised == block.holds for promised in block.promises)


def _keyed_blocks(requests: Iterable[Request], settings: Settings) -> list[KeyedBlock]:
    """Run the requests and return every keyed block, each time that its keys or content change.

    >>> [block] = _keyed_blocks([Request("A", range(100))], Settings())
    >>> block.promises[0], block.holds
    (Prefix(tokens=96, history=0), Prefix(tokens=96, history=0))

    Recurrent groups only. Histories are numbered as they are met, so they compare within one list.
    """
    numbers: dict[int, int] = {}

    def prefix(tokens: int, digest: int) -> Prefix:
        return Prefix(tokens, numbers.setdefault(digest, len(numbers)))

    simulation = Simulation(requests, settings)
    seen: dict[KeyedBlock, None] = {}
    for _ in simulation:
        blocks = dict.fromkeys(block for group in simulation.recurrent for block, _ in group.index)
        for block in blocks:
            promises = tuple(prefix(*claim) for claim in sorted(block.claims.values()))
            held = block.content
            holds = None if held is None else prefix(held.tokens, held.digest)
            seen[KeyedBlock(block.id, promises, holds)] = None
    return list(seen)


def invariant_cases(requests: Iterable[Request], settings: Settings) -> list[tuple[KeyedBlock]]:
    """Return the blocks of a run, and those that a run need not lead to, as a check's arguments.

    >>> [len(case) for case in invariant_cases([Request("A", range(100))], Settings())]
    [1, 1, 1, 1, 1]

    The last four: never written; other tokens of the same length; two keys of which the second, or
    the first, is wrong.
    """
    right, other, shorter = Prefix(128, -1), Prefix(128, -2), Prefix(96, -3)
    planted = [
        KeyedBlock(901, (right,), None),
        KeyedBlock(902, (right,), other),
        KeyedBlock(903, (shorter, right), shorter),
        KeyedBlock(904, (shorter, right), right),
    ]
    return [(block,) for block in (*_keyed_blocks(requests, settings), *planted)]


def judge_variant(
    variant: Variant, histories: Sequence[Sequence[Request]], settings: Iterable[Settings]
) -> tuple[bool | None, str]:
    """Return whether rules break no promise and still reuse what can be reused, and a sentence.

    >>> from mambackpt.engine import branching_chats
    >>> settings = Settings(max_running=1, budget=300)
    >>> print(judge_variant(find_variant("keep-the-stop"), [branching_chats(2)], [settings])[1])
    Right: no promise is broken, and 100.0 % of the released reuse is left.

    Not right are rules that break a promise in any of the settings, or that reuse fewer than 98 %
    of the tokens that the released ones do. None where ``variant.keys_block`` has no answer yet.
    """
    if variant.keys_block(0, Query(0, 65, 65, 64, 16, 64, 16, False)) is ...:  # type: ignore[comparison-overlap]
        return None, "No answer yet. Replace the ... and run it again."
    least = 1.0
    for chosen in settings:
        retention = "dense retention" if chosen.retention is None else f"R = {chosen.retention}"
        mine, released = (
            check_lockstep(histories, replace(chosen, variant=v), shrink=False)
            for v in (variant, find_variant("vllm-0.33"))
        )
        if mine.violations:
            first = mine.violations[0]
            return False, f"Not yet: under {retention}, {len(mine.violations)} violations. {first}."
        left = mine.counts.reused_tokens / max(1, released.counts.reused_tokens)
        if left < _LEAST_REUSE:
            return False, (
                f"Not yet: no promise is broken, but under {retention} only {100 * left:.1f} % of "
                "the released reuse is left. Which right keys are lost? A decode step starts "
                "inside a block, too."
            )
        least = min(least, left)
    share = f"{100 * least:.1f} % of the released reuse is left"
    return True, f"Right: no promise is broken, and {share}."
