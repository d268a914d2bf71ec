"""What the released scheduler (vllm 0.33.0, on a CPU) was seen to do, and this one must do.

The numbers in the small cases, and the recorded steps, are the scheduler's own.
"""

import pytest
import recorded_steps

from mambackpt.conformance.vllm_scheduler import KINDS
from mambackpt.engine import (
    Request,
    Settings,
    branching_chats,
    check_lockstep,
    compare_variants,
    trace_history,
)

FIXES = ["keep-the-stop", "refuse-inside-block", "never-key-the-left-block"]
DENSE, DROP = {"retention": None}, {"drop_eagle_block": True}
NO_CHECKPOINTS = {"internal_checkpoints": False, "checkpoint_alignment": None}


def trace(*requests, **settings):
    return list(trace_history(requests, Settings(max_running=1, pool_blocks=99, **settings)))


def hits(traced):
    """Hit and junction of each request where it starts."""
    return {name: tuple(hit) for step in traced for name, hit in step["hits"].items()}


def chunks(traced, name):
    return [end for step in traced for who, _, end in step["scheduled"] if who == name]


def keyed(step, group):
    """Position and blocks of a group's keys after a step."""
    return [(position, blocks) for position, _, blocks in step["keys"][group]]


# -- many histories


def test_every_recorded_step_of_the_released_scheduler():
    recorded = list(recorded_steps.read())
    assert {case["kind"] for case, _ in recorded} == set(KINDS)
    assert sum(len(theirs) for _, theirs in recorded) > 5000
    for case, theirs in recorded:
        requests = [Request(**request) for request in case["requests"]]
        ours = recorded_steps.short(trace_history(requests, Settings(**case["settings"])))
        for place, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            assert mine == other, (case["kind"], place)


@pytest.fixture(scope="module")
def chats():
    return [branching_chats(seed) for seed in range(30)]


@pytest.mark.parametrize(
    ("attention", "change", "wrong", "hit", "reused", "parts"),
    [
        (64, {}, 48, 558, 136_240, 1118),
        (64, DROP, 28, 508, 123_520, 1005),
        (64, DENSE, 14, 558, 145_888, 1015),
        (64, DENSE | DROP, 18, 508, 124_672, 963),
        (16, {}, 47, 558, 136_304, 1249),
        (16, DROP, 58, 547, 128_128, 1167),
        (16, DENSE, 14, 558, 145_888, 1015),
        (16, DENSE | DROP, 19, 548, 136_192, 998),
    ],
)
def test_the_branching_chats_on_the_released_scheduler(
    chats, attention, change, wrong, hit, reused, parts
):
    """Wrong restores, hits, reused tokens and prefill chunks; attention blocks of B and of h."""
    sizes = {"attention_block_size": attention, "max_running": 1, "budget": 300}
    counts = check_lockstep(chats, Settings(**sizes, **change), shrink=False).counts
    assert (counts.wrong_restores, counts.hits) == (wrong, hit)
    assert (counts.reused_tokens, counts.prefill_chunks) == (reused, parts)


@pytest.mark.parametrize(("change", "hit"), [(NO_CHECKPOINTS, 571), ({"hash_block_size": 64}, 559)])
def test_without_checkpoints_or_hits_inside_a_block_no_restore_is_wrong(chats, change, hit):
    sizes = {"max_running": 1, "budget": 300}
    report = check_lockstep(chats, Settings(**sizes, **change), shrink=False)
    assert (report.counts.wrong_restores, report.counts.hits) == (0, hit)
    assert report.violations == ()


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({}, (1118, 1343, 1343, 1257)),
        (DROP, (1005, 1182, 1182, 974)),
        (DENSE, (1015, 1082, 1082, 1018)),
        (DENSE | DROP, (963, 1149, 1149, 943)),
    ],
)
def test_the_price_of_each_fix_in_prefill_chunks(chats, change, parts):
    """What is released, then each fix: up to a fifth more chunks, and no reuse lost to speak of."""
    settings = Settings(max_running=1, budget=300, **change)
    released, *fixed = compare_variants(chats, settings, ["vllm-0.33", *FIXES]).values()
    assert tuple(report.counts.prefill_chunks for report in (released, *fixed)) == parts
    for report in fixed:
        assert report.violations == ()
        assert report.counts.reused_tokens > 0.998 * released.counts.reused_tokens


# -- what attention finds


def test_attention_is_found_by_whole_blocks_and_by_the_prompts_last_unit():
    """Prompts of 60 and 80 tokens share 40: a block of 64 has no key below its tail at 48."""
    first, second = Request("A", range(60)), Request("B", [*range(40), *range(1000, 1040)])
    traced = trace(first, second)
    assert keyed(traced[0], 0) == [(48, [1])]
    assert hits(traced)["B"] == (0, 0)
    fine = trace(first, second, attention_block_size=16)
    assert hits(fine)["B"] == (0, 32)


def test_a_block_that_fills_is_found_by_its_tail_and_by_its_end():
    traced = trace(Request("A", range(60), range(100, 110)))
    assert [keyed(step, 0) for step in traced if step["keys"]][-1] == [(48, [1]), (64, [1])]


def test_a_hit_inside_an_attention_block_is_continued_in_a_copy_of_it():
    """Block and copy, and the state's, are held for the step and let go together."""
    first, second = Request("A", range(60)), Request("B", [*range(60), *range(1000, 1040)])
    resumed = trace(first, second)[2]
    assert (resumed["hits"], resumed["copies"]) == ({"B": [48, 0]}, [[1, 2], [3, 4]])
    assert resumed["rows"] == {"B": [[2], [4]]}
    assert {1, 2, 3, 4}.isdisjoint(resumed["free"][:2])


