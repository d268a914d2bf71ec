"""A replay as a timeline for Perfetto (ui.perfetto.dev) and chrome://tracing.

One request after the other along an axis on which a token of prompt is one microsecond: no time is
claimed. A conversation is a track; its requests are slices of what was reused and what was
recomputed; kept states are instants at their tokens; what is held is a counter. Format: the Trace
Event Format of Chrome, as a JSON object.
"""

import json
from collections.abc import Iterator
from typing import Any, TypeAlias, Unpack

from mambackpt.replay.case import Case, Options, bound_notes
from mambackpt.replay.plain import Kept, expand_rows, replay_plainly
from mambackpt.replay.rules import Place, Rule
from mambackpt.replay.trace import Trace

Event: TypeAlias = dict[str, Any]
AXIS = "1 microsecond is 1 token of prompt, one request after the other: no time is claimed"
_PROCESS = 1


def timeline_json(
    trace: Trace, rule: str | Rule | Place, *, block: int, **options: Unpack[Options]
) -> str:
    """Return one replay as JSON that Perfetto opens; one event a line.

    >>> from mambackpt.replay import trace_from_tokens
    >>> trace = trace_from_tokens([[7] * 40, [7] * 40], grain=8)
    >>> events = json.loads(timeline_json(trace, "last", block=16))["traceEvents"]
    >>> [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    [('recomputed', 0, 40), ('reused', 40, 32), ('recomputed', 72, 8)]

    The arguments are `replay`'s, and so is what it raises. The plain replay does the work, which
    takes its time on a long trace.
    """
    case = Case.of(trace, rule, block=block, **options)
    kept: list[Kept] = []
    _, reused, _, _ = replay_plainly(case, expand_rows(case.trace), kept.append)
    about = {
        "axis": AXIS,
        "trace": trace.name,
        "rule": case.rule.name,
        "block": block,
        "requests": len(trace),
        "eviction": case.eviction if case.limit is not None else "none: unlimited memory",
        "pool_bytes": case.limit,
        "state_pool_bytes": case.state_limit,
        "notes": "; ".join((*trace.notes, *bound_notes(trace, block))),
    }
    told = {name: value for name, value in about.items() if value not in (None, "")}
    lines = ",\n".join(map(json.dumps, _events(case, list(reused), kept)))
    head = f'"displayTimeUnit": "ms", "otherData": {json.dumps(told)}'
    return f'{{{head}, "traceEvents": [\n{lines}\n]}}\n'


def _events(case: Case, reused: list[int], kept: list[Kept]) -> Iterator[Event]:
    """The names of the tracks, then every request's events in order."""
    trace = case.trace
    tracks = trace.conversation.tolist()
    title = f"{case.rule.name} at block {case.sizes.block:,}: {AXIS}"
    yield _name("process_name", -1, title)
    for track in dict.fromkeys(tracks):
        told = f"conversation {track:,}" if track >= 0 else "requests of no known conversation"
        yield _name("thread_name", track, told)
    prompts, outputs = trace.prompt.tolist(), trace.output.tolist()
    arrivals = trace.arrival.tolist()
    start = 0
    for i, (track, hit, left) in enumerate(zip(tracks, reused, kept, strict=True)):
        about = {"request": i, "prompt": prompts[i], "output": outputs[i], "arrival_s": arrivals[i]}
        about |= {"states_written": left.new, "evicted": left.gone}
        if hit:
            yield _slice("reused", track, start, int(hit), about)
        yield _slice("recomputed", track, start + int(hit), prompts[i] - int(hit), about)
        for position in reversed(left.positions):
            yield _event("i", "state", track, start + position) | {
                "s": "t",
                "args": {"token": position},
            }
        start += prompts[i]
        yield from _counters(case, left, start)


def _counters(case: Case, left: Kept, at: int) -> Iterator[Event]:
    """What is held after a request: bytes where a model says them, else how many."""
    attention, states = left.blocks * case.block_bytes, left.states * case.state_bytes
    if case.block_bytes:
        held = {"attention": attention, "states": states}
        yield _event("C", "bytes held", -1, at) | {"args": held}
    yield _event("C", "states held", -1, at) | {"args": {"states": left.states}}


def _event(phase: str, name: str, track: int, at: int) -> Event:
    # Perfetto keeps thread 0 for itself; conversations count from 0, -1 is none.
    return {"ph": phase, "name": name, "pid": _PROCESS, "tid": track + 2, "ts": at}


def _slice(name: str, track: int, at: int, tokens: int, about: dict[str, Any]) -> Event:
    return _event("X", name, track, at) | {"dur": tokens, "cat": "prefill", "args": about}


def _name(kind: str, track: int, text: str) -> Event:
    return _event("M", kind, track, 0) | {"args": {"name": text}}
