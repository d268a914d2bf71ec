"""The errors of this kit: one family, each also a ValueError or a TypeError.

A message says three things, in this order: what was given, what was expected, what to try.
"""

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T", bound=str)


class CheckpointError(Exception):
    """The family: catch it to catch every refusal of this kit.

    >>> from mambackpt import CacheGeometry, CheckpointError
    >>> try:
    ...     CacheGeometry(0, 64, 16, 16)
    ... except CheckpointError as error:
    ...     print(error)
    hash_block_size is 0; expected a positive number of tokens. Try 16.
    """


class CheckpointValueError(CheckpointError, ValueError):
    """A value of the right type that cannot be taken."""


class CheckpointTypeError(CheckpointError, TypeError):
    """A value of a type that cannot be taken."""


def checked_int(name: str, value: object, *, least: int = 1, unit: str = "tokens") -> int:
    """Return ``value`` as an int of at least ``least``, or say what is wrong with it.

    >>> checked_int("hash_block_size", 16)
    16

    Booleans and floats are refused even where they equal an integer; numpy integers are fine.
    Raises CheckpointTypeError or CheckpointValueError.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise CheckpointTypeError(
            f"{name} is {value!r} ({type(value).__name__}); expected a whole number of {unit}. "
            f"Try int({value!r}) if that is what you mean."
        )
    number: int = value.__index__()
    if number < least:
        expected = {0: "a non-negative number of", 1: "a positive number of"}
        suggestion = 16 if least == 1 and unit == "tokens" else max(least, 0)
        raise CheckpointValueError(
            f"{name} is {number}; expected {expected.get(least, f'at least {least}')} {unit}. "
            f"Try {suggestion}."
        )
    return number


def checked_choice(name: str, value: object, choices: Iterable[T], *, hint: str = "") -> T:
    """Return ``value`` if it is one of the choices, or name the one that it resembles.

    >>> checked_choice("eviction", "lru", ["lru", "hit-node"])
    'lru'
    >>> try:
    ...     checked_choice("eviction", "hitnode", ["lru", "hit-node"])
    ... except CheckpointError as error:
    ...     print(error)
    eviction is 'hitnode'; expected one of lru, hit-node. Try 'hit-node'.

    ``hint`` takes the place of "Try ..." where there is something better to try. Raises
    CheckpointValueError.
    """
    known = list(choices)
    for choice in known:
        if value == choice:
            return choice
    if not hint:
        from difflib import get_close_matches

        close = get_close_matches(str(value).lower(), known, 1, cutoff=0.5)
        hint = f"Try {(close or known)[0]!r}."
    raise CheckpointValueError(f"{name} is {value!r}; expected one of {', '.join(known)}. {hint}")
