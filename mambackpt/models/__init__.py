"""How large is a state? Bytes and blocks of real models."""

from mambackpt.models.boot_log import BootLog, read_boot_log
from mambackpt.models.capacity import Capacity, pool_capacity
from mambackpt.models.config import from_config
from mambackpt.models.hosts import host_checkpoint_bytes, smallest_chunk
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
from mambackpt.models.slots import balanced_split, host_tier_bytes, slots_per_request

__all__ = [
    "BYTES_OF",
    "GDN",
    "KDA",
    "PRESETS",
    "BootLog",
    "Capacity",
    "GroupedAttention",
    "HybridModel",
    "LatentAttention",
    "LinearAttention",
    "Mamba1",
    "Mamba2",
    "RecurrentLayer",
    "ShortConv",
    "balanced_split",
    "bytes_of",
    "from_config",
    "host_checkpoint_bytes",
    "host_tier_bytes",
    "mamba_block_size",
    "pool_capacity",
    "read_boot_log",
    "slots_per_request",
    "smallest_chunk",
]
