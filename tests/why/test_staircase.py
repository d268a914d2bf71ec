"""The staircase: what is computed again over lengths, and what a margin hides."""

from bisect import bisect_right

import pytest

from mambackpt import CheckpointValueError, Settings, explain_hit
from mambackpt.replay import replay, trace_from_tokens
from mambackpt.why import fork_stairs, lost_to_margin, resend_stairs, with_drop

SIZES = [(16, 64, 16, 0), (64, 64, 16, 0), (16, 64, None, 0), (16, 64, 16, None), (64, 64, None, 0)]


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize(("hash_unit", "block", "kernel", "retention"), SIZES)
def test_between_two_corners_nothing_changes(
    hash_unit: int, block: int, kernel: int | None, retention: int | None, drop: bool
) -> None:
    settings = Settings(
        mamba_block_size=block,
        hash_block_size=hash_unit,
        checkpoint_alignment=kernel,
        retention=retention,
        budget=128,
        drop_eagle_block=drop,
    )
    for stairs, own in ((resend_stairs(settings, 200), 0), (fork_stairs(settings, 200, 100), 100)):
        assert stairs.lengths[-1] == 200
        for length in range(1, 201):
            there = explain_hit(length + own, length + own, settings, shared=length)
            corner = stairs.verdicts[bisect_right(stairs.lengths, length) - 1]
            assert (there.joint, there.third) == (corner.joint, corner.third), length


def test_cliffs_are_where_one_more_token_saves_a_block() -> None:
    """P02: a prompt that ends on a boundary computes a block again, one token more only one."""
    settings = Settings(mamba_block_size=528, hash_block_size=528)
    assert resend_stairs(settings, 1600).cliffs() == [(528, 528, 1), (1056, 528, 1), (1584, 528, 1)]
    dropped = resend_stairs(with_drop(settings), 1600).cliffs()
    assert dropped == [(1055, 1055, 528), (1583, 1055, 528)]


def test_a_stair_may_begin_late() -> None:
    settings = Settings(mamba_block_size=64, hash_block_size=16)
    late, whole = resend_stairs(settings, 640, shortest=500), resend_stairs(settings, 640)
    assert late.lengths[0] == 500
    assert set(late.cliffs()) < set(whole.cliffs())


def test_what_is_shared_helps_a_third_prompt_first() -> None:
    stairs = fork_stairs(Settings(mamba_block_size=64, hash_block_size=64), 256, own=128)
    assert stairs.computed == list(stairs.lengths), "the next resumes after nothing"
    assert stairs.computed_by_a_third == stairs.at_the_ceiling
    assert max(stairs.computed_by_a_third) == 63


def test_a_margin_of_448_on_a_grid_of_2048_hides_21_875_percent_of_the_last_states() -> None:
    lost = lost_to_margin(2048, 448)
    assert lost == list(range(448))
    assert 100 * len(lost) / 2048 == 21.875
    assert len(lost_to_margin(2048, 64)) == 64
    assert lost_to_margin(2048, 0) == []
    assert len(lost_to_margin(64, 1000)) == 64, "all of them"


@pytest.mark.parametrize("past", [1, 64, 447, 448, 449, 450, 1000, 2048])
def test_the_margin_map_is_what_the_replay_s_lookup_does(past: int) -> None:
    length = 4096 + past
    trace = trace_from_tokens([[7] * length] * 2, grain=1)
    run = replay(trace, "last", block=2048, lookup_margin=448)
    assert (run.reused[1] == 0) == (past - 1 in lost_to_margin(2048, 448))


def test_stairs_of_too_many_units_are_refused() -> None:
    with pytest.raises(CheckpointValueError, match="5,000 units"):
        resend_stairs(Settings(), 10**6)
