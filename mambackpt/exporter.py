"""Write a step's checkpoints into the pools: check everything first, then copy with one launch.

R rows, S = state_len, width = channels of the convolution. A checkpoint is two things: the last S
raw inputs of the convolution before the cut, and the recurrent state there. Both or neither.
"""

import sys
from typing import Any, Literal

import torch

from mambackpt.errors import CheckpointTypeError, CheckpointValueError, checked_choice, checked_int
from mambackpt.kernels.torch_copies import CopyInputs, store_rows
from mambackpt.metadata import NULL_BLOCK_ID, MambaPrefillCheckpointMetadata

_BACKENDS = ("auto", "triton", "torch")
_SHORT_WINDOWS = ("error", "complete", "engine")
# Rows lie along axis 1 of the launch grid, and a CUDA grid holds no more there.
_MOST_ROWS_OF_A_LAUNCH = 65_535


class MambaPrefillCheckpointExporter:
    """Copies convolution windows and recurrent states to the blocks that were reserved for them.

    >>> from mambackpt.metadata import MambaPrefillCheckpointMetadata
    >>> none = torch.zeros(0, dtype=torch.int64)
    >>> checkpoint = MambaPrefillCheckpointMetadata(
    ...     checkpoint_offsets=torch.tensor([5]), state_indices=torch.tensor([2]),
    ...     offsets=[5], query_lens=[8], request_rows=none, block_cols=none)
    >>> conv_state = torch.full((3, 1, 3), float("nan"))  # [blocks, width, S]
    >>> MambaPrefillCheckpointExporter().export(
    ...     checkpoint, raw_qkv=torch.arange(1.0, 9.0).view(8, 1), conv_state=conv_state,
    ...     cu_seqlens=torch.tensor([0, 8]))
    'torch'
    >>> conv_state[2]
    tensor([[3., 4., 5.]])

    ``state_len`` is the convolution's width less one, in tokens; None takes all columns of
    ``conv_state``. Name and arguments of vllm 0.33.0's exporter.
    """

    def __init__(self, state_len: int | None = None) -> None:
        if state_len is not None:
            state_len = checked_int("state_len", state_len, least=0)
        self.state_len = state_len

    def export(
        self,
        checkpoint: MambaPrefillCheckpointMetadata,
        *,
        raw_qkv: torch.Tensor,
        conv_state: torch.Tensor,
        cu_seqlens: torch.Tensor,
        recurrent_checkpoint: torch.Tensor | None = None,
        recurrent_state: torch.Tensor | None = None,
        recurrent_rows: torch.Tensor | None = None,
        token_indices: torch.Tensor | None = None,
        initial_windows: torch.Tensor | None = None,
        short_windows: Literal["error", "complete", "engine"] = "error",
        backend: Literal["auto", "triton", "torch"] = "auto",
        validate: bool | None = None,
    ) -> str:
        """Store each row's checkpoint and return the backend that ran, "triton" or "torch".

        >>> from mambackpt.metadata import MambaPrefillCheckpointMetadata
        >>> none = torch.zeros(0, dtype=torch.int64)
        >>> checkpoint = MambaPrefillCheckpointMetadata(
        ...     checkpoint_offsets=torch.tensor([2]), state_indices=torch.tensor([1]),
        ...     offsets=[2], query_lens=[4], request_rows=none, block_cols=none)
        >>> conv_state, recurrent_state = torch.zeros(2, 1, 3), torch.zeros(2, 4)
        >>> MambaPrefillCheckpointExporter().export(
        ...     checkpoint, raw_qkv=torch.tensor([[1.0], [2.0], [3.0], [4.0]]),
        ...     conv_state=conv_state, cu_seqlens=torch.tensor([0, 4]),
        ...     recurrent_checkpoint=torch.ones(1, 4), recurrent_state=recurrent_state,
        ...     short_windows="complete", initial_windows=torch.tensor([[[7.0, 8.0, 9.0]]]))
        'torch'
        >>> conv_state[1].tolist(), recurrent_state[1].tolist()
        ([[9.0, 1.0, 2.0]], [1.0, 1.0, 1.0, 1.0])

        ``raw_qkv`` [tokens, width] holds the convolution's inputs, not its outputs; token t of row
        i is row ``cu_seqlens[i] + t`` (of ``token_indices``, where given). ``conv_state`` is
        [blocks, width, >= S] with any strides; columns from S on stay as they are. Row i's state
        is ``recurrent_checkpoint[i]``, or row ``recurrent_rows[i]`` of it, and goes to
        ``recurrent_state``; dtypes may differ. A layer with only a convolution passes neither.

        A cut closer than S to the query's start lacks part of its window. ``short_windows``:
        "error" refuses it, "complete" takes the rest from ``initial_windows`` [R, width, S] (the
        inputs before the query, oldest first, zeros at a sequence's start), "engine" stores the
        state without the window, as vllm 0.33.0 does: half a checkpoint, for study.

        ``backend`` "auto" runs the Triton kernel on CUDA tensors and torch on others. ``validate``
        also checks what only index values can show, which waits for a device: None means on the
        CPU only. Without it a row with a block or source out of range is skipped whole.
        Raises CheckpointValueError or CheckpointTypeError before anything is written.
        """
        if checkpoint is None:
            raise CheckpointTypeError(
                "checkpoint is None, which is how the builder says that no row has one; expected "
                "its metadata. Try exporting only where build() returns metadata."
            )
        checked_choice("backend", backend, _BACKENDS)
        checked_choice("short_windows", short_windows, _SHORT_WINDOWS)
        inputs: CopyInputs = {
            "offsets": checkpoint.checkpoint_offsets,
            "state_indices": checkpoint.state_indices,
            "raw_qkv": raw_qkv,
            "conv_state": conv_state,
            "cu_seqlens": cu_seqlens,
            "state_len": 0,
            "recurrent_checkpoint": recurrent_checkpoint,
            "recurrent_state": recurrent_state,
            "recurrent_rows": recurrent_rows,
            "token_indices": token_indices,
            "initial_windows": initial_windows if short_windows == "complete" else None,
            "skip_short_windows": short_windows == "engine",
        }
        on_cpu = _check_one_device(inputs).type == "cpu"
        inputs["state_len"] = _check_windows(inputs, self.state_len)
        _check_states(inputs)
        _check_rows(checkpoint, inputs, short_windows)
        chosen = _choose_backend(backend, raw_qkv.device, len(checkpoint.offsets))
        if on_cpu if validate is None else validate:
            _check_values(checkpoint, inputs)
        if not any(checkpoint.offsets):
            return chosen
        with torch.no_grad():
            if chosen == "triton":
                from mambackpt.kernels.store_checkpoints import store_cache_checkpoints

                store_cache_checkpoints(**inputs)
            else:
                store_rows(**inputs)
        return chosen


