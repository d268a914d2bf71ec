"""The compiled kernels on a CUDA device; run as a script, this file is the child that does it.

Tests run with the interpreter's flag set, which would carry CUDA tensors to the CPU and back.
"""

import pytest
import torch
from kernel_cases import Sizes, copied, make_inputs, pools, random_sizes, store_by_hand


def compare(device: str, seeds: int) -> int:
    """Run both kernels on this device on random cases; return how many matched the reference."""
    from mambackpt.kernels.flat_store import flat_store_checkpoints
    from mambackpt.kernels.store_checkpoints import store_cache_checkpoints

    matched = 0
    for seed in range(seeds):
        expected = make_inputs(random_sizes(seed))
        for store in (store_cache_checkpoints, flat_store_checkpoints):
            inputs = moved(expected, device)
            store(**inputs)
            by_hand = copied(expected)
            store_by_hand(by_hand)
            found = [memory.cpu() for memory in pools(inputs)]
            matched += all(map(torch.equal, found, pools(by_hand)))
    return matched


def moved(inputs, device):
    """The same inputs in memory of this device: pools whole, padding included."""
    mine = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    for name in ("conv_state", "recurrent_state"):
        pool = inputs.get(name)
        if pool is not None:
            memory = torch.empty(0, dtype=pool.dtype).set_(pool.untyped_storage())
            memory = memory.clone().to(device)
            mine[name] = memory.as_strided(pool.shape, pool.stride(), pool.storage_offset())
    return mine


def rounds_to_nearest(device: str) -> bool:
    """Whether float32 states become bfloat16 as torch rounds them, on every kind of value."""
    from mambackpt.kernels.store_checkpoints import store_cache_checkpoints

    inputs = make_inputs(Sizes(row=(64, 1024), state_dtype=torch.bfloat16))
    words = torch.randint(
        -(2**31), 2**31, (3, 64, 1024), generator=torch.Generator().manual_seed(1)
    )
    states = words.to(torch.int32).view(torch.float32).nan_to_num()
    inputs["recurrent_checkpoint"] = states
    on_device = moved(inputs, device)
    store_cache_checkpoints(**on_device)
    return torch.equal(on_device["recurrent_state"][3].cpu(), states[0].to(torch.bfloat16))


def test_what_the_child_compares_holds_in_the_interpreter():
    assert compare("cpu", seeds=10) == 20


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled_kernels_store_what_the_reference_stores_and_round_to_nearest():
    from mambackpt.bench.compiled import run_without_interpreter

    assert run_without_interpreter(__file__).split() == ["600", "True"]


if __name__ == "__main__":
    print(compare("cuda", seeds=300), rounds_to_nearest("cuda"))
