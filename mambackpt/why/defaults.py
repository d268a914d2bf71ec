"""What the common engine takes where a reader says nothing: blocks and kernels of a model."""

from pathlib import Path

from mambackpt.engine import Settings
from mambackpt.errors import checked_choice
from mambackpt.models import KDA, PRESETS, HybridModel, Mamba2, from_config

_KERNEL_GRID = 16  # of FlashKDA, the best known kernel that exports a state inside a chunk


def find_model(name: str) -> HybridModel:
    """Return the model of a preset's name or of a config.json.

    >>> find_model("qwen3.5-4b").block_size()
    528

    Raises CheckpointValueError for what is neither.
    """
    if name not in PRESETS and Path(name).exists():
        return from_config(name)
    return PRESETS[checked_choice("--model", name, PRESETS)]


def kernel_grid(model: HybridModel | None) -> tuple[int | None, str]:
    """Return the grid on which a model's prefill kernel exports states, and whose that is.

    >>> kernel_grid(find_model("nemotron-3-nano"))
    (1, 'kernel grid 1 (Mamba-2 kernels)')

    Tokens; None where it exports none. Source: the layers of vllm 0.33.0.
    """
    if model is None:
        return _KERNEL_GRID, f"kernel grid {_KERNEL_GRID} (--alignment none: it cannot export)"
    if isinstance(model.recurrent, Mamba2):
        return 1, "kernel grid 1 (Mamba-2 kernels)"
    if isinstance(model.recurrent, KDA) and "linear" not in model.name.lower():
        return _KERNEL_GRID, f"kernel grid {_KERNEL_GRID} (FlashKDA kernels)"
    layers = type(model.recurrent).__name__
    return None, f"no states inside a chunk ({layers} layers with Triton kernels)"


def common_budget(block: int) -> int:
    """Return the tokens of one step where nothing is given: 8,192, or a larger block.

    >>> common_budget(528), common_budget(11392)
    (8192, 11392)

    An engine whose step cannot hold a block does not start.
    """
    return max(8192, block)


def common_settings(
    model: HybridModel | None = None, *, block: int | None = None, hash_unit: int | None = None
) -> Settings:
    """Return the engine room's settings for a model or a block, one request at a time.

    >>> common_settings(find_model("qwen3.5-4b")).hash_block_size
    528

    Tokens; the hash unit is the block unless it is given, retention 0, the budget that of
    `common_budget`. Without a model the block is 528 unless it is given. Raises as `Settings` does.
    """
    if block is None:
        block = find_model("qwen3.5-4b").block_size() if model is None else model.block_size()
    grid, _ = kernel_grid(model)
    unit = block if hash_unit is None else hash_unit
    return Settings(
        mamba_block_size=block,
        hash_block_size=unit,
        checkpoint_alignment=grid,
        budget=common_budget(block),
        max_running=1,
    )
