"""An executable model of a hybrid model's scheduler, block allocator, prefix cache and worker."""

from mambackpt.engine.settings import Request, Settings
from mambackpt.engine.simulation import Frame, Run, Simulation, simulate
from mambackpt.engine.splitter import Splitter, chunk_ends
from mambackpt.engine.variants import VARIANTS, Query, Rules, find_rules, variant

__all__ = [
    "VARIANTS",
    "Frame",
    "Query",
    "Request",
    "Rules",
    "Run",
    "Settings",
    "Simulation",
    "Splitter",
    "chunk_ends",
    "find_rules",
    "simulate",
    "variant",
]
