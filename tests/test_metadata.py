"""The builder: which rows get a checkpoint, and which blocks receive it."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mambackpt.errors import CheckpointError, CheckpointTypeError, CheckpointValueError
from mambackpt.metadata import (
    NULL_BLOCK_ID,
    CacheConfig,
    CommonMetadata,
    EngineConfig,
    KVCacheSpec,
    MambaPrefillCheckpointBuilder,
    MambaPrefillCheckpointMetadata,
    SpeculativeConfig,
)
from mambackpt.planner import compute_mamba_prefill_checkpoints


def builder(H=16, M=16, A=16, U=None, *, drop=False, lookahead=0, **spec):
    config = EngineConfig(
        CacheConfig(hash_block_size=H, cache_hit_alignment_tokens=H if U is None else U),
        speculative_config=SpeculativeConfig(drop_eagle_block=drop),
        num_hash_lookahead_tokens=lookahead,
    )
    return MambaPrefillCheckpointBuilder(config, KVCacheSpec(M, A, **spec))


def table(rows, width, first=1):
    return [[first + r * width + c for c in range(width)] for r in range(rows)]


class Untouchable:
    """A device tensor that must not be looked at, except for where it is."""

    device = torch.device("cpu")

    def __getattr__(self, name):
        raise AssertionError(f"device memory was touched: {name}")


def untouchable(m):
    return SimpleNamespace(
        query_start_loc=Untouchable(),
        query_start_loc_cpu=m.query_start_loc_cpu,
        seq_lens_cpu_upper_bound=m.seq_lens_cpu_upper_bound,
        block_table_tensor=Untouchable(),
    )


LONG = CommonMetadata.from_lengths([40], [40], table(1, 3))


def test_fields_have_the_shapes_dtypes_and_values_of_the_rule():
    m = CommonMetadata.from_lengths([40, 33, 48], [40, 1, 48], table(3, 3))
    made = builder().build(m, [0, 1, 2])
    assert made.offsets == [32, 0, 32]
    assert made.query_lens == [40, 1, 48]
    assert made.checkpoint_offsets.dtype == torch.int32
    assert made.checkpoint_offsets.tolist() == [32, 0, 32]
    assert made.block_cols.dtype == made.request_rows.dtype == torch.int64
    assert made.block_cols.tolist() == [1, -1, 1]
    assert made.request_rows.tolist() == [0, 1, 2]
    assert made.state_indices.tolist() == [2, NULL_BLOCK_ID, 8]


def test_the_position_lies_on_the_grid_of_hits_where_that_is_wider_than_a_hash_unit():
    """150 tokens, units of 16, hits on 64: the state after 128 is saved, not that after 144."""
    m = CommonMetadata.from_lengths([150], [150], table(1, 3))
    assert builder(H=16, M=64, A=16, U=64).build(m, [0]).offsets == [128]
    assert builder(H=16, M=64, A=16).build(m, [0]).offsets == [144]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_blocks_keep_the_dtype_of_the_table(dtype):
    m = dataclasses.replace(LONG, block_table_tensor=LONG.block_table_tensor.to(dtype))
    assert builder().build(m, [0]).state_indices.dtype == dtype


def test_request_rows_pick_rows_of_this_step():
    """B04, wtdcode/vllm-backport PR #63: rows [2, 0] read the lengths of rows 2 and 0."""
    m = CommonMetadata.from_lengths([40, 33, 64], [40, 1, 64], table(3, 4))
    made = builder().build(m, [2, 0])
    assert made.query_lens == [64, 40]
    assert made.offsets == [48, 32]
    assert made.state_indices.tolist() == [9 + 2, 1 + 1]


def test_a_step_never_writes_through_another_steps_rows():
    """B04, vllm PR #35157: the export of step k's A goes to 3 or nowhere, never to 4."""
    columns = [0, 0, 0]
    step = CommonMetadata.from_lengths([40, 40], [40, 40], [[0, 3, 0], [0, 4, 0]])
    rows = [0, 1]
    made = builder().build(step, rows)
    step.block_table_tensor.copy_(torch.tensor([[0, 4, 0], [0, 8, 0]]))  # the next step's table
    step.query_start_loc_cpu.zero_()
    step.seq_lens_cpu_upper_bound.zero_()
    rows[:] = columns
    assert made.state_indices.tolist() == [3, 4]
    assert made.request_rows.tolist() == [0, 1]
    assert (made.offsets, made.query_lens) == ([32, 32], [40, 40])


