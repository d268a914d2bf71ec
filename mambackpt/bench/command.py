"""The command ``bench``: time what has just been shown equal, and print a table."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mambackpt.bench.compiled import LAYERS, compile_ahead, static_requests, static_table
from mambackpt.bench.explorers import redraw_table, time_explorers
from mambackpt.bench.export import BUFFERS, bench_export
from mambackpt.bench.planner import PLANNER_SIZES, bench_planner
from mambackpt.bench.record import Benchmark, Timing, record_environment
from mambackpt.bench.replays import time_engines, time_replays
from mambackpt.cli import choices_of, table, whole_numbers
from mambackpt.errors import CheckpointValueError
from mambackpt.replay import ENGINES, open_trace

_TRACE = "chat:1000"
_ENGINES_TRACE = (
    "chat:requests=300,grain=16"  # a plain engine is slow; each engine takes this grain
)


def main(argv: Sequence[str]) -> int:
    """Run one kind of bench and print a table; exit status 0."""
    parser = argparse.ArgumentParser(prog="mambackpt bench", description=__doc__.split("\n")[0])
    kinds = parser.add_subparsers(required=True, metavar="{export,planner,replay,explorers}")
    _add_export(kinds.add_parser("export", help="ours and every baseline, beside one copy_"))
    _add_planner(kinds.add_parser("planner", help="the planner beside the fastest plain loop"))
    _add_replay(kinds.add_parser("replay", help="the replay beside a plain one of the same rules"))
    _add_explorers(kinds.add_parser("explorers", help="an explorer's redraw, in a real kernel"))
    args = parser.parse_args(argv)
    if args.runs < 2:
        raise CheckpointValueError(f"--runs is {args.runs}; expected at least 2. Try 11.")
    args.run(args)
    return 0


def _add_export(parser: argparse.ArgumentParser) -> None:
    say = parser.add_argument
    say("--device", choices=["cpu", "cuda"], default="cpu")
    say("--layer", default="kimi-k3,qwen3-next,nemotron-3-super", metavar="NAMES")
    say("--checkpoints", metavar="NUMBERS", help="of one layer, at once [8,64; on CUDA 1,8,64,256]")
    say("--buffers", default="", metavar="NAMES", help=f"of {'; '.join(BUFFERS)} [all]")
    say("--threads", default="", metavar="NUMBERS", help="[torch's count]")
    say("--static", action="store_true", help="compile for four targets instead")
    _add_runs(parser, 11, _bench_export, out=True)


def _add_planner(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", default=",".join(map(str, PLANNER_SIZES)), metavar="NUMBERS")
    _add_runs(parser, 15, _bench_planner, out=True)


def _add_replay(parser: argparse.ArgumentParser) -> None:
    say = parser.add_argument
    say("trace", nargs="?", help=f"a trace or a generator [{_TRACE}; of engines {_ENGINES_TRACE}]")
    say("--engine", metavar="NAMES", help=f"these engines instead of rules: {', '.join(ENGINES)}")
    say("--rule", default="all,last,last+junction,last+junction+chunk")
    say("--block", default="512,1024,1536,2048,4096", metavar="NUMBERS")
    say("--model", help="whose bytes count in a pool")
    say("--pool-gb", metavar="NUMBERS", help="pools of so many GB [no limit]")
    _add_runs(parser, 5, _bench_replay, out=False)


def _add_explorers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", help="explorers [all]")
    parser.add_argument("--no-browser", action="store_true", help="CPU only, even beside Chromium")
    _add_runs(parser, 15, _bench_explorers, out=False)


def _add_runs(
    parser: argparse.ArgumentParser, runs: int, run: Callable[..., None], *, out: bool
) -> None:
    parser.add_argument("--runs", type=int, default=runs, help="samples per timing [%(default)s]")
    if out:
        parser.add_argument("--out", type=Path, metavar="FILE", help="also write JSON")
    parser.set_defaults(run=run)


def _bench_export(args: argparse.Namespace) -> None:
    layers = [LAYERS[name] for name in choices_of("--layer", args.layer, LAYERS)]
    if args.static:
        rows = static_table(compile_ahead(static_requests(layers=layers)))
        print(_static_text(rows))
        if args.out:
            environment = record_environment("cpu", threads=[])
            args.out.write_text(Benchmark("static", "", environment, [], rows).to_json())
        return
    on_gpu = args.device == "cuda"
    buffers = [b for b in BUFFERS.values() if b.windows or not on_gpu]
    if args.buffers:
        names = choices_of("--buffers", args.buffers, BUFFERS, separator=";")
        buffers = [BUFFERS[name] for name in names]
    counts = args.checkpoints or ("1,8,64,256" if on_gpu else "8,64")
    checkpoints = whole_numbers("--checkpoints", counts)
    threads = whole_numbers("--threads", args.threads, example="1,2") if args.threads else ()
    print(_HEADER)
    run = bench_export(
        layers,
        checkpoints,
        buffers=buffers,
        device=args.device,
        threads=threads,
        runs=args.runs,
        report=_report(args.out),
    )
    print(_summary(run))


def _bench_planner(args: argparse.Namespace) -> None:
    sizes = whole_numbers("--rows", args.rows)
    print(_HEADER)
    print(_summary(bench_planner(sizes, runs=args.runs, report=_report(args.out))))


def _report(out: Path | None) -> Callable[[Benchmark], None]:
    """Print each timing as it comes; what is measured is written, whatever ends the run."""

    def report(run: Benchmark) -> None:
        print(_line(run.timings[-1]), flush=True)
        if out:
            out.write_text(run.to_json())

    return report


def _bench_replay(args: argparse.Namespace) -> None:
    """Print each replay's medians, and the ratio of both sums at the end."""
    trace, _ = open_trace(args.trace or (_ENGINES_TRACE if args.engine else _TRACE))
    pools: list[int | None] = [None]
    if args.pool_gb:
        pools = [size * 10**9 for size in whole_numbers("--pool-gb", args.pool_gb)]
    timings = (
        time_engines(trace, choices_of("--engine", args.engine, ENGINES), runs=args.runs)
        if args.engine
        else time_replays(
            *(trace, args.rule.split(","), whole_numbers("--block", args.block), pools),
            runs=args.runs,
            model=args.model,
        )
    )
    plain = fast = 0.0
    print(f"{'rule':<28} {'block':>6} {'pool GB':>8} {'plain ms':>10} {'fast ms':>9} {'ratio':>7}")
    for timing in timings:
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


