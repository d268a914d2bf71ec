"""Trace files as they are published: layouts, gzip, and errors with file, line and field."""

import gzip
import json
import marshal
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

from mambackpt.errors import CheckpointValueError, checked_choice, checked_int
from mambackpt.replay.trace import BlockNumbers, NotChained, Runs, Trace, TraceRows

_GRAINS = {"mooncake": 512, "bailian": 16}  # tokens per block of the published files
LAYOUTS = ("mooncake", "bailian", "claude-code", "tokens")
_HASHES = "ids that count blocks, or unsigned hashes of 64 bits"


@dataclass(frozen=True, slots=True)
class _Line:
    """One line of a trace file, with the words for what is wrong with it."""

    path: Path
    number: int

    def error(self, field: str, given: str, expected: str, hint: str) -> CheckpointValueError:
        where = f"{self.path.name} line {self.number}, field {field}"
        return CheckpointValueError(f"{where}: given {given}; expected {expected}. Try {hint}.")

    def get(self, record: dict[str, Any], field: str) -> Any:
        try:
            return record[field]
        except KeyError:
            hint = f"layout= with one of {LAYOUTS}: the line has {sorted(record)}"
            raise self.error(field, "nothing", "the field to be there", hint) from None

    def whole(self, record: dict[str, Any], field: str, least: int = 0) -> int:
        value = self.get(record, field)
        if type(value) is not int or value < least:
            expected = f"a whole number of at least {least}"
            raise self.error(field, repr(value), expected, "removing the request")
        return value

    def seconds(self, record: dict[str, Any], field: str, scale: float = 1.0) -> float:
        value = self.get(record, field)
        if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
            raise self.error(field, repr(value), "a time of at least 0", "0")
        return float(value) * scale

    def ids(self, record: dict[str, Any], field: str, counts: tuple[int, ...]) -> list[int]:
        ids = self.get(record, field)
        if type(ids) is not list or (
            ids and ({*map(type, ids)} != {int} or min(ids) < 0 or max(ids) >= 1 << 64)
        ):
            raise self.error(field, f"{ids!r:.60}", "whole numbers from 0 to 2**64 - 1", _HASHES)
        if len(ids) not in counts:
            expected = f"{' or '.join(map(str, counts))}, one for each block of the prompt"
            hint = "grain= with the tokens of a block"
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
                raise self.error(field, f"{pair!r:.60}", "pairs of [first id, count]", "[[0, 12]]")
            first, count = pair
            if first < 0 or count < 1:
                raise self.error(field, repr(pair), "an id from 0 and a count from 1", "[0, 1]")
            total += count
            if first == end:
                joined[-1] = [joined[-1][0], joined[-1][1] + count]
            else:
                joined.append(pair)
            end = first + count
        if total != blocks:
            expected = f"{blocks}, one for each full block of the prompt"
            raise self.error(field, f"{total} ids", expected, "the file's own block_size")
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
    if layout is not None:
        checked_choice("layout", layout, LAYOUTS, hint="Try leaving it out.")
    if grain is not None:
        checked_int("grain", grain)
    rows: TraceRows | None = None
    take: Callable[[_Line, Any], None] | None = None
    for line, record in _records(path):
        kind = layout or _layout_of(line, record)
        if rows is None or take is None:
            usual = _GRAINS.get(kind, 16)
            if kind == "claude-code" and grain is None:
                usual = line.whole(record, "block_size", 1)
            rows = TraceRows(path.name, usual if grain is None else grain)
            take = _Reader(rows, kind, subagents, duplicates).taker()
        take(line, record)
    if rows is None or not len(rows.prompt):
        raise CheckpointValueError(
            f"{path.name} is empty; expected at least one request. Try another file."
        )
    return _linked(rows, path)


