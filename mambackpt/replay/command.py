"""The command ``replay``: a trace under placement rules, as a table."""

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path

from mambackpt.errors import CheckpointValueError, checked_int
from mambackpt.models import PRESETS
from mambackpt.replay.case import EVICTIONS
from mambackpt.replay.files import LAYOUTS, load_trace
from mambackpt.replay.generators import GENERATORS, PUBLIC_STATISTICS
from mambackpt.replay.rules import RULES
from mambackpt.replay.serve import command as serve_command
from mambackpt.replay.sweep import sweep
from mambackpt.replay.trace import describe_trace

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {f"{prefix}iB": 1 << 10 * (n + 1) for n, prefix in enumerate("KMGT")}


def _bytes_of(text: str) -> int:
    number = text.rstrip("BKMGTi")
    try:
        return round(float(number) * _UNITS[text[len(number) :]])
    except (ValueError, KeyError):
        raise CheckpointValueError(
            f"pool is {text!r}; expected a size such as 320GB or 16GiB. Try 320GB."
        ) from None


def _names_of(text: str) -> list[str]:
    """Split at the commas that are in no bracket."""
    names, depth = [""], 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and not depth:
            names.append("")
        else:
            names[-1] += letter
    return names


def main(argv: Sequence[str]) -> int:
    """Replay a trace file and print a table; the command ``python -m mambackpt replay``."""
    if any(word.split("=")[0] == "--engine" for word in argv):
        return serve_command.main(argv)
    parser = argparse.ArgumentParser(
        prog="mambackpt replay",
        description="Replay a request trace under placement rules.",
        epilog=f"rules, joined with '+': {', '.join(RULES)}, optimal(M). "
        f"generators: {', '.join(GENERATORS)}",
    )
    parser.add_argument("trace", help="a trace file, or a generator with a size, as in chat:2000")
    parser.add_argument(
        "--rule", default="last+junction", help="such as last+junction,interval(4096)"
    )
    parser.add_argument("--engine", help="serve it as this engine does, with options of its own")
    parser.add_argument("--block", default="512", help="tokens between states, such as 512,2048")
    parser.add_argument("--model", help=f"whose bytes count, one of {', '.join(PRESETS)}")
    parser.add_argument("--pool", help="sizes of one pool for both, such as 320GB,1TB")
    parser.add_argument("--state-pool", help="size of a pool of the states' own")
    parser.add_argument("--eviction", choices=EVICTIONS)
    parser.add_argument("--budget", type=int, default=8192, help="tokens of one prefill step")
    parser.add_argument("--layout", choices=LAYOUTS, help="of the file [from its first line]")
    parser.add_argument("--grain", type=int, help="tokens per block of the trace [its layout's]")
    parser.add_argument("--seed", type=int, default=0, help="of a generator")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON list")
    output.add_argument("--csv", action="store_true", help="print comma-separated values")
    args = parser.parse_args(argv)
    kind, _, size = args.trace.partition(":")
    public = None
    if kind in GENERATORS and not Path(args.trace).exists():
        requests = checked_int("requests", int(size) if size.isdigit() else 1000)
        trace, public = GENERATORS[kind](requests, seed=args.seed), PUBLIC_STATISTICS[kind]
    else:
        try:
            trace = load_trace(args.trace, layout=args.layout, grain=args.grain)
        except OSError as error:
            raise CheckpointValueError(
                f"{args.trace} cannot be read ({error.strerror}); expected a trace file. "
                f"Try a generator: {', '.join(GENERATORS)}."
            ) from error
    try:
        blocks = [int(block) for block in args.block.split(",")]
    except ValueError:
        raise CheckpointValueError(
            f"block is {args.block!r}; expected numbers of tokens. Try 512,2048."
        ) from None
    pools: list[int | None] = [None]
    if args.pool:
        pools = [_bytes_of(pool) for pool in args.pool.split(",")]
    options = {
        "model": args.model,
        "state_pool_bytes": _bytes_of(args.state_pool) if args.state_pool else None,
        "eviction": args.eviction,
        "budget": args.budget,
    }
    jobs = checked_int("jobs", args.jobs, unit="processes")
    with ProcessPoolExecutor(jobs) if jobs > 1 else nullcontext() as executor:
        made = sweep(trace, _names_of(args.rule), blocks, pools, executor, **options)
    rows = made.table()
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
    for point in made.missing:
        print("interrupted before rule {}, block {}, pool {}".format(*point), file=sys.stderr)
    return 130 if made.missing else 0
