"""The only door to timings: nothing is timed before the same process has seen it be right.

A timing is a median with its 20-80 % band, over interleaved runs, beside a reference timed in the
same run: one contiguous copy of the same bytes for exports, a plain loop for the planner.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import quantiles
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from mambackpt.aot import LAYERS, CompiledKernel, LayerShape, compile_ahead, static_requests
from mambackpt.errors import CheckpointValueError
from mambackpt.planner import compute_mamba_prefill_checkpoints

if TYPE_CHECKING:
    import torch

    from mambackpt.kernels.torch_copies import CopyInputs, CopyPlan
    from mambackpt.metadata import MambaPrefillCheckpointMetadata

COPY = "contiguous copy_"
OURS = "export"
PLAIN_KERNEL = "plain-shaped kernel"
LOOP = "plain loop"
_QUERY_LEN, _CUT = 16, 12  # tokens: a short query keeps the inputs small beside the states
_MIB = 2**20
_CPU_CACHE = 64 * _MIB  # of one core's share, with room to spare


@dataclass(frozen=True, slots=True)
class Environment:
    """Where and when timings were taken: enough to read them, nothing that names a machine.

    >>> record_environment("cpu", threads=[1]).threads
    [1]

    ``peak_gb_per_s`` is the memory's nominal bandwidth, where the driver tells it.
    """

    device: str
    cpu: str
    cores: int
    threads: list[int]
    driver: str | None
    peak_gb_per_s: float | None
    versions: dict[str, str]
    date: str


@dataclass(frozen=True, slots=True)
class Timing:
    """How long one call of one method takes on one case.

    ``ratio`` is the reference's median over this one: for exports the share of a contiguous copy's
    speed, for the planner how many times as fast as the loop. Times are in microseconds; ``bytes``
    counts what is read plus what is written (0 where speed is not a matter of bytes); ``size``
    counts checkpoints or rows; ``regime`` says what the time includes.
    """

    case: str
    variant: str
    size: int
    regime: str
    method: str
    median_us: float
    low_us: float
    high_us: float
    runs: int
    bytes: int
    ratio: float

    @property
    def gb_per_s(self) -> float:
        """Bytes read and written per second, in units of 10^9."""
        return self.bytes / self.median_us / 1e3


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One run of timings with its environment; the same format for every kind.

    >>> made = Benchmark("planner", LOOP, record_environment("cpu", threads=[1]), [])
    >>> Benchmark.from_json(made.to_json()) == made
    True

    ``kind`` is "export", "planner" or "static"; ``static`` holds rows of `static_table`.
    """

    kind: str
    reference: str
    environment: Environment
    timings: list[Timing]
    static: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> str:
        """Return the run as JSON text."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Benchmark":
        """Return the run that `to_json` wrote; CheckpointValueError for any other text."""
        try:
            given = json.loads(text)
            given["environment"] = Environment(**given["environment"])
            given["timings"] = [Timing(**timing) for timing in given["timings"]]
            return cls(**given)
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointValueError(
                f"not a benchmark ({error}); expected JSON from `python -m mambackpt bench`. "
                "Try running it again with --out."
            ) from error


@dataclass(frozen=True, slots=True)
class Variant:
    """What is exported: dtypes of the states, layout of the window's pool, windows or none."""

    name: str
    source_dtype: str = "float32"
    state_dtype: str = "float32"
    token_first: bool = True
    spare_columns: int = 0
    windows: bool = True

    @property
    def converts(self) -> bool:
        """Whether the states change their dtype on the way."""
        return self.source_dtype != self.state_dtype


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("token-first"),
        Variant("dim-first", token_first=False),
        Variant("bf16, spare columns", "bfloat16", "bfloat16", False, 3),
        Variant("fp32 to bf16", state_dtype="bfloat16"),
        Variant("states only", windows=False),
        Variant("states only, fp32 to bf16", state_dtype="bfloat16", windows=False),
    )
}


