"""Store checkpoints with torch: the readable truth, the fast CPU path, and what a user would write.

Every ``store_*`` here takes the keywords of the Triton launchers, already checked by the exporter.
R rows are offered and K of them have a checkpoint; S is ``state_len``; width counts channels.
A row whose block is outside either pool, or whose source is out of range, is skipped whole.
Every index is a Python integer or int64: an int32 product passes 2^31 on real pools.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from shutil import which
from typing import Any, NamedTuple, NotRequired, Protocol, TypedDict, Unpack

import numpy as np
import torch

# A shorter copy runs on the calling thread. Many short copies that fork and join crawl as soon as
# another process holds a core.
_SERIAL_ELEMENTS = 32_767


class CopyInputs(TypedDict):
    """What every way of storing checkpoints takes.

    ``offsets`` [R]: where in its query a row is cut, 0 for no checkpoint. ``state_indices`` [R]:
    the block it goes to, 0 for none. ``raw_qkv`` [tokens, width]: inputs of the convolution; token
    t of row i is row ``cu_seqlens[i] + t``, or ``token_indices`` of that. ``conv_state``
    [blocks, width, >= S]; ``recurrent_state`` [blocks, ...]. ``recurrent_checkpoint`` [rows, ...]:
    row i's state is ``recurrent_rows[i]``, or i. ``initial_windows`` [R, width, S]: the raw inputs
    before each query, for cuts closer to its start than S; ``skip_short_windows`` leaves those out.
    """

    offsets: torch.Tensor
    state_indices: torch.Tensor
    raw_qkv: torch.Tensor
    conv_state: torch.Tensor
    cu_seqlens: torch.Tensor
    state_len: int
    recurrent_checkpoint: NotRequired[torch.Tensor | None]
    recurrent_state: NotRequired[torch.Tensor | None]
    recurrent_rows: NotRequired[torch.Tensor | None]
    token_indices: NotRequired[torch.Tensor | None]
    initial_windows: NotRequired[torch.Tensor | None]
    skip_short_windows: NotRequired[bool]


class RowCopy(NamedTuple):
    """One checkpoint to store, in host integers.

    ``tokens`` are rows of ``raw_qkv``, oldest first: S of them, fewer where the query has no more
    (the rest comes from ``initial_windows``), none where the window is skipped.
    """

    row: int
    block: int
    source: int
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """The K checkpoints of one export, also as int64 index tensors on the inputs' device.

    ``blocks`` and ``sources`` are [K]. ``window_blocks`` [W] and ``window_tokens`` [W, S] cover the
    windows that lie inside their query; ``partial`` lists the others.
    """

    rows: list[RowCopy]
    partial: list[RowCopy]
    blocks: torch.Tensor
    sources: torch.Tensor
    window_blocks: torch.Tensor
    window_tokens: torch.Tensor


class StoreCheckpoints(Protocol):
    """One way of storing checkpoints; ``plan`` saves it from reading the index tensors again."""

    __name__: str

    def __call__(self, *, plan: CopyPlan | None = None, **inputs: Unpack[CopyInputs]) -> None:
        """Write the checkpoints."""


def read_rows(**inputs: Unpack[CopyInputs]) -> list[RowCopy]:
    """Return the checkpoints that these inputs ask for.

    >>> one = torch.tensor([1])
    >>> read_rows(offsets=one * 3, state_indices=one * 2, raw_qkv=torch.zeros(4, 1),
    ...           conv_state=torch.zeros(3, 1, 2), cu_seqlens=torch.tensor([0, 4]), state_len=2)
    [RowCopy(row=0, block=2, source=0, tokens=[1, 2])]

    Reads the index tensors, so it waits for a device.
    """
    S, skip_short = inputs["state_len"], inputs.get("skip_short_windows", False)
    starts, remap = inputs["cu_seqlens"].tolist(), inputs.get("token_indices")
    token_count = inputs["raw_qkv"].shape[0]
    listed = token_count if remap is None else remap.shape[0]
    blocks, pool, checkpoint = inputs["conv_state"].shape[0], *_recurrent(inputs)
    if pool is not None:
        blocks = min(blocks, pool.shape[0])
    source_count = None if checkpoint is None else checkpoint.shape[0]
    indices = inputs.get("recurrent_rows")
    sources = None if indices is None else indices.tolist()
    complete = inputs.get("initial_windows") is not None
    copies = []
    pairs = zip(inputs["offsets"].tolist(), inputs["state_indices"].tolist(), strict=True)
    for row, (offset, block) in enumerate(pairs):
        if offset <= 0 or not 0 < block < blocks:
            continue
        start, end = starts[row], min(starts[row + 1], listed)
        if start < 0 or start + offset > end:
            continue
        source = row if sources is None else sources[row]
        if source_count is not None and not 0 <= source < source_count:
            continue
        first = max(0, offset - S)
        if offset < S and skip_short:
            first = offset
        elif offset < S and not complete:
            continue
        copies.append(RowCopy(row, block, source, list(range(start + first, start + offset))))
    if remap is None:  # tokens of a query inside the batch are
        return copies
    listed_tokens = torch.tensor([t for copy in copies for t in copy.tokens], dtype=torch.int64)
    actual = iter(remap[listed_tokens.to(remap.device)].tolist())
    for copy in copies:
        copy.tokens[:] = [next(actual) for _ in copy.tokens]
    return [copy for copy in copies if all(0 <= token < token_count for token in copy.tokens)]


def plan_copies(**inputs: Unpack[CopyInputs]) -> CopyPlan:
    """Return the checkpoints of one export with their index tensors.

    A benchmark makes the plan once and times the copies alone. Waits for a device.
    """
    rows, S = read_rows(**inputs), inputs["state_len"]
    whole = [copy for copy in rows if len(copy.tokens) == S]
    device = inputs["raw_qkv"].device
    tokens = [token for copy in whole for token in copy.tokens]
    return CopyPlan(
        rows=rows,
        partial=[copy for copy in rows if 0 < len(copy.tokens) < S],
        blocks=_index([copy.block for copy in rows], device),
        sources=_index([copy.source for copy in rows], device),
        window_blocks=_index([copy.block for copy in whole], device),
        window_tokens=_index(tokens, device).view(len(whole), S),
    )


def store_loop(*, plan: CopyPlan | None = None, **inputs: Unpack[CopyInputs]) -> None:
    """Store checkpoints one at a time: the truth, and the baseline of a loop of row copies.

    >>> pool = torch.full((3, 1, 3), float("nan"))
    >>> store_loop(offsets=torch.tensor([5]), state_indices=torch.tensor([2]),
    ...            raw_qkv=torch.arange(1.0, 9.0).view(8, 1), conv_state=pool,
    ...            cu_seqlens=torch.tensor([0, 8]), state_len=3)
    >>> pool[:, 0].tolist()
    [[nan, nan, nan], [nan, nan, nan], [3.0, 4.0, 5.0]]
    """
    pool, checkpoint = _recurrent(inputs)
    for copy in read_rows(**inputs) if plan is None else plan.rows:
        _store_window(copy, inputs)
        if pool is not None and checkpoint is not None:
            pool[copy.block].copy_(checkpoint[copy.source])


def store_rows(*, plan: CopyPlan | None = None, **inputs: Unpack[CopyInputs]) -> None:
    """Store checkpoints at the speed of memory on a CPU: what the exporter's torch backend runs.

    Windows move token by token, by numpy where dtypes are equal: calling torch for 72 KiB takes a
    third of the time of copying them. Recurrent rows whose sources follow each other move in one
    16-byte-wide index copy; rows that need converting, or lie off that grid, move one by one.
    """
    rows = read_rows(**inputs) if plan is None else plan.rows
    if inputs["state_len"]:
        _store_windows(rows, inputs)
    pool, checkpoint = _recurrent(inputs)
    if pool is None or checkpoint is None:
        return
    wide_pool = _wide_rows(pool) if pool.dtype == checkpoint.dtype else None
    wide_checkpoint = _wide_rows(checkpoint)
    for run in _consecutive_sources(rows):
        if len(run) == 1 or wide_pool is None or wide_checkpoint is None:
            # Converting all rows at once would fill a temporary, page by page, at every call.
            for copy in run:
                pool[copy.block].copy_(checkpoint[copy.source])
        else:
            blocks = _index([copy.block for copy in run], pool.device)
            wide_pool.index_copy_(0, blocks, wide_checkpoint[run[0].source :][: len(run)])


def store_index_copy(*, plan: CopyPlan | None = None, **inputs: Unpack[CopyInputs]) -> None:
    """Store checkpoints with ``Tensor.index_copy_``."""
    plan, windows, states = _gathered(plan, inputs)
    S, pool = inputs["state_len"], inputs.get("recurrent_state")
    inputs["conv_state"][:, :, :S].index_copy_(0, plan.window_blocks, windows)
    if pool is not None and states is not None:
        pool.index_copy_(0, plan.blocks, states)


def store_indexing(*, plan: CopyPlan | None = None, **inputs: Unpack[CopyInputs]) -> None:
    """Store checkpoints with advanced indexing: ``pool[blocks] = rows``."""
    plan, windows, states = _gathered(plan, inputs)
    S, pool = inputs["state_len"], inputs.get("recurrent_state")
    inputs["conv_state"][:, :, :S][plan.window_blocks] = windows
    if pool is not None and states is not None:
        pool[plan.blocks] = states


def store_index_select(*, plan: CopyPlan | None = None, **inputs: Unpack[CopyInputs]) -> None:
    """Store checkpoints by collecting them with ``index_select``, then ``copy_`` to each block."""
    plan = plan_copies(**inputs) if plan is None else plan
    raw_qkv, S = inputs["raw_qkv"], inputs["state_len"]
    windows = torch.index_select(raw_qkv, 0, plan.window_tokens.flatten())
    windows = windows.view(*plan.window_tokens.shape, raw_qkv.shape[1]).transpose(1, 2)
    whole = (copy for copy in plan.rows if len(copy.tokens) == S)
    for copy, window in zip(whole, windows, strict=True):
        inputs["conv_state"][copy.block, :, :S].copy_(window)
    for copy in plan.partial:
        _store_window(copy, inputs)
    pool, checkpoint = _recurrent(inputs)
    if pool is not None and checkpoint is not None:
        states = torch.index_select(checkpoint, 0, plan.sources)
        for copy, state in zip(plan.rows, states, strict=True):
            pool[copy.block].copy_(state)


def store_compiled(*, plan: CopyPlan | None = None, **inputs: Unpack[CopyInputs]) -> None:
    """Store checkpoints with `torch.compile` of the indexing form; needs a compiler."""
    plan = plan_copies(**inputs) if plan is None else plan
    for copy in plan.partial:
        _store_window(copy, inputs)
    pool, checkpoint = _recurrent(inputs)
    _compiled_indexing()(
        inputs["conv_state"][:, :, : inputs["state_len"]],
        inputs["raw_qkv"],
        plan.window_blocks,
        plan.window_tokens,
        pool,
        None if checkpoint is None else _source_rows(plan, checkpoint),
        plan.blocks,
    )


def has_compiler(device: torch.device) -> bool:
    """Return whether `store_compiled` can run for tensors on this device."""
    return any(
        which(name)
        for name in (("g++", "clang++") if device.type == "cpu" else ("gcc", "cc", "clang"))
    )


# What a user would write instead of the kernel, by the name that tables and figures print.
BASELINES: dict[str, StoreCheckpoints] = {
    "index_copy_": store_index_copy,
    "pool[blocks] = rows": store_indexing,
    "index_select + copy_": store_index_select,
    "loop of copy_": store_loop,
    "torch.compile(indexing)": store_compiled,
}


def _recurrent(inputs: CopyInputs) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The recurrent pool and its source; both None in a layer that has only a convolution."""
    return inputs.get("recurrent_state"), inputs.get("recurrent_checkpoint")


