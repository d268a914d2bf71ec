"""State slots: how SGLang divides a pool between states and attention."""

from mambackpt.errors import checked_choice, checked_int


def slots_per_request(
    strategy: str = "no_buffer", *, overlap: bool = True, lock: bool = True
) -> int:
    """Return the state slots that SGLang reserves for a running request.

    >>> slots_per_request("none"), slots_per_request(), slots_per_request("extra_buffer")
    (1, 3, 5)

    ``strategy`` is "none" (without a radix cache), "no_buffer" or "extra_buffer"; with
    ``overlap=False`` steps do not overlap, with ``lock=False`` the decode lock is skipped.
    """
    checked_choice("strategy", strategy, ("none", "no_buffer", "extra_buffer"))
    if strategy == "none":
        return 1
    if strategy == "no_buffer":
        return 3
    return 3 + overlap + lock


def balanced_split(
    pool_bytes: int, *, slots: int, drafts: int, state_bytes: int, tokens: int, token_bytes: int
) -> tuple[int, int]:
    """Return the bytes for states and for attention that requests of this length fill together.

    >>> balanced_split(3_000, slots=1, drafts=0, state_bytes=100, tokens=20, token_bytes=10)
    (1000, 2000)

    (slots + drafts) x state bytes stand to tokens x token bytes, bytes of all layers.
    """
    pool = checked_int("pool_bytes", pool_bytes, unit="bytes")
    states = (slots + drafts) * checked_int("state_bytes", state_bytes, unit="bytes")
    attention = checked_int("tokens", tokens) * checked_int(
        "token_bytes", token_bytes, unit="bytes"
    )
    part = pool * states // (states + attention)
    return part, pool - part


def host_tier_bytes(size_bytes: int) -> tuple[int, int]:
    """Return what SGLang takes for a host tier of this size: for attention, and again for states.

    >>> host_tier_bytes(100 * 10**9)
    (100000000000, 100000000000)
    """
    size = checked_int("size_bytes", size_bytes, unit="bytes")
    return size, size