@dataclass(slots=True)
class ExportSet:
    """Buffers of one export, its copy plan, what the pools must hold, and a copy to compare with.

    Several sets, used in turn, keep a cache from holding what the next call needs.
    """

    checkpoint: "MambaPrefillCheckpointMetadata"
    inputs: "CopyInputs"
    plan: "CopyPlan"
    truth: "list[torch.Tensor]"
    flat: "list[tuple[torch.Tensor, torch.Tensor]]"

    def pools(self) -> "list[torch.Tensor]":
        """The two pools, as integers, in which a NaN equals itself."""
        import torch

        whole = {2: torch.int16, 4: torch.int32}
        pools = (self.inputs["conv_state"], self.inputs.get("recurrent_state"))
        return [p.view(whole[p.element_size()]) for p in pools if p is not None]

    def poison(self) -> None:
        """Fill both pools with NaN, so that every element shows whether it was written."""
        for pool in (self.inputs["conv_state"], self.inputs.get("recurrent_state")):
            if pool is not None:
                pool.fill_(float("nan"))


Method: TypeAlias = Callable[[ExportSet], object]


def export_methods(device: str) -> dict[str, Method]:
    """Return the ways of exporting that run on this device, ours first, the ceiling not included.

    >>> list(export_methods("cpu"))[:2]
    ['export', 'index_copy_']

    The torch forms get their index tensors ready-made. A kernel in the interpreter is never timed.
    """
    import torch

    from mambackpt.exporter import MambaPrefillCheckpointExporter
    from mambackpt.kernels.torch_copies import BASELINES, has_compiler, store_compiled

    def ours(one: ExportSet) -> None:
        inputs: dict[str, Any] = dict(one.inputs)
        exporter = MambaPrefillCheckpointExporter(inputs.pop("state_len"))
        del inputs["offsets"], inputs["state_indices"]
        exporter.export(one.checkpoint, **inputs)

    def baseline(form: Any) -> Method:
        return lambda one: form(plan=one.plan, **one.inputs)

    methods: dict[str, Method] = {OURS: ours}
    for name, form in BASELINES.items():
        if form is not store_compiled or has_compiler(torch.device(device)):
            methods[name] = baseline(form)
    if torch.device(device).type == "cuda":
        from mambackpt.kernels.flat_store import flat_store_checkpoints

        methods[PLAIN_KERNEL] = lambda one: flat_store_checkpoints(**one.inputs)
    return methods


def make_export_set(
    layer: LayerShape, variant: Variant, checkpoints: int, *, device: str, seed: int = 0
) -> ExportSet:
    """Return random buffers for one export of this many checkpoints of this layer.

    >>> one = make_export_set(LayerShape("tiny", 8, (4, 4)), VARIANTS["dim-first"], 2, device="cpu")
    >>> one.inputs["conv_state"].shape, one.inputs["recurrent_state"].shape
    (torch.Size([5, 8, 3]), torch.Size([5, 4, 4]))
    """
    import torch

    from mambackpt.kernels.torch_copies import plan_copies, store_loop
    from mambackpt.metadata import MambaPrefillCheckpointMetadata

    generator = torch.Generator(device).manual_seed(seed)
    source_dtype, state_dtype = (
        getattr(torch, name) for name in (variant.source_dtype, variant.state_dtype)
    )
    R, columns, blocks = checkpoints, layer.columns + variant.spare_columns, checkpoints + 3

    def noise(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    def pool(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, float("nan"), device=device, dtype=dtype)

    if variant.token_first:
        conv_state = pool(blocks, columns, layer.width, dtype=torch.bfloat16).transpose(1, 2)
    else:
        conv_state = pool(blocks, layer.width, columns, dtype=torch.bfloat16)
    order = torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(seed))[:R] + 1
    inputs: CopyInputs = {
        "offsets": torch.full((R,), _CUT, dtype=torch.int32, device=device),
        "state_indices": order.to(device, torch.int32),
        "raw_qkv": noise(R * _QUERY_LEN, layer.width, dtype=torch.bfloat16),
        "conv_state": conv_state,
        "cu_seqlens": torch.arange(R + 1, dtype=torch.int32, device=device) * _QUERY_LEN,
        "state_len": layer.state_len if variant.windows else 0,
        "recurrent_checkpoint": noise(R, *layer.row, dtype=source_dtype),
        "recurrent_state": pool(blocks, *layer.row, dtype=state_dtype),
    }
    rows = torch.arange(R, device=device)
    made = ExportSet(
        checkpoint=MambaPrefillCheckpointMetadata(
            inputs["offsets"], inputs["state_indices"], [_CUT] * R, [_QUERY_LEN] * R, rows, rows
        ),
        inputs=inputs,
        plan=plan_copies(**inputs),
        truth=[],
        flat=[],
    )
    store_loop(**inputs)
    made.truth = [stored.clone() for stored in made.pools()]
    made.poison()
    made.flat = _flat_copies(inputs, layer, variant)
    return made


