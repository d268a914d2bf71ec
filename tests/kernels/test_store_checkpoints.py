"""The export kernels in Triton's interpreter: exactly the addressed elements change."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (
    LAYOUTS,
    Sizes,
    copied,
    everything,
    make_inputs,
    pools,
    random_sizes,
    store_by_hand,
)

from mambackpt.kernels.flat_store import MOST_ELEMENTS, flat_store_checkpoints, plan_flat_store
from mambackpt.kernels.store_checkpoints import (
    MAX_GRID,
    element_offset,
    plan_store,
    runs_interpreted,
    store_cache_checkpoints,
)
from mambackpt.kernels.torch_copies import store_loop

KERNELS = [store_cache_checkpoints, flat_store_checkpoints]


@pytest.fixture(params=KERNELS, ids=["tiled", "plain"])
def store(request):
    return request.param


def check(store, sizes):
    """Run one case and compare both pools whole with the reference; return the inputs."""
    inputs = make_inputs(sizes)
    expected = copied(inputs)
    store_by_hand(expected)
    store(**inputs)
    for got, want in zip(pools(inputs), pools(expected), strict=True):
        assert torch.equal(got, want)
    return inputs


def test_the_kernels_were_imported_into_the_interpreter():
    """E02: triton-lang/triton #9171. This triton and this numpy run a load and a store."""
    assert runs_interpreted(), "set TRITON_INTERPRET=1 before triton is imported"
    check(store_cache_checkpoints, Sizes())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("padding", [0, 1, 16])
@pytest.mark.parametrize("extra_columns", [0, 2])
def test_windows_land_in_either_layout_with_padding_and_speculative_columns_untouched(
    store, layout, padding, extra_columns
):
    """X04: vllm issue #38897, PR #37416: one logical window, whatever the pool's strides."""
    inputs = check(
        store, Sizes(layout=layout, padding=padding, extra_columns=extra_columns, width=6)
    )
    assert torch.equal(inputs["conv_state"][3, :, :3], inputs["raw_qkv"][3:6].T)
    assert inputs["conv_state"][:, :, 3:].isnan().all()


def test_both_layouts_hold_the_same_logical_window(store):
    """X04: vllm issue #38897: the layouts differ in memory, not in what an index returns."""
    first, second = (check(store, Sizes(layout=layout))["conv_state"] for layout in LAYOUTS)
    assert first.stride() != second.stride()
    assert torch.equal(first.nan_to_num(99.0), second.nan_to_num(99.0))


def test_the_window_is_raw_inputs_oldest_first_up_to_the_cut(store):
    """X01: state-spaces/mamba PR #1027: inputs 1..8 cut at 5 leave [3, 4, 5]."""
    inputs = make_inputs(Sizes(query_lens=(8,), offsets=(5,), blocks=(2,), width=1, row=None))
    inputs["raw_qkv"] = torch.arange(1.0, 9.0).view(8, 1)
    store(**inputs)
    assert inputs["conv_state"][2, 0].tolist() == [3.0, 4.0, 5.0]


def test_the_null_block_and_rows_without_a_cut_stay_poisoned(store):
    """X10: vllm PR #35219: two rows, one of them null; only the other becomes finite."""
    inputs = check(store, Sizes(query_lens=(9, 9), offsets=(6, 6), blocks=(0, 4)))
    for pool in (inputs["conv_state"], inputs["recurrent_state"]):
        finite = [block for block in range(len(pool)) if not pool[block].isnan().any()]
        assert finite == [4]
        assert sum(bool(pool[block].isnan().all()) for block in range(len(pool))) == len(pool) - 1


@pytest.mark.parametrize("length", [63, 500, 1000])
def test_the_last_valid_token_closes_the_window(store, length):
    """X10: inclusionAI/cuLA PR #38: tails of 63, 500 and 1000 tokens, with NaN behind them."""
    inputs = make_inputs(Sizes(query_lens=(length, 2), offsets=(length, 0), blocks=(2, 0)))
    inputs["raw_qkv"][length:] = float("nan")
    store(**inputs)
    assert torch.equal(inputs["conv_state"][2], inputs["raw_qkv"][length - 3 : length].T)


