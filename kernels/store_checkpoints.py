"""The Triton kernel that exports checkpoints, and its launcher: one launch for a whole step.

Each program copies one tile: a run of one row's recurrent state, or one token's channels of its
convolution window. Why the grid and the tiles are what they are is derived in README.md.
"""
# Triton's decorator and its kernel parameters carry no types; the launcher below is checked.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch
import triton
import triton.language as tl
from torch import Tensor

from .torch_copies import CopyInputs

ACCESS_BYTES = 16  # the widest load or store of one thread
THREADS = 128  # of one program: four warps of 32
MIN_TILE_BYTES = 4_096  # 256 accesses of 16 bytes: four wavefronts of 64, or four warps twice
MAX_TILE_BYTES = 16_384  # 32 registers of 4 bytes in each of 128 threads
ENOUGH_PROGRAMS = 128  # about one for each multiprocessor, even when only one row is exported
MAX_GRID = (2**31 - 1, 65_535)  # programs on axis 0 and axis 1 of a CUDA grid

# Numbers that follow the batch: never part of the key under which a compiled kernel is kept.
COUNTS = ["positions", "tokens", "blocks", "recurrent_count"]
RUN_TIME = [
    *COUNTS,
    "raw_token_stride",
    "raw_channel_stride",
    "conv_block_stride",
    "source_stride",
    "state_block_stride",
    "initial_row_stride",
]
# Read one number at a time: their alignment buys nothing, so it is no part of that key either.
INDEX_VECTORS = ["offsets", "state_indices", "cu_seqlens", "recurrent_rows", "token_indices"]


@triton.jit
def element_offset(index, stride, unit: tl.constexpr):
    """Elements from a buffer's start to its row ``index``: 64-bit, divisible by ``unit``."""
    return index.to(tl.int64) * (stride.to(tl.int64) * unit)


@triton.jit
def channel_offsets(start, first, rounds, places, stride):
    """Elements from ``start`` on to channels ``first + rounds + places``.

    Summed in this order, the addresses of one thread differ by constants, which costs no registers.
    """
    return start + first * stride + rounds.to(tl.int64) * stride + places.to(tl.int64) * stride


@triton.jit
def checkpoint_of_row(
    row,
    offsets,
    state_indices,
    cu_seqlens,
    recurrent_state,
    recurrent_rows,
    token_indices,
    initial_windows,
    positions,
    tokens,
    blocks,
    recurrent_count,
    STATE_LEN: tl.constexpr,
    SKIP_SHORT_WINDOWS: tl.constexpr,
):
    """One request row's checkpoint: is there one, with a window; offset, block, start, source row.

    It exists when there is something to store and every byte of it lies inside its buffer, the
    window's inputs inside the row's own query: a checkpoint is written whole or not at all.
    """
    offset = tl.load(offsets + row).to(tl.int64)
    block = tl.load(state_indices + row).to(tl.int64)
    query_start = tl.load(cu_seqlens + row).to(tl.int64)
    query_end = tl.load(cu_seqlens + (row + 1)).to(tl.int64)
    source = row
    exists = (offset > 0) & (block > 0) & (block < blocks)
    exists = exists & (query_start >= 0) & (query_start + offset <= query_end)
    exists = exists & (query_start + offset <= positions)
    if recurrent_state is not None:
        if recurrent_rows is not None:
            source = tl.load(recurrent_rows + row).to(tl.int64)
        exists = exists & (source >= 0) & (source < recurrent_count)
    if initial_windows is None and not SKIP_SHORT_WINDOWS:
        exists = exists & (offset >= STATE_LEN)
    if token_indices is not None:
        for back in tl.static_range(1, STATE_LEN + 1):
            read = exists & (offset >= (STATE_LEN if SKIP_SHORT_WINDOWS else back))
            position = query_start + offset - back
            token = tl.load(token_indices + position, mask=read, other=0)
            exists = exists & (token >= 0) & (token < tokens)
    has_window = exists
    if SKIP_SHORT_WINDOWS:
        has_window = has_window & (offset >= STATE_LEN)
    return exists, has_window, offset, block, query_start, source


