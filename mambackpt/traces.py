"""Request traces: read, generated, and kept as runs of block numbers.

Equal block numbers mean equal whole prefixes. A trace stores full blocks only: the last, partly
filled block of a prompt tells nothing about what two prompts share. Rows are run-length coded
(first number, count) and never expanded, so a trace is as small as its branches.
"""

import gzip
import json
import marshal
import math
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from hashlib import blake2b
from heapq import heappop, heappush
from pathlib import Path
from random import Random
from typing import IO, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mambackpt.errors import CheckpointValueError
from mambackpt.geometry import checked_int

Int64Array: TypeAlias = NDArray[np.int64]
Runs: TypeAlias = list[list[int]]  # [[first, count], ...] of block numbers

_GRAINS = {"mooncake": 512, "bailian": 16}  # tokens per block of the published files
LAYOUTS = ("mooncake", "bailian", "claude-code", "tokens")


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


# --- building -------------------------------------------------------------------------------------


class _NotChained(Exception):
    """A row that contradicts an earlier one: equal numbers must mean equal prefixes."""

    def __init__(self, row: int, block: int) -> None:
        self.row, self.block = row, block


class _Rows:
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

    def link(self) -> Trace:
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
                    raise _NotChained(i, max(block, clash))
                known += new - block
            if new < end:
                fresh = True
                if kind.count(0, new, end) != end - new:
                    raise _NotChained(i, next(b for b in range(new, end) if kind[b]))
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
    rows, numbers = _Rows(name, checked_int("grain", grain)), _Numbers()
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
    return _linked(rows, Path(name))


