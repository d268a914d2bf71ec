"""Where a prefill checkpoint lands, and why it sometimes does not.

L seq_len, q query_len, H hash unit, M Mamba block, A checkpoint alignment, U cache-hit alignment.
The three engine functions keep the names and signatures of vllm 0.33.0; `explain` is the kit's.
Scheduler, allocator and backend must all ask `is_mamba_prefill_checkpoint_valid`: a block reserved
and keyed on one answer but written on another serves a state that nobody computed.
"""

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import lcm
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from mambackpt.errors import CheckpointTypeError, CheckpointValueError, checked_choice, checked_int
from mambackpt.geometry import CacheGeometry

if TYPE_CHECKING:
    import torch

Int64Array: TypeAlias = NDArray[np.int64]

_PLAIN = (list, tuple)
# Rows from which numpy's fixed cost is repaid (`bench planner`); a list must be converted first.
_VECTORISE_FROM = 96
_VECTORISE_LISTS_FROM = 256
_ROWS_AT_ONCE = 4096  # temporaries of 32 KiB stay in the cache


class Reason(Enum):
    """The first condition that a row fails, in the order in which the engine asks them."""

    ACCEPTED = 0
    CANNOT_EXPORT = 1
    START_OFF_HASH_GRID = 2
    COLUMN_TAKEN = 3
    NO_BLOCK_GAINED = 4
    NOT_INSIDE_QUERY = 5
    OFF_KERNEL_GRID = 6


@dataclass(frozen=True, slots=True)
class Decision:
    """What the planner decided for one row, and why.

    ``position`` is the token count that was asked for, also where it is declined; ``offset`` is
    its distance from the query's start and ``column`` its place in the block-table row (0 and -1
    when declined); ``candidate_column`` is the column a checkpoint of this query would use.
    """

    position: int
    offset: int
    column: int
    candidate_column: int
    reason: Reason
    sentence: str


def get_mamba_prefill_checkpoint_position(
    num_tokens: int,
    hash_block_size: int,
    drop_eagle_block: bool,
    num_hash_lookahead_tokens: int = 0,
) -> int:
    """Return the last position at which a later request with the same tokens could resume.

    >>> get_mamba_prefill_checkpoint_position(8000, 1536, False)
    7680
    >>> get_mamba_prefill_checkpoint_position(8192, 1024, True)
    7168

    Tokens in, tokens out; 0 means nowhere. One token is always left to recompute, for its logits.
    The planner passes the cache-hit alignment as ``hash_block_size``. Source: vllm 0.32 and later.
    """
    unit = hash_block_size
    if unit <= 0:
        checked_int("hash_block_size", unit)
    if drop_eagle_block:
        position = num_tokens // unit * unit - unit
    else:
        position = (num_tokens - max(1, num_hash_lookahead_tokens)) // unit * unit
    return max(position, 0)


def _position_before_0_32(num_tokens: int, unit: int, drop_eagle_block: bool, _: int = 0) -> int:
    """The earlier formula: it dropped two units from a prompt that ends on a boundary."""
    position = (num_tokens - 1) // unit * unit - (unit if drop_eagle_block else 0)
    return max(position, 0)


POSITION_FORMULAS = {
    "current": get_mamba_prefill_checkpoint_position,
    "before-0.32": _position_before_0_32,
}


