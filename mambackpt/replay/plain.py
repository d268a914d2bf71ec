"""The truth: a readable replay, request by request.

Sets without a limit, one ordered dict for a pool, every eviction one by one. It shares nothing with
the fast replays but the case.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral
from typing import Any

import numpy as np

from mambackpt.replay.case import Case, Columns
from mambackpt.replay.rules import Lengths, MarconiCosts, Match, Positions, Span
from mambackpt.replay.trace import Trace


@dataclass(frozen=True, slots=True)
class Kept:
    """What a request left: the positions whose states it kept (tokens), and what is held then.

    ``new`` of the states were written, ``gone`` states and blocks evicted for it.
    """

    positions: list[int]
    new: int
    gone: int
    blocks: int
    states: int


def replay_plainly(
    case: Case, rows: Sequence[list[int]], watch: Callable[[Kept], None] | None = None
) -> Columns:
    """The readable replay; ``rows`` are the expanded block numbers of each request.

    ``watch`` is told after every request what it left.
    """
    store = _PlainSets() if case.limit is None else _PlainPool(case)
    trace, g, place = case.trace, case.trace.grain, case.rule.place
    attention, reused, written, evicted = [], [], [], []
    requests = zip(
        *(a.tolist() for a in (trace.prompt, trace.output, trace.message, trace.splits)),
        trace.shared.tolist(),
        rows,
        strict=True,
    )
    for prompt, output, message, splits, shared, ids in requests:
        run = 0
        for block in ids:
            if block not in store.blocks:
                break
            run += 1
        found = max(min(run, (prompt - 1) // g) * g - case.margin, 0)
        hit = found // g
        while case.rule.states and hit and ~ids[hit - 1] not in store.states:
            hit -= 1
        match = Match(found, hit * g, splits and run == shared)
        depths: list[int] = []
        if case.rule.states:
            positions = place(Lengths(prompt, output, message), match, case.sizes)
            depths = _depths(positions, g, prompt)
        new, gone = store.keep(ids, hit if case.rule.states else 0, depths)
        attention.append(found)
        reused.append(hit * g if case.rule.states else found)
        written.append(new)
        evicted.append(gone)
        if watch:
            watch(Kept([depth * g for depth in depths], new, gone, *store.held()))
    return attention, reused, written, evicted


class _PlainSets:
    """Everything ever stored; the state after block b is ~b."""

    def __init__(self) -> None:
        self.blocks: set[int] = set()
        self.states: set[int] = set()

    def held(self) -> tuple[int, int]:
        """How many blocks and states."""
        return len(self.blocks), len(self.states)

    def keep(self, ids: list[int], hit: int, depths: list[int]) -> tuple[int, int]:
        """Store a request's blocks and its states at these depths; return (new, evicted)."""
        self.blocks.update(ids)
        before = len(self.states)
        self.states.update([~ids[depth - 1] for depth in depths])
        return len(self.states) - before, 0


class _PlainPool:
    """Blocks b and states ~b in the order of their last use, within a limit of bytes."""

    def __init__(self, case: Case) -> None:
        self.block_bytes, self.state_bytes = case.block_bytes, case.state_bytes
        self.refresh = case.eviction != "hit-node"
        self.blocks: OrderedDict[int, int] = OrderedDict()
        self.states = self.blocks if case.state_limit is None else OrderedDict()
        self.limit, self.state_limit = case.limit or 0, case.state_limit
        self.used = self.state_used = self.state_count = 0
        self.tree = None if case.eviction in ("lru", "hit-node") else _StateTree(case)
        self.supersede = case.eviction == "supersede"

    def held(self) -> tuple[int, int]:
        """How many blocks and states."""
        one_pool = self.states is self.blocks
        return len(self.blocks) - one_pool * self.state_count, self.state_count

    def keep(self, ids: list[int], hit: int, depths: list[int]) -> tuple[int, int]:
        """Touch or insert deepest first, so that the root ends up most recent."""
        blocks, states, tree = self.blocks, self.states, self.tree
        new = gone = 0
        for block in reversed(ids):
            if block in blocks:
                blocks.move_to_end(block)
            else:
                blocks[block] = self.block_bytes
                self.used += self.block_bytes
                gone += self._make_room()
        if hit and ~ids[hit - 1] in states:
            states.move_to_end(~ids[hit - 1])
            if tree:
                tree.refresh(ids[hit - 1])
        for depth in depths:
            state = ~ids[depth - 1]
            if state in states:
                if self.refresh:
                    states.move_to_end(state)
                    if tree:
                        tree.refresh(~state)
                continue
            states[state] = self.state_bytes
            self.state_count += 1
            new += 1
            if tree:
                tree.add(ids, depth)
            if self.state_limit is None:
                self.used += self.state_bytes
                gone += self._make_room()
            else:
                self.state_used += self.state_bytes
                while self.state_used > self.state_limit:
                    self.state_used -= self._pop(states)
                    gone += 1
        if self.supersede and hit and depths and depths[0] > hit:
            gone += self._supersede(ids[hit - 1])
        return new, gone

    def _supersede(self, state: int) -> int:
        """Let a state go that a deeper one of the same request replaces; 1 if it does."""
        tree = self.tree
        if tree is None or state not in tree.used or len(tree.after[state]) > 1:
            return 0
        tree.remove(state)
        self.state_count -= 1
        if self.state_limit is None:
            self.used -= self.states.pop(~state)
        else:
            self.state_used -= self.states.pop(~state)
        return 1

    def _make_room(self) -> int:
        gone = 0
        while self.used > self.limit:
            self.used -= self._pop(self.blocks)
            gone += 1
        return gone

    def _pop(self, items: OrderedDict[int, int]) -> int:
        """Evict one item and return its bytes: the least recent, or the state that goes for it."""
        if not self.tree:
            key, size = items.popitem(last=False)
            self.state_count -= key < 0
            return size
        key = next(iter(items))
        self.state_count -= key < 0
        return items.pop(~self.tree.pop() if key < 0 else key)


