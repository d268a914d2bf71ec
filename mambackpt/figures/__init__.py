"""What does a review need? Every figure by its name, with its finding."""

# Topics stand in the order in which their figures are listed.
# isort: off
from mambackpt.draw import save_figure
from mambackpt.figures.registry import FIGURES, describe_figure, draw_figure, save_named
from mambackpt.figures.placement import puzzle_requests
from mambackpt.figures.capacities import draw_capacity
from mambackpt.figures.lessons import puzzle_cures
from mambackpt.figures.lockstep import wrong_restores
from mambackpt.figures.resume import draw_fading, draw_faults, draw_gap
from mambackpt.figures.exports import draw_export_timings, draw_instructions, draw_roofline
from mambackpt.figures.replays import least_block, pool_sizes
from mambackpt.figures import misses
from mambackpt.figures.words import PLACEMENTS, rule_in_words
# isort: on

__all__ = [
    "FIGURES",
    "PLACEMENTS",
    "describe_figure",
    "draw_capacity",
    "draw_export_timings",
    "draw_fading",
    "draw_faults",
    "draw_figure",
    "draw_gap",
    "draw_instructions",
    "draw_roofline",
    "least_block",
    "misses",
    "pool_sizes",
    "puzzle_cures",
    "puzzle_requests",
    "rule_in_words",
    "save_figure",
    "save_named",
    "wrong_restores",
]