def test_recurrent_rows_say_which_emitted_state_a_request_uses(store):
    inputs = check(store, Sizes(recurrent_rows=(12, 0, 14), emitted_rows=15))
    assert torch.equal(inputs["recurrent_state"][3], inputs["recurrent_checkpoint"][12])
    assert torch.equal(inputs["recurrent_state"][5], inputs["recurrent_checkpoint"][14])


def test_token_indices_are_looked_up(store):
    inputs = check(store, Sizes(shuffled_tokens=True))
    tokens = inputs["token_indices"][3:6]
    assert torch.equal(inputs["conv_state"][3], inputs["raw_qkv"][tokens].T)


@pytest.mark.parametrize("shuffled_tokens", [False, True])
def test_a_layer_with_only_a_convolution(store, shuffled_tokens):
    check(store, Sizes(row=None, shuffled_tokens=shuffled_tokens))


@pytest.mark.parametrize("row", [(0, 4), (3,)])
@pytest.mark.parametrize(("width", "state_len"), [(0, 3), (5, 0)])
def test_zero_sizes_store_what_is_left(store, row, width, state_len):
    check(store, Sizes(row=row, width=width, state_len=state_len, extra_columns=1))


@pytest.mark.parametrize("rows", [0, 1])
def test_an_empty_batch_and_a_single_row(store, rows):
    check(store, Sizes(query_lens=(4,) * rows, offsets=(4,) * rows, blocks=(6,) * rows))


@pytest.mark.parametrize("size", [1, 63, 64, 65])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_awkward_sizes(store, size, layout):
    check(store, Sizes(width=size, row=(size,), layout=layout, padding=3))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("width", "row"), [(1_100, (3, 700)), (4_096, (2, 1_024))])
def test_rows_of_several_tiles_with_and_without_a_rest(layout, width, row):
    sizes = Sizes((5,), (4,), (2,), 3, width, 2, 1, row, layout)
    assert plan_store(**make_inputs(sizes)).grid[0] > 5
    check(store_cache_checkpoints, sizes)


