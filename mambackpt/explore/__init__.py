"""What happens if I move this? Explorers for a notebook."""

from mambackpt.explore.lanes import (
    View,
    explore_placement,
    explore_sequence,
    explore_views,
    placement_view,
    sequence_view,
)
from mambackpt.explore.replays import ReplayView, explore_replay, replay_view
from mambackpt.explore.widgets import Explorer, explore

__all__ = [
    "Explorer",
    "ReplayView",
    "View",
    "explore",
    "explore_placement",
    "explore_replay",
    "explore_sequence",
    "explore_views",
    "placement_view",
    "replay_view",
    "sequence_view",
]
