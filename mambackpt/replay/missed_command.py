"""What ``replay --why`` prints and writes: totals, bands, and one verdict per request."""

import argparse
import csv
import io
import json
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

from mambackpt.cli import checked_output, table, write_whole
from mambackpt.errors import CheckpointValueError
from mambackpt.replay.case import Options
from mambackpt.replay.missed import Missed, explain_misses
from mambackpt.replay.seconds import PrefillRate
from mambackpt.replay.trace import Trace


def add_why_options(add: Callable[..., Any]) -> None:
    """Add the options of ``replay --why`` to a parser; `asks_why` and `tell_why` read them."""
    add("--why", action="store_true", help="why was it not reused? totals and bands of requests")
    add("--why-csv", metavar="FILE", help="write the verdict of every request to a file")
    add("--prefill-rate", help="your engine's prompt tokens per second, such as 12000,3000")


def refuse_why(words: Sequence[str]) -> None:
    """Refuse to tell why of an engine's own cache, whose states no placement rule placed."""
    for word in words:
        option = word.split("=")[0]
        if option in ("--why", "--why-csv", "--prefill-rate"):
            raise CheckpointValueError(
                f"{option} is given with --engine; expected a placement rule, whose states are "
                f"known by their place. Try --rule last+junction in place of --engine."
            )


def asks_why(args: argparse.Namespace) -> bool:
    """Return whether these options ask for verdicts; refuse what would tell nothing.

    Raises CheckpointValueError for a rate without verdicts, and for a file that cannot be written:
    before anything is replayed.
    """
    asked = bool(args.why or args.why_csv)
    if args.prefill_rate is not None:
        PrefillRate.of(args.prefill_rate)
        if not asked:
            raise CheckpointValueError(
                "--prefill-rate is given without --why; expected verdicts whose computed tokens it "
                "turns into seconds. Try --why --prefill-rate 12000."
            )
    if args.why_csv is not None:
        checked_output("--why-csv", args.why_csv)
    return asked


def tell_why(
    args: argparse.Namespace,
    trace: Trace,
    rules: Sequence[str],
    blocks: Sequence[int],
    pools: Sequence[int | None],
    options: Options,
) -> str:
    """Replay every combination and return why its requests computed what they did."""
    rate = None if args.prefill_rate is None else PrefillRate.of(args.prefill_rate)
    points = []
    for rule, block, pool in product(rules, blocks, pools):
        here: Options = {**options, "pool_bytes": pool}
        points.append(explain_misses(trace, rule, block=block, **here))
    if args.why_csv is not None:
        write_whole(args.why_csv, _csv_of(points, rate))
    if args.json:
        return json.dumps([_point(missed, rate) for missed in points], indent=1)
    if args.csv:
        return _csv_of(points, rate).rstrip("\n")
    return "\n\n".join(_words(missed, rate) for missed in points)


def _keys(missed: Missed) -> dict[str, Any]:
    run = missed.replay
    return {"rule": run.rule, "block": run.block, "pool_bytes": run.pool_bytes}


def _rows(missed: Missed, rate: PrefillRate | None) -> list[dict[str, Any]]:
    rows = [{**_keys(missed), **row} for row in missed.rows()]
    if rate is not None:
        for row in rows:
            low, high = rate.seconds(row["computed"])
            row |= {"seconds_low": round(low, 6), "seconds_high": round(high, 6)}
    return rows


def _point(missed: Missed, rate: PrefillRate | None) -> dict[str, Any]:
    return {
        **_keys(missed),
        "notes": list(missed.replay.notes),
        "totals": missed.totals(),
        "bands": missed.bands(),
        "requests": _rows(missed, rate),
    }


def _csv_of(points: Iterable[Missed], rate: PrefillRate | None) -> str:
    page = io.StringIO()
    rows = [row for missed in points for row in _rows(missed, rate)]
    writer = csv.DictWriter(page, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return page.getvalue()


def _words(missed: Missed, rate: PrefillRate | None) -> str:
    run = missed.replay
    prompt, attention, reused = (int(a.sum()) for a in (run.prompt, run.attention, run.reused))
    pool = "unlimited memory" if run.pool_bytes is None else f"a pool of {run.pool_bytes:,} bytes"
    lines = [
        *(f"note: {note}" for note in run.notes),
        f"{run.rule}, blocks of {run.block:,}, {pool}",
        f"  attention matches {100 * attention / prompt:.2f} % of the prompt tokens (what a router "
        "or a metric believes)",
        f"  resumed after     {100 * reused / prompt:.2f} % (what a state lets it reuse)",
        f"  computed          {run.recomputed:,} tokens:",
    ]
    header = ["cause", "tokens", "% of prompt", "requests"]
    causes = [
        [row["cause"], row["tokens"], f"{row['percent_of_prompt']:.2f}", row["requests"]]
        for row in missed.totals()
    ]
    causes = [[cell if cell is not None else "" for cell in row] for row in causes]
    lines += _indented(table(header, causes))
    waste = int(missed.wasted.sum())
    if waste:
        lines.append(
            f"  {waste:,} of them had been seen before; by how much of what could be reused was:"
        )
        header = ["reused", "requests", "wasted tokens", "% of the waste"]
        bands = [
            [row["reused"], row["requests"], row["wasted_tokens"], f"{row['percent_of_waste']:.1f}"]
            for row in missed.bands()
        ]
        lines += _indented(table(header, bands))
    if rate is not None:
        lines += _seconds(missed, rate)
    return "\n".join(lines)


def _seconds(missed: Missed, rate: PrefillRate) -> list[str]:
    """Time to first token, as far as it is prefill: the middle and the slowest request."""
    computed = sorted((missed.replay.prompt - missed.replay.reused).tolist())
    wasted = sorted(missed.wasted.tolist())
    at = {"the middle request": len(computed) // 2, "19 of 20": len(computed) * 19 // 20}
    said = [f"{name} {rate.words(computed[place])}" for name, place in at.items()]
    lost = [f"{name} {rate.words(wasted[place])}" for name, place in at.items()]
    return [
        f"  at {rate}, as you say, prefill takes {', '.join(said)} at most;",
        f"  of it for tokens seen before: {', '.join(lost)} at most",
    ]


def _indented(text: str) -> list[str]:
    return [f"    {line}" for line in text.splitlines()]
