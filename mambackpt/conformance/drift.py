"""What changed from one release of an engine to the next: requests, and the tokens they reuse."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import pairwise

from mambackpt.conformance.environments import Environment
from mambackpt.conformance.pieces import Answer, Piece, nothing_reused
from mambackpt.conformance.process import Worker, WorkerError
from mambackpt.conformance.versions import Release

# piece: its answers in order, None where the release cannot be asked at all
Answers = dict[str, list[Answer] | None]


@dataclass(frozen=True, slots=True)
class Drift:
    """One piece in two releases: the requests that both were asked, and what each reuses.

    ``changed`` requests resume after another token; ``fewer`` and ``more`` are the tokens that they
    lost and gained, ``before`` and ``after`` those that all requests reuse. ``unasked`` cases were
    answered by one release only, or by none.
    """

    piece: str
    older: str
    newer: str
    requests: int = 0
    changed: int = 0
    fewer: int = 0
    more: int = 0
    before: int = 0
    after: int = 0
    unasked: int = 0


def compare_releases(
    pieces: Sequence[Piece],
    releases: Sequence[Release],
    make: Callable[[Release], AbstractContextManager[Environment]],
    *,
    cases: int,
    seed: int,
) -> Iterator[Drift]:
    """Ask releases one after another, and yield what changed from each to the next.

    Only pieces that tell what they reuse are asked. ``make(release)`` gives the environment, one at
    a time, so that the disk holds one engine. A release without the piece yields no requests.
    """
    told = [piece for piece in pieces if piece.reused is not nothing_reused]
    answers = []
    for release in releases:
        with make(release) as environment:
            answers.append(_ask(told, environment, cases, seed))
    for (older, before), (newer, after) in pairwise(zip(releases, answers, strict=True)):
        for piece in told:
            yield _compare(piece, older.name, newer.name, before, after)


def _ask(pieces: Sequence[Piece], environment: Environment, cases: int, seed: int) -> Answers:
    answers: Answers = {}
    with ExitStack() as stack:
        workers: dict[object, Worker] = {}
        for piece in pieces:
            key = (piece.worker, piece.environment)
            try:
                if key not in workers:
                    workers[key] = stack.enter_context(Worker(piece, environment))
                asked = piece.cases(seed, cases)
                answers[piece.name] = [workers[key].ask(case) for case in asked]
            except WorkerError:
                answers[piece.name] = None
    return answers


def _compare(piece: Piece, older: str, newer: str, before: Answers, after: Answers) -> Drift:
    one, other = before[piece.name], after[piece.name]
    if one is None or other is None:
        return Drift(piece.name, older, newer)
    unasked = 0
    pairs: list[tuple[int, int]] = []
    for said, says in zip(one, other, strict=True):
        if "error" in said or "error" in says:
            unasked += 1
        else:
            pairs += zip(piece.reused(said), piece.reused(says), strict=False)
    return Drift(
        piece.name,
        older,
        newer,
        requests=len(pairs),
        changed=sum(a != b for a, b in pairs),
        fewer=sum(max(a - b, 0) for a, b in pairs),
        more=sum(max(b - a, 0) for a, b in pairs),
        before=sum(a for a, _ in pairs),
        after=sum(b for _, b in pairs),
        unasked=unasked,
    )


def drift_table(engine: str, drifts: Sequence[Drift]) -> str:
    """Return a Markdown table of what changed, a row a piece and pair of releases.

    >>> print(drift_table("vllm", [Drift("planner", "0.32", "0.33", 100, 2, 16, 0, 640, 624, 9)]))
    | vllm | asked | requests | changed | tokens lost | gained | reused | cases one lacks |
    |---|---|---:|---:|---:|---:|---:|---:|
    | 0.32 to 0.33 | planner | 100 | 2 (2.0 %) | 16 | 0 | 640 to 624 | 9 |

    Tokens lost and gained are those of the changed requests. A piece that one of the releases lacks
    says so.
    """
    lines = [
        f"| {engine} | asked | requests | changed | tokens lost | gained | reused "
        "| cases one lacks |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for d in drifts:
        cells = [f"{d.older} to {d.newer}", d.piece]
        if not d.requests:
            cells += ["not in both", "", "", "", "", ""]
        else:
            share = f"{d.changed:,} ({100 * d.changed / d.requests:.1f} %)"
            reused = f"{d.before:,} to {d.after:,}"
            cells += [f"{d.requests:,}", share, f"{d.fewer:,}", f"{d.more:,}", reused]
            cells.append(f"{d.unasked:,}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
