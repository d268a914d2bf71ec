"""What notebook 05 shows of its kernels: who touches what, what is equal, what compilers made."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mambackpt import bench
from mambackpt.errors import CheckpointValueError
from mambackpt.metadata import (
    CacheConfig,
    CommonMetadata,
    EngineConfig,
    KVCacheSpec,
    MambaPrefillCheckpointBuilder,
)

KIMI = bench.LAYERS["kimi-k3"]
_Case = tuple[int, int, int]
_Span = tuple[str, list[int]]


def example_step() -> tuple[Any, Any]:
    """Return the notebook's step of three requests, and the checkpoints that are planned in it.

    >>> step, checkpoint = example_step()
    >>> checkpoint.checkpoint_offsets.tolist(), checkpoint.state_indices.tolist()
    ([576, 0, 256], [12, 0, 31])

    Blocks of 256 tokens, hash units of 64; request 1 generates its 901st token.
    """
    owned = [[11, 12, 13, 14], [21, 22, 23, 24], [31, 32, 33, 34]]
    step = CommonMetadata.from_lengths([600, 901, 300], [600, 1, 300], owned)
    config = EngineConfig(CacheConfig(hash_block_size=64, cache_hit_alignment_tokens=64))
    return step, MambaPrefillCheckpointBuilder(config, KVCacheSpec(256, 64)).build(
        step, request_rows=[0, 1, 2]
    )


def step_rows(step: Any, checkpoint: Any) -> list[tuple[int, ...]]:
    """Return each row of a step: its number, first and last token, its cut, and its block.

    >>> step_rows(*example_step())[2]
    (2, 601, 900, 256, 31)
    """
    starts = step.query_start_loc
    columns = starts[:-1], starts[1:] - 1, checkpoint.checkpoint_offsets, checkpoint.state_indices
    lists = [column.tolist() for column in columns]
    return list(zip(range(len(lists[0])), *lists, strict=True))


def floor_rows(bandwidth: float, counts: Sequence[int] = (1, 8, 64, 256)) -> list[list[Any]]:
    """Return for each layer its bytes, and the least microseconds that so many checkpoints take.

    >>> floor_rows(4.3e12, [1])[0]
    ['kimi-k3', 6512640, 3.03]

    ``bandwidth`` in bytes per second, read and written: each byte crosses twice.
    """
    moved = {name: 4 * one.row_elements + 2 * one.window_elements for name, one in _layers()}
    least = {
        name: [round(1e6 * 2 * n * size / bandwidth, 2) for n in counts]
        for name, size in moved.items()
    }
    return [[name, size, *least[name]] for name, size in moved.items()]


def _layers() -> Iterable[tuple[str, bench.LayerShape]]:
    return bench.LAYERS.items()


def program_rows(kernel: Any, given: Mapping[str, Any], programs: int) -> list[tuple[int, ...]]:
    """Return for each program how many places work, and the first element read and written."""
    rows: list[tuple[int, ...]] = []
    for number in range(programs):
        load, store = bench.watch_program(kernel, given, program=(number, 0))
        rows.append((number, len(load.places), int(load.elements[0]), int(store.elements[0])))
    return rows


def buffer_rows(kernel: Any, given: Mapping[str, Any], rows: int) -> list[tuple[int, str]]:
    """Return for the first program of each row the buffers that it touches, with its places."""
    seen = [bench.watch_program(kernel, given, program=(0, row)) for row in range(rows)]
    words = [", ".join(f"{touch.buffer} {len(touch.places)}" for touch in one) for one in seen]
    return list(enumerate(words))


def tokens_of_window(window: Any, inputs: Any) -> list[int]:
    """Return which tokens of a step a stored window consists of.

    >>> import torch
    >>> inputs = torch.arange(40.0).view(10, 4)
    >>> tokens_of_window(inputs[5:8], inputs)
    [5, 6, 7]
    """
    width = len(window)
    first = next(t for t in range(len(inputs)) if inputs[t : t + width].equal(window))
    return list(range(first, first + width))


def read_rows(layer: bench.LayerShape = KIMI) -> list[tuple[str, str, int, int, int]]:
    """Return what both kernels read of one checkpoint: programs, bytes of one, bytes of a run.

    >>> [row[-1] for row in read_rows()[2:]]
    [2, 8192]
    """
    rows = []
    for buffer, name in (("recurrent_checkpoint", "state"), ("raw_qkv", "window")):
        for kernel, whose in (("plain", "plain shape"), ("tiled", "ours")):
            request = bench.Compilation(layer, kernel)
            touch = bench.first_touch(request, buffer)
            programs = bench.plan_on_paper(request).programs
            rows.append((name, whose, programs, touch.bytes, round(touch.run_bytes)))
    return rows


def door_rows(stores: Sequence[Callable[..., object]]) -> list[tuple[str, str]]:
    """Return what the comparison with the loop says of each kernel, and of the last one cut late.

    Whole pools full of NaN, three checkpoints, bit by bit.
    """
    layer = bench.LayerShape("tiny", 40, (3, 100))
    case = bench.make_export_set(layer, bench.BUFFERS["dim-first"], 3, device="cpu")
    late = {**case.inputs, "offsets": case.inputs["offsets"] + 1}
    rows = [(store.__name__, _compared(store, case, case.inputs)) for store in stores]
    return [*rows, ("the last, one token late", _compared(stores[-1], case, late))]


def _compared(store: Callable[..., object], case: Any, inputs: Mapping[str, Any]) -> str:
    try:
        bench.refuse_difference(store.__name__, [case], lambda: store(**inputs))
    except CheckpointValueError as error:
        return str(error).partition(";")[0]
    return "equal, to the last bit"


def access_rows(compiled: Sequence[bench.CompiledKernel]) -> list[tuple[str, str, str]]:
    """Return the bytes of an access on all targets: of the state, and of windows in each layout."""
    lines = bench.static_table(compiled)

    def widths(kernel: str, part: str, windows: str = "") -> str:
        own = [
            one for one in lines if one["kernel"] == kernel and one["windows"].startswith(windows)
        ]
        return " or ".join(map(str, sorted({width for one in own for width in one[part]})))

    kernels = ("tiled", "plain")
    rows = [("state", *(widths(kernel, "recurrent_bytes") for kernel in kernels))]
    for layout in ("token-first", "dim-first"):
        told = (widths(kernel, "window_bytes", layout) for kernel in kernels)
        rows.append((f"window, {layout}", *told))
    return rows  # type: ignore[return-value]


def export_runs(folder: str = "measurements") -> list[bench.Benchmark]:
    """Return the measurements of exports in a folder, those of CPUs first."""
    files = sorted(Path(folder).glob("*.json"))
    runs = [bench.Benchmark.from_json(file.read_text()) for file in files]
    exports = [run for run in runs if run.kind == "export"]
    return sorted(exports, key=lambda run: bool(run.environment.driver))


def measured_on(run: bench.Benchmark) -> str:
    """Return on what a measurement was made, and when."""
    at = run.environment
    return f"{at.device}, {max(at.threads)} thread, torch {at.versions['torch']}, {at.date}"


def wrapped_rows(blocks: Sequence[int], stride: int) -> list[tuple[int, int, int]]:
    """Return where blocks start, and where a 32-bit product says that they do.

    >>> wrapped_rows([4855], 442_368)
    [(4855, 2147696640, -2147270656)]
    """
    import torch

    numbers = torch.tensor(blocks)
    products = (numbers * stride).tolist(), (numbers.int() * stride).tolist()
    return list(zip(blocks, *products, strict=True))


def addresses(kernel: Any, stride: int, case: _Case) -> Any:
    """Return the first and last elements that a kernel reads and writes, on buffers of no memory.

    ``case``: block, row, tile; states and blocks lie ``stride`` apart, tiles have 128 numbers. An
    answer that is still ``...`` stays so.
    """
    import torch

    if kernel is ...:
        return ...
    block, row, tile = case
    index = torch.full((row + 1,), block, dtype=torch.int32)
    paper = torch.empty(0, device="meta")
    given = dict(zip(kernel.arg_names, (paper, paper, index, stride, stride, 128), strict=True))
    touches = bench.watch_program(kernel, given, program=(tile, row))
    return [(touch.buffer, touch.elements[[0, -1]].tolist()) for touch in touches[1:]]


def right_addresses(stride: int, case: _Case) -> list[_Span]:
    """Return what `addresses` has to be.

    >>> right_addresses(442_368, (4855, 0, 0))[1]
    ('pool', [2147696640, 2147696767])
    """
    block, row, tile = case
    starts = {"states": row * stride + tile * 128, "pool": block * stride + tile * 128}
    return [(buffer, [start, start + 127]) for buffer, start in starts.items()]


def same_bits(pairs: Mapping[str, tuple[Any, Any]]) -> list[tuple[str, str]]:
    """Return for each pair of buffers whether it is equal bit by bit, NaN and all.

    >>> import torch
    >>> same_bits({"pool": (torch.full((2,), torch.nan), torch.full((2,), torch.nan))})
    [('pool', 'equal')]
    """
    import torch

    equal = {
        name: torch.equal(*(part.view(torch.int32) for part in pair))
        for name, pair in pairs.items()
    }
    return [(name, "equal" if same else "different") for name, same in equal.items()]
