"""Fast replays without a limit of memory; `mambackpt.replay.plain` is the truth they are held to.

Rules that compute with arrays are solved for all requests at once; everything else walks the
requests over runs of blocks that are never expanded.
"""

from typing import Any

import numpy as np

from mambackpt.replay.case import Case, Columns, depths_of, whole_positions
from mambackpt.replay.rules import Lengths, Match, Span
from mambackpt.replay.trace import Int64Array, Trace, expand

_ROUNDS = 24  # of the array solution, before the walk takes over


def replay_arrays(case: Case) -> Columns | None:
    """Solve an unlimited replay for all requests at once; None where that takes too many rounds.

    The hits follow from the states, and the states from the hits. Each request depends on earlier
    ones only, so the two have one solution, and guessing hits until they repeat finds it.
    """
    trace, rule, g, R = case.trace, case.rule, case.trace.grain, len(case.trace)
    found = (trace.ceiling - case.margin).clip(0) if case.margin else trace.ceiling
    none = np.zeros(R, np.int64)
    if not rule.states or not len(trace.first):
        return found, none if rule.states else found, none, none
    request = Lengths(trace.prompt, trace.output, trace.message)
    asking, depth, run = trace.lookup
    if case.margin:
        asking = np.flatnonzero(found >= g)
        depth = found[asking] // g
        run = trace.run_at(asking, depth)
    end = trace.first[run] + depth - trace.depth[run]
    parts = rule.parts or (rule,)

    def kept(moving: bool, joint: Int64Array) -> list[tuple[Int64Array, Int64Array]]:
        return [
            _blocks_at(trace, position)
            for part in parts
            if ("joint" in part.reads) is moving
            for position in whole_positions(part.place(request, Match(found, joint), case.sizes))
        ]

    writer = np.full(trace.size, R, np.int32)  # the request that first kept each state
    for owner, block in kept(False, none):
        _write(writer, owner, block)
    fixed, joint = writer, none
    for _ in range(_ROUNDS):
        moving = kept(True, joint)
        writer = fixed.copy() if moving else fixed
        for owner, block in moving:
            _write(writer, owner, block)
        hits = deepest_kept(trace, writer, asking, run, end) * g
        if not moving or np.array_equal(hits, joint):
            if (hits % case.sizes.block).any():
                return None  # then leaving out what lies at or below the hit is not the same
            return found, hits, np.bincount(writer[writer < R], minlength=R), none
        joint = hits
    return None


def span_counts(trace: Trace, span: Span) -> Int64Array:
    """How many positions a span has in each request."""
    counts: Int64Array = ((span.last - span.first) // span.step + 1) * np.ones(len(trace), np.int64)
    return counts.clip(0)


def places_of(trace: Trace, position: Any) -> tuple[Int64Array, Int64Array]:
    """(request, depth in blocks) of one entry of a rule's answer, in the order of requests."""
    g, R = trace.grain, len(trace)
    if type(position) is not Span:
        depth = np.broadcast_to(position // g, R)
        owner = np.flatnonzero((depth > 0) & (position <= trace.prompt))
        return owner, depth[owner]
    count = span_counts(trace, position)
    owner = np.repeat(np.arange(R), count)
    tokens = expand(np.broadcast_to(position.first, R), count, position.step)
    inside = (tokens >= g) & (tokens <= trace.prompt[owner])
    return owner[inside], tokens[inside] // g


def _blocks_at(trace: Trace, position: Any) -> tuple[Int64Array, Int64Array]:
    """(request, block) of one entry of a rule's answer, in the order of requests."""
    g, R = trace.grain, len(trace)
    if type(position) is not Span:
        owner, depth = places_of(trace, position)
        return owner, trace.find_blocks(owner, depth)
    first, last, step = position
    last = np.broadcast_to(last, R)
    if not isinstance(first, np.ndarray):
        # All requests keep the same grid, so the one that first had the shared blocks kept it in
        # them up to its own end: only what lies beyond is new.
        source = trace.first_with(trace.block_at(trace.shared))
        covered = np.where(trace.shared > 0, np.minimum(trace.shared * g, last[source]), 0)
        first = first + ((covered - first) // step + 1).clip(0) * step
    count = ((last - first) // step + 1).clip(0)
    if count.sum() < len(trace.first) or step % g or (first % g).any():
        owner, depth = places_of(trace, Span(first, last, step))
        return owner, trace.find_blocks(owner, depth)
    # On the trace's grid a progression of positions is one of block numbers in each run.
    owner, stride = trace.run_owner, step // g
    start, deepest = first[owner] // g, last[owner] // g
    start += ((trace.depth - start) // stride + 1).clip(0) * stride
    count = ((np.minimum(trace.depth + trace.count, deepest) - start) // stride + 1).clip(0)
    some = np.flatnonzero(count > 0)
    block = trace.first[some] + start[some] - 1 - trace.depth[some]
    return np.repeat(owner[some], count[some]), expand(block, count[some], stride)


def _write(writer: Any, owner: Int64Array, block: Int64Array) -> None:
    """Enter the earliest request that keeps each state; ``owner`` ascends."""
    earlier = owner < writer[block]
    # Of blocks that occur twice the last one written stays: the earliest request.
    writer[block[earlier][::-1]] = owner[earlier][::-1]


def deepest_kept(
    trace: Trace, writer: Any, asking: Int64Array, run: Int64Array, end: Int64Array
) -> Int64Array:
    """Blocks up to the deepest state that each asking request finds, 0 for none.

    All requests look at once, from the last run of their hit, of which ``end`` is one past the last
    block, towards the root.
    """
    R = len(trace)
    kept = np.append(-1, np.flatnonzero(writer < R))
    hits = np.zeros(R, np.int64)
    while len(asking):
        block = kept[np.searchsorted(kept, end) - 1]  # the last kept block before the end
        inside = block >= trace.first[run]
        found = inside & (writer[block] < asking)
        at = run[found]
        hits[asking[found]] = trace.depth[at] + block[found] - trace.first[at] + 1
        # A state kept too late: look before it. No state in this run: look in the run before.
        run = np.where(inside, run, run - 1)
        left = np.flatnonzero(~found & (run >= trace.row[asking]))
        asking, run, inside, block = asking[left], run[left], inside[left], block[left]
        end = np.where(inside, block, trace.first[run] + trace.count[run])
    return hits


def walk(case: Case) -> Columns:
    """An unlimited replay of a rule that keeps states, over runs that are never expanded."""
    trace, g, R = case.trace, case.trace.grain, len(case.trace)
    paths, held = trace.paths, bytearray(trace.size)  # 1 where the state after a block is kept
    found = (trace.ceiling - case.margin).clip(0)
    reused, written = [0] * R, [0] * R
    columns = (found, trace.prompt, trace.output, trace.message, trace.splits)
    for i, (tokens, prompt, output, message, splits) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        lo, run, hit = paths.row[i], paths.row[i + 1] - 1, 0
        if tokens >= g:
            hit, _ = paths.deepest(held, lo, run, tokens // g)
        match = Match(tokens, hit * g, splits)
        positions = case.rule.place(Lengths(prompt, output, message), match, case.sizes)
        for block in paths.blocks_at(run, depths_of(positions, g, prompt)):
            written[i] += not held[block]
            held[block] = 1
        reused[i] = hit * g
    return found, reused, written, [0] * R
