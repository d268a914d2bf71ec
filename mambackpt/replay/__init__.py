"""What is a checkpoint worth? Request traces, placement rules, and their replay."""

from mambackpt.replay.case import EVICTIONS, Case, Options
from mambackpt.replay.files import LAYOUTS, load_trace
from mambackpt.replay.generators import (
    GENERATORS,
    PUBLIC_STATISTICS,
    example_trace,
    generate_agents,
    generate_chat,
    generate_documents,
)
from mambackpt.replay.plain import expand_rows, replay_plainly
from mambackpt.replay.result import Replay
from mambackpt.replay.rules import (
    RULES,
    Lengths,
    Match,
    Rule,
    Sizes,
    Span,
    get_rule,
    optimal,
    placement,
)
from mambackpt.replay.run import replay, replay_fast
from mambackpt.replay.sweep import Sweep, sweep
from mambackpt.replay.trace import Trace, TraceStatistics, describe_trace, trace_from_tokens

__all__ = [
    "EVICTIONS",
    "GENERATORS",
    "LAYOUTS",
    "PUBLIC_STATISTICS",
    "RULES",
    "Case",
    "Lengths",
    "Match",
    "Options",
    "Replay",
    "Rule",
    "Sizes",
    "Span",
    "Sweep",
    "Trace",
    "TraceStatistics",
    "describe_trace",
    "example_trace",
    "expand_rows",
    "generate_agents",
    "generate_chat",
    "generate_documents",
    "get_rule",
    "load_trace",
    "optimal",
    "placement",
    "replay",
    "replay_fast",
    "replay_plainly",
    "sweep",
    "trace_from_tokens",
]
