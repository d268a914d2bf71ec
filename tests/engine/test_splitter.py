"""Chunk ends: the released scheduler's recorded splits, its documented traces, and its limits."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mambackpt.engine import chunk_ends
from mambackpt.engine.splitter import Splitter
from mambackpt.errors import CheckpointTypeError, CheckpointValueError
from mambackpt.geometry import CacheGeometry

DATA = Path(__file__).parent.parent / "data"
RECORDED = json.loads((DATA / "split_vectors.json").read_text())
AHEAD = json.loads((DATA / "split_vectors_ahead.json").read_text())


def ends(prompt, block, unit=None, *, ckpt=None, budget=8192, **more):
    return chunk_ends(
        prompt,
        budget=budget,
        mamba_block_size=block,
        hash_block_size=unit or block,
        checkpoint_alignment=ckpt,
        internal_checkpoints=ckpt is not None,
        **more,
    )


def one_chunk(prompt, block, unit, offered, *, ckpt=None, start=0, limit=8192, drop=False, **more):
    geometry = CacheGeometry(unit, block, ckpt, unit, drop)
    split = Splitter(geometry, limit, internal_checkpoints=ckpt is not None)
    return split.end(start, offered, prompt=prompt, num_tokens=prompt, **more)


def test_every_recorded_split_of_the_released_scheduler():
    assert len(RECORDED["rows"]) == 250
    for *values, expected in RECORDED["rows"]:
        given_in = dict(zip(RECORDED["inputs"], values, strict=True))
        assert chunk_ends(given_in.pop("prompt"), **given_in) == expected, given_in


def test_every_recorded_split_with_hashes_that_look_ahead_and_of_replayed_outputs():
    """Up to three tokens ahead, starts inside a block, and more tokens than the prompt has."""
    assert len(AHEAD["rows"]) == 160
    for *values, expected in AHEAD["rows"]:
        given_in = dict(zip(AHEAD["inputs"], values, strict=True))
        assert chunk_ends(given_in.pop("prompt"), **given_in) == expected, given_in


@pytest.mark.parametrize(
    ("prompt", "unit", "ahead", "expected"),
    [
        (130, 64, 0, [128, 130]),
        (130, 64, 3, [64, 130]),
        (114, 16, 0, [64, 112, 114]),
        (114, 16, 3, [64, 96, 114]),
    ],
)
def test_a_hash_that_looks_ahead_moves_the_last_boundary_and_the_tail(
    prompt, unit, ahead, expected
):
    """Three tokens have to follow what is keyed: seen on the released splitter."""
    assert ends(prompt, 64, unit, num_hash_lookahead_tokens=ahead) == expected


def test_a_replay_runs_through_by_where_its_prefill_ends_and_not_by_its_tokens():
    """4,097 tokens in blocks of 512: the prefill ends at 4,096, so its checkpoint is at 3,584.

    From there nothing is gained inside, and the chunk stops at 4,096; of 4,098 tokens it is at
    4,096 and the chunk runs through.
    """
    replay = {"start": 3584, "ckpt": 16}
    assert ends(2000, 512, num_tokens=4097, **replay) == [4096, 4097]
    assert ends(2000, 512, num_tokens=4098, **replay) == [4098]


@pytest.mark.shared
def test_the_recorded_splits_here_are_those_of_the_specification(shared):
    cases = json.loads((shared / "spec" / "split_vectors.json").read_text())["cases"]
    assert [[*c["in"].values(), c["ends"]] for c in cases] == RECORDED["rows"]


@pytest.mark.parametrize(
    ("expected", "arguments", "options"),
    [
        ([7680, 8000], (8000, 1536), {}),
        ([8000], (8000, 1536), {"ckpt": 16}),
        ([7680, 7936, 8000], (8000, 1536, 128), {}),
        ([8000], (8000, 1536, 128), {"ckpt": 16}),
        ([8000], (8000, 1536, 128), {"ckpt": 16, "drop_eagle_block": True}),
        ([6144, 7808, 8000], (8000, 1536, 128), {"drop_eagle_block": True}),
        ([6288, 8000], (8000, 2096), {}),
        ([8000], (8000, 2096), {"ckpt": 1}),
        ([6288, 12576, 18864, 25152, 30000], (30000, 2096), {"ckpt": 1}),
        ([6288, 12576, 18864, 25152, 29344, 30000], (30000, 2096), {}),
        ([7920, 15840, 23760, 30000], (30000, 528), {"ckpt": 16}),
        ([7920, 15840, 23760, 29568, 30000], (30000, 528), {}),
        ([528], (528, 528), {}),
        ([528], (528, 528), {"ckpt": 16}),
        ([528, 529], (529, 528), {}),
        ([529], (529, 528), {"ckpt": 16}),
        ([1056], (1056, 528), {"ckpt": 16}),
        ([1057], (1057, 528), {"ckpt": 16}),
        ([8192, 9728, 9984, 10000], (10000, 512, 32), {}),
        ([8192, 10000], (10000, 512, 32), {"ckpt": 16}),
        ([10240, 11776, 11968, 12000], (12000, 512, 32), {"start": 9984, "budget": 2016}),
        ([12000], (12000, 512, 32), {"start": 9984, "budget": 2016, "ckpt": 16}),
        ([8192, 11392, 19584, 22784, 30000], (30000, 11392), {}),
        ([384, 512, 896, 1024, 1300], (1300, 512), {"long_prefill_threshold": 384}),
        ([3200, 3600, 3602], (3602, 1600, 16), {"start": 1984}),
        ([3200, 3600, 3602], (3602, 1600, 16), {"start": 1984, "ckpt": 16}),
        ([2002], (2002, 1600), {"ckpt": 16}),
        ([1600, 2002], (2002, 1600), {}),
        ([1600, 2000, 2002], (2002, 1600, 16), {}),
        ([3584, 4000], (2000, 512), {"num_tokens": 4000}),
        ([4000], (2000, 512), {"num_tokens": 4000, "ckpt": 16}),
        # A request resumed from a state inside a block, where the released rule drops the stop.
        ([3602], (3602, 1600, 16), {"start": 368, "ckpt": 16}),
        ([1600, 3200, 3600, 3602], (3602, 1600, 16), {"start": 368}),
    ],
)
def test_documented_traces(expected, arguments, options):
    assert ends(*arguments, **options) == expected


def test_a_junction_is_a_stop_of_its_own_only_with_shared_prefix_checkpoints():
    options = {"junction": 992, "drop_eagle_block": True}
    assert ends(2000, 512, 32, shared_prefix_checkpoint=True, **options) == [992, 1024, 1952, 2000]
    assert ends(2000, 512, 32, **options) == [512, 1024, 1952, 2000]


def test_a_junction_past_the_prompt_falls_back_to_the_block_grid():
    stops = ends(
        2000, 512, 32, num_tokens=4000, junction=2208, shared_prefix_checkpoint=True, budget=8192
    )
    assert 2048 in stops
    assert 2208 not in stops


@pytest.mark.parametrize(
    ("expected", "offered", "options"),
    [
        (1600, 2000, {"ckpt": 16}),
        (0, 512, {"drop": True}),
        (1600, 1700, {"drop": True}),
        (1600, 3602, {"drop": True}),
        (3200, 3602, {}),
    ],
)
def test_the_first_chunk_of_3602_tokens(expected, offered, options):
    assert one_chunk(3602, 1600, 1600, offered, **options) == expected


@pytest.mark.parametrize("start", [331, 1599, 1601, 1984, 2531, 3011])
def test_a_resume_inside_a_block_never_runs_past_a_boundary_unnoticed(start):
    """A start off the hash grid or in the checkpoint's own column (P06, vllm PR #51113)."""
    stops = ends(3602, 1600, 16, ckpt=16, start=start)
    assert stops[0] == (start // 1600 + 1) * 1600
    assert all(stop % 1600 == 0 for stop in stops if stop <= 3200)


@pytest.mark.parametrize(("budgets", "prompt"), [([364, 2002], 2002), ([1600, 1000, 3602], 3602)])
def test_a_budget_that_fragments_a_prompt_keeps_it_on_the_block_grid(budgets, prompt):
    """A remainder of the step's limit that reaches no boundary waits (P06, vllm PR #51763)."""
    start, seen = 0, []
    for budget in [*budgets, *[prompt] * 4]:
        if start < prompt:
            start = one_chunk(prompt, 1600, 1600, min(budget, prompt - start), start=start)
            seen.append(start)
    assert start == prompt
    assert all(end % 1600 == 0 for end in seen if end < prompt)


def test_a_limit_below_the_block_advances_inside_it_and_stops_again_at_its_end():
    """364 tokens a step in blocks of 1600 (P06, vllm PR #51113)."""
    stops = ends(2002, 1600, budget=364)
    assert stops[0] == 364
    assert 1600 in stops
    assert one_chunk(2002, 1600, 1600, 364, limit=2048) == 0


@pytest.mark.parametrize(
    ("block", "prompt", "budget"),
    [(1600, 2002, 364), (2048, 2966, 1866), (1536, 30000, 27648), (12288, 30000, 4000)],
)
def test_a_prefill_cut_short_inside_a_block_ends_a_chunk_at_every_boundary_it_keys(
    block, prompt, budget
):
    """The next chunk must end where the block does (S03, vllm PR #51113, issue #43559)."""
    stops = ends(prompt, block, budget=budget)
    last = (prompt - 1) // block * block
    assert last in stops
    for start, end in zip([0, *stops], stops, strict=False):
        if start % block:
            assert end <= (start // block + 1) * block


def test_a_block_2048_cut_at_1866_is_completed_by_182_tokens():
    """Chunks [1866, 1100]: first 182, then 918 (S03, vllm PR #34587)."""
    assert ends(2966, 2048, start=1866, budget=1100) == [2048, 2966]


@pytest.mark.parametrize(
    ("prompt", "block", "alignment"), [(1159, 1152, 16), (8000, 1536, 16), (8000, 2096, 1)]
)
def test_a_checkpoint_saves_the_second_forward(prompt, block, alignment):
    """A short tail no longer costs a model pass of its own (P12, vllm PR #56960)."""
    boundary = (prompt - 1) // block * block
    assert ends(prompt, block) == [boundary, prompt]
    assert ends(prompt, block, ckpt=alignment) == [prompt]


def test_a_prompt_behind_a_shared_prefix_stops_at_the_junction():
    """First, second and third request of a shared prefix of 6000 (S01, vllm issue #45238)."""
    assert ends(8000, 1056) == [7392, 8000]
    assert ends(8000, 1056, junction=5280) == [5280, 7392, 8000]
    assert ends(8000, 1056, start=5280, junction=5280) == [7392, 8000]


def test_a_budget_that_reaches_no_boundary_is_refused_with_its_numbers():
    with pytest.raises(CheckpointValueError) as caught:
        ends(30000, 11392, budget=8192, step_limit=11392)
    for number in ("11392", "8192"):
        assert number in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"budget": 0},
        {"budget": -1},
        {"start": -1},
        {"start": 100},
        {"junction": -1},
        {"num_tokens": 99},
        {"long_prefill_threshold": -1},
        {"step_limit": 10},
        {"mamba_block_size": 24},
        {"hash_block_size": 0},
        {"checkpoint_alignment": 0},
        {"num_hash_lookahead_tokens": -1},
    ],
)
def test_impossible_sizes_are_refused(options):
    sound = {"budget": 64, "mamba_block_size": 64, "hash_block_size": 16}
    with pytest.raises(CheckpointValueError):
        chunk_ends(100, **(sound | options))


@pytest.mark.parametrize("prompt", [True, 16.0, "16", None])
def test_a_prompt_that_is_no_count_is_refused(prompt):
    with pytest.raises(CheckpointTypeError):
        chunk_ends(prompt, budget=64, mamba_block_size=16, hash_block_size=16)


@given(
    st.integers(1, 400),
    st.sampled_from([(16, 4), (16, 16), (64, 16), (24, 8)]),
    st.integers(1, 300),
    st.sampled_from([None, 1, 4, 16]),
    st.booleans(),
    st.integers(0, 400),
)
def test_chunks_advance_to_the_end_and_leave_the_grid_only_where_a_stop_is(
    prompt, sizes, budget, alignment, drop, junction
):
    block, unit = sizes
    stops = ends(
        prompt,
        block,
        unit,
        ckpt=alignment,
        budget=budget,
        drop_eagle_block=drop,
        junction=min(junction, prompt - 1) // unit * unit,
    )
    assert stops[-1] == prompt
    assert all(0 < end - start <= budget for start, end in zip([0, *stops], stops, strict=False))
    if budget >= block:
        assert all(end % unit == 0 for end in stops[:-1])
