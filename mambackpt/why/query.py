"""One query: where its checkpoint lands, or why nowhere, in the planner's words."""

import argparse
import json
from dataclasses import asdict

from mambackpt.geometry import CacheGeometry
from mambackpt.planner import explain


def tell_query(args: argparse.Namespace, geometry: CacheGeometry, assumed: str) -> int:
    """Print the planner's decision for one query; return 1 where there is no checkpoint."""
    query_len = args.seq_len if args.query_len is None else args.query_len
    [decision] = explain([args.seq_len], [query_len], geometry, formula=args.formula or "current")
    if args.json:
        print(json.dumps(asdict(decision) | {"reason": decision.reason.name}))
    else:
        print(decision.sentence)
        if assumed:
            print(assumed)
    return 0 if decision.column >= 0 else 1