def _index(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def _store_window(copy: RowCopy, inputs: CopyInputs) -> None:
    """Write one window, oldest input first, its left part from before the query where needed."""
    window = inputs["conv_state"][copy.block, :, : inputs["state_len"]]
    before = inputs["state_len"] - len(copy.tokens)
    initial = inputs.get("initial_windows")
    if copy.tokens and before and initial is not None:
        window[:, :before].copy_(initial[copy.row, :, len(copy.tokens) :])
    for column, token in enumerate(copy.tokens, start=before):
        window[:, column].copy_(inputs["raw_qkv"][token])


def _store_windows(rows: list[RowCopy], inputs: CopyInputs) -> None:
    """Write all windows, on the calling thread."""
    S, width, step = inputs["state_len"], inputs["raw_qkv"].shape[1], _SERIAL_ELEMENTS
    windows: Any = inputs["conv_state"][:, :, :S].transpose(1, 2)  # channels last, as inputs lie
    tokens: Any = inputs["raw_qkv"]
    if windows.dtype == tokens.dtype and tokens.device.type == "cpu":
        windows, tokens, step = _bits(windows), _bits(tokens), max(width, 1)
    for copy in rows:
        if len(copy.tokens) == S:
            for column, token in enumerate(copy.tokens):
                for first in range(0, width, step):
                    part = slice(first, first + step)
                    windows[copy.block, column, part] = tokens[token, part]
        elif copy.tokens:
            _store_window(copy, inputs)


def _bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The tensor's memory as integers of the same size: numpy knows no bfloat16."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().view(whole[tensor.element_size()]).numpy()


def _consecutive_sources(rows: list[RowCopy]) -> Iterator[list[RowCopy]]:
    """Split rows into runs whose recurrent sources follow each other."""
    run: list[RowCopy] = []
    for copy in rows:
        if run and copy.source != run[-1].source + 1:
            yield run
            run = []
        run.append(copy)
    if run:
        yield run


def _wide_rows(pool: torch.Tensor) -> torch.Tensor | None:
    """View dense rows as 16-byte elements, whose bits a copy keeps; None where they do not fit."""
    width = pool[0].numel() if len(pool) else 0
    sizes = (width, pool.stride(0), pool.storage_offset())
    if not width or any(size * pool.element_size() % 16 for size in sizes):
        return None
    return pool.view(len(pool), width).view(torch.complex128)


def _source_rows(plan: CopyPlan, checkpoint: torch.Tensor) -> torch.Tensor:
    """The recurrent rows to store, gathered only where they are not rows 0 .. K-1 already."""
    if [copy.source for copy in plan.rows] == list(range(len(plan.rows))):
        return checkpoint[: len(plan.rows)]
    return checkpoint[plan.sources]


def _gathered(
    plan: CopyPlan | None, inputs: CopyInputs
) -> tuple[CopyPlan, torch.Tensor, torch.Tensor | None]:
    """Plan, windows [W, width, S] and states [K, ...] in the pools' dtypes; stores partial ones."""
    plan = plan_copies(**inputs) if plan is None else plan
    for copy in plan.partial:
        _store_window(copy, inputs)
    pool, checkpoint = _recurrent(inputs)
    windows = inputs["raw_qkv"][plan.window_tokens].transpose(1, 2).to(inputs["conv_state"].dtype)
    if pool is None or checkpoint is None:
        return plan, windows, None
    return plan, windows, _source_rows(plan, checkpoint).to(pool.dtype)


def _indexing(
    windows: torch.Tensor,
    raw_qkv: torch.Tensor,
    window_blocks: torch.Tensor,
    window_tokens: torch.Tensor,
    pool: torch.Tensor | None,
    states: torch.Tensor | None,
    blocks: torch.Tensor,
) -> None:
    windows[window_blocks] = raw_qkv[window_tokens].transpose(1, 2).to(windows.dtype)
    if pool is not None and states is not None:
        pool[blocks] = states.to(pool.dtype)


@cache
def _compiled_indexing() -> Callable[..., None]:
    compiled: Callable[..., None] = torch.compile(_indexing)
    return compiled
