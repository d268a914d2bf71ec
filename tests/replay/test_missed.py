"""Why a trace was not reused: every computed token has one cause, and the causes add up."""

from typing import Any

import numpy as np
import pytest
from test_reads import ModelBytes, random_trace

from mambackpt.replay import (
    BANDS,
    CAUSES,
    VETOES,
    Missed,
    explain_misses,
    explain_misses_plainly,
    generate_documents,
    replay,
    trace_from_tokens,
)

RULES = ["last", "all", "none", "attention", "last+junction", "last+junction+chunk", "internal"]
RULES += ["interval(12)", "sglang(2)", "marconi", "llamacpp(8, 4)", "trtllm(from_end=[0, 5])"]
POOLS: list[dict[str, Any]] = [
    {},
    {"lookup_margin": 4},
    {"model": ModelBytes(), "pool_bytes": 200},
    {"model": ModelBytes(), "pool_bytes": 90, "lookup_margin": 8},
    {"model": ModelBytes(), "pool_bytes": 150, "state_pool_bytes": 40},
    {"model": ModelBytes(), "pool_bytes": 150, "eviction": "thinning"},
]


def same(one: Missed, other: Missed) -> bool:
    return all(one.tokens[cause].tolist() == other.tokens[cause].tolist() for cause in CAUSES)


@pytest.mark.parametrize("options", POOLS, ids=lambda options: "-".join(options) or "unlimited")
@pytest.mark.parametrize("rule", RULES)
def test_the_causes_of_each_request_add_up_to_what_it_computed(
    rule: str, options: dict[str, Any]
) -> None:
    for seed in range(4):
        trace = random_trace(seed)
        missed = explain_misses(trace, rule, block=8, budget=24, **options)
        run = replay(trace, rule, block=8, budget=24, **options)
        total = sum(missed.tokens[cause] for cause in CAUSES)
        assert (total == run.prompt - run.reused).all()
        assert (np.array([missed.tokens[cause] for cause in CAUSES]) >= 0).all()
        wasted = sum(missed.tokens[cause] for cause in VETOES)
        assert (wasted == missed.wasted).all()
        assert same(missed, explain_misses_plainly(trace, rule, block=8, budget=24, **options))


def test_a_block_off_the_grain_is_explained_in_finer_blocks() -> None:
    trace = random_trace(3)
    missed = explain_misses(trace, "last+junction", block=6)
    assert same(missed, explain_misses_plainly(trace, "last+junction", block=6))
    assert missed.replay.notes
    total = sum(missed.tokens[cause] for cause in CAUSES)
    assert (total == missed.replay.prompt - missed.replay.reused).all()


def test_nothing_is_evicted_from_unlimited_memory_and_something_from_a_small_pool() -> None:
    trace = random_trace(1)
    free = explain_misses(trace, "all", block=4)
    assert not free.tokens["state evicted"].any()
    assert not free.tokens["attention evicted"].any()
    tight = explain_misses(trace, "all", block=4, model=ModelBytes(), pool_bytes=90)
    assert tight.tokens["state evicted"].any() or tight.tokens["attention evicted"].any()


def test_a_model_without_states_loses_to_attention_alone() -> None:
    missed = explain_misses(random_trace(2), "attention", block=4)
    assert not any(missed.tokens[cause].any() for cause in VETOES)


def test_two_prompts_that_part_before_the_first_one_s_state_miss_beyond_the_fork() -> None:
    """S01, vllm issue #45238: attention matches 1,056 tokens, the state lies at 2,112."""
    shared, own = [7] * 1500, [8] * 700
    trace = trace_from_tokens([shared + own, shared + [9] * 700], grain=528)
    missed = explain_misses(trace, "last", block=528)
    assert {cause: int(row[1]) for cause, row in missed.tokens.items() if row[1]} == {
        "new": 2200 - 1056,
        "state beyond the fork": 1056,
    }
    assert VETOES[missed.veto[1]] == "state beyond the fork"


def test_shared_tokens_below_a_block_are_lost_to_the_block() -> None:
    """369 shared tokens in a block of 784 reuse nothing."""
    prompts = [[7] * 369 + [8] * 900, [7] * 369 + [9] * 900]
    missed = explain_misses(trace_from_tokens(prompts, grain=1), "all", block=784)
    assert int(missed.replay.reused[1]) == 0
    assert int(missed.tokens["below a block"][1]) == 369


def test_totals_and_bands_are_sums_of_the_requests() -> None:
    trace = generate_documents(400)
    missed = explain_misses(trace, "last", block=1024)
    totals = {row["cause"]: row for row in missed.totals()}
    assert sum(row["tokens"] for row in totals.values()) == missed.replay.recomputed
    for number, cause in enumerate(VETOES):
        assert totals[cause]["requests"] == int((missed.veto == number).sum())
    bands = missed.bands()
    assert tuple(row["reused"] for row in bands) == BANDS
    assert sum(row["wasted_tokens"] for row in bands) == int(missed.wasted.sum())
    assert bands[-1]["wasted_tokens"] == 0
    could = missed.replay.ceiling > 0
    assert sum(row["requests"] for row in bands) == int(could.sum())
    rows = missed.rows()
    assert len(rows) == 400
    for row in rows:
        causes = sum(row[cause.replace(" ", "_")] for cause in CAUSES)
        assert causes == row["computed"] == row["prompt"] - row["joint_hit"]
        assert row["joint_hit"] <= row["attention_match"] <= row["could_reuse"]


def test_a_trace_without_one_full_block_is_all_new() -> None:
    missed = explain_misses(trace_from_tokens([[1, 2], [1, 2]], grain=4), "last+chunk", block=4)
    assert missed.tokens["new"].tolist() == [2, 2]
    assert missed.veto.tolist() == [-1, -1]
    assert all(row["percent_of_waste"] == 0 for row in missed.bands())
