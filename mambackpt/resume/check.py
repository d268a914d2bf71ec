"""The check: a resumed request's logits against a cold one's, beside what the model itself varies.

A model computes the same tokens in one run or in two, and rounds differently: its sums have other
shapes. What it shows there bounds what a resume may show, and no constant does.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache as memoized

import torch

from mambackpt.geometry import CacheGeometry
from mambackpt.planner import Reason, explain
from mambackpt.resume.architectures import (
    ARCHITECTURES,
    TinyModel,
    load_model,
    one_thread,
    random_prompt,
)
from mambackpt.resume.pools import Pools, Stored

_CUTS = (1, 37, 127, *range(8, 128, 8))  # where a run is made two, to see how it rounds


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two answers, token by token: the largest difference of a logit, and who would say what.

    ``by_token`` are differences (infinite where one answer is no number); ``changed`` counts tokens
    after which the likeliest next one is another. ``allowed`` is what the model itself shows.
    """

    by_token: tuple[float, ...]
    changed: int
    allowed: float

    @property
    def difference(self) -> float:
        """The largest difference of any token."""
        return max(self.by_token)

    @property
    def equal(self) -> bool:
        """Whether the answers are the same, as far as the model computes the same twice."""
        return self.difference <= self.allowed


def compare(cold: torch.Tensor, resumed: torch.Tensor, allowed: float) -> Comparison:
    """Compare logits [tokens, vocabulary] of a cold run with those of a resumed one.

    >>> one, other = torch.tensor([[0.0, 2.0]]), torch.tensor([[3.0, 2.0]])
    >>> compare(one, other, 1e-6)
    Comparison(by_token=(3.0,), changed=1, allowed=1e-06)
    >>> compare(one, one * torch.nan, 1e-6).difference
    inf
    """
    by_token = (cold - resumed).abs().nan_to_num(torch.inf, torch.inf).amax(-1)
    changed = (cold.argmax(-1) != resumed.argmax(-1)) | by_token.isinf()
    return Comparison(tuple(by_token.tolist()), int(changed.sum()), allowed)


def live_logits(model: TinyModel, prompt: Sequence[int], cut: int) -> torch.Tensor:
    """Return the logits after a cut, computed in a second run on the live cache of the first."""
    return model.run(prompt[cut:], model.run(prompt[:cut]).cache).logits


@memoized
def spread(model: TinyModel) -> float:
    """Return the largest difference that a model shows between one run and two, over many cuts.

    >>> 0 < spread(load_model("lfm2")) < 1e-4
    True
    """
    prompt = random_prompt(128)
    cold = model.run(prompt).logits
    return max(compare(cold[cut:], live_logits(model, prompt, cut), 0).difference for cut in _CUTS)


@dataclass(frozen=True, slots=True)
class Case:
    """Prompts of these lengths that share a pool, and the sizes that place their checkpoints."""

    name: str
    prompts: tuple[int, ...]
    unit: int
    block: int


CASES = [
    Case("block boundary", (100,), 64, 64),
    Case("inside a block", (100,), 16, 64),
    Case("odd offset", (70,), 37, 37),
    Case("16, 16 before the end", (32,), 16, 16),
    Case("64, 64 before the end", (128,), 64, 64),
    Case("1 before the end", (65,), 64, 64),
    Case("two share a pool", (100, 150), 64, 64),
]


@dataclass(frozen=True, slots=True)
class Row:
    """One resumed request: where it resumed, how the state was taken, and how its answer differs.

    ``inside`` as in `Stored`. ``live`` is the model's own difference at this cut, and ``same_bits``
    says whether the answer has every bit of the second run on a live cache.
    """

    model: str
    case: str
    prompt: int
    position: int
    inside: bool
    live: float
    same_bits: bool
    comparison: Comparison


def store_planned(pools: Pools, prompts: Sequence[Sequence[int]]) -> list[Stored]:
    """Save each prompt's checkpoint: inside one forward where the planner accepts, else at an end.

    The position is the planner's in both cases.
    """
    model, geometry = pools.model, pools.geometry
    lengths = [len(prompt) for prompt in prompts]
    decisions = explain(lengths, lengths, geometry)
    if all(decision.reason is Reason.ACCEPTED for decision in decisions):
        return pools.store([model.run(prompt) for prompt in prompts])
    ends = [decision.position for decision in decisions]
    return pools.store_ends(
        [model.run(prompt[:end]) for prompt, end in zip(prompts, ends, strict=True)]
    )


@one_thread()
def check_case(model: TinyModel, case: Case) -> list[Row]:
    """Store, drop, restore and go on, once for each of a case's prompts.

    >>> [row] = check_case(load_model("mamba-2"), CASES[0])
    >>> row.position, row.inside, row.same_bits, row.comparison.equal
    (64, True, True, True)

    Where two share a pool, other requests go on from their prefixes, the last stored one first.
    """
    geometry = CacheGeometry(case.unit, case.block, model.architecture.alignment, case.unit)
    prompts = [random_prompt(length, seed) for seed, length in enumerate(case.prompts)]
    pools = Pools(model, geometry)
    kept = store_planned(pools, prompts)
    rows = []
    for seed, (prompt, stored) in reversed(list(enumerate(zip(prompts, kept, strict=True)))):
        cut = stored.position
        if len(prompts) > 1:
            prompt = prompt[:cut] + random_prompt(len(prompt) - cut, 10 + seed)
        cold, live = model.run(prompt).logits[cut:], live_logits(model, prompt, cut)
        resumed = model.run(prompt[cut:], pools.restore(stored)).logits
        own = compare(cold, live, 0).difference
        rows.append(
            Row(
                model.architecture.name,
                case.name,
                len(prompt),
                cut,
                stored.inside,
                own,
                torch.equal(live, resumed),
                compare(cold, resumed, max(own, spread(model))),
            )
        )
    return rows[::-1]


def equality_rows(names: Iterable[str] = ARCHITECTURES) -> list[Row]:
    """Return the equality table: every case on every one of these architectures.

    >>> all(row.comparison.equal for row in equality_rows(["lfm2"]))
    True
    """
    return [row for name in names for case in CASES for row in check_case(load_model(name), case)]