@pytest.mark.parametrize(("prompt", "unit", "hit"), [(96, 16, 80), (97, 16, 80), (128, 64, 64)])
def test_under_drop_a_match_may_be_one_unit_longer_than_the_hit(prompt, unit, hit):
    """A prompt that is sent again resumes one unit before its end, also where it fills a unit."""
    again = [Request(name, range(prompt)) for name in "AB"]
    assert hits(trace(*again, hash_block_size=unit, **DROP))["B"] == (hit, 0)


def test_under_drop_the_block_before_the_junction_is_kept_too():
    """Prompts of 97 and 73 tokens in blocks of 24 share 73: the junction is 48, and 24 is kept."""
    sizes = {"mamba_block_size": 24, "hash_block_size": 24, "budget": 24}
    traced = trace(
        Request("A", range(97)), Request("B", range(73)), **sizes, **NO_CHECKPOINTS, **DROP
    )
    assert hits(traced)["B"] == (0, 48)
    last = [step for step in traced if step["keys"]][-1]
    assert [position for position, _ in keyed(last, 1)] == [24, 48, 72]


def test_a_threshold_leads_to_a_wrong_restore_without_a_hit_inside_a_block():
    """A gets 32 tokens beside B, then runs on alone, past the end of the block it stands inside of.

    Under dense retention key 64 leads to the state of 32, and C restores it. Each fix stops A, or
    does not key that block.
    """
    requests = [
        Request("A", range(129)),
        Request("B", range(1000, 1001)),
        Request("C", [*range(65), 2000, 2001], arrival=6),
    ]
    settings = Settings(max_running=2, pool_blocks=99, long_prefill_threshold=32, **DENSE)
    traced = list(trace_history(requests, settings))
    assert chunks(traced, "A") == [32, 129]
    assert hits(traced)["C"] == (64, 0)
    assert [wrong[:2] for wrong in traced[-1]["wrong"]] == [[1, 64]]
    reports = compare_variants([requests], settings, ["vllm-0.33", *FIXES])
    assert [report.counts.wrong_restores for report in reports.values()] == [1, 0, 0, 0]


# -- what the scheduler and the pool do


def test_a_threshold_for_long_prefills_needs_somebody_who_would_starve():
    long, short = Request("A", range(200)), Request("B", range(300, 320))
    sizes = {"long_prefill_threshold": 64, **NO_CHECKPOINTS}
    assert chunks(trace(long, **sizes), "A") == [192, 200]
    for running in (1, 2):  # whether the other one may run or has to wait
        both = Settings(max_running=running, pool_blocks=99, **sizes)
        assert chunks(trace_history([long, short], both), "A") == [64, 128, 192, 200]


def test_the_blocks_of_a_hit_are_pinned_before_anything_is_taken():
    """Four blocks of 16: the hit's two are free, and the new ones must be the other two."""
    first, second = Request("A", range(17), (50, 51)), Request("B", [*range(16), 100])
    sizes = {"mamba_block_size": 16, "hash_block_size": 16, **NO_CHECKPOINTS}
    settings = Settings(max_running=1, pool_blocks=4, **sizes)
    *_, before, resumed = trace_history([first, second], settings)
    assert before["free"] == [4, 3, 2, 1]
    assert (resumed["hits"], resumed["rows"]) == ({"B": [16, 0]}, {"B": [[1, 4], [2, 3]]})
    assert resumed["free"] == [3, 4, 1, 2]


@pytest.mark.parametrize(("pool", "first_step"), [(11, 22), (12, 3)])
def test_a_request_starts_only_where_its_whole_prompt_would_fit(pool, first_step):
    """A has five blocks; B's first chunk takes four more, its 100 tokens at least seven."""
    first = Request("A", range(33), range(100, 120))
    second = Request("B", range(1000, 1100), arrival=2)
    sizes = {"mamba_block_size": 16, "hash_block_size": 16, "budget": 48, **NO_CHECKPOINTS}
    settings = Settings(max_running=2, pool_blocks=pool, **sizes)
    started = [
        step["step"] for step in trace_history([first, second], settings) if "B" in step["hits"]
    ]
    assert started[0] == first_step


def test_a_checkpoint_between_two_intervals_loses_its_key_also_at_a_boundary_of_its_prompt():
    """A checkpoint is kept by its interval, as the prompt's own or at the junction: 64 is none."""
    first, second = Request("A", range(256)), Request("B", [*range(192), *range(1000, 1100)])
    sizes = {"hash_block_size": 64, "retention": 128, **DROP}
    traced = trace(first, second, **sizes)
    assert hits(traced)["B"] == (0, 128)
    states = [keyed(step, 1) for step in traced if step["keys"]][-1]
    assert [position for position, _ in states] == [128, 192, 256]


@pytest.mark.parametrize(
    ("block", "retention", "drop", "hit"),
    [
        (1600, None, True, 1600),
        (1600, 0, True, 1600),
        (1600, 0, False, 3200),
        (1568, 0, False, 3136),
    ],
)
@pytest.mark.parametrize("checkpoints", [True, False])
def test_a_prompt_of_4481_tokens_three_times(block, retention, drop, hit, checkpoints):
    """A public check of retention by release; that an explicit 0 gave 0 first is an earlier one's.

    Blocks are those of a model with drafts (1,600) and without (1,568).
    """
    traced = trace(
        *[Request(name, range(4481)) for name in "ABC"],
        mamba_block_size=block,
        hash_block_size=block,
        retention=retention,
        drop_eagle_block=drop,
        internal_checkpoints=checkpoints,
    )
    assert hits(traced) == {"A": (0, 0), "B": (hit, 0), "C": (hit, 0)}