class _Numbers:
    """Numbers blocks of tokens so that equal numbers mean equal prefixes."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, tuple[int, ...]], int] = {}

    def blocks(self, tokens: Sequence[int], grain: int) -> list[int]:
        ids: list[int] = []
        before = -1
        for start in range(0, len(tokens) - grain + 1, grain):
            key = (before, tuple(tokens[start : start + grain]))
            before = self._known.setdefault(key, len(self._known))
            ids.append(before)
        return ids


# --- reading --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Line:
    """One line of a trace file, with the words for what is wrong with it."""

    path: Path
    number: int

    def error(self, field: str, given: str, expected: str, hint: str) -> CheckpointValueError:
        where = f"{self.path.name} line {self.number}, field {field}"
        return CheckpointValueError(f"{where}: given {given}; expected {expected}. {hint}")

    def get(self, record: dict[str, Any], field: str) -> Any:
        try:
            return record[field]
        except KeyError:
            raise self.error(
                field, "nothing", "the field to be there", f"The line has {sorted(record)}."
            ) from None

    def whole(self, record: dict[str, Any], field: str, least: int = 0) -> int:
        value = self.get(record, field)
        if type(value) is not int or value < least:
            expected = f"a whole number of at least {least}"
            raise self.error(field, repr(value), expected, "Try removing the request.")
        return value

    def seconds(self, record: dict[str, Any], field: str, scale: float = 1.0) -> float:
        value = self.get(record, field)
        if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
            raise self.error(field, repr(value), "a time of at least 0", "Try 0.")
        return float(value) * scale

    def ids(self, record: dict[str, Any], field: str, counts: tuple[int, ...]) -> list[int]:
        ids = self.get(record, field)
        if type(ids) is not list or (
            ids and ({*map(type, ids)} != {int} or min(ids) < 0 or max(ids) >= 1 << 64)
        ):
            raise self.error(field, f"{ids!r:.60}", "whole numbers from 0 to 2**64 - 1", "")
        if len(ids) not in counts:
            expected = f"{' or '.join(map(str, counts))}, one for each block of the prompt"
            hint = "Check the block size (grain=...)."
            raise self.error(field, f"{len(ids)} ids", expected, hint)
        return ids

    def runs(self, record: dict[str, Any], blocks: int) -> Runs:
        """Runs of [first, count], joined where one continues the other."""
        field = "runs" if "runs" in record else "hash_ids"
        pairs = self.get(record, field)
        if field == "hash_ids":
            pairs = [[i, 1] for i in self.ids(record, field, (blocks,))]
        joined: Runs = []
        total, end = 0, -1
        for pair in pairs if type(pairs) is list else [pairs]:
            if type(pair) is not list or len(pair) != 2 or {*map(type, pair)} != {int}:
                raise self.error(field, f"{pair!r:.60}", "pairs of [first id, count]", "")
            first, count = pair
            if first < 0 or count < 1:
                raise self.error(field, repr(pair), "an id from 0 and a count from 1", "")
            total += count
            if first == end:
                joined[-1] = [joined[-1][0], joined[-1][1] + count]
            else:
                joined.append(pair)
            end = first + count
        if total != blocks:
            expected = f"{blocks}, one for each full block of the prompt"
            raise self.error(field, f"{total} ids", expected, "Check the block size.")
        return joined


def load_trace(
    path: str | Path,
    *,
    layout: str | None = None,
    grain: int | None = None,
    subagents: bool = False,
    duplicates: bool = False,
) -> Trace:
    """Read a trace file as it is published, line by line, ``.gz`` or not.

    >>> load_trace("traces/conversation_trace.jsonl.gz")  # doctest: +SKIP

    ``layout`` is found from the first line unless given:

    * "mooncake": ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids`` (one per
      512-token block, the last one partial). Source: kvcache-ai/Mooncake, FAST25-release.
    * "bailian": the same with seconds, 16-token blocks, ``chat_id``, ``parent_chat_id``, ``turn``.
      Source: alibaba-edu/qwen-bailian-usagetraces-anon.
    * "claude-code": one conversation a line, 64-token blocks, ids local to it, as ``hash_ids`` or
      as ``runs`` of [first, count]. ``subagents=True`` keeps their requests, ``duplicates=True``
      conversations that repeat another one exactly. Source: callanjfox/kv-cache-tester.
    * "tokens": a list of token ids a line, cut into blocks of ``grain`` (16).

    ``grain`` (tokens per block) overrides the layout's. Raises CheckpointValueError with file, line
    and field for malformed input, FileNotFoundError for no file; nothing half-read is returned.
    """
    path = Path(path)
    if layout is not None and layout not in LAYOUTS:
        raise CheckpointValueError(
            f"layout is {layout!r}; expected one of {', '.join(LAYOUTS)}. Try leaving it out."
        )
    rows: _Rows | None = None
    take: Callable[[_Line, Any], None] | None = None
    for line, record in _records(path):
        found = layout or _layout_of(line, record)
        if rows is None or take is None:
            size = grain or _GRAINS.get(found) or 16
            if found == "claude-code":
                size = grain or line.whole(record, "block_size", 1)
            rows = _Rows(path.name, checked_int("grain", size))
            take = _reader(found, rows, subagents, duplicates)
        take(line, record)
    if rows is None or not len(rows.prompt):
        raise CheckpointValueError(
            f"{path.name} is empty; expected at least one request. Try another file."
        )
    return _linked(rows, path)


def _linked(rows: _Rows, path: Path) -> Trace:
    try:
        return rows.link()
    except _NotChained as clash:
        raise _Line(path, rows.lines[clash.row]).error(
            "hash_ids",
            f"block {clash.block} after a prefix that it did not have before",
            "equal ids to mean equal whole prefixes",
            "Try a trace whose block ids are chained.",
        ) from None


def _layout_of(line: _Line, record: object) -> str:
    if isinstance(record, list):
        return "tokens"
    if isinstance(record, dict):
        for field, layout in (
            ("requests", "claude-code"),
            ("chat_id", "bailian"),
            ("hash_ids", "mooncake"),
        ):
            if field in record:
                return layout
    raise line.error(
        "(all)", f"{record!r:.60}", "a known layout", f"Try layout= with one of {LAYOUTS}."
    )


def _records(path: Path) -> Iterator[tuple[_Line, Any]]:
    """The JSON value of each line; blank lines are skipped."""
    number = 0
    with path.open("rb") as plain:
        packed = plain.read(2) == b"\x1f\x8b"
        plain.seek(0)
        stream: IO[bytes] | gzip.GzipFile = gzip.GzipFile(fileobj=plain) if packed else plain
        lines = iter(stream)
        while True:
            number += 1
            line = _Line(path, number)
            try:
                text = next(lines, b"")
                if not text:
                    return
                if not text.isspace():
                    yield line, json.loads(text)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                hint = "Try fetching the file again."
                raise line.error("(gzip)", str(error), "a whole gzip stream", hint) from error
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                hint = "Try removing the line."
                raise line.error("(all)", f"{text[:60]!r}", "one JSON value", hint) from error


def _requests(
    line: _Line, record: dict[str, Any], subagents: bool
) -> Iterator[tuple[float, dict[str, Any]]]:
    """A conversation's requests with the time at which their group starts."""
    requests = line.get(record, "requests")
    if type(requests) is not list or not all(type(request) is dict for request in requests):
        raise line.error("requests", f"{requests!r:.60}", "a list of requests", "")
    for request in requests:
        if request.get("type") != "subagent":
            yield 0.0, request
        elif subagents:
            start = line.seconds(request, "t")
            yield from ((start + t, inner) for t, inner in _requests(line, request, True))


