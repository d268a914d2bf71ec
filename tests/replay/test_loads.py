"""Loads with given numbers, conversations turn by turn, and how a command names a trace."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mambackpt.errors import CheckpointError, CheckpointValueError
from mambackpt.replay import (
    GENERATORS,
    PUBLIC_STATISTICS,
    Trace,
    generate_chat,
    generate_shared,
    interleave,
    open_trace,
    replay,
    trace_from_tokens,
)

GB = 10**9

# --- shared prefixes ------------------------------------------------------------------------------


@given(
    st.integers(1, 60), st.integers(0, 3), st.sampled_from([1, 4, 16]), st.integers(1, 6),
    st.integers(0, 90), st.integers(1, 40),
)  # fmt: skip
def test_all_but_the_first_of_each_group_share_its_whole_prefix(
    requests: int, seed: int, grain: int, groups: int, prefix: int, suffix: int
) -> None:
    trace = generate_shared(
        requests, seed=seed, grain=grain, groups=groups, prefix=prefix, suffix=suffix
    )
    assert trace.prompt.tolist() == [prefix + suffix] * requests
    reusing = max(requests - groups, 0)
    assert Counter(trace.shared.tolist())[prefix // grain] >= reusing
    assert int(trace.shared.sum()) == reusing * (prefix // grain)
    sizes = Counter(trace.conversation.tolist())
    assert set(sizes.values()) == {1}


@given(
    st.integers(1, 5), st.integers(1, 5), st.integers(0, 40), st.integers(1, 40), st.integers(0, 9),
    st.integers(1, 30),
)  # fmt: skip
def test_each_turn_appends_the_output_before_it_and_its_own_tokens(
    chats: int, turns: int, prefix: int, suffix: int, output: int, turn: int
) -> None:
    trace = generate_shared(
        chats * turns, grain=1, groups=2, prefix=prefix, suffix=suffix, output=output,
        turns=turns, turn=turn,
    )  # fmt: skip
    for i, (at, chat) in enumerate((at, chat) for at in range(turns) for chat in range(chats)):
        before = prefix + suffix + (at - 1) * (output + turn)
        assert trace.conversation[i] == chat
        assert trace.prompt[i] == prefix + suffix + at * (output + turn)
        if at:
            assert trace.shared[i] == before
            assert trace.message[i] == before + output


def test_an_edited_turn_leaves_its_conversation_inside_and_is_as_long() -> None:
    lengths = {"groups": 3, "prefix": 64, "suffix": 500, "turns": 6, "turn": 30, "output": 20}
    plain = generate_shared(60, grain=1, **lengths)  # type: ignore[arg-type]
    edited = generate_shared(60, grain=1, edits=1.0, **lengths)  # type: ignore[arg-type]
    assert edited.prompt.tolist() == plain.prompt.tolist()
    later = edited.shared[10:]
    assert (later > 64).all()
    assert (later <= plain.shared[10:]).all()
    assert (later < plain.shared[10:]).sum() > 40


def test_without_zipf_groups_are_equal_and_with_it_they_follow_their_rank() -> None:
    groups, requests = 8, 4000

    def sizes(zipf: float) -> list[int]:
        trace = generate_shared(requests, groups=groups, prefix=16, suffix=16, grain=16, zipf=zipf)
        firsts = Counter(trace.blocks(i)[0] for i in range(requests))
        return sorted(firsts.values(), reverse=True)

    assert sizes(0.0) == [requests // groups] * groups
    weights = [1 / rank for rank in range(1, groups + 1)]
    expected = [requests * weight / sum(weights) for weight in weights]
    assert sizes(1.0) == pytest.approx(expected, rel=0.12)


def test_the_hit_rates_of_two_known_load_generators_follow_from_their_numbers() -> None:
    """All but the first of each group reuse the prefix: (n - groups) x prefix / n x prompt."""
    sglang = generate_shared()
    assert replay(sglang, "attention", block=16).hit_rate == pytest.approx(960 / 1024 * 2048 / 2176)
    vllm, _ = open_trace("shared:requests=1000,groups=10,prefix=256,suffix=256,output=128")
    assert replay(vllm, "attention", block=16).hit_rate == pytest.approx(0.99 * 0.5)


@pytest.mark.parametrize(
    ("rule", "reusing"), [("last", 0), ("junction", 48), ("interval(528)", 56)]
)
def test_eight_groups_of_eight_by_the_words_of_the_command(rule: str, reusing: int) -> None:
    trace, _ = open_trace("shared:requests=64,groups=8,prefix=1600,suffix=600")
    assert (replay(trace, rule, block=528).reused > 0).sum() == reusing


def test_a_seed_fixes_a_load() -> None:
    numbers = {"groups": 9, "turns": 3, "zipf": 0.8, "edits": 0.3}
    one, same, other = (
        generate_shared(200, seed=seed, **numbers)  # type: ignore[arg-type]
        for seed in (3, 3, 4)
    )
    assert one.first.tolist() == same.first.tolist()
    assert one.first.tolist() != other.first.tolist()


# --- conversations turn by turn -------------------------------------------------------------------


def one_chat_after_the_other(chats: int, turns: int) -> Trace:
    trace = generate_shared(chats * turns, groups=chats, prefix=0, suffix=64, turns=turns)
    return interleave(trace, 1)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 8))
def test_as_many_conversations_are_live_as_asked_for_and_each_keeps_its_order(
    chats: int, turns: int, live: int
) -> None:
    before = one_chat_after_the_other(chats, turns)
    after = interleave(before, live)
    ahead: Counter[int] = Counter()
    for chat, prompt in zip(after.conversation.tolist(), after.prompt.tolist(), strict=True):
        own = before.prompt[before.conversation == chat]
        assert prompt == own[ahead[chat]]
        ahead[chat] += 1
        unfinished = [c for c in ahead if ahead[c] < turns]
        assert len(unfinished) <= live
    assert after.shared.sum() == before.shared.sum()


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.lists(st.integers(0, 1), min_size=1, max_size=9)),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 5),
)
def test_what_is_shared_after_interleaving_is_what_the_prompts_in_that_order_share(
    turns: list[tuple[int, list[int]]], live: int
) -> None:
    prompts, chats = [text for _, text in turns], [chat for chat, _ in turns]
    trace = replace(trace_from_tokens(prompts, grain=2), conversation=np.array(chats))
    numbered = replace(trace, output=np.arange(len(turns)))
    after = interleave(numbered, live)
    truth = trace_from_tokens([prompts[i] for i in after.output], grain=2)
    assert sorted(after.output.tolist()) == [*range(len(turns))]
    assert after.shared.tolist() == truth.shared.tolist()
    assert after.splits.tolist() == truth.splits.tolist()
    assert replay(after, "last", block=2).reused.tolist() == (
        replay(truth, "last", block=2).reused.tolist()
    )


def test_turns_go_round_and_the_next_conversation_takes_an_ended_ones_place() -> None:
    numbers = [0, 0, 0, 1, 2, 2, 3]
    trace = trace_from_tokens([[n, at] * 8 for at, n in enumerate(numbers)])
    trace = replace(trace, conversation=np.array(numbers))
    assert interleave(trace, 2).conversation.tolist() == [0, 1, 0, 2, 0, 2, 3]
    assert interleave(trace, 9).conversation.tolist() == [0, 1, 2, 3, 0, 2, 0]


def test_an_interleaved_trace_says_so() -> None:
    trace = interleave(generate_chat(50), 4)
    assert trace.name == "chat:50, 4 live"
    assert trace.notes == ("4 conversations are live at once, a turn of each after the other",)


def test_requests_of_no_conversation_cannot_be_interleaved() -> None:
    with pytest.raises(CheckpointValueError, match="name no conversation; expected session_id"):
        interleave(trace_from_tokens([[1] * 20]), 2)
    with pytest.raises(CheckpointValueError, match="live is 0"):
        interleave(generate_chat(20), 0)


@pytest.mark.parametrize(("rule", "reusing"), [("all", 0), ("interval(13056)", 38)])
def test_two_long_chats_in_one_pool_reuse_nothing_where_every_block_is_kept(
    rule: str, reusing: int
) -> None:
    """A state every 2,176 tokens of two chats of 60,000 pushes out the chat that comes next."""
    lengths = {"prefix": 0, "suffix": 60_000, "output": 100, "turn": 100}
    trace = generate_shared(40, groups=2, turns=20, **lengths)
    made = replay(trace, rule, block=2176, model="qwen3-next", pool_bytes=42 * GB // 10)
    assert (made.reused > 0).sum() == reusing
    free = replay(trace, rule, block=2176)
    assert (free.reused > 0).sum() == 38
    if reusing:
        assert made.hit_rate == free.hit_rate


# --- the words of a command -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_generators_numbers_are_those_of_its_function(kind: str) -> None:
    trace, public = open_trace(f"{kind}:requests=40,grain=32", seed=3)
    same = GENERATORS[kind](40, seed=3, grain=32)
    assert trace.first.tolist() == same.first.tolist()
    assert public is PUBLIC_STATISTICS[kind]
    assert open_trace(f"{kind}:40", grain=32)[0].grain == 32
    assert open_trace(f"{kind}:40,seed=5".replace(":40,", ":requests=40,"))[0].prompt.tolist() == (
        GENERATORS[kind](40, seed=5).prompt.tolist()
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("chat:abc", "the size in chat:abc is 'abc'"),
        ("shared:groups=x", r"shared:groups is 'x'; expected a whole number.* Try groups=64\."),
        ("shared:groups=-1", "shared:groups is '-1'"),
        ("shared:groups=1.5", "shared:groups is '1.5'"),
        ("shared:zipf=nan", "shared:zipf is 'nan'; expected a number"),
        ("shared:group=3", "setting is 'group'.* Try 'groups'"),
        ("shared:groups=0", "groups is 0"),
        ("shared:turns=0", "turns is 0"),
        ("shared:suffix=0", "suffix is 0"),
        ("shared:edits=2", "edits is 2.0; expected a part from 0 to 1"),
        ("chat:requests=0", "requests is 0"),
        ("lengths", "lengths names no file"),
        ("lengths:", "lengths: names no file"),
        ("lengths:nowhere.csv,share=0.5", "nowhere.csv cannot be read"),
        ("chatt:100", "chatt:100 cannot be read .*chat, agents, documents, shared, lengths"),
    ],
)
def test_words_that_name_no_trace_are_refused(words: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_trace(words)


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        ("chat:30", {"layout": "mooncake"}, "--layout is given and chat:30 is a generator"),
        ("chat:30", {"tokenizer": "x"}, "--tokenizer is given and chat:30 is a generator"),
        ("t.jsonl", {"seed": 0}, r"--seed is given and t\.jsonl is a file"),
    ],
)
def test_an_option_that_would_not_be_heeded_is_refused(
    words: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointValueError, match=message):
        open_trace(words, **options)


def test_a_share_of_lengths_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("ContextTokens,GeneratedTokens\n40,1\n")
    with pytest.raises(CheckpointValueError, match=r"share is 2\.0"):
        open_trace(f"lengths:{path},share=2")
    assert open_trace(f"lengths:{path},share=1,groups=1")[0].prompt.tolist() == [40]
