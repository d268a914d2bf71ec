"""The tensors of one export, made from a few numbers: engine and kit are given the same.

All values are whole eighths below 8, which bfloat16 holds exactly: an interpreted kernel truncates
where a compiled one rounds, and this is not what is compared.
"""

import hashlib
from typing import Any

import numpy as np
import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def _values(random: np.random.RandomState, *shape: int) -> torch.Tensor:
    return torch.from_numpy(random.randint(-64, 64, size=shape).astype(np.float32) / 8)


class Export:
    """The arguments of one export, and the two pools that it may write."""

    def __init__(self, case: dict[str, Any]) -> None:
        random = np.random.RandomState(case["data"])
        sizes, rows = case["settings"], case["requests"]
        self.width, self.columns, self.blocks = sizes["width"], sizes["columns"], sizes["blocks"]
        self.offsets = [row["offset"] for row in rows]
        self.query_lens = [row["query"] for row in rows]
        self.state_indices = torch.tensor([row["block"] for row in rows], dtype=torch.int32)
        starts = np.cumsum([0, *self.query_lens])
        self.cu_seqlens = torch.tensor(starts.tolist(), dtype=torch.int32)
        tokens = int(starts[-1]) + sizes["padding"]
        raw = _values(random, tokens, self.width + sizes["padding"]).to(DTYPES[sizes["source"]])
        self.raw_qkv = raw[:, : self.width]
        if sizes["transposed"]:
            self.raw_qkv = self.raw_qkv.t().contiguous().t()
        self.token_indices: torch.Tensor | None = None
        if sizes["mapped"]:
            self.token_indices = torch.from_numpy(random.permutation(tokens))
        self._make_windows(sizes)
        self.state: torch.Tensor | None = None
        self.emitted: torch.Tensor | None = None
        self.recurrent_rows: torch.Tensor | None = None
        if sizes["state_row"]:
            self._make_states(sizes, random)

    def _make_windows(self, sizes: dict[str, Any]) -> None:
        """A pool of windows full of NaN: [blocks, width, columns] in one of two orders."""
        row = self.width * self.columns + sizes["padding"]
        self.window_base = torch.full((self.blocks, row), torch.nan, dtype=DTYPES[sizes["window"]])
        strides = (row, self.columns, 1) if sizes["dim_first"] else (row, 1, self.width)
        shape = (self.blocks, self.width, self.columns)
        self.conv_state = self.window_base.as_strided(shape, strides)

    def _make_states(self, sizes: dict[str, Any], random: np.random.RandomState) -> None:
        """A pool of states full of NaN, and one emitted state a row, in an order of their own."""
        heads, size = sizes["state_row"]
        count = len(self.offsets)
        emitted = _values(random, count + 2, heads, size)
        self.emitted = emitted.to(DTYPES[sizes["emitted"]])
        row = heads * size + sizes["padding"]
        self.state_base = torch.full((self.blocks, row), torch.nan, dtype=DTYPES[sizes["state"]])
        self.state = self.state_base.as_strided((self.blocks, heads, size), (row, size, 1))
        if sizes["rows_chosen"]:
            chosen = random.permutation(count + 2)[:count]
            self.recurrent_rows = torch.from_numpy(chosen).to(torch.int32)

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of ``export`` that engine and kit share."""
        return {
            "raw_qkv": self.raw_qkv,
            "conv_state": self.conv_state,
            "cu_seqlens": self.cu_seqlens,
            "recurrent_checkpoint": self.emitted,
            "recurrent_state": self.state,
            "recurrent_rows": self.recurrent_rows,
            "token_indices": self.token_indices,
        }

    def digests(self) -> list[dict[str, str]]:
        """Every block of both pools, its padding included, as a digest of its bytes."""
        pools = {"window": self.window_base}
        if self.state is not None:
            pools["state"] = self.state_base
        digests = []
        for block in range(self.blocks):
            row = {}
            for name, pool in pools.items():
                data = pool[block].view(torch.uint8).numpy().tobytes()
                row[name] = hashlib.sha256(data).hexdigest()[:16]
            digests.append(row)
        return digests
