"""The command ``replay``: a trace under placement rules, as a table."""

import argparse
import csv
import io
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from math import gcd
from typing import TypeAlias

from mambackpt.cli import (
    bytes_of,
    checked_output,
    names_of,
    whole_number,
    whole_numbers,
    write_whole,
)
from mambackpt.errors import CheckpointValueError
from mambackpt.models import PRESETS
from mambackpt.replay.case import EVICTIONS, Options
from mambackpt.replay.missed_command import add_why_options, asks_why, refuse_why, tell_why
from mambackpt.replay.rules import RULES
from mambackpt.replay.serve import command as serve_command
from mambackpt.replay.source import SHAPES, add_trace_options, trace_of
from mambackpt.replay.sweep import Sweep, sweep
from mambackpt.replay.timeline import timeline_json
from mambackpt.replay.trace import Trace, TraceStatistics, describe_trace

_COMPARED = "all,last,last+junction"
Points: TypeAlias = tuple[list[str], list[int], list[int | None], Options]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mambackpt replay",
        description="Replay a request trace under placement rules.",
        epilog=f"Rules, joined with '+': {', '.join(RULES)}, optimal(M). {SHAPES}",
    )
    add_trace_options(parser)
    add = parser.add_argument
    add("--rule", help=f"such as last+junction,interval(4096) [{_COMPARED}]")
    add("--engine", help="serve it as this engine does, with options of its own")
    add("--block", default="512", help="tokens between states, such as 512,2048")
    add("--model", help=f"whose bytes count, one of {', '.join(PRESETS)}")
    add("--pool", help="sizes of one pool for both, such as 320GB,1TB")
    add("--state-pool", help="size of a pool of the states' own")
    add("--eviction", choices=EVICTIONS)
    add("--budget", default="8192", help="tokens of one prefill step")
    add("--jobs", default="1", help="processes")
    add_why_options(add)
    add("--timeline", metavar="FILE", help="also write one replay for Perfetto or chrome://tracing")
    add("--out", metavar="FILE", help="write the table, JSON or CSV there [print it]")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON list")
    output.add_argument("--csv", action="store_true", help="print comma-separated values")
    return parser


def _swept(trace: Trace, points: Points, jobs: int) -> Sweep:
    rules, blocks, pools, options = points
    with ProcessPoolExecutor(jobs) if jobs > 1 else nullcontext() as executor:
        return sweep(trace, rules, blocks, pools, executor, **options)


def _points(args: argparse.Namespace) -> Points:
    """Rules, blocks, pools and the options of all."""
    pools: list[int | None] = [None]
    if args.pool:
        pools = [bytes_of("--pool", size) for size in args.pool.split(",")]
    state_pool = bytes_of("--state-pool", args.state_pool) if args.state_pool else None
    if args.pool and not args.model:
        raise CheckpointValueError(
            "--pool is given without a model; expected the one whose blocks and states fill it. "
            "Try --model kimi-k3."
        )
    for option in ("state_pool", "eviction"):
        if getattr(args, option) and not args.pool:
            raise CheckpointValueError(
                f"--{option.replace('_', '-')} is given without --pool; expected a limited pool. "
                "Try --pool 320GB."
            )
    options: Options = {
        "model": args.model,
        "state_pool_bytes": state_pool,
        "eviction": args.eviction,
        "budget": whole_number("--budget", args.budget),
    }
    rules = args.rule or ("last+junction" if args.timeline else _COMPARED)
    return names_of(rules), whole_numbers("--block", args.block), pools, options


def main(argv: Sequence[str]) -> int:
    """Replay a trace file and print a table; the command ``python -m mambackpt replay``."""
    if any(word.split("=")[0] == "--engine" for word in argv):
        refuse_why(argv)
        return serve_command.main(argv)
    args = _parser().parse_args(argv)
    why = asks_why(args)
    for option, file in (("--out", args.out), ("--timeline", args.timeline)):
        if file:
            checked_output(option, file)
    points, jobs = _points(args), whole_number("--jobs", args.jobs, example=2)
    if args.timeline:
        _check_one(*points[:3])
    trace, public = trace_of(args)
    if args.timeline:
        rules, blocks, pools, options = points
        one: Options = {**options, "pool_bytes": pools[0]}
        write_whole(args.timeline, timeline_json(trace, rules[0], block=blocks[0], **one))
    swept = Sweep([], []) if why else _swept(trace, points, jobs)
    told = tell_why(args, trace, *points) if why else _told(args, trace, public, swept)
    if args.out and not swept.missing:
        write_whole(args.out, told + "\n")
    else:  # what an interrupted sweep has done is shown, and no file is half a table
        print(told)
    for point in swept.missing:
        print("interrupted before rule {}, block {}, pool {}".format(*point), file=sys.stderr)
    return 130 if swept.missing else 0


def _told(
    args: argparse.Namespace, trace: Trace, public: TraceStatistics | None, swept: Sweep
) -> str:
    """What the command has to say: JSON, CSV or a table."""
    rows = swept.table()
    if args.json:
        return json.dumps(rows, indent=1)
    if args.csv:
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue().rstrip("\n")
    lines = [
        f"{trace.name}: {len(trace):,} requests, {int(trace.prompt.sum()):,} prompt tokens",
        f"this trace: {describe_trace(trace)}",
    ]
    if public is not None:
        lines.append(f"the public trace that it is modelled on: {public}")
    notes = dict.fromkeys(note for replayed in swept.replays for note in replayed.notes)
    lines += [f"note: {note}" for note in notes]
    finest = gcd(trace.grain, *(replayed.block for replayed in swept.replays))
    if public is not None and finest < trace.grain:
        lines.append(
            f"note: this trace is generated: with --grain {finest} the reuse told is exact"
        )
    lines.append(
        f"{'rule':<28} {'block':>6} {'pool GB':>8} {'hit %':>7} {'ceiling %':>9} "
        f"{'recomputed':>15} {'states/request':>14} {'evictions':>10}"
    )
    for row in rows:
        pool = "-" if row["pool_bytes"] is None else f"{row['pool_bytes'] / 1e9:.1f}"
        lines.append(
            f"{row['rule']:<28} {row['block']:>6,} {pool:>8} {row['hit_percent']:>7.2f} "
            f"{row['ceiling_percent']:>9.2f} {row['recomputed_tokens']:>15,} "
            f"{row['states_per_request']:>14.2f} {row['evictions']:>10,}"
        )
    return "\n".join(lines)


def _check_one(rules: list[str], blocks: list[int], pools: list[int | None]) -> None:
    if len(rules) * len(blocks) * len(pools) > 1:
        raise CheckpointValueError(
            f"--timeline is of one replay and there are {len(rules) * len(blocks) * len(pools)}; "
            f"expected one rule, one block and one pool, not {', '.join(rules)} at "
            f"{', '.join(map(str, blocks))}. Try --rule {rules[0]!r} --block {blocks[0]}."
        )
