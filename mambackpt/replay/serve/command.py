"""The command ``replay --engine``: a trace as one engine serves it."""

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from inspect import Parameter

from mambackpt.cli import table, whole_number
from mambackpt.errors import CheckpointValueError, checked_choice
from mambackpt.replay.files import LAYOUTS, load_trace
from mambackpt.replay.generators import GENERATORS
from mambackpt.replay.result import Replay
from mambackpt.replay.serve import ENGINES, settings_of
from mambackpt.replay.serve.traces import replay_engine
from mambackpt.replay.trace import Trace

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
    replayed = replay_engine(_trace(options), engine, plainly=options.plainly, **settings)
    _print(replayed, options)
    return 0


def _parser(engine: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"mambackpt replay --engine {engine}",
        description="Replay a request trace as one engine serves it, a request at a time.",
        epilog=f"engines: {', '.join(ENGINES)}. generators: {', '.join(GENERATORS)}",
    )
    add = parser.add_argument
    add("trace", help="a trace file, or a generator with a size, as in chat:2000")
    add("--engine", help="by name")
    add("--layout", choices=LAYOUTS, help="of the file [from its first line]")
    add("--grain", help="tokens per block of the trace [its layout's]")
    add("--seed", default="0", help="of a generator")
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
    if parameter.default is None and text == "none":
        return None
    if isinstance(parameter.default, bool):
        return _SWITCH[checked_choice(option, text, _SWITCH)]
    if isinstance(parameter.default, str):
        return text
    return whole_number(option, text, least=0)


def _trace(options: argparse.Namespace) -> Trace:
    kind, _, size = options.trace.partition(":")
    seed = whole_number("--seed", options.seed, least=0)
    if kind in GENERATORS:
        requests = whole_number(f"{kind}:", size) if size else 1000
        return GENERATORS[kind](requests, seed=seed)
    grain = None if options.grain is None else whole_number("--grain", options.grain)
    try:
        return load_trace(options.trace, layout=options.layout, grain=grain)
    except OSError as error:
        raise CheckpointValueError(
            f"{options.trace} cannot be read ({error.strerror}); expected a trace file. "
            f"Try a generator: {', '.join(GENERATORS)}."
        ) from error


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
        header = ("engine", "hit %", "ceiling %", "recomputed", "states/request", "gone")
        rates = (f"{100 * rate:.2f}" for rate in (replayed.hit_rate, replayed.ceiling_rate))
        states = f"{replayed.states_per_request:.2f}"
        row = (replayed.rule, *rates, replayed.recomputed, states, replayed.evictions)
        print(table(header, [row]))
