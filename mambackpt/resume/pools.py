"""Paged pools for a model's states and attention, written by the exporter, read at a resume.

A page is one block of one layer: the window, token by token, then the memory, then padding. Every
byte starts as 0xFF, which is NaN in each floating-point dtype: what was never written shows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from mambackpt.errors import CheckpointValueError
from mambackpt.exporter import MambaPrefillCheckpointExporter
from mambackpt.geometry import CacheGeometry
from mambackpt.metadata import (
    NULL_BLOCK_ID,
    CacheConfig,
    CommonMetadata,
    EngineConfig,
    KVCacheSpec,
    MambaPrefillCheckpointBuilder,
    MambaPrefillCheckpointMetadata,
)
from mambackpt.resume.architectures import Run, TinyModel
from mambackpt.resume.emit import emitted
from mambackpt.resume.state import LayerState, fill_cache, take_attention, take_states

_PAGE = 256  # bytes that a page is a multiple of, with at least one byte of padding
ShortWindows: TypeAlias = Literal["error", "complete", "engine"]


@dataclass(frozen=True, slots=True)
class Stored:
    """One checkpoint in the pools: its position, the column and block it lies in, how it got there.

    ``inside`` says that the state was emitted inside a forward that ran on; else a step ended
    there. ``attention`` lists the blocks of the prefix, one per M tokens.
    """

    position: int
    column: int
    block: int
    inside: bool
    attention: tuple[int, ...]


class StatePool:
    """The pages of one recurrent layer, with its window and its memory as views into them.

    >>> pool = StatePool(4, LayerState(torch.zeros(6, 3), torch.zeros(2, 4, 4)))
    >>> pool.pages.shape, pool.windows.shape, pool.windows.stride(), pool.memories.shape
    (torch.Size([4, 256]), torch.Size([4, 6, 3]), (64, 1, 6), torch.Size([4, 2, 4, 4]))
    >>> bool(pool.windows.isnan().all())
    True
    """

    def __init__(self, blocks: int, like: LayerState, dtype: torch.dtype | None = None) -> None:
        width, tokens = like.window.shape
        window_bytes = like.window.numel() * like.window.element_size()
        memory, memory_bytes = like.memory, 0
        if memory is not None:
            dtype = dtype or memory.dtype
            memory_bytes = memory.numel() * dtype.itemsize
        page = (window_bytes + memory_bytes) // _PAGE * _PAGE + _PAGE
        self.pages = torch.full((blocks, page), 0xFF, dtype=torch.uint8)
        flat = self.pages.view(-1).view(like.window.dtype)
        stride = page // like.window.element_size()
        self.windows = flat.as_strided((blocks, width, tokens), (stride, 1, width))
        self.memories: torch.Tensor | None = None
        if memory is not None and dtype is not None:
            flat = self.pages.view(-1).view(dtype)
            sizes, strides = (blocks, *memory.shape), (page // dtype.itemsize, *memory.stride())
            self.memories = flat.as_strided(sizes, strides, window_bytes // dtype.itemsize)

    def write(self, block: int, state: LayerState) -> None:
        """Store a state in a block; its memory takes the pool's dtype."""
        self.windows[block] = state.window
        if self.memories is not None and state.memory is not None:
            self.memories[block] = state.memory

    def read(self, block: int, dtype: torch.dtype) -> LayerState:
        """Return a copy of a block's state, its memory in the dtype that the model computes in."""
        memory = None if self.memories is None else self.memories[block].to(dtype, copy=True)
        return LayerState(self.windows[block].clone(), memory)