def test_another_group_gathers_its_own_blocks():
    """B03, vllm PR #34874: group tables [[5, 6]] then [[9, 10]] give 5, then 9."""
    m = CommonMetadata.from_lengths([32], [32], [[5, 6]])
    first = builder().build(m, [0])
    second = first.regather_state_indices(torch.tensor([[9, 10]], dtype=torch.int32))
    assert first.block_cols.tolist() == [0]
    assert (first.state_indices.tolist(), second.state_indices.tolist()) == ([5], [9])
    assert second is not first
    for name in ("checkpoint_offsets", "request_rows", "block_cols"):
        mine, other = getattr(first, name), getattr(second, name)
        assert mine.tolist() == other.tolist()
        assert mine.data_ptr() != other.data_ptr()
    second.state_indices.fill_(77)
    second.offsets.append(1)
    second.query_lens.clear()
    second.request_rows.fill_(3)
    second.block_cols.fill_(3)
    assert first.state_indices.tolist() == [5]
    assert (first.offsets, first.query_lens) == ([16], [32])
    assert (first.request_rows.tolist(), first.block_cols.tolist()) == ([0], [0])


def by_hand(cols, rows=None):
    rows = list(range(len(cols))) if rows is None else rows
    return MambaPrefillCheckpointMetadata(
        checkpoint_offsets=torch.tensor([16 * (col >= 0) for col in cols], dtype=torch.int32),
        state_indices=torch.zeros(len(cols), dtype=torch.int32),
        offsets=[16 * (col >= 0) for col in cols],
        query_lens=[32] * len(cols),
        request_rows=torch.tensor(rows),
        block_cols=torch.tensor(cols),
    )


def test_column_minus_one_is_masked_not_wrapped():
    """B01, vllm PR #50493: columns [-1, 1] of [[11, 12, 13], [21, 22, 23]] give [0, 22]."""
    blocks = torch.tensor([[11, 12, 13], [21, 22, 23]])
    assert by_hand([-1, 1]).regather_state_indices(blocks).state_indices.tolist() == [0, 22]


@pytest.mark.parametrize(("cols", "row", "col"), [([3, 1], 0, 3), ([1, 3], 1, 3), ([1, -2], 1, -2)])
def test_a_column_outside_the_table_names_row_column_and_width(cols, row, col):
    """B01, vllm PR #50493: a clear error before launch, not a device-side assert."""
    blocks = torch.tensor([[11, 12, 13], [21, 22, 23]])
    with pytest.raises(CheckpointValueError, match=rf"row {row} .*column {col}\b.* 3 columns"):
        by_hand(cols).regather_state_indices(blocks)


def test_a_table_sized_for_another_group_is_refused_by_the_builder():
    """B01: 1 M tokens in blocks of 16 need 65,536 columns; a table divided by 8 ranks has 8,192."""
    tokens = 2**20
    narrow = CommonMetadata.from_lengths([tokens], [tokens], torch.ones(1, 8192).int().tolist())
    with pytest.raises(CheckpointValueError, match=r"row 0 .*column 65534\b.* 8192 columns"):
        builder().build(narrow, [0])
    wide = torch.arange(65536, dtype=torch.int32)[None]
    enough = dataclasses.replace(narrow, block_table_tensor=wide)
    assert builder().build(enough, [0]).state_indices.tolist() == [65534]


def test_rows_in_the_message_are_request_rows():
    m = CommonMetadata.from_lengths([20, 64, 20], [20, 64, 20], table(3, 2))
    with pytest.raises(CheckpointValueError, match=r"request row 1 .*column 2\b.* 2 columns"):
        builder().build(m, [0, 1])
    assert builder().build(m, [0]).state_indices.tolist() == [1]


@pytest.mark.parametrize("shape", [(3,), (1, 1, 3)])
def test_a_table_of_another_rank_is_refused(shape):
    m = dataclasses.replace(LONG, block_table_tensor=torch.ones(shape, dtype=torch.int32))
    with pytest.raises(CheckpointValueError, match=r"expected \[rows, columns\]"):
        builder().build(m, [0])
    with pytest.raises(CheckpointValueError, match=r"expected \[rows, columns\]"):
        by_hand([1]).regather_state_indices(m.block_table_tensor)


