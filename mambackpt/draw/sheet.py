"""Sheets: the kit's style at the size of a medium, titles that fit, axes below them.

Everything is measured in em (the font's size), so that a figure for a review and one for a slide
differ in one number.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import as_file, files
from typing import TypeAlias

import matplotlib as mpl
import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextToPath

from mambackpt.errors import checked_choice

STATE, CHECKPOINT, ERROR, HIT, GREY = "#5790fc", "#f89c20", "#e42536", "#964a8b", "#9c9ca1"
INK, FAINT_INK, PALE, CHUNKS = "#33333b", "#66666e", "#ececef", ("#b4b4bc", "#cdcdd3")
MEDIA: dict[str, dict[str, object]] = {
    "review": {},
    "slide": {
        "figure.figsize": (10, 5),
        "font.size": 14,
        "axes.linewidth": 1.2,
        "lines.linewidth": 2.4,
        "lines.markersize": 9,
    },
}
_HEAD = 1.1  # size of the finding, in em
Colour: TypeAlias = str | tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Drawing:
    """A figure with what it found, in a sentence, and what it shows, for whoever cannot see it."""

    figure: Figure
    finding: str
    alt: str


@contextmanager
def style(medium: str = "review") -> Iterator[None]:
    """Apply the kit's style sheet, at the size of a medium, for the length of a ``with`` block.

    >>> before = mpl.rcParams["font.size"]
    >>> with style("slide"):
    ...     print(mpl.rcParams["font.size"])
    14.0
    >>> mpl.rcParams["font.size"] == before
    True

    ``medium`` is "review" (7.2 in wide at 9 pt) or "slide" (10 in at 14 pt). The user's global
    settings are restored on the way out. Raises CheckpointValueError for another medium.
    """
    checked_choice("medium", medium, MEDIA)
    with (
        as_file(files("mambackpt.draw") / "mambackpt.mplstyle") as sheet,
        matplotlib.style.context([sheet, MEDIA[medium]], after_reset=True),
    ):
        yield


@lru_cache(maxsize=4096)
def text_width(text: str, weight: str = "normal") -> float:
    """Return the width of one line of text in em, in the kit's font, as wide as hinting makes it.

    >>> 2.5 < text_width("token") < 3.5
    True
    """
    font = FontProperties(family="DejaVu Sans", size=100, weight=weight)
    return float(TextToPath().get_text_width_height_descent(text, font, ismath=False)[0]) / 97


def wrap(text: str, width: float, weight: str = "normal") -> str:
    """Break text into lines that are at most ``width`` em wide; a longer word stays whole.

    >>> print(wrap("the column before the running state's", 12))
    the column before the
    running state's
    """
    lines = []
    for paragraph in text.split("\n"):
        line = ""
        for word in paragraph.split(" "):
            longer = f"{line} {word}" if line else word
            if line and text_width(longer, weight) > width:
                lines.append(line)
                longer = word
            line = longer
        lines.append(line)
    return "\n".join(lines)


def numeral(value: float, spec: str = ",.6g") -> str:
    """Return a number as text, with a true minus sign.

    >>> numeral(1536), numeral(-2, "+.1f"), numeral(-0.04, "+z.1f")
    ('1,536', '−2.0', '+0.0')

    ``spec`` as in `format`. Only a number passes here: a sentence keeps its hyphens.
    """
    return f"{value:{spec}}".replace("-", "\N{MINUS SIGN}")


def _balanced(text: str, width: float) -> str:
    """Wrap a bold text so that its lines are about equally long."""
    head = wrap(text, width, "bold")
    for narrower in np.arange(width, width / 2, -0.5):
        narrow = wrap(text, float(narrower), "bold")
        if narrow.count("\n") > head.count("\n"):
            break
        head = narrow
    return head


def sheet(
    finding: str,
    heights: Sequence[float],
    *,
    left: float = 1.0,
    right: float = 1.0,
    gap: float = 3.6,
) -> tuple[Figure, list[Axes]]:
    """Return a figure that is headed by its finding, with one Axes per height below each other.

    >>> with style():
    ...     figure, [ax] = sheet("One forward is enough.", [10])
    >>> figure.get_suptitle()
    'One forward is enough.'

    ``heights``, the margins ``left`` and ``right`` and the ``gap`` below each Axes (where its ticks
    and label go) are in em. The width is the medium's, so call it inside `style`. The finding is
    wrapped, not shrunk. The figure is not registered with pyplot: there is nothing to close.
    """
    em = float(mpl.rcParams["font.size"])
    width = float(mpl.rcParams["figure.figsize"][0]) * 72 / em
    size = _HEAD
    head = _balanced(finding, (width - 1.6) / size)
    top = 1.3 * size * (head.count("\n") + 1) + 1.5
    height = top + sum(heights) + gap * len(heights)
    figure = Figure(figsize=(width * em / 72, height * em / 72))
    FigureCanvasAgg(figure)
    figure.suptitle(
        head, x=0.8 / width, y=1 - 0.6 / height, ha="left", va="top", fontsize=size * em,
        fontweight="bold",
    )  # fmt: skip
    axes = []
    for rows in heights:
        top += rows
        box = (left / width, 1 - top / height, 1 - (left + right) / width, rows / height)
        axes.append(figure.add_axes(box))
        top += gap
    return figure, axes


def retitle(figure: Figure, finding: str) -> None:
    """Head a sheet by another finding of at most as many lines.

    >>> with style():
    ...     figure, _ = sheet("Two blocks are kept.", [10])
    >>> retitle(figure, "One block is kept.")
    >>> figure.get_suptitle()
    'One block is kept.'
    """
    [head, *_] = figure.texts
    width = float(figure.get_figwidth()) * 72 / float(head.get_fontsize())
    head.set_text(_balanced(finding, width - 1.6 / _HEAD))


def write_note(ax: Axes, words: str) -> None:
    """Write a note over the width of an Axes that is there for it.

    >>> with style():
    ...     _, [_, notes] = sheet("Two blocks are kept.", [10, 2])
    ...     write_note(notes, "In unlimited memory.")
    """
    em = float(ax.xaxis.label.get_fontsize())
    width = ax.bbox.width * 72 / ax.figure.dpi / em
    ax.set_axis_off()
    ax.text(0, 1, wrap(words, width), va="top", transform=ax.transAxes)


def em_wide(ax: Axes, em: float) -> float:
    """Return how many em of so many points an Axes is wide."""
    inches = ax.get_position().width * ax.figure.get_figwidth()  # type: ignore[union-attr]
    return float(inches * 72 / em)


def tint(colour: str, strength: float = 0.3) -> tuple[float, float, float]:
    """Return a colour mixed with white; 0 is white."""
    red, green, blue = mpl.colors.to_rgb(colour)
    return tuple(1 - strength * (1 - part) for part in (red, green, blue))  # type: ignore[return-value]


def left_margin(labels: Iterable[str]) -> float:
    """Return the left margin in em that lane or bar labels need."""
    return 2.1 + max(
        (text_width(line) for label in labels for line in label.split("\n")), default=0
    )
