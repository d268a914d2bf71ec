"""Sweeps: a trace under every combination of rules, blocks and pools."""

from collections.abc import Iterable
from concurrent.futures import BrokenExecutor, Executor, Future, as_completed
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any, Unpack

from mambackpt.errors import CheckpointError
from mambackpt.replay.case import Options, rule_of
from mambackpt.replay.result import Replay
from mambackpt.replay.rules import Place, Rule
from mambackpt.replay.run import replay
from mambackpt.replay.trace import Trace


@dataclass(frozen=True)
class Sweep:
    """The replays of a sweep, in the order rules x blocks x pools, and what is missing of them.

    ``missing`` holds (rule, block, pool) of what an interrupted sweep did not get to.
    """

    replays: list[Replay]
    missing: list[tuple[str, int, int | None]]

    def table(self) -> list[dict[str, Any]]:
        """One `Replay.summary` per row."""
        return [replay.summary() for replay in self.replays]


def sweep(
    trace: Trace,
    rules: Iterable[str | Rule | Place],
    blocks: Iterable[int],
    pools: Iterable[int | None] = (None,),
    executor: Executor | None = None,
    *,
    progress: bool = True,
    **options: Unpack[Options],
) -> Sweep:
    """Replay a trace under every combination of rules, blocks and pools.

    >>> from mambackpt.replay import trace_from_tokens
    >>> trace = trace_from_tokens([[7] * 40, [7] * 40], grain=8)
    >>> [r.hit_rate for r in sweep(trace, ["none", "last"], [8, 16]).replays]
    [0.0, 0.0, 0.4, 0.4]

    ``blocks`` in tokens, ``pools`` in bytes (None: unlimited), ``options`` are `Options`. Any
    ``concurrent.futures.Executor`` does the work, Dask's ``client.get_executor()`` included; what
    its workers lose is replayed here. Ctrl-C ends the sweep and keeps what is done. A progress bar
    shows after two seconds, where tqdm is installed.
    """
    points = list(product([rule_of(trace, rule) for rule in rules], blocks, pools))
    done: dict[int, Replay] = {}
    futures: dict[Future[Replay], int] = {}
    bar = _progress(len(points), progress)
    try:
        if executor is not None:
            try:
                for number, point in enumerate(points):
                    futures[executor.submit(_replay_point, trace, point, options)] = number
            except BrokenExecutor:
                pass  # what could not be submitted is replayed below
            for future in as_completed(futures):
                error = None if future.cancelled() else future.exception()
                if isinstance(error, CheckpointError):
                    raise error
                if error is None and not future.cancelled():
                    done[futures[future]] = future.result()
                    bar.update()
        for number, point in enumerate(points):
            if number not in done:
                done[number] = _replay_point(trace, point, options)
                bar.update()
    except KeyboardInterrupt:
        for future, number in futures.items():
            if future.done() and not future.cancelled() and future.exception() is None:
                done.setdefault(number, future.result())
    finally:
        for future in futures:
            future.cancel()
        bar.close()
    missing = [(p[0].name, p[1], p[2]) for n, p in enumerate(points) if n not in done]
    return Sweep([done[number] for number in sorted(done)], missing)


def _progress(total: int, wanted: bool) -> Any:
    """A progress bar that appears after two seconds, where tqdm is installed."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return SimpleNamespace(update=lambda: None, close=lambda: None)
    return tqdm(total=total, unit="replay", leave=False, delay=2, disable=not wanted)


def _replay_point(trace: Trace, point: tuple[Rule, int, int | None], options: Options) -> Replay:
    rule, block, pool = point
    here: Options = {**options, "pool_bytes": pool}
    return replay(trace, rule, block=block, **here)
