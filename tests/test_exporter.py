"""The exporter: what it stores, what it refuses, and that a refusal writes nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_torch_copies import LAYOUTS, bits, conv_pool, fresh, poison, random_case, same

from mambackpt.errors import CheckpointError, CheckpointTypeError, CheckpointValueError
from mambackpt.exporter import MambaPrefillCheckpointExporter
from mambackpt.kernels.torch_copies import store_loop
from mambackpt.metadata import (
    CacheConfig,
    CommonMetadata,
    EngineConfig,
    KVCacheSpec,
    MambaPrefillCheckpointBuilder,
    MambaPrefillCheckpointMetadata,
)

BACKENDS = ("torch", "triton")


def metadata(offsets, blocks, query_lens=None, dtype=torch.int32):
    return MambaPrefillCheckpointMetadata(
        checkpoint_offsets=torch.tensor(offsets, dtype=torch.int32),
        state_indices=torch.tensor(blocks, dtype=dtype),
        offsets=list(offsets),
        query_lens=list(offsets) if query_lens is None else list(query_lens),
        request_rows=torch.arange(len(offsets)),
        block_cols=torch.zeros(len(offsets), dtype=torch.int64),
    )


def setting(**changes):
    """A sound export of two rows of 8 tokens, 4 channels, S = 3, states of 2 x 8, 6 blocks."""
    torch.manual_seed(0)
    sound = {
        "checkpoint": metadata([5, 8], [4, 2], [8, 8]),
        "raw_qkv": torch.randn(16, 4),
        "conv_state": poison((6, 4, 3)),
        "cu_seqlens": torch.tensor([0, 8, 16], dtype=torch.int32),
        "recurrent_checkpoint": torch.randn(2, 2, 8),
        "recurrent_state": poison((6, 2, 8)),
    }
    return sound | changes


def export(case, state_len=None, **options):
    case = dict(case)
    return MambaPrefillCheckpointExporter(state_len).export(
        case.pop("checkpoint"), **case, **options
    )


def written(case):
    """The elements of both pools that are no longer NaN."""
    pools = [case["conv_state"], case.get("recurrent_state")]
    return [None if pool is None else int(pool.isfinite().sum()) for pool in pools]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_window_is_the_last_raw_inputs_oldest_first(backend):
    """X01, state-spaces/mamba PR #1027: x = 1..8 cut at 5 keeps the raw inputs [3, 4, 5]."""
    conv = poison((3, 1, 3))
    export(
        {
            "checkpoint": metadata([5], [2], [8]),
            "raw_qkv": torch.arange(1.0, 9.0).view(8, 1),
            "conv_state": conv,
            "cu_seqlens": torch.tensor([0, 8]),
        },
        backend=backend,
    )
    assert conv[2].tolist() == [[3.0, 4.0, 5.0]]
    assert conv[:2].isnan().all()


def convolve(window, x, weight):
    """A causal convolution that starts from a window of raw inputs; returns outputs and window."""
    stream = torch.cat([window, x])
    S = len(weight) - 1
    out = torch.stack([stream[i : i + S + 1] @ weight for i in range(len(x))])
    return out, stream[len(stream) - S :]


def scan(state, u):
    """A gated recurrence over scalars; returns outputs and the state after the last one."""
    outputs = []
    for value in u:
        state = 0.5 * state + value
        outputs.append(state)
    return torch.stack(outputs), state


