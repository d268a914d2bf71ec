"""The command ``replay``: a trace under placement rules, as a table."""

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path

from mambackpt.cli import bytes_of, names_of, whole_number, whole_numbers
from mambackpt.errors import CheckpointValueError
from mambackpt.models import PRESETS
from mambackpt.replay.case import EVICTIONS, Options
from mambackpt.replay.files import LAYOUTS, load_trace
from mambackpt.replay.generators import GENERATORS, PUBLIC_STATISTICS
from mambackpt.replay.missed_command import add_why_options, asks_why, tell_why
from mambackpt.replay.rules import RULES
from mambackpt.replay.serve import command as serve_command
from mambackpt.replay.sweep import Sweep, sweep
from mambackpt.replay.trace import Trace, TraceStatistics, describe_trace


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mambackpt replay",
        description="Replay a request trace under placement rules.",
        epilog=f"rules, joined with '+': {', '.join(RULES)}, optimal(M). "
        f"generators: {', '.join(GENERATORS)}",
    )
    add = parser.add_argument
    add("trace", help="a trace file, or a generator with a size, as in chat:2000")
    add("--rule", default="last+junction", help="such as last+junction,interval(4096)")
    add("--engine", help="serve it as this engine does, with options of its own")
    add("--block", default="512", help="tokens between states, such as 512,2048")
    add("--model", help=f"whose bytes count, one of {', '.join(PRESETS)}")
    add("--pool", help="sizes of one pool for both, such as 320GB,1TB")
    add("--state-pool", help="size of a pool of the states' own")
    add("--eviction", choices=EVICTIONS)
    add("--budget", default="8192", help="tokens of one prefill step")
    add("--layout", choices=LAYOUTS, help="of the file [from its first line]")
    add("--grain", help="tokens per block of the trace [its layout's, or its generator's]")
    add("--seed", default="0", help="of a generator")
    add("--jobs", default="1", help="processes")
    add_why_options(add)
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON list")
    output.add_argument("--csv", action="store_true", help="print comma-separated values")
    return parser


def _trace_of(args: argparse.Namespace) -> tuple[Trace, TraceStatistics | None]:
    """The trace, and what is known of the public one that a generator is modelled on."""
    grain = None if args.grain is None else whole_number("--grain", args.grain)
    kind, sized, size = args.trace.partition(":")
    if kind in GENERATORS and not Path(args.trace).exists():
        sizes = {} if grain is None else {"grain": grain}
        if sized:
            sizes["requests"] = whole_number(f"{kind}:SIZE", size)
        seed = whole_number("--seed", args.seed, least=0)
        return GENERATORS[kind](seed=seed, **sizes), PUBLIC_STATISTICS[kind]
    try:
        return load_trace(args.trace, layout=args.layout, grain=grain), None
    except OSError as error:
        raise CheckpointValueError(
            f"{args.trace} cannot be read ({error.strerror}); expected a trace file. "
            f"Try a generator: {', '.join(GENERATORS)}."
        ) from error


def _points(
    args: argparse.Namespace,
) -> tuple[list[str], list[int], list[int | None], Options]:
    """Rules, blocks and pools to combine, and what all combinations have in common."""
    pools: list[int | None] = [None]
    if args.pool:
        pools = [bytes_of("--pool", size) for size in args.pool.split(",")]
    state_pool = bytes_of("--state-pool", args.state_pool) if args.state_pool else None
    options: Options = {
        "model": args.model,
        "state_pool_bytes": state_pool,
        "eviction": args.eviction,
        "budget": whole_number("--budget", args.budget),
    }
    return names_of(args.rule), whole_numbers("--block", args.block), pools, options


def _swept(args: argparse.Namespace, trace: Trace) -> Sweep:
    rules, blocks, pools, options = _points(args)
    jobs = whole_number("--jobs", args.jobs)
    with ProcessPoolExecutor(jobs) if jobs > 1 else nullcontext() as executor:
        return sweep(trace, rules, blocks, pools, executor, **options)


def main(argv: Sequence[str]) -> int:
    """Replay a trace file and print a table; the command ``python -m mambackpt replay``."""
    if any(word.split("=")[0] == "--engine" for word in argv):
        return serve_command.main(argv)
    args = _parser().parse_args(argv)
    why = asks_why(args)
    trace, public = _trace_of(args)
    if why:
        return tell_why(args, trace, *_points(args))
    swept = _swept(args, trace)
    rows = swept.table()
    if args.json:
        print(json.dumps(rows, indent=1))
    elif args.csv:
        writer = csv.DictWriter(sys.stdout, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    else:
        print(f"{trace.name}: {len(trace):,} requests, {int(trace.prompt.sum()):,} prompt tokens")
        print(f"this trace: {describe_trace(trace)}")
        if public is not None:
            print(f"the public trace that it is modelled on: {public}")
        print(f"{'rule':<28} {'block':>6} {'pool GB':>8} {'hit %':>7} {'ceiling %':>9} "
              f"{'recomputed':>15} {'states/request':>14} {'evictions':>10}")  # fmt: skip
        for row in rows:
            pool = "-" if row["pool_bytes"] is None else f"{row['pool_bytes'] / 1e9:.1f}"
            print(f"{row['rule']:<28} {row['block']:>6} {pool:>8} {row['hit_percent']:>7.2f} "
                  f"{row['ceiling_percent']:>9.2f} {row['recomputed_tokens']:>15,} "
                  f"{row['states_per_request']:>14.2f} {row['evictions']:>10,}")  # fmt: skip
    for point in swept.missing:
        print("interrupted before rule {}, block {}, pool {}".format(*point), file=sys.stderr)
    return 130 if swept.missing else 0
