"""What all commands share: numbers, sizes and names from the command line, and tables for it.

Errors name the option as it was typed. The commands themselves stand in their rooms' `command.py`.
"""

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from mambackpt.errors import CheckpointValueError, checked_choice

T = TypeVar("T", bound=str)

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {f"{prefix}iB": 1 << 10 * power for power, prefix in enumerate("KMGT", start=1)}


def whole_number(option: str, text: str, *, least: int = 1, example: int = 1000) -> int:
    """Return the number that an option was given.

    >>> whole_number("--seed", "2,000", least=0)
    2000

    Thousands may be separated. Raises CheckpointValueError for anything below ``least``, and for
    what is no whole number; ``example`` is what it says to try.
    """
    digits = text.strip().replace(",", "").replace("_", "")
    if not digits.isdecimal() or int(digits) < least:
        raise CheckpointValueError(
            f"{option} is {text!r}; expected a whole number of at least {least}. "
            f"Try {option} {max(least, example)}."
        )
    return int(digits)


def whole_numbers(
    option: str, text: str, *, least: int = 1, example: str = "512,2048"
) -> list[int]:
    """Return the numbers of a list with commas.

    >>> whole_numbers("--block", "512,2048")
    [512, 2048]

    Raises CheckpointValueError where one is below ``least`` or no whole number; ``example`` is what
    it says to try.
    """
    numbers = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= least for part in numbers):
        raise CheckpointValueError(
            f"{option} is {text!r}; expected whole numbers of at least {least} with commas between "
            f"them. Try {option} {example}."
        )
    return [int(part) for part in numbers]


def layer_counts(option: str, text: str) -> tuple[int, int]:
    """Return the recurrent and attention layers that an option was given.

    >>> layer_counts("--layers", "36,12")
    (36, 12)

    Raises CheckpointValueError for anything else.
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise CheckpointValueError(
            f"{option} is {text!r}; expected recurrent and attention layers, two whole numbers. "
            f"Try {option} 36,12."
        )
    return int(parts[0]), int(parts[1])


def bytes_of(option: str, text: str) -> int:
    """Return a size in bytes: decimal units (GB) and binary ones (GiB).

    >>> bytes_of("--pool", "1.5TB"), bytes_of("--pool", "16GiB")
    (1500000000000, 17179869184)

    Raises CheckpointValueError for a size without a unit, and for one that is no size.
    """
    number = text.strip().rstrip("BKMGTi")
    unit = text.strip()[len(number) :]
    try:
        amount = float(number) * _UNITS[unit]
    except (ValueError, KeyError):
        amount = math.nan
    if not (math.isfinite(amount) and round(amount) >= 1):
        plain = number.isdecimal() and not unit
        raise CheckpointValueError(
            f"{option} is {text!r}; expected a size with its unit, one of {', '.join(_UNITS)}. "
            f"Try {option} {number if plain and int(number) else 320}GB."
        )
    return round(amount)


def names_of(text: str) -> list[str]:
    """Split at the commas that are in no bracket.

    >>> names_of("last,trtllm(from_end=[0, 512])")
    ['last', 'trtllm(from_end=[0, 512])']
    """
    names, depth = [""], 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and not depth:
            names.append("")
        else:
            names[-1] += letter
    return [name.strip() for name in names]


def choices_of(option: str, text: str, known: Iterable[T], *, separator: str = ",") -> list[T]:
    """Return the names of a list, each one of the known ones.

    >>> choices_of("--layer", "kimi-k3, qwen3-next", ["kimi-k3", "qwen3-next"])
    ['kimi-k3', 'qwen3-next']

    Raises CheckpointValueError for another name, and says which known one it resembles.
    """
    listed = list(known)
    return [checked_choice(option, name.strip(), listed) for name in text.split(separator)]


def checked_output(option: str, file: str | Path) -> Path:
    """Return the path of a file that can be written; to ask before the work is done.

    >>> checked_output("--out", "hits.csv").name
    'hits.csv'

    Raises CheckpointValueError for a folder, and where nothing can be written.
    """
    path = Path(file)
    folder = path.parent
    what, name = "", path.name or "out.json"
    if path.is_dir():
        what, name = "is a folder", f"{path}/out.json"
    elif not folder.is_dir():
        what = f"lies in {folder}, which is no folder"
    elif (path.exists() and not os.access(path, os.W_OK)) or not _takes_files(path):
        what = "cannot be written"
    if what:
        raise CheckpointValueError(
            f"{option} {path} {what}; expected a file that can be written. Try {option} {name}."
        )
    return path


def _draft_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")


def _takes_files(path: Path) -> bool:
    """Whether a draft can be made beside this file."""
    try:
        _draft_of(path).touch()
        _draft_of(path).unlink()
    except OSError:
        return False
    return True


def write_whole(file: str | Path, content: str | bytes) -> None:
    """Write a file whole or not at all: under another name first, beside it.

    A run that is interrupted leaves the file as it was before. Raises CheckpointValueError where it
    cannot be written.
    """
    path = Path(file)
    whole = content.encode() if isinstance(content, str) else content
    draft = _draft_of(path)
    try:
        draft.write_bytes(whole)
        draft.replace(path)
    except OSError as error:
        raise CheckpointValueError(
            f"{path} cannot be written ({error.strerror}); expected a place with room for "
            f"{len(whole):,} bytes. Try another folder."
        ) from error
    finally:
        draft.unlink(missing_ok=True)


def table(header: Sequence[str], rows: Iterable[Sequence[object]], *, words: int = 1) -> str:
    """Return a table as text: the first ``words`` columns to the left, numbers to the right.

    >>> print(table(["model", "block"], [["A", 1056], ["long name", 16]]))
    model      block
    A          1,056
    long name     16
    """
    cells = [list(header)]
    cells += [[f"{c:,}" if type(c) is int else str(c) for c in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (
        "  ".join(
            cell.ljust(width) if at < words else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    )
    return "\n".join(line.rstrip() for line in lines)