@given(st.integers(1, 15), st.integers(0, 2**20))
def test_a_resume_from_the_stored_checkpoint_repeats_the_whole_run(cut, seed):
    """X01: 16 tokens at once equal a cut, an export, a restore and the rest, to the last bit."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-8, 8, (16,), generator=generator).double()
    weight = torch.randint(-4, 4, (4,), generator=generator).double()
    zeros, start = torch.zeros(3).double(), torch.zeros(()).double()
    conv_out, _ = convolve(zeros, x, weight)
    outputs, final = scan(start, conv_out)

    conv, states = poison((2, 1, 3), torch.float64), poison((2, 1), torch.float64)
    _, at_cut = scan(start, conv_out[:cut])
    export(
        {
            "checkpoint": metadata([cut], [1], [16]),
            "raw_qkv": x[:, None],
            "conv_state": conv,
            "cu_seqlens": torch.tensor([0, 16]),
            "recurrent_checkpoint": at_cut.view(1, 1),
            "recurrent_state": states,
        },
        short_windows="complete",
        initial_windows=torch.zeros(1, 1, 3).double(),
    )
    resumed_conv, _ = convolve(conv[1, 0], x[cut:], weight)
    resumed, resumed_final = scan(states[1, 0], resumed_conv)
    assert torch.equal(resumed, outputs[cut:])
    assert torch.equal(resumed_final, final)


def test_a_window_after_the_convolution_would_resume_wrongly():
    """X01: the same run restored from outputs instead of inputs differs at once."""
    x, weight = torch.arange(1.0, 9.0), torch.tensor([1.0, 2.0, 3.0, 4.0])
    outputs, _ = convolve(torch.zeros(3), x, weight)
    right, _ = convolve(x[2:5], x[5:], weight)
    wrong, _ = convolve(outputs[2:5], x[5:], weight)
    assert torch.equal(right, outputs[5:])
    assert not torch.equal(wrong, outputs[5:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_of_a_pool_does_not_change_its_content(layout, backend):
    """X04, vllm issue #38897: dim-first, token-first and padded pools hold the same window."""
    case, reference = setting(conv_state=conv_pool(layout, 6, 4, 3)), setting()
    export(case, backend=backend)
    export(reference, backend="torch")
    assert case["conv_state"].shape == reference["conv_state"].shape
    assert same(case["conv_state"], reference["conv_state"])
    assert written(case) == [2 * 4 * 3, 2 * 16]
    storage = torch.empty(0).set_(case["conv_state"].untyped_storage())
    assert int(storage.isfinite().sum()) == 2 * 4 * 3


def test_padded_block_strides_keep_their_padding():
    """X04: a block stride of 442,368 elements for a row of 24."""
    memory = poison((3, 442_368), torch.bfloat16)
    conv, states = memory[:, :12].unflatten(1, (4, 3)), memory[:, 12:28].unflatten(1, (2, 8))
    case = setting(
        checkpoint=metadata([5, 8], [1, 2], [8, 8]), conv_state=conv, recurrent_state=states
    )
    export(case)
    assert int(memory.isfinite().sum()) == 2 * (12 + 16)


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_addressed_blocks_become_finite(backend):
    """X10, vllm PR #35219: a pool of NaN, one row with a block, one null."""
    case = setting(checkpoint=metadata([5, 8], [4, 0], [8, 8]))
    export(case, backend=backend)
    for pool in (case["conv_state"], case["recurrent_state"]):
        assert pool[4].isfinite().all()
        assert pool[[0, 1, 2, 3, 5]].isnan().all()