def _tensors(inputs: CopyInputs) -> dict[str, torch.Tensor]:
    """The tensors that were passed, by name; anything else that was passed is refused."""
    passed: dict[str, Any] = {
        name: value
        for name, value in inputs.items()
        if value is not None and name not in ("state_len", "skip_short_windows")
    }
    for name, value in passed.items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointTypeError(
                f"{name} is a {type(value).__name__}; expected a torch tensor. "
                f"Try torch.as_tensor({name})."
            )
    return passed


def _check_one_device(inputs: CopyInputs) -> torch.device:
    tensors = _tensors(inputs)
    home = tensors["raw_qkv"].device
    for name, tensor in tensors.items():
        if tensor.device != home:
            raise CheckpointValueError(
                f"{name} is on {tensor.device} and raw_qkv on {home}; expected one device. "
                f"Try {name}.to({str(home)!r})."
            )
    return home


def _check_windows(inputs: CopyInputs, state_len: int | None) -> int:
    """Check shapes and dtypes of the window's source and pool; return S."""
    raw_qkv, conv_state = inputs["raw_qkv"], inputs["conv_state"]
    if raw_qkv.ndim != 2:
        raise CheckpointValueError(
            f"raw_qkv has shape {tuple(raw_qkv.shape)}; expected [tokens, width], the inputs of "
            "the convolution. Try raw_qkv.flatten(1)."
        )
    if conv_state.ndim != 3 or conv_state.shape[1] != raw_qkv.shape[1]:
        raise CheckpointValueError(
            f"conv_state has shape {tuple(conv_state.shape)} and raw_qkv "
            f"{tuple(raw_qkv.shape)}; expected conv_state as [blocks, width, >= state_len] with "
            "raw_qkv's width. Try conv_state.transpose(1, 2) if tokens come before channels."
        )
    columns = conv_state.shape[2]
    S = columns if state_len is None else state_len
    if columns < S:
        raise CheckpointValueError(
            f"conv_state has {columns} columns and state_len is {S}; expected at least state_len. "
            f"Try MambaPrefillCheckpointExporter(state_len={columns})."
        )
    _check_convertible("raw_qkv", raw_qkv, "conv_state", conv_state)
    _check_no_shared_elements("conv_state", conv_state)
    initial = inputs.get("initial_windows")
    if initial is not None:
        _check_convertible("initial_windows", initial, "conv_state", conv_state)
    return S


