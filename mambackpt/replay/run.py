"""Replays of request traces: what a placement rule reuses, recomputes, writes and evicts.

One request at a time (a simplification, say so in a figure): look up the attention hit and the
deepest kept state in it, then store what the rule keeps. Full blocks only; a lookup may reuse at
most L - 1 tokens; states of decode steps are left out. `mambackpt.replay.plain` is the truth;
`unlimited` and `pools` beside it find the same faster.
"""

import numpy as np

from mambackpt.replay.case import Case, Columns, ModelSizes, checked_case
from mambackpt.replay.plain import expand_rows, replay_plainly
from mambackpt.replay.pools import walk_pool
from mambackpt.replay.result import Replay
from mambackpt.replay.rules import MarconiCosts, Place, Rule
from mambackpt.replay.trace import Trace
from mambackpt.replay.unlimited import replay_arrays, walk


def replay(
    trace: Trace,
    rule: str | Rule | Place,
    *,
    block: int,
    model: ModelSizes | str | None = None,
    pool_bytes: int | None = None,
    state_pool_bytes: int | None = None,
    eviction: str | None = None,
    budget: int = 8192,
    lookup_margin: int = 0,
    costs: MarconiCosts | None = None,
    plainly: bool = False,
) -> Replay:
    """Replay a trace under a placement rule and return what it reused, wrote and evicted.

    >>> from mambackpt.replay import trace_from_tokens
    >>> trace = trace_from_tokens([[7] * 40, [7] * 33 + [8] * 7, [7] * 40], grain=8)
    >>> replay(trace, "last", block=16).reused.tolist()
    [0, 32, 32]

    ``block``, ``budget`` (one prefill step) and ``lookup_margin`` (tokens of an attention hit that
    speculative decoding computes again) are tokens; ``block`` is a multiple of the trace's grain.
    Memory is unlimited unless ``pool_bytes`` is given, with the ``model`` (a `HybridModel`, or a
    preset's name) whose attention blocks and states share the pool; with ``state_pool_bytes``
    states have a pool of their own. ``eviction`` (default: the rule's, mostly "lru"):

    * "lru": one order of last use over attention blocks and states;
    * "hit-node": a kept state that is there already is not refreshed, only the one that was hit;
    * "thinning": when a state is due in that order, the one goes that covers least: the fewest
      tokens past the state before it on its prefix;
    * "flops", "flops-as-published": when a state is due, one with at most one state right after it
      goes, by recency plus FLOPs saved per byte (Marconi, arXiv 2411.19379; ``costs`` has the
      model's shape).

    ``plainly`` uses the readable loop for everything. Raises CheckpointValueError for sizes, rules
    and names that do not fit.
    """
    case = checked_case(
        trace,
        rule,
        block,
        model=model,
        pool_bytes=pool_bytes,
        state_pool_bytes=state_pool_bytes,
        eviction=eviction,
        budget=budget,
        lookup_margin=lookup_margin,
        costs=costs,
    )
    columns = replay_plainly(case, expand_rows(trace)) if plainly else replay_fast(case)
    attention, reused, written, evicted = (np.asarray(column, np.int64) for column in columns)
    g = trace.grain
    return Replay(
        trace.name,
        case.rule.name,
        block,
        g,
        budget,
        pool_bytes,
        state_pool_bytes,
        case.eviction,
        case.block_bytes // g,
        case.state_bytes,
        trace.prompt,
        trace.ceiling,
        attention,
        reused,
        written,
        evicted,
    )


def replay_fast(case: Case) -> Columns:
    """The fastest of the ways that fits."""
    if case.limit is None:
        solved = replay_arrays(case) if case.rule.arrays or not case.rule.states else None
        return walk(case) if solved is None else solved
    if case.eviction in ("lru", "hit-node"):
        return walk_pool(case)
    return replay_plainly(case, expand_rows(case.trace))
