"""Request traces as runs of block numbers, and what a trace is like.

Equal block numbers mean equal whole prefixes. A trace stores full blocks only: the last, partly
filled block of a prompt tells nothing about what two prompts share. Rows are run-length coded
(first number, count) and never expanded, so a trace is as small as its branches.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mambackpt.errors import CheckpointValueError, checked_int

Int64Array: TypeAlias = NDArray[np.int64]
Runs: TypeAlias = list[list[int]]  # [[first, count], ...] of block numbers


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in order of arrival, with the prefixes that they share.

    >>> trace = trace_from_tokens([[1, 2, 3, 4, 5], [1, 2, 3, 4, 9, 9]], grain=2)
    >>> len(trace), trace.prompt.tolist(), trace.shared.tolist(), trace.blocks(1)
    (2, [5, 6], [0, 2], [0, 1, 2])

    Arrays with one entry per request: ``arrival`` (seconds, float64), ``prompt`` and ``output``
    (tokens), ``conversation`` (-1: unknown), ``message`` (the token at which the last user message
    starts, 0: unknown), ``shared`` (leading full blocks that an earlier request had too).
    Request i owns the runs ``row[i]`` to ``row[i + 1]``; run r is the block numbers ``first[r]``
    to ``first[r] + count[r] - 1``. ``grain`` is the tokens per block. All int64 unless said.
    ``notes`` are sentences on how the trace was read, where that is not as the file says.
    """

    name: str
    grain: int
    arrival: NDArray[np.float64]
    prompt: Int64Array
    output: Int64Array
    conversation: Int64Array
    message: Int64Array
    shared: Int64Array
    row: Int64Array
    first: Int64Array
    count: Int64Array
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.prompt)

    def __reduce__(self) -> tuple[type["Trace"], tuple[Any, ...]]:
        return Trace, tuple(getattr(self, field.name) for field in fields(self))

    @cached_property
    def length(self) -> Int64Array:
        """Full blocks per request."""
        blocks: Int64Array = self.prompt // self.grain
        return blocks

    @cached_property
    def depth(self) -> Int64Array:
        """Blocks of the request before each run."""
        ends: Int64Array = np.append(0, np.cumsum(self.count))
        return ends[:-1] - np.repeat(ends[self.row[:-1]], self.run_counts)

    @cached_property
    def ceiling(self) -> Int64Array:
        """Tokens a lookup may reuse at most: blocks had before, and never the last token."""
        ceiling: Int64Array = np.minimum(self.shared, (self.prompt - 1) // self.grain) * self.grain
        return ceiling

    @cached_property
    def lookup(self) -> tuple[Int64Array, Int64Array, Int64Array]:
        """The requests that may reuse something, how many blocks, and the run these end in.

        By the number of the last such block: what is looked up in this order is found fast.
        """
        request = np.flatnonzero(self.ceiling)
        depth = self.ceiling[request] // self.grain
        run = self.run_at(request, depth)
        order = np.argsort(self.first[run] + depth - self.depth[run], kind="stable")
        return request[order], depth[order], run[order]

    @cached_property
    def run_counts(self) -> Int64Array:
        """Runs per request."""
        return np.diff(self.row)

    @cached_property
    def run_owner(self) -> Int64Array:
        """The request of each run."""
        return np.repeat(np.arange(len(self)), self.run_counts)

    @cached_property
    def size(self) -> int:
        """One more than the largest block number."""
        return int((self.first + self.count).max(initial=0))

    def first_with(self, blocks: Int64Array) -> Int64Array:
        """The request that first had each of these block numbers."""
        first, _, owner = self.fresh_runs
        return owner[np.searchsorted(first, blocks, side="right") - 1]

    @cached_property
    def fresh_runs(self) -> tuple[Int64Array, Int64Array, Int64Array]:
        """First numbers, counts and requests of the blocks that a request was the first to have."""
        owner = self.run_owner
        known = (self.shared[owner] - self.depth).clip(0, self.count)
        order = np.argsort(self.first + known)
        order = order[(known < self.count)[order]]
        return (self.first + known)[order], (self.count - known)[order], owner[order]

    @cached_property
    def paths(self) -> "Paths":
        """The runs as plain lists."""
        return Paths(self)

    def finer(self, grain: int) -> "Trace":
        """The same requests in blocks of ``grain`` tokens, which divides the trace's own grain.

        >>> trace = trace_from_tokens([[7] * 40, [7] * 40], grain=16)
        >>> finer = trace.finer(8)
        >>> trace.blocks(1), finer.blocks(1), finer.shared.tolist()
        ([0, 1], [0, 1, 2, 3, 6], [0, 4])

        What requests are known to share stays what it was: the blocks that fill up a prompt's last,
        partly filled block are nobody else's, though the prompts may have been equal there.
        """
        if grain == self.grain:
            return self
        made: dict[int, Trace] = self.__dict__.setdefault("_finer", {})
        if grain not in made:
            made[grain] = self._cut(self.grain // grain)
        return made[grain]

    def _cut(self, times: int) -> "Trace":
        """Every block cut into so many, and the last part of each prompt into its own."""
        grain = self.grain // times
        rest = self.prompt // grain - self.length * times
        own = np.flatnonzero(rest)
        # One number is left out, so that no request's own blocks continue a run.
        number = self.size * times + 1 + np.cumsum(rest) - rest
        after = self.row[1:][own]
        return replace(
            self,
            grain=grain,
            shared=self.shared * times,
            row=self.row + np.append(0, np.cumsum(rest > 0)),
            first=np.insert(self.first * times, after, number[own]),
            count=np.insert(self.count * times, after, rest[own]),
        )

    def blocks(self, request: int) -> list[int]:
        """The block numbers of one request, expanded."""
        runs = slice(self.row[request], self.row[request + 1])
        pairs = zip(self.first[runs].tolist(), self.count[runs].tolist(), strict=True)
        return [block for first, count in pairs for block in range(first, first + count)]

    @cached_property
    def shared_with_previous(self) -> Int64Array:
        """Leading full blocks that each request shares with the one right before it."""
        blocks, nth = np.zeros(len(self), np.int64), 0
        request = np.arange(1, len(self))
        while len(request):
            there = nth < np.minimum(self.run_counts[request], self.run_counts[request - 1])
            request = request[there]
            ours, theirs = self.row[request] + nth, self.row[request - 1] + nth
            same = self.first[ours] == self.first[theirs]
            count = np.minimum(self.count[ours], self.count[theirs]) * same
            blocks[request] += count
            request = request[same & (self.count[ours] == self.count[theirs])]
            nth += 1
        return blocks

    @cached_property
    def splits(self) -> NDArray[np.bool_]:
        """Whether each request leaves an earlier one inside an edge of the tree of prompts.

        That is where a radix tree makes a new interior node: at the end of the shared blocks, where
        no earlier request ended and no other one left.
        """
        ends = [self.block_at(depth).tolist() for depth in (self.shared, self.length)]
        nodes = {-1}
        splits = np.zeros(len(self), bool)
        for i, (left, end) in enumerate(zip(*ends, strict=True)):
            splits[i] = left not in nodes
            nodes.add(left)
            nodes.add(end)
        return splits

    def block_at(self, depth: Int64Array) -> Int64Array:
        """The number of block ``depth`` (counted from 1) of every request; -1 for depth 0."""
        request = np.flatnonzero(depth)
        blocks = np.full(len(self), -1)
        blocks[request] = self.find_blocks(request, depth[request])
        return blocks

    def find_blocks(self, request: Int64Array, depth: Int64Array) -> Int64Array:
        """The number of block ``depth`` (counted from 1) of each of these requests."""
        run = self.run_at(request, depth)
        return self.first[run] + depth - 1 - self.depth[run]

    def run_at(self, request: Int64Array, depth: Int64Array) -> Int64Array:
        """The run that holds block ``depth`` (counted from 1) of each request."""
        run = self.row[request + 1] - 1
        early = np.flatnonzero(self.depth[run] >= depth)  # most look into the last run
        keys = (request[early] << 32) + depth[early]
        run[early] = np.searchsorted(self._run_keys, keys, side="left") - 1
        return run

    @cached_property
    def _run_keys(self) -> Int64Array:
        return (self.run_owner << 32) + self.depth


def expand(first: Int64Array, count: Int64Array, step: int = 1) -> Int64Array:
    """Return ``first[i], first[i] + step, ...`` (``count[i]`` numbers) for each i, joined.

    >>> expand(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    before = np.cumsum(count) - count
    numbers = np.arange(0, int(count.sum()) * step, step)
    numbers += np.repeat(first - before * step, count)
    return numbers


class Paths:
    """A trace's runs as plain lists, for walks request by request."""

    def __init__(self, trace: Trace) -> None:
        self.row: list[int] = trace.row.tolist()
        self.base: list[int] = trace.depth.tolist()
        self.first: list[int] = trace.first.tolist()
        self.count: list[int] = trace.count.tolist()
        self.owner = [-1] * trace.size  # the request that first had each block
        starts, counts, owners = (column.tolist() for column in trace.fresh_runs)
        for start, length, owner in zip(starts, counts, owners, strict=True):
            self.owner[start : start + length] = [owner] * length

    def blocks_at(self, run: int, depths: Sequence[int]) -> list[int]:
        """The blocks at these depths, deepest first, of a path that ends with ``run``."""
        first, base, blocks = self.first, self.base, []
        for depth in depths:
            while base[run] >= depth:
                run -= 1
            blocks.append(first[run] + depth - 1 - base[run])
        return blocks

    def deepest(self, held: bytearray, lo: int, run: int, depth: int) -> tuple[int, int]:
        """Depth and block of the deepest held state at or above ``depth``; (0, -1) for none."""
        first, count, base = self.first, self.count, self.base
        while base[run] >= depth:
            run -= 1
        block = held.rfind(1, first[run], first[run] + depth - base[run])
        while block < 0 and run > lo:
            run -= 1
            block = held.rfind(1, first[run], first[run] + count[run])
        return (base[run] + block - first[run] + 1, block) if block >= 0 else (0, -1)


class NotChained(Exception):
    """A row that contradicts an earlier one: equal numbers must mean equal prefixes."""

    def __init__(self, row: int, block: int) -> None:
        self.row, self.block = row, block


class TraceRows:
    """Collects requests, then links them to a trace; nothing is returned before all is checked."""

    def __init__(self, name: str, grain: int) -> None:
        self.name, self.grain = name, grain
        self.arrival, self.lines = array("d"), array("q")
        self.prompt, self.output, self.conversation = array("q"), array("q"), array("q")
        self.message, self.row = array("q"), array("q", [0])
        self.first, self.count = array("q"), array("q")
        self._pending: list[list[int]] = []

    def add(
        self,
        arrival: float,
        prompt: int,
        output: int,
        *,
        runs: Runs | None = None,
        ids: list[int] | None = None,
        offset: int = 0,
        conversation: int = -1,
        message: int = 0,
        line: int = 0,
    ) -> None:
        """Append one request; its blocks come as ``runs`` (numbers + ``offset``) or as ``ids``."""
        self.arrival.append(arrival)
        self.lines.append(line)
        self.prompt.append(prompt)
        self.output.append(output)
        self.conversation.append(conversation)
        self.message.append(message)
        if ids is not None:
            self._pending.append(ids)
            if len(self._pending) == 4096:
                self._flush()
            return
        for first, count in runs or ():
            self.first.append(first + offset)
            self.count.append(count)
        self.row.append(len(self.first))

    def _flush(self) -> None:
        """Turn the waiting id lists into runs."""
        lengths = np.fromiter(map(len, self._pending), np.int64, len(self._pending))
        flat = np.array([i for ids in self._pending for i in ids], np.uint64).view(np.int64)
        first, count, ends = _as_runs(flat, lengths)
        self.first.frombytes(first.tobytes())
        self.count.frombytes(count.tobytes())
        self.row.frombytes((ends + self.row[-1]).tobytes())
        self._pending.clear()

    def chain(self) -> None:
        """Number the ids anew so that equal numbers mean equal prefixes: by (previous, id)."""
        if self._pending:
            self._flush()
        known: dict[tuple[int, int], int] = {}
        pairs = zip(self.first, self.count, strict=True)
        runs = [range(first, first + count) for first, count in pairs]
        first, count, row = array("q"), array("q"), array("q", [0])
        for start, end in pairwise(self.row):
            before, last = -1, -2
            for block in chain.from_iterable(runs[start:end]):
                before = known.setdefault((before, block), len(known))
                if before == last + 1:
                    count[-1] += 1
                else:
                    first.append(before)
                    count.append(1)
                last = before
            row.append(len(first))
        self.first, self.count, self.row = first, count, row

    def link(self, notes: Iterable[str] = ()) -> Trace:
        """Check that the rows form one tree of prefixes and return the trace."""
        if self._pending:
            self._flush()
        first, count = np.array(self.first, np.int64), np.array(self.count, np.int64)
        row = np.array(self.row, np.int64)
        largest, total = int((first + count).max(initial=0)), int(count.sum())
        if first.min(initial=0) < 0 or largest > 8 * total + 65_536:
            # Numbers scattered over 64 bits, as hashes are: number them by first appearance.
            flat = expand(first, count)
            _, where, inverse = np.unique(flat, return_index=True, return_inverse=True)
            number = np.empty(len(where), np.int64)
            number[np.argsort(where)] = np.arange(len(where))
            lengths = np.diff(np.append(0, np.cumsum(count))[row])
            first, count, ends = _as_runs(number[inverse], lengths)
            row, largest = np.append(0, ends), len(where)
        shared = _shared_blocks(row.tolist(), first.tolist(), count.tolist(), largest)
        return Trace(
            self.name,
            self.grain,
            np.array(self.arrival, np.float64),
            np.array(self.prompt, np.int64),
            np.array(self.output, np.int64),
            np.array(self.conversation, np.int64),
            np.array(self.message, np.int64),
            np.array(shared, np.int64),
            row,
            first,
            count,
            tuple(notes),
        )


def _as_runs(flat: Int64Array, lengths: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Run-length code joined rows: first numbers, counts, and how many runs end with each row."""
    begins = np.ones(len(flat), bool)
    begins[1:] = np.diff(flat) != 1
    starts = np.cumsum(lengths) - lengths
    begins[starts[lengths > 0]] = True
    at = np.flatnonzero(begins)
    ends = np.append(0, np.cumsum(begins))[starts + lengths]
    return flat[at], np.diff(at, append=len(flat)), ends


def _shared_blocks(row: list[int], first: list[int], count: list[int], size: int) -> list[int]:
    """Leading blocks of each row that an earlier row had; raises where rows are not chained."""
    kind = bytearray(size)  # 0 not seen yet, 1 begins a run, 2 follows the number before it
    parent: dict[int, int] = {}  # of the numbers that begin a run
    shared: list[int] = []
    lo = hi = 0
    for i in range(len(row) - 1):
        before, before_hi = lo, hi
        lo, hi = row[i], row[i + 1]
        run, known, fresh = lo, 0, False
        # The leading runs that the row before has as well are known and chained.
        while run < hi and before < before_hi:
            if first[run] != first[before] or count[run] != count[before]:
                break
            known += count[run]
            run, before = run + 1, before + 1
        last = first[run - 1] + count[run - 1] - 1 if run > lo else -1
        for r in range(run, hi):
            block, end = first[r], first[r] + count[r]
            new = block
            if not fresh and kind[block]:
                new = kind.find(0, block, end)
                new = end if new < 0 else new
                clash = kind.find(1, block + 1, new)
                if kind[block] == 2 or parent[block] != last or clash >= 0:
                    raise NotChained(i, max(block, clash))
                known += new - block
            if new < end:
                fresh = True
                if kind.count(0, new, end) != end - new:
                    raise NotChained(i, next(b for b in range(new, end) if kind[b]))
                kind[new:end] = b"\2" * (end - new)
                if new == block:
                    kind[block], parent[block] = 1, last
            last = end - 1
        shared.append(known)
    return shared


def trace_from_tokens(
    prompts: Iterable[Sequence[int]],
    *,
    grain: int = 16,
    outputs: Sequence[int] | None = None,
    arrivals: Sequence[float] | None = None,
    name: str = "tokens",
) -> Trace:
    """Return the trace of some prompts, each a list of token ids.

    >>> trace_from_tokens([[7] * 40, [7] * 33 + [8]], grain=16).shared.tolist()
    [0, 2]

    Two prompts share a block where all tokens up to its end are equal. ``outputs`` (tokens) and
    ``arrivals`` (seconds) default to 0 and to the position in the list.
    Raises CheckpointValueError for no prompts, an empty one, or lengths that disagree.
    """
    rows, numbers = TraceRows(name, checked_int("grain", grain)), BlockNumbers()
    for i, tokens in enumerate(prompts):
        if not len(tokens):
            raise CheckpointValueError(
                f"prompt {i} is empty; expected at least one token. Try leaving it out."
            )
        try:
            output = 0 if outputs is None else outputs[i]
            arrival = float(i) if arrivals is None else arrivals[i]
        except IndexError:
            raise CheckpointValueError(
                f"outputs or arrivals end before prompt {i}; expected one entry per prompt."
            ) from None
        rows.add(arrival, len(tokens), output, ids=numbers.blocks(tokens, grain))
    if not len(rows.prompt):
        raise CheckpointValueError("there are no prompts; expected at least one. Try [[1, 2, 3]].")
    return rows.link()


class BlockNumbers:
    """Numbers blocks of tokens so that equal numbers mean equal prefixes."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, tuple[int, ...]], int] = {}

    def blocks(self, tokens: Sequence[int], grain: int) -> list[int]:
        """Return the number of each full block of a prompt."""
        return self.between(tokens, range(grain, len(tokens) + 1, grain))

    def between(self, tokens: Sequence[int], ends: Iterable[int]) -> list[int]:
        """Return the number of each block, of which ``ends`` says where it ends."""
        ids: list[int] = []
        before, start = -1, 0
        for end in ends:
            key = (before, tuple(tokens[start:end]))
            before = self._known.setdefault(key, len(self._known))
            ids.append(before)
            start = end
        return ids


@dataclass(frozen=True, slots=True)
class TraceStatistics:
    """What a trace is like, for comparing a generated one with a real one.

    A follow-up is a request that shares more than one block with an earlier one; its predecessor is
    the one that first had the last block they share. ``append_share`` of the follow-ups keep every
    full block of their predecessor; ``branch_depth`` is the median of the tokens that the others
    share. Rates are shares of 1, sizes tokens.
    """

    requests: int
    prompt_median: float
    prompt_mean: float
    output_mean: float
    follow_up_share: float
    append_share: float
    branch_depth: float
    reuse_ceiling: float

    def __str__(self) -> str:
        told = f"{100 * self.follow_up_share:.1f} % follow-ups"
        if self.follow_up_share:
            told += f", of which {100 * self.append_share:.1f} % append"
        if self.append_share < 1 and self.follow_up_share:
            told += f" and the others branch at {self.branch_depth:,.0f} tokens"
        return f"{told}; reuse ceiling {100 * self.reuse_ceiling:.1f} %"


def describe_trace(trace: Trace) -> TraceStatistics:
    """Return the statistics of a trace.

    >>> describe_trace(trace_from_tokens([[1] * 64, [1] * 80, [1] * 32 + [2] * 32])).append_share
    0.5
    """
    follow_up = np.flatnonzero(trace.shared > 1)
    source = trace.first_with(trace.block_at(trace.shared))[follow_up]
    shared = trace.shared[follow_up]
    appends = shared >= trace.length[source]
    branches = shared[~appends] * trace.grain
    return TraceStatistics(
        len(trace),
        float(np.median(trace.prompt)),
        float(trace.prompt.mean()),
        float(trace.output.mean()),
        len(follow_up) / len(trace),
        float(appends.mean()) if len(appends) else 0.0,
        float(np.median(branches)) if len(branches) else 0.0,
        float(trace.ceiling.sum() / trace.prompt.sum()),
    )
