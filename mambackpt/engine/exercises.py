"""Exercises on the lockstep check: the cases of a reader's own check, a judge of their rules."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from mambackpt.engine.blocks import Block
from mambackpt.engine.report import check_lockstep
from mambackpt.engine.settings import Request, Settings
from mambackpt.engine.simulation import Simulation
from mambackpt.engine.variants import Query, Rules, find_rules

LEAST_REUSE = 0.98  # of the released rules' reused tokens: a fix that keys nothing is none


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


def keyed_blocks(requests: Iterable[Request], settings: Settings) -> list[KeyedBlock]:
    """Run the requests and return every keyed block, each time that its keys or content change.

    >>> [block] = keyed_blocks([Request("A", range(100))], Settings())
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
        found: dict[Block, None] = dict.fromkeys(
            block for group in simulation.recurrent for block, _ in group.index
        )
        for block in found:
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
    made = [
        KeyedBlock(901, (right,), None),
        KeyedBlock(902, (right,), other),
        KeyedBlock(903, (shorter, right), shorter),
        KeyedBlock(904, (shorter, right), right),
    ]
    return [(block,) for block in (*keyed_blocks(requests, settings), *made)]


def judge_rules(
    rules: Rules, histories: Sequence[Sequence[Request]], settings: Iterable[Settings]
) -> tuple[bool | None, str]:
    """Return whether rules break no promise and still reuse what can be reused, and a sentence.

    >>> from mambackpt.engine.chats import branching_chats
    >>> settings = Settings(max_running=1, budget=300)
    >>> print(judge_rules(find_rules("keep-the-stop"), [branching_chats(2)], [settings])[1])
    Right: no promise is broken, and 100.0 % of the released reuse is left.

    Not right are rules that break a promise in any of the settings, or that reuse fewer than 98 %
    of the tokens that the released ones do. None where ``rules.keys_block`` has no answer yet.
    """
    if rules.keys_block(0, Query(0, 65, 65, 64, 16, 64, 16, False)) is ...:  # type: ignore[comparison-overlap]
        return None, "No answer yet. Replace the ... above, and run both cells again."
    least = 1.0
    for chosen in settings:
        retention = "dense retention" if chosen.retention is None else f"R = {chosen.retention}"
        mine, released = (
            check_lockstep(histories, replace(chosen, rules=r), shrink=False)
            for r in (rules, find_rules("vllm-0.33"))
        )
        if mine.violations:
            first = mine.violations[0]
            return False, f"Not yet: under {retention}, {len(mine.violations)} violations. {first}."
        left = mine.counts.reused_tokens / max(1, released.counts.reused_tokens)
        if left < LEAST_REUSE:
            return False, (
                f"Not yet: no promise is broken, but under {retention} only {100 * left:.1f} % of "
                "the released reuse is left. Which right keys are lost? A decode step starts "
                "inside a block, too."
            )
        least = min(least, left)
    share = f"{100 * least:.1f} % of the released reuse is left"
    return True, f"Right: no promise is broken, and {share}."
