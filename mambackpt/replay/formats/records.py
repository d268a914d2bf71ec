"""Records of trace files: JSON one a line, pretty-printed, in one list or in a folder; gzip."""

import gzip
import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from mambackpt.errors import CheckpointValueError

_HASHES = "ids that count blocks, or unsigned hashes of 64 bits"
_BLANK = b" \t\r\n\xef\xbb\xbf"  # and the mark that some editors begin a file with
_SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
# Other names of a field, as Dynamo and AIPerf take them in rows of the Mooncake layout.
_ALIASES = {
    "input_length": "input_tokens",
    "output_length": "output_tokens",
    "timestamp": "created_time",
    "delay": "delay_ms",
}


@dataclass(frozen=True, slots=True)
class Line:
    """Where a record stands in its file, with the words for what is wrong with it.

    ``number`` is the line that it starts on; ``record`` counts those of one line, from 1 (0: the
    line holds no other).
    """

    path: Path
    number: int
    record: int = 0

    def error(self, field: str, given: str, expected: str, hint: str) -> CheckpointValueError:
        """What to raise about a field: what was given, what was expected, what to try."""
        where = f"{self.path.name} line {self.number}"
        where += f" record {self.record}" if self.record else ""
        return CheckpointValueError(
            f"{where}, field {field}: given {given}; expected {expected}. Try {hint}."
        )

    def get(self, record: dict[str, Any], field: str) -> Any:
        """A field, by its own name or another one that it goes by."""
        try:
            return record[field]
        except KeyError:
            if _ALIASES.get(field) in record:
                return record[_ALIASES[field]]
            hint = f"--layout for another shape: the record has {sorted(record)}"
            raise self.error(field, "nothing", "the field to be there", hint) from None

    def whole(self, record: dict[str, Any], field: str, least: int = 0) -> int:
        """A whole number of at least ``least``."""
        value = self.get(record, field)
        if type(value) is not int or value < least:
            expected = f"a whole number of at least {least}"
            raise self.error(field, repr(value), expected, "removing the request")
        return value

    def seconds(self, record: dict[str, Any], field: str, scale: float = 1.0) -> float:
        """A time of at least 0, in seconds after ``scale``."""
        value = self.get(record, field)
        if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
            raise self.error(field, repr(value), "a time of at least 0", "0")
        return float(value) * scale

    def ids(self, record: dict[str, Any], field: str, counts: tuple[int, ...]) -> list[int]:
        """A list of ids, as many as one of ``counts``."""
        ids = self.get(record, field)
        if type(ids) is not list or (
            ids and ({*map(type, ids)} != {int} or min(ids) < 0 or max(ids) >= 1 << 64)
        ):
            raise self.error(field, f"{ids!r:.60}", "whole numbers from 0 to 2**64 - 1", _HASHES)
        if len(ids) not in counts:
            expected = f"{' or '.join(map(str, counts))}, one for each block of the prompt"
            hint = "another grain: the tokens of a block"
            raise self.error(field, f"{len(ids)} ids", expected, hint)
        return ids


def read_records(path: Path) -> Iterator[tuple[Line, Any]]:
    """Yield the JSON values of a file, or of a folder's files by name, each with its line.

    One value a line, values over several lines, or one list of all. A first line that is no JSON
    comes as text, for what knows tables. Raises CheckpointValueError for what is malformed.
    """
    if not path.is_dir():
        yield from _records_of(path)
        return
    files = sorted(file for file in path.iterdir() if file.name.endswith(_SUFFIXES))
    if not files:
        raise CheckpointValueError(
            f"{path} is a folder without traces; expected files that end in "
            f"{', '.join(_SUFFIXES)}. Try the path of one file."
        )
    for file in files:
        yield from _records_of(file)


def _records_of(path: Path) -> Iterator[tuple[Line, Any]]:
    number, first = 0, True
    with path.open("rb") as plain:
        packed = plain.read(2) == b"\x1f\x8b"
        plain.seek(0)
        stream: IO[bytes] | gzip.GzipFile = gzip.GzipFile(fileobj=plain) if packed else plain
        lines = iter(stream)
        while True:
            number += 1
            line = Line(path, number)
            try:
                text = next(lines, b"")
                if not text:
                    return
                if text.isspace():
                    continue
                value = json.loads(text)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                hint = "fetching the file again"
                raise line.error("(gzip)", str(error), "a whole gzip stream", hint) from error
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                if first and text.lstrip(_BLANK)[:1] not in (b"{", b"["):
                    yield line, text.decode(errors="replace").lstrip("\ufeff")
                    return
                if first:
                    yield from _values(line, text, _rest_of(line, lines))
                    return
                hint = "removing the line"
                raise line.error("(all)", f"{text[:60]!r}", "one JSON value", hint) from error
            first = False
            yield from _elements(line, value)


def _rest_of(line: Line, lines: Iterator[bytes]) -> bytes:
    try:
        return b"".join(lines)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        hint = "fetching the file again"
        raise line.error("(gzip)", str(error), "a whole gzip stream", hint) from error


def _elements(line: Line, value: Any) -> Iterator[tuple[Line, Any]]:
    """The records of a list of records, or the value itself."""
    if type(value) is list and value and {*map(type, value)} in ({dict}, {list}):
        for at, element in enumerate(value, 1):
            yield Line(line.path, line.number, at), element
    else:
        yield line, value


def _values(line: Line, first: bytes, rest: bytes) -> Iterator[tuple[Line, Any]]:
    """The values of a text that is not JSON line by line: they go over several lines each."""
    hint = "removing the line"
    wrong = line.error("(all)", f"{first[:60]!r}", "one JSON value", hint)
    try:
        text = (first + rest).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise wrong from None
    second = next((piece for piece in rest.splitlines() if piece.strip()), b"")
    if second[:1] in (b"{", b"["):  # one value a line, and the first one is damaged
        raise wrong
    decoder, at, number = json.JSONDecoder(), 0, line.number
    while True:
        start = at + len(text[at:]) - len(text[at:].lstrip())
        number += text.count("\n", at, start)
        if start == len(text):
            return
        try:
            value, at = decoder.raw_decode(text, start)
        except json.JSONDecodeError as error:
            cut = error.pos >= len(text.rstrip())
            place = Line(line.path, number if cut else line.number + error.lineno - 1)
            given = f"{text[start : start + 40] if cut else text[error.pos : error.pos + 40]!r}"
            given += ", which does not end" if cut else f" ({error.msg})"
            raise place.error("(all)", given, "one JSON value", "mending the line") from error
        yield from _elements(Line(line.path, number), value)
        number += text.count("\n", start, at)
