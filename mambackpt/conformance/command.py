"""The command ``conformance``: put random cases to running engines and to this kit."""

import argparse
import gzip
import json
import secrets
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from mambackpt.cli import names_of, whole_number
from mambackpt.conformance.compare import (
    Comparison,
    Disagreement,
    compare_pieces,
    record_answers,
)
from mambackpt.conformance.drift import compare_releases, drift_table
from mambackpt.conformance.engines import ENGINES, pieces_of
from mambackpt.conformance.environments import (
    EngineSkippedError,
    Environment,
    environment_here,
    is_here,
    make_environment,
)
from mambackpt.conformance.pieces import Piece
from mambackpt.conformance.versions import find_release, known_releases
from mambackpt.errors import CheckpointValueError, checked_choice

_SHOWN = 5  # differences of the smallest case that are printed
_LISTED = 12  # elements of a list that are printed whole


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mambackpt conformance",
        description="Put random cases to an engine's own code and to this kit, and print the "
        "smallest on which they differ. Exit status 1 when one differs, 2 when an engine could "
        "not be asked.",
    )
    add = parser.add_argument
    add("--engine", action="append", choices=list(ENGINES), help="again for another [all]")
    add("--piece", action="append", help="a piece of the engine, by name [all]")
    add("--cases", default="100", help="how many cases a piece [100]")
    add("--seed", help="of the cases [a fresh one, which is printed]")
    add("--release", help="of the engine [the newest in the table of versions]")
    add("--here", action="store_true", help="the engine that this Python has, or else fail")
    add("--drift", metavar="RELEASES", help="what changed between these releases, comma-separated")
    add("--record", type=Path, metavar="FILE", help="write cases and answers, gzipped JSON")
    add("--folder", type=Path, help="make environments there and keep them [they are removed]")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 1 when an engine differs from the kit.

    2 when one could not be asked. Raises CheckpointValueError for a release or a piece that does
    not exist, UnavailableError for an engine that cannot be had.
    """
    options = _parser().parse_args(argv)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _leave_nothing)
    options.cases = whole_number("--cases", options.cases)
    engines = options.engine or list(ENGINES)
    for name in ("release", "drift", "record"):
        if getattr(options, name) and len(engines) != 1:
            raise CheckpointValueError(
                f"--{name} is given for {len(engines)} engines; expected one. "
                "Try --engine llama.cpp."
            )
    seed = secrets.randbelow(10**6)
    if options.seed is not None:
        seed = whole_number("--seed", options.seed, least=0)
    if options.drift:
        return _drift(engines[0], seed, options)
    return max([_hold(engine, seed, options) for engine in engines])


def _leave_nothing(number: int, frame: object) -> None:
    """End as an exception does, which removes environments and workers on its way."""
    sys.exit(128 + number)


def _hold(engine: str, seed: int, options: argparse.Namespace) -> int:
    """Hold one engine to the kit and print what came of it."""
    pieces = _chosen(engine, options.piece)
    try:
        with _environment(engine, options) as environment:
            print(f"{environment.label}, seed {seed}")
            if environment.seconds:
                print(f"  made in {environment.seconds:.0f} s, {environment.bytes / 1e6:.0f} MB")
            if options.record:
                _record(options.record, pieces, environment, options.cases, seed)
                return 0
            different = failed = 0
            for result in compare_pieces(pieces, environment, cases=options.cases, seed=seed):
                print("\n".join(_told(result)), flush=True)
                different += result.different_cases
                failed += bool(result.failure)
    except EngineSkippedError as reason:
        print(reason)
        return 0
    return 1 if different else 2 if failed else 0


def _record(
    file: Path, pieces: Sequence[Piece], environment: Environment, cases: int, seed: int
) -> None:
    """Write the engine's answers; the same answers give the same bytes."""
    records = list(record_answers(pieces, environment, cases=cases, seed=seed))
    text = json.dumps({"source": environment.label, "records": records}, separators=(",", ":"))
    file.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"  {len(records)} cases in {file}, {file.stat().st_size:,} bytes")


def _drift(engine: str, seed: int, options: argparse.Namespace) -> int:
    """Print what changed between releases, oldest first; exit status 0."""
    releases = [find_release(engine, name) for name in names_of(options.drift)]
    if len(releases) < 2:
        raise CheckpointValueError(
            f"--drift names {len(releases)} release; expected two or more, oldest first. "
            f"Try --drift {','.join(known_releases(engine)[:2][::-1])}."
        )
    drifts = compare_releases(
        _chosen(engine, options.piece),
        releases,
        lambda release: make_environment(release, options.folder),
        cases=options.cases,
        seed=seed,
    )
    print(drift_table(engine, list(drifts)))
    return 0


def _chosen(engine: str, names: Sequence[str] | None) -> list[Piece]:
    pieces = pieces_of(engine)
    for name in names or ():
        checked_choice("--piece", name, [piece.name for piece in pieces])
    return [piece for piece in pieces if not names or piece.name in names]


def _environment(engine: str, options: argparse.Namespace) -> AbstractContextManager[Environment]:
    if options.here or (options.release is None and is_here(engine)):
        return nullcontext(environment_here(engine))
    return make_environment(find_release(engine, options.release), options.folder)


def _told(result: Comparison) -> Iterator[str]:
    """What a person reads of one piece."""
    if result.failure:
        yield f"  {result.piece}: {result.failure}"
        return
    yield (
        f"  {result.piece}: {result.requests:,} requests in {result.cases:,} cases, "
        f"{result.different_requests:,} differ ({result.seconds:.1f} s)"
    )
    if result.smallest is not None:
        yield from (f"    {line}" for line in _described(result.smallest))


def _described(smallest: Disagreement) -> Iterator[str]:
    """The smallest case that differs: what was asked, and what each side says."""
    yield "the smallest case that differs:"
    for name, value in smallest.case.items():
        if isinstance(value, list) and value and isinstance(value[0], dict | list):
            yield from (f"  {name}[{i}]: {_short(element)}" for i, element in enumerate(value))
        else:
            yield f"  {name}: {_short(value)}"
    for difference in smallest.differences[:_SHOWN]:
        yield f"at {difference.request}, the engine: {_short(difference.theirs)}"
        yield f"at {difference.request}, the kit:    {_short(difference.ours)}"
    if len(smallest.differences) > _SHOWN:
        yield f"and {len(smallest.differences) - _SHOWN} more"


def _short(value: Any) -> str:
    """JSON, in which a long list is its beginning and its length."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_short(v)}" for name, v in value.items()) + "}"
    if isinstance(value, list) and len(value) > _LISTED:
        head = ", ".join(_short(v) for v in value[: _LISTED // 2])
        return f"[{head}, ... {len(value)} in all]"
    if isinstance(value, list):
        return "[" + ", ".join(_short(v) for v in value) + "]"
    return json.dumps(value)


if __name__ == "__main__":
    sys.exit(main())
