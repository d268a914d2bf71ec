"""Exports timed beside torch indexing copies and one contiguous copy of the same bytes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from mambackpt.bench.compiled import Compilation, LayerShape, inputs_of
from mambackpt.bench.record import Benchmark, each, interleave, keep, record_environment, timings
from mambackpt.errors import CheckpointValueError, checked_choice

if TYPE_CHECKING:
    import torch

    from mambackpt.kernels.torch_copies import CopyInputs, CopyPlan
    from mambackpt.metadata import MambaPrefillCheckpointMetadata


COPY = "contiguous copy_"
OURS = "export"
PLAIN_KERNEL = "plain-shaped kernel"
_QUERY_LEN, _CUT = 16, 12  # tokens: a short query keeps the inputs small beside the states
_MIB = 2**20
_CPU_CACHE = 64 * _MIB  # of one core's share, with room to spare


@dataclass(frozen=True, slots=True)
class Buffers:
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


BUFFERS = {
    buffers.name: buffers
    for buffers in (
        Buffers("token-first"),
        Buffers("dim-first", token_first=False),
        Buffers("bf16, spare columns", "bfloat16", "bfloat16", False, 3),
        Buffers("fp32 to bf16", state_dtype="bfloat16"),
        Buffers("states only", windows=False),
        Buffers("states only, fp32 to bf16", state_dtype="bfloat16", windows=False),
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
    layer: LayerShape, buffers: Buffers, checkpoints: int, *, device: str, seed: int = 0
) -> ExportSet:
    """Return random buffers for one export of this many checkpoints of one layer.

    >>> one = make_export_set(LayerShape("tiny", 8, (4, 4)), BUFFERS["dim-first"], 2, device="cpu")
    >>> one.inputs["conv_state"].shape, one.inputs["recurrent_state"].shape
    (torch.Size([5, 8, 3]), torch.Size([5, 4, 4]))
    """
    import torch

    from mambackpt.kernels.torch_copies import plan_copies, store_loop
    from mambackpt.metadata import MambaPrefillCheckpointMetadata

    R, blocks = checkpoints, checkpoints + 3
    request = Compilation(
        replace(layer, columns=layer.columns + buffers.spare_columns),
        source_dtype=buffers.source_dtype,
        state_dtype=buffers.state_dtype,
        token_first=buffers.token_first,
    )
    inputs = inputs_of(request, rows=R, tokens=R * _QUERY_LEN, blocks=blocks, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for source in (inputs["raw_qkv"], inputs.get("recurrent_checkpoint")):
        if source is not None:
            source.normal_(generator=generator)
    order = torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(seed))[:R] + 1
    inputs["offsets"].fill_(_CUT)
    inputs["state_indices"].copy_(order)
    inputs["cu_seqlens"].copy_(torch.arange(R + 1) * _QUERY_LEN)
    if not buffers.windows:
        inputs["state_len"] = 0
    rows = torch.arange(R, device=device)
    one = ExportSet(
        checkpoint=MambaPrefillCheckpointMetadata(
            inputs["offsets"], inputs["state_indices"], [_CUT] * R, [_QUERY_LEN] * R, rows, rows
        ),
        inputs=inputs,
        plan=plan_copies(**inputs),
        truth=[],
        flat=[],
    )
    one.poison()
    store_loop(**inputs)
    one.truth = [stored.clone() for stored in one.pools()]
    one.poison()
    one.flat = _flat_copies(inputs, layer, buffers)
    return one


def _flat_copies(
    inputs: "CopyInputs", layer: LayerShape, buffers: Buffers
) -> "list[tuple[torch.Tensor, torch.Tensor]]":
    """Contiguous targets and sources of as many bytes as the export moves.

    On the CPU they lie in the export's own buffers: the pages that a buffer happens to get make a
    difference of 20 %. A GPU copies all bytes at once between buffers of its own, because a second
    launch would count; only states that change their dtype stand apart there.
    """
    import torch

    R = len(inputs["offsets"])
    sizes = R * layer.row_elements, R * layer.width * inputs["state_len"]
    pairs = (
        (inputs.get("recurrent_state"), inputs.get("recurrent_checkpoint")),
        (inputs["conv_state"], inputs["raw_qkv"]),
    )
    flat = []
    for size, pair in zip(sizes, pairs, strict=True):
        if size:
            target, source = (
                torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage())[:size]
                for t in pair
                if t is not None
            )
            flat.append((target, source))
    if flat[0][0].device.type == "cuda":
        flat = [(torch.empty_like(t), torch.zeros_like(s)) for t, s in flat]
        if not buffers.converts:
            joined = [torch.cat([pair[n].view(torch.uint8) for pair in flat]) for n in (0, 1)]
            flat = [(joined[0], joined[1])]
    return flat


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
    buffers: Sequence[Buffers] = tuple(BUFFERS.values()),
    device: Literal["cpu", "cuda"] = "cpu",
    threads: Sequence[int] = (),
    runs: int = 11,
    methods: dict[str, Method] | None = None,
    report: Callable[[Benchmark], object] | None = None,
) -> Benchmark:
    """Time exports from every layer's buffers, ours and every baseline, beside one copy.

    >>> tiny = LayerShape("tiny", 8, (4, 4))
    >>> run = bench_export([tiny], [2], buffers=[BUFFERS["token-first"]], threads=[1], runs=2)
    >>> run.timings[0].method, run.timings[0].ratio, run.timings[0].bytes
    ('contiguous copy_', 1.0, 448)

    ``checkpoints`` counts those of one layer. On the CPU each of ``threads`` (default: torch's
    count) is a regime. On CUDA the regimes are "kernel only" (a CUDA graph that cycles through
    buffers larger than the L2 cache) and "with launch" (the clock on the wall, from the call to the
    device's end, L2 flushed before). ``report`` is called with the run so far after each timing.
    Raises CheckpointValueError for a method whose result differs from the loop's, before anything
    of that case is timed.
    """
    import torch

    _check_device(device)
    methods = export_methods(device) if methods is None else methods
    counts = list(threads) or [torch.get_num_threads()]
    run = Benchmark("export", COPY, record_environment(device, threads=counts), [])
    for layer in layers:
        for case_buffers in buffers:
            torch.compiler.reset()  # else a compiled form falls back after eight shapes
            for size in checkpoints:
                sets = _make_sets(layer, case_buffers, size, device)
                bytes_moved = sum(pair[0].nbytes + pair[1].nbytes for pair in sets[0].flat)
                for name, method in methods.items():
                    refuse_difference(name, sets, each(method, [(one,) for one in sets]))
                timed = {COPY: copy_flat, **methods}
                for regime, samples in (
                    _time_on_gpu(sets, timed, runs)
                    if device == "cuda"
                    else _time_on_cpu(sets, timed, counts, runs)
                ):
                    case = layer.name, case_buffers.name, size, regime
                    keep(timings(*case, samples, bytes_moved), run, report)
                del sets, timed  # before the next case takes its memory
    return run


def _check_device(device: str) -> None:
    import torch

    if checked_choice("device", device, ("cpu", "cuda")) == "cpu":
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


def _make_sets(layer: LayerShape, buffers: Buffers, size: int, device: str) -> list[ExportSet]:
    """As many buffer sets as it takes for a call to find nothing of its own in the cache."""
    import torch

    first = make_export_set(layer, buffers, size, device=device)
    used = sum(target.nbytes + source.nbytes for target, source in first.flat)
    cache = _CPU_CACHE
    if device == "cuda":
        cache = getattr(torch.cuda.get_device_properties(), "L2_cache_size", cache)
    count = min(64 if device == "cuda" else 16, -(-4 * cache // max(used, 1)))
    return [
        first,
        *(make_export_set(layer, buffers, size, device=device, seed=n) for n in range(1, count)),
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
            calls = {name: each(method, turns) for name, method in methods.items()}
            yield f"{count} thread{'s' * (count > 1)}", interleave(calls, runs, len(sets))
    finally:
        torch.set_num_threads(before)


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
