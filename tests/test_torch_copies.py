"""The torch ways of storing checkpoints: the truth, the fast path and every baseline agree."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mambackpt.kernels.torch_copies import (
    BASELINES,
    has_compiler,
    plan_copies,
    read_rows,
    store_compiled,
    store_index_copy,
    store_indexing,
    store_loop,
    store_rows,
)

NAN = float("nan")
FORMS = {name: form for name, form in BASELINES.items() if form is not store_compiled}
FORMS["store_rows"] = store_rows


def poison(shape, dtype=torch.float32):
    """Memory in which every element shows whether it was written."""
    return torch.full(shape, NAN, dtype=dtype)


def bits(tensor):
    """The bytes of a tensor's whole storage: padding between rows included."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def conv_pool(layout, blocks, width, columns, dtype=torch.float32):
    """A poisoned [blocks, width, columns] pool in one of the layouts that engines use."""
    if layout == "dim-first":
        return poison((blocks, width, columns), dtype)
    if layout == "token-first":
        return poison((blocks, columns, width), dtype).transpose(1, 2)
    if layout == "padded blocks":
        flat = poison((blocks, width * columns + 5), dtype)
        return flat[:, : width * columns].unflatten(1, (width, columns))
    if layout == "padded channels":
        return poison((blocks, columns, width + 3), dtype)[:, :, :width].transpose(1, 2)
    if layout == "every second channel":
        return poison((blocks, width * 2, columns), dtype)[:, ::2]
    raise AssertionError(layout)


LAYOUTS = ("dim-first", "token-first", "padded blocks", "padded channels", "every second channel")


def state_pool(blocks, shape, pad, dtype=torch.float32):
    """A poisoned pool of dense rows whose block stride is ``pad`` elements longer than a row."""
    size = torch.Size(shape).numel()
    return poison((blocks, size + pad), dtype)[:, :size].unflatten(1, shape)


def random_case(seed):
    """Inputs of one export over random shapes, strides, skips, remaps and dtypes."""
    rng = random.Random(seed)
    R, S = rng.randint(0, 5), rng.randint(0, 4)
    width, columns = rng.choice([1, 3, 8]), S + rng.randint(0, 2)
    blocks = R + rng.randint(1, 4)
    lens = [rng.randint(0, 9) for _ in range(R)]
    starts = [rng.randint(0, 2)]
    for length in lens:
        starts.append(starts[-1] + length)
    offsets = [rng.choice([0, rng.randint(0, length), length]) for length in lens]
    short = rng.choice(["complete", "skip"])
    tokens = starts[-1] + rng.randint(0, 3)
    dtype, pool_dtype = rng.choice(
        [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16,) * 2]
    )
    raw = torch.randn(tokens, width * rng.randint(1, 2), dtype=torch.float32).to(dtype)
    destinations = rng.sample(range(1, blocks), R)
    index = rng.choice([torch.int32, torch.int64])
    case = {
        "offsets": torch.tensor(offsets, dtype=torch.int32),
        "state_indices": torch.tensor(
            [block * (rng.random() < 0.8) for block in destinations], dtype=index
        ),
        "raw_qkv": raw[:, -width:],
        "conv_state": conv_pool(rng.choice(LAYOUTS), blocks, width, columns, pool_dtype),
        "cu_seqlens": torch.tensor(starts, dtype=index),
        "state_len": S,
    }
    if rng.random() < 0.8:
        shape = rng.choice([(4,), (2, 3), (2, 2, 4), ()])
        sources = R + rng.randint(0, 3)
        size, pad = torch.Size(shape).numel(), rng.choice([0, 4, 5])
        emitted = torch.randn(sources, size + pad).to(dtype)[:, :size].unflatten(1, shape or (1,))
        case["recurrent_checkpoint"] = emitted if shape else emitted[:, 0]
        pool = state_pool(blocks, shape or (1,), rng.choice([0, 4, 5]), pool_dtype)
        case["recurrent_state"] = pool if shape else pool[:, 0]
        if rng.random() < 0.5:
            case["recurrent_rows"] = torch.tensor(rng.sample(range(sources), R), dtype=index)
    if rng.random() < 0.4:
        case["token_indices"] = torch.randperm(max(tokens, 1)).to(index)[:tokens]
    if short == "complete":
        case["initial_windows"] = torch.randn(R, S, width).transpose(1, 2).to(dtype)
    else:
        case["skip_short_windows"] = True
    return case


def fresh(case):
    """The same case with pools of its own, strides and padding kept."""
    mine = dict(case)
    for name in ("conv_state", "recurrent_state"):
        if mine.get(name) is not None:
            old = mine[name]
            storage = old.untyped_storage().clone()
            mine[name] = torch.empty(0, dtype=old.dtype).set_(
                storage, old.storage_offset(), old.shape, old.stride()
            )
    return mine


