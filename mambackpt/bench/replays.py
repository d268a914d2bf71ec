"""Fast replays timed beside plain ones that give the same."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from statistics import median
from time import process_time
from typing import Unpack

import numpy as np

from mambackpt.errors import CheckpointValueError
from mambackpt.replay import (
    Case,
    Options,
    Trace,
    expand_rows,
    replay_engine,
    replay_fast,
    replay_plainly,
)


@dataclass(frozen=True, slots=True)
class ReplayTiming:
    """Median CPU seconds of a plain and a fast replay that gave the same, interleaved."""

    trace: str
    rule: str
    block: int
    pool_bytes: int | None
    requests: int
    plain_s: float
    fast_s: float

    @property
    def ratio(self) -> float:
        """How many times as fast as the plain replay."""
        return self.plain_s / self.fast_s


def time_replays(
    trace: Trace,
    rules: Iterable[str],
    blocks: Iterable[int],
    pools: Iterable[int | None] = (None,),
    *,
    runs: int = 5,
    **options: Unpack[Options],
) -> Iterator[ReplayTiming]:
    """Time fast replays beside plain ones, in one process, loading and one warm-up left out.

    The plain replay is given its rows expanded. Raises CheckpointValueError where the two disagree:
    nothing is timed that is not equal.
    """
    for rule, block, pool in product(rules, blocks, pools):
        here: Options = {**options, "pool_bytes": pool}
        case = Case.of(trace, rule, block=block, **here)
        rows = expand_rows(case.trace)
        plain, fast = replay_plainly(case, rows), replay_fast(case)
        if not all(np.array_equal(a, b) for a, b in zip(plain, fast, strict=True)):
            raise CheckpointValueError(
                f"plain and fast replay of {rule!r} disagree at block {block}, pool {pool}; "
                "expected equal records, and times nothing else. Try the replay's tests."
            )
        seconds: dict[str, list[float]] = {"plain": [], "fast": []}
        for name, spent in [*seconds.items()] * runs:
            start = process_time()
            replay_plainly(case, rows) if name == "plain" else replay_fast(case)
            spent.append(process_time() - start)
        plain_s, fast_s = map(median, seconds.values())
        yield ReplayTiming(trace.name, rule, block, pool, len(trace), plain_s, fast_s)


def time_engines(
    trace: Trace, engines: Iterable[str], *, runs: int = 5, **settings: object
) -> Iterator[ReplayTiming]:
    """Time each engine's fast replay of a trace beside its plain one, in one process.

    The block told is the trace's grain. Raises CheckpointValueError where the two disagree: nothing
    is timed that is not equal.
    """
    for engine in engines:
        plain, fast = (
            replay_engine(trace, engine, plainly=plainly, **settings) for plainly in (True, False)
        )
        columns = ("attention", "reused", "written", "evicted")
        if not all(np.array_equal(getattr(plain, c), getattr(fast, c)) for c in columns):
            raise CheckpointValueError(
                f"plain and fast replay of {plain.rule} disagree on {trace.name}; expected equal "
                "records, and times nothing else. Try the engine's tests."
            )
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for plainly, spent in [*seconds.items()] * runs:
            start = process_time()
            replay_engine(trace, engine, plainly=plainly, **settings)
            spent.append(process_time() - start)
        plain_s, fast_s = map(median, seconds.values())
        yield ReplayTiming(trace.name, plain.rule, trace.grain, None, len(trace), plain_s, fast_s)
