"""The loop: cases of a seed go to the engine and to the kit; the smallest that differs stays."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from mambackpt.conformance.environments import Environment
from mambackpt.conformance.pieces import Answer, Case, Difference, Piece, size_of
from mambackpt.conformance.process import Worker
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
    """What came of one piece: how much was asked, what differed, the smallest case that does."""

    piece: str
    cases: int
    requests: int
    different_cases: int
    different_requests: int
    smallest: Disagreement | None
    seconds: float


def compare_piece(
    piece: Piece, environment: Environment, *, cases: int, seed: int, shrink: bool = True
) -> Comparison:
    """Put cases to an engine's worker and to the kit, and return what differed.

    The worker answers while the kit does. Raises WorkerError where the worker does not answer.
    """
    start = time.perf_counter()
    asked = requests = different_cases = different_requests = 0
    smallest: Disagreement | None = None
    with Worker(piece, environment) as worker:
        for case in piece.cases(seed, cases):
            differences = _differences(piece, case, worker)
            asked += 1
            requests += piece.requests(case)
            if differences:
                different_cases += 1
                different_requests += len(differences)
                if smallest is None or size_of(case) < size_of(smallest.case):
                    smallest = Disagreement(case, differences)
    if smallest is not None and shrink:
        with Worker(piece, environment) as worker:
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
    theirs = worker.receive()
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
            differences = _differences(piece, case, worker)
            if differences:
                found, smaller = Disagreement(case, differences), True
                break
    return found
