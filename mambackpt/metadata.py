"""What a backend needs to write the checkpoints of one step: offsets, and the blocks they go to.

The builder reads the engine's own objects by attribute; the light dataclasses below carry the same
names, so examples and tests need no engine. R is the number of request rows asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mambackpt.errors import CheckpointTypeError, CheckpointValueError, checked_int
from mambackpt.planner import compute_mamba_prefill_checkpoints

NULL_BLOCK_ID = 0


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The cache settings that decide about checkpoints, named as the engine names them.

    >>> CacheConfig(hash_block_size=16, cache_hit_alignment_tokens=16).mamba_cache_mode
    'align'

    Both sizes are in tokens; None means not yet resolved (the tiny cache of start-up profiling).
    """

    hash_block_size: int | None
    cache_hit_alignment_tokens: int | None
    mamba_cache_mode: str = "align"


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Speculative decoding, as far as checkpoints care: does a hit land one unit earlier?

    >>> SpeculativeConfig(drop_eagle_block=True).use_eagle_block_drop()
    True
    """

    drop_eagle_block: bool = True

    def use_eagle_block_drop(self) -> bool:
        """Return whether the last matched block is computed again."""
        return self.drop_eagle_block


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the builder reads of an engine's configuration.

    >>> EngineConfig(CacheConfig(16, 16)).speculative_config is None
    True
    """

    cache_config: CacheConfig
    speculative_config: SpeculativeConfig | None = None
    num_hash_lookahead_tokens: int = 0


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """One recurrent cache group: tokens per block, reserved blocks, the kernel's grid in tokens.

    >>> KVCacheSpec(block_size=1536, prefill_checkpoint_alignment=16).num_prefill_checkpoint_blocks
    1
    """

    block_size: int
    prefill_checkpoint_alignment: int | None
    num_prefill_checkpoint_blocks: int = 1


