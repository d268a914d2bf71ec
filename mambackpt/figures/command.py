"""The command ``figures``: write every figure as SVG and PDF, the same bytes on every run."""

import argparse
from collections.abc import Sequence
from math import gcd
from pathlib import Path
from typing import Any

from mambackpt.cli import whole_number, whole_numbers
from mambackpt.draw import FORMATS, MEDIA, checked_formats, writable_folder
from mambackpt.errors import CheckpointValueError, checked_choice
from mambackpt.figures.registry import (
    FIGURES,
    checked_options,
    checked_trace,
    describe_figure,
    options_of,
    reads_trace,
    save_figures,
)
from mambackpt.replay import PrefillRate, open_trace
from mambackpt.why import common_settings, find_model


def main(argv: Sequence[str]) -> int:
    """Write figures and print each one's finding and paths; ``python -m mambackpt figures``."""
    args = _parser().parse_args(argv)
    names = args.name or [name for name in FIGURES if not args.trace or reads_trace(name)]
    options = _options_of(args)
    for name in names:
        checked_choice("figure", name, FIGURES)
        checked_options(name, options)
        checked_trace(name, args.trace, option="--trace")
    if args.list:
        print("\n".join(_listed(name) for name in names))
        return 0
    formats = checked_formats(args.format.split(","), name="--format")
    out = writable_folder(args.out, name="--out")
    trace = open_trace(args.trace)[0] if args.trace else None
    how = {"medium": args.medium, "trace": trace, "options": options, "formats": formats}
    saved = save_figures(names, out, processes=args.processes, **how)
    for finding, paths in saved:
        print(f"{finding}\n    {'  '.join(map(str, paths))}")
    return 0


def _listed(name: str) -> str:
    options = ", ".join(("--medium", "--format", "--out", *options_of(name)))
    return f"{name}\n    {describe_figure(name)}\n    reads {options}"


def _options_of(args: argparse.Namespace) -> dict[str, Any]:
    """What was asked of a geometry, by the names that figures take."""
    options: dict[str, Any] = {}
    if args.model is not None:
        options["model"] = find_model(args.model)
    if args.block is not None:
        options["block"] = whole_number("--block", args.block)
    if args.hash is not None:
        options["hash"] = unit = whole_number("--hash", args.hash)
        block = options.get("block") or common_settings(options.get("model")).mamba_block_size
        if block % unit:
            raise CheckpointValueError(
                f"--hash is {unit} and the block {block}; expected a unit that divides the block. "
                f"Try --hash {gcd(unit, block)}."
            )
    if args.margin is not None:
        options["margin"] = whole_numbers("--margin", args.margin)
    if args.prefill_rate is not None:
        options["prefill_rate"] = PrefillRate.of(args.prefill_rate)
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mambackpt figures",
        description="Draw the design-review figures.",
        epilog="--list says what each figure shows, and which options it reads. With --trace and "
        "no name, the figures that replay a trace are drawn. What is too tall for a slide becomes "
        "several: NAME-1.svg, NAME-2.svg.",
    )
    parser.add_argument("name", nargs="*", help="figures to draw [all]")
    parser.add_argument("--list", action="store_true", help="list the figures, draw nothing")
    parser.add_argument("--out", type=Path, default=Path("notebooks/figures"), help="folder")
    parser.add_argument("--medium", default="review", choices=list(MEDIA), help="size [review]")
    parser.add_argument(
        "--format", default="svg,pdf", help=f"some of {','.join(FORMATS)} [svg,pdf]"
    )
    parser.add_argument("--processes", type=int, help="at once [as there are cores, at most 4]")
    parser.add_argument("--trace", help="a trace or a generator for the figures of replays")
    own = parser.add_argument_group("of the figures staircase and margin-map")
    own.add_argument("--model", help="a preset or a config.json: its block")
    own.add_argument("--block", help="tokens per block [the model's]")
    own.add_argument("--hash", help="tokens per hash unit [the block]")
    own.add_argument("--margin", help="tokens that a lookup computes again, such as 64,448")
    own.add_argument("--prefill-rate", help="your engine's prompt tokens per second")
    return parser
