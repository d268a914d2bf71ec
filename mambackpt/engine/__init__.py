"""An executable model of a hybrid model's scheduler, block allocator, prefix cache and worker.

Its steps are those of vllm 0.33.0's own scheduler: `trace_history` gives them as plain values, and
``python -m mambackpt conformance --engine vllm`` compares them with an installed one.
"""

from mambackpt.engine.alone import PrefillKeys
from mambackpt.engine.chats import branching_chats
from mambackpt.engine.events import (
    Aborted,
    Allocated,
    Copied,
    Deferred,
    Event,
    Evicted,
    Finished,
    Freed,
    Hit,
    Keyed,
    Preempted,
    Scheduled,
    Unkeyed,
    Written,
)
from mambackpt.engine.groups import joint_hit, junction, replay_boundaries
from mambackpt.engine.lockstep import Counts, Violation
from mambackpt.engine.recurrence import Recurrence, State
from mambackpt.engine.report import (
    Report,
    check_lockstep,
    compare_variants,
    describe_history,
    shrink_history,
)
from mambackpt.engine.settings import Request, Settings
from mambackpt.engine.simulation import Run, Simulation, simulate
from mambackpt.engine.snapshots import Cell, PoolBlock, Snapshot, TableRow
from mambackpt.engine.splitter import Splitter, chunk_ends
from mambackpt.engine.trace import Step, trace_history
from mambackpt.engine.variants import VARIANTS, Query, Variant, find_variant, named_variant

__all__ = [
    "VARIANTS",
    "Aborted",
    "Allocated",
    "Cell",
    "Copied",
    "Counts",
    "Deferred",
    "Event",
    "Evicted",
    "Finished",
    "Freed",
    "Hit",
    "Keyed",
    "PoolBlock",
    "Preempted",
    "PrefillKeys",
    "Query",
    "Recurrence",
    "Report",
    "Request",
    "Run",
    "Scheduled",
    "Settings",
    "Simulation",
    "Snapshot",
    "Splitter",
    "State",
    "Step",
    "TableRow",
    "Unkeyed",
    "Variant",
    "Violation",
    "Written",
    "branching_chats",
    "check_lockstep",
    "chunk_ends",
    "compare_variants",
    "describe_history",
    "find_variant",
    "joint_hit",
    "junction",
    "named_variant",
    "replay_boundaries",
    "shrink_history",
    "simulate",
    "trace_history",
]