@dataclass(frozen=True, slots=True)
class CommonMetadata:
    """One step's batch of B requests, on the device and on the host.

    >>> m = CommonMetadata.from_lengths([40, 33], [40, 1], [[4, 5, 6], [7, 8, 9]])
    >>> m.query_start_loc_cpu.tolist(), m.seq_lens_cpu_upper_bound.tolist()
    ([0, 40, 41], [40, 33])

    ``query_start_loc`` [B+1] and ``block_table_tensor`` [B, columns] live on the device;
    ``query_start_loc_cpu`` [B+1] and ``seq_lens_cpu_upper_bound`` [B] on the host.
    """

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens_cpu_upper_bound: torch.Tensor | None
    block_table_tensor: torch.Tensor

    @classmethod
    def from_lengths(
        cls,
        seq_lens: Sequence[int],
        query_lens: Sequence[int],
        block_table: Sequence[Sequence[int]],
        *,
        device: str | torch.device = "cpu",
    ) -> "CommonMetadata":
        """Return the batch of these lengths (tokens) and this table (block ids), as int32."""
        starts = [0]
        for query_len in query_lens:
            starts.append(starts[-1] + query_len)
        on_host = torch.tensor(starts, dtype=torch.int32)
        return cls(
            query_start_loc=on_host.to(device, copy=True),
            query_start_loc_cpu=on_host,
            seq_lens_cpu_upper_bound=torch.tensor(seq_lens, dtype=torch.int32),
            block_table_tensor=torch.tensor(block_table, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True, eq=False)
class MambaPrefillCheckpointMetadata:
    """Where each request row's checkpoint is cut and which block receives it.

    >>> m = CommonMetadata.from_lengths([40, 33], [40, 1], [[4, 5, 6], [7, 8, 9]])
    >>> config = EngineConfig(CacheConfig(hash_block_size=16, cache_hit_alignment_tokens=16))
    >>> builder = MambaPrefillCheckpointBuilder(config, KVCacheSpec(16, 16))
    >>> checkpoint = builder.build(m, [0, 1])
    >>> checkpoint.offsets, checkpoint.state_indices.tolist()
    ([32, 0], [5, 0])

    ``checkpoint_offsets`` [R] int32 and ``state_indices`` [R] (the table's dtype) are on the
    device; offset 0 and block ``NULL_BLOCK_ID`` mean no checkpoint. ``offsets`` and ``query_lens``
    are host copies, so that a launch needs no synchronisation. ``request_rows`` and ``block_cols``
    [R] int64 are on the device: where in a block table the blocks were found; column -1 is none.
    """

    checkpoint_offsets: torch.Tensor
    state_indices: torch.Tensor
    offsets: list[int]
    query_lens: list[int]
    request_rows: torch.Tensor
    block_cols: torch.Tensor
    # Host copies of the two gather indices: a table's shape is checked without a synchronisation.
    _cells: list[tuple[int, int]] | None = field(default=None, repr=False)

    def regather_state_indices(self, block_table: torch.Tensor) -> "MambaPrefillCheckpointMetadata":
        """Return the same checkpoints with the blocks of another cache group's table.

        >>> m = CommonMetadata.from_lengths([40], [40], [[4, 5, 6]])
        >>> config = EngineConfig(CacheConfig(hash_block_size=16, cache_hit_alignment_tokens=16))
        >>> first = MambaPrefillCheckpointBuilder(config, KVCacheSpec(16, 16)).build(m, [0])
        >>> second = first.regather_state_indices(torch.tensor([[7, 8, 9]]))
        >>> first.state_indices.tolist(), second.state_indices.tolist()
        ([5], [8])

        Nothing is shared with the first object, which stays as it is. Raises CheckpointValueError
        for a table that is not [rows, columns], lies on another device, or lacks a row or column.
        """
        cells = self._cells
        if cells is None or self.block_cols.device.type == "cpu":
            rows, cols = self.request_rows.tolist(), self.block_cols.tolist()
            cells = list(zip(rows, cols, strict=True))
        _check_table(block_table, self.block_cols.device, cells)
        return replace(
            self,
            checkpoint_offsets=self.checkpoint_offsets.clone(),
            state_indices=_gather_blocks(block_table, self.request_rows, self.block_cols),
            offsets=list(self.offsets),
            query_lens=list(self.query_lens),
            request_rows=self.request_rows.clone(),
            block_cols=self.block_cols.clone(),
            _cells=list(cells),
        )


class MambaPrefillCheckpointBuilder:
    """Builds one step's checkpoint metadata from the engine's configuration and batch.

    >>> config = EngineConfig(CacheConfig(hash_block_size=1536, cache_hit_alignment_tokens=1536))
    >>> builder = MambaPrefillCheckpointBuilder(config, KVCacheSpec(1536, 16))
    >>> m = CommonMetadata.from_lengths([8000], [8000], [[0, 0, 0, 3, 9, 4]])
    >>> builder.build(m, [0]).state_indices
    tensor([9], dtype=torch.int32)

    ``vllm_config`` and ``kv_cache_spec`` are the engine's, or `EngineConfig` and `KVCacheSpec`.
    Attribute names of vllm 0.33.0.
    """

    def __init__(self, vllm_config: Any, kv_cache_spec: Any) -> None:
        self.vllm_config = vllm_config
        self.kv_cache_spec = kv_cache_spec

    def build(self, m: Any, request_rows: Sequence[int]) -> MambaPrefillCheckpointMetadata | None:
        """Return where these rows' checkpoints go, or None when there is nothing to write.

        >>> config = EngineConfig(CacheConfig(hash_block_size=16, cache_hit_alignment_tokens=16))
        >>> builder = MambaPrefillCheckpointBuilder(config, KVCacheSpec(16, 16))
        >>> m = CommonMetadata.from_lengths([40, 33], [40, 1], [[4, 5, 6], [7, 8, 9]])
        >>> builder.build(m, [1]) is None  # a decode row gains no block
        True

        ``m`` is the engine's batch metadata or `CommonMetadata`; ``request_rows`` are R rows of
        *this* step. None touches no device memory: the cache mode is not "align", no checkpoint
        block is reserved, the hash unit or hit alignment is unresolved, or no row has a checkpoint.
        Raises CheckpointValueError when the host has no sequence lengths, a row lies outside the
        batch, or a checkpoint's column lies outside the block table; CheckpointTypeError for rows
        that are not integers.
        """
        cache, spec = self.vllm_config.cache_config, self.kv_cache_spec
        H, U = cache.hash_block_size, cache.cache_hit_alignment_tokens
        if cache.mamba_cache_mode != "align" or not spec.num_prefill_checkpoint_blocks:
            return None
        if H is None or U is None:
            return None
        if m.seq_lens_cpu_upper_bound is None:
            raise CheckpointValueError(
                "seq_lens_cpu_upper_bound is None; expected the sequence lengths on the host, from "
                "which checkpoints are planned. Try filling it in the step's common metadata."
            )
        rows, seq_lens, query_lens = _lengths_of_rows(m, request_rows)
        lookahead = getattr(self.vllm_config, "num_hash_lookahead_tokens", 0) or 0
        speculative = self.vllm_config.speculative_config
        # A hash that looks ahead turns the block drop off.
        drop = not lookahead and speculative is not None and speculative.use_eagle_block_drop()
        offsets, cols = compute_mamba_prefill_checkpoints(
            seq_lens,
            query_lens,
            H,
            spec.block_size,
            spec.prefill_checkpoint_alignment,
            drop,
            U,
            lookahead,
        )
        if not any(offsets):
            return None
        device = m.query_start_loc.device
        cells = list(zip(rows, cols, strict=True))
        _check_table(m.block_table_tensor, device, cells)
        rows_on_device = _on_device(rows, torch.int64, device)
        cols_on_device = _on_device(cols, torch.int64, device)
        return MambaPrefillCheckpointMetadata(
            checkpoint_offsets=_on_device(offsets, torch.int32, device),
            state_indices=_gather_blocks(m.block_table_tensor, rows_on_device, cols_on_device),
            offsets=offsets,
            query_lens=query_lens,
            request_rows=rows_on_device,
            block_cols=cols_on_device,
            _cells=cells,
        )


def _lengths_of_rows(m: Any, request_rows: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """Pick rows, sequence lengths and query lengths of this step, on the host, as fresh lists."""
    starts = _on_host("query_start_loc_cpu", m.query_start_loc_cpu)
    seq = _on_host("seq_lens_cpu_upper_bound", m.seq_lens_cpu_upper_bound)
    requests = min(len(starts) - 1, len(seq))
    rows = [
        checked_int(f"request_rows[{i}]", row, least=0, unit="rows")
        for i, row in enumerate(request_rows)
    ]
    for i, row in enumerate(rows):
        if row >= requests:
            raise CheckpointValueError(
                f"request_rows[{i}] is {row}, but this step has {max(requests, 0)} requests "
                f"({len(starts)} query starts, {len(seq)} sequence lengths); expected rows of "
                "this step. Try the rows that the current batch assigns, not an earlier step's."
            )
        if starts[row + 1] < starts[row] or starts[row + 1] - starts[row] > seq[row]:
            raise CheckpointValueError(
                f"request row {row} computes tokens {starts[row]} to {starts[row + 1]} of the "
                f"batch and has seq_len {seq[row]}; expected 0 <= query_len <= seq_len. "
                "Try lengths and query starts of the same step."
            )
    return rows, [seq[row] for row in rows], [starts[row + 1] - starts[row] for row in rows]


def _on_host(name: str, values: Any) -> list[int]:
    """Read a short host tensor, array or list; refuse a device tensor, which would synchronise."""
    device = getattr(values, "device", None)
    if isinstance(device, torch.device) and device.type != "cpu":
        raise CheckpointValueError(
            f"{name} is on {device}; expected it on the CPU, where reading it costs no "
            "synchronisation. Try the host copy that the engine keeps beside it."
        )
    listed: list[int] = values.tolist() if hasattr(values, "tolist") else list(values)
    if listed and not isinstance(listed[0], int):
        raise CheckpointTypeError(
            f"{name} starts with {listed[0]!r}; expected whole numbers of tokens, one per request. "
            "Try a one-dimensional int32 tensor."
        )
    return listed


def _on_device(values: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copy a host list to the device; from pinned memory, so that nothing waits."""
    pinned = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)


def _check_table(
    block_table: torch.Tensor, device: torch.device, cells: Sequence[tuple[int, int]]
) -> None:
    """Refuse a table that lacks one of the cells; reads its shape only."""
    if block_table.ndim != 2:
        raise CheckpointValueError(
            f"the block table has shape {tuple(block_table.shape)}; expected [rows, columns]. "
            "Try this cache group's own table, unsqueezed if it holds one request."
        )
    if block_table.dtype not in (torch.int32, torch.int64):
        raise CheckpointTypeError(
            f"the block table is {block_table.dtype}; expected int32 or int64 block ids. "
            "Try block_table.to(torch.int32)."
        )
    if block_table.device != device:
        raise CheckpointValueError(
            f"the block table is on {block_table.device} and the batch on {device}; expected one "
            f"device. Try block_table.to({str(device)!r})."
        )
    height, width = block_table.shape
    for row, col in cells:
        if not 0 <= row < height:
            raise CheckpointValueError(
                f"request row {row} is outside a block table of {height} rows; expected one row "
                "per request of this step. Try the table of the same step."
            )
        if not -1 <= col < width:
            raise CheckpointValueError(
                f"request row {row} has its checkpoint in column {col}, but the block table is "
                f"{width} columns wide; expected a column below its width. Try a table sized for "
                "this group's block size and the longest sequence, without dividing it among ranks."
            )


def _gather_blocks(
    block_table: torch.Tensor, request_rows: torch.Tensor, block_cols: torch.Tensor
) -> torch.Tensor:
    """Look up the checkpoints' blocks in a checked table."""
    # Column -1 would wrap around to the running state's block: gather from 0, then mask.
    blocks = block_table[request_rows, block_cols.clamp(min=0)]
    return blocks.masked_fill_(block_cols < 0, NULL_BLOCK_ID)
