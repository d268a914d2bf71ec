"""Where must a hybrid language model save its recurrent state, and is the saved state right?

Every public name loads on first use, so ``import mambackpt`` loads no heavy library.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mambackpt.errors import CheckpointError, CheckpointTypeError, CheckpointValueError
    from mambackpt.geometry import CacheGeometry
    from mambackpt.planner import (
        Decision,
        Reason,
        compute_mamba_prefill_checkpoints,
        explain,
        get_mamba_prefill_checkpoint_position,
        is_mamba_prefill_checkpoint_valid,
    )

_HOME = {
    "Decision": "planner",
    "Reason": "planner",
    "compute_mamba_prefill_checkpoints": "planner",
    "explain": "planner",
    "get_mamba_prefill_checkpoint_position": "planner",
    "is_mamba_prefill_checkpoint_valid": "planner",
    "CacheGeometry": "geometry",
    "CheckpointError": "errors",
    "CheckpointTypeError": "errors",
    "CheckpointValueError": "errors",
}

__version__ = "0.1.0"
__all__ = [
    "CacheGeometry",
    "CheckpointError",
    "CheckpointTypeError",
    "CheckpointValueError",
    "Decision",
    "Reason",
    "compute_mamba_prefill_checkpoints",
    "explain",
    "get_mamba_prefill_checkpoint_position",
    "is_mamba_prefill_checkpoint_valid",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
