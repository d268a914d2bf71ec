"""Paged pools: what an export writes, byte for byte, and what a restore needs."""

import pytest
import torch

from mambackpt import CacheGeometry, CheckpointValueError
from mambackpt.resume import (
    ARCHITECTURES,
    CacheUnusedError,
    LayerState,
    Pools,
    StatePool,
    load_model,
    random_prompt,
    take_states,
)

EACH = pytest.mark.parametrize("name", ARCHITECTURES)


def pools_of(name: str, **options: object) -> Pools:
    model = load_model(name)
    return Pools(model, CacheGeometry(64, 64, model.architecture.alignment, 64), **options)  # type: ignore[arg-type]


@EACH
def test_only_the_bytes_of_reserved_blocks_are_written(name: str) -> None:
    """X10: pools start as NaN; the null block, other blocks and the padding stay as they were.

    The table reserves two: one for the checkpoint, one for the running state.
    """
    pools = pools_of(name)
    run = pools.model.run(random_prompt(100))
    table = pools.table([100])
    [stored] = pools.store([run], table=table)
    assert 0 not in table
    assert stored.block == table[0, 0]
    reserved = table[0].tolist()
    for pool in pools.states:
        untouched = pool.pages.clone()
        untouched[reserved] = 0xFF
        assert bool((untouched == 0xFF).all())
        written = pool.windows[0].nbytes
        written += 0 if pool.memories is None else pool.memories[0].nbytes
        for page in pool.pages[reserved]:
            assert bool((page[written:] == 0xFF).all())
            assert len(page) > written
            assert not bool(page[:written].view(torch.float32).isnan().any())


def test_a_pool_that_is_full_says_so() -> None:
    with pytest.raises(CheckpointValueError, match="3 blocks are asked for and 2 are free"):
        pools_of("lfm2", blocks=3).take(3)


@EACH
def test_a_window_holds_the_last_inputs_before_the_cut_oldest_first(name: str) -> None:
    pools = pools_of(name)
    run = pools.model.run(random_prompt(100))
    [stored] = pools.store([run])
    for pool, raw in zip(pools.states, run.raw, strict=True):
        tokens = pool.windows.shape[2]
        assert torch.equal(pool.windows[stored.block], raw[64 - tokens : 64].T)


def test_a_page_is_the_window_token_by_token_then_the_memory_then_padding() -> None:
    state = LayerState(torch.arange(6.0).view(2, 3), torch.arange(10.0, 18.0).view(2, 2, 2))
    pool = StatePool(2, state)
    pool.write(1, state)
    numbers = pool.pages[1].view(torch.float32)
    assert numbers[:6].tolist() == [0, 3, 1, 4, 2, 5]
    assert numbers[6:14].tolist() == [*range(10, 18)]
    assert bool(numbers[14:].isnan().all())


def test_delta_rule_memories_lie_with_value_channels_first() -> None:
    """As the engine keeps them; the models keep key channels first."""
    model = load_model("qwen3-next")
    cache = model.run(random_prompt(10)).cache
    [state, *_] = take_states(model.architecture, cache)
    assert state.memory is not None
    assert torch.equal(state.memory.transpose(1, 2), cache.layers[0].recurrent_states[0][0])


@EACH
def test_two_requests_of_one_export_keep_their_own_blocks(name: str) -> None:
    pools = pools_of(name)
    runs = [pools.model.run(random_prompt(length, length)) for length in (100, 150)]
    first, second = pools.store(runs)
    assert (first.position, second.position) == (64, 128)
    assert (first.column, second.column) == (0, 1)
    assert first.block != second.block
    assert not set(first.attention) & set(second.attention)


def test_a_state_is_not_emitted_where_the_planner_declines() -> None:
    model = load_model("qwen3-next")
    pools = Pools(model, CacheGeometry(16, 64, 64, 16))
    with pytest.raises(CheckpointValueError, match="some row has no checkpoint"):
        pools.store([model.run(random_prompt(100))])


def test_a_restored_cache_shows_if_the_input_before_a_window_is_read() -> None:
    pools = pools_of("mamba-2")
    [stored] = pools.store([pools.model.run(random_prompt(100))])
    cache = pools.restore(stored)
    for layer in cache.layers:
        assert bool(layer.conv_states[0][..., 0].isnan().all())
    for rest in ([1], [1, 2, 3]):
        assert not bool(pools.model.run(rest, pools.restore(stored)).logits.isnan().any())


@EACH
def test_a_model_that_ignores_its_cache_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, forward = load_model(name), load_model(name).module.forward
    cache = model.run(random_prompt(8)).cache
    deaf = lambda ids, cache, use_cache: forward(ids, use_cache=use_cache)  # noqa: E731
    monkeypatch.setattr(model.module, "forward", deaf)
    with pytest.raises(CacheUnusedError, match="left the cache as it was"):
        model.run(random_prompt(4), cache)