def _flat_copies(
    inputs: "CopyInputs", layer: LayerShape, variant: Variant
) -> "list[tuple[torch.Tensor, torch.Tensor]]":
    """Contiguous targets and sources of as many bytes as the export moves.

    On the CPU they lie in the export's own buffers: the pages that a buffer happens to get make a
    difference of 20 %. A GPU copies all bytes at once between buffers of its own, because a second
    launch would count; only states that change their dtype stand apart there.
    """
    import torch

    R = len(inputs["offsets"])
    sizes = R * layer.row_elements, R * layer.width * inputs["state_len"]
    buffers = (
        (inputs["recurrent_state"], inputs["recurrent_checkpoint"]),
        (inputs["conv_state"], inputs["raw_qkv"]),
    )
    flat = []
    for size, pair in zip(sizes, buffers, strict=True):
        target, source = (
            torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage())[:size]
            for t in pair
            if t is not None
        )
        flat.append((target, source))
    if flat[0][0].device.type == "cuda":
        flat = [(torch.empty_like(t), torch.zeros_like(s)) for t, s in flat]
        if not variant.converts:
            joined = [torch.cat([pair[n].view(torch.uint8) for pair in flat]) for n in (0, 1)]
            flat = [(joined[0], joined[1])]
    return [pair for pair in flat if len(pair[0])]


def refuse_difference(method: str, sets: Sequence[ExportSet], run: Callable[[], object]) -> None:
    """Raise CheckpointValueError unless ``run`` stores in every set what the loop stores."""
    import torch

    for one in sets:
        one.poison()
    run()
    for one in sets:
        for stored, truth in zip(one.pools(), one.truth, strict=True):
            if not torch.equal(stored, truth):
                raise CheckpointValueError(
                    f"{method} stores {int((stored != truth).sum())} elements that the plain loop "
                    "does not store; expected equal pools, and times nothing else. Try the tests "
                    "of this method first."
                )


def copy_flat(one: ExportSet) -> None:
    """Copy as many bytes as the export moves from one contiguous buffer to another: the ceiling."""
    for target, source in one.flat:
        target.copy_(source)


def bench_export(
    layers: Sequence[LayerShape],
    checkpoints: Sequence[int],
    *,
    variants: Sequence[Variant] = tuple(VARIANTS.values()),
    device: Literal["cpu", "cuda"] = "cpu",
    threads: Sequence[int] = (),
    runs: int = 11,
    methods: dict[str, Method] | None = None,
    report: Callable[[Benchmark], object] | None = None,
) -> Benchmark:
    """Time exports of every layer, variant and count, ours and every baseline, beside one copy.

    >>> tiny = LayerShape("tiny", 8, (4, 4))
    >>> made = bench_export([tiny], [2], variants=[VARIANTS["token-first"]], threads=[1], runs=2)
    >>> made.timings[0].method, made.timings[0].ratio, made.timings[0].bytes
    ('contiguous copy_', 1.0, 448)

    On the CPU each of ``threads`` (default: torch's count) is a regime. On CUDA the regimes are
    "kernel only" (a CUDA graph that cycles through buffers larger than the L2 cache) and "with
    launch" (the clock on the wall, from the call to the device's end, L2 flushed before).
    ``report`` is called with the run so far after each timing. Raises CheckpointValueError for a
    method whose result differs from the loop's, before anything of that case is timed.
    """
    import torch

    _check_device(device)
    methods = export_methods(device) if methods is None else methods
    counts = list(threads) or [torch.get_num_threads()]
    made = Benchmark("export", COPY, record_environment(device, threads=counts), [])
    for layer in layers:
        for variant in variants:
            torch.compiler.reset()  # else a compiled form falls back after eight shapes
            for size in checkpoints:
                sets = _make_sets(layer, variant, size, device)
                bytes_moved = sum(pair[0].nbytes + pair[1].nbytes for pair in sets[0].flat)
                for name, method in methods.items():
                    refuse_difference(name, sets, _each(method, [(one,) for one in sets]))
                timed = {COPY: copy_flat, **methods}
                for regime, samples in (
                    _time_on_gpu(sets, timed, runs)
                    if device == "cuda"
                    else _time_on_cpu(sets, timed, counts, runs)
                ):
                    case = layer.name, variant.name, size, regime
                    _keep(_timings(*case, samples, bytes_moved), made, report)
                del sets, timed  # before the next case takes its memory
    return made


