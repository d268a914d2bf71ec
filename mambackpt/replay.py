"""Replays of request traces: what a placement rule reuses, recomputes, writes and evicts.

One request at a time (a simplification, say so in a figure): look up the attention hit and the
deepest kept state in it, then store what the rule keeps. Full blocks only; a lookup may reuse at
most L - 1 tokens; states of decode steps are left out. Three ways to the same answer:

* `replay_plainly` is the truth: sets, one ordered dict for a pool, every eviction;
* without a pool, rules that compute with arrays are solved for all requests at once;
* everything else walks the requests over runs of blocks that are never expanded.
"""

import argparse
import csv
import json
import sys
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import (
    BrokenExecutor,
    Executor,
    Future,
    ProcessPoolExecutor,
    as_completed,
)
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Protocol, TypeAlias

import numpy as np

from mambackpt.errors import CheckpointError, CheckpointValueError
from mambackpt.geometry import checked_int
from mambackpt.models import PRESETS
from mambackpt.rules import (
    RULES,
    MarconiCosts,
    Match,
    Place,
    Request,
    Rule,
    Settings,
    Span,
    get_rule,
)
from mambackpt.traces import (
    GENERATORS,
    LAYOUTS,
    Int64Array,
    Paths,
    Trace,
    expand,
    load_trace,
)

EVICTIONS = ("lru", "hit-node", "thinning", "flops", "flops-as-published")
_ROUNDS = 24  # of the array solution, before the walk takes over


class ModelSizes(Protocol):
    """What a pool needs to know of a model: bytes of all its layers (`models.HybridModel`)."""

    @property
    def model_token_bytes(self) -> int:
        """Bytes of attention cache per token."""

    @property
    def model_state_bytes(self) -> int:
        """Bytes of one state."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request of a replay, in tokens; ``written`` and ``evicted`` count states and items."""

    prompt: int
    ceiling: int
    attention: int
    reused: int
    written: int
    evicted: int


@dataclass(frozen=True, eq=False)
class Replay:
    """What a rule did to a trace.

    Arrays with one entry per request, int64: ``prompt``, ``ceiling`` (tokens an unlimited
    attention cache would have reused), ``attention`` (tokens this one found), ``reused`` (tokens
    it resumed after), ``written`` (states newly written), ``evicted`` (states and attention
    blocks). Rates are shares of 1, sizes bytes.
    """

    trace: str
    rule: str
    block: int
    grain: int
    budget: int
    pool_bytes: int | None
    state_pool_bytes: int | None
    eviction: str
    token_bytes: int
    state_bytes: int
    prompt: Int64Array
    ceiling: Int64Array
    attention: Int64Array
    reused: Int64Array
    written: Int64Array
    evicted: Int64Array

    def __len__(self) -> int:
        return len(self.prompt)

    @property
    def hit_rate(self) -> float:
        """Reused tokens over prompt tokens."""
        return float(self.reused.sum() / self.prompt.sum())

    @property
    def ceiling_rate(self) -> float:
        """The hit rate of an unlimited cache of attention alone."""
        return float(self.ceiling.sum() / self.prompt.sum())

    @property
    def distance(self) -> float:
        """How far the hit rate lies below that ceiling."""
        return self.ceiling_rate - self.hit_rate

    @property
    def recomputed(self) -> int:
        """Prompt tokens that were computed."""
        return int((self.prompt - self.reused).sum())

    @property
    def states_written(self) -> int:
        """States newly written."""
        return int(self.written.sum())

    @property
    def states_per_request(self) -> float:
        """States newly written over requests."""
        return self.states_written / len(self)

    @property
    def bytes_written(self) -> int:
        """Bytes of the states newly written (0 where no model was given)."""
        return self.states_written * self.state_bytes

    @property
    def evictions(self) -> int:
        """States and attention blocks evicted."""
        return int(self.evicted.sum())

    def records(self) -> Iterator[RequestRecord]:
        """One record per request, in order."""
        columns = (
            self.prompt, self.ceiling, self.attention, self.reused, self.written, self.evicted
        )  # fmt: skip
        for row in zip(*(column.tolist() for column in columns), strict=True):
            yield RequestRecord(*row)

    def summary(self) -> dict[str, Any]:
        """The totals, ready for JSON or a table."""
        return {
            "trace": self.trace,
            "rule": self.rule,
            "block": self.block,
            "budget": self.budget,
            "pool_bytes": self.pool_bytes,
            "state_pool_bytes": self.state_pool_bytes,
            "eviction": self.eviction,
            "requests": len(self),
            "prompt_tokens": int(self.prompt.sum()),
            "reused_tokens": int(self.reused.sum()),
            "recomputed_tokens": self.recomputed,
            "hit_percent": 100 * self.hit_rate,
            "ceiling_percent": 100 * self.ceiling_rate,
            "states_written": self.states_written,
            "states_per_request": self.states_per_request,
            "state_bytes_written": self.bytes_written,
            "evictions": self.evictions,
        }