@triton.jit(do_not_specialize=RUN_TIME, do_not_specialize_on_alignment=INDEX_VECTORS)
def store_cache_checkpoints_kernel(
    offsets,
    state_indices,
    raw_qkv,
    conv_state,
    cu_seqlens,
    recurrent_checkpoint,
    recurrent_state,
    recurrent_rows,
    token_indices,
    initial_windows,
    positions: tl.int64,
    tokens: tl.int64,
    blocks: tl.int64,
    recurrent_count: tl.int64,
    raw_token_stride: tl.int64,
    raw_channel_stride: tl.int64,
    conv_block_stride: tl.int64,
    source_stride: tl.int64,
    state_block_stride: tl.int64,
    initial_row_stride: tl.int64,
    WIDTH: tl.constexpr,
    STATE_LEN: tl.constexpr,
    ROW_ELEMENTS: tl.constexpr,
    CONV_CHANNEL_STRIDE: tl.constexpr,
    CONV_TOKEN_STRIDE: tl.constexpr,
    INITIAL_CHANNEL_STRIDE: tl.constexpr,
    INITIAL_TOKEN_STRIDE: tl.constexpr,
    CHANNELS_ADJACENT: tl.constexpr,
    RAW_UNIT: tl.constexpr,
    CONV_UNIT: tl.constexpr,
    SOURCE_UNIT: tl.constexpr,
    STATE_UNIT: tl.constexpr,
    STATE_TILE: tl.constexpr,
    STATE_TILES: tl.constexpr,
    WINDOW_TILE: tl.constexpr,
    WINDOW_ROUND: tl.constexpr,
    SKIP_SHORT_WINDOWS: tl.constexpr,
):
    """Copy one tile of one request row's checkpoint; programs (tile, row).

    The first ``STATE_TILES`` tiles are the recurrent row, then come ``STATE_LEN`` tiles, one per
    token of the window, for every ``WINDOW_TILE`` channels. Strides of whole rows are passed in
    multiples of their ``*_UNIT``, so the compiler knows what the addresses are divisible by.
    """
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    exists, has_window, offset, block, query_start, source = checkpoint_of_row(
        row,
        offsets,
        state_indices,
        cu_seqlens,
        recurrent_state,
        recurrent_rows,
        token_indices,
        initial_windows,
        positions,
        tokens,
        blocks,
        recurrent_count,
        STATE_LEN,
        SKIP_SHORT_WINDOWS,
    )
    if STATE_TILES > 0:  # noqa: SIM102 - a compile-time condition stands alone
        if exists & (tile < STATE_TILES):
            element = tile.to(tl.int64) * STATE_TILE + tl.arange(0, STATE_TILE)
            inside = None if ROW_ELEMENTS % STATE_TILE == 0 else element < ROW_ELEMENTS
            source_start = element_offset(source, source_stride, SOURCE_UNIT)
            state_start = element_offset(block, state_block_stride, STATE_UNIT)
            state = tl.load(recurrent_checkpoint + source_start + element, mask=inside)
            state = state.to(recurrent_state.dtype.element_ty)
            tl.store(recurrent_state + state_start + element, state, mask=inside)
    if WIDTH * STATE_LEN > 0:  # noqa: SIM102
        if has_window & (tile >= STATE_TILES):
            column = ((tile - STATE_TILES) % STATE_LEN).to(tl.int64)
            first = ((tile - STATE_TILES) // STATE_LEN).to(tl.int64) * WINDOW_TILE
            rounds = tl.arange(0, WINDOW_TILE // WINDOW_ROUND)[:, None] * WINDOW_ROUND
            places = tl.arange(0, WINDOW_ROUND)[None, :]
            channels = tl.minimum(WIDTH - first, WINDOW_TILE).to(tl.int32)
            within = None if WIDTH % WINDOW_TILE == 0 else rounds + places < channels
            slot = element_offset(block, conv_block_stride, CONV_UNIT) + column * CONV_TOKEN_STRIDE
            slot = channel_offsets(slot, first, rounds, places, CONV_CHANNEL_STRIDE)
            token = query_start + offset - STATE_LEN + column
            if token >= query_start:
                if token_indices is not None:
                    token = tl.load(token_indices + token).to(tl.int64)
                source_slot = element_offset(token, raw_token_stride, RAW_UNIT)
                stride = 1 if CHANNELS_ADJACENT else raw_channel_stride
                source_slot = channel_offsets(source_slot, first, rounds, places, stride)
                inputs = tl.load(raw_qkv + source_slot, mask=within)
                inputs = inputs.to(conv_state.dtype.element_ty)
                tl.store(conv_state + slot, inputs, mask=within)
            elif initial_windows is not None:
                # The window before this query ends where it starts: older inputs come from there.
                earlier_slot = element_offset(row, initial_row_stride, 1)
                earlier_slot += (offset + column) * INITIAL_TOKEN_STRIDE
                earlier_slot = channel_offsets(
                    earlier_slot, first, rounds, places, INITIAL_CHANNEL_STRIDE
                )
                earlier = tl.load(initial_windows + earlier_slot, mask=within)
                earlier = earlier.to(conv_state.dtype.element_ty)
                tl.store(conv_state + slot, earlier, mask=within)


def runs_interpreted() -> bool:
    """Return whether the kernels run in Triton's interpreter, decided when they were imported.

    >>> runs_interpreted()  # in a process that was started with TRITON_INTERPRET=1
    True
    """
    return not isinstance(store_cache_checkpoints_kernel, triton.runtime.JITFunction)


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch, ready to run or to be compiled ahead of time."""

    kernel: Any
    grid: tuple[int, int]
    arguments: dict[str, Any] = field(repr=False)

    @property
    def programs(self) -> int:
        """Programs of the whole grid, those of rows without a checkpoint included."""
        return self.grid[0] * self.grid[1]

    def run(self) -> None:
        """Run it once, on the device of its tensors."""
        conv_state: Tensor = self.arguments["conv_state"]
        if any(limit < asked for limit, asked in zip(MAX_GRID, self.grid, strict=True)):
            raise ValueError(
                f"a grid of {self.grid[0]:,} tiles x {self.grid[1]:,} rows; a launch holds at most "
                f"{MAX_GRID[0]:,} x {MAX_GRID[1]:,}: export the rows in several calls"
            )
        if conv_state.device.type == "cpu" and not runs_interpreted():
            raise RuntimeError(
                "tensors on the CPU need Triton's interpreter, and these kernels were built "
                "without it: set TRITON_INTERPRET=1 before triton is first imported (setting it "
                "later has no effect in this process), or use the torch copies"
            )
        if 0 not in self.grid:
            on_device = (
                torch.cuda.device(conv_state.device) if conv_state.is_cuda else nullcontext()
            )
            with on_device:
                self.kernel[self.grid](**self.arguments)


def _unit(tensor: Tensor, stride: int) -> int:
    """Elements that ``stride`` is counted in: those of one 16-byte access if it divides, else 1."""
    per_access = max(1, ACCESS_BYTES // tensor.element_size())
    return per_access if stride % per_access == 0 else 1


def _state_tile(elements: int, wider: int, narrower: int) -> int:
    """Elements of one program's tile: 16 KiB, less where a row would make too few programs.

    The element sizes are those of the emitted rows and the pool, in bytes, larger first.
    """
    least, tile = MIN_TILE_BYTES // narrower, MAX_TILE_BYTES // wider
    while tile > least and triton.cdiv(elements, tile) < ENOUGH_PROGRAMS:
        tile //= 2
    return min(tile, _power_of_two(elements))


def _window_tile(width: int, element_size: int) -> int:
    """Channels of one program's tile: 8 KiB if that divides the width evenly, else 4 KiB."""
    least = MIN_TILE_BYTES // element_size
    return min(max(least, math.gcd(width, 2 * least)), _power_of_two(width))


def _power_of_two(least: int) -> int:
    return 1 << max(least - 1, 0).bit_length()


def shared_arguments(**inputs: Unpack[CopyInputs]) -> dict[str, Any]:
    """Return the arguments that both kernels take: buffers, counts, strides in elements."""
    raw_qkv, conv_state = inputs["raw_qkv"], inputs["conv_state"]
    checkpoint, pool = inputs.get("recurrent_checkpoint"), inputs.get("recurrent_state")
    rows, token_indices = inputs.get("recurrent_rows"), inputs.get("token_indices")
    initial = inputs.get("initial_windows")
    blocks = conv_state.shape[0]
    row_elements = recurrent_count = source_stride = state_block_stride = 0
    if checkpoint is not None and pool is not None:
        blocks = min(blocks, pool.shape[0])
        row_elements = math.prod(pool.shape[1:])
        recurrent_count = checkpoint.shape[0]
        source_stride, state_block_stride = checkpoint.stride(0), pool.stride(0)
    initial_strides = (0, 0, 0) if initial is None else initial.stride()
    return {
        "offsets": inputs["offsets"].contiguous(),
        "state_indices": inputs["state_indices"].contiguous(),
        "raw_qkv": raw_qkv,
        "conv_state": conv_state,
        "cu_seqlens": inputs["cu_seqlens"].contiguous(),
        "recurrent_checkpoint": checkpoint,
        "recurrent_state": pool,
        "recurrent_rows": None if rows is None else rows.contiguous(),
        "token_indices": None if token_indices is None else token_indices.contiguous(),
        "initial_windows": initial,
        "positions": len(raw_qkv if token_indices is None else token_indices),
        "tokens": len(raw_qkv),
        "blocks": blocks,
        "recurrent_count": recurrent_count,
        "raw_token_stride": raw_qkv.stride(0),
        "raw_channel_stride": raw_qkv.stride(1),
        "conv_block_stride": conv_state.stride(0),
        "source_stride": source_stride,
        "state_block_stride": state_block_stride,
        "initial_row_stride": initial_strides[0],
        "WIDTH": conv_state.shape[1],
        "STATE_LEN": inputs["state_len"],
        "ROW_ELEMENTS": row_elements,
        "CONV_CHANNEL_STRIDE": conv_state.stride(1),
        "CONV_TOKEN_STRIDE": conv_state.stride(2),
        "INITIAL_CHANNEL_STRIDE": initial_strides[1],
        "INITIAL_TOKEN_STRIDE": initial_strides[2],
        "SKIP_SHORT_WINDOWS": inputs.get("skip_short_windows", False),
    }


def plan_store(**inputs: Unpack[CopyInputs]) -> Launch:
    """Return the launch that `store_cache_checkpoints` runs, without running it."""
    arguments = shared_arguments(**inputs)
    raw_qkv, conv_state = inputs["raw_qkv"], inputs["conv_state"]
    checkpoint, pool = inputs.get("recurrent_checkpoint"), inputs.get("recurrent_state")
    units = {"raw_token_stride": 1, "conv_block_stride": _unit(conv_state, conv_state.stride(0))}
    channels_adjacent = raw_qkv.stride(1) == 1
    if channels_adjacent:
        units["raw_token_stride"] = _unit(raw_qkv, raw_qkv.stride(0))
    state_tile, state_tiles = 1, 0
    if checkpoint is not None and pool is not None and arguments["ROW_ELEMENTS"]:
        narrower, wider = sorted((checkpoint.element_size(), pool.element_size()))
        state_tile = _state_tile(arguments["ROW_ELEMENTS"], wider, narrower)
        state_tiles = triton.cdiv(arguments["ROW_ELEMENTS"], state_tile)
        units["source_stride"] = _unit(checkpoint, checkpoint.stride(0))
        units["state_block_stride"] = _unit(pool, pool.stride(0))
    for name, unit in units.items():
        arguments[name] //= unit
    width, state_len = arguments["WIDTH"], arguments["STATE_LEN"]
    window_tile = _window_tile(width, conv_state.element_size())
    arguments |= {
        "CHANNELS_ADJACENT": channels_adjacent,
        "RAW_UNIT": units["raw_token_stride"],
        "CONV_UNIT": units["conv_block_stride"],
        "SOURCE_UNIT": units.get("source_stride", 1),
        "STATE_UNIT": units.get("state_block_stride", 1),
        "STATE_TILE": state_tile,
        "STATE_TILES": state_tiles,
        "WINDOW_TILE": window_tile,
        "WINDOW_ROUND": min(window_tile, THREADS),
    }
    tiles = state_tiles + state_len * triton.cdiv(width, window_tile)
    return Launch(store_cache_checkpoints_kernel, (tiles, len(inputs["offsets"])), arguments)


def store_cache_checkpoints(**inputs: Unpack[CopyInputs]) -> None:
    """Store every row's convolution window and recurrent state into its block, in one launch.

    Takes the keywords of `torch_copies.CopyInputs`, which the exporter has checked, and does what
    `torch_copies.store_loop` does, without reading a number back from the device. RuntimeError on
    CPU tensors without Triton's interpreter; ValueError beyond the limits of a grid.
    """
    plan_store(**inputs).run()
