"""Figures of what a pool holds."""

from collections.abc import Callable

from mambackpt.draw import (
    HIT,
    STATE,
    Drawing,
    describe_curves,
    draw_curves,
    fit_y,
    numeral,
    sheets,
)
from mambackpt.figures.registry import named
from mambackpt.models import PRESETS, HybridModel

_POOL, _STEPS = 20 * 10**9, 8


@named("capacity")
def _capacity() -> Drawing:
    """The ids of a conversation against its length, in a pool of 20 GB."""
    return draw_capacity(PRESETS["qwen3.5-27b"], _POOL)


def draw_capacity(model: HybridModel, pool_bytes: int) -> Drawing:
    """Draw the block ids that one conversation leaves, by the states it keeps, and the pool's.

    ``pool_bytes`` of one device. Raises CheckpointValueError for a model whose layers are not
    known.
    """
    holds = model.capacity(pool_bytes, model.scheduler_block)
    block, full = holds.block, holds.admitted_ids
    # Up to the longest conversation that fits with its last state, and a little beyond.
    longest = block * max(2, (full - holds.recurrent_groups) // holds.attention_groups)
    lengths = [block * max(1, longest * step // _STEPS // block) for step in range(1, _STEPS + 1)]
    states: dict[str, Callable[[int], int]] = {
        "its last state alone": lambda blocks: 1,
        "a state every 8 blocks": lambda blocks: -(-blocks // 8),
        "a state every block": lambda blocks: blocks,
    }
    curves = {
        words: (lengths, [holds.cached_ids(n, kept(n // block)) for n in lengths])
        for words, kept in states.items()
    }
    fits = {
        words: max(
            (n for n in range(block, longest + 1, block)
             if holds.cached_ids(n, kept(n // block)) <= full),
            default=0,
        )
        for words, kept in states.items()
    }  # fmt: skip
    finding = (
        f"{pool_bytes / 1e9:,.0f} GB are full with one conversation of "
        f"{fits['a state every block']:,} tokens where a state is kept every block, of "
        f"{fits['its last state alone']:,} with the last state alone."
    )
    note = (
        f"{model.name}, ids of {holds.bytes_per_id / 1e6:,.1f} MB, blocks of {block:,} tokens; a "
        f"state takes {holds.recurrent_groups} ids, a block of tokens {holds.attention_groups}."
    )
    pages = sheets(finding, [15], left=6, right=14, note=note)
    ax = pages.axes[0]
    fit_y(ax, [row for _, row in curves.values()], least=0)
    pool = {f"pool full: {full:,} ids": (lengths, [full] * len(lengths))}
    colours = {"its last state alone": HIT, "a state every block": STATE}
    draw_curves(
        ax, curves | pool, x_label="tokens of a conversation",
        y_label="block ids it leaves", highlight=colours,
    )  # fmt: skip
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(lambda value, _: numeral(value))
    alt = (
        f"{finding} {model.name}, {full:,} ids. Ids of conversations of "
        f"{', '.join(f'{n:,}' for n in lengths)} tokens: {describe_curves(curves)}."
    )
    return pages.drawing(finding, alt)