class TokenPool:
    """The pages of one attention layer: what each token left there, M tokens to a block."""

    def __init__(self, blocks: int, tokens: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys = torch.full((blocks, tokens, *keys.shape[1:]), torch.nan, dtype=keys.dtype)
        self.values = torch.full((blocks, tokens, *values.shape[1:]), torch.nan, dtype=values.dtype)

    def write(self, blocks: Sequence[int], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store a prefix in blocks, in this order; the last one may stay partly empty."""
        for pool, tokens in ((self.keys, keys), (self.values, values)):
            for block, part in zip(blocks, torch.split(tokens, pool.shape[1]), strict=True):
                pool[block, : len(part)] = part

    def read(self, blocks: Sequence[int], tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first tokens of these blocks."""
        keys, values = (pool[list(blocks)].flatten(0, 1) for pool in (self.keys, self.values))
        return keys[:tokens], values[:tokens]


RawOf: TypeAlias = Callable[[TinyModel, Run], list[torch.Tensor]]


def _raw(_: TinyModel, run: Run) -> list[torch.Tensor]:
    return run.raw


class Pools:
    """All pools of one model, with a block table and a null block, and nothing else of a request.

    >>> from mambackpt.resume.architectures import load_model, random_prompt
    >>> model, prompt = load_model("mamba-2"), random_prompt(100)
    >>> pools = Pools(model, CacheGeometry(16, 64, 1, 16))
    >>> [stored] = pools.store([model.run(prompt)])
    >>> stored.position, stored.column, stored.inside
    (96, 0, True)
    >>> model.run(prompt[96:], pools.restore(stored)).logits.shape
    torch.Size([4, 512])

    ``memory_dtype`` is what memories are stored in [the model's].
    """

    def __init__(
        self,
        model: TinyModel,
        geometry: CacheGeometry,
        *,
        blocks: int = 24,
        memory_dtype: torch.dtype | None = None,
    ) -> None:
        self.model, self.geometry = model, geometry
        token = model.run([0])
        self._like = take_states(model.architecture, token.cache)
        self.states = [StatePool(blocks, one, memory_dtype) for one in self._like]
        self.tokens = [TokenPool(blocks, geometry.M, *pair) for pair in take_attention(token.cache)]
        self._free = [*range(1, blocks)]  # block 0 is the null block
        config = EngineConfig(CacheConfig(geometry.H, geometry.U))
        spec = KVCacheSpec(geometry.M, geometry.A)
        self.builder = MambaPrefillCheckpointBuilder(config, spec)

    def take(self, count: int) -> tuple[int, ...]:
        """Return fresh blocks, the highest first, so that a block's id says nothing.

        Raises CheckpointValueError where too few are left.
        """
        if len(self._free) < count:
            raise CheckpointValueError(
                f"{count} blocks are asked for and {len(self._free)} are free; expected enough. "
                "Try Pools(..., blocks=) with more of them."
            )
        return tuple(self._free.pop() for _ in range(count))

    def table(self, lengths: Sequence[int], *, reserve: bool = True) -> torch.Tensor:
        """Return a block table: null but for the running column and the checkpoint's before it.

        Without ``reserve`` there is none for a checkpoint.
        """
        M = self.geometry.M
        table = torch.full((len(lengths), max(-(-n // M) for n in lengths)), NULL_BLOCK_ID)
        for row, length in enumerate(lengths):
            running = -(-length // M) - 1
            for column in range(max(0, running - reserve), running + 1):
                [table[row, column]] = self.take(1)
        return table.to(torch.int32)

    def store(
        self,
        runs: Sequence[Run],
        *,
        start: int = 0,
        raw: RawOf = _raw,
        initial: Sequence[LayerState] | None = None,
        short_windows: ShortWindows = "error",
        table: torch.Tensor | None = None,
    ) -> list[Stored]:
        """Save each prefill's checkpoint where the planner puts it, all rows in one export a layer.

        Each run computed a query that began after ``start`` tokens, whose states are ``initial``.
        Its last state goes to the running column, as a worker writes it at each step's end.
        Raises CheckpointValueError where a row has no checkpoint: let a step end there instead
        (`store_ends`).
        """
        lengths = [len(run.logits) for run in runs]
        seq_lens = [start + length for length in lengths]
        table = self.table(seq_lens) if table is None else table
        batch = CommonMetadata.from_lengths(seq_lens, lengths, table.tolist())
        checkpoint = self.builder.build(batch, [*range(len(runs))])
        if checkpoint is None or not all(checkpoint.offsets):
            raise CheckpointValueError(
                f"of queries of {lengths} tokens after {start}, some row has no checkpoint; "
                "expected one per row. Try store_ends() where a step ends."
            )
        sources = emitted(
            self.model.architecture.layer,
            [run.scans for run in runs],
            offsets=checkpoint.offsets,
            grid=self.geometry.A,
            start=start,
            initial=initial,
        )
        windows = [raw(self.model, run) for run in runs]
        for layer, pool in enumerate(self.states):
            before = None
            if initial is not None:
                before = initial[layer].window.expand(len(runs), -1, -1)
            memories, rows = sources[layer] if sources else (None, None)
            MambaPrefillCheckpointExporter(pool.windows.shape[2]).export(
                checkpoint,
                raw_qkv=torch.cat([window[layer] for window in windows]),
                conv_state=pool.windows,
                cu_seqlens=batch.query_start_loc,
                recurrent_checkpoint=memories,
                recurrent_state=pool.memories,
                recurrent_rows=rows,
                initial_windows=before,
                short_windows=short_windows,
            )
        for row, run in enumerate(runs):
            running = int(table[row, -(-seq_lens[row] // self.geometry.M) - 1])
            for pool, state in zip(self.states, self._states(run), strict=True):
                pool.write(running, state)
        return [
            self._keep(run, start + offset, int(column), int(block), inside=True)
            for run, offset, column, block in zip(
                runs,
                checkpoint.offsets,
                checkpoint.block_cols,
                checkpoint.state_indices,
                strict=True,
            )
        ]

    def store_ends(self, runs: Sequence[Run]) -> list[Stored]:
        """Save the state after each prefill's last token: what is left where a step ends."""
        lengths = [len(run.logits) for run in runs]
        table = self.table(lengths, reserve=False)
        batch = CommonMetadata.from_lengths(lengths, lengths, table.tolist())
        columns = [-(-length // self.geometry.M) - 1 for length in lengths]
        rows = torch.arange(len(runs))
        running = MambaPrefillCheckpointMetadata(
            checkpoint_offsets=torch.tensor(lengths, dtype=torch.int32),
            state_indices=table[rows, torch.tensor(columns)],
            offsets=lengths,
            query_lens=lengths,
            request_rows=rows,
            block_cols=torch.tensor(columns),
        )
        ended = list(map(self._states, runs))
        for layer, pool in enumerate(self.states):
            left = [states[layer].memory for states in ended]
            MambaPrefillCheckpointExporter(pool.windows.shape[2]).export(
                running,
                raw_qkv=torch.cat([run.raw[layer] for run in runs]),
                conv_state=pool.windows,
                cu_seqlens=batch.query_start_loc,
                recurrent_checkpoint=None if pool.memories is None else _stacked(left),
                recurrent_state=pool.memories,
            )
        return [
            self._keep(run, length, column, int(block), inside=False)
            for run, length, column, block in zip(
                runs, lengths, columns, running.state_indices, strict=True
            )
        ]

    def restore(self, stored: Stored) -> Any:
        """Return a cache with a checkpoint's state and attention, read from the pools alone."""
        blocks = stored.attention[: -(-stored.position // self.geometry.M)]
        attention = [pool.read(blocks, stored.position) for pool in self.tokens]
        return self._filled(stored.block, attention)

    def stored_once(self, cache: Any) -> Any:
        """Return a cache like this one whose states have been through a block of these pools."""
        [block] = self.take(1)
        states = take_states(self.model.architecture, cache)
        for pool, state in zip(self.states, states, strict=True):
            pool.write(block, state)
        return self._filled(block, take_attention(cache))

    def _states(self, run: Run) -> list[LayerState]:
        return take_states(self.model.architecture, run.cache)

    def _filled(self, block: int, attention: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        states = [
            pool.read(block, like.window.dtype if like.memory is None else like.memory.dtype)
            for pool, like in zip(self.states, self._like, strict=True)
        ]
        return fill_cache(self.model.architecture, self.model.new_cache(), states, attention)

    def _keep(self, run: Run, position: int, column: int, block: int, *, inside: bool) -> Stored:
        """Write all of a run's attention into blocks, and say where its checkpoint lies."""
        attention = take_attention(run.cache)
        count = -(-max(len(keys) for keys, _ in attention) // self.geometry.M) if attention else 0
        blocks = self.take(count)
        for pool, (keys, values) in zip(self.tokens, attention, strict=True):
            pool.write(blocks, keys, values)
        return Stored(position, column, block, inside, blocks)


def _stacked(memories: Sequence[torch.Tensor | None]) -> torch.Tensor:
    return torch.stack([memory for memory in memories if memory is not None])
