"""Plan, build and export with the core alone: run by `test_layout` where no room is."""

import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace


def main() -> None:
    # An editable install would find the rooms where they are; here only the folder counts.
    sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder)]

    import torch

    import mambackpt
    from mambackpt import MambaPrefillCheckpointBuilder, MambaPrefillCheckpointExporter
    from mambackpt import compute_mamba_prefill_checkpoints as plan
    from mambackpt.errors import CheckpointError

    print(Path(mambackpt.__file__).parent)
    print(plan([8000], [8000], 1536, 1536, 16, False, 1536))

    config = SimpleNamespace(
        cache_config=SimpleNamespace(
            mamba_cache_mode="align", hash_block_size=4, cache_hit_alignment_tokens=4
        ),
        speculative_config=None,
    )
    spec = SimpleNamespace(
        block_size=4, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=1
    )
    metadata = SimpleNamespace(
        query_start_loc=torch.tensor([0, 10]),
        query_start_loc_cpu=torch.tensor([0, 10]),
        seq_lens_cpu_upper_bound=torch.tensor([10]),
        block_table_tensor=torch.tensor([[0, 3, 2]], dtype=torch.int32),
    )
    checkpoint = MambaPrefillCheckpointBuilder(config, spec).build(metadata, [0])
    assert checkpoint is not None
    assert checkpoint.offsets == [8]
    inputs = torch.arange(20.0).reshape(10, 2)
    for backend in ("torch", "triton"):
        window = torch.full((5, 2, 3), float("nan"))
        states = torch.full((5, 4, 4), float("nan"))
        used = MambaPrefillCheckpointExporter().export(
            checkpoint,
            raw_qkv=inputs,
            conv_state=window,
            cu_seqlens=torch.tensor([0, 10], dtype=torch.int32),
            recurrent_checkpoint=torch.ones(1, 4, 4),
            recurrent_state=states,
            backend=backend,
        )
        untouched = [0, 1, 2, 4]
        assert torch.equal(window[3], inputs[5:8].T)
        assert states[3].sum() == 16
        assert window[untouched].isnan().all()
        assert states[untouched].isnan().all()
        print(used)

    for room in ("models", "engine", "replay", "bench", "draw", "figures", "explore"):
        try:
            import_module(f"mambackpt.{room}")
        except ModuleNotFoundError:
            continue
        raise SystemExit(f"{room} is here, so this shows nothing")
    try:
        plan([8000], [8000], True, 1536, 16, False, 1536)
    except CheckpointError:
        pass
    else:
        raise SystemExit("a boolean passed as a size")


if __name__ == "__main__":
    main()
