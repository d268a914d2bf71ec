"""Replays of request traces: what a placement rule reuses, recomputes, writes and evicts.

One request at a time (a simplification, say so in a figure): look up the attention hit and the
deepest kept state in it, then store what the rule keeps. Full blocks only; a lookup may reuse at
most L - 1 tokens; states of decode steps are left out. `mambackpt.replay.plain` is the truth;
`unlimited` and `pools` beside it find the same faster.
"""

from typing import Unpack

import numpy as np

from mambackpt.replay.case import Case, Columns, Options, bound_notes
from mambackpt.replay.plain import expand_rows, replay_plainly
from mambackpt.replay.pools import walk_pool
from mambackpt.replay.reads import count_reads
from mambackpt.replay.result import Replay
from mambackpt.replay.rules import Place, Rule
from mambackpt.replay.trace import Trace
from mambackpt.replay.unlimited import replay_arrays, walk


def replay(
    trace: Trace,
    rule: str | Rule | Place,
    *,
    block: int,
    plainly: bool = False,
    **options: Unpack[Options],
) -> Replay:
    """Replay a trace under a placement rule and return what it reused, wrote and evicted.

    >>> from mambackpt.replay import trace_from_tokens
    >>> trace = trace_from_tokens([[7] * 40, [7] * 33 + [8] * 7, [7] * 40], grain=8)
    >>> replay(trace, "last", block=16).reused.tolist()
    [0, 32, 32]

    ``block`` is in tokens. Where it is no multiple of the trace's grain, two prompts share what is
    known of them and no more, so reuse is a lower bound; the result's notes say so. `Options` has
    the others: memory, eviction, the budget of a prefill step. ``plainly`` uses the readable loop
    for everything.
    Raises CheckpointValueError for sizes, rules and names that do not fit.
    """
    case = Case.of(trace, rule, block=block, **options)
    columns = replay_plainly(case, expand_rows(case.trace)) if plainly else replay_fast(case)
    attention, reused, written, evicted = (np.asarray(column, np.int64) for column in columns)
    return Replay(
        *(trace.name, case.rule.name, case.sizes.block, trace.grain, case.sizes.budget),
        *(case.limit, case.state_limit, case.eviction),
        *(case.block_bytes // trace.grain, case.state_bytes),
        *(trace.prompt, case.trace.ceiling, attention, reused, written, evicted),
        count_reads(case, attention, reused),
        (*trace.notes, *bound_notes(trace, block)),
    )


def replay_fast(case: Case) -> Columns:
    """The fastest of the ways that fits."""
    if case.limit is None:
        solved = replay_arrays(case) if case.rule.arrays or not case.rule.states else None
        return walk(case) if solved is None else solved
    if case.eviction in ("lru", "hit-node"):
        return walk_pool(case)
    return replay_plainly(case, expand_rows(case.trace))
