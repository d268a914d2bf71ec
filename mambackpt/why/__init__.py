"""Why is there no checkpoint, and why no hit? One query, two prompts, many conversations."""

from mambackpt.why.cures import Cure, find_cures
from mambackpt.why.defaults import common_budget, common_settings, find_model, kernel_grid
from mambackpt.why.live import LiveVerdict, explain_live
from mambackpt.why.prompts import CAUSES, HitVerdict, explain_hit
from mambackpt.why.staircase import (
    Stairs,
    fork_stairs,
    lost_to_margin,
    resend_stairs,
    with_drop,
)

__all__ = [
    "CAUSES",
    "Cure",
    "HitVerdict",
    "LiveVerdict",
    "Stairs",
    "common_budget",
    "common_settings",
    "explain_hit",
    "explain_live",
    "find_cures",
    "find_model",
    "fork_stairs",
    "kernel_grid",
    "lost_to_margin",
    "resend_stairs",
    "with_drop",
]
