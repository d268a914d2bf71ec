"""The command ``why``: where a checkpoint lands for one query, or why nowhere."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from mambackpt.geometry import CacheGeometry
from mambackpt.planner import POSITION_FORMULAS, explain


def main(argv: Sequence[str]) -> int:
    """Print the planner's decision for one query; exit status 1 where there is no checkpoint.

    >>> main(["8000", "--block", "1536", "--alignment", "16"])
    The state after 7680 tokens is saved 7680 tokens into the query, in column 4, and keyed by 7680.
    0
    """
    parser = argparse.ArgumentParser(
        prog="mambackpt why", description="Where a checkpoint lands for one query, or why nowhere."
    )
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