@pytest.mark.parametrize("tokens", [63, 500, 1000])
def test_the_last_window_ends_at_the_last_valid_token(tokens):
    """X10, inclusionAI/cuLA PR #38: not at the end of the padded kernel chunk of 64."""
    padded = -(-tokens // 64) * 64
    raw = poison((padded, 1))
    raw[:tokens, 0] = torch.arange(float(tokens))
    conv = poison((2, 1, 3))
    export(
        {
            "checkpoint": metadata([tokens], [1]),
            "raw_qkv": raw,
            "conv_state": conv,
            "cu_seqlens": torch.tensor([0, tokens]),
        }
    )
    assert conv[1, 0].tolist() == [tokens - 3.0, tokens - 2.0, tokens - 1.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_speculative_columns_stay_untouched(backend):
    case = setting(conv_state=poison((6, 4, 5)))
    export(case, state_len=3, backend=backend)
    assert case["conv_state"][:, :, 3:].isnan().all()
    assert written(case) == [24, 32]


def test_state_len_none_means_every_column():
    case = setting(conv_state=poison((6, 4, 5)))
    export(case)
    assert torch.equal(case["conv_state"][4].T, case["raw_qkv"][0:5])


@pytest.mark.parametrize("backend", BACKENDS)
def test_recurrent_rows_and_token_indices_say_where_things_lie(backend):
    case = setting(
        recurrent_checkpoint=torch.randn(5, 2, 8),
        recurrent_rows=torch.tensor([3, 0]),
        token_indices=torch.arange(15, -1, -1),
    )
    export(case, backend=backend)
    assert torch.equal(case["recurrent_state"][4], case["recurrent_checkpoint"][3])
    assert torch.equal(case["recurrent_state"][2], case["recurrent_checkpoint"][0])
    assert torch.equal(case["conv_state"][4].T, case["raw_qkv"][[13, 12, 11]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_with_only_a_convolution_passes_no_states(backend):
    case = setting()
    del case["recurrent_checkpoint"], case["recurrent_state"]
    assert export(case, backend=backend) == backend
    assert written(case) == [24, None]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("emitted", "stored"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.float32),
    ],
)
def test_the_store_converts(emitted, stored, backend):
    """Values that bfloat16 holds exactly: the interpreter truncates where compiled code rounds."""
    states = torch.randint(-64, 64, (2, 2, 8)).to(emitted)
    case = setting(recurrent_checkpoint=states, recurrent_state=poison((6, 2, 8), stored))
    export(case, backend=backend)
    assert torch.equal(case["recurrent_state"][4], states[0].to(stored))


def test_conversion_rounds_to_nearest_even():
    states = torch.tensor([1.0 + 2**-8, 1.0 + 3 * 2**-8, 1.0 + 2**-8 + 2**-20]).view(1, 3)
    case = setting(
        checkpoint=metadata([5], [1]),
        recurrent_checkpoint=states,
        recurrent_state=poison((6, 3), torch.bfloat16),
    )
    export(case)
    assert case["recurrent_state"][1].tolist() == [1.0, 1.0 + 2**-6, 1.0 + 2**-7]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [0, 1])
def test_empty_batches_and_rows_without_checkpoints_write_nothing(rows, backend):
    case = setting(
        checkpoint=metadata([0] * rows, [3] * rows, [8] * rows),
        cu_seqlens=torch.tensor([0, 8][: rows + 1]),
        recurrent_checkpoint=torch.randn(rows, 2, 8),
    )
    assert export(case, backend=backend) == backend
    assert written(case) == [0, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_sizes_are_no_special_case(backend):
    for changes in (
        {"conv_state": poison((6, 4, 0))},
        {"raw_qkv": torch.randn(16, 0), "conv_state": poison((6, 0, 3))},
    ):
        case = setting(**changes)
        export(case, backend=backend)
        assert written(case) == [0, 32]
    empty = setting(recurrent_checkpoint=torch.randn(2, 0, 8), recurrent_state=poison((6, 0, 8)))
    export(empty, backend=backend)
    assert written(empty) == [24, 0]


def test_sources_may_have_any_strides():
    case, plain = setting(), setting()
    case["raw_qkv"] = torch.randn(16, 4).T.contiguous().T.copy_(plain["raw_qkv"])
    wide = torch.zeros(2, 4, 8)
    wide[:, :2] = plain["recurrent_checkpoint"]
    case["recurrent_checkpoint"] = wide[:, :2]
    case["cu_seqlens"] = torch.tensor([0, 9, 8, 9, 16, 9])[::2]
    assert not case["raw_qkv"].is_contiguous()
    assert not case["recurrent_checkpoint"].is_contiguous()
    export(case)
    export(plain)
    for pool in ("conv_state", "recurrent_state"):
        assert same(case[pool], plain[pool])


def test_pools_that_want_gradients_are_written_without_them():
    case = setting(recurrent_state=poison((6, 2, 8)).requires_grad_())
    case["recurrent_checkpoint"].requires_grad_()
    export(case)
    assert case["recurrent_state"].grad_fn is None
    assert case["recurrent_state"][4].isfinite().all()


# Half checkpoints


def short_setting(**changes):
    """One query of 4 tokens, cut at 2, with windows of 3: the case the engine stores by half."""
    return setting(
        checkpoint=metadata([2], [1], [4]),
        raw_qkv=torch.arange(1.0, 5.0).view(4, 1),
        conv_state=poison((6, 1, 3)),
        cu_seqlens=torch.tensor([0, 4]),
        **changes,
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_half_a_checkpoint_is_refused(backend):
    """X02, vllm PR #56196: offset 2 with windows of 3 raises, and writes neither half."""
    case = short_setting()
    with pytest.raises(CheckpointValueError, match=r"offset 2.*short_windows="):
        export(case, backend=backend)
    assert written(case) == [0, 0]


@pytest.mark.parametrize(("start", "seq_len"), [(0, 3), (4, 7)])
def test_the_planner_places_a_cut_closer_than_a_window_and_the_exporter_refuses_it(start, seq_len):
    """X02: H = U = M = 2, A = 1, S = 3 gives offset 2, from the start and resumed."""
    config = EngineConfig(CacheConfig(hash_block_size=2, cache_hit_alignment_tokens=2))
    m = CommonMetadata.from_lengths([seq_len], [seq_len - start], [[1, 2, 3, 4]])
    made = MambaPrefillCheckpointBuilder(config, KVCacheSpec(2, 1)).build(m, [0])
    assert made is not None
    assert made.offsets == [2]
    case = short_setting() | {"checkpoint": made, "cu_seqlens": torch.tensor([0, 3])}
    with pytest.raises(CheckpointValueError, match="offset 2"):
        export(case)
    assert written(case) == [0, 0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("cut", "window"), [(1, [8, 9, 1]), (2, [9, 1, 2]), (3, [1, 2, 3])])
def test_a_short_window_is_completed_from_before_its_own_query(cut, window, backend):
    """X02, flash-linear-attention issue #1140: T = 1, 2; never from the neighbour's tokens."""
    raw = torch.cat([torch.full((4, 1), 77.0), torch.arange(1.0, 5.0).view(4, 1)])
    case = short_setting() | {
        "checkpoint": metadata([4, cut], [3, 1], [4, 4]),
        "raw_qkv": raw,
        "cu_seqlens": torch.tensor([0, 4, 8]),
    }
    initial = torch.tensor([[[55.0, 55.0, 55.0]], [[7.0, 8.0, 9.0]]])
    export(case, short_windows="complete", initial_windows=initial, backend=backend)
    assert case["conv_state"][1, 0].tolist() == window
    assert case["conv_state"][3, 0].tolist() == [77.0] * 3
    assert written(case) == [6, 32]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_engines_half_checkpoint_can_be_studied(backend):
    """X02: the released kernel skips the window and stores the state."""
    case = short_setting()
    export(case, short_windows="engine", backend=backend)
    assert written(case) == [0, 16]


def test_completing_needs_the_inputs_before_the_query():
    case = short_setting()
    with pytest.raises(CheckpointValueError, match=r"initial_windows of shape \(1, 1, 3\)"):
        export(case, short_windows="complete")
    for shape in ((1, 1, 2), (2, 1, 3), (1, 3, 1), (3,)):
        with pytest.raises(CheckpointValueError, match="initial_windows has shape"):
            export(case, short_windows="complete", initial_windows=torch.zeros(shape))
    assert written(case) == [0, 0]


# Refusals

ROWS = torch.tensor([0, 1])
REFUSED = {
    "K03: fewer blocks than offsets": ({"checkpoint": "blocks"}, "state_indices has shape"),
    "K03: fewer device offsets": ({"checkpoint": "offsets"}, "checkpoint_offsets has shape"),
    "K03: fewer query lengths": ({"checkpoint": "query_lens"}, "query_lens has 1 entries"),
    "K03: too few query starts": ({"cu_seqlens": torch.tensor([0, 8])}, "at least 3"),
    "K03: cut after its query": (
        {"cu_seqlens": torch.tensor([0, 4, 16])},
        "row 0 is cut at offset 5 of tokens 0 to 4",
    ),
    "starts of rank 2": ({"cu_seqlens": torch.tensor([[0, 8, 16]])}, "cu_seqlens has shape"),
    "starts past the batch": ({"cu_seqlens": torch.tensor([0, 8, 24])}, "row 1 .*has 16"),
    "starts before the batch": ({"cu_seqlens": torch.tensor([-8, 8, 16])}, "row 0 .*-8 to 8"),
    "falling starts": ({"cu_seqlens": torch.tensor([8, 16, 8])}, "row 1 .*16 to 8"),
    "starts that are floats": ({"cu_seqlens": torch.tensor([0.0, 8, 16])}, "float32"),
    "offset past its query": ({"checkpoint": metadata([5, 8], [4, 2], [8, 7])}, "row 1 .*offset 8"),
    "negative offset": ({"checkpoint": metadata([5, -8], [4, 2], [8, 8])}, "row 1 .*offset -8"),
    "offsets that disagree": ({"checkpoint": "stale"}, "host copy"),
    "block past the pools": ({"checkpoint": metadata([5, 8], [4, 6], [8, 8])}, "row 1 .*block 6"),
    "block past one pool": ({"recurrent_state": poison((3, 2, 8))}, "block 4.*recurrent_state"),
    "negative block": ({"checkpoint": metadata([5, 8], [4, -1], [8, 8])}, "block -1"),
    "one block twice": ({"checkpoint": metadata([5, 8], [4, 4], [8, 8])}, "rows 0 and 1 both"),
    "blocks that are floats": (
        {"checkpoint": metadata([5, 8], [4, 2], [8, 8], torch.float32)},
        "state_indices is torch.float32",
    ),
    "X08: another component": ({"recurrent_checkpoint": torch.randn(2, 4, 3)}, "component"),
    "state without its source": ({"recurrent_checkpoint": None}, "recurrent_state given alone"),
    "source without its pool": ({"recurrent_state": None}, "recurrent_checkpoint given alone"),
    "rows without states": (
        {"recurrent_state": None, "recurrent_checkpoint": None, "recurrent_rows": ROWS},
        "recurrent_rows given alone",
    ),
    "too few sources": ({"recurrent_checkpoint": torch.randn(1, 2, 8)}, "has 1 rows"),
    "too few recurrent rows": ({"recurrent_rows": ROWS[:1]}, "recurrent_rows has shape"),
    "recurrent row outside": ({"recurrent_rows": ROWS + 1}, r"recurrent_rows\[1\] is 2"),
    "negative recurrent row": ({"recurrent_rows": ROWS - 1}, r"recurrent_rows\[0\] is -1"),
    "source rows not dense": (
        {"recurrent_checkpoint": torch.randn(2, 8, 2).transpose(1, 2)},
        "recurrent_checkpoint .*dense",
    ),
    "pool rows not dense": ({"recurrent_state": poison((6, 2, 9))[:, :, :8]}, "dense"),
    "expanded window pool": ({"conv_state": poison((1, 4, 3)).expand(6, 4, 3)}, "own memory"),
    "expanded state pool": ({"recurrent_state": poison((1, 2, 8)).expand(6, 2, 8)}, "own memory"),
    "blocks that overlap": (
        {"recurrent_state": poison((100,)).as_strided((6, 2, 8), (8, 8, 1))},
        "own memory",
    ),
    "integers into floats": ({"recurrent_checkpoint": torch.ones(2, 2, 8).int()}, "int32"),
    "windows of integers": ({"raw_qkv": torch.ones(16, 4).long()}, "int64"),
    "inputs of rank 3": ({"raw_qkv": torch.randn(1, 16, 4)}, "raw_qkv has shape"),
    "another width": ({"raw_qkv": torch.randn(16, 5)}, "conv_state has shape"),
    "tokens before channels": ({"conv_state": poison((6, 3, 4))}, "transpose"),
    "pool of rank 2": ({"conv_state": poison((6, 12))}, "conv_state has shape"),
    "tokens outside": ({"token_indices": torch.arange(1, 17)}, "row 1 reads token 16"),
    "negative tokens": ({"token_indices": torch.arange(-1, 15)}, "row 0 reads token -1"),
    "tokens of rank 2": ({"token_indices": torch.arange(16).view(2, 8)}, "token_indices has shape"),
    "too few tokens": ({"token_indices": torch.arange(9)}, "token_indices has 9"),
    "two devices": ({"conv_state": poison((6, 4, 3)).to("meta")}, "conv_state is on meta"),
    "a list": ({"cu_seqlens": [0, 8, 16]}, "cu_seqlens is a list"),
}
_BROKEN_METADATA = {
    "blocks": metadata([5, 8], [4], [8, 8]),
    "query_lens": metadata([5, 8], [4, 2], [8]),
}
_BROKEN_METADATA["offsets"] = MambaPrefillCheckpointMetadata(
    torch.tensor([5]), torch.tensor([4, 2]), [5, 8], [8, 8], ROWS, ROWS
)
_BROKEN_METADATA["stale"] = MambaPrefillCheckpointMetadata(
    torch.tensor([5, 4]), torch.tensor([4, 2]), [5, 8], [8, 8], ROWS, ROWS
)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_export_writes_nothing_and_says_why(name, backend):
    """K03 (programs sized by one tensor, others shorter) and X08, vllm PR #42792, among others."""
    changes, message = REFUSED[name]
    changes = dict(changes)
    if isinstance(changes.get("checkpoint"), str):
        changes["checkpoint"] = _BROKEN_METADATA[changes["checkpoint"]]
    case = setting(**changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        export(case, backend=backend)
    assert "xpected" in str(caught.value)
    assert "Try" in str(caught.value)
    for name in ("conv_state", "recurrent_state"):
        pool = case[name]
        assert pool is None or pool.device.type == "meta" or pool.isnan().all()


def test_lengths_that_disagree_as_reported_are_refused():
    """K03: offsets of 3, state_indices of 2, cu_seqlens of 3 where 4 are needed."""
    case = setting(checkpoint=metadata([3, 3, 3], [1, 2], [8, 4, 4]))
    with pytest.raises(CheckpointValueError, match="state_indices"):
        export(case)
    case = setting(checkpoint=metadata([3, 3, 3], [1, 2, 3], [8, 4, 4]))
    with pytest.raises(CheckpointValueError, match=r"cu_seqlens .*at least 4"):
        export(case)


def test_states_of_several_components_are_told_apart_by_shape():
    """X08, vllm PR #42792: [conv_q, conv_k, conv_v, ssm]; position 1 is a convolution state."""
    components = [poison((6, 4, 3)), poison((6, 4, 3)), poison((6, 4, 3)), poison((6, 2, 8))]
    with pytest.raises(CheckpointValueError, match=r"lists? several convolution states first"):
        export(setting(recurrent_state=components[1]))
    export(setting(recurrent_state=components[3]))
    assert components[3][4].isfinite().all()


@pytest.mark.parametrize("name", ["short_windows", "backend"])
def test_an_unknown_choice_lists_the_known_ones(name):
    with pytest.raises(CheckpointValueError, match=f"{name} is 'maybe'; expected one of "):
        export(setting(), **{name: "maybe"})


def test_no_metadata_means_no_export():
    with pytest.raises(CheckpointTypeError, match="no row has one"):
        export(setting(checkpoint=None))


@pytest.mark.parametrize("state_len", [-1, True, 3.0])
def test_state_len_is_a_count(state_len):
    with pytest.raises((CheckpointValueError, CheckpointTypeError), match="state_len"):
        MambaPrefillCheckpointExporter(state_len)


def test_a_window_wider_than_the_pool_is_refused():
    with pytest.raises(CheckpointValueError, match="3 columns and state_len is 4"):
        export(setting(), state_len=4)


def test_more_rows_than_a_grid_axis_holds_are_refused():
    R = 65_536
    case = setting(
        checkpoint=metadata([0] * R, [0] * R),
        cu_seqlens=torch.zeros(R + 1, dtype=torch.int32),
        recurrent_checkpoint=None,
        recurrent_state=None,
    )
    with pytest.raises(CheckpointValueError, match=r"65536 rows.*65535"):
        export(case, backend="triton")
    assert export(case, backend="torch") == "torch"


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_validation_a_row_that_points_outside_is_skipped_whole(backend):
    for changes in (
        {"checkpoint": metadata([5, 8], [4, 9], [8, 8])},
        {"checkpoint": metadata([5, 8], [4, -3], [8, 8])},
        {"cu_seqlens": torch.tensor([0, 8, 12])},
        {"recurrent_rows": torch.tensor([0, 7])},
        {"token_indices": torch.cat([torch.arange(13), torch.tensor([16, 14, 15])])},
    ):
        case = setting(**changes)
        export(case, backend=backend, validate=False)
        assert written(case) == [12, 16]
        assert case["conv_state"][4].isfinite().all()


# Backends


def test_auto_runs_torch_on_the_cpu_even_where_the_interpreter_is_there():
    assert os.environ["TRITON_INTERPRET"] == "1"
    assert export(setting()) == "torch"


@given(st.integers(0, 2**32))
def test_the_exporter_equals_the_truth_on_random_strides_and_layouts(seed):
    case = random_case(seed)
    truth, mine = fresh(case), fresh(case)
    store_loop(**truth)
    starts, R = mine["cu_seqlens"].tolist(), len(mine["offsets"])
    checkpoint = metadata(
        mine.pop("offsets").tolist(),
        mine.pop("state_indices").tolist(),
        [starts[i + 1] - starts[i] for i in range(R)],
    )
    engine = mine.pop("skip_short_windows", False)
    used = MambaPrefillCheckpointExporter(mine.pop("state_len")).export(
        checkpoint, short_windows="engine" if engine else "complete", **mine
    )
    assert used == "torch"
    for pool in ("conv_state", "recurrent_state"):
        if case.get(pool) is not None:
            assert torch.equal(bits(mine[pool]), bits(truth[pool]))


def run_python(code, **environment):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-c", code], env=env | environment, capture_output=True, text=True
    )


EXPORT = """
import torch
from mambackpt.exporter import MambaPrefillCheckpointExporter
from mambackpt.metadata import MambaPrefillCheckpointMetadata
one = torch.tensor([1])
def export(backend):
    return MambaPrefillCheckpointExporter().export(
        MambaPrefillCheckpointMetadata(one * 3, one, [3], [4], one, one), raw_qkv=torch.ones(4, 2),
        conv_state=torch.zeros(2, 2, 3), cu_seqlens=torch.tensor([0, 4]), backend=backend)
"""
ASK = """
try:
    print(export("triton"))
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("before", "environment", "answer"),
    [
        ("", {}, "TRITON_INTERPRET=1 set before triton was imported"),
        ("import triton, os; os.environ['TRITON_INTERPRET'] = '1'", {}, "set before triton was"),
        ("", {"TRITON_INTERPRET": "1"}, "triton"),
    ],
)
def test_the_kernel_on_cpu_tensors_needs_the_interpreter_from_the_start(
    before, environment, answer
):
    """E01, triton issue #5142: the flag is read on import; setting it late is a clear error."""
    done = run_python(before + EXPORT + ASK, **environment)
    assert answer in done.stdout, done.stderr


def test_importing_and_exporting_on_the_cpu_needs_neither_gpu_nor_triton():
    """E01: with no GPU, no flag and triton not importable, the torch path still runs."""
    blocked = "import sys; sys.modules['triton'] = None"
    done = run_python(
        blocked + EXPORT + "print(export('auto'))\ntry:\n    export('triton')\n"
        "except ValueError as error:\n    print(error)"
    )
    assert done.stdout.startswith("torch\n"), done.stderr
    assert 'Try backend="torch"' in done.stdout


def export_on_a_gpu():
    """Run in a process without the interpreter: the kernel, compiled, against torch on the CPU."""
    case = setting()
    moved = {
        name: value.cuda() if isinstance(value, torch.Tensor) else value
        for name, value in case.items()
    }
    host = case["checkpoint"]
    moved["checkpoint"] = MambaPrefillCheckpointMetadata(
        host.checkpoint_offsets.cuda(),
        host.state_indices.cuda(),
        host.offsets,
        host.query_lens,
        host.request_rows.cuda(),
        host.block_cols.cuda(),
    )
    assert export(moved) == "triton"  # compiles
    torch.cuda.set_sync_debug_mode("error")
    assert export(moved) == "triton"
    torch.cuda.set_sync_debug_mode("default")
    export(case)
    for pool in ("conv_state", "recurrent_state"):
        assert same(moved[pool].cpu(), case[pool])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_export_on_a_gpu_runs_the_kernel_and_does_not_wait():
    here = str(Path(__file__).parent)
    done = run_python("import test_exporter; test_exporter.export_on_a_gpu()", PYTHONPATH=here)
    assert done.returncode == 0, done.stderr
