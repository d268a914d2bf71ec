"""The command ``figures``: write every figure as SVG and PDF, the same bytes on every run."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from mambackpt.draw import MEDIA
from mambackpt.errors import checked_choice
from mambackpt.figures.registry import FIGURES, save_figures
from mambackpt.replay import open_trace


def main(argv: Sequence[str]) -> int:
    """Write figures and print each one's finding and paths; ``python -m mambackpt figures``."""
    parser = argparse.ArgumentParser(
        prog="mambackpt figures",
        description="Draw the design-review figures as SVG and PDF.",
        epilog=f"Figures: {', '.join(FIGURES)}.",
    )
    parser.add_argument("name", nargs="*", help="figures to draw [all]")
    parser.add_argument("--out", type=Path, default=Path("notebooks/figures"), help="folder")
    parser.add_argument("--medium", default="review", choices=list(MEDIA), help="size [review]")
    parser.add_argument("--processes", type=int, help="at once [as there are cores, at most 4]")
    parser.add_argument("--trace", help="a trace or a generator for the figures of replays")
    args = parser.parse_args(argv)
    names = args.name or list(FIGURES)
    for name in names:
        checked_choice("figure", name, FIGURES)
    trace = open_trace(args.trace)[0] if args.trace else None
    saved = save_figures(names, args.out, medium=args.medium, trace=trace, processes=args.processes)
    for finding, paths in saved:
        print(f"{finding}\n    {'  '.join(map(str, paths))}")
    return 0
