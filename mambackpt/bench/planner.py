"""The planner timed beside the fastest loop that does the same."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mambackpt.bench.record import Benchmark, each, interleave, keep, record_environment, timings
from mambackpt.errors import CheckpointValueError
from mambackpt.planner import compute_mamba_prefill_checkpoints

LOOP = "plain loop"


def plan_with_a_loop(
    seq_lens: Sequence[int], query_lens: Sequence[int], H: int, M: int, A: int, drop: bool, U: int
) -> tuple[list[int], list[int]]:
    """Return the planner's answer by the fastest plain loop: rows validated, nothing called.

    >>> plan_with_a_loop([8000, 1500], [8000, 1500], 1536, 1536, 16, False, 1536)
    ([7680, 0], [4, -1])
    """
    if len(seq_lens) != len(query_lens):
        raise ValueError("row counts differ")
    dropped = U if drop else 0
    spare = 0 if drop else 1
    offsets, columns = [0] * len(seq_lens), [-1] * len(seq_lens)
    for row, (seq_len, query_len) in enumerate(zip(seq_lens, query_lens, strict=True)):
        start = seq_len - query_len
        if query_len < 0 or start < 0:
            raise ValueError("a query is outside its sequence")
        if query_len > H and not start % H:
            offset = (seq_len - spare) // U * U - dropped - start
            if offset >= H and not offset % A:
                column = (seq_len - 1) // M - 1
                if column * M >= start:
                    offsets[row] = offset
                    columns[row] = column
    return offsets, columns


def plan_arrays_with_a_loop(seq_lens: Any, query_lens: Any, *sizes: Any) -> tuple[Any, Any]:
    """Return the same for arrays: listed first, because a loop over an array is slower.

    >>> plan_arrays_with_a_loop(np.array([8000]), np.array([8000]), 1536, 1536, 16, False, 1536)
    (array([7680]), array([4]))
    """
    offsets, columns = plan_with_a_loop(seq_lens.tolist(), query_lens.tolist(), *sizes)
    return np.array(offsets, np.int64), np.array(columns, np.int64)


@dataclass(frozen=True, slots=True)
class PlannerCase:
    """Rows to plan: all of them prefills, or nine decode rows in ten; lists or int64 arrays."""

    rows: str
    container: str
    seq_lens: list[int]
    query_lens: list[int]


PLANNER_SIZES = (1, 8, 32, 100, 160, 256, 1024, 4096, 16384)
PLANNER_GEOMETRY = (128, 1536, 16, False, 128)  # H, M, A, drop, U, as the planner takes them


def planner_cases(sizes: Sequence[int] = PLANNER_SIZES, seed: int = 0) -> Iterator[PlannerCase]:
    """Yield the planner's benchmark cases: random lengths, starts on the hash grid.

    >>> [case.container for case in planner_cases(sizes=[8])]
    ['list', 'array', 'list', 'array']
    """
    random = np.random.default_rng(seed)
    H = PLANNER_GEOMETRY[0]
    for rows, decoding in (("prefill", 0.0), ("90 % decode", 0.9)):
        for size in sizes:
            start = random.integers(0, 64, size) * H
            query = random.integers(1, 16_384, size)
            decode = random.random(size) < decoding
            seq = start + np.where(decode, random.integers(1, H, size), query)
            query = np.where(decode, 1, query)
            for container in ("list", "array"):
                yield PlannerCase(rows, container, seq.tolist(), query.tolist())


def bench_planner(
    sizes: Sequence[int] = PLANNER_SIZES,
    *,
    runs: int = 15,
    planner: Callable[..., Any] = compute_mamba_prefill_checkpoints,
    report: Callable[[Benchmark], object] | None = None,
) -> Benchmark:
    """Time the planner beside a plain loop that takes and gives the same, lists or arrays.

    >>> [t.method for t in bench_planner([1], runs=2).timings[:2]]
    ['plain loop', 'planner']

    Raises CheckpointValueError where the two disagree.
    """
    run = Benchmark("planner", LOOP, record_environment("cpu", threads=[1]), [])
    for case in planner_cases(sizes):
        size = len(case.seq_lens)
        listed = case.seq_lens, case.query_lens, *PLANNER_GEOMETRY
        rows: tuple[Any, ...] = listed
        loop: Callable[..., Any] = plan_with_a_loop
        if case.container == "array":
            loop = plan_arrays_with_a_loop
            rows = np.array(case.seq_lens), np.array(case.query_lens), *PLANNER_GEOMETRY
        offsets, columns = planner(*rows)
        if (list(offsets), list(columns)) != plan_with_a_loop(*listed):
            raise CheckpointValueError(
                f"the planner and the loop disagree on {size} {case.rows} rows; expected equal "
                "answers, and times nothing else. Try the planner's tests."
            )
        repeats = max(1, 4096 // size)
        calls = {
            LOOP: each(loop, [rows] * repeats),
            "planner": each(planner, [rows] * repeats),
        }
        samples = interleave(calls, runs, repeats)
        named = case.rows, case.container, size, "one call"
        keep(timings(*named, samples, 0), run, report)
    return run
