"""The figures for a design review: each is a name, a finding, and code that computes both.

A figure is one decorated function that returns a `Drawing`; numbers in its finding come from the
same data as what is drawn.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from matplotlib.figure import Figure

from mambackpt.draw import style
from mambackpt.errors import CheckpointValueError
from mambackpt.replay import Trace, example_trace


@dataclass(frozen=True, slots=True)
class Drawing:
    """A figure with what it found, in a sentence, and what it shows, for whoever cannot see it."""

    figure: Figure
    finding: str
    alt: str


T = TypeVar("T")
FIGURES: dict[str, Callable[[], Drawing]] = {}
REPLAYS: dict[str, Callable[[Trace], Drawing]] = {}  # those of FIGURES that replay a trace


def named(name: str) -> Callable[[Callable[[], Drawing]], Callable[[], Drawing]]:
    """Register the function below as the figure of this name."""

    def register(function: Callable[[], Drawing]) -> Callable[[], Drawing]:
        FIGURES[name] = function
        return function

    return register


def replayed(name: str) -> Callable[[Callable[[Trace], Drawing]], Callable[[Trace], Drawing]]:
    """Register the function below as a figure of a request trace, generated unless given."""

    def register(function: Callable[[Trace], Drawing]) -> Callable[[Trace], Drawing]:
        REPLAYS[name] = function
        FIGURES[name] = lambda: function(example_trace())
        return function

    return register


def draw_figure(name: str, *, medium: str = "review", trace: Trace | None = None) -> Drawing:
    """Return a figure by its name, at the size of a medium ("review" or "slide").

    >>> print(draw_figure("one-forward").finding)
    A checkpoint inside the chunk saves a forward: 8,000 tokens take 1 instead of 2.

    A ``trace`` takes the place of the generated one in the figures that replay requests. Raises
    CheckpointValueError for another name or medium.
    """
    if name not in FIGURES:
        raise CheckpointValueError(
            f"figure is {name!r}; expected one of {', '.join(FIGURES)}. Try {next(iter(FIGURES))}."
        )
    with style(medium):
        if trace is not None and name in REPLAYS:
            return REPLAYS[name](trace)
        return FIGURES[name]()


def save_figure(
    name: str, folder: Path, *, medium: str = "review", trace: Trace | None = None
) -> tuple[Drawing, list[Path]]:
    """Draw a figure and write it as SVG and PDF; return it with the paths.

    The same bytes on every run. The SVG carries finding and alt text. Raises as `draw_figure`, and
    writes nothing then.
    """
    drawing = draw_figure(name, medium=medium, trace=trace)
    blank = dict.fromkeys(("Creator", "Producer"))
    finding, alt = drawing.finding, drawing.alt
    metadata = {
        "svg": {"Date": None, "Creator": None, "Title": finding, "Description": alt},
        "pdf": {"CreationDate": None, **blank, "Title": finding, "Subject": alt},
    }
    paths = []
    for kind, about in metadata.items():
        made = io.BytesIO()
        with style(medium):
            drawing.figure.savefig(made, format=kind, metadata=about)
        paths.append(folder / f"{name}.{kind}")
        folder.mkdir(parents=True, exist_ok=True)
        paths[-1].write_bytes(made.getvalue())
    return drawing, paths
