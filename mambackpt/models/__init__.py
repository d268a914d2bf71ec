"""How large is a state? Bytes and blocks of real models."""

from mambackpt.models.config import from_config
from mambackpt.models.hybrid import HybridModel
from mambackpt.models.layers import (
    BYTES_OF,
    GDN,
    KDA,
    GroupedAttention,
    LatentAttention,
    LinearAttention,
    Mamba1,
    Mamba2,
    RecurrentLayer,
    ShortConv,
    bytes_of,
    mamba_block_size,
)
from mambackpt.models.presets import PRESETS

__all__ = [
    "BYTES_OF",
    "GDN",
    "KDA",
    "PRESETS",
    "GroupedAttention",
    "HybridModel",
    "LatentAttention",
    "LinearAttention",
    "Mamba1",
    "Mamba2",
    "RecurrentLayer",
    "ShortConv",
    "bytes_of",
    "from_config",
    "mamba_block_size",
]
