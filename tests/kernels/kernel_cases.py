"""Exports to try the kernels on, and a slow reference that knows nothing of how they work."""

import random
from dataclasses import dataclass
from typing import Any

import torch

NAN = float("nan")
LAYOUTS = ("dim-first", "token-first")


def poisoned(shape, strides, dtype):
    """A view of NaN memory with these strides, three elements into its storage's padding."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    elements = 0 if 0 in shape else reach
    return torch.full((elements + 3,), NAN, dtype=dtype).as_strided(shape, strides)


def window_pool(blocks, width, columns, *, layout="token-first", padding=0, dtype=torch.float32):
    """A poisoned [blocks, width, columns] pool whose blocks lie ``padding`` elements apart."""
    block = width * columns + padding
    inner = (columns, 1) if layout == "dim-first" else (1, width)
    return poisoned((blocks, width, columns), (block, *inner), dtype)


def state_pool(blocks, row, *, padding=0, dtype=torch.float32):
    """A poisoned [blocks, *row] pool of dense rows that lie ``padding`` elements apart."""
    strides, size = [], 1
    for extent in reversed(row):
        strides.insert(0, size)
        size *= extent
    return poisoned((blocks, *row), (size + padding, *strides), dtype)


def representable(shape, generator, dtype):
    """Random values of few significant bits, which every float dtype here holds exactly."""
    return (torch.randint(-120, 121, shape, generator=generator) / 8).to(dtype)


@dataclass
class Sizes:
    """What one case is made of; the defaults are the plain case that tests vary."""

    query_lens: tuple[int, ...] = (9, 7, 5)
    offsets: tuple[int, ...] = (6, 0, 5)
    blocks: tuple[int, ...] = (3, 1, 5)
    pool_blocks: int = 7
    width: int = 5
    state_len: int = 3
    extra_columns: int = 0
    row: tuple[int, ...] | None = (2, 3)
    layout: str = "token-first"
    padding: int = 0
    raw_dtype: torch.dtype = torch.float32
    conv_dtype: torch.dtype = torch.float32
    source_dtype: torch.dtype = torch.float32
    state_dtype: torch.dtype = torch.float32
    recurrent_rows: tuple[int, ...] | None = None
    emitted_rows: int | None = None
    shuffled_tokens: bool = False
    initial_windows: bool = False
    skip_short_windows: bool = False
    channels_apart: int = 1
    index_dtype: torch.dtype = torch.int32
    seed: int = 0


def make_inputs(sizes: Sizes) -> dict[str, Any]:
    """The keywords of every implementation, with poisoned pools."""
    generator = torch.Generator().manual_seed(sizes.seed)
    starts = [0]
    for query_len in sizes.query_lens:
        starts.append(starts[-1] + query_len)
    tokens, R = starts[-1], len(sizes.offsets)
    apart = sizes.channels_apart
    raw = representable((tokens, sizes.width * apart), generator, sizes.raw_dtype)[:, ::apart]
    columns = sizes.state_len + sizes.extra_columns
    inputs: dict[str, Any] = {
        "offsets": torch.tensor(sizes.offsets, dtype=torch.int32),
        "state_indices": torch.tensor(sizes.blocks, dtype=sizes.index_dtype),
        "raw_qkv": raw,
        "conv_state": window_pool(
            sizes.pool_blocks,
            sizes.width,
            columns,
            layout=sizes.layout,
            padding=sizes.padding,
            dtype=sizes.conv_dtype,
        ),
        "cu_seqlens": torch.tensor(starts, dtype=torch.int32),
        "state_len": sizes.state_len,
        "skip_short_windows": sizes.skip_short_windows,
    }
    if sizes.row is not None:
        emitted = R if sizes.emitted_rows is None else sizes.emitted_rows
        inputs["recurrent_checkpoint"] = representable(
            (emitted, *sizes.row), generator, sizes.source_dtype
        )
        inputs["recurrent_state"] = state_pool(
            sizes.pool_blocks, sizes.row, padding=sizes.padding, dtype=sizes.state_dtype
        )
    if sizes.recurrent_rows is not None:
        inputs["recurrent_rows"] = torch.tensor(sizes.recurrent_rows, dtype=torch.int64)
    if sizes.shuffled_tokens:
        inputs["token_indices"] = torch.randperm(tokens, generator=generator)
    if sizes.initial_windows:
        inputs["initial_windows"] = representable(
            (R, sizes.width, sizes.state_len), generator, sizes.raw_dtype
        )
    return inputs


def random_sizes(seed: int) -> Sizes:
    """A case drawn at random; blocks differ, as the exporter demands, but some are null."""
    draw = random.Random(seed)
    R = draw.randint(0, 4)
    lens = [draw.randint(1, 8) for _ in range(R)]
    pool_blocks = R + draw.randint(1, 3)
    drawn_blocks = draw.sample(range(1, pool_blocks), R)
    blocks = [0 if draw.random() < 0.2 else block for block in drawn_blocks]
    emitted = R + draw.randint(0, 2)
    float_pairs = [(a, b) for a in (torch.float32, torch.bfloat16) for b in (a, torch.bfloat16)]
    raw_dtype, conv_dtype = draw.choice(float_pairs)
    source_dtype, state_dtype = draw.choice(float_pairs)
    short = draw.choice(["whole only", "completed", "skipped"])
    return Sizes(
        query_lens=tuple(lens),
        offsets=tuple(draw.choice([0, length, draw.randint(0, length)]) for length in lens),
        blocks=tuple(blocks),
        pool_blocks=pool_blocks,
        width=draw.choice([1, 2, 63, 64, 65, 130]),
        state_len=draw.randint(0, 4),
        extra_columns=draw.randint(0, 2),
        row=draw.choice([None, (1,), (63,), (64,), (5, 13), (2, 3, 64), (0, 4)]),
        layout=draw.choice(LAYOUTS),
        padding=draw.choice([0, 1, 16]),
        raw_dtype=raw_dtype,
        conv_dtype=conv_dtype,
        source_dtype=source_dtype,
        state_dtype=state_dtype,
        recurrent_rows=draw.choice([None, tuple(draw.sample(range(emitted), R))]),
        emitted_rows=emitted,
        shuffled_tokens=draw.random() < 0.4,
        initial_windows=short == "completed",
        skip_short_windows=short == "skipped",
        channels_apart=draw.choice([1, 1, 2]),
        index_dtype=draw.choice([torch.int32, torch.int64]),
        seed=seed,
    )


def everything(pool: torch.Tensor) -> torch.Tensor:
    """The bytes of a pool's whole memory, padding and all: NaNs compare equal to themselves."""
    return torch.empty(0, dtype=torch.uint8).set_(pool.untyped_storage())


