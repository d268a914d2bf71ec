"""Placement rules: the positions that each system's own words give."""

import pickle
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mambackpt.errors import CheckpointError, CheckpointValueError
from mambackpt.planner import compute_mamba_prefill_checkpoints
from mambackpt.replay.rules import (
    RULES,
    Lengths,
    MarconiCosts,
    Match,
    Sizes,
    Span,
    expected_recompute,
    get_rule,
    optimal,
    optimal_positions,
    placement,
)


def positions(
    rule: str, prompt: int, match: Match | None = None, block: int = 512, **more: int
) -> list[int]:
    """The positions of a rule that keep something, ascending."""
    request = Lengths(prompt, more.pop("output", 0), more.pop("message", 0))
    answer = get_rule(rule).place(request, match or Match(), Sizes(block, **more))
    spans = [range(p.first, p.last + 1, p.step) if isinstance(p, Span) else [p] for p in answer]
    return sorted({p for span in spans for p in span if p > 0})


@pytest.mark.parametrize(
    ("rule", "prompt", "match", "expected"),
    [
        ("none", 5000, Match(), []),
        ("attention", 5000, Match(4608, 0), []),
        ("all", 1536, Match(), [512, 1024]),
        ("all", 1537, Match(1024, 1024), [512, 1024, 1536]),
        ("last", 1536, Match(), [1024]),
        ("last", 512, Match(), []),
        ("last", 1537, Match(1536, 1536), []),
        ("junction", 5000, Match(3000, 1024), [2560]),
        ("junction", 5000, Match(3000, 2560), []),
        ("last+junction", 5000, Match(3000, 1024), [2560, 4608]),
        ("interval(1000)", 3000, Match(), [1000, 2000, 2560]),
        ("interval(every=1536)", 3073, Match(), [1536, 3072]),
        ("last+junction+chunk", 20_000, Match(3000, 2560), [10_752, 18_944, 19_968]),
    ],
)
def test_rules_of_the_block_grid(rule: str, prompt: int, match: Match, expected: list[int]) -> None:
    assert positions(rule, prompt, match) == expected


def test_chunk_ends_are_cut_to_the_block_grid() -> None:
    # 528-token blocks in steps of 2,048: 1,584 is three blocks.
    assert positions("last+chunk", 2200, block=528, budget=2048) == [1584, 2112]
    # An off-grid start is cut to the grid once; then every step takes as many whole blocks.
    assert positions("chunk", 9000, Match(1000, 1000), block=512, budget=2048) == [
        2560, 4608, 6656,
    ]  # fmt: skip


@pytest.mark.parametrize("rule", ["chunk", "internal"])
def test_a_budget_below_a_block_can_reach_no_boundary(rule: str) -> None:
    with pytest.raises(CheckpointValueError, match="budget is 500 and block is 512"):
        positions(rule, 2000, budget=500)


def test_internal_is_the_planners_position_of_the_step_that_reaches_the_end() -> None:
    # 8,000 tokens in one step at 1,536 (semantics of vllm 0.33): 7,680, in column 4.
    assert positions("internal", 8000, block=1536) == [7680]
    # With a hash unit of 128 the checkpoint lies closer to the end.
    assert positions("internal(hash_block=128)", 8000, block=1536) == [7936]
    # 30,000 tokens in steps of 8,192 reach the end from 25,152.
    assert positions("internal(alignment=1)", 30_000, block=2096) == [29_344]


