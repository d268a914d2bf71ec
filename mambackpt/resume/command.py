"""The command ``resume``: store, drop, restore, go on, and compare with a run without a stop."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from mambackpt.cli import choices_of, table
from mambackpt.resume.architectures import ARCHITECTURES, load_model
from mambackpt.resume.check import Comparison, Row, equality_rows
from mambackpt.resume.faults import Fault, Rounding, bf16_errors, fault_rows, with_memory
from mambackpt.resume.gap import Way, gap_ways

_HEADER = [
    *("model", "case", "state taken", "resumes", "tokens"),
    *("one run or two", "resumed", "allowed", "verdict"),
]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the equality table, or one of faults; ``python -m mambackpt resume``.

    >>> main(["--model", "lfm2"])  # doctest: +ELLIPSIS
    model  case                   state taken  resumes  tokens  one run or two  resumed ...
    lfm2   block boundary         inside            64     100 ...
    ...
    8 of 8 resumed requests answer as a cold one.
    0

    Returns 1 where an answer differs by more than the model itself shows, or where a fault passes
    the check. Raises CheckpointValueError for an unknown model, and without `transformers`.
    """
    parser = argparse.ArgumentParser(
        prog="mambackpt resume",
        description="Tiny models of published architectures, random weights, nothing downloaded: "
        "store each prompt's checkpoint in paged pools, restore it, compute the rest, and compare "
        "the logits with those of one run.",
    )
    add = parser.add_argument
    add("--model", help=f"names with commas [all: {', '.join(ARCHITECTURES)}]")
    add("--faults", action="store_true", help="what each wrong restore changes")
    add("--bf16", action="store_true", help="errors of a float32 memory that is stored in bf16")
    add("--gap", action="store_true", help="ways to bring a state up to a deeper attention match")
    add("--json", action="store_true", help="print JSON")
    given = parser.parse_args(argv)
    known = list(ARCHITECTURES)
    names = choices_of("--model", given.model, known) if given.model else known
    if given.faults:
        return _faults(fault_rows(names), as_json=given.json)
    if given.bf16:
        models = [load_model(name) for name in names]
        errors = {m.architecture.name: bf16_errors(m) for m in models if with_memory(m)}
        return _bf16(errors, as_json=given.json)
    if given.gap:
        return _gap(gap_ways(), as_json=given.json)
    return _equality(equality_rows(names), as_json=given.json)


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def _told(comparison: Comparison) -> dict[str, object]:
    """A comparison as JSON: without what no JSON number says."""
    finite = comparison.difference < float("inf")
    return {
        "difference": comparison.difference if finite else None,
        "changed": comparison.changed,
        "tokens": len(comparison.by_token),
        "allowed": comparison.allowed,
        "equal": comparison.equal,
    }


def _equality(rows: Sequence[Row], *, as_json: bool) -> int:
    equal = [row.comparison.equal for row in rows]
    if as_json:
        print(json.dumps([{**asdict(row), "comparison": _told(row.comparison)} for row in rows]))
        return int(not all(equal))
    lines = [
        (
            row.model,
            row.case,
            "inside" if row.inside else "at an end",
            row.position,
            row.prompt,
            _number(row.live),
            _number(row.comparison.difference),
            _number(row.comparison.allowed),
            _verdict(row),
        )
        for row in rows
    ]
    print(table(_HEADER, lines, words=3))
    print(f"{sum(equal)} of {len(rows)} resumed requests answer as a cold one.")
    return int(not all(equal))


def _verdict(row: Row) -> str:
    if not row.comparison.equal:
        return "DIFFERS"
    if row.comparison.difference == 0:
        return "same bits"
    return "as two runs" if row.same_bits else "rounding"


def _faults(rows: Sequence[tuple[str, Fault, Comparison]], *, as_json: bool) -> int:
    caught = [not comparison.equal for *_, comparison in rows]
    if as_json:
        said = [{"fault": f.name, "model": name, **_told(c)} for name, f, c in rows]
        print(json.dumps(said))
        return int(not all(caught))
    lines = [
        (
            fault.name,
            name,
            "no number" if one.difference == float("inf") else f"{one.difference:.2g}",
            "no number" if one.difference == float("inf") else f"{one.by_token[-1]:.2g}",
            f"{one.changed} of {len(one.by_token)}",
            _number(one.allowed),
            "no" if one.equal else "yes",
        )
        for name, fault, one in rows
    ]
    header = ["fault", "model", "largest", "last token", "next tokens", "allowed", "caught"]
    print(table(header, lines, words=2))
    print(f"{sum(caught)} of {len(rows)} are caught.")
    return int(not all(caught))


def _bf16(errors: dict[str, Rounding], *, as_json: bool) -> int:
    if as_json:
        print(json.dumps({name: asdict(one) for name, one in errors.items()}))
        return 0
    places = list(next(iter(errors.values())).once) if errors else []
    lines = [
        (name, how, *(_number(found[n]) for n in places), changed, _number(one.allowed))
        for name, one in errors.items()
        for how, found, changed in (
            ("once", one.once, one.changed_once),
            ("ten times", one.cycles, one.changed_cycles),
        )
    ]
    header = ["model", "stored", *(f"after {n:,}" for n in places), "next tokens", "allowed"]
    print(table(header, lines, words=2))
    return 0


def _gap(ways: Sequence[Way], *, as_json: bool) -> int:
    if as_json:
        told = [{**asdict(way), "comparison": _told(way.comparison)} for way in ways]
        print(json.dumps(told))
        return 0
    lines = [
        (
            way.name,
            f"{way.exact_layers} of {len(way.errors)}",
            f"{max(way.errors):.1e}",
            f"{way.comparison.difference:.1e}",
            f"{way.comparison.changed} of {len(way.comparison.by_token)}",
            f"{100 * way.cost:.0f} %",
            way.kept_bytes,
        )
        for way in ways
    ]
    header = [
        *("way", "states right", "largest error", "logits", "next tokens", "products", "kept/token")
    ]
    print(table(header, lines))
    return 0
