"""Reference scans that leave a state wherever one is asked for, in one pass.

T tokens, H heads, K key channels, V value channels (N and P in Mamba-2). A memory is [H, V, K], as
engines keep it. Each chunked scan has a plain twin beside it that takes one token at a time.

Gated delta rule and KDA:  S = S diag(g) (1 - b k k') + b v k'   (one gate a head, or one a channel)
Mamba-2:                   S = S exp(dt A) + dt x B'
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch.nn.functional import softplus

from mambackpt.errors import CheckpointValueError


@dataclass(frozen=True, slots=True)
class Scanned:
    """What a scan leaves: outputs [T, H, V], and the memory after each chunk [chunks, H, V, K]."""

    outputs: torch.Tensor
    states: torch.Tensor
    ends: list[int]

    def at(self, position: int) -> torch.Tensor:
        """Return the memory after so many tokens of this scan; a chunk must end there."""
        if position not in self.ends:
            raise CheckpointValueError(
                f"position is {position}; expected the end of a chunk, one of {self.ends[:8]}. "
                "Try chunks that end where a state is wanted."
            )
        return self.states[self.ends.index(position)]


def even_ends(length: int, chunk: int) -> list[int]:
    """Return where chunks of equal size end, the last one where the tokens do.

    >>> even_ends(100, 64)
    [64, 100]
    """
    return [*range(chunk, length, chunk), length]


# ---- gated delta rule and KDA --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """What a delta rule is given, per token: queries and keys [T, H, K], values [T, H, V].

    ``gate`` is the logarithm of what is kept, [T, H, K], or [T, H, 1] for one gate a head; ``beta``
    [T, H] says how much of a value is written.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    gate: torch.Tensor
    beta: torch.Tensor

    @classmethod
    def from_call(
        cls, call: Mapping[str, Any], dtype: torch.dtype = torch.float32
    ) -> "DeltaInputs":
        """Return the inputs of one recorded scan, normalised as the models' scans do."""
        query, key, value, gate, beta = (
            call[name][0].to(dtype) for name in ("query", "key", "value", "g", "beta")
        )
        heads = value.shape[1]
        query, key = (part.repeat_interleave(heads // part.shape[1], 1) for part in (query, key))
        if call.get("use_qk_l2norm_in_kernel"):
            query, key = (p * (p.square().sum(-1, True) + 1e-6).rsqrt() for p in (query, key))
        gate = gate if gate.ndim == 3 else gate[..., None]
        return cls(query * key.shape[-1] ** -0.5, key, value, gate, beta)

    def empty(self) -> torch.Tensor:
        """Return the memory before the first token."""
        heads, width = self.value.shape[1:]
        return self.value.new_zeros(heads, width, self.key.shape[-1])


def delta_scan(
    inputs: DeltaInputs, ends: Sequence[int], initial: torch.Tensor | None = None
) -> Scanned:
    """Run a delta rule chunk by chunk; ``ends`` are where chunks, and so states, end.

    >>> one = torch.ones(1, 1, 2)
    >>> inputs = DeltaInputs(one, one, one, 0 * one, torch.ones(1, 1))
    >>> delta_scan(inputs, [1]).states
    tensor([[[[1., 1.],
              [1., 1.]]]])

    Within a chunk, what the earlier tokens wrote is one triangular system (Yang et al. 2024).
    """
    memory = inputs.empty() if initial is None else initial.to(inputs.value.dtype)
    outputs, states, start = [], [], 0
    for end in ends:
        q, k, v, gate, beta = (
            part[start:end].transpose(0, 1)  # [H, L, ...]
            for part in (inputs.query, inputs.key, inputs.value, inputs.gate, inputs.beta)
        )
        kept = gate.cumsum(1)
        decay = kept[:, :, None] - kept[:, None]  # [H, L, L, K or 1]: from token j to token i
        earlier = torch.ones(end - start, end - start, dtype=torch.bool).tril()[..., None]
        decay = decay.masked_fill(~earlier, -torch.inf).exp()
        among = (k[:, :, None] * k[:, None] * decay).sum(-1) * beta[..., None]
        before = (k * kept.exp()) @ memory.transpose(1, 2)
        written = torch.linalg.solve_triangular(
            among.tril(-1), beta[..., None] * (v - before), upper=False, unitriangular=True
        )
        seen = (q[:, :, None] * k[:, None] * decay).sum(-1)
        outputs.append((q * kept.exp()) @ memory.transpose(1, 2) + seen @ written)
        left = k * (kept[:, -1:] - kept).exp()
        memory = memory * kept[:, -1:].exp() + written.transpose(1, 2) @ left
        states.append(memory)
        start = end
    return Scanned(torch.cat(outputs, 1).transpose(0, 1), torch.stack(states), list(ends))


def delta_by_token(inputs: DeltaInputs, initial: torch.Tensor | None = None) -> Scanned:
    """Run a delta rule token by token: the plain twin of `delta_scan`."""
    memory = inputs.empty() if initial is None else initial.to(inputs.value.dtype)
    outputs, states = [], []
    for q, k, v, gate, beta in zip(
        inputs.query, inputs.key, inputs.value, inputs.gate, inputs.beta, strict=True
    ):
        memory = memory * gate.exp()[:, None]
        wrong = v - (memory * k[:, None]).sum(-1)
        memory = memory + (beta[:, None] * wrong)[..., None] * k[:, None]
        outputs.append((memory * q[:, None]).sum(-1))
        states.append(memory)
    return Scanned(torch.stack(outputs), torch.stack(states), [*range(1, len(states) + 1)])


# ---- Mamba-2 -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SsdInputs:
    """What a Mamba-2 scan is given: x [T, H, V], step sizes dt [T, H], A [H], B and C [T, H, K].

    ``D`` [H] adds x to the output.
    """

    x: torch.Tensor
    dt: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor

    @classmethod
    def from_call(cls, call: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> "SsdInputs":
        """Return the inputs of one recorded scan, with step sizes as the models have them."""
        x, dt, B, C = (call[name][0].to(dtype) for name in ("hidden_states", "dt", "B", "C"))
        dt = softplus(dt + call["dt_bias"].to(dtype)).clamp(*call["dt_limit"])
        B, C = (part.repeat_interleave(x.shape[1] // part.shape[1], 1) for part in (B, C))
        return cls(x, dt, call["A"].to(dtype), B, C, call["D"].to(dtype))

    def empty(self) -> torch.Tensor:
        """Return the memory before the first token."""
        return self.x.new_zeros(*self.x.shape[1:], self.B.shape[-1])


def ssd_scan(
    inputs: SsdInputs, ends: Sequence[int], initial: torch.Tensor | None = None
) -> Scanned:
    """Run Mamba-2's recurrence chunk by chunk; ``ends`` are where chunks, and so states, end.

    >>> one = torch.ones(2, 1, 1)
    >>> inputs = SsdInputs(one, one[..., 0], -one[0, 0], one, one, one[0, 0])
    >>> ssd_scan(inputs, [1, 2]).states.flatten()
    tensor([1.0000, 1.3679])
    """
    memory = inputs.empty() if initial is None else initial.to(inputs.x.dtype)
    outputs, states, start = [], [], 0
    for end in ends:
        x, dt, B, C = (
            part[start:end].transpose(0, 1) for part in (inputs.x, inputs.dt, inputs.B, inputs.C)
        )
        kept = (dt * inputs.A[:, None]).cumsum(1)  # [H, L]
        earlier = torch.ones(end - start, end - start, dtype=torch.bool).tril()
        decay = (kept[:, :, None] - kept[:, None]).masked_fill(~earlier, -torch.inf).exp()
        added = dt[..., None] * x
        seen = (C @ B.transpose(1, 2)) * decay
        old = (C * kept.exp()[..., None]) @ memory.transpose(1, 2)
        outputs.append(seen @ added + old + inputs.D[:, None, None] * x)
        left = B * (kept[:, -1:] - kept).exp()[..., None]
        memory = memory * kept[:, -1:, None].exp() + added.transpose(1, 2) @ left
        states.append(memory)
        start = end
    return Scanned(torch.cat(outputs, 1).transpose(0, 1), torch.stack(states), list(ends))


def ssd_by_token(inputs: SsdInputs, initial: torch.Tensor | None = None) -> Scanned:
    """Run Mamba-2's recurrence token by token: the plain twin of `ssd_scan`."""
    memory = inputs.empty() if initial is None else initial.to(inputs.x.dtype)
    outputs, states = [], []
    for x, dt, B, C in zip(inputs.x, inputs.dt, inputs.B, inputs.C, strict=True):
        memory = memory * (dt * inputs.A).exp()[:, None, None]
        memory = memory + (dt[:, None] * x)[..., None] * B[:, None]
        outputs.append((memory * C[:, None]).sum(-1) + inputs.D[:, None] * x)
        states.append(memory)
    return Scanned(torch.stack(outputs), torch.stack(states), [*range(1, len(states) + 1)])


# ---- where an engine's kernels leave their states -----------------------------------------------


@dataclass(frozen=True, slots=True)
class SsdChunks:
    """The chunks of a packed batch: where they end, whose they are, each row's last one.

    ``checkpoint_chunk`` is the chunk after which a row's checkpoint stands, -1 for none.
    """

    cu_chunk: list[int]
    seq_idx: list[int]
    last_chunk: list[int]
    checkpoint_chunk: list[int]


def ssd_chunks(
    chunk: int,
    computed: Sequence[int],
    query_start_loc: Sequence[int],
    offsets: Sequence[int] | None = None,
) -> SsdChunks:
    """Split a packed batch into Mamba-2's chunks, exactly on each checkpoint.

    >>> ssd_chunks(256, [300], [0, 500], [212])
    SsdChunks(cu_chunk=[0, 212, 468, 500], seq_idx=[0, 0, 0], last_chunk=[2], checkpoint_chunk=[0])

    A row is one segment, or two around its checkpoint. A segment's first chunk completes the
    partial chunk of the sequence's own grid of ``chunk`` tokens, on which ``computed`` tokens of it
    lie before the row. Offset 0 is no checkpoint. The rule of vllm 0.33.0.
    """
    cu, owner, last, checkpoint = [0], [], [], []
    for row, (done, start) in enumerate(zip(computed, query_start_loc, strict=False)):
        length = query_start_loc[row + 1] - start
        offset = offsets[row] if offsets is not None else 0
        checkpoint.append(-1)
        for first, end in ((0, offset), (offset, length)) if offset else ((0, length),):
            at = first
            while at < end:
                at = min(end, at + chunk - (done + first) % chunk if at == first else at + chunk)
                cu.append(start + at)
                owner.append(row)
            if offset and end == offset:
                checkpoint[-1] = len(owner) - 1
        last.append(len(owner) - 1)
    return SsdChunks(cu, owner, last, checkpoint)


@dataclass(frozen=True, slots=True)
class StateRows:
    """Where a kernel that emits states at one stride leaves each row's checkpoint.

    A state every ``every`` tokens of each prefill row, whose states start at ``starts`` of the
    buffer; ``rows[i]`` is the one of row i's checkpoint (0 where there is none).
    """

    every: int
    starts: list[int]
    rows: list[int]


def state_rows(offsets: Sequence[int], prefill_lens: Sequence[int]) -> StateRows:
    """Plan one stride for a whole batch: the greatest that meets every checkpoint.

    >>> state_rows([7488, 1152], [8000, 1300])
    StateRows(every=576, starts=[0, 13, 15], rows=[12, 14])

    Rows are decode rows first, then those of ``prefill_lens``. The rule of vllm 0.33.0's prefill of
    the gated delta rule. Raises CheckpointValueError without a checkpoint, and for more prefill
    rows than offsets.
    """
    decode_rows = len(offsets) - len(prefill_lens)
    every = 0 if decode_rows < 0 else gcd(*offsets)
    if not every:
        raise CheckpointValueError(
            f"offsets are {list(offsets)} for {len(prefill_lens)} prefill rows; expected an offset "
            "per row and at least one checkpoint. Try a batch for which build() returns metadata."
        )
    starts = [0]
    for length in prefill_lens:
        starts.append(starts[-1] + length // every)
    rows = [
        start + offset // every - 1 if offset else 0
        for start, offset in zip([0] * decode_rows + starts[:-1], offsets, strict=True)
    ]
    return StateRows(every, starts, rows)