def copied(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same inputs with pools of their own."""
    mine = dict(inputs)
    for name in ("conv_state", "recurrent_state"):
        pool = inputs.get(name)
        if pool is not None:
            memory = torch.empty(0, dtype=pool.dtype).set_(pool.untyped_storage().clone())
            mine[name] = memory.as_strided(pool.shape, pool.stride(), pool.storage_offset())
    return mine


def pools(inputs: dict[str, Any]) -> list[torch.Tensor]:
    """The whole memory of both pools."""
    named = (inputs["conv_state"], inputs.get("recurrent_state"))
    return [everything(pool) for pool in named if pool is not None]


def store_by_hand(inputs: dict[str, Any]) -> None:
    """Store checkpoints one number at a time, as the rule reads.

    The last ``state_len`` raw inputs up to the cut, oldest first, and the row of the state; a row
    that points outside a buffer, or past its own query, is left out whole.
    """
    S, raw, conv = inputs["state_len"], inputs["raw_qkv"], inputs["conv_state"]
    emitted, pool = inputs.get("recurrent_checkpoint"), inputs.get("recurrent_state")
    rows, remap = inputs.get("recurrent_rows"), inputs.get("token_indices")
    before = inputs.get("initial_windows")
    for i, offset in enumerate(inputs["offsets"].tolist()):
        block = int(inputs["state_indices"][i])
        start, end = int(inputs["cu_seqlens"][i]), int(inputs["cu_seqlens"][i + 1])
        source = i if rows is None else int(rows[i])
        if offset == 0 or block == 0:
            continue
        if not all(0 < block < len(p) for p in (conv, pool) if p is not None):
            continue
        if emitted is not None and not 0 <= source < len(emitted):
            continue
        listed = len(raw) if remap is None else len(remap)
        if start < 0 or start + offset > end or start + offset > listed:
            continue
        history = [start + t if remap is None else int(remap[start + t]) for t in range(offset)]
        window = history[-S:] if S else []
        missing = S - len(window)
        if missing and inputs["skip_short_windows"]:
            window, missing = [], 0
        elif missing and before is None:
            continue
        if any(not 0 <= token < len(raw) for token in window):
            continue
        for channel in range(conv.shape[1]):
            for column in range(missing):
                conv[block, channel, column] = before[i, channel, len(window) + column]
            for column, token in enumerate(window, start=missing):
                conv[block, channel, column] = raw[token, channel]
        if pool is not None:
            for place in range(emitted[source].numel()):
                pool[block].view(-1)[place] = emitted[source].view(-1)[place]
