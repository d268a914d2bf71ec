"""The command line: ``python -m mambackpt COMMAND``."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from mambackpt.errors import CheckpointError
from mambackpt.needs import explain_missing

# command: (module, what it does); a module loads when its command is asked for, and has a `main`
COMMANDS = {
    "figures": ("figures.command", "draw the design-review figures as SVG and PDF"),
    "why": ("why.command", "why no checkpoint for a query, or no hit for a prompt"),
    "explore": ("explore.command", "draw one view of an explorer, without a notebook"),
    "animate": ("explore.films", "write a film as a GIF or as a page that plays it"),
    "size": ("models.command", "state and block sizes of a model or a config.json"),
    "log": ("models.log_command", "what the boot log of an engine tells"),
    "replay": ("replay.command", "replay a request trace under placement rules"),
    "lockstep": ("engine.command", "check every key against the state it promises"),
    "review": ("review.command", "one page on a model and its traffic, for a design review"),
    "resume": ("resume.command", "hold resumed requests to cold ones, on real architectures"),
    "site": ("site.command", "the course as static pages"),
    "conformance": ("conformance.command", "hold the kit to running engines, and them to it"),
    "bench": ("bench.command", "time what has just been shown equal"),
}

# (command, engine): the module that answers for that engine, where it is not the command's
FOR_ENGINE = {("lockstep", "llama.cpp"): "replay.serve.stale_command"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 2 where the input was refused.

    Without a command, list them.
    """
    parser = argparse.ArgumentParser(prog="mambackpt", description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (_, does) in COMMANDS.items():
        commands.add_parser(name, help=does, add_help=False)
    words = list(sys.argv[1:] if argv is None else argv)
    name = parser.parse_args(words[:1]).command
    if name is None:
        parser.print_help()
        return 0
    chosen = argparse.ArgumentParser(add_help=False)
    chosen.add_argument("--engine", action="append")
    engines = chosen.parse_known_args(words[1:])[0].engine or [""]
    module = FOR_ENGINE.get((name, engines[0]), COMMANDS[name][0])
    try:
        command = import_module(f"mambackpt.{module}")
        return int(command.main(words[1:]))
    except ModuleNotFoundError as error:
        missing = explain_missing(error)
        if missing is None:
            raise
        print(f"mambackpt {name}: {missing}", file=sys.stderr)
        return 2
    except CheckpointError as error:
        print(f"mambackpt {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # who read has seen enough, as `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    sys.exit(main())
