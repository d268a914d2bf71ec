"""The states that a recorded forward had inside, as an engine's kernels leave them.

Each kind of layer has its own way: one row per checkpoint (KDA), one per stride of a whole batch
(gated delta rule), one per chunk (Mamba-2). The exporter finds a state by ``recurrent_rows``.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import torch

from mambackpt.resume.architectures import one_thread
from mambackpt.resume.scan import (
    DeltaInputs,
    SsdInputs,
    delta_scan,
    even_ends,
    ssd_chunks,
    ssd_scan,
    state_rows,
)
from mambackpt.resume.state import LayerState

Emitted: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]  # states, and each checkpoint's row
Calls: TypeAlias = Sequence[Mapping[str, Any]]  # one layer's scan of each request


@one_thread()
def emitted(
    layer: str,
    scans: Sequence[Calls],
    *,
    offsets: Sequence[int],
    grid: int | None,
    start: int = 0,
    initial: Sequence[LayerState] | None = None,
) -> list[Emitted]:
    """Return each layer's states with the row of each request's checkpoint; none without a memory.

    >>> from mambackpt.resume.architectures import load_model, random_prompt
    >>> model = load_model("qwen3-next")
    >>> scans = [model.run(random_prompt(length)).scans for length in (200, 300)]
    >>> [(states, rows), *_] = emitted("gated delta rule", scans, offsets=[128, 192], grid=64)
    >>> states.shape, rows
    (torch.Size([7, 4, 16, 16]), tensor([1, 5]))

    ``scans`` holds the recorded arguments per request and layer, ``offsets`` a checkpoint per
    request, ``grid`` the tokens of a kernel chunk. Queries began after ``start`` tokens, in the
    states ``initial``.
    """
    found = []
    for at in range(min(map(len, scans))):
        calls = [scan[at] for scan in scans]
        before = initial[at].memory if initial else None
        if layer in ("gated delta rule", "KDA"):
            found.append(_delta(calls, offsets, grid or 1, before, one_each=layer == "KDA"))
        else:
            found.append(_ssd(calls, offsets, start, before))
    return found


def _delta(
    calls: Calls,
    offsets: Sequence[int],
    grid: int,
    before: torch.Tensor | None,
    *,
    one_each: bool,
) -> Emitted:
    inputs = [DeltaInputs.from_call(call) for call in calls]
    lengths = [len(one.key) for one in inputs]
    scans = [
        delta_scan(one, even_ends(length, grid), before)
        for one, length in zip(inputs, lengths, strict=True)
    ]
    if one_each:
        cut = [scan.at(offset) for scan, offset in zip(scans, offsets, strict=True)]
        return torch.stack(cut), None
    plan = state_rows(offsets, lengths)
    strides = [
        scan.at(end)
        for scan, length in zip(scans, lengths, strict=True)
        for end in range(plan.every, length + 1, plan.every)
    ]
    return torch.stack(strides), torch.tensor(plan.rows)


def _ssd(calls: Calls, offsets: Sequence[int], start: int, before: torch.Tensor | None) -> Emitted:
    inputs = [SsdInputs.from_call(call) for call in calls]
    starts = [0, *accumulate(len(one.x) for one in inputs)]
    chunks = ssd_chunks(calls[0]["chunk_size"], [start] * len(calls), starts, offsets)
    ends: list[list[int]] = [[] for _ in calls]
    for end, row in zip(chunks.cu_chunk[1:], chunks.seq_idx, strict=True):
        ends[row].append(end - starts[row])
    states = [
        ssd_scan(one, row_ends, before).states for one, row_ends in zip(inputs, ends, strict=True)
    ]
    return torch.cat(states), torch.tensor(chunks.checkpoint_chunk)
