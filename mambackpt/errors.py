"""The errors of this kit: one family, each also a ValueError or a TypeError.

A message says three things, in this order: what was given, what was expected, what to try.
"""


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
    """A value of the right type that the rule cannot take."""


class CheckpointTypeError(CheckpointError, TypeError):
    """A value of a type that the rule cannot take."""