def expected(case):
    """What the pools must hold, one element at a time, from the words of the rule."""
    conv = case["conv_state"].float().clone()
    state = case.get("recurrent_state")
    state = None if state is None else state.float().clone()
    S, remap = case["state_len"], case.get("token_indices")
    for i, (offset, block) in enumerate(
        zip(case["offsets"].tolist(), case["state_indices"].tolist(), strict=True)
    ):
        if offset == 0 or block == 0:
            continue
        if not (offset < S and case.get("skip_short_windows")):
            for column in range(S):
                t = offset - S + column
                if t < 0:
                    values = case["initial_windows"][i, :, S + t]
                else:
                    token = int(case["cu_seqlens"][i]) + t
                    token = token if remap is None else int(remap[token])
                    values = case["raw_qkv"][token]
                conv[block, :, column] = values.to(case["conv_state"].dtype).float()
        if state is not None:
            rows = case.get("recurrent_rows")
            source = i if rows is None else int(rows[i])
            values = case["recurrent_checkpoint"][source].to(case["recurrent_state"].dtype)
            state[block] = values.float()
    return conv, state


def same(a, b):
    return torch.equal(torch.nan_to_num(a.float(), nan=1e30), torch.nan_to_num(b.float(), nan=1e30))


@given(st.integers(0, 2**32))
def test_the_truth_stores_what_the_rule_says_and_nothing_else(seed):
    """X10, vllm PR #35219: pools start as NaN and are compared whole."""
    case = fresh(random_case(seed))
    conv, state = expected(case)
    store_loop(**case)
    assert same(case["conv_state"], conv)
    if state is not None:
        assert same(case["recurrent_state"], state)


@given(st.integers(0, 2**32))
def test_every_form_equals_the_truth_to_the_last_byte_of_memory(seed):
    case = random_case(seed)
    truth = fresh(case)
    store_loop(**truth)
    plan = plan_copies(**case)
    for name, form in FORMS.items():
        for given_plan in (None, plan):
            mine = fresh(case)
            form(plan=given_plan, **mine)
            for pool in ("conv_state", "recurrent_state"):
                if case.get(pool) is not None:
                    assert torch.equal(bits(mine[pool]), bits(truth[pool])), (name, pool)


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(torch.device("cpu")), reason="torch.compile needs g++")
def test_the_compiled_form_equals_the_truth():
    case = wide_case(torch.float32, torch.bfloat16)
    truth, mine = fresh(case), fresh(case)
    store_loop(**truth)
    store_compiled(**mine)
    for pool in ("conv_state", "recurrent_state"):
        assert torch.equal(bits(mine[pool]), bits(truth[pool]))


def wide_case(dtype, pool_dtype, *, pad=0, offset=0, rows=None, layout="token-first", width=40):
    """Rows long enough for 16-byte elements, with ``pad`` and ``offset`` elements around them."""
    R, S, size = 6, 3, 64
    memory = poison((9 * (size + pad) + offset,), pool_dtype)[offset:]
    pool = memory.view(9, size + pad)[:, :size]
    case = {
        "offsets": torch.tensor([4, 5, 0, 6, 7, 3]),
        "state_indices": torch.tensor([8, 3, 4, 1, 0, 5]),
        "raw_qkv": torch.randn(48, width).to(torch.bfloat16),
        "conv_state": conv_pool(layout, 9, width, S, torch.bfloat16),
        "cu_seqlens": torch.arange(0, 49, 8),
        "state_len": S,
        "recurrent_checkpoint": torch.randn(R, size).to(dtype),
        "recurrent_state": pool,
    }
    if rows is not None:
        case["recurrent_rows"] = torch.tensor(rows)
    return case


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [None, [5, 4, 3, 2, 1, 0], [0, 2, 3, 4, 1, 5]])
@pytest.mark.parametrize(("pad", "offset"), [(0, 0), (4, 0), (4, 4), (1, 0), (0, 1), (4, 2)])
@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.float32, torch.bfloat16)])
def test_the_fast_path_equals_the_truth_on_and_off_the_16_byte_grid(
    layout, rows, pad, offset, dtypes
):
    width = 33_000 if (pad, offset) == (0, 0) else 40  # above and below one serial copy
    case = wide_case(*dtypes, pad=pad, offset=offset, rows=rows, layout=layout, width=width)
    truth, mine = fresh(case), fresh(case)
    store_loop(**truth)
    store_rows(**mine)
    for pool in ("conv_state", "recurrent_state"):
        assert torch.equal(bits(mine[pool]), bits(truth[pool]))


def test_the_fast_path_keeps_every_bit_pattern():
    """NaN payloads, infinities and subnormals pass a 16-byte view unchanged."""
    patterns = torch.randint(-(2**31), 2**31 - 1, (4, 64), dtype=torch.int64).to(torch.int32)
    patterns[0, :4] = torch.tensor([0x7F800001, -1, 0x7FC12345, 1], dtype=torch.int64).int()
    case = wide_case(torch.float32, torch.float32)
    case |= {
        "offsets": torch.tensor([3] * 4),
        "state_indices": torch.tensor([2, 1, 4, 3]),
        "cu_seqlens": torch.arange(0, 33, 8),
        "recurrent_checkpoint": patterns.view(torch.float32),
    }
    store_rows(**case)
    stored = case["recurrent_state"][torch.tensor([2, 1, 4, 3])].contiguous()
    assert torch.equal(stored.view(torch.int32), patterns)


