"""The cases that vllm's scheduler is asked, and how its steps are compared, without vllm."""

import copy
import json

import pytest

from mambackpt.conformance.vllm_scheduler import (
    KINDS,
    PIECES,
    answer,
    differences,
    make_case,
    reused,
    smaller,
)
from mambackpt.engine import Settings


@pytest.mark.parametrize("kind", KINDS)
def test_a_case_is_json_and_the_kits_steps_of_it_agree_with_themselves(kind):
    case = json.loads(json.dumps(make_case(1, kind)))
    assert case == json.loads(json.dumps(make_case(1, kind)))
    assert (case["kind"], case["settings"]["attention_block_size"] > 0) == (kind, True)
    assert Settings(**case["settings"]).pool_blocks == case["settings"]["pool_blocks"]
    theirs = json.loads(json.dumps(answer(case)))
    assert differences(case, theirs, json.loads(json.dumps(answer(case)))) == []
    assert len(reused(theirs)) == len(case["requests"])


def test_seeds_take_turns_with_the_kinds():
    assert [make_case(seed)["kind"] for seed in range(len(KINDS))] == list(KINDS)


def test_the_first_step_that_differs_is_told_and_what_differs_in_it():
    case = make_case(3, "h < B")
    ours = json.loads(json.dumps(answer(case)))
    theirs = copy.deepcopy(ours)
    theirs["steps"][4]["scheduled"] = []
    theirs["steps"][7]["copies"] = [[1, 2]]
    [difference] = differences(case, theirs, ours)
    assert (difference.request, difference.theirs) == (4, {"scheduled": []})
    assert difference.ours == {"scheduled": ours["steps"][4]["scheduled"]}
    theirs["steps"] = ours["steps"][:-1]
    [difference] = differences(case, theirs, ours)
    assert (difference.theirs, difference.ours) == ([], ours["steps"][-1:])


def test_smaller_cases_lose_a_request_or_tokens_and_still_run():
    case = make_case(5, "limited pool, h < B")
    length = len(json.dumps(case))
    tried = list(smaller(case))
    assert all(len(json.dumps(less)) < length for less in tried)
    assert {len(less["requests"]) for less in tried} == {
        len(case["requests"]),
        len(case["requests"]) - 1,
    }
    assert answer(tried[0])["steps"]


def test_the_piece_names_its_worker():
    [piece] = PIECES
    assert piece.worker == "vllm_scheduler.py"
    assert piece.answer(next(iter(piece.cases(0, 1))))["steps"]
