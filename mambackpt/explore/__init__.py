"""What happens if I move this? Explorers for a notebook."""

from mambackpt.explore.lanes import (
    View,
    draw_view,
    explore_placement,
    explore_sequence,
    explore_views,
    placement_view,
    sequence_view,
    show_view,
)
from mambackpt.explore.replays import (
    ReplayView,
    draw_replay,
    explore_replay,
    replay_view,
    show_replay,
)
from mambackpt.explore.widgets import Explorer, explore

__all__ = [
    "Explorer",
    "ReplayView",
    "View",
    "draw_replay",
    "draw_view",
    "explore",
    "explore_placement",
    "explore_replay",
    "explore_sequence",
    "explore_views",
    "placement_view",
    "replay_view",
    "sequence_view",
    "show_replay",
    "show_view",
]
