"""SGLang's cache over a whole trace: what `sglang.Tree` does, on runs that are never expanded.

A block is cached or not, a node of the tree ends after it or not, and a state is held there or not:
three bytes a block instead of nodes with lists of ids. With a block all before it are cached, so a
path is cached up to its first block that is not. Nodes are named by their last block. What requests
put out has no blocks and is shared with nobody: a state of decoding beyond a prompt's blocks is a
leaf, numbered beyond all blocks. `sglang.Tree` on block numbers is the plain twin (``plainly``).
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from itertools import islice

from mambackpt.replay.rules import sglang_extends
from mambackpt.replay.serve.sglang import CacheSettings, Tree, serve_ids, too_few_slots
from mambackpt.replay.trace import Trace

Row = tuple[int, int, int, int]  # attention, reused, written, evicted


def walk_trace(trace: Trace, *, plainly: bool = False, **settings: object) -> Iterator[Row]:
    """Serve a trace and yield, per request, tokens of attention and reuse, states new and gone."""
    options = CacheSettings(**settings)  # type: ignore[arg-type]
    return _walk_plainly(trace, options) if plainly else _walk(trace, options)


def _walk_plainly(trace: Trace, settings: CacheSettings) -> Iterator[Row]:
    tree, g = Tree(settings), trace.grain
    lengths = zip(trace.prompt.tolist(), trace.output.tolist(), strict=True)
    for request, (L, output) in enumerate(lengths):
        end, blocks, before = L + max(output, 1) - 1, trace.blocks(request), tree.evicted
        ids = (*blocks, *[~request] * (end // g - len(blocks)))
        served = serve_ids(tree, settings, ids, L, end, g)
        yield served.attention, served.reused, len(served.created), tree.evicted - before


def _walk(trace: Trace, settings: CacheSettings) -> Iterator[Row]:
    tree, g = TraceTree(trace, settings), trace.grain
    chunk, budget, buffered = settings.chunk, settings.budget, settings.buffered
    grid, pins = settings.grid, settings.pins
    columns = (trace.prompt, trace.output, trace.ceiling // g, trace.length)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for request, (L, output, most, length) in enumerate(rows):
        end, before = L + max(output, 1) - 1, tree.evicted
        found, resumed = tree.lookup(request, most) if most else (0, 0)
        attention, h = found * g, resumed * g
        tree.pin(pins)
        branch = attention // chunk * chunk
        depths: list[int] = []
        last = end // grid * grid
        last = last if last > L or not buffered else 0
        for position, e in sglang_extends(L, h, branch, chunk, budget, buffered):
            depth = position // g
            if depth and (e < L or end > L):
                tree.make_room(1)
                tree.insert(request, depth)
                depths.append(depth)
            elif e == L == end:
                last = position
        depth = last // g
        if depth > length:
            tree.insert_output(request, length)
        elif depth:
            tree.insert(request, depth)
        if depth:
            depths.append(depth)
        tree.unpin()
        yield attention, h, len({*depths}), tree.evicted - before


class TraceTree:
    """As `sglang.Tree`, of a trace's blocks; a path is a request, a node is its last block."""

    def __init__(self, trace: Trace, settings: CacheSettings) -> None:
        self.per_path, self.slots, self.pinned = settings.per_path, settings.slots, 0
        paths = trace.paths
        self.row, self.base, self.first = paths.row, paths.base, paths.first
        self.count, self.deepest, self.outputs = paths.count, paths.deepest, trace.size
        self.cached, self.ends = bytearray(trace.size), bytearray(trace.size)
        self.held = bytearray(trace.size)
        self.children: defaultdict[int, int] = defaultdict(int)  # how many; -1 is the root
        # Whose state was used last, last, each with a run that ends a path to it; -1: no blocks.
        self.states: OrderedDict[int, int] = OrderedDict()
        self.locked, self.evicted = -1, 0
        self.depth = 0  # to which the request's path is cached, and a node ends

    def lookup(self, request: int, most: int) -> tuple[int, int]:
        """As in `Tree`, of a request's first ``most`` blocks, all of which were there before."""
        first, count, run, depth = self.first, self.count, self.row[request], 0
        while depth < most:
            start = first[run]
            stop = start + min(count[run], most - depth)
            missing = self.cached.find(0, start, stop)
            if missing >= 0:
                depth += missing - start
                break
            depth += stop - start
            run += 1
        if not depth:
            return 0, 0
        self.depth, last = depth, self.row[request + 1] - 1
        self._split(self._block(last, depth)[0])
        joint, state = self.deepest(self.held, self.row[request], last, depth)
        if joint:
            self.states.move_to_end(state)
            self.locked = state
        return depth, joint

    def insert(self, request: int, depth: int) -> None:
        """As in `Tree`; a request's depths ascend."""
        block, run = self._block(self.row[request + 1] - 1, depth)
        if self.cached[block]:
            self._split(block)
        else:
            self._cache(block, run)
            self.ends[block] = 1
        self.depth = max(self.depth, depth)
        if self.held[block]:
            self.states.move_to_end(block)
        else:
            self.held[block] = 1
            self._hold(block, run)
        self.locked = block

    def insert_output(self, request: int, length: int) -> None:
        """Hang a state of decoding below the ``length`` blocks of a request."""
        leaf, run, parent = self.outputs + request, -1, -1
        if length:
            run = self.row[request + 1] - 1
            parent = self.first[run] + self.count[run] - 1
        if parent >= 0 and not self.cached[parent]:
            self._cache(parent, run)  # together with the leaf: one node
        else:
            if parent >= 0:
                self._split(parent)
            self.children[parent] += 1
        self._hold(leaf, run)
        self.locked = leaf

    def pin(self, count: int) -> None:
        """As in `Tree`."""
        self.make_room(count)
        self.pinned = count

    def unpin(self) -> None:
        """As in `Tree`."""
        self.pinned, self.locked, self.depth = 0, -1, 0

    def make_room(self, count: int) -> None:
        """As in `Tree`."""
        if self.slots is None:
            return
        over = self.pinned + len(self.states) + count - self.slots
        while over > 0:
            victim = next(iter(self.states), -1)
            if victim == self.locked:
                victim = next(islice(self.states, 1, None), -1)
            if victim < 0:
                raise too_few_slots(self.slots, self.pinned + count)
            run = self.states.pop(victim)
            if victim < self.outputs:
                self.held[victim] = 0
            if not self.children[victim]:
                self._drop_leaf(victim, run)
            self.evicted += 1
            over -= 1

    def _block(self, run: int, depth: int) -> tuple[int, int]:
        """The block at a depth of the path that ends with ``run``, and the run that it is in."""
        base = self.base
        while base[run] >= depth:
            run -= 1
        return self.first[run] + depth - 1 - base[run], run

    def _split(self, block: int) -> None:
        """Let a node end after a cached block; where one lies across it, that one goes on below."""
        if not self.ends[block]:
            self.ends[block] = 1
            self.children[block] = 1

    def _cache(self, block: int, run: int) -> None:
        """Cache a path from where it is cached to up to ``block``, as a new node."""
        first, base, start = self.first, self.base, self.depth
        parent = self._block(run, start)[0] if start else -1
        while True:
            low = first[run] + max(start - base[run], 0)
            self.cached[low : block + 1] = b"\1" * (block + 1 - low)
            if base[run] <= start:
                break
            run -= 1
            block = first[run] + self.count[run] - 1
        self.children[parent] += 1

    def _hold(self, node: int, run: int) -> None:
        """Hold a new state there, and drop what that is too much for its path."""
        self.states[node] = run
        if self.per_path is None:
            return
        holders, stop = [node], node
        if node >= self.outputs and run >= 0:
            stop = self.first[run] + self.count[run]
        while run >= 0:
            above = self.held.rfind(1, self.first[run], stop)
            if above >= 0:
                holders.append(above)
                stop = above
            elif self.base[run]:
                run -= 1
                stop = self.first[run] + self.count[run]
            else:
                break
        beyond = len(holders) - self.per_path
        for above in holders[:0:-1]:
            if beyond > 0 and above != self.locked and self.children[above] == 1:
                del self.states[above]
                self.held[above] = 0
                self.evicted += 1
                beyond -= 1

    def _drop_leaf(self, leaf: int, run: int) -> None:
        """Forget a leaf's blocks, up to where the node above it ends."""
        self.children.pop(leaf, None)
        parent = -1
        if run >= 0:
            first, end = self.first[run], leaf + 1
            if leaf < self.outputs:
                self.ends[leaf] = 0
            else:
                end = first + self.count[run]
            while (parent := self.ends.rfind(1, first, end)) < 0:
                self.cached[first:end] = bytes(end - first)
                if not self.base[run]:
                    break
                run -= 1
                first, end = self.first[run], self.first[run] + self.count[run]
            if parent >= 0:
                self.cached[parent + 1 : end] = bytes(end - parent - 1)
        self.children[parent] -= 1
