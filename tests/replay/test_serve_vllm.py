"""vllm's cache on lists of tokens: what the released scheduler was seen to keep and reuse."""

import random
import sys
from pathlib import Path

import pytest

from mambackpt.errors import CheckpointValueError
from mambackpt.replay import load_trace, trace_from_tokens
from mambackpt.replay.rules import Lengths, Match, Sizes, internal
from mambackpt.replay.serve import TokenRequest, serve_tokens
from mambackpt.replay.serve.vllm_traces import walk_trace

sys.path.append(str(Path(__file__).parent.parent / "engine"))
import recorded_steps

WHOLE = {"block": 64, "hash_block": 64}


def vllm(*requests, **settings):
    return serve_tokens(requests, "vllm", **settings)


def test_a_resend_resumes_at_the_last_hash_unit_and_computes_its_last_token_again():
    first, again, longer = vllm(range(100), range(100), range(200))
    assert (first.attention, first.reused, first.created, first.kept) == (0, 0, (96,), (96,))
    assert (again.attention, again.reused, again.created) == (96, 96, ())
    assert (longer.reused, longer.created, longer.kept) == (96, (192,), (96, 192))


def test_the_second_sharer_leaves_a_state_at_the_junction_and_the_third_resumes_there():
    prompts = [[*range(200), *range(1000 * n, 1000 * n + 200)] for n in (1, 2, 3)]
    first, second, third = vllm(*prompts, **WHOLE)
    assert (first.branch, first.created) == (None, (384,))
    assert (second.attention, second.reused, second.branch) == (192, 0, 192)
    assert (second.created, second.kept) == ((192, 384), (192, 384))
    assert (third.attention, third.reused, third.branch, third.created) == (192, 192, None, (384,))


def test_a_junction_inside_the_first_block_leaves_no_state():
    prompts = [[*range(40), *range(1000 * n, 1000 * n + 200)] for n in (1, 2)]
    assert vllm(*prompts, block=64, hash_block=8)[1].branch is None


@pytest.mark.parametrize(("retention", "created"), [(0, (64,)), (None, (64, 128, 192))])
def test_decoding_leaves_states_at_block_boundaries_under_dense_retention(retention, created):
    request = TokenRequest(range(100), outputs=range(500, 600))
    [served] = vllm(request, retention=retention, **WHOLE)
    assert served.created == served.kept == created


@pytest.mark.parametrize(
    ("block", "retention", "drop", "reused"),
    [
        (1600, None, True, 1600),
        (1600, 0, True, 1600),
        (1600, 0, False, 3200),
        (1568, 0, False, 3136),
    ],
)
def test_a_prompt_of_4481_tokens_three_times(block, retention, drop, reused):
    settings = {"block": block, "hash_block": block, "retention": retention, "drop": drop}
    assert [s.reused for s in vllm(*[range(4481)] * 3, **settings)] == [0, reused, reused]


def test_tokens_are_any_integers():
    prompt = [-5, 10**12, *range(-200, 0)]
    assert [s.reused for s in vllm(prompt, prompt)] == [0, 192]


def test_without_checkpoints_or_an_alignment_a_state_is_left_where_a_step_ends():
    [served] = vllm(range(400), checkpoints=False, **WHOLE)
    assert vllm(range(400), alignment=None, **WHOLE) == [served]
    assert served.created == (384,)


def test_what_is_reused_is_what_the_released_scheduler_reused():
    """Every recorded history of plain settings in which one request runs at a time."""
    plain = ("h = B", "h < B", "drop, h = B", "drop, h < B", "interval", "interval, drop, h < B")
    compared = 0
    for case, steps in recorded_steps.read():
        told = case["settings"]
        if case["kind"] not in plain or told["max_running"] > 1:
            continue
        served = vllm(
            *[TokenRequest(r["prompt"], outputs=r["output"]) for r in case["requests"]],
            block=told["mamba_block_size"],
            hash_block=told["hash_block_size"],
            alignment=told["checkpoint_alignment"],
            budget=told["budget"],
            retention=told["retention"],
            drop=told["drop_eagle_block"],
            checkpoints=told["internal_checkpoints"],
        )
        hits = {name: hit for step in steps for name, (hit, _) in step.get("hits", {}).items()}
        assert [s.reused for s in served] == [hits[r["name"]] for r in case["requests"]]
        compared += len(served)
    assert compared > 20


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("alignment", [None, 16])
def test_the_rule_internal_keeps_what_the_engine_keeps_of_a_first_prompt(alignment, drop):
    """Also where no kernel can write it and the last boundary is kept: under drop one before."""
    sizes = {"hash_block": 1072, "alignment": alignment, "drop": drop}
    for prompt in (1000, 1072, 2000, 2144, 2145, 3000, 3500):
        [served] = vllm(range(prompt), block=1072, **sizes)
        kept = internal(Lengths(prompt), Match(), Sizes(1072), **sizes)
        assert served.created == tuple(position for position in kept if position)


# -- traces, where ids stand for blocks of tokens


def random_prompts(seed, most=12):
    draw = random.Random(seed)
    prompts = []
    for n in range(draw.randint(2, most)):
        base = draw.choice(prompts) if prompts and draw.random() < 0.8 else []
        new = range(1000 * n, 1000 * n + draw.randint(1, 300))
        prompts.append([*base[: draw.randint(0, len(base))], *new])
    return prompts


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("retention", [0, None, 128])
def test_a_trace_of_single_tokens_is_served_as_its_token_lists_are(drop, retention):
    for seed in range(10):
        prompts = random_prompts(seed)
        served = vllm(*prompts, drop=drop, retention=retention, budget=200)
        rows = walk_trace(
            trace_from_tokens(prompts, grain=1), drop=drop, retention=retention, budget=200
        )
        assert [row[:2] for row in rows] == [(s.attention, s.reused) for s in served]


@pytest.mark.parametrize("retention", [0, None, 128])
def test_a_trace_of_hash_units_is_served_as_its_token_lists_are(retention):
    """Units of 16 and sizes that are multiples: nothing is lost by looking at units only."""
    for seed in range(20):
        prompts = random_prompts(seed)
        served = vllm(*prompts, retention=retention, budget=208)
        rows = list(
            walk_trace(trace_from_tokens(prompts, grain=16), retention=retention, budget=208)
        )
        assert [row[:3] for row in rows] == [
            (s.attention, s.reused, len(s.created)) for s in served
        ]


def test_a_trace_whose_ids_do_not_fit_a_size_is_refused():
    trace = trace_from_tokens([range(100)], grain=24)
    with pytest.raises(CheckpointValueError, match="block is 64 and the trace has ids of 24"):
        list(walk_trace(trace))


@pytest.mark.shared
def test_in_blocks_of_the_traces_grain_vllm_keeps_the_last_boundary_and_junctions(shared):
    """The public rule `last+junction` of the Mooncake trace: 58.20 % of tokens, 0.42 states."""
    trace = load_trace(shared / "traces" / "mooncake_synthetic_trace.jsonl.gz")
    rows = list(walk_trace(trace, block=512, hash_block=512))
    reused, states = sum(row[1] for row in rows), sum(row[2] for row in rows)
    assert round(100 * reused / trace.prompt.sum(), 2) == 58.20
    assert round(states / len(trace), 2) == 0.42
