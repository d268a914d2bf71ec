"""Files with lengths and without prompts: BurstGPT's and Azure's tables, rows without ids.

They say how long requests are, not which of them share a prefix; the generator ``lengths`` keeps
the lengths and makes the sharing up.
"""

import csv
import gzip
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mambackpt.errors import CheckpointValueError
from mambackpt.replay.formats.records import Line, read_records

# The columns of published tables, in lower case: BurstGPT, Azure, and what others call them.
_PROMPT = ("request tokens", "contexttokens", "input_length", "input_tokens", "prompt_tokens")
_OUTPUT = (
    *("response tokens", "generatedtokens", "output_length", "output_tokens"),
    "completion_tokens",
)
_TIME = ("timestamp", "created_time", "arrival")
_SESSION = ("session id", "session_id")


@dataclass(frozen=True, slots=True)
class RequestLengths:
    """What such a row says: seconds, tokens of prompt and output, and a session or None."""

    arrival: float
    prompt: int
    output: int
    session: str | None


def is_table(text: str) -> bool:
    """Whether a text begins with the header of a table of request lengths."""
    names = [name.strip().lower() for name in text.split("\n", 1)[0].split(",")]
    return any(name in _PROMPT for name in names) and any(name in _OUTPUT for name in names)


def has_lengths(record: Any) -> bool:
    """Whether a record says how long a request is."""
    return type(record) is dict and any(name in record for name in _PROMPT)


def no_prefixes(path: Path, what: str) -> CheckpointValueError:
    """What to raise for a file of lengths: what is missing, and the call that keeps the lengths."""
    return CheckpointValueError(
        f"{path} {what}: it says how long each request is, and nothing of which requests share a "
        "prefix; expected hash_ids, messages or token ids. "
        f"Try lengths:{path},share=0.5,groups=64 to keep these lengths and make the sharing up."
    )


def read_lengths(path: Path) -> Iterator[RequestLengths]:
    """Yield the lengths in a table (.csv, .csv.gz), or in rows of JSON.

    Rows of no prompt tokens, as failed requests have them, are yielded too. Raises
    CheckpointValueError with file, line and field for what is malformed.
    """
    if _is_csv(path):
        yield from _table_lengths(path)
        return
    for line, record in read_records(path):
        if not has_lengths(record):
            hint = "a table of BurstGPT or Azure, or rows with input_length and output_length"
            raise line.error("(all)", f"{record!r:.60}", "a row of lengths", hint)
        name = next(name for name in _PROMPT if name in record)
        output = next((name for name in _OUTPUT if name in record), "output_length")
        timed = next((name for name in _TIME if name in record), None)
        session = record.get("session_id")
        yield RequestLengths(
            line.seconds(record, timed, 1e-3) if timed else 0.0,
            line.whole(record, name),
            line.whole(record, output),
            None if session is None else str(session),
        )


def _is_csv(path: Path) -> bool:
    return not path.is_dir() and is_table("".join(_first_line(path)))


def _first_line(path: Path) -> list[str]:
    try:
        with _opened(path) as stream:
            return [stream.readline()]
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile):
        return []


def _opened(path: Path) -> Any:
    with path.open("rb") as stream:
        packed = stream.read(2) == b"\x1f\x8b"
    opened = gzip.open if packed else open
    return opened(path, "rt", encoding="utf-8-sig", newline="")


def _rows(path: Path) -> Iterator[tuple[Line, list[str]]]:
    """The rows of a table that are not empty, its header first."""
    number = 0
    with _opened(path) as stream:
        rows = csv.reader(stream)
        while True:
            try:
                row = next(rows, None)
            except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
                expected, hint = "a table in UTF-8, plain or in whole gzip", "fetching it again"
                place = Line(path, number + 1)
                raise place.error("(all)", str(error), expected, hint) from error
            if row is None:
                return
            number = rows.line_num
            if row:
                yield Line(path, number), row


def _table_lengths(path: Path) -> Iterator[RequestLengths]:
    rows = _rows(path)
    names = [name.strip().lower() for name in next(rows)[1]]
    columns = [
        next((names.index(name) for name in wanted if name in names), -1)
        for wanted in (_TIME, _PROMPT, _OUTPUT, _SESSION)
    ]
    time, prompt, output, session = columns
    start: float | None = None
    for line, row in rows:
        if len(row) <= max(columns):
            hint = "removing the line"
            raise line.error("(all)", f"{len(row)} columns", f"{len(names)}", hint)
        at = _time(line, row[time]) if time >= 0 else 0.0
        start = at if start is None else start
        yield RequestLengths(
            at - start,
            _tokens(line, names[prompt], row[prompt]),
            _tokens(line, names[output], row[output]),
            row[session] or None if session >= 0 else None,
        )


def _tokens(line: Line, field: str, text: str) -> int:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not (number >= 0 and number.is_integer()):
        raise line.error(field, repr(text), "a whole number of at least 0", "removing the line")
    return int(number)


def _time(line: Line, text: str) -> float:
    """Seconds, given so or as a date."""
    try:
        number = float(text)
    except ValueError:
        try:
            date = datetime.fromisoformat(text)
        except ValueError:
            number = math.nan
        else:
            number = (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    if not math.isfinite(number):
        raise line.error("timestamp", repr(text), "seconds or a date", "removing the line")
    return number