@given(st.integers(1, 3000), st.integers(1, 6), st.integers(1, 4), st.booleans())
def test_internal_agrees_with_the_planner(prompt: int, blocks: int, units: int, drop: bool) -> None:
    H = 16 * units
    M = H * blocks
    kept = positions(f"internal(hash_block={H}, drop={drop})", prompt, block=M, budget=3000)
    offsets, _ = compute_mamba_prefill_checkpoints([prompt], [prompt], H, M, 16, drop, H)
    if offsets[0]:
        assert kept == offsets
    else:  # the step is split at the last boundary that a lookup can use
        last = (prompt // M - 1) * M if drop else (prompt - 1) // M * M
        assert kept == ([last] if last > 0 else [])


def test_a_drop_keeps_the_state_that_a_shortened_lookup_can_use() -> None:
    """S09: 8,901 tokens at 2,304 with EAGLE's drop; attention matches 6,912 (vllm PR #57128)."""
    assert positions("internal(drop=True)", 8901, block=2304, budget=9000) == [4608]
    assert positions("last", 8901, block=2304) == [6912]


def test_a_lattice_keeps_powers_of_two_within_its_budget() -> None:
    # A public proposal's figures: 260,946 tokens.
    assert positions("lattice(4)", 260_946) == [65_536, 131_072, 196_608]
    assert positions("lattice(16)", 260_946) == [16_384 * n for n in range(1, 16)]
    assert positions("lattice(4)", 5) == [1, 2, 3, 4]
    assert positions("lattice(4)", 6) == [2, 4]


def test_a_ladders_least_distance_doubles_with_depth() -> None:
    assert positions("ladder(512, 9)", 10_000) == [512, 1536, 3584, 7680]
    assert positions("ladder(512, 2)", 10_000) == [512, 1536]
    # On the block grid each is the first boundary at its distance or beyond.
    assert positions("ladder(500, 3)", 10_000) == [512, 1536, 3584]
    assert positions("ladder(513, 2)", 10_000) == [1024, 2560]
    assert positions("ladder(512, 9)", 512) == []


def test_sglang_keeps_the_last_kernel_chunk_or_the_fork_in_it() -> None:
    assert positions("sglang", 1000) == [960]
    assert positions("sglang", 63) == []
    assert positions("sglang", 1000, Match(512, 512)) == [960]
    # A branching point inside the extend replaces its state.
    assert positions("sglang", 1000, Match(700, 512)) == [640]
    # Off the chunk grid of this extend it does not.
    assert positions("sglang", 1000, Match(700, 500)) == [500 + 448]
    # Every piece of a chunked prefill donates one, the fork in place of its piece's.
    assert positions("sglang", 20_000) == [8192, 16_384, 19_968]
    assert positions("sglang", 20_000, Match(9000, 0)) == [8192, 8960, 19_968]


def test_sglang_keeps_the_newest_track_interval_of_decoding() -> None:
    assert positions("sglang", 500, output=400) == [448, 768]
    assert positions("sglang(chunk=4, interval=6)", 20, output=100) == [20, 108]
    # The last token out is never computed from, so 256 takes 57 tokens after 200.
    assert positions("sglang", 200, output=56) == [192]
    assert positions("sglang", 200, output=57) == [192, 256]


def test_sglang_without_buffers_keeps_ends_and_no_forks() -> None:
    rule = "sglang(strategy='no_buffer')"
    assert positions(rule, 1000, Match(999, 0)) == [1000]
    assert positions(rule, 601, output=8) == [601, 608]
    assert positions(rule, 1000, budget=400) == [400, 800, 1000]
    with pytest.raises(CheckpointValueError, match="strategy is 'lazy'"):
        get_rule("sglang(strategy='lazy')")


@pytest.mark.parametrize(
    ("prompt", "expected"), [(150, [64, 128, 150]), (128, [64, 106, 128]), (32, [10, 32])]
)
def test_trtllms_public_vectors(prompt: int, expected: list[int]) -> None:
    rule = "trtllm(64, from_start=[128, 999], from_end=[0, 22, 999])"
    assert positions(rule, prompt) == expected


def test_trtllm_combines_what_is_set() -> None:
    assert positions("trtllm(interval=1000)", 2500) == [1000, 2000]
    assert positions("trtllm(from_start=[300, 9000])", 2500) == [300]
    assert positions("trtllm(from_end=[0, 500, 3000])", 2500) == [2000, 2500]


def test_trtllm_keeps_the_prompts_end_where_no_point_applies() -> None:
    assert positions("trtllm(interval=8192)", 5000) == [5000]
    assert positions("trtllm(from_start=[9000])", 5000) == [5000]
    assert positions("trtllm(branches=True)", 5000, Match(700, 700)) == [5000]


def test_trtllm_cuts_forks_to_its_blocks_and_keeps_them_a_block_beyond_the_hit() -> None:
    rule = "trtllm(branches=True)"
    assert positions(rule, 5000, Match(3001, 0)) == [2976]
    assert positions(rule, 5000, Match(3001, 2944)) == [2976]
    assert positions(rule, 5000, Match(3001, 2945)) == [5000]
    assert positions("trtllm(branches=True, tokens_per_block=64)", 5000, Match(3001, 0)) == [2944]


def test_trtllm_with_nothing_set_warns_that_reuse_is_off() -> None:
    with pytest.warns(UserWarning, match="keeps no state: reuse is disabled"):
        rule = get_rule("trtllm")
    assert rule.place(Lengths(5000), Match(), Sizes(512)) == []


@pytest.mark.parametrize("rule", ["marconi", "marconi_corrected"])
def test_marconi_keeps_the_new_interior_node_and_the_end(rule: str) -> None:
    assert positions(rule, 5000, Match(2048, 0, splits=True)) == [2048, 4608]
    assert positions(rule, 5000, Match(2048, 0, splits=False)) == [4608]


@pytest.mark.parametrize(
    ("rule", "L", "kept"),
    [
        ("llamacpp", 14_252, [13_736, 14_248, 14_252]),
        ("llamacpp", 10_000, [9_484, 9_996, 10_000]),
        ("llamacpp(ub=2048)", 10_000, [7_952, 9_996, 10_000]),
        ("llamacpp(4096, 2048)", 10_000, [7_948, 9_996, 10_000]),
        ("llamacpp(cms=32)", 10_000, [9_484, 9_996, 10_000]),
        ("llamacpp(n=1)", 10_000, [9_996, 10_000]),
        ("llamacpp", 400, [396, 400]),
    ],
)
def test_llamacpp_keeps_two_points_near_the_end_and_the_live_end(
    rule: str, L: int, kept: list[int]
) -> None:
    assert positions(rule, L) == kept


def test_llamacpp_keeps_the_last_message_wherever_it_begins() -> None:
    assert positions("llamacpp", 5000, message=4900) == [4484, 4900, 4996, 5000]
    assert positions("llamacpp", 9000, Match(4484, 4484), message=4000) == [8484, 8996, 9000]


@given(
    st.sampled_from(["none", "all", "last", "junction", "chunk", "interval(700)"]),
    st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 9), st.integers(0, 9)), min_size=1),
)
def test_a_rule_for_arrays_is_the_rule_for_each(
    rule: str, cases: list[tuple[int, int, int]]
) -> None:
    prompt, attention, joint = (np.array(column) for column in zip(*cases, strict=True))
    attention, joint = attention * 256, np.minimum(attention, joint) * 256
    found = get_rule(rule).place(Lengths(prompt), Match(attention, joint), Sizes(256, 1024))
    for i in range(len(cases)):
        row = []
        for p in found:
            if isinstance(p, Span):
                first, last = (np.broadcast_to(part, len(cases))[i] for part in (p.first, p.last))
                row += list(range(first, last + 1, p.step))
            else:
                row.append(p[i])
        match = Match(int(attention[i]), int(joint[i]))
        one = positions(rule, int(prompt[i]), match, block=256, budget=1024)
        assert sorted(p for p in row if p > 0) == one


