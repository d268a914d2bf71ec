"""Blocks that are no multiple of the trace's own: sharing is what is known of it, and no more."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mambackpt.errors import CheckpointValueError
from mambackpt.replay import Trace, generate_chat, get_rule, replay, trace_from_tokens
from mambackpt.replay import case as cases

prompts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=30), min_size=1, max_size=10)
RULES = ("all", "last", "last+junction", "interval(9)", "last+chunk", "attention")


def known_shared(trace: Trace, one: int, other: int) -> int:
    """Tokens that two requests are known to share."""
    blocks = 0
    for a, b in zip(trace.blocks(one), trace.blocks(other), strict=False):
        if a != b:
            break
        blocks += 1
    return blocks * trace.grain


@given(prompts, st.sampled_from([4, 6, 8]), st.integers(1, 11))
def test_a_state_is_reused_up_to_the_tokens_known_to_be_shared(
    texts: list[list[int]], grain: int, block: int
) -> None:
    """Told once more without blocks: states at tokens, and the prefix each pair is known to share.

    Of `all`, which keeps every multiple of the block whatever it finds.
    """
    trace = trace_from_tokens(texts, grain=grain)
    made = replay(trace, "all", block=block)
    for i, text in enumerate(texts):
        most = (len(text) - 1) // block * block
        reused = max(
            (
                min(known_shared(trace, i, j), (len(earlier) - 1) // block * block, most)
                // block
                * block
                for j, earlier in enumerate(texts[:i])
            ),
            default=0,
        )
        assert made.reused[i] == reused


@given(prompts, st.sampled_from([4, 6, 8]), st.integers(1, 11), st.sampled_from(["all", "last"]))
def test_the_reuse_told_is_a_lower_bound(
    texts: list[list[int]], grain: int, block: int, rule: str
) -> None:
    told = replay(trace_from_tokens(texts, grain=grain), rule, block=block).reused
    truth = replay(trace_from_tokens(texts, grain=1), rule, block=block).reused
    assert (told <= truth).all()
    if grain == 4 and block == 4:
        assert told.tolist() == truth.tolist()


@given(
    prompts,
    st.sampled_from([4, 6]),
    st.integers(1, 11),
    st.sampled_from(RULES),
    st.sampled_from([None, 30, 100]),
    st.sampled_from(["lru", "hit-node"]),
)
def test_the_fast_ways_are_the_plain_one_between_the_blocks(
    texts: list[list[int]], grain: int, block: int, rule: str, pool: int | None, eviction: str
) -> None:
    options: dict[str, object] = {"block": block, "budget": 16}
    if pool is not None:
        options |= {"pool_bytes": pool, "model": Bytes(), "eviction": eviction}
    trace = trace_from_tokens(texts, grain=grain)
    fast, plain = (
        replay(trace, rule, plainly=plainly, **options)  # type: ignore[arg-type]
        for plainly in (False, True)
    )
    for name in ("attention", "reused", "written", "evicted"):
        assert getattr(fast, name).tolist() == getattr(plain, name).tolist()


class Bytes:
    model_token_bytes = 1
    model_state_bytes = 7


def test_multiples_of_the_grain_are_as_before_and_say_nothing() -> None:
    trace = generate_chat(200)
    made = replay(trace, "last+junction", block=1024)
    assert made.notes == ()
    assert made.ceiling is trace.ceiling


def test_a_block_between_the_traces_own_says_that_it_tells_a_lower_bound() -> None:
    made = replay(generate_chat(200), "last", block=528)
    [note] = made.notes
    assert note == (
        "block 528 is no multiple of the trace's 512 tokens: sharing is known to 512 tokens only, "
        "so the reuse told is a lower bound"
    )
    assert (made.reused % 528 == 0).all()
    assert 0 < made.hit_rate < made.ceiling_rate


def test_a_finer_trace_shares_what_the_trace_shares() -> None:
    trace = generate_chat(300, seed=3)
    finer = trace.finer(32)
    assert finer is trace.finer(32)
    assert finer.shared.tolist() == (16 * trace.shared).tolist()
    assert finer.length.tolist() == (trace.prompt // 32).tolist()
    for i in (0, 17, 299):
        whole = trace.length[i] * 16
        blocks = [16 * block + part for block in trace.blocks(i) for part in range(16)]
        assert finer.blocks(i)[:whole] == blocks
    own = [b for i in range(300) for b in finer.blocks(i)[trace.length[i] * 16 :]]
    assert len(own) == len({*own})


def test_a_block_that_cuts_a_trace_too_fine_is_refused_with_one_that_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace = generate_chat(50)
    monkeypatch.setattr(cases, "_MOST_BLOCKS", trace.size * 32)
    assert replay(trace, "last", block=528).block == 528
    with pytest.raises(CheckpointValueError, match=r"expected a multiple of 16. Try 544\.") as e:
        replay(trace, "last", block=529)
    assert "block is 529" in str(e.value)
    monkeypatch.setattr(cases, "_MOST_BLOCKS", trace.size * 31)
    with pytest.raises(CheckpointValueError, match=r"expected a multiple of 32. Try 544\."):
        replay(trace, "last", block=528)
    assert replay(trace, "last", block=544).block == 544


def test_the_best_positions_are_found_between_the_blocks_too() -> None:
    trace = replace(generate_chat(50), name="c")
    assert get_rule("optimal(2)", overlaps=trace.ceiling.tolist(), grain=512).name == "optimal(2)"
    assert replay(trace, "optimal(2)", block=528).hit_rate > 0
