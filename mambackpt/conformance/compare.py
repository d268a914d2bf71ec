"""The loop: cases of a seed go to the engine and to the kit; the smallest that differs stays."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from mambackpt.conformance.environments import Environment
from mambackpt.conformance.pieces import Answer, Case, Difference, Piece, size_of
from mambackpt.conformance.process import Worker, WorkerError
from mambackpt.errors import CheckpointError

_ATTEMPTS = 400  # smaller cases that are tried
_SECONDS = 60.0  # how long


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A case on which engine and kit differ, and where."""

    case: Case
    differences: Sequence[Difference]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came of one piece: how much was asked, what differed, the smallest case that does.

    ``failure`` says why the worker stopped answering, where it did; the counts are then 0.
    """

    piece: str
    cases: int = 0
    requests: int = 0
    different_cases: int = 0
    different_requests: int = 0
    smallest: Disagreement | None = None
    seconds: float = 0.0
    failure: str = ""


def compare_pieces(
    pieces: Sequence[Piece], environment: Environment, *, cases: int, seed: int
) -> Iterator[Comparison]:
    """Put cases to an engine and to the kit, and yield what came of each piece.

    The worker answers while the kit does. Pieces with the same worker share its process, because
    importing an engine takes longer than asking it; one that fails is started anew for the next
    piece. Raises EngineSkippedError where the machine cannot run the engine.
    """
    with ExitStack() as stack:
        workers: dict[object, Worker] = {}
        for piece in pieces:
            key = (piece.worker, piece.environment)
            if key not in workers:
                workers[key] = stack.enter_context(Worker(piece, environment))
            try:
                yield _compare(piece, workers[key], cases, seed)
            except WorkerError as error:
                del workers[key]
                yield Comparison(piece.name, failure=str(error))


def record_answers(
    pieces: Sequence[Piece], environment: Environment, *, cases: int, seed: int
) -> Iterator[dict[str, Any]]:
    """Yield the engine's answers, each with its case and the name of its piece: data for tests."""
    for piece in pieces:
        with Worker(piece, environment) as worker:
            for case in piece.cases(seed, cases):
                yield {"piece": piece.name, "case": case, "answer": worker.ask(case)}


def recorded_differences(
    pieces: Sequence[Piece], record: Mapping[str, Any]
) -> Sequence[Difference]:
    """Return where the kit differs from an answer that `record_answers` gave."""
    [piece] = [piece for piece in pieces if piece.name == record["piece"]]
    return _judge(piece, record["case"], record["answer"], kit_answer(piece, record["case"]))


def _compare(piece: Piece, worker: Worker, cases: int, seed: int) -> Comparison:
    start = time.perf_counter()
    asked = requests = different_cases = different_requests = 0
    smallest: Disagreement | None = None
    for case in piece.cases(seed, cases):
        differences = _differences(piece, case, worker)
        asked += 1
        requests += piece.requests(case)
        if differences:
            different_cases += 1
            different_requests += len(differences)
            if smallest is None or size_of(case) < size_of(smallest.case):
                smallest = Disagreement(case, differences)
    if smallest is not None:
        smallest = _shrink(piece, smallest, worker)
    seconds = time.perf_counter() - start
    return Comparison(
        piece.name, asked, requests, different_cases, different_requests, smallest, seconds
    )


def kit_answer(piece: Piece, case: Case) -> Answer:
    """Return the kit's answer as it would read after a worker's pipe; a refusal is an answer too.

    A case that the kit refuses is answered ``{"error": "..."}``.
    """
    try:
        answer: Answer = json.loads(json.dumps(piece.answer(case)))
    except CheckpointError as error:
        return {"error": str(error)}
    return answer


def _differences(piece: Piece, case: Case, worker: Worker) -> Sequence[Difference]:
    worker.send(case)
    ours = kit_answer(piece, case)
    return _judge(piece, case, worker.receive(), ours)


def _judge(piece: Piece, case: Case, theirs: Answer, ours: Answer) -> Sequence[Difference]:
    if "error" in theirs or "error" in ours:
        both = "error" in theirs and "error" in ours
        return [] if both else [Difference(0, theirs, ours)]
    return piece.differences(case, theirs, ours)


def _shrink(piece: Piece, found: Disagreement, worker: Worker) -> Disagreement:
    """Take away what is not needed for a difference, as long as something goes."""
    end = time.monotonic() + _SECONDS
    attempts = 0
    smaller = True
    while smaller:
        smaller = False
        for case in piece.smaller(found.case):
            attempts += 1
            if attempts > _ATTEMPTS or time.monotonic() > end:
                return found
            try:
                differences = _differences(piece, case, worker)
            except WorkerError:  # what was found before stands
                return found
            if differences:
                found, smaller = Disagreement(case, differences), True
                break
    return found
