"""Where must a hybrid language model save its recurrent state, and is the saved state right?

Every public name loads on first use, so ``import mambackpt`` loads no heavy library.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mambackpt.engine import (
        Request,
        Run,
        Settings,
        check_lockstep,
        chunk_ends,
        simulate,
    )
    from mambackpt.errors import (
        CheckpointError,
        CheckpointTypeError,
        CheckpointValueError,
    )
    from mambackpt.exporter import (
        MambaPrefillCheckpointExporter,
    )
    from mambackpt.geometry import (
        CacheGeometry,
    )
    from mambackpt.metadata import (
        NULL_BLOCK_ID,
        CacheConfig,
        CommonMetadata,
        EngineConfig,
        KVCacheSpec,
        MambaPrefillCheckpointBuilder,
        MambaPrefillCheckpointMetadata,
        SpeculativeConfig,
    )
    from mambackpt.models import (
        PRESETS,
        HybridModel,
        from_config,
        mamba_block_size,
    )
    from mambackpt.planner import (
        Decision,
        Reason,
        compute_mamba_prefill_checkpoints,
        explain,
        get_mamba_prefill_checkpoint_position,
        is_mamba_prefill_checkpoint_valid,
    )

_HOME = {
    "CacheConfig": "metadata",
    "CacheGeometry": "geometry",
    "CheckpointError": "errors",
    "CheckpointTypeError": "errors",
    "CheckpointValueError": "errors",
    "CommonMetadata": "metadata",
    "Decision": "planner",
    "EngineConfig": "metadata",
    "HybridModel": "models",
    "KVCacheSpec": "metadata",
    "MambaPrefillCheckpointBuilder": "metadata",
    "MambaPrefillCheckpointExporter": "exporter",
    "MambaPrefillCheckpointMetadata": "metadata",
    "NULL_BLOCK_ID": "metadata",
    "PRESETS": "models",
    "Reason": "planner",
    "Request": "engine",
    "Run": "engine",
    "Settings": "engine",
    "SpeculativeConfig": "metadata",
    "check_lockstep": "engine",
    "chunk_ends": "engine",
    "compute_mamba_prefill_checkpoints": "planner",
    "explain": "planner",
    "from_config": "models",
    "get_mamba_prefill_checkpoint_position": "planner",
    "is_mamba_prefill_checkpoint_valid": "planner",
    "mamba_block_size": "models",
    "simulate": "engine",
}

__version__ = "0.1.0"
__all__ = [
    "NULL_BLOCK_ID",
    "PRESETS",
    "CacheConfig",
    "CacheGeometry",
    "CheckpointError",
    "CheckpointTypeError",
    "CheckpointValueError",
    "CommonMetadata",
    "Decision",
    "EngineConfig",
    "HybridModel",
    "KVCacheSpec",
    "MambaPrefillCheckpointBuilder",
    "MambaPrefillCheckpointExporter",
    "MambaPrefillCheckpointMetadata",
    "Reason",
    "Request",
    "Run",
    "Settings",
    "SpeculativeConfig",
    "check_lockstep",
    "chunk_ends",
    "compute_mamba_prefill_checkpoints",
    "explain",
    "from_config",
    "get_mamba_prefill_checkpoint_position",
    "is_mamba_prefill_checkpoint_valid",
    "mamba_block_size",
    "simulate",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
