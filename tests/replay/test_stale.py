"""Keys against states in llama.cpp: the checkpoint right above the resume position."""

import gzip
import json
from pathlib import Path

import pytest

from mambackpt.replay.serve.llama_cpp import LlamaCppSettings
from mambackpt.replay.serve.stale import (
    StaleRestore,
    check_states,
    describe_prompts,
    random_prompts,
    shrink,
    watch_states,
)

SMALL = LlamaCppSettings(batch=8, ubatch=8)

# Seen on the running server of b11549: the log-probabilities of the last answer differ from those
# of the same prompt alone (tiny random models, recurrent and hybrid).
A = tuple(range(100))
B = (*A[:99], 200, 201)
C = (*A[:96], *[210] * 104)
D = (*C[:110], 220, 221, 222)
SEEN = (LlamaCppSettings(batch=64, ubatch=64), (A, B, C, D))


def test_the_history_seen_on_the_running_server_restores_another_prompt_s_token() -> None:
    settings, history = SEEN
    served, wrong = watch_states(history, settings)
    assert [one.reused for one in served] == [0, 96, 96, 97]
    assert wrong == [StaleRestore(request=3, maker=1, position=97, token=96)]


@pytest.mark.parametrize("left_out", [0, 1, 2])
def test_each_of_its_requests_is_needed(left_out: int) -> None:
    settings, history = SEEN
    assert watch_states(history[:left_out] + history[left_out + 1 :], settings)[1] == []


def test_erasing_the_checkpoint_right_above_too_mends_it_and_costs_a_token() -> None:
    settings, history = SEEN
    served, wrong = watch_states(history, settings, strict=True)
    assert ([one.reused for one in served], wrong) == ([0, 96, 96, 96], [])


def test_a_prompt_that_resumes_nowhere_spares_the_checkpoint_after_one_token() -> None:
    """Seen on the running server as well: three requests of nine tokens, default sizes."""
    history = ((1, 1, 1, 1, 1), (2, 2), (2, 3))
    served, wrong = watch_states(history, LlamaCppSettings())
    assert [one.reused for one in served] == [0, 0, 1]
    assert wrong == [StaleRestore(request=2, maker=0, position=1, token=0)]


def test_the_running_server_answered_from_a_state_of_another_prompt(root: Path) -> None:
    """Recorded: three histories on two tiny random models; alone, the last prompt says otherwise.

    In five of six the likeliest tokens differ, in one even which is the first. The sixth has read
    thirteen tokens since, and its small recurrent state has forgotten.
    """
    with gzip.open(root / "tests/data/llama_cpp_answers.json.gz", "rt") as file:
        recorded = json.load(file)["stale"]
    for case in recorded:
        settings = LlamaCppSettings(case["settings"]["batch"], case["settings"]["ubatch"])
        served, wrong = watch_states([[*map(ord, text)] for text in case["texts"]], settings)
        assert [one.reused for one in served] == case["cached"]
        assert [one.request for one in wrong] == [len(served) - 1]
    assert [case["top"] != case["alone"] for case in recorded] == [True] * 4 + [False, True]
    assert [case["top"][0][0] != case["alone"][0][0] for case in recorded].count(True) == 1


def test_random_histories_lead_there_and_shrink_to_four_requests() -> None:
    report = check_states(map(random_prompts, range(1500)), SMALL)
    assert report.wrong > 0
    assert report.wrong_if_strict == 0
    assert len(report.smallest) == 4
    assert sum(map(len, report.smallest)) <= 25
    assert 3 <= len(report.from_nothing) <= 4
    assert sum(map(len, report.from_nothing)) <= 9


def test_nothing_can_be_left_out_of_the_smallest_history() -> None:
    history = shrink((A, B, C, D), SEEN[0], after_resuming=True)
    assert len(history) == 4
    for place, tokens in enumerate(history):
        shorter = (*history[:place], tokens[:-1], *history[place + 1 :])
        if tokens[:-1]:
            assert not any(one.after_resuming for one in watch_states(shorter, SEEN[0])[1])


@pytest.mark.parametrize("sizes", [(2, 1), (8, 4), (64, 64), (2048, 512)])
def test_with_the_mend_every_state_has_read_its_key(sizes: tuple[int, int]) -> None:
    settings = LlamaCppSettings(*sizes)
    for seed in range(300):
        assert watch_states(random_prompts(seed), settings, strict=True)[1] == []


def test_a_history_is_described_by_what_is_shared() -> None:
    assert describe_prompts((A, B, C, D)) == [
        "A: 100 tokens",
        "B: 101 tokens, the first 99 those of A",
        "C: 200 tokens, the first 96 those of A",
        "D: 113 tokens, the first 110 those of C",
    ]
