"""The command line: ``python -m mambackpt COMMAND``."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import import_module
from typing import cast

from mambackpt.errors import CheckpointError

# command: (module, function, what it does); a module loads when its command is asked for
COMMANDS = {
    "figures": (
        "mambackpt.figures.command",
        "main",
        "draw the design-review figures as SVG and PDF",
    ),
    "why": ("mambackpt.__main__", "why", "where a checkpoint lands for one query, or why nowhere"),
    "size": (
        "mambackpt.models.command",
        "main",
        "state and block sizes of a model or a config.json",
    ),
    "replay": ("mambackpt.replay.command", "main", "replay a request trace under placement rules"),
    "lockstep": (
        "mambackpt.engine.command",
        "main",
        "check every key against the state it promises",
    ),
    "bench": ("mambackpt.bench.command", "main", "time what has just been shown equal"),
}


def why(argv: Sequence[str]) -> int:
    """Print the planner's decision for one query; exit status 1 where there is no checkpoint.

    >>> why(["8000", "--block", "1536", "--alignment", "16"])
    The state after 7680 tokens is saved 7680 tokens into the query, in column 4, and keyed by 7680.
    0
    """
    from mambackpt.geometry import CacheGeometry
    from mambackpt.planner import POSITION_FORMULAS, explain

    parser = argparse.ArgumentParser(prog="mambackpt why", description=COMMANDS["why"][2])
    parser.add_argument("seq_len", type=int, help="tokens after this step")
    parser.add_argument("query_len", type=int, nargs="?", help="tokens of this step [all]")
    parser.add_argument("--block", type=int, required=True, help="tokens per Mamba block")
    parser.add_argument("--hash", type=int, help="tokens per hash unit [the block]")
    parser.add_argument("--hit-alignment", type=int, help="grid of cache hits [the hash unit]")
    parser.add_argument("--alignment", type=int, help="grid of the kernel [it cannot export]")
    parser.add_argument("--drop", action="store_true", help="speculative decoding drops a block")
    parser.add_argument("--lookahead", type=int, default=0, help="tokens a hash looks ahead")
    parser.add_argument("--formula", choices=list(POSITION_FORMULAS), default="current")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    unit = args.block if args.hash is None else args.hash
    hits = unit if args.hit_alignment is None else args.hit_alignment
    geometry = CacheGeometry(unit, args.block, args.alignment, hits, args.drop, args.lookahead)
    query_len = args.seq_len if args.query_len is None else args.query_len
    [decision] = explain([args.seq_len], [query_len], geometry, formula=args.formula)
    if args.json:
        print(json.dumps(asdict(decision) | {"reason": decision.reason.name}))
    else:
        print(decision.sentence)
    return 0 if decision.column >= 0 else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 2 where the input was refused."""
    parser = argparse.ArgumentParser(prog="mambackpt", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, _, does) in COMMANDS.items():
        commands.add_parser(name, help=does, add_help=False)
    words = list(sys.argv[1:] if argv is None else argv)
    name = parser.parse_args(words[:1]).command
    module, function, _ = COMMANDS[name]
    run = cast(Callable[[Sequence[str]], int], getattr(import_module(module), function))
    try:
        return run(words[1:])
    except CheckpointError as error:
        print(f"mambackpt {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
