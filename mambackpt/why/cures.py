"""Which setting would have hit? A search over what an operator can set, ranked by its price."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

from mambackpt.engine import Settings
from mambackpt.errors import CheckpointError
from mambackpt.why.prompts import HitVerdict, Prompt, explain_hit, measured

_RULES = ("last", "last+junction", "last+junction+chunk", "all")


@dataclass(frozen=True, slots=True)
class Cure:
    """Settings under which the prefix would be resumed, and what they cost.

    ``changes`` has the settings that differ, by the names of `Settings`, and ``rule``. The price:
    ``states`` written by a prompt that finds nothing, the ``chunks`` that it takes, and the tokens
    that the cured prompt still computes (``recomputed``): the second, or only the ``third``.
    """

    changes: Mapping[str, Any]
    states: int
    chunks: int
    recomputed: int
    third: bool

    @property
    def price(self) -> tuple[int, int, int, int]:
        """What cures are ranked by: states, chunks, tokens, and how many settings change."""
        return self.states, self.chunks, self.recomputed, len(self.changes)


def find_cures(
    first: Prompt,
    second: Prompt,
    settings: Settings | None = None,
    *,
    shared: int | None = None,
    rule: str | None = None,
    most: int = 3,
) -> list[Cure]:
    """Return the cheapest settings that let the second prompt, or the third, resume.

    >>> settings = Settings(mamba_block_size=528, hash_block_size=528, budget=2048,
    ...                     checkpoint_alignment=None)
    >>> for cure in find_cures(2200, 2200, settings, shared=1500, most=1):
    ...     print(dict(cure.changes), cure.states, cure.chunks, cure.recomputed, cure.third)
    {'retention': 1056, 'checkpoint_alignment': 16} 2 2 1144 False

    Searched over hash unit, kernel grid, retention, budget and the state kept at a junction inside
    a block, or over placement rule, hash unit and budget where a ``rule`` is given. Up to two
    settings change, none that the cure works without. A cure resumes at least where a state could
    serve within today's attention match; where one does already, it halves the loss. The ``most``
    cheapest for the second prompt come first, then those for the third, where a third does not hit
    already. Arguments and errors as `explain_hit`.
    """
    settings = settings or Settings()
    lengths, common = measured(first, second, shared)
    now = explain_hit(*lengths, settings, shared=common, rule=rule)
    if not now.lost:
        return []
    goal = now.best if now.joint < now.best else now.joint + (now.lost + 1) // 2
    cures: list[Cure] = []
    for changes in _changes(settings, rule, common):
        verdict = _under(changes, lengths, common, settings, rule)
        if verdict is None or max(verdict.joint, verdict.third) < goal:
            continue
        third = verdict.joint < goal
        resumed = verdict.third if third else verdict.joint
        rest = verdict.second - resumed
        cure = Cure(changes, len(verdict.states), verdict.chunks, rest, third)
        if not any(_needless(cure, smaller) for smaller in cures):
            cures.append(cure)
    cures.sort(key=lambda cure: cure.price)
    at_once = _distinct(cure for cure in cures if not cure.third)
    later = _distinct(cure for cure in cures if cure.third) if now.third < goal else []
    return at_once[:most] + later[:most]


def _needless(cure: Cure, smaller: Cure) -> bool:
    """Whether a part of the cure's changes does what it does, with no more states."""
    return (
        smaller.changes.items() <= cure.changes.items()
        and smaller.third <= cure.third
        and smaller.states <= cure.states
        and smaller.recomputed <= cure.recomputed
    )


def _distinct(cures: Iterable[Cure]) -> list[Cure]:
    """Of cures with one effect the first, which changes least."""
    effects: dict[tuple[int, int, int], Cure] = {}
    for cure in cures:
        effects.setdefault((cure.states, cure.chunks, cure.recomputed), cure)
    return list(effects.values())


def _under(
    changes: Mapping[str, Any],
    lengths: tuple[int, int],
    shared: int,
    settings: Settings,
    rule: str | None,
) -> HitVerdict | None:
    """The verdict under other settings; None where they contradict each other."""
    sizes = {name: value for name, value in changes.items() if name != "rule"}
    if "hash_block_size" in sizes:
        sizes |= {"cache_hit_alignment_tokens": None, "attention_block_size": None}
    try:
        chosen = replace(settings, **sizes)
        return explain_hit(*lengths, chosen, shared=shared, rule=changes.get("rule", rule))
    except CheckpointError:
        return None


def _changes(settings: Settings, rule: str | None, shared: int) -> Iterator[dict[str, Any]]:
    """One setting, then two at a time: every value that differs from what is set."""
    choices = _choices(settings, rule, shared)
    for count in (1, 2):
        for names in combinations(choices, count):
            for values in product(*(choices[name] for name in names)):
                yield dict(zip(names, values, strict=True))


def _choices(settings: Settings, rule: str | None, shared: int) -> dict[str, Sequence[Any]]:
    M, block = settings.mamba_block_size, settings.scheduler_block
    units = [n for n in range(16, M + 1, 16) if M % n == 0] or [M]
    budgets = {512, 1024, 2048, 4096, 8192, 16_384, M, 2 * M, 4 * M, shared // M * M}
    budgets = {budget for budget in budgets if budget >= min(M, settings.budget)}
    offered: dict[str, Sequence[Any]] = {
        "hash_block_size": units,
        "budget": sorted(budgets, reverse=True),
    }
    if rule is None:
        steps = {*(block << power for power in range(8)), shared // block * block} - {0}
        offered |= {
            "retention": [0, None, *sorted(steps, reverse=True)],
            "checkpoint_alignment": [16, 1, 64, None],
            "shared_prefix_checkpoint": [True] if settings.drop_eagle_block else [],
        }
    else:
        every = [f"interval({M << power})" for power in range(7, -1, -1)]
        offered |= {"rule": [*_RULES[:3], *every, _RULES[3]]}
    now = {**{name: getattr(settings, name, None) for name in offered}, "rule": rule}
    return {
        name: [value for value in values if value != now[name]] for name, values in offered.items()
    }
