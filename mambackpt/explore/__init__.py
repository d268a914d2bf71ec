"""What happens if I move this? Explorers for a notebook, and their views without one."""

from mambackpt.explore.branches import branches_view, explore_branches
from mambackpt.explore.capacity import CapacityView, capacity_view, explore_capacity
from mambackpt.explore.engine import (
    STORIES,
    EngineView,
    Story,
    engine_view,
    explore_engine,
    run_moments,
    run_view,
)
from mambackpt.explore.exports import ExportView, explore_export, export_view
from mambackpt.explore.films import save_film, story_film
from mambackpt.explore.lanes import (
    View,
    explore_placement,
    explore_sequence,
    explore_views,
    placement_view,
    sequence_view,
)
from mambackpt.explore.replays import ReplayView, explore_replay, replay_view
from mambackpt.explore.widgets import Code, Explorer, explore

__all__ = [
    "STORIES",
    "CapacityView",
    "Code",
    "EngineView",
    "Explorer",
    "ExportView",
    "ReplayView",
    "Story",
    "View",
    "branches_view",
    "capacity_view",
    "engine_view",
    "explore",
    "explore_branches",
    "explore_capacity",
    "explore_engine",
    "explore_export",
    "explore_placement",
    "explore_replay",
    "explore_sequence",
    "explore_views",
    "export_view",
    "placement_view",
    "replay_view",
    "run_moments",
    "run_view",
    "save_film",
    "sequence_view",
    "story_film",
]