def test_a_table_with_too_few_rows_is_refused():
    m = CommonMetadata.from_lengths([40, 40], [40, 40], table(1, 3))
    with pytest.raises(CheckpointValueError, match=r"request row 1 .* 1 rows"):
        builder().build(m, [0, 1])
    for rows in ([1], [-1]):
        with pytest.raises(CheckpointValueError, match=rf"request row {rows[0]} "):
            by_hand([1], rows).regather_state_indices(torch.ones(1, 3, dtype=torch.int64))


def test_a_table_of_floats_is_refused():
    m = dataclasses.replace(LONG, block_table_tensor=torch.ones(1, 3))
    with pytest.raises(CheckpointTypeError, match="float32"):
        builder().build(m, [0])


def test_a_table_on_another_device_is_refused():
    with pytest.raises(CheckpointValueError, match="meta"):
        by_hand([1]).regather_state_indices(torch.ones(1, 3, dtype=torch.int64, device="meta"))


@pytest.mark.parametrize("row", [1, 7, -1])
def test_a_row_outside_the_step_is_refused(row):
    with pytest.raises(CheckpointValueError, match=rf"request_rows\[1\] is {row}\b"):
        builder().build(untouchable(LONG), [0, row])


@pytest.mark.parametrize("row", [True, 0.0, "0", None])
def test_a_row_that_is_no_integer_is_refused(row):
    with pytest.raises(CheckpointTypeError, match=r"request_rows\[0\]"):
        builder().build(LONG, [row])


@pytest.mark.parametrize(("seq", "query"), [([10], [12]), ([40, 40], [40, -4])])
def test_a_query_outside_its_sequence_names_its_row(seq, query):
    m = CommonMetadata.from_lengths(seq, query, table(len(seq), 3))
    with pytest.raises(CheckpointValueError, match=f"request row {len(seq) - 1} "):
        builder().build(m, [len(seq) - 1])


def test_lengths_that_are_no_integers_are_refused():
    m = dataclasses.replace(LONG, seq_lens_cpu_upper_bound=torch.tensor([40.0]))
    with pytest.raises(CheckpointTypeError, match="seq_lens_cpu_upper_bound"):
        builder().build(m, [0])


def test_host_copies_must_be_on_the_host():
    m = dataclasses.replace(LONG, query_start_loc_cpu=torch.zeros(2, device="meta"))
    with pytest.raises(CheckpointValueError, match="query_start_loc_cpu is on meta"):
        builder().build(m, [0])


WITHOUT_LENGTHS = dataclasses.replace(LONG, seq_lens_cpu_upper_bound=None)
PLAIN_SPEC = KVCacheSpec(16, 16)


@pytest.mark.parametrize(
    ("cache", "spec"),
    [
        (CacheConfig(16, 16, mamba_cache_mode="all"), PLAIN_SPEC),
        (CacheConfig(16, 16, mamba_cache_mode="none"), PLAIN_SPEC),
        (CacheConfig(16, 16), KVCacheSpec(16, 16, num_prefill_checkpoint_blocks=0)),
        (CacheConfig(None, 16), PLAIN_SPEC),
        (CacheConfig(16, None), PLAIN_SPEC),
        (CacheConfig(None, None), PLAIN_SPEC),
    ],
)
@pytest.mark.parametrize("m", [LONG, WITHOUT_LENGTHS])
def test_none_without_touching_the_device_where_nothing_is_to_write(cache, spec, m):
    """B07, vllm PR #38270: an unresolved size at start-up is None, never a fallback to H = M.

    These four tests come before the one for missing sequence lengths.
    """
    build = MambaPrefillCheckpointBuilder(EngineConfig(cache), spec).build
    assert build(untouchable(m), [0]) is None


@pytest.mark.parametrize("rows", [[], [0], [0, 1]])
def test_none_without_touching_the_device_where_no_row_has_a_checkpoint(rows):
    """B07, vllm PR #53766."""
    m = CommonMetadata.from_lengths([33, 16], [1, 16], table(2, 3))
    assert builder().build(untouchable(m), rows) is None


def test_none_where_the_kernel_cannot_export():
    assert builder(A=None).build(untouchable(LONG), [0]) is None


def test_missing_sequence_lengths_are_an_error_before_rows_are_asked_about():
    for rows in ([], [0], [99]):
        with pytest.raises(CheckpointValueError, match="seq_lens_cpu_upper_bound is None"):
            builder().build(untouchable(WITHOUT_LENGTHS), rows)


