"""Replays of request traces: what a placement rule reuses, recomputes, writes and evicts.

One request at a time (a simplification, say so in a figure): look up the attention hit and the
deepest kept state in it, then store what the rule keeps. Full blocks only; a lookup may reuse at
most L - 1 tokens; states of decode steps are left out. The plain replay here is the truth: sets,
one ordered dict for a pool, every eviction. `mambackpt._fast_replay` and, in pools,
`mambackpt._fast_pool` find the same faster.
"""

import argparse
import csv
import json
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import (
    BrokenExecutor,
    Executor,
    Future,
    ProcessPoolExecutor,
    as_completed,
)
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from time import monotonic, process_time
from typing import Any, Protocol

import numpy as np

from mambackpt._fast_pool import walk_pool
from mambackpt._fast_replay import (
    Case,
    Columns,
    depths_of,
    replay_arrays,
    walk,
)
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
    get_rule,
)
from mambackpt.traces import (
    GENERATORS,
    LAYOUTS,
    PUBLIC_STATISTICS,
    Int64Array,
    Trace,
    describe_trace,
    load_trace,
)

EVICTIONS = ("lru", "hit-node", "thinning", "flops", "flops-as-published")


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
    * "thinning": when a state is due in that order, the one goes that covers least: the fewest
      tokens past the state before it on its prefix;
    * "flops", "flops-as-published": when a state is due, one with at most one state right after it
      goes, by recency plus FLOPs saved per byte (Marconi, arXiv 2411.19379; ``costs`` has the
      model's shape).

    ``plainly`` uses the readable loop for everything. Raises CheckpointValueError for sizes, rules
    and names that do not fit.
    """
    case = _checked_case(
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


def _replay_fast(case: Case) -> Columns:
    """The fastest of the ways that fits."""
    if case.limit is None:
        solved = replay_arrays(case) if case.rule.arrays or not case.rule.states else None
        return walk(case) if solved is None else solved
    if case.eviction in ("lru", "hit-node"):
        return walk_pool(case)
    return _replay_plainly(case, expand_rows(case.trace))


def _rule_of(trace: Trace, rule: str | Rule | Place) -> Rule:
    return get_rule(rule, overlaps=trace.ceiling, grain=trace.grain)


def _checked_case(
    trace: Trace,
    given: str | Rule | Place,
    block: int,
    *,
    model: ModelSizes | str | None = None,
    pool_bytes: int | None = None,
    state_pool_bytes: int | None = None,
    eviction: str | None = None,
    budget: int = 8192,
    lookup_margin: int = 0,
    costs: MarconiCosts | None = None,
) -> Case:
    rule, block = _rule_of(trace, given), checked_int("block", block)
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
    return Case(
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


# --- the truth ------------------------------------------------------------------------------------


def _replay_plainly(case: Case, rows: Sequence[list[int]]) -> Columns:
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
        depths: list[int] = []
        if case.rule.states:
            positions = place(Request(prompt, output, message), match, case.settings)
            depths = depths_of(positions, g, len(ids)) if len(positions) else []
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

    def __init__(self, case: Case) -> None:
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

    def __init__(self, case: Case) -> None:
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
    points = list(product([_rule_of(trace, rule) for rule in rules], blocks, pools))
    done: dict[int, Replay] = {}
    futures: dict[Future[Replay], int] = {}
    bar = _Progress(len(points), progress)
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
                    bar.step()
        for number, point in enumerate(points):
            if number not in done:
                done[number] = _replay_point(trace, point, options)
                bar.step()
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


class _Progress:
    """A progress bar that appears after two seconds, where tqdm is installed."""

    def __init__(self, total: int, wanted: bool) -> None:
        self.total, self.wanted, self.done = total, wanted, 0
        self.start = monotonic()
        self.bar: Any = None

    def step(self) -> None:
        self.done += 1
        if self.bar is not None:
            self.bar.update()
        elif self.wanted and monotonic() - self.start > 2:
            self.wanted = False
            with suppress(ImportError):
                from tqdm.auto import tqdm

                self.bar = tqdm(total=self.total, initial=self.done, unit="replay", leave=False)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


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
    """Median CPU seconds of a plain and a fast replay that gave the same, interleaved."""

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
        case = _checked_case(trace, rule, block, pool_bytes=pool, **options)
        plain, fast = _replay_plainly(case, rows), _replay_fast(case)
        if not all(np.array_equal(a, b) for a, b in zip(plain, fast, strict=True)):
            raise CheckpointValueError(
                f"plain and fast replay of {rule!r} disagree at block {block}, pool {pool}; "
                "expected equal records, and times nothing else. Try the replay's tests."
            )
        seconds: dict[str, list[float]] = {"plain": [], "fast": []}
        for name, spent in [*seconds.items()] * runs:
            start = process_time()
            _replay_plainly(case, rows) if name == "plain" else _replay_fast(case)
            spent.append(process_time() - start)
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
        epilog=f"rules, joined with '+': {', '.join(RULES)}, optimal(M). "
        f"generators: {', '.join(GENERATORS)}",
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
    public = None
    if kind in GENERATORS and not Path(args.trace).exists():
        requests = checked_int("requests", int(size) if size.isdigit() else 1000)
        trace, public = GENERATORS[kind](requests, seed=args.seed), PUBLIC_STATISTICS[kind]
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
        print(f"this trace: {describe_trace(trace)}")
        if public is not None:
            print(f"the public trace that it is modelled on: {public}")
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
