"""A replay's inputs, checked: all that the ways to replay it read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from mambackpt.errors import CheckpointValueError, checked_int
from mambackpt.models import PRESETS
from mambackpt.replay.rules import MarconiCosts, Place, Rule, Sizes, Span, get_rule
from mambackpt.replay.trace import Int64Array, Trace


@dataclass(frozen=True, slots=True)
class Case:
    """A replay's inputs, checked; all that the ways to replay it read."""

    trace: Trace
    rule: Rule
    settings: Sizes
    limit: int | None  # bytes of the pool, or of the attention pool
    state_limit: int | None  # bytes of the states' own pool
    eviction: str
    block_bytes: int  # attention cache of one block of the trace
    state_bytes: int
    margin: int
    costs: MarconiCosts


# attention, reused, written, evicted
Columns: TypeAlias = tuple[Int64Array | list[int], ...]
EVICTIONS = ("lru", "hit-node", "thinning", "flops", "flops-as-published")


class ModelSizes(Protocol):
    """What a pool needs to know of a model: bytes of all its layers (`models.HybridModel`)."""

    @property
    def model_token_bytes(self) -> int:
        """Bytes of attention cache per token."""

    @property
    def model_state_bytes(self) -> int:
        """Bytes of one state."""


def rule_of(trace: Trace, rule: str | Rule | Place) -> Rule:
    """Return the rule, with what the trace tells rules that need to know it."""
    return get_rule(rule, overlaps=trace.ceiling, grain=trace.grain)


def checked_case(
    trace: Trace,
    given: str | Rule | Place,
    block: int,
    *,
    model: ModelSizes | str | None = None,
    pool_bytes: int | None = None,
    state_pool_bytes: int | None = None,
    eviction: str | None = None,
    budget: int = 8192,
    lookup_margin: int = 0,
    costs: MarconiCosts | None = None,
) -> Case:
    """Return the case of these arguments of `replay`; raises as it does."""
    rule, block = rule_of(trace, given), checked_int("block", block)
    if block % trace.grain:
        raise CheckpointValueError(
            f"block is {block} and the trace's blocks have {trace.grain} tokens; expected a "
            f"multiple of {trace.grain}. Try {-(-block // trace.grain) * trace.grain}."
        )
    if isinstance(model, str):
        if model not in PRESETS:
            raise CheckpointValueError(
                f"model is {model!r}; expected one of {', '.join(PRESETS)}. Try 'kimi-k3'."
            )
        model = PRESETS[model]
    if model is None and pool_bytes is not None:
        raise CheckpointValueError(
            "pool_bytes is given without a model; expected the model whose blocks and states "
            "fill the pool. Try model='kimi-k3'."
        )
    if pool_bytes is None and (state_pool_bytes is not None or eviction is not None):
        raise CheckpointValueError(
            "state_pool_bytes or eviction is given without pool_bytes; expected a limited pool. "
            "Try pool_bytes=320 * 10**9."
        )
    eviction = eviction or (rule.eviction if pool_bytes is not None else "lru")
    if eviction not in EVICTIONS:
        raise CheckpointValueError(
            f"eviction is {eviction!r}; expected one of {', '.join(EVICTIONS)}. Try 'lru'."
        )
    if model is not None:
        checked_int("model_token_bytes", model.model_token_bytes, unit="bytes")
        checked_int("model_state_bytes", model.model_state_bytes, least=0, unit="bytes")
    for name, limit in (("pool_bytes", pool_bytes), ("state_pool_bytes", state_pool_bytes)):
        if limit is not None:
            checked_int(name, limit, unit="bytes")
    return Case(
        trace,
        rule,
        Sizes(block, checked_int("budget", budget)),
        pool_bytes,
        state_pool_bytes,
        eviction,
        0 if model is None else model.model_token_bytes * trace.grain,
        0 if model is None else model.model_state_bytes,
        checked_int("lookup_margin", lookup_margin, least=0),
        costs or MarconiCosts(published=eviction == "flops-as-published"),
    )


def depths_of(positions: Sequence[Any], grain: int, length: int) -> list[int]:
    """The rule's positions as blocks of the request, deepest first; what it cannot name is left."""
    depths: list[int] = []
    for position in positions:
        if type(position) is not Span:
            depths.append(position // grain)
            continue
        first, last, step = position
        if first % grain or step % grain:
            depths += [p // grain for p in range(first, last + 1, step)]
        else:
            depths += range(first // grain, last // grain + 1, step // grain)
    if len(depths) > 1:
        depths = sorted(set(depths), reverse=True)
    if depths and depths[-1] > 0 and depths[0] <= length:
        return depths
    return [depth for depth in depths if 0 < depth <= length]
