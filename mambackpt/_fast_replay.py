"""The fast ways of `mambackpt.replay`; its plain replay is the truth that tests hold them to.

Without a pool, rules that compute with arrays are solved for all requests at once; everything else
walks the requests over runs of blocks that are never expanded.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from mambackpt.rules import MarconiCosts, Match, Place, Request, Rule, Settings, Span
from mambackpt.traces import Int64Array, Paths, Trace, expand

_ROUNDS = 24  # of the array solution, before the walk takes over


@dataclass(frozen=True, slots=True)
class Case:
    """A replay's inputs, checked; all that the three ways read."""

    trace: Trace
    rule: Rule
    settings: Settings
    limit: int | None  # bytes of the pool, or of the attention pool
    state_limit: int | None  # bytes of the states' own pool
    eviction: str
    block_bytes: int  # attention cache of one block of the trace
    state_bytes: int
    margin: int
    costs: MarconiCosts


# attention, reused, written, evicted
Columns: TypeAlias = tuple[Int64Array | list[int], ...]


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


# --- all requests at once -------------------------------------------------------------------------


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
    request = Request(trace.prompt, trace.output, trace.message)
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
            for position in part.place(request, Match(found, joint), case.settings)
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
        hits = _deepest_kept(trace, writer, asking, run, end) * g
        if not moving or np.array_equal(hits, joint):
            if (hits % case.settings.block).any():
                return None  # then leaving out what lies at or below the hit is not the same
            return found, hits, np.bincount(writer[writer < R], minlength=R), none
        joint = hits
    return None