def test_the_plain_kernel_covers_a_row_longer_than_its_window_and_the_other_way_round():
    for width, row in ((300, (10,)), (3, (700,))):
        check(flat_store_checkpoints, Sizes(width=width, row=row))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.float32),
    ],
)
def test_states_and_windows_are_converted_on_the_store(store, source, target):
    """Values that both dtypes hold; rounding is asserted on compiled code, see the other file."""
    check(
        store,
        Sizes(raw_dtype=source, conv_dtype=target, source_dtype=source, state_dtype=target),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_dtypes_keep_every_bit(store, dtype):
    """NaN payloads, infinities, both zeros and subnormals survive a copy."""
    inputs = make_inputs(
        Sizes(row=(256,), source_dtype=dtype, state_dtype=dtype, raw_dtype=dtype, conv_dtype=dtype)
    )
    words = torch.int32 if dtype == torch.float32 else torch.int16
    patterns = torch.arange(-128, 128, dtype=words) * (2**23 if words == torch.int32 else 2**7) + 1
    inputs["recurrent_checkpoint"] = patterns.view(dtype).expand(3, 256).contiguous()
    store(**inputs)
    assert torch.equal(inputs["recurrent_state"][3].view(words), patterns)


@pytest.mark.parametrize("channels_apart", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
def test_raw_inputs_may_be_strided_or_stored_channel_first(store, channels_apart, transposed):
    inputs = make_inputs(Sizes(channels_apart=channels_apart, width=6))
    if transposed:
        inputs["raw_qkv"] = inputs["raw_qkv"].T.contiguous().T
        assert inputs["raw_qkv"].stride(0) == 1
    expected = copied(inputs)
    store_by_hand(expected)
    store(**inputs)
    for got, want in zip(pools(inputs), pools(expected), strict=True):
        assert torch.equal(got, want)


def test_index_vectors_and_emitted_rows_may_be_slices(store):
    inputs = make_inputs(Sizes())
    for name in ("offsets", "state_indices", "cu_seqlens"):
        spread = torch.full((2 * len(inputs[name]),), 77, dtype=inputs[name].dtype)
        spread[::2] = inputs[name]
        inputs[name] = spread[::2]
    wide = torch.full((3, 2, 2, 3), float("nan"))
    wide[:, 1] = inputs["recurrent_checkpoint"]
    inputs["recurrent_checkpoint"] = wide[:, 1]
    expected = copied(inputs)
    store_by_hand(expected)
    store(**inputs)
    for got, want in zip(pools(inputs), pools(expected), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("state_indices", [3, 1, 7]),
        ("state_indices", [3, 1, -1]),
        ("cu_seqlens", [0, 9, 17, 30]),
        ("cu_seqlens", [0, 9, -2, 21]),
        ("cu_seqlens", [0, 9, 16, 20]),
        ("recurrent_rows", [0, 1, 3]),
        ("recurrent_rows", [0, 1, -1]),
        ("token_indices", [*range(18), 21, 19, 20]),
        ("token_indices", [*range(18), -1, 19, 20]),
        ("offsets", [6, 0, -4]),
    ],
)
def test_a_row_that_points_outside_is_skipped_whole(store, name, values):
    """K03, X02: a bad source or block loses window and state together, never one of them.

    A cut past its own query counts as outside too: its window would hold a neighbour's tokens.
    """
    inputs = make_inputs(Sizes(recurrent_rows=(0, 1, 2), shuffled_tokens=name == "token_indices"))
    inputs[name] = torch.tensor(values, dtype=inputs[name].dtype)
    expected = copied(inputs)
    store_by_hand(expected)
    store(**inputs)
    for got, want in zip(pools(inputs), pools(expected), strict=True):
        assert torch.equal(got, want)
    assert not inputs["recurrent_state"][3].isnan().any()
    for pool in (inputs["conv_state"], inputs["recurrent_state"]):
        assert pool[[0, 1, 2, 4, 5, 6]].isnan().all()


def test_a_source_outside_skips_the_window_even_if_states_are_empty(store):
    inputs = check(store, Sizes(row=(0, 4), recurrent_rows=(0, 1, 9)))
    assert not inputs["conv_state"][3].isnan().any()
    assert inputs["conv_state"][5].isnan().all()


def test_a_block_outside_only_one_pool_is_outside_both(store):
    inputs = make_inputs(Sizes())
    inputs["recurrent_state"] = inputs["recurrent_state"][:5]
    store(**inputs)
    assert inputs["conv_state"][5].isnan().all()
    assert not inputs["conv_state"][3].isnan().any()


@pytest.mark.parametrize("offset", [1, 2])
@pytest.mark.parametrize("shuffled_tokens", [False, True])
def test_a_short_window_is_completed_from_the_same_requests_past(store, offset, shuffled_tokens):
    """X02: vllm PR #56196: never the previous row's tokens, never the block it came from."""
    inputs = check(
        store,
        Sizes(offsets=(6, 0, offset), initial_windows=True, shuffled_tokens=shuffled_tokens),
    )
    before = inputs["initial_windows"][2]
    assert torch.equal(inputs["conv_state"][5, :, : 3 - offset], before[:, offset:])


def test_a_short_window_without_its_past_stores_nothing(store):
    """X02: vllm PR #56196: half a checkpoint is worse than none."""
    inputs = check(store, Sizes(offsets=(6, 0, 2)))
    assert inputs["conv_state"][5].isnan().all()
    assert inputs["recurrent_state"][5].isnan().all()


def test_skipping_short_windows_keeps_the_state_as_the_engine_does(store):
    """X02: the released kernel leaves out the window and stores the state."""
    inputs = check(store, Sizes(offsets=(6, 0, 2), skip_short_windows=True))
    assert inputs["conv_state"][5].isnan().all()
    assert torch.equal(inputs["recurrent_state"][5], inputs["recurrent_checkpoint"][2])


@given(st.integers(0, 10**6))
@settings(max_examples=60)
def test_random_exports_agree_with_the_reference_and_the_torch_copies(seed):
    inputs = make_inputs(random_sizes(seed))
    by_hand, in_torch, plain = copied(inputs), copied(inputs), copied(inputs)
    store_by_hand(by_hand)
    store_loop(**in_torch)
    store_cache_checkpoints(**inputs)
    flat_store_checkpoints(**plain)
    for want, *others in zip(
        pools(by_hand), pools(inputs), pools(plain), pools(in_torch), strict=True
    ):
        for got in others:
            assert torch.equal(got, want)


@triton.jit
def offset_probe(out, indices, stride, unit: tl.constexpr):
    place = tl.program_id(0)
    tl.store(out + place, element_offset(tl.load(indices + place), stride, unit))


@triton.jit
def careless_probe(out, indices, stride):
    place = tl.program_id(0)
    tl.store(out + place, tl.load(indices + place) * stride)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize(
    ("index", "stride", "offset", "wrapped"),
    [
        (4_854, 442_368, 2_147_254_272, 2_147_254_272),
        (4_855, 442_368, 2_147_696_640, -2_147_270_656),
        (10_923, 196_608, 2_147_549_184, -2_147_418_112),
        (319, 7_864_320, 2_508_718_080, -1_786_249_216),
        (11_000, 196_608, 2_162_688_000, -2_132_279_296),
    ],
)
def test_row_addresses_pass_32_bits(index, stride, offset, wrapped):
    """K01, K07, K08: vllm PR #55924, FlagGems issue #6083, dion PR #102.

    Blocks, tokens and emitted rows all go through this one function. The probe stores only the
    address, so no pool of gigabytes is needed; a careless probe shows that it would see the wrap.
    """
    indices = torch.tensor([index], dtype=torch.int32)
    out = torch.zeros(1, dtype=torch.int64)
    for unit in (1, 4, 8):
        offset_probe[(1,)](out, indices, stride // unit, unit)
        assert out.item() == offset
    careless_probe[(1,)](out, indices, stride)
    assert out.item() == wrapped


@pytest.mark.parametrize("elements", [2**24, 2**31])
def test_long_rows_fit_the_grid(elements):
    """Tiles go first: the second axis of a launch holds 65,535 programs, these rows need more."""
    meta = {"dtype": torch.bfloat16, "device": "meta"}
    inputs = make_inputs(Sizes(offsets=(4,) * 3)) | {
        "recurrent_checkpoint": torch.empty(3, elements, **meta),
        "recurrent_state": torch.empty(7, elements, **meta),
    }
    grid = plan_store(**inputs).grid
    assert elements / grid[0] <= 8_192
    assert elements / 256 > MAX_GRID[1]
    assert all(asked <= limit for asked, limit in zip(grid, MAX_GRID, strict=True))
    assert grid[1] == 3
    if elements > MOST_ELEMENTS:
        with pytest.raises(ValueError, match="counts up to 2,147,483,392 in 32 bits"):
            plan_flat_store(**inputs)
    else:
        assert plan_flat_store(**inputs).grid[0] == elements // 256


def test_more_rows_than_a_grid_holds_are_refused_before_anything_is_written(store):
    rows = MAX_GRID[1] + 1
    inputs = make_inputs(Sizes())
    inputs |= {
        "offsets": torch.zeros(rows, dtype=torch.int32),
        "state_indices": torch.zeros(rows, dtype=torch.int32),
        "cu_seqlens": torch.zeros(rows + 1, dtype=torch.int32),
    }
    with pytest.raises(ValueError, match=r"65,536 rows.*65,535.*several calls"):
        store(**inputs)
    assert inputs["conv_state"].isnan().all()


def test_the_number_of_programs_follows_rows_and_sizes_alone():
    """K05: lengths do not change the launch, so they cannot change what is compiled."""
    grids = {
        plan_store(**make_inputs(Sizes(query_lens=(length, 9, 8), width=64))).grid
        for length in (9, 100, 101, 102)
    }
    assert grids == {(4, 3)}


def test_poison_covers_the_padding_too():
    """The comparison above sees a write between two blocks."""
    inputs = make_inputs(Sizes(padding=4))
    before = everything(inputs["conv_state"]).clone()
    inputs["conv_state"].as_strided((1,), (1,), 16)[0] = 1.0
    assert not torch.equal(before, everything(inputs["conv_state"]))
