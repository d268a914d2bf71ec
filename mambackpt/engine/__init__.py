"""An executable model of a hybrid model's scheduler, block allocator, prefix cache and worker."""

from mambackpt.engine.chats import branching_chats
from mambackpt.engine.groups import joint_hit, junction, replay_boundaries
from mambackpt.engine.lockstep import Counts, Violation
from mambackpt.engine.report import (
    Report,
    check_lockstep,
    compare_rules,
    describe_history,
    shrink_history,
)
from mambackpt.engine.settings import Request, Settings
from mambackpt.engine.simulation import Cell, Frame, Run, Simulation, TableRow, simulate
from mambackpt.engine.splitter import Splitter, chunk_ends
from mambackpt.engine.variants import VARIANTS, Query, Rules, find_rules, variant

__all__ = [
    "VARIANTS",
    "Cell",
    "Counts",
    "Frame",
    "Query",
    "Report",
    "Request",
    "Rules",
    "Run",
    "Settings",
    "Simulation",
    "Splitter",
    "TableRow",
    "Violation",
    "branching_chats",
    "check_lockstep",
    "chunk_ends",
    "compare_rules",
    "describe_history",
    "find_rules",
    "joint_hit",
    "junction",
    "replay_boundaries",
    "shrink_history",
    "simulate",
    "variant",
]
