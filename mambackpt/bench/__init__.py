"""How fast do bytes move?

The only door to timings: nothing is timed before the same process has seen it be right.
"""

from mambackpt.bench.addresses import (
    Touch,
    first_touch,
    plan_on_paper,
    watch_program,
    window_readers,
)
from mambackpt.bench.compiled import (
    LAYERS,
    WARPS,
    Compilation,
    CompiledKernel,
    LayerShape,
    compile_ahead,
    static_requests,
    static_table,
)
from mambackpt.bench.export import (
    BUFFERS,
    COPY,
    OURS,
    Buffers,
    bench_export,
    export_methods,
    make_export_set,
    refuse_difference,
)
from mambackpt.bench.planner import bench_planner
from mambackpt.bench.record import Benchmark, Environment, Timing, record_environment
from mambackpt.bench.replays import ReplayTiming, time_replays

__all__ = [
    "BUFFERS",
    "COPY",
    "LAYERS",
    "OURS",
    "WARPS",
    "Benchmark",
    "Buffers",
    "Compilation",
    "CompiledKernel",
    "Environment",
    "LayerShape",
    "ReplayTiming",
    "Timing",
    "Touch",
    "bench_export",
    "bench_planner",
    "compile_ahead",
    "export_methods",
    "first_touch",
    "make_export_set",
    "plan_on_paper",
    "record_environment",
    "refuse_difference",
    "static_requests",
    "static_table",
    "time_replays",
    "watch_program",
    "window_readers",
]