def _keep(
    timings: Iterator[Timing], made: Benchmark, report: Callable[[Benchmark], object] | None
) -> None:
    for timing in timings:
        made.timings.append(timing)
        if report:
            report(made)


def _check_device(device: str) -> None:
    import torch

    if device not in ("cpu", "cuda"):
        raise CheckpointValueError(f"device is {device!r}; expected cpu or cuda. Try cpu.")
    if device == "cpu":
        return
    if not torch.cuda.is_available():
        raise CheckpointValueError(
            "device is cuda and torch finds none; expected a GPU with its driver. Try "
            "--device cpu, or --static for what compilers make of the kernels."
        )
    from mambackpt.kernels.store_checkpoints import runs_interpreted

    if runs_interpreted():
        raise CheckpointValueError(
            "TRITON_INTERPRET is set, so the kernels run in Triton's interpreter, whose times mean "
            "nothing; expected compiled kernels. Try unsetting it."
        )


def _make_sets(layer: LayerShape, variant: Variant, size: int, device: str) -> list[ExportSet]:
    """As many buffer sets as it takes for a call to find nothing of its own in the cache."""
    import torch

    first = make_export_set(layer, variant, size, device=device)
    used = sum(target.nbytes + source.nbytes for target, source in first.flat)
    cache = _CPU_CACHE
    if device == "cuda":
        cache = getattr(torch.cuda.get_device_properties(), "L2_cache_size", cache)
    count = min(64 if device == "cuda" else 16, -(-4 * cache // max(used, 1)))
    return [
        first,
        *(make_export_set(layer, variant, size, device=device, seed=n) for n in range(1, count)),
    ]


def _time_on_cpu(
    sets: Sequence[ExportSet], methods: dict[str, Method], threads: Sequence[int], runs: int
) -> Iterator[tuple[str, dict[str, list[float]]]]:
    import torch

    before = torch.get_num_threads()
    try:
        for count in threads:
            torch.set_num_threads(count)
            turns = [(one,) for one in sets]
            calls = {name: _each(method, turns) for name, method in methods.items()}
            yield f"{count} thread{'s' * (count > 1)}", _interleave(calls, runs, len(sets))
    finally:
        torch.set_num_threads(before)


def _each(function: Callable[..., object], turns: Sequence[tuple[Any, ...]]) -> Callable[[], None]:
    """A call of the function with each of these arguments in turn."""

    def run() -> None:
        for arguments in turns:
            function(*arguments)

    return run


def _interleave(
    calls: dict[str, Callable[[], None]], runs: int, parts: int
) -> dict[str, list[float]]:
    """Seconds per part of each call, one sample per run; the first round is a warm-up."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for run in range(-1, runs):
        for name, call in calls.items():
            start = perf_counter()
            call()
            if run >= 0:
                samples[name].append((perf_counter() - start) / parts)
    return samples


def _time_on_gpu(
    sets: Sequence[ExportSet], methods: dict[str, Method], runs: int
) -> Iterator[tuple[str, dict[str, list[float]]]]:
    import torch
    from triton.testing import do_bench

    # Kernel only. A graph of several calls spreads its own start over them; the first call of each
    # method has been made, so nothing compiles while the graph records.
    calls = max(len(sets), 8)
    replays: dict[str, list[float]] = {}
    for name, method in methods.items():
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            method(sets[0])  # what a library sets up per stream, it sets up here
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in range(calls):
                method(sets[call % len(sets)])
        if name != COPY:
            refuse_difference(f"{name}, replayed from a graph,", sets, graph.replay)
        times: list[float] = []
        while len(times) < 5:  # a slow graph fills the time it is given with fewer
            times += do_bench(graph.replay, warmup=20, rep=80, return_mode="all")
        replays[name] = [milliseconds / 1e3 / calls for milliseconds in times]
        del graph
    yield "kernel only", replays

    flush = torch.empty(256 * _MIB, dtype=torch.int8, device="cuda")
    samples: dict[str, list[float]] = {name: [] for name in methods}
    for run in range(-3, 3 * runs):
        for name, method in methods.items():
            flush.zero_()
            torch.cuda.synchronize()
            start = perf_counter()
            method(sets[run % len(sets)])
            torch.cuda.synchronize()
            if run >= 0:
                samples[name].append(perf_counter() - start)
    yield "with launch", samples


def _timings(
    case: str,
    variant: str,
    size: int,
    regime: str,
    samples: dict[str, list[float]],
    moved: int,
) -> Iterator[Timing]:
    """One timing per method; the first method is the reference."""
    reference = None
    for method, seconds in samples.items():
        fifths = quantiles(seconds, n=5, method="inclusive")
        median = float(np.median(seconds))
        reference = median if reference is None else reference
        yield Timing(
            case=case,
            variant=variant,
            size=size,
            regime=regime,
            method=method,
            median_us=median * 1e6,
            low_us=fifths[0] * 1e6,
            high_us=fifths[-1] * 1e6,
            runs=len(seconds),
            bytes=moved,
            ratio=reference / median,
        )


def record_environment(device: str, *, threads: Sequence[int]) -> Environment:
    """Return what a reader of timings needs to know; no host name, no path."""
    versions = {"python": platform.python_version()}
    for package in ("numpy", "torch", "triton"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        models = [
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ]
        cpu = models[0] if models else cpu
    name, driver, peak = cpu, None, None
    if device == "cuda":
        import torch
        from triton.testing import get_dram_gbps

        name = torch.cuda.get_device_name()
        versions["cuda"] = str(torch.version.cuda)
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            found = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
            driver = found.split()[0]
        except (OSError, subprocess.CalledProcessError, IndexError):
            driver = None
        try:
            peak = float(get_dram_gbps())
        except (RuntimeError, AttributeError, KeyError, ZeroDivisionError):
            peak = None
    return Environment(
        device=name,
        cpu=cpu,
        cores=os.cpu_count() or 1,
        threads=list(threads),
        driver=driver,
        peak_gb_per_s=peak,
        versions=versions,
        date=datetime.date.today().isoformat(),
    )


# The planner, beside the fastest loop that does the same.


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
    made = Benchmark("planner", LOOP, record_environment("cpu", threads=[1]), [])
    for case in planner_cases(sizes):
        size = len(case.seq_lens)
        listed = case.seq_lens, case.query_lens, *PLANNER_GEOMETRY
        given: tuple[Any, ...] = listed
        loop: Callable[..., Any] = plan_with_a_loop
        if case.container == "array":
            loop = plan_arrays_with_a_loop
            given = np.array(case.seq_lens), np.array(case.query_lens), *PLANNER_GEOMETRY
        offsets, columns = planner(*given)
        if (list(offsets), list(columns)) != plan_with_a_loop(*listed):
            raise CheckpointValueError(
                f"the planner and the loop disagree on {size} {case.rows} rows; expected equal "
                "answers, and times nothing else. Try the planner's tests."
            )
        repeats = max(1, 4096 // size)
        calls = {
            LOOP: _each(loop, [given] * repeats),
            "planner": _each(planner, [given] * repeats),
        }
        samples = _interleave(calls, runs, repeats)
        named = case.rows, case.container, size, "one call"
        _keep(_timings(*named, samples, 0), made, report)
    return made


# What compilers make of the kernels


def static_table(compiled: Sequence[CompiledKernel]) -> list[dict[str, Any]]:
    """Return one plain row per compiled kernel: accesses, programs, registers, spills.

    ``recurrent_bytes`` and ``window_bytes`` are the widths, in bytes a lane, of the accesses to
    the states' and the windows' buffers; per-MiB numbers count MiB of checkpoint read.
    """
    return [
        {
            "kernel": one.request.kernel,
            "target": one.request.target,
            "layer": one.request.layer.name,
            "dtypes": f"{one.request.source_dtype} to {one.request.state_dtype}",
            "windows": "token-first" if one.request.token_first else "dim-first",
            "recurrent_bytes": list(one.widths("recurrent_checkpoint", "recurrent_state")),
            "window_bytes": list(one.widths("raw_qkv", "conv_state")),
            "programs_per_mib": one.programs_per_mib,
            "accesses_per_mib": one.accesses_per_mib,
            "instructions_per_mib": one.instructions_per_mib,
            "registers": one.registers,
            "spills": one.spills,
        }
        for one in compiled
    ]


# The command


def main(argv: Sequence[str]) -> int:
    """Run ``bench export``, ``planner`` or ``replay`` and print a table; exit status 0."""
    parser = argparse.ArgumentParser(prog="mambackpt bench", description=__doc__.split("\n")[0])
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="{export,planner,replay}")
    export = kinds.add_parser("export", help="ours and every baseline, beside one contiguous copy")
    export.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    export.add_argument("--layer", default="kimi-k3,qwen3-next,nemotron-3-super", metavar="NAMES")
    export.add_argument("--checkpoints", metavar="NUMBERS", help="[8,64; on CUDA 1,8,64,256]")
    export.add_argument("--variant", default="", metavar="NAMES", help=f"of {'; '.join(VARIANTS)}")
    export.add_argument("--threads", default="", metavar="NUMBERS", help="[torch's count]")
    export.add_argument("--static", action="store_true", help="compile for four targets instead")
    planner = kinds.add_parser("planner", help="the planner beside the fastest plain loop")
    planner.add_argument("--rows", default=",".join(map(str, PLANNER_SIZES)), metavar="NUMBERS")
    replay = kinds.add_parser("replay", help="the replay beside a plain one of the same rules")
    replay.add_argument("trace", help="a trace file; it is loaded before anything is timed")
    replay.add_argument("--rule", default="all,last,last+junction,last+junction+chunk")
    replay.add_argument("--block", default="512,1024,1536,2048,4096", metavar="NUMBERS")
    replay.add_argument("--model", help="whose bytes count in a pool")
    replay.add_argument("--pool-gb", metavar="NUMBERS", help="pools of so many GB [no limit]")
    for kind, runs in ((export, 11), (planner, 15), (replay, 5)):
        kind.add_argument("--runs", type=int, default=runs, help="samples per timing [%(default)s]")
    for kind in (export, planner):
        kind.add_argument("--out", type=Path, metavar="FILE", help="also write the result as JSON")
    args = parser.parse_args(argv)
    if args.runs < 2:
        raise CheckpointValueError(f"--runs is {args.runs}; expected at least 2. Try 11.")

    def report(made: Benchmark) -> None:
        print(_line(made.timings[-1]), flush=True)
        if args.out:  # what is measured is kept, whatever ends the run
            args.out.write_text(made.to_json())

    if args.kind == "replay":
        return _bench_replay(args)
    if args.kind == "planner":
        sizes = _numbers("--rows", args.rows)
        print(_HEADER)
        print(_summary(bench_planner(sizes, runs=args.runs, report=report)))
        return 0
    layers = [_chosen("--layer", name, LAYERS) for name in args.layer.split(",")]
    if args.static:
        rows = static_table(compile_ahead(static_requests(layers=layers)))
        print(_static_text(rows))
        if args.out:
            environment = record_environment("cpu", threads=[])
            args.out.write_text(Benchmark("static", "", environment, [], rows).to_json())
        return 0
    on_gpu = args.device == "cuda"
    variants = [_chosen("--variant", name, VARIANTS) for name in args.variant.split(";") if name]
    checkpoints = _numbers(
        "--checkpoints", args.checkpoints or ("1,8,64,256" if on_gpu else "8,64")
    )
    print(_HEADER)
    made = bench_export(
        layers,
        checkpoints,
        variants=variants or [v for v in VARIANTS.values() if v.windows or not on_gpu],
        device=args.device,
        threads=_numbers("--threads", args.threads) if args.threads else (),
        runs=args.runs,
        report=report,
    )
    print(_summary(made))
    return 0


def _bench_replay(args: argparse.Namespace) -> int:
    """Print each replay's medians, and the ratio of both sums at the end."""
    from mambackpt.replay import time_replays
    from mambackpt.traces import load_trace

    trace = load_trace(args.trace)
    pools: list[int | None] = [None]
    if args.pool_gb:
        pools = [size * 10**9 for size in _numbers("--pool-gb", args.pool_gb)]
    plain = fast = 0.0
    print(f"{'rule':<28} {'block':>6} {'pool GB':>8} {'plain ms':>10} {'fast ms':>9} {'ratio':>7}")
    for timing in time_replays(
        *(trace, args.rule.split(","), _numbers("--block", args.block), pools),
        runs=args.runs,
        model=args.model,
    ):
        pool = "-" if timing.pool_bytes is None else f"{timing.pool_bytes / 1e9:.0f}"
        print(
            f"{timing.rule:<28} {timing.block:>6} {pool:>8} {timing.plain_s * 1e3:>10.1f} "
            f"{timing.fast_s * 1e3:>9.2f} {timing.ratio:>7.1f}",
            flush=True,
        )
        plain, fast = plain + timing.plain_s, fast + timing.fast_s
    print(
        f"{trace.name}, {len(trace):,} requests: {plain * 1e3:.0f} ms plain, {fast * 1e3:.0f} ms "
        f"fast, {plain / fast:.1f} times as fast; equal records, medians of {args.runs} runs"
    )
    return 0


def _numbers(name: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise CheckpointValueError(
            f"{name} is {text!r}; expected positive whole numbers. Try {name} 1,8."
        )
    return numbers


def _chosen(option: str, name: str, known: dict[str, Any]) -> Any:
    if name.strip() not in known:
        raise CheckpointValueError(
            f"{option} names {name!r}; expected some of {', '.join(known)}. "
            f"Try {next(iter(known))!r}."
        )
    return known[name.strip()]


_HEADER = (
    f"{'case':<17} {'variant':<26} {'size':>5}  {'regime':<11} {'method':<24} "
    f"{'median us':>10} {'20-80 %':>19} {'GB/s':>7} {'ratio':>6}"
)


def _line(timing: Timing) -> str:
    speed = f"{timing.gb_per_s:7.1f}" if timing.bytes else " " * 7
    return (
        f"{timing.case:<17} {timing.variant:<26} {timing.size:>5}  {timing.regime:<11} "
        f"{timing.method:<24} {timing.median_us:>10.1f} "
        f"{timing.low_us:>9.1f}-{timing.high_us:<9.1f} {speed} {timing.ratio:>6.2f}"
    )


def _summary(made: Benchmark) -> str:
    """What the ratio means, where it was measured, and any figure that memory cannot reach."""
    where, versions = made.environment, made.environment.versions
    lines = [
        f"ratio: {made.reference}, timed in the same run = 1.00",
        f"{where.device}; threads {where.threads}; "
        + ", ".join(f"{name} {number}" for name, number in versions.items())
        + f"; {where.date}",
    ]
    peak = where.peak_gb_per_s
    for timing in made.timings:
        if peak and timing.gb_per_s > peak:
            lines.append(
                f"above the memory's {peak:.0f} GB/s, so served by a cache: {_line(timing)}"
            )
    return "\n".join(lines)


def _static_text(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"{'layer':<17} {'target':<7} {'dtypes':<21} {'windows':<12} {'kernel':<6} "
        f"{'states B':>9} {'windows B':>10} {'programs':>9} {'accesses':>9} {'instr.':>9} "
        f"{'regs':>5} {'spills':>6}   (per MiB of checkpoint)"
    ]
    for row in rows:
        states, windows = (
            "/".join(map(str, row[name])) for name in ("recurrent_bytes", "window_bytes")
        )
        lines.append(
            f"{row['layer']:<17} {row['target']:<7} {row['dtypes']:<21} {row['windows']:<12} "
            f"{row['kernel']:<6} {states:>9} {windows:>10} {row['programs_per_mib']:>9.1f} "
            f"{row['accesses_per_mib']:>9.0f} {row['instructions_per_mib']:>9.0f} "
            f"{row['registers']:>5} {row['spills']:>6}"
        )
    return "\n".join(lines)
