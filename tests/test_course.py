"""The exercises' checkers: the right answer passes, and each likely mistake does not."""

from dataclasses import replace

import numpy as np
import pytest

from mambackpt.course import (
    check_answer,
    check_function,
    invariant_cases,
    judge_variant,
    keeps_promises,
)
from mambackpt.course.exercises import _keyed_blocks
from mambackpt.engine import Settings, Simulation, branching_chats, find_variant
from mambackpt.errors import CheckpointError


def test_an_answer_is_open_wrong_or_right() -> None:
    assert check_answer(..., 3, hint="Count.").right is None
    wrong = check_answer(4, 3, hint="Count.")
    assert wrong.right is False
    assert wrong.sentence == "Not yet: 4. Count."
    assert "3" not in wrong.sentence  # the answer is not given away
    assert check_answer(3, 3, hint="Count.").right is True
    assert check_answer(True, 1, hint="Count.").right is False
    assert not check_answer(..., 3, hint="Count.")


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (np.int64(784), 784),
        (784.0, 784),
        (np.float32(784), 784),
        ([np.int64(3), 4.0], [3, 4]),
        (np.array([3, 4]), [3, 4]),
        ((3, 4), [3, 4]),
        (np.True_, True),
    ],
)
def test_an_answer_is_right_as_whatever_kind_of_number_it_comes(answer: object, right: object):
    assert check_answer(answer, right, hint="Count.").right is True


@pytest.mark.parametrize(
    ("answer", "right"),
    [(True, 1), (1, True), ([True], [1]), ("784", 784), (784.5, 784), ([3], 3), ([3, 4], [4, 3])],
)
def test_another_kind_of_thing_is_not_the_answer(answer: object, right: object):
    assert check_answer(answer, right, hint="Count.").right is False


def test_a_function_is_checked_up_to_the_first_case_that_differs() -> None:
    cases = [(7, 4), (8, 4), (9, 4)]

    def truth(n: int, unit: int) -> int:
        return (n - 1) // unit * unit

    assert check_function(lambda n, u: ..., truth, cases).right is None
    verdict = check_function(lambda n, u: n // u * u, truth, cases)
    assert verdict.right is False
    assert "(8, 4)" in verdict.sentence
    assert check_function(truth, truth, cases).right is True


def test_a_check_that_could_not_fail_is_refused() -> None:
    with pytest.raises(CheckpointError, match="at least one"):
        check_function(abs, abs, [])


CHATS = Settings(max_running=1, budget=300)
SEEDS = (2, 3)


@pytest.fixture(scope="module")
def cases():
    return invariant_cases(branching_chats(2), CHATS)


def wrong_cases(check, cases):
    return [block for (block,) in cases if check(block) != keeps_promises(block)]


def test_the_blocks_of_a_run_are_those_that_the_engines_own_audit_looks_at():
    simulation = Simulation(branching_chats(2), CHATS)
    broken = set()
    for _ in simulation:
        broken.update((number, claim.position) for number, claim in simulation.lockstep.audit())
    told = {
        (block.block, promised.tokens)
        for block in _keyed_blocks(branching_chats(2), CHATS)
        for promised in block.promises
        if promised != block.holds
    }
    assert told == broken != set()


def test_under_a_fix_every_block_keeps_its_promises():
    blocks = _keyed_blocks(branching_chats(2), replace(CHATS, variant="keep-the-stop"))
    assert all(map(keeps_promises, blocks))
    assert len(blocks) > 20


@pytest.mark.parametrize(
    "mistake",
    [
        lambda block: True,
        lambda block: False,
        lambda block: block.holds is not None,
        lambda block: all(p.tokens == getattr(block.holds, "tokens", 0) for p in block.promises),
        lambda block: block.promises[0] == block.holds,
        lambda block: block.promises[-1] == block.holds,
        lambda block: block.holds in block.promises,
    ],
    ids=["all", "none", "written", "lengths only", "first key", "last key", "any key"],
)
def test_an_incomplete_check_differs_from_the_truth_somewhere(mistake, cases):
    assert wrong_cases(mistake, cases)


def test_a_complete_check_differs_nowhere(cases):
    assert not wrong_cases(lambda block: set(block.promises) == {block.holds}, cases)


def judged(keys_block):
    histories = [branching_chats(seed) for seed in SEEDS]
    rules = replace(find_variant("vllm-0.33"), name="mine", keys_block=keys_block)
    return judge_variant(rules, histories, [CHATS, replace(CHATS, retention=None)])


def stays(column, query):
    """Keys no block that a query has started inside, not even one that it has just filled."""
    return column != query.start // query.mamba_block_size or not query.starts_inside_block


def ran_past(column, query):
    """Keys whatever the query has filled, but not the block that it has left behind."""
    left = query.start // query.mamba_block_size
    inside = query.starts_inside_block and query.end > (left + 1) * query.mamba_block_size
    return column != left or not inside


def test_a_rule_that_breaks_no_promise_and_keeps_the_reuse_is_right():
    right, sentence = judged(ran_past)
    assert right is True, sentence


@pytest.mark.parametrize(
    ("keys_block", "told"),
    [
        (lambda column, query: True, "violations. step "),
        (stays, "reuse is left"),
        (lambda column, query: False, "reuse is left"),
    ],
    ids=["as released", "never what is filled by decoding", "nothing"],
)
def test_a_rule_that_breaks_a_promise_or_keys_too_little_is_not_right(keys_block, told):
    right, sentence = judged(keys_block)
    assert right is False
    assert told in sentence


def test_without_an_answer_there_is_no_verdict():
    right, sentence = judged(lambda column, query: ...)
    assert right is None
    assert sentence.startswith("No answer yet")
