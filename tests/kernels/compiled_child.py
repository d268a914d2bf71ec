"""What only a process without the interpreter can show; prints JSON for test_compiled_kernels.

Run as a script: it imports the kernels as a machine without a GPU would, tries the interpreter's
flag too late, and counts compilations.
"""

import json
import os
from typing import Any


def flag_set_late() -> dict[str, Any]:
    """Set the flag after import, then launch on CPU tensors."""
    from kernel_cases import Sizes, make_inputs

    from mambackpt.kernels.flat_store import flat_store_checkpoints
    from mambackpt.kernels.store_checkpoints import runs_interpreted, store_cache_checkpoints

    os.environ["TRITON_INTERPRET"] = "1"
    messages, inputs = {}, make_inputs(Sizes())
    for store in (store_cache_checkpoints, flat_store_checkpoints):
        try:
            store(**inputs)
        except RuntimeError as error:
            messages[store.__name__] = str(error)
    del os.environ["TRITON_INTERPRET"]
    untouched = bool(inputs["conv_state"].isnan().all())
    return {"interpreted": runs_interpreted(), "messages": messages, "untouched": untouched}


def compilations() -> dict[str, list[int]]:
    """Compilations so far, after each of a series of launches that differ in lengths only."""
    import torch
    import triton

    from mambackpt.bench.compiled import Compilation, LayerShape, OfflineDriver, inputs_of
    from mambackpt.kernels.flat_store import plan_flat_store
    from mambackpt.kernels.store_checkpoints import plan_store

    triton.runtime.driver.set_active(OfflineDriver("sm_90"))
    request = Compilation(LayerShape("small", 128, (2, 64)), every_option=True)
    counts: dict[str, list[int]] = {"tiled": [], "plain": [], "misaligned": []}

    def warm_up(plan: Any, name: str, **changed: torch.Tensor) -> None:
        for rows in (1, 3, 16):
            for tokens in (100, 101, 102, 112):
                sizes = {"rows": rows, "tokens": tokens, "blocks": 10 * rows + tokens}
                launch = plan(**(inputs_of(request, **sizes) | changed))
                launch.kernel.warmup(**launch.arguments, grid=launch.grid)
                counts[name].append(len(launch.kernel.device_caches[0][0]))

    for name, plan in (("tiled", plan_store), ("plain", plan_flat_store)):
        warm_up(plan, name)
        # A slice of a wider projection, and a buffer that was laid out channel by channel.
        warm_up(plan, name, raw_qkv=torch.empty(112, 3 * 128, dtype=torch.bfloat16)[:, :128])
        for tokens in (100, 101, 102, 112):
            across = torch.empty(128, tokens, dtype=torch.bfloat16).T
            warm_up(plan, name, raw_qkv=across)
    whole = torch.empty(112 * 128 + 1, dtype=torch.bfloat16)
    warm_up(plan_store, "misaligned", raw_qkv=whole[1:].view(112, 128))
    return counts


if __name__ == "__main__":
    print(json.dumps({"late": flag_set_late(), "compilations": compilations()}))
