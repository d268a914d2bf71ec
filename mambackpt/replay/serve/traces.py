"""Replays of traces by an engine's own cache: one driver for all engines.

An engine's ``walk_trace(trace, plainly=..., **settings)`` yields, per request, tokens of attention
and reuse, states newly written, states gone. Ids stand for ``trace.grain`` tokens each; where that
is 1, the numbers are those of `serve_tokens` on the token lists.
"""

from collections.abc import Iterator
from importlib import import_module

import numpy as np

from mambackpt.errors import checked_choice
from mambackpt.replay.result import Replay
from mambackpt.replay.serve import ENGINES, checked_settings
from mambackpt.replay.trace import Int64Array, Trace


def replay_engine(
    trace: Trace, engine: str, *, plainly: bool = False, **settings: object
) -> Replay:
    """Replay a trace as an engine serves it and return what it reused, wrote and evicted.

    >>> from mambackpt.replay import trace_from_tokens
    >>> trace = trace_from_tokens([range(100), [*range(90), 7], range(110)], grain=1)
    >>> replay_engine(trace, "llama.cpp", batch=64, ubatch=64).reused.tolist()
    [0, 36, 87]

    One request at a time; the settings are `serve_tokens`'. ``block`` of the result is the trace's
    grain, ``rule`` the engine with what was set; there is no pool. ``plainly`` uses the engine's
    readable loop. Raises CheckpointValueError for engines, settings and values that do not exist.
    """
    checked_choice("engine", engine, ENGINES)
    checked_settings(engine, settings)
    walk = import_module(f"{ENGINES[engine]}_traces").walk_trace
    rows = _array(walk(trace, plainly=plainly, **settings), len(trace))
    told = ", ".join(f"{name}={value!r}" for name, value in settings.items())
    return Replay(
        trace.name,
        f"{engine}({told})" if told else engine,
        trace.grain,
        trace.grain,
        0,
        None,
        None,
        engine,
        0,
        0,
        trace.prompt,
        trace.ceiling,
        *rows.T,
    )


def _array(rows: Iterator[tuple[int, int, int, int]], requests: int) -> Int64Array:
    """The rows of a walk as an array of requests by four columns."""
    numbers = (number for row in rows for number in row)
    return np.fromiter(numbers, np.int64, 4 * requests).reshape(requests, 4)