def _check_states(inputs: CopyInputs) -> None:
    """Check shapes, dtypes and strides of the recurrent source and pool."""
    source, pool = inputs.get("recurrent_checkpoint"), inputs.get("recurrent_state")
    if source is None or pool is None:
        if source is not pool or inputs.get("recurrent_rows") is not None:
            alone = [n for n, t in _tensors(inputs).items() if n.startswith("recurrent_")]
            raise CheckpointValueError(
                f"{' and '.join(alone)} given alone; expected recurrent_checkpoint and "
                "recurrent_state together, or none for a layer with only a convolution. "
                "Try passing both."
            )
        return
    if source.ndim == 0 or pool.ndim == 0 or source.shape[1:] != pool.shape[1:]:
        raise CheckpointValueError(
            f"recurrent_checkpoint has shape {tuple(source.shape)} and recurrent_state "
            f"{tuple(pool.shape)}; expected equal shapes after the first axis. Try the recurrent "
            "component of the layer's states: some layers list several convolution states first."
        )
    _check_convertible("recurrent_checkpoint", source, "recurrent_state", pool)
    for name, tensor in (("recurrent_checkpoint", source), ("recurrent_state", pool)):
        dense = 1
        for size, stride in zip(tensor.shape[:0:-1], tensor.stride()[:0:-1], strict=True):
            if size > 1 and stride != dense and tensor.numel():
                raise CheckpointValueError(
                    f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; "
                    "expected each row dense (only the first stride is free). "
                    f"Try laying {name} out as [rows, ...] with contiguous rows."
                )
            dense *= size
    _check_no_shared_elements("recurrent_state", pool)


def _check_convertible(
    source_name: str, source: torch.Tensor, pool_name: str, pool: torch.Tensor
) -> None:
    both_float = source.dtype.is_floating_point and pool.dtype.is_floating_point
    if source.dtype != pool.dtype and not both_float:
        raise CheckpointTypeError(
            f"{source_name} is {source.dtype} and {pool_name} {pool.dtype}; expected equal dtypes "
            f"or two floating-point ones. Try {source_name}.to({pool.dtype})."
        )


def _check_no_shared_elements(name: str, pool: torch.Tensor) -> None:
    """Refuse a pool that overlaps itself: one store would change several blocks."""
    reach = 1  # elements up to which the axes seen so far extend
    for stride, size in sorted(zip(pool.stride(), pool.shape, strict=True)):
        if size > 1 and stride < reach and pool.numel():
            raise CheckpointValueError(
                f"{name} has shape {tuple(pool.shape)} and strides {pool.stride()}; expected every "
                f"element to have its own memory. Try {name}.contiguous()."
            )
        reach += (size - 1) * stride