def _reader(
    layout: str, rows: _Rows, subagents: bool, duplicates: bool
) -> Callable[[_Line, Any], None]:
    """A function that appends one line's requests to ``rows``."""
    grain = rows.grain
    chats: dict[int, int] = {}
    numbers = _Numbers()
    copies: set[bytes] = set()  # digests of the conversations read so far
    offset = 0

    def listed(line: _Line, record: Any) -> None:
        prompt = line.whole(record, "input_length", 1)
        full, counts = prompt // grain, {-(-prompt // grain)}
        scale, chat = 1e-3, -1
        if layout == "bailian":
            counts, scale = {*counts, full}, 1.0
            chat_id = line.whole(record, "chat_id")
            parent = line.whole(record, "parent_chat_id", -1)
            chat = chats[chat_id] = chats.get(parent, len(chats))
        rows.add(
            line.seconds(record, "timestamp", scale),
            prompt,
            line.whole(record, "output_length"),
            ids=line.ids(record, "hash_ids", tuple(sorted(counts)))[:full],
            conversation=chat,
            line=line.number,
        )

    def tokens(line: _Line, record: Any) -> None:
        if type(record) is not list or not record or {*map(type, record)} != {int}:
            raise line.error("(all)", f"{record!r:.60}", "a list of token ids", "")
        ids = numbers.blocks(record, grain)
        rows.add(float(line.number - 1), len(record), 0, ids=ids, line=line.number)

    def conversation(line: _Line, record: Any) -> None:
        nonlocal offset
        if type(record) is not dict or line.whole(record, "block_size", 1) != grain:
            raise line.error("block_size", f"{record!r:.60}", f"blocks of {grain} tokens", "")
        requests = [
            (
                start + line.seconds(request, "t"),
                line.whole(request, "in", 1),
                line.whole(request, "out"),
                line.runs(request, request["in"] // grain),
            )
            for start, request in _requests(line, record, subagents)
        ]
        digest = blake2b(marshal.dumps(requests, 2)).digest()
        if digest in copies and not duplicates:
            return
        copies.add(digest)
        for arrival, prompt, output, runs in requests:
            rows.add(
                arrival,
                prompt,
                output,
                runs=runs,
                offset=offset,
                conversation=line.number - 1,
                line=line.number,
            )
        # Ids are local to a conversation: the next one's start after the largest of this one.
        offset += max((sum(run) for _, _, _, runs in requests for run in runs), default=0)

    return {"claude-code": conversation, "tokens": tokens}.get(layout, listed)


# --- generated traces -----------------------------------------------------------------------------


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


class _Text:
    """A text that grows at its end and can be cut back; its blocks get numbers as they fill up."""

    def __init__(self, used: list[int], grain: int) -> None:
        self.used, self.grain = used, grain  # ``used``: how many numbers all texts have taken
        self.tokens = self.blocks = 0
        self.runs: Runs = []

    def copy(self) -> "_Text":
        """A text that begins like this one."""
        other = _Text(self.used, self.grain)
        other.tokens, other.blocks = self.tokens, self.blocks
        other.runs = [list(run) for run in self.runs]
        return other

    def grow(self, tokens: int) -> None:
        self.tokens += tokens
        new = self.tokens // self.grain - self.blocks
        if new:
            if self.runs and sum(self.runs[-1]) == self.used[0]:
                self.runs[-1][1] += new
            else:
                self.runs.append([self.used[0], new])
            self.used[0] += new
            self.blocks += new

    def cut(self, tokens: int) -> None:
        """Cut back to this many tokens; a number is never used again for another block."""
        self.tokens = max(tokens, 1)
        drop = self.blocks - self.tokens // self.grain
        self.blocks -= drop
        while drop > 0:
            last = self.runs[-1]
            taken = min(drop, last[1])
            last[1] -= taken
            drop -= taken
            if not last[1]:
                self.runs.pop()


class _Teller:
    """Tells stories to a trace: each starts at a time of its own and asks its requests after it."""

    def __init__(self, name: str, requests: int, seed: int, grain: int) -> None:
        self.name, self.wanted = name, checked_int("requests", requests, unit="requests")
        self.grain, self.rng = checked_int("grain", grain), Random(seed)
        self.used = [0]
        self.start, self.story = 0.0, -1
        self.waiting: list[float] = []  # arrivals after the newest story's start
        self.due = 0  # requests before it
        self.rows: list[tuple[float, int, int, int, Runs, int]] = []

    def text(self, tokens: int) -> _Text:
        text = _Text(self.used, self.grain)
        text.grow(tokens)
        return text

    def stories(self, gap: float) -> Iterator[Random]:
        """One after another, ``gap`` seconds apart on average, while requests are wanted."""
        while self.due < self.wanted:
            self.start += self.rng.expovariate(1 / gap)
            self.story += 1
            while self.waiting and self.waiting[0] <= self.start:
                heappop(self.waiting)
                self.due += 1
            yield self.rng

    def ask(self, text: _Text, after: float, output: int, message: int = 0) -> None:
        """Add a request of this story, with the text as it is now."""
        runs = [list(run) for run in text.runs]
        arrival = self.start + after
        self.rows.append((arrival, self.story, text.tokens, output, runs, message))
        heappush(self.waiting, arrival)

    def trace(self) -> Trace:
        self.rows.sort(key=lambda row: row[:2])
        rows = _Rows(self.name, self.grain)
        for arrival, story, prompt, output, runs, message in self.rows[: self.wanted]:
            rows.add(arrival, prompt, output, runs=runs, conversation=story, message=message)
        return rows.link()


def _skewed(rng: Random, middle: float, mean: float, most: float = 1e6) -> int:
    """A log-normal count with this median and mean, at least 1."""
    spread = math.sqrt(2 * math.log(mean / middle))
    return max(1, min(int(rng.lognormvariate(math.log(middle), spread)), int(most)))


def generate_chat(requests: int = 1000, *, seed: int = 0, grain: int = 512) -> Trace:
    """Return a trace of chats: system prompts, turns that append, and edits that branch.

    >>> describe_trace(generate_chat(200)).requests
    200

    Calibrated to the Mooncake conversation trace: 38 % follow-ups, of which 85 % append; the reuse
    ceiling is near 37 %. The same seed gives the same trace.
    """
    teller = _Teller(f"chat:{requests}", requests, seed, grain)
    root = teller.text(600)  # the prompt that all share
    systems = [root]
    for _ in range(8):
        system = root.copy()
        system.grow(_skewed(teller.rng, 1500, 2500))
        systems.append(system)
    for rng in teller.stories(gap=0.48):
        text = rng.choices(systems, [40, 1, 0.5, 0.3, 0.25, 0.2, 0.16, 0.14, 0.12])[0].copy()
        text.grow(_skewed(rng, 5300, 10_300, 120_000))
        output = _skewed(rng, 300, 350, 4000)
        after, turns = 0.0, [text.copy()]
        teller.ask(text, after, output)
        while rng.random() < 0.385:
            after += _skewed(rng, 60, 150)
            if rng.random() < 0.06:  # an edited message: leave from an earlier turn
                text = rng.choice(turns).copy()
                text.cut(text.tokens - _skewed(rng, 600, 1500))
            else:
                text.grow(output)
            message = text.tokens
            text.grow(_skewed(rng, 250, 1300, 60_000))
            output = _skewed(rng, 300, 350, 4000)
            turns.append(text.copy())
            teller.ask(text, after, output, message)
    return teller.trace()


def generate_agents(requests: int = 1000, *, seed: int = 0, grain: int = 64) -> Trace:
    """Return a trace of agent loops: long contexts, mostly appends, some rewinds.

    >>> 0.9 < describe_trace(generate_agents(300)).append_share < 0.97
    True

    Calibrated to the Claude Code traces: 93 % of the follow-ups append, 4 % change the last block,
    the others rewind a little or start over from the system prompt; the reuse ceiling is near 96 %.
    Those that do not append branch at a median near 70,000 tokens, in the public traces at 81,300.
    """
    teller = _Teller(f"agents:{requests}", requests, seed, grain)
    for rng in teller.stories(gap=600.0):
        system = teller.text(_skewed(rng, 15_000, 16_000))
        text, after, message = system.copy(), 0.0, system.tokens
        text.grow(_skewed(rng, 55_000, 85_000, 500_000))
        for _ in range(_skewed(rng, 44, 66, 400)):
            teller.ask(text, after, output := _skewed(rng, 217, 439, 30_000), message)
            after += _skewed(rng, 18, 130)
            move = rng.random()
            if move < 0.017:  # compaction: the system prompt and a summary
                text = system.copy()
                message = text.tokens
                text.grow(_skewed(rng, 20_000, 40_000, 200_000))
                continue
            if move < 0.028:
                text.cut(text.tokens - rng.randint(2 * grain, 5 * grain))
            elif move < 0.067:
                text.cut(text.tokens // grain * grain - rng.randint(1, grain))
            else:
                text.grow(output)
            message = text.tokens
            text.grow(_skewed(rng, 400, 1250, 60_000))
    return teller.trace()


def generate_documents(requests: int = 1000, *, seed: int = 0, grain: int = 512) -> Trace:
    """Return a trace of questions about shared documents, between short private prompts.

    >>> generate_documents(50).prompt.tolist() == generate_documents(50).prompt.tolist()
    True

    Calibrated to the Mooncake synthetic trace: 44 % follow-ups (here 38 %), of which 76 % append;
    the reuse ceiling is near 65 %. The others branch less deep: at a median of 22,000 tokens, not
    30,700.
    """
    teller = _Teller(f"documents:{requests}", requests, seed, grain)
    for rng in teller.stories(gap=0.45):
        if rng.random() < 0.66:
            teller.ask(teller.text(_skewed(rng, 150, 300)), 0.0, _skewed(rng, 70, 150))
            continue
        document = teller.text(_skewed(rng, 19_000, 24_000, 80_000))
        after = 0.0
        while True:
            text = document.copy()
            if after and rng.random() < 0.1:  # another version of its last pages
                text.cut(text.tokens - _skewed(rng, 600, 900))
                text.grow(_skewed(rng, 700, 900))
            text.grow(_skewed(rng, 40, 80))
            teller.ask(text, after, _skewed(rng, 70, 150))
            after += _skewed(rng, 30, 90)
            if rng.random() < (0.26 if document.tokens > 20_000 else 0.4):
                break
    return teller.trace()


GENERATORS: dict[str, Callable[..., Trace]] = {
    "chat": generate_chat,
    "agents": generate_agents,
    "documents": generate_documents,
}

# What each generator is calibrated to, as `describe_trace` finds it in the public traces: the
# conversation trace of Mooncake (kvcache-ai/Mooncake, FAST25-release), the 692 distinct
# conversations of the Claude Code traces (callanjfox/kv-cache-tester), Mooncake's synthetic trace.
PUBLIC_STATISTICS = {
    "chat": TraceStatistics(
        requests=12_031,
        prompt_median=6_909,
        prompt_mean=12_035.1,
        output_mean=342.62,
        follow_up_share=0.38484,
        append_share=0.85076,
        branch_depth=3_072,
        reuse_ceiling=0.37338,
    ),
    "agents": TraceStatistics(
        requests=45_542,
        prompt_median=101_495,
        prompt_mean=119_379.8,
        output_mean=439.06,
        follow_up_share=0.98384,
        append_share=0.93387,
        branch_depth=81_344,
        reuse_ceiling=0.96285,
    ),
    "documents": TraceStatistics(
        requests=3_993,
        prompt_median=11_587,
        prompt_mean=15_325.5,
        output_mean=149.12,
        follow_up_share=0.43777,
        append_share=0.76030,
        branch_depth=30_720,
        reuse_ceiling=0.65043,
    ),
}