def get_mamba_prefill_checkpoint_reason(
    query_start: int,
    query_end: int,
    checkpoint_position: int,
    hash_block_size: int,
    mamba_block_size: int,
    checkpoint_alignment: int | None,
) -> Reason:
    """Return the first condition that a checkpoint at this position fails, or ACCEPTED.

    >>> get_mamba_prefill_checkpoint_reason(1984, 3602, 3600, 16, 1600, 16)
    <Reason.COLUMN_TAKEN: 3>

    All arguments are in tokens. Raises CheckpointValueError for an alignment that is not positive
    (None means that the kernel cannot export). Conditions and order of vllm 0.33.0.
    """
    if checkpoint_alignment is None:
        return Reason.CANNOT_EXPORT
    if checkpoint_alignment <= 0 or hash_block_size <= 0 or mamba_block_size <= 0:
        checked_int("checkpoint_alignment", checkpoint_alignment)
        checked_int("hash_block_size", hash_block_size)
        checked_int("mamba_block_size", mamba_block_size)
    if query_start % hash_block_size:
        return Reason.START_OFF_HASH_GRID
    # The checkpoint takes the column before the running state's. The state that the query starts
    # from is read from an earlier column, which must not be overwritten while it is still needed.
    checkpoint_column = -(-query_end // mamba_block_size) - 2
    initial_column = (query_start - 1) // mamba_block_size
    if checkpoint_column <= initial_column:
        return Reason.COLUMN_TAKEN
    if query_start + hash_block_size > checkpoint_position:
        return Reason.NO_BLOCK_GAINED
    if not query_start < checkpoint_position < query_end:
        return Reason.NOT_INSIDE_QUERY
    if (checkpoint_position - query_start) % checkpoint_alignment:
        return Reason.OFF_KERNEL_GRID
    return Reason.ACCEPTED


def is_mamba_prefill_checkpoint_valid(
    query_start: int,
    query_end: int,
    checkpoint_position: int,
    hash_block_size: int,
    mamba_block_size: int,
    checkpoint_alignment: int | None,
) -> bool:
    """Return whether the backend can write a checkpoint at this position of this query.

    >>> is_mamba_prefill_checkpoint_valid(0, 8000, 7680, 1536, 1536, 16)
    True

    All arguments are in tokens. Raises CheckpointValueError for an alignment that is not positive.
    """
    reason = get_mamba_prefill_checkpoint_reason(
        query_start,
        query_end,
        checkpoint_position,
        hash_block_size,
        mamba_block_size,
        checkpoint_alignment,
    )
    return reason is Reason.ACCEPTED


# (H, M, A, U, spare, dropped) of one call: a position leaves ``spare`` tokens to recompute, is
# rounded to U, and moved back by ``dropped``. A plain tuple: a named one costs a short call 10 %.
_Grids: TypeAlias = tuple[int, int, int | None, int, int, int]
# What `CacheGeometry` has accepted: asking it again would take as long as planning eight rows.
_VOUCHED: dict[tuple[Any, ...], _Grids] = {}
_ALIGNMENTS = (int, type(None))


def _checked_grids(
    H: int, M: int, A: int | None, U: int, drop_eagle_block: bool, lookahead: int
) -> _Grids:
    g = CacheGeometry(H, M, A, U, drop_eagle_block, lookahead)
    spare = 0 if drop_eagle_block else g.num_hash_lookahead_tokens or 1
    grids = g.H, g.M, g.A, g.U, spare, g.U if drop_eagle_block else 0
    if len(_VOUCHED) == 64:
        _VOUCHED.clear()
    _VOUCHED[g.H, g.M, g.A, g.U, bool(drop_eagle_block), g.num_hash_lookahead_tokens] = grids
    return grids


RowLengths: TypeAlias = "Sequence[int] | NDArray[np.integer[Any]] | torch.Tensor"


@overload
def compute_mamba_prefill_checkpoints(
    seq_lens: "list[int] | tuple[int, ...]",
    query_lens: "list[int] | tuple[int, ...]",
    hash_block_size: int,
    mamba_block_size: int,
    checkpoint_alignment: int | None,
    drop_eagle_block: bool,
    cache_hit_alignment_tokens: int,
    num_hash_lookahead_tokens: int = 0,
) -> tuple[list[int], list[int]]: ...
@overload
def compute_mamba_prefill_checkpoints(
    seq_lens: "NDArray[np.integer[Any]] | torch.Tensor",
    query_lens: RowLengths,
    hash_block_size: int,
    mamba_block_size: int,
    checkpoint_alignment: int | None,
    drop_eagle_block: bool,
    cache_hit_alignment_tokens: int,
    num_hash_lookahead_tokens: int = 0,
) -> tuple[Int64Array, Int64Array]: ...
def compute_mamba_prefill_checkpoints(
    seq_lens: RowLengths,
    query_lens: RowLengths,
    hash_block_size: int,
    mamba_block_size: int,
    checkpoint_alignment: int | None,
    drop_eagle_block: bool,
    cache_hit_alignment_tokens: int,
    num_hash_lookahead_tokens: int = 0,
) -> tuple[list[int], list[int]] | tuple[Int64Array, Int64Array]:
    """Return each row's checkpoint: its offset in the query and its block-table column.

    >>> compute_mamba_prefill_checkpoints([8000, 1500], [8000, 1500], 1536, 1536, 16, False, 1536)
    ([7680, 0], [4, -1])

    Rows are R lists, tuples, or one-dimensional integer arrays or CPU tensors; lists and tuples
    give lists, anything else gives two int64 arrays of shape [R]. A row without a checkpoint has
    offset 0 and column -1. Sizes are in tokens. The position follows from ``seq_lens`` and
    ``cache_hit_alignment_tokens``. The column is the one before the running state's, which is not
    position / block - 1: 3602 tokens in blocks of 1600 with the drop keep 1600 in column 1.
    Raises CheckpointTypeError or CheckpointValueError for sizes that `CacheGeometry` refuses, for
    row counts that disagree, and for a query that is negative or longer than its sequence.
    """
    H, M, A = hash_block_size, mamba_block_size, checkpoint_alignment
    U, drop, lookahead = cache_hit_alignment_tokens, drop_eagle_block, num_hash_lookahead_tokens
    # What was accepted before is looked up; True and 1.0 would find what 1 left there.
    exact = type(H) is type(M) is type(U) is type(lookahead) is int and type(A) in _ALIGNMENTS
    grids = _VOUCHED.get((H, M, A, U, drop, lookahead)) if exact else None
    if grids is None:
        grids = _checked_grids(H, M, A, U, drop, lookahead)
    if isinstance(seq_lens, _PLAIN) and isinstance(query_lens, _PLAIN):
        num_rows = len(seq_lens)
        if num_rows != len(query_lens):
            raise _row_counts_disagree(seq_lens, query_lens)
        if num_rows < _VECTORISE_LISTS_FROM or not _pays_to_vectorise(query_lens, H):
            listed = _plan_loop(seq_lens, query_lens, grids)
            if listed is not None:
                return listed
        seq, query = _as_int64("seq_lens", seq_lens), _as_int64("query_lens", query_lens)
        offsets, columns = _plan_arrays(seq, query, grids)
        return offsets.tolist(), columns.tolist()
    seq, query = _as_int64("seq_lens", seq_lens), _as_int64("query_lens", query_lens)
    if len(seq) != len(query):
        raise _row_counts_disagree(seq, query)
    if len(seq) >= _VECTORISE_FROM:
        return _plan_arrays(seq, query, grids)
    listed = _plan_loop(seq.tolist(), query.tolist(), grids)
    assert listed is not None  # tolist() gives ints
    return np.array(listed[0], np.int64), np.array(listed[1], np.int64)


def _pays_to_vectorise(query_lens: Sequence[int], H: int) -> bool:
    """Whether numpy's fixed cost is repaid: a row that gains no block costs the loop little."""
    num_rows = len(query_lens)
    sampled = query_lens[:: num_rows // 8]
    gaining = sum([length > H for length in sampled]) / len(sampled)
    return num_rows * (0.25 + gaining) > 120  # in prefill rows; measured by `bench planner`


def _plan_loop(
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    grids: _Grids,
) -> tuple[list[int], list[int]] | None:
    """Position and conditions, one row at a time, without a call: what small batches run.

    None where a checkpoint would follow from a length that is no int: convert it, or refuse it.
    """
    H, M, A, U, spare, dropped = grids
    offsets: list[int] = []
    columns: list[int] = []
    for seq_len, query_len in zip(seq_lens, query_lens):  # noqa: B905 - the caller counted them
        start = seq_len - query_len
        if query_len < 0 or start < 0:
            raise _query_outside_sequence(len(offsets), seq_len, query_len)
        if query_len > H and A is not None and not start % H:
            offset = (seq_len - spare) // U * U - dropped - start
            if offset >= H and not offset % A:
                column = (seq_len - 1) // M - 1
                if column * M >= start:
                    if type(offset) is not int:
                        return None
                    offsets.append(offset)
                    columns.append(column)
                    continue
        offsets.append(0)
        columns.append(-1)
    return offsets, columns


def _plan_arrays(
    seq: Int64Array,
    query: Int64Array,
    grids: _Grids,
) -> tuple[Int64Array, Int64Array]:
    """Position and conditions on whole columns of rows: what large batches run."""
    offsets = np.zeros(len(seq), np.int64)
    columns = np.full(len(seq), -1, np.int64)
    for low in range(0, len(seq), _ROWS_AT_ONCE):
        part = slice(low, low + _ROWS_AT_ONCE)
        start = seq[part] - query[part]
        if min(query[part].min(), start.min()) < 0:
            row = low + int(np.flatnonzero((query[part] < 0) | (start < 0))[0])
            raise _query_outside_sequence(row, int(seq[row]), int(query[row]))
        if grids[2] is not None:
            _plan_part(seq[part], query[part], start, offsets[part], columns[part], grids)
    return offsets, columns


def _plan_part(
    seq: Int64Array,
    query: Int64Array,
    start: Int64Array,
    offsets: Int64Array,
    columns: Int64Array,
    grids: _Grids,
) -> None:
    """Fill ``offsets`` and ``columns``, which hold "no checkpoint", where a row has one."""
    H, M, A, U, spare, dropped = grids
    gaining = query > H  # a decode row gains no block; most batches hold little else
    rows = np.flatnonzero(gaining) if 2 * np.count_nonzero(gaining) < len(seq) else None
    if rows is not None:
        seq, start = seq[rows], start[rows]
    # The position is a multiple of H, so "starts on the hash grid" is "offset on the hash grid",
    # and both grids together are the grid of their least common multiple.
    grid = lcm(H, A or 1)
    offset = (seq - spare) // U * U - (start + dropped)
    column = (seq - 1) // M - 1
    accepted = (offset // grid * grid == offset) & (offset >= H) & (column * M >= start)
    if rows is None:
        np.multiply(offset, accepted, out=offsets)
        np.copyto(columns, column, where=accepted)
    else:
        kept = rows[accepted]
        offsets[kept] = offset[accepted]
        columns[kept] = column[accepted]


def _as_int64(name: str, lengths: RowLengths) -> Int64Array:
    """Read row lengths of any accepted kind as a one-dimensional int64 array."""
    torch = sys.modules.get("torch")  # a tensor can only come from a torch that is loaded
    if torch is not None and isinstance(lengths, torch.Tensor):
        if lengths.device.type != "cpu":
            raise CheckpointTypeError(
                f"{name} is a tensor on {lengths.device}; expected one on the CPU, because reading "
                f"it would wait for the device. Try the host's copy, or {name}.cpu()."
            )
        lengths = lengths.detach().numpy()
    if isinstance(lengths, np.ndarray):
        if lengths.dtype.kind not in "iu" or lengths.ndim != 1:
            raise CheckpointTypeError(
                f"{name} is an array of {lengths.dtype} with shape {lengths.shape}; expected "
                f"integers in one dimension. Try {name}.astype(numpy.int64).ravel()."
            )
        if lengths.dtype == np.uint64 and lengths.size and lengths.max() > np.iinfo(np.int64).max:
            raise CheckpointValueError(
                f"{name} holds {lengths.max()}; expected at most 2**63 - 1 tokens. "
                "Try lengths that a sequence can have."
            )
        return lengths.astype(np.int64, copy=False)
    if not isinstance(lengths, Sequence) or isinstance(lengths, str | bytes):
        raise CheckpointTypeError(
            f"{name} is a {type(lengths).__name__}; expected a list, a tuple, a one-dimensional "
            f"integer array or a CPU tensor. Try list({name})."
        )
    try:
        return np.frombuffer(array("q", lengths), np.int64)  # refuses floats, unlike np.array
    except (TypeError, OverflowError) as error:
        raise CheckpointTypeError(
            f"{name} holds a value that is no row length ({error}); expected whole numbers of "
            f"tokens. Try [int(n) for n in {name}]."
        ) from error


def _row_counts_disagree(seq_lens: Any, query_lens: Any) -> CheckpointValueError:
    return CheckpointValueError(
        f"seq_lens has {len(seq_lens)} rows and query_lens has {len(query_lens)}; expected one of "
        "each per request. Try the lengths of the same step."
    )


def _query_outside_sequence(row: int, seq_len: int, query_len: int) -> CheckpointValueError:
    return CheckpointValueError(
        f"row {row} has query_len {query_len} and seq_len {seq_len}; expected "
        "0 <= query_len <= seq_len. Try seq_len = computed + scheduled tokens."
    )


def explain(
    seq_lens: RowLengths,
    query_lens: RowLengths,
    geometry: CacheGeometry,
    *,
    formula: str = "current",
) -> list[Decision]:
    """Return one `Decision` per row: where its checkpoint lands, or which condition it fails.

    >>> geometry = CacheGeometry(16, 1600, 16, 16)
    >>> [decision] = explain([3602], [1618], geometry)
    >>> decision.reason, decision.position
    (<Reason.COLUMN_TAKEN: 3>, 3600)
    >>> print(decision.sentence)
    The query starts at 1,984, which is inside column 1, the column the checkpoint would overwrite.

    Rows as in `compute_mamba_prefill_checkpoints`, which this asks row by row through the shared
    predicate. ``formula="before-0.32"`` shows the earlier position, which differs for a dropped
    block at an exact boundary. Raises CheckpointTypeError or CheckpointValueError as that does.
    """
    formula = checked_choice("formula", formula, POSITION_FORMULAS)
    seq, query = _as_int64("seq_lens", seq_lens), _as_int64("query_lens", query_lens)
    if len(seq) != len(query):
        raise _row_counts_disagree(seq_lens, query_lens)
    decisions = []
    for row, (seq_len, query_len) in enumerate(zip(seq.tolist(), query.tolist(), strict=True)):
        if not 0 <= query_len <= seq_len:
            raise _query_outside_sequence(row, seq_len, query_len)
        decisions.append(_explain_row(seq_len, query_len, geometry, formula))
    return decisions


def _explain_row(seq_len: int, query_len: int, g: CacheGeometry, formula: str) -> Decision:
    start = seq_len - query_len
    position = POSITION_FORMULAS[formula](
        seq_len, g.U, g.drop_eagle_block, g.num_hash_lookahead_tokens
    )
    reason = get_mamba_prefill_checkpoint_reason(start, seq_len, position, g.H, g.M, g.A)
    candidate = -(-seq_len // g.M) - 2
    accepted = reason is Reason.ACCEPTED
    return Decision(
        position=position,
        offset=position - start if accepted else 0,
        column=candidate if accepted else -1,
        candidate_column=candidate,
        reason=reason,
        sentence=describe_reason(reason, start, seq_len, position, g.H, g.M, g.A),
    )


def describe_reason(
    reason: Reason, start: int, end: int, position: int, H: int, M: int, A: int | None
) -> str:
    """Return the sentence that tells a person why a query [start, end) got this answer.

    >>> describe_reason(Reason.START_OFF_HASH_GRID, 331, 3602, 3600, 16, 1600, 16)
    'The query starts at 331, which is not a multiple of the hash unit (16 tokens).'

    All numbers are in tokens. ``reason`` is what `get_mamba_prefill_checkpoint_reason` returned.
    """
    column = -(-end // M) - 2
    match reason:
        case Reason.ACCEPTED:
            return (
                f"The state after {_tokens(position)} is saved {_tokens(position - start)} into "
                f"the query, in column {column:,}, and keyed by {position:,}."
            )
        case Reason.CANNOT_EXPORT:
            return "The prefill kernel of this layer cannot emit a state inside a query."
        case Reason.START_OFF_HASH_GRID:
            return (
                f"The query starts at {start:,}, which is not a multiple of the hash unit "
                f"({_tokens(H)})."
            )
        case Reason.COLUMN_TAKEN if column < 0:
            return (
                f"The query ends at {end:,}, inside the first block of {_tokens(M)}: there is no "
                "column before the running state's."
            )
        case Reason.COLUMN_TAKEN if start % M == 0:
            return (
                f"The query starts at {start:,} with the state in column {(start - 1) // M:,}, and "
                f"the checkpoint's column, {column:,}, is not after it."
            )
        case Reason.COLUMN_TAKEN if start // M == column:
            return (
                f"The query starts at {start:,}, which is inside column {column:,}, the column the "
                "checkpoint would overwrite."
            )
        case Reason.COLUMN_TAKEN:
            return (
                f"The query starts at {start:,} and ends at {end:,}, both inside column "
                f"{column + 1:,}: the checkpoint's column, {column:,}, lies before its start."
            )
        case Reason.NO_BLOCK_GAINED:
            return (
                f"The last reusable position is {position:,}, less than one hash unit "
                f"({_tokens(H)}) after the query's start at {start:,}: nothing would be gained."
            )
        case Reason.NOT_INSIDE_QUERY:
            query = f"the query from {start:,} to {end:,}"
            return f"The position {position:,} is not strictly inside {query}."
        case Reason.OFF_KERNEL_GRID:
            return (
                f"The position {position:,} is {_tokens(position - start)} into the query, which "
                f"is not a multiple of the {_tokens(A or 0)} at which the kernel can emit a state."
            )


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count:,} tokens"