def _blocks_at(trace: Trace, position: Any) -> tuple[Int64Array, Int64Array]:
    """(request, block) of one entry of a rule's answer, in the order of requests."""
    g, R = trace.grain, len(trace)
    if type(position) is not Span:
        depth = np.broadcast_to(position // g, R)
        owner = np.flatnonzero((depth > 0) & (depth <= trace.length))
        depth = depth[owner]
        run = trace.run_at(owner, depth)
        return owner, trace.first[run] + depth - 1 - trace.depth[run]
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
        owner = np.repeat(np.arange(R), count)
        tokens = expand(first, count, step)
        inside = (tokens >= g) & (tokens // g <= trace.length[owner])
        owner, depth = owner[inside], tokens[inside] // g
        run = trace.run_at(owner, depth)
        return owner, trace.first[run] + depth - 1 - trace.depth[run]
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


def _deepest_kept(
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


# --- request by request, over runs ----------------------------------------------------------------


def walk(case: Case) -> Columns:
    """An unlimited replay of any rule, over runs of blocks that are never expanded."""
    trace, g, R = case.trace, case.trace.grain, len(case.trace)
    paths, held = trace.paths, bytearray(trace.size)  # 1 where the state after a block is kept
    found = (trace.ceiling - case.margin).clip(0)
    reused, written = [0] * R, [0] * R
    columns = (found, trace.prompt, trace.output, trace.message, trace.length, trace.splits)
    for i, (tokens, prompt, output, message, length, splits) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        lo, run, hit = paths.row[i], paths.row[i + 1] - 1, 0
        if tokens >= g:
            hit, _ = paths.deepest(held, lo, run, tokens // g)
        match = Match(tokens, hit * g, splits)
        positions = case.rule.place(Request(prompt, output, message), match, case.settings)
        for block in paths.blocks_at(run, depths_of(positions, g, length)):
            written[i] += not held[block]
            held[block] = 1
        reused[i] = hit * g
    return found, found if not case.rule.states else reused, written, [0] * R


class _Stretches:
    """What is kept of every block of a path, or of every ``stride``-th, in order of last use.

    What request k touched last is a stretch of its own path, ``low[k]`` to ``high[k]`` deep
    (counted in strides): later requests take its upper part over, eviction trims its deep end. So
    the order of last use is a queue of stretches, and a request costs its branches, not its blocks.
    """

    def __init__(self, trace: Trace, paths: Paths, size: int, stride: int) -> None:
        self.paths, self.size, self.stride = paths, size, stride
        self.low, self.high = [0] * (len(trace) + 1), [0] * (len(trace) + 1)
        self.front = 0  # no stretch before this request is left
        self.owner = paths.owner.copy()  # the request whose stretch each block is or will be in

    def owner_at(self, run: int, depth: int) -> int:
        """The request whose stretch holds this depth of the path that ends with ``run``."""
        base, depth = self.paths.base, depth * self.stride
        while base[run] >= depth:
            run -= 1
        return self.owner[self.paths.first[run] + depth - 1 - base[run]]

    def cached(self, run: int, depth: int) -> int:
        """How deep the path that ends with ``run`` is kept, up to ``depth``."""
        while depth:
            k = self.owner_at(run, depth)
            if self.high[k] >= depth:
                return depth
            # The path runs through k's stretch down to low[k]; what eviction trimmed is gone.
            if self.high[k] > self.low[k]:
                return self.high[k]
            depth = self.low[k]
        return 0

    def take_over(self, i: int, run: int, depth: int) -> None:
        """Move the path's first ``depth`` out of earlier stretches, into request i's."""
        paths, owner, low, end = self.paths, self.owner, self.low, depth * self.stride
        first, count = paths.first, paths.count
        while depth:
            k = self.owner_at(run, depth)
            low[k], depth = depth, low[k]
        r = paths.row[i]
        while count[r] < end:
            owner[first[r] : first[r] + count[r]] = [i] * count[r]
            end -= count[r]
            r += 1
        owner[first[r] : first[r] + end] = [i] * end

    def oldest(self, i: int) -> int:
        """The request with the least recent stretch; i + 1 where there is none up to i."""
        k, low, high = self.front, self.low, self.high
        while k <= i and low[k] >= high[k]:
            k += 1
        self.front = k
        return k


def walk_pool(case: Case) -> Columns:
    """A replay in pools that evict by last use: by request, first its blocks, then its states."""
    trace, g, rule, size = case.trace, case.trace.grain, case.rule, case.block_bytes
    R, S, limit, state_limit = len(trace), case.state_bytes, case.limit or 0, case.state_limit or 0
    one_pool, refresh = case.state_limit is None, case.eviction != "hit-node"
    paths, held = trace.paths, bytearray(trace.size)
    blocks = _Stretches(trace, paths, size, 1)
    stride, counts = _grid_of(case)
    grid = _Stretches(trace, paths, S, stride) if stride else None
    fixed, clips, moving, idle = _fixed_part(case)
    low, high, owner = blocks.low, blocks.high, blocks.owner
    front = 0  # no stretch of blocks before this request is left
    queue: deque[int] = deque()  # states that are in no stretch, in order of last use
    owners: deque[int] = deque()  # the request that touched each
    entry = [-1] * trace.size  # the number of a kept state's newest entry in the queue
    number = used = state_used = 0  # entries that have left the queue; bytes

    def pop_state(before: int) -> bool:
        """Evict the least recent state of the queue if a request earlier than this touched it."""
        nonlocal number
        while queue and entry[queue[0]] != number:  # used again since, or evicted
            queue.popleft()
            owners.popleft()
            number += 1
        if not queue or owners[0] >= before:
            return False
        block = queue.popleft()
        owners.popleft()
        entry[block], held[block] = -1, 0
        number += 1
        return True

    def make_room(
        i: int,
        own: _Stretches | None = None,
        mine: int = -1,
        run: int = 0,
        cached: int = 0,
        spared: int = 0,
    ) -> tuple[int, int]:
        """Evict the least recent until all fits; return items gone and what is left of ``cached``.

        Request i's path is touched deepest first, after what is new of it was inserted: what is
        ``cached`` of it can be evicted before its turn, and is then inserted again, which frees
        nothing. What was touched already (``spared``) cannot.
        """
        nonlocal used, front
        gone = 0
        while used > limit:
            while front <= i and low[front] >= high[front]:
                front += 1
            kind, k = blocks, front
            if one_pool:
                if grid and (other := grid.oldest(i)) < k:
                    kind, k = grid, other
                elif queue and owners[0] < k and pop_state(k):
                    used -= S
                    gone += 1
                    continue
            if k > i:
                break
            want = -(-(used - limit) // kind.size)
            own_stretch = k == mine and kind is own
            taken = min(want, kind.high[k] - (cached if own_stretch else kind.low[k]))
            kind.high[k] -= taken
            used -= taken * kind.size
            gone += taken
            if own_stretch and taken < want:
                floor = kind.low[k]
                gone += cached - floor - (floor < spared <= cached)
                cached = kind.high[k] = floor
                mine = kind.owner_at(run, cached) if cached else -1
        return gone, cached

    request, match = Request(0), Match()
    attention, reused, written, evicted = [0] * R, [0] * R, [0] * R, [0] * R
    usable = (trace.prompt - 1) // g * g
    columns = (usable, trace.length, trace.shared, trace.block_at(trace.shared))
    rest = (trace.prompt, trace.output, trace.message, trace.splits)
    details = list(zip(*(column.tolist() for column in rest), strict=True)) if moving else []
    for i, (most, length, shared, left, (depth, point)) in enumerate(
        zip(*(column.tolist() for column in columns), fixed, strict=True)
    ):
        if not length:  # no full block: nothing to look up or to keep
            continue
        lo, run = paths.row[i], paths.row[i + 1] - 1
        cached, hit, state, gone, mine = shared, 0, -1, 0, -1
        if shared:
            mine = owner[left]
            if high[mine] < shared:
                cached = blocks.cached(run, shared)
                mine = blocks.owner_at(run, cached) if cached else -1
            found = min(cached * g, most) - case.margin
            if found > 0:
                attention[i], hit = found, found // g
                if not rule.states:
                    reused[i] = found
                elif not hit:
                    pass
                elif grid:
                    hit = grid.cached(run, hit // stride)
                    reused[i] = hit * stride * g
                else:
                    hit, state = paths.deepest(held, lo, run, hit)
                    reused[i] = hit * g
        used += (length - cached) * size
        high[i] = length
        if used > limit:
            gone, _ = make_room(i, blocks, mine, run, cached)
        if shared == 1:
            low[owner[left]] = 1
            owner[left] = i
        elif shared:
            blocks.take_over(i, run, shared)
        if grid:
            known = min(shared // stride, counts[i])
            kept = grid.cached(run, known) if known else 0
            new = counts[i] - kept
            grid.high[i] = counts[i]
            used += new * S
            if used > limit:
                mine = grid.owner_at(run, kept) if kept else -1
                more, left = make_room(i, grid, mine, run, kept, hit)
                new += kept - left - (left < hit <= kept)
                gone += more
            if known:
                grid.take_over(i, run, known)
            written[i] = new
        elif rule.states:
            if state >= 0 and held[state]:  # it may have been evicted meanwhile
                entry[state] = number + len(queue)
                queue.append(state)
                owners.append(i)
            keep: Sequence[int] = (point,) if depth and (depth > hit or not clips) else ()
            if moving and (attention[i] or not idle):
                request.prompt, request.output, request.message, splits = details[i]
                match.attention, match.joint = attention[i], hit * g
                match.splits = splits and cached == shared
                positions = [p for place in moving for p in place(request, match, case.settings)]
                if depths := depths_of(positions, g, length):
                    if keep and depth not in depths:
                        depths = sorted([depth, *depths], reverse=True)
                    keep = paths.blocks_at(run, depths)
            for block in keep:
                if held[block]:
                    if refresh:
                        entry[block] = number + len(queue)
                        queue.append(block)
                        owners.append(i)
                    continue
                held[block] = 1
                entry[block] = number + len(queue)
                queue.append(block)
                owners.append(i)
                written[i] += 1
                if one_pool:
                    used += S
                    if used > limit:  # one at a time: it may evict one that is due next
                        gone += make_room(i)[0]
                else:
                    state_used += S
                    while state_used > state_limit and pop_state(R):
                        state_used -= S
                        gone += 1
        evicted[i] = gone
    return attention, reused, written, evicted


def _fixed_part(case: Case) -> tuple[list[tuple[int, int]], bool, list[Place], bool]:
    """What a rule keeps of each request whatever it matches: one (depth, block), solved at once.

    Also whether that is left out where the joint hit reaches it, the parts to ask each time, and
    whether those keep nothing where nothing matches.
    """
    trace, g, rule = case.trace, case.trace.grain, case.rule
    none = np.zeros(len(trace), np.int64)
    request = Request(trace.prompt, trace.output, trace.message)
    parts = list(rule.parts or (rule,))
    points, clips = [(0, -1)] * len(trace), False
    for part in parts:
        if not part.arrays or part.reads or not part.states:
            continue
        answer = part.place(request, Match(none, none), case.settings)
        if len(answer) != 1 or type(answer[0]) is Span or (answer[0] % g).any():
            continue
        again = part.place(request, Match(none, answer[0]), case.settings)[0]
        if not again.any() or np.array_equal(again, answer[0]):
            depth = np.where(answer[0] // g <= trace.length, answer[0] // g, 0)
            points = list(zip(depth.tolist(), trace.block_at(depth).tolist(), strict=True))
            clips = not again.any()
            parts.remove(part)
            break
    answers = [
        part.place(request, Match(none, none), case.settings) if part.arrays else [request.prompt]
        for part in parts
    ]
    idle = not any(type(p) is Span or np.any(p > 0) for answer in answers for p in answer)
    return points, clips, [part.place for part in parts], idle


def _grid_of(case: Case) -> tuple[int, list[int]]:
    """The stride in blocks, and the number of states per request, of a rule that keeps a grid.

    A grid that all requests share is kept as stretches, as blocks are: only in one pool that holds
    any one request, so that none evicts what it has touched itself. Otherwise a stride of 0.
    """
    trace, g, rule, R = case.trace, case.trace.grain, case.rule, len(case.trace)
    if not rule.arrays or rule.reads or case.eviction != "lru" or case.state_limit is not None:
        return 0, []
    request, none = Request(trace.prompt, trace.output, trace.message), np.zeros(R, np.int64)
    answer = rule.place(request, Match(none, none), case.settings)
    if len(answer) != 1 or type(answer[0]) is not Span or not case.state_bytes:
        return 0, []
    first, last, step = answer[0]
    if isinstance(first, np.ndarray) or first != step or step % g:
        return 0, []
    counts = np.minimum(np.broadcast_to(last, R), trace.length * g) // step
    largest = (counts * case.state_bytes + trace.length * case.block_bytes).max()
    return (step // g, counts.tolist()) if largest <= (case.limit or 0) else (0, [])
