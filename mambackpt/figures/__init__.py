"""What does a review need? Every figure by its name, with its finding."""

# Topics stand in the order in which their figures are listed.
# isort: off
from mambackpt.figures.registry import (
    FIGURES,
    REPLAYS,
    draw_figure,
    named,
    replayed,
    save_figure,
)
from mambackpt.figures.placement import puzzle_requests, smallest_outside, smallest_refused
from mambackpt.figures.lockstep import draw_wrong_restores
from mambackpt.figures.exports import (
    draw_export_timings,
    draw_instructions,
    draw_roofline,
    window_readers_map,
)
from mambackpt.figures.replays import PLACEMENTS, least_block, pool_sizes
# isort: on

__all__ = [
    "FIGURES",
    "PLACEMENTS",
    "REPLAYS",
    "draw_export_timings",
    "draw_figure",
    "draw_instructions",
    "draw_roofline",
    "draw_wrong_restores",
    "least_block",
    "named",
    "pool_sizes",
    "puzzle_requests",
    "replayed",
    "save_figure",
    "smallest_outside",
    "smallest_refused",
    "window_readers_map",
]
