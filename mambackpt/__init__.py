"""Where must a hybrid language model save its recurrent state, and is the saved state right?

Every public name loads on first use, so ``import mambackpt`` loads no heavy library.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mambackpt.errors import CheckpointError, CheckpointTypeError, CheckpointValueError
    from mambackpt.geometry import CacheGeometry

_HOME = {
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
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