# --- names ----------------------------------------------------------------------------------------


def test_a_rule_is_one_function_and_joins_with_others() -> None:
    @placement("thirds")
    def thirds(request: Lengths, match: Match, settings: Sizes, *, of: int = 3) -> list[int]:
        return [request.prompt // of]

    try:
        assert positions("thirds", 300) == [100]
        assert positions("thirds(of=4)+last", 1030) == [257, 1024]
        assert get_rule(thirds).place(Lengths(300), Match(), Sizes(16)) == [100]
    finally:
        del RULES["thirds"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lsat", "rule is 'lsat'; expected one of attention, .*Try 'last'"),
        ("last+", "expected names joined with '\\+'"),
        (
            "interval",
            "'every'\\); expected interval\\(every\\). Try interval\\(every=4096\\)",
        ),
        ("interval(0)", "every is 0"),
        ("interval(1.5)", "every is 1.5"),
        ("interval(4, 5)", "too many positional arguments\\); expected interval\\(every\\)"),
        ("last(4)", "expected last\\(\\). Try last\\."),
        ("sglang(piece=3)", "'piece'\\); expected sglang\\(chunk=64, interval=256,"),
        ("trtllm(from_start=[0])", "from_start is 0"),
        ("trtllm(64, tokens_per_block=0)", "tokens_per_block is 0"),
        ("lattice", "argument: 'budget'"),
        ("lattice(0)", "budget is 0"),
        ("ladder(512)", "argument: 'most'"),
        ("ladder(0, 4)", "base is 0"),
        ("llamacpp(n=0)", "n is 0"),
        (
            "llamacpp(gap=100)",
            "'gap'\\); expected llamacpp\\(b=2048, ub=512, n=32, cms=8192\\)",
        ),
        ("interval(len)", "expected names joined"),
        ("last-junction", "rule is 'last - junction'"),
    ],
)
def test_a_name_that_is_no_rule_is_refused_with_what_is(name: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        get_rule(name)


ARGUED = {
    "interval": "interval(64)",
    "trtllm": "trtllm(64)",
    "lattice": "lattice(4)",
    "ladder": "ladder(64, 4)",
}


@pytest.mark.parametrize("name", RULES)
def test_every_rule_cites_its_source_and_travels_to_another_process(name: str) -> None:
    rule = get_rule(ARGUED.get(name, name))
    text = rule.place.func.__doc__ or ""  # type: ignore[attr-defined]
    assert name == "attention" or "Source:" in text or "`marconi`" in text
    copy = pickle.loads(pickle.dumps(rule))
    case = Lengths(1000), Match(), Sizes(64)
    assert list(copy.place(*case)) == list(rule.place(*case))


# --- the best positions ---------------------------------------------------------------------------


@given(st.lists(st.integers(0, 5), min_size=1, max_size=9), st.integers(0, 4))
def test_optimal_positions_are_those_of_trying_all(weights: list[int], count: int) -> None:
    if not sum(weights):
        weights[0] = 1

    def cost(places: Sequence[int]) -> float:
        return expected_recompute(weights, places)

    found = optimal_positions(weights, count)
    assert len(found) <= count
    sizes = range(min(count, len(weights) - 1) + 1)
    best = min(cost(p) for n in sizes for p in combinations(range(1, len(weights)), n))
    assert cost(found) == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_uniform_overlaps_recompute_an_even_share(count: int) -> None:
    """Expected recomputation of M positions on uniform overlaps over [0, N]: N / (2 (M + 1))."""
    N = 10_000
    weights = [1] * (N + 1)
    spent = expected_recompute(weights, optimal_positions(weights, count))
    assert spent == pytest.approx(N / (2 * (count + 1)), rel=1e-3)


def test_optimal_positions_are_exact_beyond_floating_point() -> None:
    # From 1, the overlaps of 3 cost 2 m + 2; from 3, those of 1 cost their number.
    many = 2**60
    assert optimal_positions([0, 2 * many + 1, 0, many + 1], 1) == [3]
    assert optimal_positions([0, 2 * many + 3, 0, many + 1], 1) == [1]


def test_the_optimal_rule_takes_overlaps_on_a_grid() -> None:
    rule = optimal(2, [512] * 5 + [2048] * 5 + [0] * 90, grain=512)
    assert rule.place(Lengths(4096), Match(), Sizes(512)) == [512, 2048]
    assert rule.place(Lengths(2048), Match(), Sizes(512)) == [512]


# --- Marconi's costs ------------------------------------------------------------------------------


def test_marconis_example_is_reproduced_as_published() -> None:
    """10,000 tokens in blocks of 16: 17.398 GB against a transformer's 5.243 GB, 3.318x."""
    hybrid, transformer = MarconiCosts(published=True), MarconiCosts(True, attention_layers=32)
    size = 10_000 // 16 * hybrid.state_bytes + 10_000 * hybrid.attention_bytes
    beside = 10_000 * transformer.attention_bytes
    assert (round(size / 1e9, 3), round(beside / 1e9, 3)) == (17.398, 5.243)
    assert round(size / beside, 3) == 3.318


def test_the_corrected_costs_differ_where_the_published_ones_are_wrong() -> None:
    published, corrected = MarconiCosts(True), MarconiCosts()
    D, N = 4096, 128
    # A state with the expansion factor and three taps, in fp16, of 24 layers.
    assert corrected.state_bytes == 24 * 2 * (2 * D * N + 3 * (2 * D + 2 * N))
    assert published.state_bytes == 24 * 2 * (D * N + 4 * (2 * D + 2 * N))
    # Without a parent both save the same; with one, the published MLP subtracts attention's FLOPs.
    assert published.flops_saved(5000, 0) == corrected.flops_saved(5000, 0)
    parent = 3000
    attention, mlp = 8 * parent * D * D + 4 * parent * parent * D, 16 * parent * D * D
    gap = corrected.flops_saved(5000, parent) - published.flops_saved(5000, parent)
    assert gap == 28 * (attention - mlp)
    assert corrected.flops_saved(5000, 5000) == 0
    assert published.flops_saved(5000, 5000) != 0
