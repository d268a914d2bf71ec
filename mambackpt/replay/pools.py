"""The fast ways of `mambackpt.replay` in pools that evict by last use.

The order of last use is kept by request: what request k used last leaves before what any later one
did. So eviction takes whole requests, and only the one at the end of the order is ever taken apart;
a lookup compares depths (of blocks) or the number of a request with the first that has states left.

Letters and words:

    g      tokens per block of the trace
    R      requests; i is served now, k an earlier one
    S      bytes of a state; 0 where states have a pool of their own
    f      the front: the first request that has anything left
    n      how many items
    over   bytes above the limit; 0 or less: it fits
    run    consecutive block numbers: `first`, `count`, and `base`, the blocks before it on its
           path; a path is a request's runs in order, of which `row[i]` is the first
    fork   the last block that request i shares with an earlier one
    user   who used a block or a state last
    bound  nothing of request i, or of what it is about to use, is due before this request's turn
    new    items that are written now; `gone` are evicted
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mambackpt.replay.case import Case, Columns, depths_of, whole_positions
from mambackpt.replay.rules import Lengths, Match, Span
from mambackpt.replay.trace import Int64Array, Trace
from mambackpt.replay.unlimited import places_of, span_counts


def walk_pool(case: Case) -> Columns:
    """Replay in pools that evict by last use, over runs of blocks that are never expanded."""
    grid = _grid_of(case)
    return _walk_states(case) if grid is None else _walk_grid(case, *grid)


class _Stretches:
    """What is held of every block of a path, or of every ``stride``-th, by who used it last.

    What request k used last is a stretch of its own path: ``count[k]`` from the depth ``low[k]``
    on, counted in strides. Later requests take its upper part over, eviction trims its deep end. So
    a request costs its branches, not its blocks.
    """

    def __init__(self, trace: Trace, stride: int, item_bytes: int) -> None:
        self.paths, self.stride, self.item_bytes = trace.paths, stride, item_bytes
        self.low, self.count = [0] * len(trace), [0] * len(trace)
        self.user = self.paths.owner.copy()  # whose stretch each block is in, or will be
        paths, low, count, user = self.paths, self.low, self.count, self.user
        row, first, lengths, base = paths.row, paths.first, paths.count, paths.base

        def take_over(i: int, k: int, depth: int) -> None:
            """Move request i's path up to ``depth``, of which k has the end, into i's stretch."""
            # A closure, not a method: it runs for every request, and finds its lists faster.
            r, end = row[i], depth * stride
            while True:
                top, rest = low[k], low[k] + count[k] - depth
                low[k], count[k] = depth, rest if rest > 0 else 0
                if not top:
                    break
                depth, block, run = top, top * stride, r  # above that the path is another's
                while base[run] + lengths[run] < block:
                    run += 1
                k = user[first[run] + block - 1 - base[run]]
            at, length = first[r], lengths[r]
            while length < end:
                user[at : at + length] = [i] * length
                end -= length
                r += 1
                at, length = first[r], lengths[r]
            user[at : at + end] = [i] * end

        self.take_over = take_over

    def user_at(self, run: int, depth: int) -> int:
        """The request whose stretch has this depth of the path that ends with ``run``."""
        base, depth = self.paths.base, depth * self.stride
        while base[run] >= depth:
            run -= 1
        return self.user[self.paths.first[run] + depth - 1 - base[run]]

    def held_depth(self, run: int, depth: int) -> tuple[int, int]:
        """How deep the path that ends with ``run`` is held, up to ``depth``, and in whose stretch.

        (0, -1) where nothing is. All above is held too, as it was used later.
        """
        low, count = self.low, self.count
        while depth:
            k = self.user_at(run, depth)
            if count[k]:
                return min(depth, low[k] + count[k]), k
            depth = low[k]  # all of k's stretch is gone
        return 0, -1


class _Order:
    """The order of last use in one pool: by request, first its blocks, deepest first, then states.

    Lengths k used ``kept[k]`` states last. No request before ``front`` has anything left, and what
    is ``listed`` of it is forgotten.
    """

    def __init__(self, case: Case, kept: list[int], listed: dict[int, list[int]]) -> None:
        self.blocks = _Stretches(case.trace, 1, case.block_bytes)
        self.kept, self.state_bytes = kept, case.state_bytes
        self.front = self.gone = 0
        # One attribute for `evict` to read, which is called most.
        self.lists = self.blocks.count, kept, listed, case.block_bytes, case.state_bytes

    def drop_states(self, k: int, number: int) -> None:
        """Evict the least recent of the states that request k used last."""
        self.kept[k] -= number

    def evict(self, over: int, bound: int) -> int:
        """Evict ``over`` bytes of what requests before ``bound`` used last.

        Returns the bytes that are still over; 0 or less: it was enough.
        """
        count, kept, listed, size, S = self.lists
        f, gone = self.front, 0
        while over > 0 and f < bound:
            n = count[f]
            if n:
                if n * size >= over:
                    n = -(-over // size)
                    count[f] -= n
                    gone += n
                    over -= n * size
                    break
                count[f] = 0
                gone += n
                over -= n * size
            n = kept[f]
            if n:
                if (n - 1) * S >= over:
                    n = -(-over // S)
                    self.drop_states(f, n)
                    gone += n
                    over -= n * S
                    break
                kept[f] = 0
                gone += n
                over -= n * S
            if f in listed:
                del listed[f]
            f += 1
        self.front = f
        self.gone += gone
        return over

    def trim(self, stretches: _Stretches, k: int, floor: int, over: int) -> int:
        """Evict ``over`` bytes from the deep end of k's stretch, down to a depth of ``floor``.

        Returns the bytes that are still over.
        """
        size = stretches.item_bytes
        n = min(stretches.low[k] + stretches.count[k] - floor, -(-over // size))
        stretches.count[k] -= n
        self.gone += n
        return over - n * size

    def evict_path(
        self, over: int, own: _Stretches, i: int, run: int, depth: int, spared: int = 0
    ) -> tuple[int, int]:
        """Evict ``over`` bytes while request i uses its path, which was held up to ``depth``.

        A path is touched deepest first, after what is new of it was inserted. So what was held of
        it can be evicted before its turn: then it is inserted again, which frees nothing. What was
        touched already (``spared``) is not. Returns the bytes still over, and how deep the path was
        still held when its turn came.
        """
        while over > 0 and depth:
            k = own.user_at(run, depth)
            over = self.evict(over, k)
            if over > 0 and own is not self.blocks:
                over = self.trim(self.blocks, k, self.blocks.low[k], over)
            if over > 0:
                over = self.trim(own, k, depth, over)
            if over > 0:
                floor = own.low[k]
                self.gone += depth - floor - (floor < spared <= depth)
                own.count[k], depth = 0, floor
        if over > 0:
            over = self.evict_own(over, i)
        return over, depth

    def evict_own(self, over: int, i: int) -> int:
        """Evict ``over`` bytes, at last of what request i itself has used so far."""
        over = self.evict(over, i)
        if over > 0:
            over = self.trim(self.blocks, i, self.blocks.low[i], over)
        if over > 0:
            n = -(-over // self.state_bytes)
            self.drop_states(i, n)
            self.gone += n
            over -= n * self.state_bytes
        return over


def _grid_rows(
    trace: Trace, margin: int, stride: int, wanted: Int64Array
) -> Iterator[tuple[int, ...]]:
    """What the walk reads of each request: blocks, tokens of the prefix, states, the forks."""
    shared_states = np.minimum(trace.shared // stride, wanted)
    columns = (
        *(trace.length, trace.shared, trace.ceiling - margin, trace.block_at(trace.shared)),
        *((trace.prompt - 1) // trace.grain * trace.grain, wanted, shared_states),
        trace.block_at(shared_states * stride),
    )
    return zip(*(column.tolist() for column in columns), strict=True)


def _walk_grid(case: Case, stride: int, wanted: Int64Array) -> Columns:
    """All kept states as stretches; ``wanted`` of each request, every ``stride`` blocks."""
    trace, g, margin, limit = case.trace, case.trace.grain, case.margin, case.limit or 0
    R, size, S, row = len(trace), case.block_bytes, case.state_bytes, trace.paths.row
    grid = _Stretches(trace, stride, S)
    order = _Order(case, grid.count, {})
    blocks, evict = order.blocks, order.evict
    take_over, take_states_over = blocks.take_over, grid.take_over
    low, count, block_user = blocks.low, blocks.count, blocks.user
    state_low, state_count, state_user = grid.low, grid.count, grid.user
    attention, reused, written, evicted = [0] * R, [0] * R, [0] * R, [0] * R
    used = 0
    for i, (length, shared, prefix, fork, most, want, known, state_fork) in enumerate(
        _grid_rows(trace, margin, stride, wanted)
    ):
        if not length:  # no full block: nothing to look up or to keep
            continue
        cached, bound, run, order.gone = shared, i, row[i + 1] - 1, 0
        if shared:
            bound = block_user[fork]
            if low[bound] + count[bound] < shared:
                cached, bound = blocks.held_depth(run, shared)
                if not cached:
                    bound = i
                prefix = min(cached * g, most) - margin
            attention[i] = prefix if prefix > 0 else 0
        have = hit = 0
        if known:
            have = known
            user = state_user[state_fork]
            if state_low[user] + state_count[user] < known:
                have, user = grid.held_depth(run, known)
            if have:
                hit = min(have, attention[i] // g // stride)
                reused[i] = hit * stride * g
                if user < bound:
                    bound = user
        new = want - have
        over = used + (length - cached) * size + new * S - limit
        # Evict all that is due before anything of this request. If that is not enough, what it is
        # about to use is due next: then one thing after the other, as the plain replay does it.
        if over > 0:
            over = evict(over, bound)
        count[i] = length
        step_by_step = over > 0
        if step_by_step:
            over, _ = order.evict_path(over - new * S, blocks, i, run, cached)
        used = limit + over
        if shared:
            take_over(i, block_user[fork], shared)
        if step_by_step and want:
            have, _ = grid.held_depth(run, known)
            new = want - have
            over = used + new * S - limit
            over, rest = order.evict_path(over, grid, i, run, have, hit)
            new += have - rest - (rest < hit <= have)
            used = limit + over
        state_count[i] = want
        if known:
            take_states_over(i, state_user[state_fork], known)
        written[i], evicted[i] = new, order.gone
    return attention, reused if case.rule.states else attention, written, evicted


def _grid_of(case: Case) -> tuple[int, Int64Array] | None:
    """The stride in blocks and the states wanted of each request, if a rule keeps one grid of all.

    Such states are kept as stretches, as blocks are. That needs one pool, LRU, and room for any
    single request, so that none evicts what it has used itself; and a request that keeps all that
    it may hit. A rule without states (`attention`) has an empty grid.
    """
    trace, g, rule, R = case.trace, case.trace.grain, case.rule, len(case.trace)
    request, none = Lengths(trace.prompt, trace.output, trace.message), np.zeros(R, np.int64)
    if not rule.states:
        return 1, none
    if not rule.arrays or rule.reads or case.eviction != "lru" or case.state_limit is not None:
        return None
    answer = whole_positions(rule.place(request, Match(none, none), case.sizes))
    if len(answer) != 1 or type(answer[0]) is not Span:
        return None
    first, last, step = answer[0]
    if isinstance(first, np.ndarray) or first != step or step % g:
        return None
    wanted = np.minimum(np.broadcast_to(last, R), trace.length * g) // step
    largest = (wanted * case.state_bytes + trace.length * case.block_bytes).max()
    if largest > (case.limit or 0) or (wanted < (trace.prompt - 1) // step).any():
        return None
    return step // g, wanted


class _Plan(NamedTuple):
    """The blocks whose states a rule keeps of each request that matches just this, as lists."""

    attention: list[int]
    joint: list[int]
    seen: list[int]  # how many of the blocks an earlier request had
    ends: list[int]  # request i's blocks are blocks[ends[i] : ends[i + 1]], deepest first
    blocks: list[int]


def _plans(case: Case) -> list[_Plan]:
    """What the rule keeps of each request in the two cases that nearly all requests are in.

    Either nothing of its prefix was evicted, or all but what the request before it has as well.
    Both are only guesses of what it will match: where it matches something else, the rule is asked.
    Empty for a rule that does not take arrays, or whose spans have more states than the trace has
    blocks.
    """
    trace, rule, B = case.trace, case.rule, case.sizes.block
    if not rule.arrays:
        return []
    ceiling = (trace.ceiling - case.margin).clip(0)
    after_previous = np.minimum(ceiling, trace.shared_with_previous * trace.grain)
    request = Lengths(trace.prompt, trace.output, trace.message)
    plans = []
    for prefix in (ceiling, after_previous):
        joint = prefix // B * B
        positions = whole_positions(rule.place(request, Match(prefix, joint), case.sizes))
        spans = [position for position in positions if type(position) is Span]
        if sum(span_counts(trace, span).sum() for span in spans) > trace.size:
            return []
        places = [places_of(trace, position) for position in positions]
        keys = np.concatenate([(owner << 32) - depth for owner, depth in places] or [prefix[:0]])
        if len(places) > 1 or spans:
            keys.sort()
            keys = keys[np.append(True, np.diff(keys) > 0)[: len(keys)]]
        owner = (keys + (1 << 32) - 1) >> 32
        depth = (owner << 32) - keys
        ends = np.searchsorted(owner, np.arange(len(trace) + 1))
        seen = np.bincount(owner[depth <= trace.shared[owner]], minlength=len(trace))
        columns = (prefix, joint, seen, ends, trace.find_blocks(owner, depth))
        plans.append(_Plan(*(column.tolist() for column in columns)))
    return plans


class _States(_Order):
    """The order of last use where states are kept one by one.

    Request k used ``states[k]`` states last. ``user`` is each state's last user, -1 for none; where
    that is before the first request that has any left, it is gone, whatever ``has_state`` says.
    """

    def __init__(self, case: Case, plans: list[_Plan]) -> None:
        requests = len(case.trace)
        self.plans, self.own_pool = plans, case.state_limit is not None
        self.refresh = case.eviction != "hit-node"
        self.hits = [-1] * requests  # the state that a request hit and used
        # The others that it used: those of the plan with this number, unless they are listed.
        self.by_plan, self.listed = [0] * requests, dict[int, list[int]]()
        self.states = [0] * requests
        if self.own_pool:
            super().__init__(case, [0] * requests, {})
        else:
            super().__init__(case, self.states, self.listed)
        self.has_state, self.user = bytearray(case.trace.size), [-1] * case.trace.size
        # The request that loses states one by one, and which of them are left.
        self.losing, self.rest = -1, iter(list[int]())
        # In a pool of their own: the first request that has any left, and the bytes over the limit.
        self.oldest, self.over = 0, -(case.state_limit or 0)

    def drop_states(self, k: int, number: int) -> None:
        """Evict the least recent of the states that request k used last."""
        self.states[k] -= number
        if k != self.losing:
            self.losing, self.rest = k, iter(self.in_order(k))
        for block in self.rest:
            if self.user[block] == k:
                self.user[block] = -1
                self.has_state[block] = 0
                number -= 1
                if not number:
                    return

    def in_order(self, k: int) -> list[int]:
        """The states that request k used: what it hit, unless that came again, and what it kept."""
        keep = self.listed.get(k)
        if keep is None:
            plan = self.plans[self.by_plan[k]]
            keep = plan.blocks[plan.ends[k] : plan.ends[k + 1]]
        hit = self.hits[k]
        return keep if hit < 0 or (self.refresh and hit in keep) else [hit, *keep]

    def known(self, keep: list[int], oldest: int, bound: int) -> tuple[int, int]:
        """How many of these states are there already, and the earliest user, or ``bound``."""
        users = [k for k in map(self.user.__getitem__, keep) if k >= oldest]
        return len(users), min(bound, *users) if users else bound

    def use_hit(self, i: int, state: int) -> None:
        """Request i uses the state that it hit."""
        self.states[self.user[state]] -= 1
        self.states[i] = 1
        self.user[state], self.hits[i] = i, state

    def use_states(self, i: int, keep: list[int], all_new: bool) -> None:
        """Request i keeps states of which none is due, and some may be there already."""
        user, states, oldest = self.user, self.states, self.front
        if all_new:
            for block in keep:
                self.has_state[block] = 1
                user[block] = i
            states[i] += len(keep)
            return
        for block in keep:
            k = user[block]
            if k < oldest:
                self.has_state[block] = 1
            elif self.refresh:
                states[k] -= 1
            else:
                continue
            user[block] = i
            states[i] += 1

    def keep_states(self, i: int, keep: list[int], over: int) -> tuple[int, int]:
        """Keep states of request i, of which some may be due before their turn.

        Returns how many were newly written, and the bytes that are over then.
        """
        used_so_far = self.listed[i] = []  # what `drop_states` finds where i evicts its own
        written = at = 0
        while at < len(keep):
            oldest, new = self.oldest if self.own_pool else self.front, 0
            while at < len(keep):
                block = keep[at]
                k = self.user[block]
                if k < oldest:
                    new += 1
                    self.has_state[block] = 1
                    if block == self.hits[i]:  # evicted since it was hit
                        self.hits[i] = -1
                elif new:
                    break  # first evict what is due: it may be this one
                elif self.refresh:
                    self.states[k] -= 1
                at += 1
                if k < oldest or self.refresh:
                    self.user[block] = i
                    self.states[i] += 1
                    used_so_far.append(block)
            written += new
            if self.own_pool:
                self.evict_states(new, i)
            else:
                over = self.evict_own(over + new * self.state_bytes, i)
            if self.losing == i:  # it goes on to use more
                self.losing = -1
        return written, over

    def evict_states(self, new: int, i: int) -> None:
        """Make room for new states of request i in the states' own pool, at last among its own."""
        S = self.state_bytes
        self.over += new * S
        while self.over > 0:
            k, n = self.oldest, self.states[self.oldest]
            if k == i or (n - 1) * S >= self.over:
                n = -(-self.over // S)
                self.drop_states(k, n)
            else:
                self.states[k] = 0
                self.listed.pop(k, None)
                self.oldest += 1
            self.gone += n
            self.over -= n * S


class _StateWalk:
    """What the walk over single states reads, and the parts of it that few requests need."""

    def __init__(self, case: Case) -> None:
        trace, R = case.trace, len(case.trace)
        self.case, self.paths, self.plans = case, trace.paths, _plans(case)
        no_plan = _Plan([-1] * R, [-1] * R, [0] * R, [0] * (R + 1), [])
        self.all_kept, self.little_kept = self.plans or [no_plan, no_plan]
        self.order = _States(case, self.plans)
        self.request, self.match = Lengths(0), Match()
        self.details = [column.tolist() for column in (trace.prompt, trace.output, trace.message)]
        self.most = ((trace.prompt - 1) // trace.grain * trace.grain).tolist()
        self.splits = [False] * R if self.plans else trace.splits.tolist()
        self.prefix = (trace.ceiling - case.margin).clip(0)

    def rows(self) -> Iterator[tuple[int, ...]]:
        """Blocks, shared blocks, tokens of the prefix, fork, its run and end, then the plan's."""
        trace, plan = self.case.trace, self.all_kept
        columns = (trace.length, trace.shared, self.prefix, trace.block_at(trace.shared))
        lists = [column.tolist() for column in (*columns, *self._last_runs())]
        planned = plan.attention, plan.joint, plan.ends[1:], plan.seen
        return zip(*lists, *planned, strict=True)

    def _last_runs(self) -> tuple[Int64Array, Int64Array]:
        """The run that each request's prefix ends in, and one past its last block."""
        trace, g = self.case.trace, self.case.trace.grain
        run, end = np.zeros((2, len(trace)), np.int64)
        request = np.flatnonzero(self.prefix >= g)
        depth = self.prefix[request] // g
        run[request] = trace.run_at(request, depth)
        end[request] = trace.find_blocks(request, depth) + 1
        return run, end

    def rest_of_prefix(self, i: int, shared: int) -> tuple[int, int, int, int, int]:
        """Where a part of the shared blocks was evicted: (blocks, bound, tokens, run, end)."""
        paths, g, run = self.paths, self.case.trace.grain, self.paths.row[i + 1] - 1
        cached, bound = self.order.blocks.held_depth(run, shared)
        prefix = max(min(cached * g, self.most[i]) - self.case.margin, 0)
        end = prefix // g
        while paths.base[run] >= end > 0:
            run -= 1
        end += paths.first[run] - paths.base[run]
        return cached, bound if cached else i, prefix, run, end

    def older_state(self, state: int, run: int, oldest: int) -> tuple[int, int]:
        """The deepest state that is left above one that is gone, and its run; -1: there is none."""
        paths, has_state, user = self.paths, self.order.has_state, self.order.user
        while state < 0 or user[state] < oldest:
            if state >= 0:
                has_state[state] = 0
                state = has_state.rfind(1, paths.first[run], state)
            elif paths.base[run]:
                run -= 1
                first = paths.first[run]
                state = has_state.rfind(1, first, first + paths.count[run])
            else:
                break
        return state, run

    def keep_of(
        self, i: int, length: int, prefix: int, joint: int, whole: bool
    ) -> tuple[list[int], int]:
        """What the rule keeps of a request that did not match what the first plan guessed.

        Returns the blocks, and how many of them an earlier request may have had.
        """
        plan, trace = self.little_kept, self.case.trace
        if joint == plan.joint[i] and prefix == plan.attention[i]:
            self.order.by_plan[i] = 1
            return plan.blocks[plan.ends[i] : plan.ends[i + 1]], plan.seen[i]
        request, match = self.request, self.match
        request.prompt, request.output, request.message = (c[i] for c in self.details)
        match.attention, match.joint = prefix, joint
        match.splits = self.splits[i] and whole
        positions = self.case.rule.place(request, match, self.case.sizes)
        depths = depths_of(positions, trace.grain, request.prompt)
        keep = self.order.listed[i] = self.paths.blocks_at(self.paths.row[i + 1] - 1, depths)
        return keep, len(keep)


def _walk_states(case: Case) -> Columns:
    """States one by one, as plans or the rule itself place them."""
    walk, g, R = _StateWalk(case), case.trace.grain, len(case.trace)
    order, paths, planned = walk.order, walk.paths, walk.all_kept.blocks
    size, limit, own_pool = case.block_bytes, case.limit or 0, order.own_pool
    S = 0 if own_pool else case.state_bytes
    row, base, first = paths.row, paths.base, paths.first
    low, count, block_user = order.blocks.low, order.blocks.count, order.blocks.user
    user, find, take_over = order.user, order.has_state.rfind, order.blocks.take_over
    evict, attention = order.evict, walk.prefix.tolist()
    reused, written, evicted = [0] * R, [0] * R, [0] * R
    used = oldest = to = 0
    for i, (length, shared, prefix, fork, run, end, guess, joint_guess, upto, seen) in enumerate(
        walk.rows()
    ):
        at, to = to, upto
        if not length:  # no full block: nothing to look up or to keep
            continue
        cached, bound, joint, state, order.gone = shared, i, 0, -1, 0
        if shared:
            bound = block_user[fork]
            if low[bound] + count[bound] < shared:
                cached, bound, prefix, run, end = walk.rest_of_prefix(i, shared)
                attention[i] = prefix
            if prefix >= g:
                state = find(1, first[run], end)
                if state < 0 or user[state] < oldest:
                    state, run = walk.older_state(state, run, oldest)
                if state >= 0:
                    reused[i] = joint = (base[run] + state - first[run] + 1) * g
                    if user[state] < bound:
                        bound = user[state]
        if joint == joint_guess and prefix == guess:
            keep = planned[at:to]
        else:
            keep, seen = walk.keep_of(i, length, prefix, joint, cached == shared)
        new = len(keep)
        if seen:
            known, bound = order.known(keep, oldest, bound)
            new -= known
        # As in a grid: all that is due at once, where nothing of this request is.
        over = used + (length - cached) * size + new * S - limit
        if over > 0:
            over = evict(over, bound)
        count[i] = length
        one_by_one = over > 0 or own_pool
        if one_by_one:
            over, _ = order.evict_path(over - new * S, order.blocks, i, row[i + 1] - 1, cached)
        used, oldest = limit + over, oldest if own_pool else order.front
        if shared:
            take_over(i, block_user[fork], shared)
        if state >= 0 and user[state] >= oldest:
            order.use_hit(i, state)
        if one_by_one:
            new, over = order.keep_states(i, keep, over)
            used, oldest = limit + over, order.oldest if own_pool else order.front
        elif keep:
            order.use_states(i, keep, new == len(keep))
        written[i], evicted[i] = new, order.gone
    return attention, reused, written, evicted
