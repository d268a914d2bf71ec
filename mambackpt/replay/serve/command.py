"""The command ``replay --engine``: a trace as one engine serves it."""

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from inspect import Parameter
from typing import get_args

from mambackpt.cli import table, whole_number
from mambackpt.errors import checked_choice
from mambackpt.replay.result import Replay
from mambackpt.replay.serve import ENGINES, settings_of
from mambackpt.replay.serve.traces import replay_engine
from mambackpt.replay.source import SHAPES, add_trace_options, trace_of

_SWITCH = {"true": True, "on": True, "false": False, "off": False}


def main(argv: Sequence[str]) -> int:
    """Replay a trace as an engine serves it and print a table; exit status 0.

    >>> main(["chat:300", "--engine", "llama.cpp", "--ubatch", "1024"])
    chat:300: 300 requests, 3,292,588 prompt tokens
    engine                  hit %  ceiling %  recomputed  states/request  gone
    llama.cpp(ubatch=1024)  17.84      21.35   2,705,292            2.18   641
    0

    Raises CheckpointValueError for a trace, an engine or a setting that cannot be had.
    """
    chosen = argparse.ArgumentParser(add_help=False)
    chosen.add_argument("--engine", required=True)
    engine = checked_choice("--engine", chosen.parse_known_args(argv)[0].engine, ENGINES)
    parser = _parser(engine)
    options = parser.parse_args(argv)
    settings = {
        name: _value(parameter, getattr(options, name))
        for name, parameter in settings_of(engine).items()
        if getattr(options, name) is not None
    }
    trace, _ = trace_of(options)
    replayed = replay_engine(trace, engine, plainly=options.plainly, **settings)
    _print(replayed, options)
    return 0


def _parser(engine: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"mambackpt replay --engine {engine}",
        description="Replay a request trace as one engine serves it, a request at a time.",
        epilog=f"Engines: {', '.join(ENGINES)}. {SHAPES}",
    )
    add_trace_options(parser)
    add = parser.add_argument
    add("--engine", help="by name")
    add("--plainly", action="store_true", help="use the readable loop: slow, and the same")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON object")
    output.add_argument("--csv", action="store_true", help="print comma-separated values")
    group = parser.add_argument_group(f"settings of {engine}")
    for name, parameter in settings_of(engine).items():
        group.add_argument(
            f"--{name.replace('_', '-')}", dest=name, help=f"[{parameter.default}]", metavar="VALUE"
        )
    return parser


def _value(parameter: Parameter, text: str) -> object:
    """A setting's value in the type of its default."""
    option = f"--{parameter.name.replace('_', '-')}"
    if text == "none" and type(None) in get_args(parameter.annotation):
        return None
    if isinstance(parameter.default, bool):
        return _SWITCH[checked_choice(option, text, _SWITCH)]
    if isinstance(parameter.default, str):
        return text
    return whole_number(option, text, least=0)


def _print(replayed: Replay, options: argparse.Namespace) -> None:
    summary = replayed.summary()
    if options.json:
        print(json.dumps(summary, indent=1))
    elif options.csv:
        writer = csv.DictWriter(sys.stdout, list(summary), lineterminator="\n")
        writer.writeheader()
        writer.writerow(summary)
    else:
        tokens = int(replayed.prompt.sum())
        print(f"{replayed.trace}: {len(replayed):,} requests, {tokens:,} prompt tokens")
        for note in replayed.notes:
            print(f"note: {note}")
        header = ("engine", "hit %", "ceiling %", "recomputed", "states/request", "gone")
        rates = (f"{100 * rate:.2f}" for rate in (replayed.hit_rate, replayed.ceiling_rate))
        states = f"{replayed.states_per_request:.2f}"
        row = (replayed.rule, *rates, replayed.recomputed, states, replayed.evictions)
        print(table(header, [row]))
