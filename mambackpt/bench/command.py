"""The command ``bench``: time what has just been shown equal, and print a table."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mambackpt.bench.compiled import LAYERS, compile_ahead, static_requests, static_table
from mambackpt.bench.export import BUFFERS, bench_export
from mambackpt.bench.planner import PLANNER_SIZES, bench_planner
from mambackpt.bench.record import Benchmark, Timing, record_environment
from mambackpt.errors import CheckpointValueError


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mambackpt bench", description=__doc__.split("\n")[0])
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="{export,planner,replay}")
    export = kinds.add_parser("export", help="ours and every baseline, beside one contiguous copy")
    export.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    export.add_argument("--layer", default="kimi-k3,qwen3-next,nemotron-3-super", metavar="NAMES")
    export.add_argument("--checkpoints", metavar="NUMBERS", help="[8,64; on CUDA 1,8,64,256]")
    export.add_argument("--variant", default="", metavar="NAMES", help=f"of {'; '.join(BUFFERS)}")
    export.add_argument("--threads", default="", metavar="NUMBERS", help="[torch's count]")
    export.add_argument("--static", action="store_true", help="compile for four targets instead")
    planner = kinds.add_parser("planner", help="the planner beside the fastest plain loop")
    planner.add_argument("--rows", default=",".join(map(str, PLANNER_SIZES)), metavar="NUMBERS")
    replay = kinds.add_parser("replay", help="the replay beside a plain one of the same rules")
    replay.add_argument("trace", help="a trace file; it is loaded before anything is timed")
    replay.add_argument("--rule", default="all,last,last+junction,last+junction+chunk")
    replay.add_argument("--block", default="512,1024,1536,2048,4096", metavar="NUMBERS")
    replay.add_argument("--model", help="whose bytes count in a pool")
    replay.add_argument("--pool-gb", metavar="NUMBERS", help="pools of so many GB [no limit]")
    for kind, runs in ((export, 11), (planner, 15), (replay, 5)):
        kind.add_argument("--runs", type=int, default=runs, help="samples per timing [%(default)s]")
    for kind in (export, planner):
        kind.add_argument("--out", type=Path, metavar="FILE", help="also write the result as JSON")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run ``bench export``, ``planner`` or ``replay`` and print a table; exit status 0."""
    args = _parser().parse_args(argv)
    if args.runs < 2:
        raise CheckpointValueError(f"--runs is {args.runs}; expected at least 2. Try 11.")

    def report(made: Benchmark) -> None:
        print(_line(made.timings[-1]), flush=True)
        if args.out:  # what is measured is kept, whatever ends the run
            args.out.write_text(made.to_json())

    if args.kind == "replay":
        return _bench_replay(args)
    if args.kind == "planner":
        sizes = _numbers("--rows", args.rows)
        print(_HEADER)
        print(_summary(bench_planner(sizes, runs=args.runs, report=report)))
        return 0
    layers = [_chosen("--layer", name, LAYERS) for name in args.layer.split(",")]
    if args.static:
        rows = static_table(compile_ahead(static_requests(layers=layers)))
        print(_static_text(rows))
        if args.out:
            environment = record_environment("cpu", threads=[])
            args.out.write_text(Benchmark("static", "", environment, [], rows).to_json())
        return 0
    on_gpu = args.device == "cuda"
    variants = [_chosen("--variant", name, BUFFERS) for name in args.variant.split(";") if name]
    checkpoints = _numbers(
        "--checkpoints", args.checkpoints or ("1,8,64,256" if on_gpu else "8,64")
    )
    print(_HEADER)
    made = bench_export(
        layers,
        checkpoints,
        variants=variants or [v for v in BUFFERS.values() if v.windows or not on_gpu],
        device=args.device,
        threads=_numbers("--threads", args.threads) if args.threads else (),
        runs=args.runs,
        report=report,
    )
    print(_summary(made))
    return 0


