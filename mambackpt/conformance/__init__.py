"""Do running engines do what this kit says of them?

Random cases are put to an engine's own code, in an environment of its own, and to this kit; the
smallest case on which they differ is what a person gets to read. An engine is one file here, with
its pieces, one worker that runs in its environment, and one line of `versions.RELEASES` a release.
"""

from mambackpt.conformance.compare import (
    Comparison,
    Disagreement,
    compare_pieces,
    record_answers,
    recorded_differences,
)
from mambackpt.conformance.drift import Drift, compare_releases, drift_table
from mambackpt.conformance.engines import ENGINES, pieces_of
from mambackpt.conformance.environments import (
    EngineSkippedError,
    Environment,
    UnavailableError,
    environment_here,
    make_environment,
)
from mambackpt.conformance.pieces import Difference, Piece
from mambackpt.conformance.process import Worker, WorkerError
from mambackpt.conformance.versions import RELEASES, Release, find_release

__all__ = [
    "ENGINES",
    "RELEASES",
    "Comparison",
    "Difference",
    "Disagreement",
    "Drift",
    "EngineSkippedError",
    "Environment",
    "Piece",
    "Release",
    "UnavailableError",
    "Worker",
    "WorkerError",
    "compare_pieces",
    "compare_releases",
    "drift_table",
    "environment_here",
    "find_release",
    "make_environment",
    "pieces_of",
    "record_answers",
    "recorded_differences",
]
