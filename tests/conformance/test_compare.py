"""The loop between a worker and the kit, with a worker that has no engine."""

import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mambackpt.conformance.compare import Comparison, compare_pieces
from mambackpt.conformance.environments import EngineSkippedError, Environment
from mambackpt.conformance.pieces import Case, Piece, seeded
from mambackpt.conformance.process import Worker, WorkerError

HERE = Environment("a fake engine", Path(sys.executable))


def make_case(seed: int) -> Case:
    random = Random(seed)
    lengths = [random.randint(1, 40) for _ in range(random.randint(1, 6))]
    return {"requests": [{"tokens": list(range(length))} for length in lengths]}


def answer(case: Case) -> dict[str, Any]:
    sizes = [len(request["tokens"]) for request in case["requests"]]
    return {"requests": [{"cached": 2 * size, "created": (size,)} for size in sizes]}


def fake(says: str = "") -> Piece:
    return Piece(
        name="doubling",
        worker=str(Path(__file__).parent / "fake_engine.py"),
        cases=seeded(make_case),
        answer=answer,
        environment=(("FAKE_ENGINE", says),),
    )


def compare(piece: Piece, cases: int) -> Comparison:
    [result] = compare_pieces([piece], HERE, cases=cases, seed=3)
    return result


def test_an_engine_that_agrees_differs_in_no_request() -> None:
    result = compare(fake(), cases=40)
    assert (result.cases, result.different_cases, result.smallest) == (40, 0, None)
    expected = sum(len(case["requests"]) for case in fake().cases(3, 40))
    assert result.requests == expected


def test_answers_come_in_the_order_of_the_cases() -> None:
    with Worker(fake(), HERE) as worker:
        for case in fake().cases(0, 20):
            answers = worker.ask(case)["requests"]
            assert [a["created"][0] for a in answers] == [
                len(r["tokens"]) for r in case["requests"]
            ]


def test_the_smallest_case_that_differs_is_found_and_made_smaller() -> None:
    """The fake engine is wrong from ten tokens on, so ten tokens in one request show it."""
    result = compare(fake("wrong"), cases=40)
    assert result.different_requests > result.different_cases > 0
    assert result.smallest is not None
    assert result.smallest.case == {"requests": [{"tokens": list(range(10))}]}
    [difference] = result.smallest.differences
    assert (difference.theirs, difference.ours) == ({"cached": 21}, {"cached": 20})


def test_a_case_that_only_one_side_refuses_differs() -> None:
    result = compare(fake("refuse"), cases=3)
    assert result.different_cases == 3
    assert result.smallest is not None
    assert result.smallest.differences[0].theirs == {"error": "too large"}


def test_a_worker_that_dies_is_an_error_with_its_last_words() -> None:
    failure = compare(fake("die"), cases=40).failure
    assert re.search(r"status 7 at case \d+.*\n.*the engine fell over", failure)


def test_a_piece_whose_worker_dies_does_not_take_the_next_one_with_it() -> None:
    dying = fake("die")
    few = replace(
        dying, name="small cases", cases=seeded(lambda seed: {"requests": [{"tokens": [1]}]})
    )
    first, second = compare_pieces([dying, few], HERE, cases=40, seed=3)
    assert first.failure
    assert (second.failure, second.cases, second.different_cases) == ("", 40, 0)


def test_a_worker_that_answers_no_json_is_quoted() -> None:
    failure = compare(fake("garbage"), cases=2).failure
    assert "answered case 1 with 'Loading weights: 100%'" in failure


def test_a_worker_that_stays_silent_is_ended() -> None:
    with Worker(fake("sleep"), HERE, seconds=0.2) as worker:  # noqa: SIM117
        with pytest.raises(WorkerError, match=r"was silent for 0\.2 s at case 1"):
            worker.ask(make_case(0))


def test_a_machine_that_cannot_run_the_engine_skips_it() -> None:
    with pytest.raises(EngineSkippedError, match="no fingers"):
        compare(fake("cannot"), cases=2)


@pytest.mark.parametrize("says", ["litter", "die"])
def test_nothing_is_left_behind(says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = compare(fake(says), cases=40)
    assert bool(result.failure) == (says == "die")
    assert list(tmp_path.iterdir()) == []
