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
from mambackpt.replay.live import interleave
from mambackpt.replay.loads import generate_lengths, generate_shared
from mambackpt.replay.missed import (
    BANDS,
    CAUSES,
    VETOES,
    Missed,
    explain_misses,
    explain_misses_plainly,
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
from mambackpt.replay.seconds import PrefillRate
from mambackpt.replay.serve import ENGINES, Served, TokenRequest, serve_tokens
from mambackpt.replay.serve.llama_cpp import LlamaCppSettings, serve_llama_cpp
from mambackpt.replay.serve.stale import (
    StaleReport,
    StaleRestore,
    check_states,
    describe_prompts,
    random_prompts,
    watch_states,
)
from mambackpt.replay.serve.traces import replay_engine
from mambackpt.replay.source import LOADS, is_generated, open_trace
from mambackpt.replay.sweep import Sweep, sweep
from mambackpt.replay.timeline import timeline_json
from mambackpt.replay.trace import Trace, TraceStatistics, describe_trace, trace_from_tokens

__all__ = [
    "BANDS",
    "CAUSES",
    "ENGINES",
    "EVICTIONS",
    "GENERATORS",
    "LAYOUTS",
    "LOADS",
    "PUBLIC_STATISTICS",
    "RULES",
    "VETOES",
    "Case",
    "Lengths",
    "LlamaCppSettings",
    "Match",
    "Missed",
    "Options",
    "PrefillRate",
    "Replay",
    "Rule",
    "Served",
    "Sizes",
    "Span",
    "StaleReport",
    "StaleRestore",
    "Sweep",
    "TokenRequest",
    "Trace",
    "TraceStatistics",
    "check_states",
    "describe_prompts",
    "describe_trace",
    "example_trace",
    "expand_rows",
    "explain_misses",
    "explain_misses_plainly",
    "generate_agents",
    "generate_chat",
    "generate_documents",
    "generate_lengths",
    "generate_shared",
    "get_rule",
    "interleave",
    "is_generated",
    "load_trace",
    "open_trace",
    "optimal",
    "placement",
    "random_prompts",
    "replay",
    "replay_engine",
    "replay_fast",
    "replay_plainly",
    "serve_llama_cpp",
    "serve_tokens",
    "sweep",
    "timeline_json",
    "trace_from_tokens",
    "watch_states",
]