def _bench_replay(args: argparse.Namespace) -> int:
    """Print each replay's medians, and the ratio of both sums at the end."""
    from mambackpt.bench import time_replays
    from mambackpt.replay import load_trace

    trace = load_trace(args.trace)
    pools: list[int | None] = [None]
    if args.pool_gb:
        pools = [size * 10**9 for size in _numbers("--pool-gb", args.pool_gb)]
    plain = fast = 0.0
    print(f"{'rule':<28} {'block':>6} {'pool GB':>8} {'plain ms':>10} {'fast ms':>9} {'ratio':>7}")
    for timing in time_replays(
        *(trace, args.rule.split(","), _numbers("--block", args.block), pools),
        runs=args.runs,
        model=args.model,
    ):
        pool = "-" if timing.pool_bytes is None else f"{timing.pool_bytes / 1e9:.0f}"
        print(
            f"{timing.rule:<28} {timing.block:>6} {pool:>8} {timing.plain_s * 1e3:>10.1f} "
            f"{timing.fast_s * 1e3:>9.2f} {timing.ratio:>7.1f}",
            flush=True,
        )
        plain, fast = plain + timing.plain_s, fast + timing.fast_s
    print(
        f"{trace.name}, {len(trace):,} requests: {plain * 1e3:.0f} ms plain, {fast * 1e3:.0f} ms "
        f"fast, {plain / fast:.1f} times as fast; equal records, medians of {args.runs} runs"
    )
    return 0


def _numbers(name: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise CheckpointValueError(
            f"{name} is {text!r}; expected positive whole numbers. Try {name} 1,8."
        )
    return numbers


def _chosen(option: str, name: str, known: dict[str, Any]) -> Any:
    if name.strip() not in known:
        raise CheckpointValueError(
            f"{option} names {name!r}; expected some of {', '.join(known)}. "
            f"Try {next(iter(known))!r}."
        )
    return known[name.strip()]


_HEADER = (
    f"{'case':<17} {'variant':<26} {'size':>5}  {'regime':<11} {'method':<24} "
    f"{'median us':>10} {'20-80 %':>19} {'GB/s':>7} {'ratio':>6}"
)


def _line(timing: Timing) -> str:
    speed = f"{timing.gb_per_s:7.1f}" if timing.bytes else " " * 7
    return (
        f"{timing.case:<17} {timing.variant:<26} {timing.size:>5}  {timing.regime:<11} "
        f"{timing.method:<24} {timing.median_us:>10.1f} "
        f"{timing.low_us:>9.1f}-{timing.high_us:<9.1f} {speed} {timing.ratio:>6.2f}"
    )


def _summary(made: Benchmark) -> str:
    """What the ratio means, where it was measured, and any figure that memory cannot reach."""
    where, versions = made.environment, made.environment.versions
    lines = [
        f"ratio: {made.reference}, timed in the same run = 1.00",
        f"{where.device}; threads {where.threads}; "
        + ", ".join(f"{name} {number}" for name, number in versions.items())
        + f"; {where.date}",
    ]
    peak = where.peak_gb_per_s
    for timing in made.timings:
        if peak and timing.gb_per_s > peak:
            lines.append(
                f"above the memory's {peak:.0f} GB/s, so served by a cache: {_line(timing)}"
            )
    return "\n".join(lines)


def _static_text(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"{'layer':<17} {'target':<7} {'dtypes':<21} {'windows':<12} {'kernel':<6} "
        f"{'states B':>9} {'windows B':>10} {'programs':>9} {'accesses':>9} {'instr.':>9} "
        f"{'regs':>5} {'spills':>6}   (per MiB of checkpoint)"
    ]
    for row in rows:
        states, windows = (
            "/".join(map(str, row[name])) for name in ("recurrent_bytes", "window_bytes")
        )
        lines.append(
            f"{row['layer']:<17} {row['target']:<7} {row['dtypes']:<21} {row['windows']:<12} "
            f"{row['kernel']:<6} {states:>9} {windows:>10} {row['programs_per_mib']:>9.1f} "
            f"{row['accesses_per_mib']:>9.0f} {row['instructions_per_mib']:>9.0f} "
            f"{row['registers']:>5} {row['spills']:>6}"
        )
    return "\n".join(lines)
