"""Replays: published numbers to the last digit, closed forms, and three ways to one answer."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mambackpt.bench import replays, time_replays
from mambackpt.errors import CheckpointError, CheckpointValueError
from mambackpt.replay import plain as plain_replay
from mambackpt.replay import pools as pool_walks
from mambackpt.replay.case import EVICTIONS
from mambackpt.replay.command import main
from mambackpt.replay.files import load_trace
from mambackpt.replay.generators import generate_agents, generate_chat, generate_documents
from mambackpt.replay.plain import expand_rows
from mambackpt.replay.result import Replay
from mambackpt.replay.rules import Lengths, Match, Rule, Sizes, Span, get_rule, optimal
from mambackpt.replay.run import replay
from mambackpt.replay.serve import serve_tokens
from mambackpt.replay.sweep import Sweep, sweep
from mambackpt.replay.trace import Trace, describe_trace, trace_from_tokens

GB = 10**9


@dataclass(frozen=True)
class ModelBytes:
    """Bytes of a made-up model."""

    model_token_bytes: int = 1
    model_state_bytes: int = 16


def groups(shared: int, unique: int, count: int = 8, members: int = 8, grain: int = 4) -> Trace:
    """Prompts of groups that share their first tokens, one group after the other."""
    fresh = iter(range(10**9))
    prompts = []
    for _ in range(count):
        head = [next(fresh) for _ in range(shared)]
        prompts += [head + [next(fresh) for _ in range(unique)] for _ in range(members)]
    return trace_from_tokens(prompts, grain=grain)


def hits(made: Replay) -> int:
    return int((made.reused > 0).sum())


# --- published numbers ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def public() -> Callable[[Path, str], Trace]:
    loaded: dict[str, Trace] = {}

    def load(shared: Path, name: str) -> Trace:
        if name not in loaded:
            loaded[name] = load_trace(shared / "traces" / f"{name}.jsonl.gz")
        return loaded[name]

    return load


BLOCKS = (512, 1024, 1536, 2048, 4096)
UNLIMITED = {
    "all": "65.04 (10.05) 64.23 (4.95) 63.51 (3.25) 62.94 (2.40) 59.74 (1.14)",
    "last": "50.88 (0.40) 54.63 (0.34) 55.80 (0.30) 58.54 (0.27) 57.70 (0.24)",
    "last+junction": "58.20 (0.42) 59.23 (0.35) 59.48 (0.31) 60.09 (0.28) 58.26 (0.24)",
    "last+junction+chunk": "64.17 (0.91) 63.69 (0.81) 63.11 (0.80) 62.70 (0.72) 59.66 (0.64)",
}


@pytest.mark.shared
@pytest.mark.parametrize("rule", UNLIMITED)
@pytest.mark.parametrize("plainly", [False, True])
def test_hit_rates_and_states_on_the_synthetic_trace(
    shared: Path, public: Callable[[Path, str], Trace], rule: str, plainly: bool
) -> None:
    trace = public(shared, "mooncake_synthetic_trace")
    made = [replay(trace, rule, block=block, plainly=plainly) for block in BLOCKS]
    text = " ".join(f"{100 * r.hit_rate:.2f} ({r.states_per_request:.2f})" for r in made)
    assert text == UNLIMITED[rule]


@pytest.mark.shared
@pytest.mark.parametrize(
    ("model", "rule", "block", "percent"),
    [
        ("kimi-k3", "all", 512, "6.59"),
        ("kimi-k3", "all", 2048, "18.02"),
        ("kimi-k3", "last", 512, "42.51"),
        ("kimi-k3", "last+junction", 512, "46.90"),
        ("kimi-k3", "last+junction+chunk", 512, "39.04"),
        ("kimi-k3", "last+junction", 2048, "51.72"),
        ("kimi-k3", "attention", 512, "65.04"),
    ],
)
@pytest.mark.parametrize("plainly", [False, True])
def test_hit_rates_in_one_pool_of_320_gb(
    shared: Path,
    public: Callable[[Path, str], Trace],
    model: str,
    rule: str,
    block: int,
    percent: str,
    plainly: bool,
) -> None:
    trace = public(shared, "mooncake_synthetic_trace")
    made = replay(trace, rule, block=block, model=model, pool_bytes=320 * GB, plainly=plainly)
    assert f"{100 * made.hit_rate:.2f}" == percent


@pytest.mark.shared
def test_with_smaller_states_chunk_ends_win(
    shared: Path, public: Callable[[Path, str], Trace]
) -> None:
    """The best rule depends on what a state costs in tokens of attention cache."""
    trace = public(shared, "mooncake_synthetic_trace")
    rules = ["all", "last", "last+junction", "last+junction+chunk"]
    for model, exchange, best in (
        ("kimi-k3", 32_507, ("last+junction", 2048)),
        ("qwen3-next", 3_144, ("last+junction+chunk", 512)),
    ):
        made = sweep(trace, rules, [512, 2048], [320 * GB], model=model, progress=False).replays
        top = max(made, key=lambda r: r.hit_rate)
        assert (top.rule, top.block) == best
        assert round(top.state_bytes / top.token_bytes) == exchange


@pytest.mark.shared
def test_attention_alone_agrees_with_an_independent_tool(
    shared: Path, public: Callable[[Path, str], Trace]
) -> None:
    trace = public(shared, "mooncake_conversation_trace")
    made = [
        replay(trace, "attention", block=512, model=ModelBytes(), pool_bytes=tokens // 512 * 512)
        for tokens in (10**6, 4 * 10**6, 16 * 10**6)
    ]
    made.append(replay(trace, "attention", block=512))
    assert [f"{100 * r.hit_rate:.2f}" for r in made] == ["5.59", "18.50", "34.15", "37.34"]


@pytest.mark.shared
def test_a_point_of_hit_rate_is_a_third_of_the_work(
    shared: Path, public: Callable[[Path, str], Trace]
) -> None:
    trace = public(shared, "claude_code_weka_rle")
    small, large = (replay(trace, "last", block=block) for block in (512, 4096))
    assert (len(small), small.grain) == (45_542, 64)
    assert [f"{100 * r.hit_rate:.2f}" for r in (small, large)] == ["95.81", "94.45"]
    assert [f"{r.recomputed / 1e6:.1f}" for r in (small, large)] == ["228.0", "301.7"]
    assert round(100 * (large.recomputed / small.recomputed - 1)) == 32


# --- closed forms ---------------------------------------------------------------------------------


def test_a_shared_prefix_below_the_first_state_is_never_reused() -> None:
    """Blocks of 528 in steps of 2,048: 1,500 shared of 2,200 tokens reuse nothing, 1,600 do.

    S01 of the public reports: vllm issue #45238 and others.
    """
    for shared, unique, reused in ((1500, 700, 0), (1600, 600, 1584)):
        made = replay(groups(shared, unique), "last+chunk", block=528, budget=2048)
        assert made.reused.max() == reused
        assert hits(made) == (7 * 8 if reused else 0)


@pytest.mark.parametrize(
    ("rule", "reusing"), [("last", 0), ("last+junction", 48), ("interval(528)", 56)]
)
def test_eight_groups_of_eight(rule: str, reusing: int) -> None:
    assert hits(replay(groups(1500, 700), rule, block=528)) == reusing


def test_a_stop_at_the_junction_serves_the_third_occurrence() -> None:
    """S01: 6,000 shared and 2,000 unique tokens, block 1,056 (vllm issue #42317)."""
    made = replay(groups(6000, 2000, count=1, members=3), "last+junction", block=1056)
    assert made.reused.tolist() == [0, 0, 5280]
    assert made.written.tolist() == [1, 2, 1]


@pytest.mark.parametrize(("prompt", "reused"), [(480, 0), (552, 528), (979, 528)])
def test_a_repeated_prompt_reuses_whole_blocks(prompt: int, reused: int) -> None:
    """S01: the same prompt again, block 528 (vllm issue #51198)."""
    trace = trace_from_tokens([list(range(prompt))] * 2, grain=1)
    assert replay(trace, "last", block=528).reused.tolist() == [0, reused]


def test_a_lookup_margin_loses_its_share_of_the_step_grid() -> None:
    """States every 2,048 tokens, a margin of 448: 448 / 2,048 = 21.875 % of turns lose theirs."""
    # Second turns that go on after n tokens, for every n of a step that is whole blocks of 64.
    turns = range(4096, 4096 + 2048, 64)
    prompts = [p for n in turns for p in ([n] * (n + 1), [n] * n + [-1] * 64)]
    made = replay(trace_from_tokens(prompts, grain=64), "last", block=2048, lookup_margin=448)
    newest = made.prompt[::2] // 2048 * 2048
    lost = made.reused[1::2] < newest
    assert lost.mean() == 448 / 2048 == 0.21875


def test_the_best_positions_for_uniform_overlaps() -> None:
    """M fixed states on overlaps spread evenly over N tokens recompute N / (2 (M + 1)) of them."""
    N, grain = 12_000, 100
    head = list(range(N))
    prompts = [head, *(head[:cut] + [-cut - 1] * 9 for cut in range(0, N, grain))]
    trace = trace_from_tokens(prompts, grain=grain)
    for count in (1, 3, 5):
        made = replay(trace, optimal(count, trace.ceiling[1:], grain=grain), block=grain)
        missed = (made.ceiling - made.reused)[1:].mean()
        assert missed == N / (2 * (count + 1)) - grain / 2  # overlaps are whole blocks


# --- reported faults ------------------------------------------------------------------------------


def test_a_hit_is_common_to_attention_and_states_not_the_smaller_of_both() -> None:
    """S02: attention {1, 2, 3} and a state at {4} agree on nothing (vllm-ascend PR #11131)."""
    head = list(range(40))
    trace = trace_from_tokens([head[:5], [*head[:3], -1, -2], head[:4]], grain=1)
    only = Rule("fourth", lambda request, match, settings: [4])
    assert replay(trace, only, block=1).reused.tolist() == [0, 0, 0]
    # Attention {1 .. 11}, states {8, 12}: the hit is 8.
    trace = trace_from_tokens([head[:13], [*head[:11], -1, -2]], grain=1)
    both = Rule("two", lambda request, match, settings: [8, 12])
    assert replay(trace, both, block=1).reused.tolist() == [0, 8]


@pytest.mark.parametrize(("prompt", "reused"), [(32, 16), (33, 32)])
def test_the_last_token_is_always_computed_again(prompt: int, reused: int) -> None:
    """S07: states at 16 and 32; a prompt of 32 tokens resumes at 16 (LMCache PR #5249)."""
    tokens = list(range(40))
    trace = trace_from_tokens([tokens, tokens[:prompt]], grain=16)
    assert replay(trace, "all", block=16).reused[1] == reused


def test_a_margin_never_expands_a_hit_or_empties_it() -> None:
    """S09: states at 16, 32, 48 and an attention candidate of 44 give 32 (vllm PR #43650)."""
    tokens = list(range(60))
    trace = trace_from_tokens([tokens, tokens], grain=4)
    made = replay(trace, "all", block=16, lookup_margin=12)
    assert (made.attention[1], made.reused[1]) == (44, 32)
    # 8,901 tokens at 2,304 with a drop: attention matches 6,912 less a block, so the state must
    # lie at 4,608; one at 6,912 alone is never found (vllm issue #51771).
    again = trace_from_tokens([list(range(8901))] * 2, grain=2304)
    for rule, reused in (("last", 0), ("internal(drop=True)", 4608)):
        made = replay(again, rule, block=2304, budget=9000, lookup_margin=2304)
        assert (made.attention[1], made.reused[1]) == (4608, reused)


def test_a_one_off_prompt_does_not_push_out_a_hot_prefix() -> None:
    """S10: states for six, a hot prefix, a one-off prompt of five chunks (vllm PR #56794)."""
    hot = [1] * 33
    one_off = [[9] * 16 * 6]
    trace = trace_from_tokens([hot, hot, *one_off, hot], grain=16)
    pools = {"model": ModelBytes(), "pool_bytes": 10**6, "state_pool_bytes": 6 * 16}
    kept = replay(trace, "last", block=16, budget=16, **pools)  # type: ignore[arg-type]
    assert kept.reused.tolist() == [0, 32, 0, 32]
    pools["state_pool_bytes"] = 4 * 16
    lost = replay(trace, "last+chunk", block=16, budget=16, **pools)  # type: ignore[arg-type]
    assert lost.reused.tolist() == [0, 32, 0, 0]


def test_only_the_last_boundary_of_a_prompt_is_kept_at_retention_0() -> None:
    """S10: block 16, prompt 40: the state at 32, nothing else (vllm PR #57253)."""
    trace = trace_from_tokens([list(range(40)), list(range(60))], grain=1)
    made = replay(trace, "last", block=16)
    assert made.written.tolist() == [1, 1]
    assert made.reused.tolist() == [0, 32]


def test_a_state_cannot_be_cut_back() -> None:
    """S16: 64 cached tokens, 50 shared, steps of 16: resume at 48, else at 0 (mlx-lm PR #1253)."""
    tokens = list(range(64))
    trace = trace_from_tokens([[*tokens, 64], [*tokens[:50], -1, -2, -3]], grain=1)
    assert replay(trace, "all", block=16).reused.tolist() == [0, 48]
    assert replay(trace, "last", block=16).reused.tolist() == [0, 0]


# --- three ways to one answer ---------------------------------------------------------------------

RULES = [
    "attention", "none", "all", "last", "junction", "chunk", "last+junction",
    "last+junction+chunk", "interval(3)", "interval(4)+junction", "all+interval(5)",
    "internal(hash_block=1, alignment=1)", "sglang(2)", "sglang(2, strategy='no_buffer')",
    "sglang(2, 4)", "lattice(3)", "ladder(2, 3)", "trtllm(3, branches=True, tokens_per_block=1)",
    "trtllm(3, [1], [0, 2], True)", "marconi", "llamacpp(2, 3)", "optimal(3)", "all+all",
]  # fmt: skip
# Rules of a user's own, which take arrays too: a grid that may end above a hit, one that begins
# late, positions on no grid.
OWN = [
    Rule("to-message", lambda q, m, s: [Span(s.block, q.message, s.block)], True, ()),
    Rule("from-second", lambda q, m, s: [Span(2 * s.block, q.prompt - 1, s.block)], True, ()),
    Rule("near-end", lambda q, m, s: [q.prompt - 2], True, ()),
    Rule("at-hit", lambda q, m, s: [m.attention], True, ("attention",)),
    Rule("beyond", lambda q, m, s: [q.prompt + 1, Span(3, q.prompt + 3, 3)], True, ()),
    Rule("halves", lambda q, m, s: [q.prompt / 2, q.prompt // 3, None, True], True, ()),
    Rule("no-span", lambda q, m, s: [Span(1, q.prompt - 1.0, 1), float("nan"), 2.0], True, ()),
]
MANY = settings(max_examples=max(1000, settings().max_examples))


@st.composite
def forests(draw: st.DrawFn) -> Trace:
    """Prompts that continue, cut or repeat earlier ones."""
    prompts: list[list[int]] = []
    for number in range(draw(st.sampled_from([6, 10, 24]))):
        text: list[int] = []
        if prompts and draw(st.booleans()) | draw(st.booleans()):
            source = draw(st.sampled_from(prompts[-draw(st.sampled_from([1, 24])) :]))
            text = source[: draw(st.integers(0, len(source)))]
        text = text + [number] * draw(st.integers(0 if text else 1, 12))
        prompts.append(text)
    outputs = draw(st.lists(st.integers(0, 9), min_size=len(prompts), max_size=len(prompts)))
    trace = trace_from_tokens(prompts, grain=draw(st.sampled_from([1, 1, 2])), outputs=outputs)
    parts = draw(st.lists(st.integers(0, 4), min_size=len(prompts), max_size=len(prompts)))
    return replace(trace, message=trace.prompt * np.array(parts) // 5)


def columns(made: Replay) -> list[list[int]]:
    return [c.tolist() for c in (made.attention, made.reused, made.written, made.evicted)]


@given(
    forests(),
    st.sampled_from([*RULES, *OWN]),
    st.integers(1, 4),
    st.integers(0, 7),
    st.integers(4, 20),
)
def test_without_a_pool_the_fast_ways_are_the_plain_one(
    trace: Trace, rule: str | Rule, blocks: int, margin: int, budget: int
) -> None:
    options = {"block": blocks * trace.grain, "budget": budget + 8, "lookup_margin": margin}
    plain = columns(replay(trace, rule, plainly=True, **options))  # type: ignore[arg-type]
    assert columns(replay(trace, rule, **options)) == plain  # type: ignore[arg-type]
    whole = get_rule(rule, overlaps=trace.ceiling, grain=trace.grain)
    one_by_one = Rule("slow", whole.place, states=whole.states)
    assert columns(replay(trace, one_by_one, **options)) == plain  # type: ignore[arg-type]


@MANY
@given(
    forests(),
    st.sampled_from([*RULES, *OWN]),
    st.integers(1, 4),
    st.sampled_from(
        [ModelBytes(1, 0), ModelBytes(1, 1), ModelBytes(1, 3), ModelBytes(2, 7), ModelBytes(1, 20)]
    ),
    st.one_of(st.integers(1, 90), st.integers(60, 400)),
    st.one_of(st.none(), st.none(), st.integers(1, 60)),
    st.sampled_from(["lru", "lru", "hit-node"]),
    st.integers(0, 7),
)
def test_in_a_pool_the_fast_way_is_the_plain_one(
    trace: Trace,
    rule: str | Rule,
    blocks: int,
    sizes: ModelBytes,
    pool: int,
    state_pool: int | None,
    eviction: str,
    margin: int,
) -> None:
    options = {
        "block": blocks * trace.grain,
        "model": sizes,
        "pool_bytes": pool,
        "state_pool_bytes": state_pool,
        "eviction": eviction,
        "lookup_margin": margin,
        "budget": 11,
    }
    plain = columns(replay(trace, rule, plainly=True, **options))  # type: ignore[arg-type]
    assert columns(replay(trace, rule, **options)) == plain  # type: ignore[arg-type]


@MANY
@given(
    forests(),
    st.sampled_from(["all", "all", "all", "attention", "none"]),
    st.integers(1, 3),
    st.sampled_from(
        [ModelBytes(1, 0), ModelBytes(1, 1), ModelBytes(1, 3), ModelBytes(2, 7), ModelBytes(3, 20)]
    ),
    st.integers(-2, 40),
    st.integers(0, 3),
)
def test_a_pool_that_hardly_holds_the_largest_request_evicts_it_as_the_plain_one_does(
    trace: Trace, rule: str, blocks: int, sizes: ModelBytes, more: int, margin: int
) -> None:
    block = blocks * trace.grain
    tokens = trace.length * trace.grain
    sum_of = tokens * sizes.model_token_bytes + tokens // block * sizes.model_state_bytes
    options = {
        "block": block,
        "model": sizes,
        "pool_bytes": max(1, int(sum_of.max()) + more),
        "lookup_margin": margin,
    }
    plain = columns(replay(trace, rule, plainly=True, **options))  # type: ignore[arg-type]
    assert columns(replay(trace, rule, **options)) == plain  # type: ignore[arg-type]


def test_a_hit_may_lie_deeper_than_what_a_request_keeps_itself() -> None:
    trace = trace_from_tokens([[1] * 5, [1] * 5], grain=1, outputs=[4, 1])
    head = Rule("head", lambda q, m, s: [Span(s.block, q.output, s.block)], True, ())
    for options in ({}, {"pool_bytes": 1000, "model": ModelBytes(1, 3)}):
        assert replay(trace, head, block=1, **options).reused.tolist() == [0, 4]  # type: ignore[arg-type]


def test_an_edge_whose_end_was_evicted_is_not_split() -> None:
    """Marconi's interior node needs the earlier branch: 15 bytes leave 1 of 4 shared blocks."""
    trace = trace_from_tokens([[1] * 6, [9] * 5, [1] * 4 + [2] * 2], grain=1)
    options = {"block": 1, "model": ModelBytes(2, 1), "eviction": "lru"}
    for pool, attention, written in ((15, [0, 0, 1], [1, 1, 1]), (99, [0, 0, 4], [1, 1, 2])):
        for plainly in (False, True):
            made = replay(trace, "marconi", pool_bytes=pool, plainly=plainly, **options)  # type: ignore[arg-type]
            assert (made.attention.tolist(), made.written.tolist()) == (attention, written)


def test_a_model_without_states_keeps_none() -> None:
    trace = trace_from_tokens([[1] * 9] * 3, grain=1)
    for rule in (Rule("a", lambda q, m, s: [4], states=False), "attention"):
        for options in ({}, {"pool_bytes": 100, "model": ModelBytes(1, 3)}):
            for plainly in (False, True):
                made = replay(trace, rule, block=1, plainly=plainly, **options)  # type: ignore[arg-type]
                assert made.reused.tolist() == [0, 8, 8]
                assert made.states_written == 0
    with pytest.raises(CheckpointValueError, match="nothing to join"):
        replay(trace, "attention+last", block=1)


@pytest.mark.parametrize("generate", [generate_chat, generate_agents, generate_documents])
def test_the_ways_agree_on_generated_traces(generate: Callable[..., Trace]) -> None:
    trace = generate(400, seed=5)
    timed = [
        *time_replays(trace, ["all", "last+junction+chunk", "interval(2048)"], [1024], runs=1),
        *time_replays(
            trace, ["all", "last+junction+chunk"], [1024], [15 * GB, 100 * GB],
            runs=1, model="qwen3-next",
        ),
    ]  # fmt: skip
    assert [t.requests for t in timed] == [400] * 7


def test_a_timing_of_replays_that_differ_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = groups(64, 64, count=2, members=2, grain=16)
    fast = replays.replay_fast

    def wrong(case: object) -> object:
        attention, reused, *rest = fast(case)  # type: ignore[arg-type]
        return (attention, np.asarray(reused) + 1, *rest)

    monkeypatch.setattr(replays, "replay_fast", wrong)
    with pytest.raises(CheckpointValueError, match="disagree"):
        next(time_replays(trace, ["last"], [16]))


def test_the_best_positions_are_named_by_their_number() -> None:
    trace = generate_documents(200)
    named = replay(trace, "optimal(3)", block=512)
    made = replay(trace, optimal(3, trace.ceiling, grain=512), block=512)
    assert named.rule == "optimal(3)"
    assert columns(named) == columns(made)
    joined = replay(trace, "optimal(3)+last", block=512)
    assert joined.hit_rate > max(named.hit_rate, replay(trace, "last", block=512).hit_rate)
    with pytest.raises(CheckpointValueError, match="optimal"):
        get_rule("optimal(3)")


def test_rows_expand_to_the_blocks_of_each_request() -> None:
    trace = generate_chat(60)
    assert expand_rows(trace) == [trace.blocks(i) for i in range(60)]


# --- pools and evictions --------------------------------------------------------------------------


def test_records_add_up_to_the_totals() -> None:
    trace = generate_documents(300, seed=2)
    made = replay(trace, "last+junction", block=1024, model="qwen3-next", pool_bytes=20 * GB)
    assert made.reused.sum() == made.prompt.sum() - made.recomputed
    assert made.written.sum() == made.states_written
    assert made.evicted.sum() == made.evictions > 0
    assert (made.reused >= 0).all()
    for less, more in pairwise([made.reused, made.attention, made.ceiling, made.prompt - 1]):
        assert (less <= more).all()
    assert made.distance == pytest.approx(made.ceiling_rate - made.hit_rate)
    assert made.bytes_written == made.states_written * 36 * 2_146_304


def test_states_in_a_pool_of_their_own_leave_attention_its_room() -> None:
    trace = generate_documents(400, seed=2)
    alone = replay(trace, "attention", block=512, model="kimi-k3", pool_bytes=30 * GB)
    split = replay(
        trace, "all", block=512, model="kimi-k3", pool_bytes=30 * GB, state_pool_bytes=10 * GB
    )
    assert split.attention.tolist() == alone.attention.tolist()
    joined = replay(trace, "all", block=512, model="kimi-k3", pool_bytes=40 * GB)
    assert joined.attention.sum() < split.attention.sum()


def test_refreshing_only_the_hit_lets_the_states_before_it_age() -> None:
    """Kept states that are there already stay where they are in the order of last use."""
    hot, other = [1] * 9, [[n] * 5 for n in range(2, 9)]
    trace = trace_from_tokens([hot, hot, other[0], hot, other[1], [*hot[:4], 7]], grain=4)
    pools = {"model": ModelBytes(1, 10), "pool_bytes": 10**6, "state_pool_bytes": 30}
    lru = replay(trace, "all", block=4, **pools)  # type: ignore[arg-type]
    node = replay(trace, "all", block=4, eviction="hit-node", **pools)  # type: ignore[arg-type]
    assert lru.reused.tolist()[-1] == 4
    assert node.reused.tolist()[-1] == 0  # the state at 4 was pushed out, the hit one at 8 was not
    assert node.reused.tolist()[:5] == lru.reused.tolist()[:5]


def test_thinning_drops_the_state_that_covers_least() -> None:
    # States at 4 and 8 of one prompt, then one at 32 of another: room for two.
    dense, sparse = [1] * 9, [2] * 33
    only = Rule("some", lambda q, m, s: [4, 8] if q.prompt < 20 else [32])
    trace = trace_from_tokens([sparse, dense, sparse, dense], grain=4)
    pools = {"model": ModelBytes(1, 10), "pool_bytes": 10**6, "state_pool_bytes": 20}
    lru = replay(trace, only, block=4, **pools)  # type: ignore[arg-type]
    thin = replay(trace, only, block=4, eviction="thinning", **pools)  # type: ignore[arg-type]
    assert lru.reused.tolist() == [0, 0, 0, 4]
    # The state at 8 is only 4 tokens past the one at 4; the one at 32 stays.
    assert thin.reused.tolist() == [0, 0, 32, 4]


def hits_in_a_pool(
    states: int, prompts: list[list[int]], positions: list[int], eviction: str
) -> list[int]:
    """What each prompt reuses where so many states have room, and each keeps these positions."""
    rule = Rule("some", lambda q, m, s: positions)
    trace = trace_from_tokens(prompts, grain=4)
    sizes = {"model": ModelBytes(1, 10), "pool_bytes": 10**6, "state_pool_bytes": 10 * states}
    run = replay(trace, rule, block=4, eviction=eviction, **sizes)  # type: ignore[arg-type]
    return run.reused.tolist()


def test_even_gaps_drops_the_state_that_leaves_the_shortest_gap() -> None:
    # States at 4, 8, 12 and 28, room for three: without 4 or 8 a gap of 8 tokens is left, without
    # 12 one of 20. Of the two, 8 was used first. By tokens past the one before, all three are 4.
    prompts = [[1] * 29, [1] * 13 + [2] * 9]
    assert hits_in_a_pool(3, prompts, [4, 8, 12, 28], "even-gaps") == [0, 12]
    assert hits_in_a_pool(3, prompts, [4, 8, 12, 28], "thinning") == [0, 8]


def test_nearest_neighbour_drops_one_of_the_closest_pair() -> None:
    # 8 and 12 lie four tokens apart, 32 lies twenty from them.
    prompts = [[1] * 33, [1] * 33]
    assert hits_in_a_pool(2, prompts, [8, 12, 32], "nearest-neighbour") == [0, 32]
    assert hits_in_a_pool(2, prompts, [8, 12, 32], "lru") == [0, 12]


def test_a_frontier_protects_the_newest_state_of_each_path_and_forks() -> None:
    # Two paths part at 4; a third prompt's states at 4 and 8 are one too many.
    one, other, third = [1] * 9, [1] * 4 + [2] * 5, [3] * 9
    prompts = [one, other, third, one, third]
    assert hits_in_a_pool(4, prompts, [4, 8], "frontier")[:4] == [0, 4, 0, 8]
    assert hits_in_a_pool(4, prompts, [4, 8], "lru")[:4] == [0, 4, 0, 4]


def test_a_new_state_supersedes_the_one_that_its_request_resumed_after() -> None:
    first, longer, edited = [1] * 9, [1] * 17, [1] * 9 + [2] * 8
    assert hits_in_a_pool(9, [first, longer, edited], [8, 16], "supersede") == [0, 8, 0]
    assert hits_in_a_pool(9, [first, longer, edited], [8, 16], "lru") == [0, 8, 8]
    # Where paths part after it, it stays.
    parting = [longer, edited, [1] * 9 + [3] * 8]
    assert hits_in_a_pool(9, parting, [8, 16], "supersede") == [0, 8, 8]


def test_a_superseded_state_gives_its_bytes_back() -> None:
    turns = [[1] * (8 * n + 1) for n in range(1, 12)]
    trace = trace_from_tokens(turns, grain=4)
    for own in (10, None):  # a pool of one state, or one for all
        run = replay(
            trace, "last", block=8, model=ModelBytes(1, 10), pool_bytes=1000,
            state_pool_bytes=own, eviction="supersede",
        )  # fmt: skip
        assert run.evicted.tolist() == [0] + 10 * [1]
        assert run.reused.tolist() == [8 * n for n in range(11)]


def test_flops_per_byte_keeps_the_long_prefix() -> None:
    """Recency ties give way to what a state saves per byte (Marconi, arXiv 2411.19379)."""
    long, short = [1] * 4001, [[n] * 101 for n in range(2, 40)]
    prompts = [long, *short[:6], long]
    trace = trace_from_tokens(prompts, grain=100)
    pools = {"model": ModelBytes(1, 10), "pool_bytes": 10**6, "state_pool_bytes": 40}
    reused = {
        eviction: int(replay(trace, "last", block=100, eviction=eviction, **pools).reused[-1])  # type: ignore[arg-type]
        for eviction in EVICTIONS
    }
    assert reused == {
        "lru": 0, "hit-node": 0, "thinning": 4000, "flops": 4000, "flops-as-published": 4000,
        # One state a path: none stands between others, and only distance tells them apart.
        "even-gaps": 0, "nearest-neighbour": 4000, "supersede": 0, "frontier": 0,
    }  # fmt: skip


def test_marconi_brings_its_eviction_and_another_may_be_asked_for() -> None:
    trace = generate_documents(120, seed=1)
    pool = {"block": 512, "model": "kimi-k3", "pool_bytes": 20 * GB}
    assert replay(trace, "marconi", block=512).eviction == "lru"
    named = [replay(trace, rule, **pool) for rule in ("marconi", "marconi_corrected")]  # type: ignore[arg-type]
    assert [made.eviction for made in named] == ["flops-as-published", "flops"]
    assert replay(trace, "marconi", eviction="lru", **pool).eviction == "lru"  # type: ignore[arg-type]


@pytest.mark.parametrize("answer", [0.5, 1.0, 2.5])
@pytest.mark.parametrize("pool", [{}, {"pool_bytes": 10**6, "model": ModelBytes()}])
@pytest.mark.parametrize("plainly", [True, False])
def test_a_position_that_counts_no_tokens_keeps_nothing(
    answer: float, pool: dict[str, Any], plainly: bool
) -> None:
    """As the page of the rules says; half a prompt is the answer that users try first."""
    trace = groups(64, 64, count=2, members=2, grain=16)

    def half(request: Lengths, match: Match, sizes: Sizes) -> list[float]:
        return [request.prompt * answer]

    kept = replay(trace, half, block=16, plainly=plainly, **pool)
    assert kept.states_written == 0
    assert kept.recomputed == kept.prompt.sum()


def test_a_numpy_integer_counts_tokens() -> None:
    trace = groups(64, 64, count=2, members=2, grain=16)
    for plainly in (True, False):
        kept = replay(trace, lambda *_: [np.int32(32)], block=16, plainly=plainly)
        assert kept.reused.tolist() == [0, 32, 0, 32]


@pytest.mark.parametrize("eviction", EVICTIONS)
@pytest.mark.parametrize("state_pool", [None, 4 * GB])
def test_no_eviction_beats_the_ceiling_or_overfills_the_pool(
    eviction: str, state_pool: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the plain pool holds is counted item by item after every request."""
    limit, keep, fullest = 15 * GB, plain_replay._PlainPool.keep, [0, 0]

    def counted(pool: plain_replay._PlainPool, *request: Any) -> Any:
        answer = keep(pool, *request)
        held = [sum(pool.blocks.values()), sum(pool.states.values()) if state_pool else 0]
        assert held[0] <= limit
        assert held[1] <= (state_pool or 0)
        fullest[:] = map(max, fullest, held)
        return answer

    monkeypatch.setattr(plain_replay._PlainPool, "keep", counted)
    options = {"pool_bytes": limit, "state_pool_bytes": state_pool, "eviction": eviction}
    trace = generate_chat(250, seed=3)
    pooled = replay(*(trace, "last+junction"), block=512, model="kimi-k3", plainly=True, **options)
    assert (pooled.reused <= pooled.attention).all()
    assert (pooled.attention <= pooled.ceiling).all()
    assert pooled.evictions > 0
    assert max(fullest) > 0.9 * (state_pool or limit)  # it was full, so it had to evict


def first(trace: Trace, requests: int) -> Trace:
    """The first requests of a trace."""
    runs = int(trace.row[requests])
    columns = ("arrival", "prompt", "output", "conversation", "message", "shared")
    cut = {name: getattr(trace, name)[:requests] for name in columns}
    return replace(
        trace,
        **cut,
        row=trace.row[: requests + 1],
        first=trace.first[:runs],
        count=trace.count[:runs],
    )


@given(
    forests(),
    st.sampled_from(["all", "last", "last+junction", "chunk", *OWN[:3]]),
    st.sampled_from([ModelBytes(1, 1), ModelBytes(1, 3), ModelBytes(2, 7)]),
    st.integers(20, 120),
    st.one_of(st.none(), st.integers(8, 40)),
)
def test_the_fast_pools_hold_no_more_than_fits_after_every_request(
    trace: Trace, rule: str | Rule, sizes: ModelBytes, limit: int, state_limit: int | None
) -> None:
    """What is left at a trace's end, counted by request, for a trace that ends after each."""
    orders: list[pool_walks._Order] = []
    begin = pool_walks._Order.__init__

    def noted(order: pool_walks._Order, *arguments: Any) -> None:
        begin(order, *arguments)
        orders.append(order)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_walks._Order, "__init__", noted)
        for requests in range(1, len(trace) + 1):
            options = {"pool_bytes": limit, "state_pool_bytes": state_limit, "model": sizes}
            replay(first(trace, requests), rule, block=trace.grain, budget=11, **options)
            order = orders.pop()
            blocks = sum(order.blocks.count) * order.blocks.item_bytes
            states = getattr(order, "states", order.kept)
            held = sum(states) * sizes.model_state_bytes
            assert blocks + (0 if state_limit else held) <= limit
            assert state_limit is None or held <= state_limit


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": 0}, "block is 0"),
        ({"block": 512, "budget": 100, "rule": "chunk"}, "budget is 100 and block is 512"),
        ({"block": 512, "model": "gpt-2"}, "model is 'gpt-2'; expected one of"),
        ({"block": 512, "pool_bytes": 9}, "pool_bytes is given without a model"),
        ({"block": 512, "eviction": "lru"}, "without pool_bytes"),
        ({"block": 512, "pool_bytes": 0, "model": "kimi-k3"}, "pool_bytes is 0"),
        ({"block": 512, "model": ModelBytes(0, 1)}, "model_token_bytes is 0"),
        (
            {"block": 512, "pool_bytes": 9, "model": "kimi-k3", "eviction": "fifo"},
            "eviction is 'fifo'; expected one of lru",
        ),
        ({"block": 512, "lookup_margin": -1}, "lookup_margin is -1"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, object], message: str) -> None:
    options = {"rule": "last", **options}
    with pytest.raises(CheckpointError, match=message):
        replay(generate_chat(20), **options)  # type: ignore[arg-type]


# --- sweeps ---------------------------------------------------------------------------------------

TRACE = generate_chat(150, seed=9)
POINTS = {"rules": ["all", "last+junction", "interval(4096)"], "blocks": [512, 1024]}


def totals(made: Sweep) -> list[tuple[str, int, int, int]]:
    return [(r.rule, r.block, r.recomputed, r.states_written) for r in made.replays]


def expected_totals() -> list[tuple[str, int, int, int]]:
    return totals(sweep(TRACE, **POINTS))  # type: ignore[arg-type]


def test_a_sweep_goes_through_rules_blocks_and_pools_in_order() -> None:
    made = sweep(TRACE, ["last", "none"], [512, 1024], [GB, 5 * GB], model="qwen3-next")
    assert [(r.rule, r.block, r.pool_bytes) for r in made.replays] == [
        (rule, block, pool)
        for rule in ("last", "none")
        for block in (512, 1024)
        for pool in (GB, 5 * GB)
    ]
    assert made.missing == []
    assert made.table()[0]["hit_percent"] == 100 * made.replays[0].hit_rate


@pytest.mark.parametrize("kind", [ThreadPoolExecutor, ProcessPoolExecutor])
def test_a_sweep_runs_on_any_executor(kind: Callable[[int], Executor]) -> None:
    with kind(2) as executor:
        made = sweep(TRACE, executor=executor, **POINTS)  # type: ignore[arg-type]
    assert totals(made) == expected_totals()


def deadly(request: Lengths, match: Match, settings: Sizes) -> list[int]:
    """Ends the process that runs it, unless that is the one that runs the tests."""
    if os.environ.get("MAMBACKPT_TEST_PARENT") != str(os.getpid()):
        os._exit(1)
    return [request.prompt // 2]


def test_what_a_broken_pool_of_processes_loses_is_replayed_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MAMBACKPT_TEST_PARENT", str(os.getpid()))
    with ProcessPoolExecutor(2) as executor:
        made = sweep(TRACE, ["last", deadly, "all"], [512, 1024], executor=executor)
    assert made.missing == []
    assert totals(made) == totals(sweep(TRACE, ["last", deadly, "all"], [512, 1024]))


def test_a_refused_input_ends_a_sweep_on_an_executor() -> None:
    with ThreadPoolExecutor(1) as executor, pytest.raises(CheckpointValueError, match="block is 0"):
        sweep(TRACE, ["last"], [512, 0], executor=executor)


def test_an_interrupted_sweep_keeps_what_is_done() -> None:
    calls = []

    def stop(request: Lengths, match: Match, settings: Sizes) -> list[int]:
        calls.append(1)
        raise KeyboardInterrupt

    made = sweep(TRACE, ["last", stop, "all"], [512])
    assert [r.rule for r in made.replays] == ["last"]
    assert made.missing == [("stop", 512, None), ("all", 512, None)]


@pytest.mark.slow
def test_a_sweep_on_a_cluster_survives_a_killed_worker() -> None:
    """Dask on this machine, two worker processes, one killed in the middle of the sweep."""
    distributed = pytest.importorskip("distributed")
    trace = generate_agents(2500, seed=1)
    points = {"rules": ["marconi", "sglang", "llamacpp"], "blocks": [512, 1024, 2048, 4096]}
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None, processes=True
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        workers = {w["pid"] for w in client.run(lambda: {"pid": os.getpid()}).values()}
        assert len(workers) == 2
        killed = []

        def kill_one() -> None:
            while not any(client.processing().values()):
                time.sleep(0.01)
            killed.append(min(workers))
            os.kill(min(workers), signal.SIGKILL)

        killer = threading.Thread(target=kill_one)
        killer.start()
        made = sweep(trace, executor=client.get_executor(), **points)  # type: ignore[arg-type]
        killer.join()
    assert killed
    assert made.missing == []
    assert totals(made) == totals(sweep(trace, **points))  # type: ignore[arg-type]


# --- the command ----------------------------------------------------------------------------------


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat:200", "--rule", "last+junction,interval(4096)", "--block", "512,1024"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("chat:200: 200 requests")
    assert lines[1] == f"this trace: {describe_trace(generate_chat(200))}"
    assert lines[2].startswith("the public trace that it is modelled on: 38.5 % follow-ups")
    assert len(lines) == 4 + 4
    assert lines[4].split()[0] == "last+junction"
    assert lines[7].split()[:2] == ["interval(4096)", "1,024"]


def test_the_command_compares_rules_where_none_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat:30", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["rule"] for row in rows] == ["all", "last", "last+junction"]


def test_the_command_prints_json_and_csv_of_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["documents:150", "--rule", "all,trtllm(512, [64])", "--block", "512"]
    words += ["--model", "kimi-k3", "--pool", "20GB,1TB"]
    assert main([*words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert main([*words, "--csv"]) == 0
    table = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [r["pool_bytes"] for r in rows] == [20 * GB, 10**12] * 2
    assert [int(r["reused_tokens"]) for r in table] == [r["reused_tokens"] for r in rows]
    assert rows[1]["hit_percent"] > rows[0]["hit_percent"]


def test_the_command_reads_a_file_and_uses_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(json.dumps([7] * n) for n in (40, 40, 30)))
    words = [str(path), "--rule", "last,all", "--block", "16", "--grain", "8", "--json"]
    assert main([*words, "--jobs", "2"]) == 0
    assert [r["reused_tokens"] for r in json.loads(capsys.readouterr().out)] == [32, 48]
    assert main([*words[:-1]]) == 0
    assert "public" not in capsys.readouterr().out  # a file is modelled on nothing


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        (["chat:0"], "the size in chat:0 is '0'"),
        (["chat", "--block", "a"], "block is 'a'"),
        (["chat", "--pool", "3 apples"], "pool is '3 apples'"),
        (["chat", "--pool", "9GB"], "--pool is given without a model.* Try --model kimi-k3"),
        (["chat", "--state-pool", "9GB"], "--state-pool is given without --pool.* Try --pool"),
        (["chat", "--eviction", "lru"], "--eviction is given without --pool.* Try --pool"),
        (["chat", "--rule", "most"], "rule is 'most'"),
        (["chat", "--jobs", "0"], "--jobs is '0'"),
        (["chat:2k"], "the size in chat:2k is '2k'"),
        (["documents:abc"], "the size in documents:abc is 'abc'"),
        (["chat:-5"], "the size in chat:-5 is '-5'"),
        (["chat:1e3"], "the size in chat:1e3 is '1e3'"),
        (["chat:"], "the size in chat: is ''"),
        (["chat", "--grain", "0"], "--grain is '0'"),
        (["chat", "--model", "kimi-k3", "--pool", "20"], "--pool is '20'.* Try --pool 20GB"),
        (["chat", "--model", "kimi-k3", "--pool", "infGB"], "--pool is 'infGB'"),
        (["chat", "--model", "kimi-k3", "--pool", "9GB", "--state-pool", "9"], "--state-pool is"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(words: list[str], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        main(words)


def test_traces_rules_and_replay_load_nothing_heavy() -> None:
    code = (
        "import sys, mambackpt.replay; "
        "print(*sorted({'torch', 'triton', 'matplotlib', 'tqdm'} & {*sys.modules}))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == []


# --- public figures -------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "hit"), [(1072, 0), (2000, 0), (3000, 1072), (3500, 2144)])
def test_internal_under_a_drop_gives_the_hits_seen_before_a_fix(prompt: int, hit: int) -> None:
    """Blocks of 1,072, hash units of 67, EAGLE's drop: prompts sent again."""
    trace = trace_from_tokens([range(prompt)] * 2, grain=1)
    rule = "internal(hash_block=67, drop=True)"
    assert replay(trace, rule, block=1072).reused.tolist() == [0, hit]


# A public check of vllm: a prompt of 4,481 tokens, sent again three times.
RETENTION = {
    # unset is dense for hybrid models with EAGLE since 0.29: every step's end is kept
    "unset": ("last+junction+chunk", 1600, 1600, [1600, 1600, 1600]),
    # explicit 0: the last boundary, which a lookup that drops a block never finds, then the fork
    "explicit 0": ("last+junction", 1600, 1600, [0, 1600, 1600]),
    "without the drop": ("last+junction", 1600, 0, [3200, 3200, 3200]),
    # a smaller block, as drafts take room in a state
    "without drafts": ("last+junction", 1568, 0, [3136, 3136, 3136]),
}


@pytest.mark.parametrize("setting", RETENTION)
def test_retention_gives_the_hits_of_the_public_check(setting: str) -> None:
    rule, block, drop, hits = RETENTION[setting]
    trace = trace_from_tokens([range(4481)] * 4, grain=1)
    run = replay(trace, rule, block=block, lookup_margin=drop, budget=2048)
    assert run.reused.tolist() == [0, *hits]


def test_the_released_scheduler_keeps_what_a_shortened_lookup_finds() -> None:
    """0.33 finds 1,600 at once, whatever retention is: it stops where the drop leads."""
    for retention in (None, 0):
        served = serve_tokens(
            [range(4481)] * 4, "vllm",
            block=1600, hash_block=1600, retention=retention, drop=True, budget=2048,
        )  # fmt: skip
        assert [one.reused for one in served] == [0, 1600, 1600, 1600]
