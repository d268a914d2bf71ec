"""A replay's inputs, checked once: all that the ways to replay it read."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, Protocol, TypeAlias, TypedDict, Unpack

import numpy as np

from mambackpt.errors import CheckpointValueError, checked_choice, checked_int
from mambackpt.models import PRESETS
from mambackpt.replay.rules import Place, Rule, Sizes, Span, get_rule
from mambackpt.replay.trace import Int64Array, Trace

# attention, reused, written, evicted
Columns: TypeAlias = tuple[Int64Array | list[int], ...]
_MOST_BLOCKS = 1 << 25  # of a trace cut finer: some gigabyte
EVICTIONS = (
    *("lru", "hit-node", "thinning", "even-gaps", "nearest-neighbour", "supersede", "frontier"),
    *("flops", "flops-as-published"),
)


class ModelSizes(Protocol):
    """What a pool needs to know of a model: bytes of all its layers (`models.HybridModel`)."""

    @property
    def model_token_bytes(self) -> int:
        """Bytes of attention cache per token."""

    @property
    def model_state_bytes(self) -> int:
        """Bytes of one state."""


class Options(TypedDict, total=False):
    """What a replay may be told, beside its trace, rule and block.

    ``budget`` (one prefill step; 8,192) and ``lookup_margin`` (tokens of an attention hit that
    speculative decoding computes again; 0) are tokens. Memory is unlimited unless ``pool_bytes`` is
    given, with the ``model`` (a `HybridModel`, or a preset's name) whose blocks and states share
    the pool; with ``state_pool_bytes`` states have a pool of their own. ``eviction`` is the
    rule's unless it is given, mostly "lru":

    * "lru": one order of last use over attention blocks and states;
    * "hit-node": a kept state that is there already is not refreshed, only the one that was hit;
    * "thinning": when a state is due in that order, the one goes that covers least: the fewest
      tokens past the state before it on its prefix;
    * "even-gaps": when a state is due, the one goes whose loss leaves the shortest gap, from the
      state before it on its prefix (or the start) to the nearest one after it; one with none after
      it goes last;
    * "nearest-neighbour": when a state is due, the one goes that has the fewest tokens to its
      nearest neighbour: the state before it on its prefix (or the start), or one right after it;
    * "supersede": the state that a request resumed after goes once the request has kept a deeper
      one, unless states right after it lie on two paths; else as "lru";
    * "frontier": when a state is due, one with exactly one state right after it goes; the newest
      state of a path, and those where paths part, go where there is no other;
    * "flops", "flops-as-published": when a state is due, one with at most one state right after it
      goes, by recency plus FLOPs saved per byte (Marconi, arXiv 2411.19379).
    """

    model: ModelSizes | str | None
    pool_bytes: int | None
    state_pool_bytes: int | None
    eviction: str | None
    budget: int
    lookup_margin: int


@dataclass(frozen=True, slots=True)
class Case:
    """A replay's inputs, checked; `Case.of` makes one.

    >>> from mambackpt.replay import trace_from_tokens
    >>> case = Case.of(trace_from_tokens([[7] * 40], grain=8), "last", block=16, budget=64)
    >>> case.rule.name, case.sizes
    ('last', Sizes(block=16, budget=64))
    """

    trace: Trace
    rule: Rule
    sizes: Sizes
    limit: int | None  # bytes of the pool, or of the attention pool
    state_limit: int | None  # bytes of the states' own pool
    eviction: str
    block_bytes: int  # attention cache of one block of the trace
    state_bytes: int
    margin: int

    @classmethod
    def of(
        cls, trace: Trace, rule: str | Rule | Place, *, block: int, **options: Unpack[Options]
    ) -> "Case":
        """Return the case of these arguments, which are those of `replay`; raises as it does."""
        if unknown := {*options} - Options.__annotations__.keys():
            checked_choice("option", unknown.pop(), Options.__annotations__)
        block = checked_int("block", block)
        trace = _trace_for(trace, block)
        placed = rule_of(trace, rule)
        pool, state_pool = options.get("pool_bytes"), options.get("state_pool_bytes")
        eviction = options.get("eviction")
        if pool is None and (state_pool is not None or eviction is not None):
            raise CheckpointValueError(
                "state_pool_bytes or eviction is given without pool_bytes; expected a limited "
                "pool. Try pool_bytes=320 * 10**9."
            )
        model = _model_of(options.get("model"))
        if model is None and pool is not None:
            raise CheckpointValueError(
                "pool_bytes is given without a model; expected the model whose blocks and states "
                "fill the pool. Try model='kimi-k3'."
            )
        for name, limit in (("pool_bytes", pool), ("state_pool_bytes", state_pool)):
            if limit is not None:
                checked_int(name, limit, unit="bytes")
        eviction = eviction or (placed.eviction if pool is not None else "lru")
        return cls(
            trace,
            placed,
            Sizes(block, checked_int("budget", options.get("budget", 8192))),
            pool,
            state_pool,
            checked_choice("eviction", eviction, EVICTIONS),
            0 if model is None else model.model_token_bytes * trace.grain,
            0 if model is None else model.model_state_bytes,
            checked_int("lookup_margin", options.get("lookup_margin", 0), least=0),
        )


def rule_of(trace: Trace, rule: str | Rule | Place) -> Rule:
    """Return the rule, with what the trace tells rules that need to know it."""
    return get_rule(rule, overlaps=trace.ceiling, grain=trace.grain)


def _trace_for(trace: Trace, block: int) -> Trace:
    """The trace in blocks that this block is a multiple of; sharing stays what is known of it."""
    grain = gcd(block, trace.grain)
    if trace.size * (trace.grain // grain) > _MOST_BLOCKS:
        least = -(-trace.grain // (_MOST_BLOCKS // trace.size or 1))
        step = next(n for n in range(least, trace.grain + 1) if trace.grain % n == 0)
        raise CheckpointValueError(
            f"block is {block} and the trace's blocks have {trace.grain} tokens: both are whole "
            f"only in blocks of {grain}, too many for this trace; expected a multiple of {step}. "
            f"Try {-(-block // step) * step}."
        )
    return trace.finer(grain)


def bound_notes(trace: Trace, block: int) -> tuple[str, ...]:
    """What a replay of this trace at this block has to say of its sharing: often nothing."""
    if block % trace.grain == 0:
        return ()
    return (
        f"block {block:,} is no multiple of the trace's {trace.grain:,} tokens: sharing is known "
        f"to {trace.grain:,} tokens only, so the reuse told is a lower bound",
    )


def _model_of(model: ModelSizes | str | None) -> ModelSizes | None:
    if isinstance(model, str):
        model = PRESETS[checked_choice("model", model, PRESETS)]
    if model is not None:
        checked_int("model_token_bytes", model.model_token_bytes, unit="bytes")
        checked_int("model_state_bytes", model.model_state_bytes, least=0, unit="bytes")
    return model


def whole_positions(positions: Sequence[Any]) -> list[Any]:
    """What of a rule's answer counts tokens: whole numbers, arrays and spans of them.

    >>> whole_positions([96, 48.0, True, Span(16, 64, 16), None])
    [96, Span(first=16, last=64, step=16)]

    Half a prompt, or True, is no count of tokens and keeps nothing.
    """
    return [
        position
        for position in positions
        if all(map(_counts_tokens, position if type(position) is Span else [position]))
    ]


def _counts_tokens(value: object) -> bool:
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "iu"
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def depths_of(positions: Sequence[Any], grain: int, prompt: int) -> list[int]:
    """The rule's positions as blocks of a prompt, deepest first; what lies beyond it is left."""
    depths: list[int] = []
    for position in positions:
        if type(position) is not Span:
            if type(position) is int:
                if position <= prompt:
                    depths.append(position // grain)
            elif whole_positions([position]) and position <= prompt:
                depths.append(int(position) // grain)
            continue
        if not whole_positions([position]):
            continue
        first, last, step = position
        last = min(last, prompt)
        if first % grain or step % grain:
            depths += [p // grain for p in range(first, last + 1, step)]
        else:
            depths += range(first // grain, last // grain + 1, step // grain)
    if len(depths) > 1:
        depths = sorted(set(depths), reverse=True)
    if depths and depths[-1] > 0:
        return depths
    return [depth for depth in depths if depth > 0]
