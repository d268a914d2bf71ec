"""The fast way of `mambackpt.replay` in pools that evict by last use; tests hold it to the plain.

The order of last use is kept by request: what request k used last leaves before what any later one
did. So a lookup compares the number of a request with the first that has anything left, eviction
takes whole requests, and only the one at the end of the order is ever taken apart.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mambackpt._fast_replay import Case, Columns, depths_of, places_of
from mambackpt.rules import Match, Request, Span
from mambackpt.traces import Int64Array, Trace


class _Stretches:
    """What is kept of every block of a path, or of every ``stride``-th, by who used it last.

    What request k used last is a stretch of its own path, ``low[k]`` to ``high[k]`` deep (counted
    in strides): later requests take its upper part over, eviction trims its deep end. So a request
    costs its branches, not its blocks.
    """

    def __init__(self, trace: Trace, stride: int) -> None:
        self.paths, self.stride = trace.paths, stride
        self.low, self.high = [0] * len(trace), [0] * len(trace)
        self.user = self.paths.owner.copy()  # whose stretch each block is in, or will be

    def user_at(self, run: int, depth: int) -> int:
        """The request whose stretch holds this depth of the path that ends with ``run``."""
        base, depth = self.paths.base, depth * self.stride
        while base[run] >= depth:
            run -= 1
        return self.user[self.paths.first[run] + depth - 1 - base[run]]

    def cached(self, run: int, depth: int) -> tuple[int, int]:
        """How deep the path that ends with ``run`` is kept, up to ``depth``, and by whose stretch.

        (0, -1) where nothing is.
        """
        low, high = self.low, self.high
        while depth:
            k = self.user_at(run, depth)
            if high[k] > low[k]:
                return min(depth, high[k]), k
            depth = low[k]  # all of k's stretch is gone
        return 0, -1

    def take_over(self, i: int, k: int, depth: int) -> None:
        """Move request i's path up to ``depth``, in k's stretch, out of earlier ones into its own."""
        paths, user, low, end = self.paths, self.user, self.low, depth * self.stride
        first, count, base = paths.first, paths.count, paths.base
        start = paths.row[i]
        while low[k]:
            low[k], depth = depth, low[k]
            r, block = start, depth * self.stride
            while base[r] + count[r] < block:
                r += 1
            k = user[first[r] + block - 1 - base[r]]
        low[k] = depth
        r = start
        while count[r] < end:
            user[first[r] : first[r] + count[r]] = [i] * count[r]
            end -= count[r]
            r += 1
        user[first[r] : first[r] + end] = [i] * end


class _Plan(NamedTuple):
    """The blocks whose states a rule keeps of each request that matches just this, as lists."""

    attention: list[int]
    joint: list[int]
    ends: list[int]  # request i's blocks are blocks[ends[i] : ends[i + 1]], deepest first
    blocks: list[int]


def _plans(case: Case) -> list[_Plan]:
    """What the rule keeps of each request in the two cases that nearly all requests are in.

    Either nothing of its prefix was evicted, or all but what the request before it has as well.
    Both are only guesses of what it will match: where it matches something else, the rule is asked.
    """
    trace, rule, B = case.trace, case.rule, case.settings.block
    if not rule.arrays or not rule.states:
        return []
    ceiling = (trace.ceiling - case.margin).clip(0)
    guesses = [ceiling, np.minimum(ceiling, trace.shared_with_previous * trace.grain)]
    return [_plan(case, found, found // B * B) for found in guesses]


def _plan(case: Case, found: Int64Array, joint: Int64Array) -> _Plan:
    trace, R = case.trace, len(case.trace)
    request = Request(trace.prompt, trace.output, trace.message)
    places = [
        places_of(trace, position)
        for position in case.rule.place(request, Match(found, joint), case.settings)
    ]
    keys = np.concatenate([(owner << 32) - depth for owner, depth in places] or [found[:0]])
    if (np.diff(keys) <= 0).any():
        keys = np.unique(keys)
    owner = (keys + (1 << 32) - 1) >> 32
    depth = (owner << 32) - keys
    ends = np.searchsorted(owner, np.arange(R + 1))
    blocks = trace.find_blocks(owner, depth)
    return _Plan(*(column.tolist() for column in (found, joint, ends, blocks)))


def walk_pool(case: Case) -> Columns:
    """A replay in pools that evict by last use: by request, first its blocks, then its states."""
    trace, g, rule, margin = case.trace, case.trace.grain, case.rule, case.margin
    R, size, S = len(trace), case.block_bytes, case.state_bytes
    limit, state_limit, one_pool = case.limit or 0, case.state_limit or 0, case.state_limit is None
    states, refresh = rule.states, case.eviction != "hit-node"
    paths = trace.paths
    row, base, first, count = paths.row, paths.base, paths.first, paths.count
    blocks = _Stretches(trace, 1)
    low, high, block_user = blocks.low, blocks.high, blocks.user
    stride, wanted = _grid_of(case)
    grid = _Stretches(trace, stride) if stride else None
    plans = [] if grid else _plans(case)
    # States that are in no stretch: request k used kept[k] of them last. One whose last user is
    # before ``oldest`` is gone, whatever ``held`` says.
    held, state_user = bytearray(trace.size), [-1] * trace.size
    kept, hits = [0] * R, [-1] * R
    asked: dict[int, list[int]] = {}  # where a request's states are not those of its plan
    planned = [0] * R  # by which plan a request's states were kept
    front = oldest = 0  # the first requests that may have anything, and any states, left
    used = state_used = gone = 0
    find, pooled = held.rfind, kept if one_pool else [0] * R

    def states_of(k: int) -> list[int]:
        """Request k's states in the order that it used them in: what it hit, what it kept."""
        keep = asked.get(k)
        if keep is None:
            plan = plans[planned[k]]
            keep = plan.blocks[plan.ends[k] : plan.ends[k + 1]]
        return keep if hits[k] < 0 or (refresh and hits[k] in keep) else [hits[k], *keep]

    def drop_states(k: int, number: int) -> None:
        """Evict the least recent of request k's states."""
        kept[k] -= number
        for block in states_of(k):
            if number and state_user[block] == k:
                state_user[block] = -1
                held[block] = 0
                number -= 1

    def make_room(
        over: int,
        bound: int,
        run: int = 0,
        cached: int = 0,
        mine: int = -1,
        mine_state: int = -1,
        spared: int = 0,
    ) -> tuple[int, int]:
        """Evict ``over`` bytes, least recent first, of what requests before ``bound`` used last.

        Returns what is still over, and what is left of ``cached``: a request's path is touched
        deepest first, after what is new of it was inserted, so what is cached of it (in stretch
        ``mine`` of blocks, or ``mine_state`` of a grid) can be evicted before its turn. Then it is
        inserted again, which frees nothing. What was touched already (``spared``) cannot.
        """
        nonlocal front, oldest, gone
        f = front
        while over > 0 and f < bound:
            n = high[f] - (cached if f == mine else low[f])
            if n > 0:
                part = n * size >= over
                if part:
                    n = -(-over // size)
                high[f] -= n
                gone += n
                over -= n * size
                if part:
                    break
            if f == mine:
                gone += cached - low[f]
                cached = high[f] = low[f]
                mine = blocks.user_at(run, cached) if cached else -1
            n = pooled[f]
            if grid:
                n = grid.high[f] - (cached if f == mine_state else grid.low[f])
            if n > 0:
                part = (n if grid else n - 1) * S >= over
                if part:
                    n = -(-over // S)
                if grid:
                    grid.high[f] -= n
                elif part or f + 1 == bound:
                    drop_states(f, n)
                else:
                    kept[f] = 0
                gone += n
                over -= n * S
                if part:
                    break
            if grid and f == mine_state:
                floor = grid.low[f]
                gone += cached - floor - (floor < spared <= cached)
                cached = grid.high[f] = floor
                mine_state = grid.user_at(run, cached) if cached else -1
            if f + 1 == bound:
                break
            if f in asked and one_pool:
                del asked[f]
            f += 1
        front = f
        if one_pool:
            oldest = front
        return over, cached

    def settle(i: int, block: int, fresh: bool) -> None:
        """Enter a state that request i used and make room for it, if need be among i's own."""
        nonlocal used, state_used, oldest, gone
        asked[i].append(block)
        if not fresh:
            return
        if hits[i] == block:  # evicted since it was hit
            hits[i] = -1
        if one_pool:
            over, _ = make_room(used + S - limit, i + 1)
            used = limit + over
            return
        state_used += S
        while state_used > state_limit:
            if kept[oldest]:
                drop_states(oldest, 1)
                state_used -= S
                gone += 1
            else:
                asked.pop(oldest, None)
                oldest += 1

    usual, cold = plans or [_Plan([-1] * R, [-1] * R, [0] * R, [])] * 2
    usual_found, usual_joint = usual.attention, usual.joint
    request, match = Request(0), Match()
    attention, reused, written, evicted = [0] * R, [0] * R, [0] * R, [0] * R
    details = [column.tolist() for column in (trace.prompt, trace.output, trace.message)]
    splits = trace.splits.tolist() if states and not plans and not grid else [False] * R
    most = ((trace.prompt - 1) // g * g).tolist()
    for i, (length, shared, found, left, run, end) in enumerate(_lookups(case)):
        if not length:  # no full block: nothing to look up or to keep
            continue
        last_run, cached, bound, gone = row[i + 1] - 1, shared, i, 0
        hit, joint, state = 0, 0, -1
        keep: list[int] = []
        if shared:
            bound = block_user[left]
            if high[bound] < shared:
                cached, bound = blocks.cached(last_run, shared)
                if not cached:
                    bound = i
                found = max(min(cached * g, most[i]) - margin, 0)
                run, end = last_run, found // g
                while base[run] >= end > 0:
                    run -= 1
                end += first[run] - base[run]
            attention[i] = found
            if not states:
                reused[i] = found
            elif found < g:
                pass
            elif grid:
                hit, _ = grid.cached(last_run, found // g // stride)
                reused[i] = joint = hit * stride * g
            else:
                state = find(1, first[run], end)
                while state < 0 or state_user[state] < oldest:
                    if state >= 0:
                        held[state] = 0
                        state = find(1, first[run], state)
                    elif base[run]:
                        run -= 1
                        state = find(1, first[run], first[run] + count[run])
                    else:
                        break
                else:
                    reused[i] = joint = (base[run] + state - first[run] + 1) * g
                    user = state_user[state]
                    if user < bound:
                        bound = user
        # What the rule keeps, and the bytes that all of it takes.
        over = used + (length - cached) * size - limit
        known = new = 0
        if grid:
            known = min(shared // stride, wanted[i])
            have, user = grid.cached(last_run, known)
            if have:
                bound = min(bound, user)
            new = wanted[i] - have
            over += new * S
        elif states:
            if joint == usual_joint[i] and found == usual_found[i]:
                keep = usual.blocks[usual.ends[i] : usual.ends[i + 1]]
            elif joint == cold.joint[i] and found == cold.attention[i]:
                keep = cold.blocks[cold.ends[i] : cold.ends[i + 1]]
                planned[i] = 1
            else:
                request.prompt, request.output, request.message = (c[i] for c in details)
                match.attention, match.joint = found, joint
                match.splits = splits[i] and cached == shared
                positions = rule.place(request, match, case.settings)
                keep = asked[i] = paths.blocks_at(last_run, depths_of(positions, g, length))
            for block in keep:
                user = state_user[block]
                if user < oldest:
                    new += one_pool
                elif user < bound:
                    bound = user
            over += new * S
        # Evict all that is due before anything of this request. If that is not enough, what it is
        # about to use is due next: then one thing after the other, as the plain replay does it.
        if over > 0:
            over, _ = make_room(over, bound)
        step_by_step = over > 0 or not one_pool
        used = limit + over
        high[i] = length
        if step_by_step:
            over -= new * S
            if over > 0:
                user = blocks.user_at(last_run, cached) if cached else -1
                over, _ = make_room(over, i + 1, last_run, cached, user)
            used = limit + over
        if shared == 1:
            low[block_user[left]] = 1
            block_user[left] = i
        elif shared:
            blocks.take_over(i, block_user[left], shared)
        if grid:
            grid.high[i] = wanted[i]
            if step_by_step:
                have, user = grid.cached(last_run, known)
                new = wanted[i] - have
                over = used + new * S - limit
                if over > 0:
                    over, rest = make_room(over, i + 1, last_run, have, -1, user, hit)
                    new += have - rest - (rest < hit <= have)
                used = limit + over
            if known:
                grid.take_over(i, grid.user_at(last_run, known), known)
            written[i] = new
        elif states:
            fresh = 0
            if state >= 0 and state_user[state] >= oldest:
                kept[state_user[state]] -= 1
                kept[i] = 1
                state_user[state] = i
                hits[i] = state
            if step_by_step:
                asked[i] = []
            for block in keep:
                user = state_user[block]
                if user < oldest:
                    held[block] = 1
                    fresh += 1
                elif refresh:
                    kept[user] -= 1
                else:
                    continue
                state_user[block] = i
                kept[i] += 1
                if step_by_step:
                    settle(i, block, user < oldest)
            written[i] = fresh
        evicted[i] = gone
    return attention, reused, written, evicted


def _lookups(case: Case) -> Iterator[tuple[int, ...]]:
    """Of each request: blocks, shared blocks, the most that it may find (tokens), its last shared
    block, and where to look for states up to there: a run and the end of it.
    """
    trace, g = case.trace, case.trace.grain
    found = (trace.ceiling - case.margin).clip(0)
    run, end = np.zeros((2, len(trace)), np.int64)
    asking = np.flatnonzero(found >= g)
    run[asking] = trace.run_at(asking, found[asking] // g)
    end[asking] = trace.find_blocks(asking, found[asking] // g) + 1
    columns = (trace.length, trace.shared, found, trace.block_at(trace.shared), run, end)
    return zip(*(column.tolist() for column in columns), strict=True)


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
