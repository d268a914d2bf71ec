"""Memory of the host, and the chunks that leave the device."""

from collections.abc import Iterable
from math import lcm

from mambackpt.errors import checked_int


def host_checkpoint_bytes(checkpoint_bytes: int, *, checkpoints: int = 32, slots: int = 1) -> int:
    """Return the host memory that llama.cpp's context checkpoints take at most.

    >>> state = 48 * (3 * 2**20 + 120 * 2**10)  # fp32 state and fp32 window of 48 layers
    >>> f"{state / 2**20:.1f} MiB, {host_checkpoint_bytes(state, slots=4) / 2**30:.1f} GiB"
    '149.6 MiB, 18.7 GiB'

    ``checkpoints`` is ``--ctx-checkpoints``, per slot.
    """
    size = checked_int("checkpoint_bytes", checkpoint_bytes, unit="bytes")
    return size * checked_int("checkpoints", checkpoints) * checked_int("slots", slots)


def smallest_chunk(blocks: Iterable[int], *, least: int = 256) -> int:
    """Return the smallest valid chunk of a KV connector, at or above ``least`` tokens.

    >>> smallest_chunk([544]), smallest_chunk([16, 48]), smallest_chunk([528, 64])
    (544, 288, 2112)

    A chunk is a multiple of every group's block. Raises CheckpointValueError without blocks.
    """
    unit = lcm(*(checked_int("block", block) for block in blocks))
    return -(-checked_int("least", least) // unit) * unit