class _StateTree:
    """The kept states, each with the state before it on its prefix, for state-aware evictions."""

    def __init__(self, case: Case) -> None:
        self.grain = case.trace.grain
        self.costs = MarconiCosts(published=case.eviction == "flops-as-published")
        self.eviction = case.eviction
        self.clock = 0
        self.path: dict[int, list[int]] = {}  # a request that has the state's block
        self.depth: dict[int, int] = {-1: 0}
        self.before: dict[int, int] = {}  # -1: the empty prefix
        self.after: dict[int, set[int]] = {-1: set()}
        self.used: dict[int, int] = {}  # the time of the last use
        self.worth: dict[int, float] = {}

    def refresh(self, state: int) -> None:
        self.clock += 1
        self.used[state] = self.clock

    def add(self, ids: list[int], depth: int) -> None:
        state = ids[depth - 1]
        before = next((ids[d] for d in range(depth - 2, -1, -1) if ids[d] in self.used), -1)
        below = {
            other
            for other in self.after[before]
            if self.depth[other] > depth and self.path[other][depth - 1] == state
        }
        self.path[state], self.depth[state] = ids, depth
        self.after[before] -= below
        self.after[before].add(state)
        self.after[state] = below
        self.refresh(state)
        for other, earlier in [(state, before), *((other, state) for other in below)]:
            self.before[other] = earlier
            self._weigh(other)

    def pop(self) -> int:
        """Remove and return the state that is due by this order of eviction."""
        if self.eviction.startswith("flops"):
            candidates = [s for s in self.used if len(self.after[s]) <= 1]
            recency = _normalised([self.used[s] for s in candidates])
            saving = _normalised([self.worth[s] for s in candidates])
            state = candidates[int(np.argmin(recency + saving))]
        else:
            # Of equals the one goes that was used longest ago.
            state = min(self.used, key=lambda s: (self._value(s), self.used[s]))
        self.remove(state)
        return state

    def _value(self, state: int) -> float:
        """What is lost with a state, by the other orders."""
        depth, before = self.depth[state], self.depth[self.before[state]]
        after = min((self.depth[other] for other in self.after[state]), default=np.inf)
        if self.eviction == "thinning":
            return depth - before
        if self.eviction == "even-gaps":
            return after - before
        if self.eviction == "nearest-neighbour":
            return min(depth - before, after - depth)
        if self.eviction == "frontier":
            return len(self.after[state]) != 1
        return 0

    def remove(self, state: int) -> None:
        """Take a state out, and join those after it to the one before it."""
        before = self.before.pop(state)
        below = self.after.pop(state)
        self.after[before].remove(state)
        self.after[before] |= below
        for table in (self.path, self.depth, self.used):
            del table[state]
        self.worth.pop(state, None)
        for other in below:
            self.before[other] = before
            self._weigh(other)

    def _weigh(self, state: int) -> None:
        """What its FLOPs are worth; they follow from the state before it alone."""
        if self.eviction.startswith("flops"):
            length, parent = self.depth[state], self.depth[self.before[state]]
            self.worth[state] = self.costs.efficiency(length * self.grain, parent * self.grain)


def _normalised(values: Sequence[float]) -> Any:
    """Values stretched to 0 .. 1, all 1 where they are equal, as Marconi compares them."""
    array = np.array(values, np.float64)
    low, high = array.min(), array.max()
    return (array - low) / (high - low) if high > low else np.ones(len(array))


def expand_rows(trace: Trace) -> list[list[int]]:
    """Return every request's block numbers: what the plain replay reads, and memory to match."""
    numbers = list(range(trace.size))
    first, count, row = trace.first.tolist(), trace.count.tolist(), trace.row.tolist()
    return [
        [n for r in range(lo, hi) for n in numbers[first[r] : first[r] + count[r]]]
        for lo, hi in pairwise(row)
    ]


def _depths(positions: Positions, grain: int, prompt: int) -> list[int]:
    """The blocks that end at or before each position inside a prompt, deepest first.

    What is no whole number of tokens (half a prompt, None, True) is no position.
    """
    depths: set[int] = set()
    for position in positions:
        if isinstance(position, Span):
            if all(map(_counts_tokens, position)):
                first, last, step = position
                depths |= {at // grain for at in range(first, min(last, prompt) + 1, step)}
        elif _counts_tokens(position) and position <= prompt:
            depths.add(position // grain)
    return sorted((depth for depth in depths if depth > 0), reverse=True)


def _counts_tokens(value: object) -> bool:
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))