def _bench_explorers(args: argparse.Namespace) -> None:
    """Print medians and bands of milliseconds, CPU of the kernel and from key to paint."""
    timed = list(time_explorers(args.names, runs=args.runs, in_browser=not args.no_browser))
    header = ("explorer", "moved", "CPU ms", "20-80 %", "key to paint ms", "20-80 %")
    print(table(header, redraw_table(timed), words=2))
    where = record_environment("cpu", threads=[])
    print(f"{where.device}; {where.cores} cores; {where.date}; medians of {args.runs} redraws")


_HEADER = (
    f"{'case':<17} {'buffers':<26} {'size':>5}  {'regime':<11} {'method':<24} "
    f"{'median us':>10} {'20-80 %':>19} {'GB/s':>7} {'ratio':>6}"
)


def _line(timing: Timing) -> str:
    speed = f"{timing.gb_per_s:7.1f}" if timing.bytes else " " * 7
    return (
        f"{timing.case:<17} {timing.buffers:<26} {timing.size:>5}  {timing.regime:<11} "
        f"{timing.method:<24} {timing.median_us:>10.1f} "
        f"{timing.low_us:>9.1f}-{timing.high_us:<9.1f} {speed} {timing.ratio:>6.2f}"
    )


def _summary(run: Benchmark) -> str:
    """What the ratio means, where it was measured, and any figure that memory cannot reach."""
    where, versions = run.environment, run.environment.versions
    lines = [
        f"ratio: {run.reference}, timed in the same run = 1.00",
        f"{where.device}; threads {where.threads}; "
        + ", ".join(f"{name} {number}" for name, number in versions.items())
        + f"; {where.date}",
    ]
    peak = where.peak_gb_per_s
    for timing in run.timings:
        if peak and timing.gb_per_s > peak:
            lines.append(
                f"above the memory's {peak:.0f} GB/s, so served by a cache: {_line(timing)}"
            )
    return "\n".join(lines)


def _static_text(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"{'layer':<17} {'target':<7} {'dtypes':<21} {'windows':<12} {'kernel':<6} "
        f"{'states B':>9} {'windows B':>10} {'programs':>9} {'accesses':>9} {'instr.':>9} "
        f"{'regs':>5} {'spills':>6}   (per MiB of one layer's checkpoints)"
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