def _check_rows(
    checkpoint: MambaPrefillCheckpointMetadata, inputs: CopyInputs, short_windows: str
) -> None:
    """Check the row counts, and each row's offset, from what the host knows."""
    R, S = len(checkpoint.offsets), inputs["state_len"]
    counts = {"state_indices": inputs["state_indices"], "checkpoint_offsets": inputs["offsets"]}
    rows = inputs.get("recurrent_rows")
    if rows is not None:
        counts["recurrent_rows"] = rows
    for name, tensor in counts.items():
        if tensor.ndim != 1 or len(tensor) != R:
            raise CheckpointValueError(
                f"{name} has shape {tuple(tensor.shape)} for {R} offsets; expected ({R},). "
                "Try metadata and buffers of the same step."
            )
    if len(checkpoint.query_lens) != R:
        raise CheckpointValueError(
            f"query_lens has {len(checkpoint.query_lens)} entries for {R} offsets; expected {R}. "
            "Try metadata as the builder made it."
        )
    cu_seqlens = inputs["cu_seqlens"]
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < R + 1:
        raise CheckpointValueError(
            f"cu_seqlens has shape {tuple(cu_seqlens.shape)} for {R} rows; expected at least "
            f"{R + 1} query starts. Try the starts of exactly these rows, and the last one's end."
        )
    counts["cu_seqlens"] = cu_seqlens
    token_indices = inputs.get("token_indices")
    if token_indices is not None:
        counts["token_indices"] = token_indices
        if token_indices.ndim != 1:
            raise CheckpointValueError(
                f"token_indices has shape {tuple(token_indices.shape)}; expected [tokens]. "
                "Try token_indices.flatten()."
            )
    for name, tensor in counts.items():
        if tensor.dtype not in (torch.int32, torch.int64):
            raise CheckpointTypeError(
                f"{name} is {tensor.dtype}; expected int32 or int64. Try {name}.to(torch.int64)."
            )
    source = inputs.get("recurrent_checkpoint")
    if source is not None and rows is None and len(source) < R:
        raise CheckpointValueError(
            f"recurrent_checkpoint has {len(source)} rows for {R} offsets; expected one per "
            "row. Try recurrent_rows to say which of its rows each request uses."
        )
    initial = inputs.get("initial_windows")
    shape = (R, inputs["raw_qkv"].shape[1], S)
    if initial is not None and tuple(initial.shape) != shape:
        raise CheckpointValueError(
            f"initial_windows has shape {tuple(initial.shape)}; expected {shape}: rows, width, "
            "state_len. Try the windows that these queries started from, oldest input first."
        )
    _check_offsets(checkpoint, S, short_windows, None if initial is not None else shape)


def _check_offsets(
    checkpoint: MambaPrefillCheckpointMetadata,
    S: int,
    short_windows: str,
    missing: tuple[int, int, int] | None,
) -> None:
    """Check where each row is cut; ``missing`` is the shape of initial windows that lack."""
    for row, (offset, query_len) in enumerate(
        zip(checkpoint.offsets, checkpoint.query_lens, strict=True)
    ):
        if not 0 <= offset <= query_len:
            raise CheckpointValueError(
                f"row {row} is cut at offset {offset} of a query of {query_len} tokens; expected "
                "an offset inside the query, or 0 for none. Try metadata of the same step."
            )
        if not 0 < offset < S or short_windows == "engine":
            continue
        if short_windows == "error":
            raise CheckpointValueError(
                f"row {row} is cut at offset {offset}, closer to its query's start than the "
                f"{S} inputs of a window; expected offset >= {S}, or nothing would be stored for "
                'the rest. Try short_windows="complete" with initial_windows.'
            )
        if missing is not None:
            raise CheckpointValueError(
                f'short_windows is "complete" and row {row}, cut at offset {offset}, needs '
                f"{S - offset} inputs from before its query; expected initial_windows of shape "
                f"{missing}. Try zeros where the query starts its sequence."
            )