@dataclass(frozen=True, slots=True)
class _Case:
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
_Columns: TypeAlias = tuple[Int64Array | list[int], ...]


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

    >>> from mambackpt.traces import trace_from_tokens
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
    * "thinning": when a state is due, the one that shortens the way to an earlier state most
      cheaply goes: the least distance to the state before it on its prefix;
    * "flops", "flops-as-published": states at most one branch above the rest go by recency plus
      FLOPs saved per byte (Marconi, arXiv 2411.19379; ``costs`` has the model's shape).

    ``plainly`` uses the readable loop for everything. Raises CheckpointValueError for sizes, rules
    and names that do not fit.
    """
    case = _checked_case(
        trace,
        get_rule(rule),
        block,
        model=model,
        pool_bytes=pool_bytes,
        state_pool_bytes=state_pool_bytes,
        eviction=eviction,
        budget=budget,
        lookup_margin=lookup_margin,
        costs=costs,
    )
    columns = _replay_plainly(case, expand_rows(trace)) if plainly else _replay_fast(case)
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


def _replay_fast(case: _Case) -> _Columns:
    """The fastest of the ways that fits."""
    if case.limit is None:
        solved = _replay_arrays(case) if case.rule.arrays else None
        return _walk(case) if solved is None else solved
    if case.eviction in ("lru", "hit-node"):
        return _walk_pool(case)
    return _replay_plainly(case, expand_rows(case.trace))


def _checked_case(
    trace: Trace,
    rule: Rule,
    block: int,
    *,
    model: ModelSizes | str | None = None,
    pool_bytes: int | None = None,
    state_pool_bytes: int | None = None,
    eviction: str | None = None,
    budget: int = 8192,
    lookup_margin: int = 0,
    costs: MarconiCosts | None = None,
) -> _Case:
    block = checked_int("block", block)
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
    return _Case(
        trace,
        rule,
        Settings(block, checked_int("budget", budget)),
        pool_bytes,
        state_pool_bytes,
        eviction,
        0 if model is None else model.model_token_bytes * trace.grain,
        0 if model is None else model.model_state_bytes,
        checked_int("lookup_margin", lookup_margin, least=0),
        costs or MarconiCosts(published=eviction == "flops-as-published"),
    )


def _depths(positions: Sequence[Any], grain: int, length: int) -> list[int]:
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
    return [depth for depth in depths if 0 < depth <= length]


# --- the truth ------------------------------------------------------------------------------------


def _replay_plainly(case: _Case, rows: Sequence[list[int]]) -> _Columns:
    """The readable replay; ``rows`` are the expanded block numbers of each request."""
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
        positions = place(Request(prompt, output, message), match, case.settings)
        depths = _depths(positions, g, len(ids)) if positions else []
        new, gone = store.keep(ids, hit if case.rule.states else 0, depths)
        attention.append(found)
        reused.append(hit * g if case.rule.states else found)
        written.append(new)
        evicted.append(gone)
    return attention, reused, written, evicted


class _PlainSets:
    """Everything ever stored; the state after block b is ~b."""

    def __init__(self) -> None:
        self.blocks: set[int] = set()
        self.states: set[int] = set()

    def keep(self, ids: list[int], hit: int, depths: list[int]) -> tuple[int, int]:
        """Store a request's blocks and its states at these depths; return (new, evicted)."""
        self.blocks.update(ids)
        before = len(self.states)
        self.states.update([~ids[depth - 1] for depth in depths])
        return len(self.states) - before, 0


class _PlainPool:
    """Blocks b and states ~b in the order of their last use, within a limit of bytes."""

    def __init__(self, case: _Case) -> None:
        self.block_bytes, self.state_bytes = case.block_bytes, case.state_bytes
        self.refresh = case.eviction != "hit-node"
        self.blocks: OrderedDict[int, int] = OrderedDict()
        self.states = self.blocks if case.state_limit is None else OrderedDict()
        self.limit, self.state_limit = case.limit or 0, case.state_limit
        self.used = self.state_used = 0
        self.tree = None if case.eviction in ("lru", "hit-node") else _StateTree(case)

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
        return new, gone

    def _make_room(self) -> int:
        gone = 0
        while self.used > self.limit:
            self.used -= self._pop(self.blocks)
            gone += 1
        return gone

    def _pop(self, items: OrderedDict[int, int]) -> int:
        """Evict one item and return its bytes: the least recent, or the state that goes for it."""
        if not self.tree:
            return items.popitem(last=False)[1]
        key = next(iter(items))
        return items.pop(~self.tree.pop() if key < 0 else key)


class _StateTree:
    """The kept states, each with the state before it on its prefix, for state-aware evictions."""

    def __init__(self, case: _Case) -> None:
        self.grain, self.costs = case.trace.grain, case.costs
        self.thinning = case.eviction == "thinning"
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
        """Remove and return the state that is worth least."""
        if self.thinning:
            state = min(self.used, key=lambda s: (self.worth[s], self.used[s]))
        else:
            candidates = [s for s in self.used if len(self.after[s]) <= 1]
            recency = _normalised([self.used[s] for s in candidates])
            saving = _normalised([self.worth[s] for s in candidates])
            state = candidates[int(np.argmin(recency + saving))]
        before = self.before.pop(state)
        below = self.after.pop(state)
        self.after[before].remove(state)
        self.after[before] |= below
        for table in (self.path, self.depth, self.used, self.worth):
            del table[state]
        for other in below:
            self.before[other] = before
            self._weigh(other)
        return state

    def _weigh(self, state: int) -> None:
        length, parent = self.depth[state], self.depth[self.before[state]]
        self.worth[state] = (
            length - parent
            if self.thinning
            else self.costs.efficiency(length * self.grain, parent * self.grain)
        )


def _normalised(values: Sequence[float]) -> Any:
    """Values stretched to 0 .. 1, all 1 where they are equal, as Marconi compares them."""
    array = np.array(values, np.float64)
    low, high = array.min(), array.max()
    return (array - low) / (high - low) if high > low else np.ones(len(array))


# --- all requests at once -------------------------------------------------------------------------


def _replay_arrays(case: _Case) -> _Columns | None:
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
    end = trace.first_rank[run] + depth - trace.depth[run]
    parts = rule.parts or (rule,)
    fixed = np.full(trace.size, R, np.int32)  # the request that first kept each state
    for part in parts:
        if "joint" not in part.reads:
            for position in part.place(request, Match(found, none), case.settings):
                _write(fixed, *_blocks_at(trace, position))
    joint = none
    for _ in range(_ROUNDS):
        writer = fixed.copy()
        for part in parts:
            if "joint" in part.reads:
                for position in part.place(request, Match(found, joint), case.settings):
                    _write(writer, *_blocks_at(trace, position))
        hits = _deepest_kept(trace, writer[trace.reused], asking, run, end) * g
        if "joint" not in rule.reads or np.array_equal(hits, joint):
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

    All requests look at once, from the last run of their hit towards the root. Blocks are counted
    among the reused ones, of which a hit has every one; ``end`` is one past the last of the run.
    """
    R = len(trace)
    kept = np.where(writer < R, np.arange(len(writer)), -1)
    below = np.append(-1, np.maximum.accumulate(kept))  # the last kept block before each
    hits = np.zeros(R, np.int64)
    while len(asking):
        block = below[end]
        start = trace.first_rank[run]
        inside = block >= start
        found = inside & (writer[block] < asking)
        at = run[found]
        hits[asking[found]] = trace.depth[at] + block[found] - start[found] + 1
        # A state kept too late: look before it. No state in this run: look in the run before.
        run = np.where(inside, run, run - 1)
        left = np.flatnonzero(~found & (run >= trace.row[asking]))
        asking, run, inside, block = asking[left], run[left], inside[left], block[left]
        end = np.where(inside, block, trace.first_rank[run] + trace.count[run])
    return hits


# --- request by request, over runs ----------------------------------------------------------------


def _walk(case: _Case) -> _Columns:
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
        for block in paths.blocks_at(run, _depths(positions, g, length)):
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
        first, count, base = paths.first, paths.count, paths.base
        while depth:
            k = self.owner_at(run, depth)
            low[k], depth = depth, low[k]
        r = paths.row[i]
        while base[r] + count[r] < end:
            owner[first[r] : first[r] + count[r]] = [i] * count[r]
            r += 1
        owner[first[r] : first[r] + end - base[r]] = [i] * (end - base[r])

    def oldest(self, i: int) -> int:
        """The request with the least recent stretch; i + 1 where there is none up to i."""
        k, low, high = self.front, self.low, self.high
        while k <= i and low[k] >= high[k]:
            k += 1
        self.front = k
        return k


def _walk_pool(case: _Case) -> _Columns:
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

    def make_room(i: int, own: _Stretches | None, run: int, cached: int, spared: int) -> Any:
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
                elif queue and pop_state(k):
                    used -= S
                    gone += 1
                    continue
            if k > i:
                break
            want = -(-(used - limit) // kind.size)
            mine = kind is own and cached and kind.owner_at(run, cached) == k
            taken = min(want, kind.high[k] - (cached if mine else kind.low[k]))
            kind.high[k] -= taken
            used -= taken * kind.size
            gone += taken
            if mine and taken < want:
                floor = kind.low[k]
                gone += cached - floor - (floor < spared <= cached)
                cached = kind.high[k] = floor
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
        lo, run = paths.row[i], paths.row[i + 1] - 1
        cached, hit, state, gone = shared, 0, -1, 0
        if shared:
            if high[owner[left]] < shared:
                cached = blocks.cached(run, shared)
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
            gone, _ = make_room(i, blocks, run, cached, 0)
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
                more, left = make_room(i, grid, run, kept, hit)
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
                if depths := _depths(positions, g, length):
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
                        gone += make_room(i, None, run, 0, 0)[0]
                else:
                    state_used += S
                    while state_used > state_limit and pop_state(R):
                        state_used -= S
                        gone += 1
        evicted[i] = gone
    return attention, reused, written, evicted


def _fixed_part(case: _Case) -> tuple[list[tuple[int, int]], bool, list[Place], bool]:
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


def _grid_of(case: _Case) -> tuple[int, list[int]]:
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


# --- sweeps, timings, the command -----------------------------------------------------------------


@dataclass(frozen=True)
class Sweep:
    """The replays of a sweep, in the order rules x blocks x pools, and what is missing of them.

    ``missing`` holds (rule, block, pool) of what an interrupted sweep did not get to.
    """

    replays: list[Replay]
    missing: list[tuple[str, int, int | None]]

    def table(self) -> list[dict[str, Any]]:
        """One `Replay.summary` per row."""
        return [replay.summary() for replay in self.replays]


def sweep(
    trace: Trace,
    rules: Iterable[str | Rule | Place],
    blocks: Iterable[int],
    pools: Iterable[int | None] = (None,),
    executor: Executor | None = None,
    *,
    progress: bool = True,
    **options: Any,
) -> Sweep:
    """Replay a trace under every combination of rules, blocks and pools.

    >>> from mambackpt.traces import trace_from_tokens
    >>> trace = trace_from_tokens([[7] * 40, [7] * 40], grain=8)
    >>> [r.hit_rate for r in sweep(trace, ["none", "last"], [8, 16]).replays]
    [0.0, 0.0, 0.4, 0.4]

    ``blocks`` in tokens, ``pools`` in bytes (None: unlimited), ``options`` as for `replay`. Any
    ``concurrent.futures.Executor`` does the work, Dask's ``client.get_executor()`` included; what
    its workers lose is replayed here. Ctrl-C ends the sweep and keeps what is done. A progress bar
    shows after two seconds, where tqdm is installed.
    """
    points = list(product([get_rule(rule) for rule in rules], blocks, pools))
    done: dict[int, Replay] = {}
    futures: dict[Future[Replay], int] = {}
    bar = _progress_bar(len(points), progress)
    try:
        if executor is not None:
            try:
                for number, point in enumerate(points):
                    futures[executor.submit(_replay_point, trace, point, options)] = number
            except BrokenExecutor:
                pass  # what could not be submitted is replayed below
            for future in as_completed(futures):
                error = None if future.cancelled() else future.exception()
                if isinstance(error, CheckpointError):
                    raise error
                if error is None and not future.cancelled():
                    done[futures[future]] = future.result()
                    bar.update()
        for number, point in enumerate(points):
            if number not in done:
                done[number] = _replay_point(trace, point, options)
                bar.update()
    except KeyboardInterrupt:
        for future, number in futures.items():
            if future.done() and not future.cancelled() and future.exception() is None:
                done.setdefault(number, future.result())
    finally:
        for future in futures:
            future.cancel()
        bar.close()
    missing = [(p[0].name, p[1], p[2]) for n, p in enumerate(points) if n not in done]
    return Sweep([done[number] for number in sorted(done)], missing)


def _replay_point(
    trace: Trace, point: tuple[Rule, int, int | None], options: dict[str, Any]
) -> Replay:
    rule, block, pool = point
    return replay(trace, rule, block=block, pool_bytes=pool, **options)


class _NoBar:
    """What stands in for a progress bar."""

    def update(self) -> None:
        pass

    def close(self) -> None:
        pass


def _progress_bar(total: int, wanted: bool) -> Any:
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return _NoBar()
    return tqdm(total=total, delay=2, disable=not wanted, unit="replay", leave=False)


def expand_rows(trace: Trace) -> list[list[int]]:
    """Return every request's block numbers: what the plain replay reads, and memory to match."""
    numbers = list(range(trace.size))
    first, count, row = trace.first.tolist(), trace.count.tolist(), trace.row.tolist()
    return [
        [n for r in range(lo, hi) for n in numbers[first[r] : first[r] + count[r]]]
        for lo, hi in pairwise(row)
    ]


@dataclass(frozen=True, slots=True)
class ReplayTiming:
    """Median seconds of a plain and a fast replay that gave the same, over interleaved runs."""

    trace: str
    rule: str
    block: int
    pool_bytes: int | None
    requests: int
    plain_s: float
    fast_s: float

    @property
    def ratio(self) -> float:
        """How many times as fast as the plain replay."""
        return self.plain_s / self.fast_s


def time_replays(
    trace: Trace,
    rules: Iterable[str],
    blocks: Iterable[int],
    pools: Iterable[int | None] = (None,),
    *,
    runs: int = 5,
    **options: Any,
) -> Iterator[ReplayTiming]:
    """Time fast replays beside plain ones, in one process, loading and one warm-up left out.

    The plain replay is given its rows expanded. Raises CheckpointValueError where the two disagree:
    nothing is timed that is not equal.
    """
    rows = expand_rows(trace)
    for rule, block, pool in product(rules, blocks, pools):
        case = _checked_case(trace, get_rule(rule), block, pool_bytes=pool, **options)
        plain, fast = _replay_plainly(case, rows), _replay_fast(case)
        if not all(np.array_equal(a, b) for a, b in zip(plain, fast, strict=True)):
            raise CheckpointValueError(
                f"plain and fast replay of {rule!r} disagree at block {block}, pool {pool}; "
                "expected equal records, and times nothing else. Try the replay's tests."
            )
        seconds: dict[str, list[float]] = {"plain": [], "fast": []}
        for name, spent in [*seconds.items()] * runs:
            start = perf_counter()
            _replay_plainly(case, rows) if name == "plain" else _replay_fast(case)
            spent.append(perf_counter() - start)
        plain_s, fast_s = map(median, seconds.values())
        yield ReplayTiming(trace.name, rule, block, pool, len(trace), plain_s, fast_s)


_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {f"{prefix}iB": 1 << 10 * (n + 1) for n, prefix in enumerate("KMGT")}


def _bytes_of(text: str) -> int:
    number = text.rstrip("BKMGTi")
    try:
        return round(float(number) * _UNITS[text[len(number) :]])
    except (ValueError, KeyError):
        raise CheckpointValueError(
            f"pool is {text!r}; expected a size such as 320GB or 16GiB. Try 320GB."
        ) from None


def _names_of(text: str) -> list[str]:
    """Split at the commas that are in no bracket."""
    names, depth = [""], 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and not depth:
            names.append("")
        else:
            names[-1] += letter
    return names


def main(argv: Sequence[str]) -> int:
    """Replay a trace file and print a table; the command ``python -m mambackpt replay``."""
    parser = argparse.ArgumentParser(
        prog="mambackpt replay",
        description="Replay a request trace under placement rules.",
        epilog=f"rules, joined with '+': {', '.join(RULES)}; generators: {', '.join(GENERATORS)}",
    )
    parser.add_argument("trace", help="a trace file, or a generator with a size, as in chat:2000")
    parser.add_argument(
        "--rule", default="last+junction", help="such as last+junction,interval(4096)"
    )
    parser.add_argument("--block", default="512", help="tokens between states, such as 512,2048")
    parser.add_argument("--model", help=f"whose bytes count, one of {', '.join(PRESETS)}")
    parser.add_argument("--pool", help="sizes of one pool for both, such as 320GB,1TB")
    parser.add_argument("--state-pool", help="size of a pool of the states' own")
    parser.add_argument("--eviction", choices=EVICTIONS)
    parser.add_argument("--budget", type=int, default=8192, help="tokens of one prefill step")
    parser.add_argument("--layout", choices=LAYOUTS, help="of the file [from its first line]")
    parser.add_argument("--grain", type=int, help="tokens per block of the trace [its layout's]")
    parser.add_argument("--seed", type=int, default=0, help="of a generator")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON list")
    output.add_argument("--csv", action="store_true", help="print comma-separated values")
    args = parser.parse_args(argv)
    kind, _, size = args.trace.partition(":")
    if kind in GENERATORS and not Path(args.trace).exists():
        requests = checked_int("requests", int(size) if size.isdigit() else 1000)
        trace = GENERATORS[kind](requests, seed=args.seed)
    else:
        try:
            trace = load_trace(args.trace, layout=args.layout, grain=args.grain)
        except OSError as error:
            raise CheckpointValueError(
                f"{args.trace} cannot be read ({error.strerror}); expected a trace file. "
                f"Try a generator: {', '.join(GENERATORS)}."
            ) from error
    try:
        blocks = [int(block) for block in args.block.split(",")]
    except ValueError:
        raise CheckpointValueError(
            f"block is {args.block!r}; expected numbers of tokens. Try 512,2048."
        ) from None
    pools: list[int | None] = [None]
    if args.pool:
        pools = [_bytes_of(pool) for pool in args.pool.split(",")]
    options = {
        "model": args.model,
        "state_pool_bytes": _bytes_of(args.state_pool) if args.state_pool else None,
        "eviction": args.eviction,
        "budget": args.budget,
    }
    jobs = checked_int("jobs", args.jobs, unit="processes")
    with ProcessPoolExecutor(jobs) if jobs > 1 else nullcontext() as executor:
        made = sweep(trace, _names_of(args.rule), blocks, pools, executor, **options)
    rows = made.table()
    if args.json:
        print(json.dumps(rows, indent=1))
    elif args.csv:
        writer = csv.DictWriter(sys.stdout, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    else:
        print(f"{trace.name}: {len(trace):,} requests, {int(trace.prompt.sum()):,} prompt tokens")
        print(f"{'rule':<28} {'block':>6} {'pool GB':>8} {'hit %':>7} {'ceiling %':>9} "
              f"{'recomputed':>15} {'states/request':>14} {'evictions':>10}")  # fmt: skip
        for row in rows:
            pool = "-" if row["pool_bytes"] is None else f"{row['pool_bytes'] / 1e9:.1f}"
            print(f"{row['rule']:<28} {row['block']:>6} {pool:>8} {row['hit_percent']:>7.2f} "
                  f"{row['ceiling_percent']:>9.2f} {row['recomputed_tokens']:>15,} "
                  f"{row['states_per_request']:>14.2f} {row['evictions']:>10,}")  # fmt: skip
    for point in made.missing:
        print("interrupted before rule {}, block {}, pool {}".format(*point), file=sys.stderr)
    return 130 if made.missing else 0
