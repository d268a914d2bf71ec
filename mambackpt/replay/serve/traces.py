"""Replays of traces by an engine's own cache: one driver for all engines.

An engine's ``walk_trace(trace, plainly=..., **settings)`` yields, per request, tokens of attention
and reuse, states newly written, states gone. Ids stand for ``trace.grain`` tokens each; where that
is 1, the numbers are those of `serve_tokens` on the token lists. An engine without such a file is
served the tokens themselves.
"""

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from itertools import count, islice
from typing import TypeAlias

import numpy as np

from mambackpt.errors import checked_choice
from mambackpt.replay.result import Replay
from mambackpt.replay.serve import ENGINES, checked_settings, serve_tokens
from mambackpt.replay.serve.requests import TokenRequest
from mambackpt.replay.trace import Int64Array, Trace

Row: TypeAlias = tuple[int, int, int, int]  # tokens of attention and reuse, states new and gone


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
    module = f"{ENGINES[engine]}_traces"
    if find_spec(module) is None:
        walk = walk_tokens(trace, engine, **settings)
    else:
        walk = import_module(module).walk_trace(trace, plainly=plainly, **settings)
    rows = _array(walk, len(trace))
    attention, reused, new, gone = rows.T
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
        *(trace.prompt, trace.ceiling, attention, reused, new, gone),
        {},
        trace.notes,
    )


def walk_tokens(trace: Trace, engine: str, **settings: object) -> Iterator[Row]:
    """Serve a trace's tokens; what is gone is not counted. Slow: every token is a number.

    >>> from mambackpt.replay import trace_from_tokens
    >>> trace = trace_from_tokens([range(100), range(120)], grain=4)
    >>> list(walk_tokens(trace, "llama.cpp", batch=64, ubatch=64))
    [(0, 0, 2, 0), (100, 100, 2, 0)]
    """
    for served in serve_tokens(token_requests(trace), engine, **settings):
        yield served.attention, served.reused, len(served.created), 0


def token_requests(trace: Trace) -> Iterator[TokenRequest]:
    """A trace's requests, each block as ``grain`` numbers of its own.

    A prompt's last, partly filled block and its outputs are numbers that nobody else has.
    """
    g, unique = trace.grain, count(-1, -1)
    columns = (trace.prompt, trace.output, trace.message)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for request, (length, output, message) in enumerate(rows):
        tokens = [token for b in trace.blocks(request) for token in range(b * g, b * g + g)]
        tokens += islice(unique, length - len(tokens))
        users = (message,) if message else ()
        yield TokenRequest(tokens, tuple(islice(unique, output)), users)


def _array(rows: Iterator[Row], requests: int) -> Int64Array:
    """The rows of a walk as an array of requests by four columns."""
    numbers = (number for row in rows for number in row)
    return np.fromiter(numbers, np.int64, 4 * requests).reshape(requests, 4)