def test_drop_and_lookahead_reach_the_planner():
    m = CommonMetadata.from_lengths([160], [160], table(1, 10))
    assert builder().build(m, [0]).offsets == [144]
    assert builder(drop=True).build(m, [0]).offsets == [144]
    longer = CommonMetadata.from_lengths([170], [170], table(1, 11))
    assert builder().build(longer, [0]).offsets == [160]
    assert builder(drop=True).build(longer, [0]).offsets == [144]
    # A lookahead turns the drop off: 170 - 11 rounds down to 144, 170 - 4 to 160.
    assert builder(drop=True, lookahead=11).build(longer, [0]).offsets == [144]
    assert builder(drop=True, lookahead=4).build(longer, [0]).offsets == [160]


def test_engine_objects_with_other_attributes_work_unchanged():
    class Speculative:
        method = "eagle3"

        def use_eagle_block_drop(self):
            return self.method.startswith("eagle")

    cache = SimpleNamespace(
        mamba_cache_mode="align",
        hash_block_size=16,
        cache_hit_alignment_tokens=16,
        block_size=528,
        enable_prefix_caching=True,
    )
    engine = SimpleNamespace(
        cache_config=cache, speculative_config=Speculative(), model_config=object()
    )
    spec = SimpleNamespace(
        block_size=16,
        num_prefill_checkpoint_blocks=1,
        prefill_checkpoint_alignment=16,
        shapes=((3, 4),),
        num_speculative_blocks=2,
    )
    m = SimpleNamespace(
        query_start_loc=torch.tensor([0, 40], dtype=torch.int32),
        query_start_loc_cpu=torch.tensor([0, 40], dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.tensor([40], dtype=torch.int32),
        block_table_tensor=torch.tensor([[4, 5, 6, -1]], dtype=torch.int32),
        num_reqs=1,
        max_query_len=40,
    )
    assert MambaPrefillCheckpointBuilder(engine, spec).build(m, [0]).offsets == [16]
    engine.speculative_config = None
    made = MambaPrefillCheckpointBuilder(engine, spec).build(m, [0])
    assert (made.offsets, made.state_indices.tolist()) == ([32], [5])
    engine.num_hash_lookahead_tokens = 9
    assert MambaPrefillCheckpointBuilder(engine, spec).build(m, [0]).offsets == [16]


def test_padding_after_the_requests_is_not_read():
    m = SimpleNamespace(
        query_start_loc=torch.tensor([0, 40, 40, 40], dtype=torch.int32),
        query_start_loc_cpu=torch.tensor([0, 40, 40, 40], dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.tensor([40, -7, 0], dtype=torch.int32),
        block_table_tensor=torch.tensor([[4, 5, 6]] * 3, dtype=torch.int32),
    )
    assert builder().build(m, [0]).offsets == [32]


@given(st.data())
def test_the_builder_agrees_with_the_planner_and_gathers_what_it_says(data):
    H = data.draw(st.sampled_from([1, 4, 16]))
    M = H * data.draw(st.integers(1, 6))
    rows = data.draw(st.integers(1, 6))
    seq = data.draw(st.lists(st.integers(1, 40 * H), min_size=rows, max_size=rows))
    query = [data.draw(st.integers(0, length)) for length in seq]
    wanted = data.draw(st.lists(st.integers(0, rows - 1), max_size=rows, unique=True))
    drop, A = data.draw(st.booleans()), data.draw(st.sampled_from([None, 1, H, 2 * H]))
    m = CommonMetadata.from_lengths(seq, query, table(rows, 40 * H // M + 1))
    before = m.block_table_tensor.clone()
    made = builder(H, M, A, drop=drop).build(m, wanted)
    offsets, cols = compute_mamba_prefill_checkpoints(
        [seq[row] for row in wanted], [query[row] for row in wanted], H, M, A, drop, H
    )
    assert torch.equal(m.block_table_tensor, before)
    if not any(offsets):
        assert made is None
        return
    assert made.offsets == made.checkpoint_offsets.tolist() == offsets
    assert made.block_cols.tolist() == cols
    blocks = [
        int(before[row, col]) if col >= 0 else 0 for row, col in zip(wanted, cols, strict=True)
    ]
    assert made.state_indices.tolist() == blocks
    assert made.regather_state_indices(before).state_indices.tolist() == blocks


def test_every_refusal_belongs_to_one_family():
    with pytest.raises(CheckpointError):
        builder().build(LONG, [5])