def _linked(rows: TraceRows, path: Path) -> Trace:
    try:
        return rows.link()
    except NotChained as clash:
        raise _Line(path, rows.lines[clash.row]).error(
            "hash_ids",
            f"block {clash.block} after a prefix that it did not have before",
            "equal ids to mean equal whole prefixes",
            "a trace whose block ids are chained",
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
    raise line.error("(all)", f"{record!r:.60}", "a known layout", f"layout= with one of {LAYOUTS}")


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
                hint = "fetching the file again"
                raise line.error("(gzip)", str(error), "a whole gzip stream", hint) from error
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                hint = "removing the line"
                raise line.error("(all)", f"{text[:60]!r}", "one JSON value", hint) from error


def _requests(
    line: _Line, record: dict[str, Any], subagents: bool
) -> Iterator[tuple[float, dict[str, Any]]]:
    """A conversation's requests with the time at which their group starts."""
    requests = line.get(record, "requests")
    if type(requests) is not list or not all(type(request) is dict for request in requests):
        raise line.error(
            "requests", f"{requests!r:.60}", "a list of requests", "removing the conversation"
        )
    for request in requests:
        if request.get("type") != "subagent":
            yield 0.0, request
        elif subagents:
            start = line.seconds(request, "t")
            yield from ((start + t, inner) for t, inner in _requests(line, request, True))


class _Reader:
    """Appends one line's requests to ``rows``, in the way of the file's layout."""

    def __init__(self, rows: TraceRows, layout: str, subagents: bool, duplicates: bool) -> None:
        self.rows, self.grain, self.layout = rows, rows.grain, layout
        self.subagents, self.duplicates = subagents, duplicates
        self.chats: dict[int, int] = {}
        self.numbers = BlockNumbers()
        self.copies: set[bytes] = set()  # digests of the conversations read so far
        self.offset = 0

    def taker(self) -> Callable[[_Line, Any], None]:
        """The function that takes a line of this layout."""
        takers = {"claude-code": self.conversation, "tokens": self.tokens}
        return takers.get(self.layout, self.listed)

    def listed(self, line: _Line, record: Any) -> None:
        """Mooncake and Bailian: one request a line."""
        prompt = line.whole(record, "input_length", 1)
        full, counts = prompt // self.grain, {-(-prompt // self.grain)}
        scale, chat = 1e-3, -1
        if self.layout == "bailian":
            counts, scale = {*counts, full}, 1.0
            chat_id = line.whole(record, "chat_id")
            parent = line.whole(record, "parent_chat_id", -1)
            chat = self.chats[chat_id] = self.chats.get(parent, len(self.chats))
        self.rows.add(
            line.seconds(record, "timestamp", scale),
            prompt,
            line.whole(record, "output_length"),
            ids=line.ids(record, "hash_ids", tuple(sorted(counts)))[:full],
            conversation=chat,
            line=line.number,
        )

    def tokens(self, line: _Line, record: Any) -> None:
        """One prompt's token ids a line."""
        if type(record) is not list or not record or {*map(type, record)} != {int}:
            raise line.error("(all)", f"{record!r:.60}", "a list of token ids", "[1, 2, 3]")
        ids = self.numbers.blocks(record, self.grain)
        self.rows.add(float(line.number - 1), len(record), 0, ids=ids, line=line.number)

    def conversation(self, line: _Line, record: Any) -> None:
        """Claude Code: one conversation a line, whose ids are its own."""
        if type(record) is not dict or line.whole(record, "block_size", 1) != self.grain:
            expected = f"blocks of {self.grain} tokens"
            hint = "a file whose conversations have blocks of one size"
            raise line.error("block_size", f"{record!r:.60}", expected, hint)
        requests = [
            (
                start + line.seconds(request, "t"),
                line.whole(request, "in", 1),
                line.whole(request, "out"),
                line.runs(request, request["in"] // self.grain),
            )
            for start, request in _requests(line, record, self.subagents)
        ]
        digest = blake2b(marshal.dumps(requests, 2)).digest()
        if digest in self.copies and not self.duplicates:
            return
        self.copies.add(digest)
        for arrival, prompt, output, runs in requests:
            self.rows.add(
                *(arrival, prompt, output),
                runs=runs,
                offset=self.offset,
                conversation=line.number - 1,
                line=line.number,
            )
        # Ids are local to a conversation: the next one's start after the largest of this one.
        self.offset += max((sum(run) for _, _, _, runs in requests for run in runs), default=0)