def _check_values(checkpoint: MambaPrefillCheckpointMetadata, inputs: CopyInputs) -> None:
    """Check what only the index values show; waits for a device."""
    on_device = inputs["offsets"].tolist()
    if on_device != list(checkpoint.offsets):
        raise CheckpointValueError(
            f"checkpoint_offsets holds {on_device} and its host copy {list(checkpoint.offsets)}; "
            "expected the same. Try metadata as the builder made it."
        )
    starts = inputs["cu_seqlens"].tolist()
    token_indices = inputs.get("token_indices")
    tokens = "raw_qkv" if token_indices is None else "token_indices"
    token_count = len(inputs["raw_qkv"] if token_indices is None else token_indices)
    pools = {"conv_state": inputs["conv_state"], "recurrent_state": inputs.get("recurrent_state")}
    blocks = {name: len(pool) for name, pool in pools.items() if pool is not None}
    source, rows = inputs.get("recurrent_checkpoint"), inputs.get("recurrent_rows")
    sources = None if rows is None else rows.tolist()
    row_of_block: dict[int, int] = {}
    for row, (offset, block) in enumerate(
        zip(on_device, inputs["state_indices"].tolist(), strict=True)
    ):
        if not offset or block == NULL_BLOCK_ID:
            continue
        start, end = starts[row], starts[row + 1]
        if not 0 <= start <= start + offset <= end <= token_count:
            raise CheckpointValueError(
                f"row {row} is cut at offset {offset} of tokens {start} to {end} in cu_seqlens, "
                f"and {tokens} has {token_count}; expected the cut inside these tokens, and these "
                "inside the batch. Try the query starts of the same step and rows."
            )
        if token_indices is not None:
            _check_token_indices(row, token_indices[start : start + offset], inputs["raw_qkv"])
        for name, count in blocks.items():
            if not 0 <= block < count:
                raise CheckpointValueError(
                    f"row {row} goes to block {block}, but {name} has {count} blocks; "
                    "expected a block of the pool. Try this cache group's own table and pools."
                )
        if sources is not None and source is not None and not 0 <= sources[row] < len(source):
            raise CheckpointValueError(
                f"recurrent_rows[{row}] is {sources[row]}, but recurrent_checkpoint has "
                f"{len(source)} rows; expected one of them. Try the rows that this launch emitted."
            )
        if block in row_of_block:
            raise CheckpointValueError(
                f"rows {row_of_block[block]} and {row} both go to block {block}; expected one "
                "destination each. Try the block table of this step: two requests never share a "
                "block that is being written."
            )
        row_of_block[block] = row


def _check_token_indices(row: int, listed: torch.Tensor, raw_qkv: torch.Tensor) -> None:
    outside = listed[(listed < 0) | (listed >= len(raw_qkv))]
    if len(outside):
        raise CheckpointValueError(
            f"row {row} reads token {int(outside[0])} through token_indices, but raw_qkv has "
            f"{len(raw_qkv)} tokens; expected rows of raw_qkv. Try indices of the same step."
        )


def _choose_backend(backend: str, device: torch.device, rows: int) -> str:
    """Return "triton" or "torch", or say why the kernel cannot run here."""
    if backend == "torch" or (backend == "auto" and device.type != "cuda"):
        return "torch"
    try:
        import triton.language
        from triton.runtime.interpreter import InterpretedFunction

        # Triton's own functions were made interpretable, or not, when it was imported.
        interpreted = isinstance(triton.language.cdiv, InterpretedFunction)
    except ImportError as error:
        raise CheckpointValueError(
            f"triton cannot be imported on {sys.platform} ({error}); expected it for CUDA tensors "
            'and backend="triton". Try backend="torch".'
        ) from error
    if device.type != "cuda" and not interpreted:
        raise CheckpointValueError(
            f'backend is "triton" and the tensors are on {device.type}; expected a GPU, or '
            "TRITON_INTERPRET=1 set before triton was imported. Try setting it before Python "
            'starts, or backend="torch".'
        )
    if rows > _MOST_ROWS_OF_A_LAUNCH:
        raise CheckpointValueError(
            f"{rows} rows in one export; expected at most {_MOST_ROWS_OF_A_LAUNCH}, which is what "
            "one axis of a launch holds. Try splitting the batch."
        )
    return "triton"