def damaged(**changes):
    torch.manual_seed(0)
    case = wide_case(torch.float32, torch.float32, rows=[0, 1, 2, 3, 4, 5])
    case["token_indices"] = torch.arange(48)
    case |= changes
    return case


FAULTS = {
    "block past the pool": {"state_indices": torch.tensor([9, 3, 4, 1, 0, 5])},
    "block below the pool": {"state_indices": torch.tensor([-1, 3, 4, 1, 0, 5])},
    "block past the smaller pool": {"recurrent_state": poison((8, 64))},
    "recurrent row past the source": {"recurrent_rows": torch.tensor([6, 1, 2, 3, 4, 5])},
    "recurrent row below the source": {"recurrent_rows": torch.tensor([-1, 1, 2, 3, 4, 5])},
    "start before the batch": {"cu_seqlens": torch.tensor([-1, 8, 16, 24, 32, 40, 48])},
    "cut after the query": {"offsets": torch.tensor([9, 5, 0, 6, 7, 3])},
    "token below the batch": {
        "token_indices": torch.cat([torch.tensor([0, 1, -1]), torch.arange(3, 48)])
    },
    "token past the batch": {
        "token_indices": torch.cat([torch.tensor([0, 1, 48]), torch.arange(3, 48)])
    },
    "cut closer than a window": {"offsets": torch.tensor([2, 5, 0, 6, 7, 3])},
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("form", FORMS)
def test_a_row_that_points_outside_is_skipped_whole(fault, form):
    """Neither its window nor its state is written; the other rows are."""
    case, sound = damaged(**FAULTS[fault]), damaged()
    sound["offsets"] = torch.tensor([0, 5, 0, 6, 7, 3])
    case, sound = fresh(case), fresh(sound)
    FORMS[form](**case)
    store_loop(**sound)
    assert same(case["conv_state"], sound["conv_state"])
    blocks = len(case["recurrent_state"])
    assert same(case["recurrent_state"], sound["recurrent_state"][:blocks])
    assert case["recurrent_state"][3].isfinite().all()


def test_tokens_past_the_end_of_the_batch_are_not_read():
    case = damaged(token_indices=None, cu_seqlens=torch.arange(0, 49, 8))
    case["raw_qkv"] = case["raw_qkv"][:42]  # the last query has lost all but two tokens
    assert [copy.row for copy in read_rows(**case)] == [0, 1, 3]


@pytest.mark.parametrize("form", [store_index_copy, store_indexing])
def test_index_tensors_are_64_bit(form):
    """K07, FlagGems issue #6083: int32 11,000 times a row of 196,608 wraps to -2,132,279,296."""
    case = wide_case(torch.float32, torch.float32)
    case |= {name: case[name].int() for name in ("offsets", "state_indices", "cu_seqlens")}
    plan = plan_copies(**case)
    for index in (plan.blocks, plan.sources, plan.window_blocks, plan.window_tokens):
        assert index.dtype == torch.int64
    wrapped = torch.tensor(11_000, dtype=torch.int32) * torch.tensor(196_608, dtype=torch.int32)
    assert int(wrapped) == -2_132_279_296
    assert int(plan.blocks.new_tensor(11_000) * 196_608) == 2_162_688_000
    form(plan=plan, **case)
    assert case["recurrent_state"][8].isfinite().all()


@pytest.mark.parametrize("form", FORMS)
def test_a_block_beyond_2_gib_elements_receives_its_row(form):
    """K01, vllm PR #55924: block 4855 at stride 442,368 starts past element 2^31.

    The pool is 4.3 GB of address space of which a few pages are ever touched.
    """
    stride, block = 442_368, 4855
    memory = torch.empty(stride * (block + 1) + 64, dtype=torch.bfloat16)
    pool = memory.as_strided((block + 1, 64), (stride, 1))
    conv = memory.as_strided((block + 1, 4, 3), (stride, 1, 4), 64)
    pool[block] = conv[block] = NAN
    emitted = torch.arange(64.0).to(torch.bfloat16)[None]
    raw = torch.arange(32.0).view(8, 4).to(torch.bfloat16)
    FORMS[form](
        offsets=torch.tensor([5]),
        state_indices=torch.tensor([block]),
        raw_qkv=raw,
        conv_state=conv,
        cu_seqlens=torch.tensor([0, 8]),
        state_len=3,
        recurrent_checkpoint=emitted,
        recurrent_state=pool,
    )
    assert block * stride == 2_147_696_640
    assert torch.equal(memory[block * stride :][:64], emitted[0])
    assert torch.equal(memory[block * stride + 64 :][:12], raw[2:5].flatten())


def test_plans_name_every_checkpoint_once():
    case = wide_case(torch.float32, torch.float32, rows=[5, 4, 3, 2, 1, 0])
    plan = plan_copies(**case)
    assert plan.blocks.tolist() == [8, 3, 1, 5]
    assert plan.sources.tolist() == [5, 4, 2, 0]
    assert plan.window_tokens.tolist() == [[1, 2, 3], [10, 11, 12], [27, 28, 29], [40, 41, 42]]
    assert not plan.partial
