"""The plain-shaped Triton kernel: one flat index per row, for comparison with the tiled one.

It is what a first version looks like: every program takes 256 consecutive numbers, copies those
elements of the recurrent row, and those of the window counted as ``channel * state_len + column``.
It stores exactly what `store_checkpoints` stores.
"""
# Triton's decorator and its kernel parameters carry no types; the launcher below is checked.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from typing import Unpack

import triton
import triton.language as tl

from .store_checkpoints import (
    COUNTS,
    INDEX_VECTORS,
    Launch,
    checkpoint_of_row,
    element_offset,
    shared_arguments,
)
from .torch_copies import CopyInputs

PART = 256  # elements of one program
MOST_ELEMENTS = 2**31 - PART  # of one row: its flat index is a 32-bit number


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=INDEX_VECTORS)
def flat_store_checkpoints_kernel(
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
    SKIP_SHORT_WINDOWS: tl.constexpr,
    PART: tl.constexpr,
):
    """Copy one part, ``PART`` elements, of one row's state and window; programs (part, row)."""
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
    flat = tl.program_id(0) * PART + tl.arange(0, PART)
    if ROW_ELEMENTS > 0:  # noqa: SIM102 - a compile-time condition stands alone
        if exists:
            inside = flat < ROW_ELEMENTS
            source_start = element_offset(source, source_stride, 1)
            state_start = element_offset(block, state_block_stride, 1)
            state = tl.load(recurrent_checkpoint + source_start + flat, mask=inside)
            state = state.to(recurrent_state.dtype.element_ty)
            tl.store(recurrent_state + state_start + flat, state, mask=inside)
    if WIDTH * STATE_LEN > 0:  # noqa: SIM102
        if has_window:
            within = flat < WIDTH * STATE_LEN
            channel = (flat // STATE_LEN).to(tl.int64)
            column = (flat % STATE_LEN).to(tl.int64)
            position = query_start + offset - STATE_LEN + column
            in_query = within & (position >= query_start)
            token = position
            if token_indices is not None:
                token = tl.load(token_indices + position, mask=in_query, other=0).to(tl.int64)
            source_slot = token * raw_token_stride + channel * raw_channel_stride
            inputs = tl.load(raw_qkv + source_slot, mask=in_query)
            inputs = inputs.to(conv_state.dtype.element_ty)
            slot = element_offset(block, conv_block_stride, 1)
            slot += channel * CONV_CHANNEL_STRIDE + column * CONV_TOKEN_STRIDE
            tl.store(conv_state + slot, inputs, mask=in_query)
            if initial_windows is not None:
                # The window before this query ends where it starts: older inputs come from there.
                before = within & (position < query_start)
                earlier_slot = row * initial_row_stride + channel * INITIAL_CHANNEL_STRIDE
                earlier_slot += (offset + column) * INITIAL_TOKEN_STRIDE
                earlier = tl.load(initial_windows + earlier_slot, mask=before)
                earlier = earlier.to(conv_state.dtype.element_ty)
                tl.store(conv_state + slot, earlier, mask=before)


def plan_flat_store(**inputs: Unpack[CopyInputs]) -> Launch:
    """Return the launch that `flat_store_checkpoints` runs, without running it.

    >>> import torch; one = torch.tensor([1])
    >>> plan_flat_store(
    ...     offsets=one * 3, state_indices=one * 2, raw_qkv=torch.zeros(4, 100),
    ...     conv_state=torch.zeros(3, 100, 3), cu_seqlens=torch.tensor([0, 4]), state_len=3).grid
    (2, 1)
    """
    arguments = shared_arguments(**inputs) | {"PART": PART}
    elements = max(arguments["ROW_ELEMENTS"], arguments["WIDTH"] * arguments["STATE_LEN"])
    if elements > MOST_ELEMENTS:
        raise ValueError(
            f"a row of {elements:,} elements; the plain-shaped kernel counts up to "
            f"{MOST_ELEMENTS:,} in 32 bits: use store_cache_checkpoints"
        )
    parts = triton.cdiv(elements, PART)
    return Launch(flat_store_checkpoints_kernel, (parts, len(inputs["offsets"])), arguments)


def flat_store_checkpoints(**inputs: Unpack[CopyInputs]) -> None:
    """Store what `store_cache_checkpoints` stores, in the plain shape; same keywords and errors."""
    plan_flat_store(**inputs).run()
