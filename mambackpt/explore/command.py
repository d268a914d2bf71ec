"""The command ``explore``: draw one view of an explorer, without a notebook."""

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mambackpt.cli import table, whole_number
from mambackpt.draw import Drawing
from mambackpt.errors import CheckpointError, checked_choice
from mambackpt.explore.branches import branched, branches_knobs
from mambackpt.explore.capacity import capacity_knobs, held
from mambackpt.explore.controls import Knob
from mambackpt.explore.engine import engine_knobs, stepped
from mambackpt.explore.exports import export_knobs, exported
from mambackpt.explore.lanes import placed, placement_knobs, sequence_knobs, sequenced
from mambackpt.explore.replays import replay_knobs, replayed_view
from mambackpt.explore.saving import FORMATS, checked_file, save_drawing
from mambackpt.replay import open_trace


class Viewed(Protocol):
    """A view: what it found, and how it is drawn."""

    @property
    def finding(self) -> str:
        """The finding, a sentence."""

    def draw(self) -> Drawing:
        """Return the picture."""


class Kind(NamedTuple):
    """One kind of view: what it shows, its knobs, and the function of their values."""

    about: str
    knobs: dict[str, Knob]
    view: Callable[..., Viewed]


def _kinds(trace: str) -> Mapping[str, Callable[[], Kind]]:
    """Each kind of view by its name; what it needs is made when it is asked for."""

    def replays() -> Kind:
        chosen, _ = open_trace(trace)
        about = "a placement rule against the usual ones on a trace"
        return Kind(about, replay_knobs(chosen), partial(replayed_view, chosen))

    return {
        "placement": lambda: Kind(
            "where the checkpoint of one query lands", placement_knobs(), placed
        ),
        "sequence": lambda: Kind("a prompt that is sent twice", sequence_knobs(), sequenced),
        "replay": replays,
        "branches": lambda: Kind(
            "three requests that branch, and whose state each restores", branches_knobs(), branched
        ),
        "engine": lambda: Kind("a step of a simulated engine", engine_knobs(), stepped),
        "export": lambda: Kind(
            "which program of an export touches which bytes", export_knobs(), exported
        ),
        "capacity": lambda: Kind("what a pool holds of a model", capacity_knobs(), held),
    }


VIEWS = tuple(_kinds(""))


def main(argv: Sequence[str]) -> int:
    """Print a view's finding and its table, and with ``--out`` write its picture.

    >>> main(["sequence", "--prompt", "100", "--block", "64", "--hash", "16"])
    A second prompt of 100 tokens computes 4: it resumes from the state saved after 96.
    0

    Exit status 0. What is refused raises a CheckpointError that names the options.
    """
    parser = argparse.ArgumentParser(prog="mambackpt explore", description=__doc__.split("\n")[0])
    parser.add_argument("view", help=f"one of {', '.join(VIEWS)}; then its own --help")
    if not argv or argv[0].startswith("-"):
        parser.parse_args(argv)
    name = checked_choice("view", argv[0], VIEWS)
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--trace", default="documents:2000")
    trace = first.parse_known_args(argv[1:])[0].trace
    kind = _kinds(trace)[name]()
    parser = _parser(name, kind)
    given = parser.parse_args(argv[1:])
    if given.out:
        checked_file(given.out, FORMATS)
    values = _values_of(kind.knobs, given)
    try:
        view = kind.view(**values)
    except CheckpointError as error:
        raise type(error)(_as_options(str(error), kind.knobs)) from error
    print(view.finding)
    rows = getattr(view, "rows", ())
    if rows:
        header = getattr(view, "header", ("request", "what happens"))
        told = all(isinstance(cell, str) for row in rows for cell in row)
        print(table(header, rows, words=len(header) if told else 1))
    if given.out:
        print(save_drawing(view.draw(), given.out))
    return 0


def _parser(name: str, kind: Kind) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"mambackpt explore {name}", description=kind.about)
    for key, knob in kind.knobs.items():
        if isinstance(knob.value, bool):
            parser.add_argument(f"--{knob.option}", dest=key, action="store_true", help=knob.label)
            continue
        usual = "--hash" if knob.option == "hit-alignment" else "--block"
        default = usual if knob.option in ("hash", "hit-alignment") else knob.typed(knob.value)
        words = [f"{knob.label}"]
        if knob.choices:
            words.append(f"such as {', '.join(knob.typed(choice) for choice in knob.choices)}")
        help_text = f"{', '.join(words)} [{default}]".replace("%", "%%")
        parser.add_argument(f"--{knob.option}", dest=key, metavar="VALUE", help=help_text)
    if name == "replay":
        parser.add_argument("--trace", help="a file, or a generator as in chat:2000")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=f"write the picture, {', '.join(FORMATS)}"
    )
    return parser


def _values_of(knobs: Mapping[str, Knob], given: argparse.Namespace) -> dict[str, Any]:
    """The knobs' values: those given, and what goes along with them."""
    before = {key: knob.value for key, knob in knobs.items()}
    values: dict[str, Any] = dict(before)
    for key, knob in knobs.items():
        typed = getattr(given, key)
        if typed is None or isinstance(knob.value, bool):
            values[key] = knob.value if typed is None else typed
        elif isinstance(knob.value, str):
            values[key] = "" if knob.none and typed == "none" else typed
        elif knob.none and typed == "none":
            values[key] = 0
        else:
            values[key] = whole_number(f"--{knob.option}", typed, least=min(knob.least, 1))
    if "M" in knobs:  # a size that is not given follows the one above it, as in the explorer
        for size, above in (("H", "M"), ("U", "H")):
            if getattr(given, size) is None:
                values[size] = values[above]
    return values


def _as_options(message: str, knobs: Mapping[str, Knob]) -> str:
    """Call parameters by their options."""
    names = {
        "mamba_block_size": "M",
        "hash_block_size": "H",
        "cache_hit_alignment_tokens": "U",
        "checkpoint_alignment": "A",
        "source_dtype": "source",
        "state_dtype": "state",
    }
    for parameter, key in names.items():
        if key in knobs:
            message = re.sub(rf"\b{parameter}\b", f"--{knobs[key].option}", message)
    for key, knob in knobs.items():
        if message.startswith(f"{key} is"):
            message = f"--{knob.option}{message.removeprefix(key)}"
    return message
