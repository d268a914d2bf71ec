"""Sheets: the kit's style at the size of a medium, titles that fit, axes below them.

Everything is measured in em (the font's size), so that a figure for a review and one for a slide
differ in one number.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
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
_TALLEST = {"slide": 5.6}  # inches: a slide is 16:9, and what does not fit goes on another
_MEDIUM: ContextVar[str] = ContextVar("medium", default="review")
_HEAD = 1.1  # size of the finding, in em
_GAP = 3.6  # below each Axes, in em: its ticks and label
_LOWEST = 6.0  # of an Axes that has a page of its own, in em
_LINE = 1.25  # from line to line of a text, in em
Colour: TypeAlias = str | tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Drawing:
    """A figure with what it found, in a sentence, and what it shows, for whoever cannot see it.

    ``more`` holds further pages, where one of the medium's size does not hold everything.
    """

    figure: Figure
    finding: str
    alt: str
    more: "tuple[Drawing, ...]" = ()

    @property
    def pages(self) -> "tuple[Drawing, ...]":
        """This page and all further ones."""
        return (self, *self.more)


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
    before = _MEDIUM.set(medium)
    try:
        with (
            as_file(files("mambackpt.draw") / "mambackpt.mplstyle") as sheet,
            matplotlib.style.context([sheet, MEDIA[medium]], after_reset=True),
        ):
            yield
    finally:
        _MEDIUM.reset(before)


def is_slide() -> bool:
    """Return whether the style in force is that of a slide, which has no room for everything.

    >>> with style("slide"):
    ...     is_slide()
    True
    """
    return _MEDIUM.get() == "slide"


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


def _head_height(head: str) -> float:
    return 1.3 * _HEAD * (head.count("\n") + 1) + 1.5


def note_height(note: str) -> float:
    """Return the height in em of a note over the whole width of the medium; 0 without words.

    >>> with style():
    ...     note_height("In unlimited memory.")
    1.65
    """
    lines = wrap(note, medium_width() - 1.6).count("\n") + 1
    return _LINE * lines + 0.4 if note else 0.0


def medium_width() -> float:
    """Return how many em the medium is wide.

    >>> with style():
    ...     round(medium_width(), 1)
    57.6
    """
    return _em_width()[1]


def _em_width() -> tuple[float, float]:
    """The size of the font in points, and how many of it the medium is wide."""
    em = float(mpl.rcParams["font.size"])
    return em, float(mpl.rcParams["figure.figsize"][0]) * 72 / em


def sheet(
    finding: str,
    heights: Sequence[float],
    *,
    left: float = 1.0,
    right: float = 1.0,
    gap: float = _GAP,
    over: float = 0.0,
    note: str = "",
) -> tuple[Figure, list[Axes]]:
    """Return a figure that is headed by its finding, with one Axes per height below each other.

    >>> with style():
    ...     figure, [ax] = sheet("One forward is enough.", [10])
    >>> figure.get_suptitle()
    'One forward is enough.'

    ``heights``, the margins ``left`` and ``right``, the ``gap`` below each Axes (where its ticks
    and label go) and what is ``over`` it (for a title of its own) are in em. A ``note`` stands at
    the bottom. The width is the medium's, so call it inside `style`. The finding is wrapped, not
    shrunk. The figure is not registered with pyplot: there is nothing to close.
    """
    em, width = _em_width()
    head = _balanced(finding, (width - 1.6) / _HEAD)
    top = _head_height(head)
    foot = note_height(note)
    height = top + sum(heights) + (over + gap) * len(heights) + foot
    figure = Figure(figsize=(width * em / 72, height * em / 72))
    FigureCanvasAgg(figure)
    figure.suptitle(
        head, x=0.8 / width, y=1 - 0.6 / height, ha="left", va="top", fontsize=_HEAD * em,
        fontweight="bold",
    )  # fmt: skip
    axes = []
    for rows in heights:
        top += over + rows
        box = (left / width, 1 - top / height, 1 - (left + right) / width, rows / height)
        axes.append(figure.add_axes(box))
        top += gap
    if note:
        words = wrap(note, width - 1.6)
        figure.text(0.8 / width, foot / height, words, va="top", linespacing=_LINE / 1.17)
    return figure, axes


@dataclass(frozen=True, slots=True)
class Pages:
    """The sheets of one finding, with their Axes from the first page to the last."""

    figures: tuple[Figure, ...]
    axes: tuple[Axes, ...]

    def drawing(self, finding: str, alt: str) -> Drawing:
        """Return the drawing of these sheets."""
        first, *others = (Drawing(figure, finding, alt) for figure in self.figures)
        return Drawing(first.figure, finding, alt, tuple(others))


def _em_height() -> float:
    """How many em the medium is high at most."""
    return _TALLEST.get(_MEDIUM.get(), math.inf) * 72 / _em_width()[0]


def page_slices(finding: str, rows: Sequence[float], *, beside: float = 0.0) -> list[slice]:
    """Return which rows of these heights go on which page of the medium, about equally many each.

    >>> with style("slide"):
    ...     page_slices("Five lanes.", [6.9] * 5, beside=3.6)
    [slice(0, 3, None), slice(3, 6, None)]

    ``beside`` is what else a page needs below its finding; all in em. A page holds at least a row.
    """
    width, room = medium_width(), _em_height() - beside
    for size in range(len(rows), 0, -1):
        count = math.ceil(len(rows) / size)
        size = math.ceil(len(rows) / count)
        head = _balanced(page_head(finding, count - 1, count), (width - 1.6) / _HEAD)
        slices = [slice(at, at + size) for at in range(0, len(rows), size)]
        if size == 1 or all(sum(rows[s]) + _head_height(head) <= room + 1e-6 for s in slices):
            return slices
    return []


def page_head(finding: str, page: int, pages: int) -> str:
    """Return what heads a page, counted from 0.

    >>> page_head("Two lanes.", 0, 2)
    'Two lanes. (1 of 2)'
    """
    return finding if pages == 1 else f"{finding} ({page + 1} of {pages})"


def sheets(
    finding: str,
    heights: Sequence[float],
    *,
    left: float = 1.0,
    right: float = 1.0,
    gap: float = _GAP,
    over: float = 0.0,
    note: str = "",
) -> Pages:
    """Return as many sheets as the medium needs for these Axes, all headed by the finding.

    >>> with style("slide"):
    ...     pages = sheets("Three models.", [12, 12, 12])
    >>> [figure.get_suptitle() for figure in pages.figures][1], len(pages.axes)
    ('Three models. (2 of 3)', 3)

    The arguments are those of `sheet`; the note stands on every page. An Axes that is too high for
    a page of its own becomes lower.
    """
    beside = note_height(note)
    slices = page_slices(finding, [over + height + gap for height in heights], beside=beside)
    width = (medium_width() - 1.6) / _HEAD
    heads = [page_head(finding, page, len(slices)) for page in range(len(slices))]
    tall = max(_head_height(_balanced(head, width)) for head in heads)
    most = max(_em_height() - tall - over - gap - beside, _LOWEST)
    made = [
        sheet(
            heads[page],
            [min(height, most) for height in heights[rows]],
            left=left,
            right=right,
            gap=gap,
            over=over,
            note=note,
        )
        for page, rows in enumerate(slices)
    ]
    return Pages(tuple(figure for figure, _ in made), tuple(ax for _, axes in made for ax in axes))


def foot_axes(figure: Figure, height: float, note: str = "") -> Axes:
    """Return an Axes of so many em at the bottom of a sheet, above its note."""
    em, width = _em_width()
    tall = float(figure.get_figheight()) * 72 / em
    return figure.add_axes((0.8 / width, note_height(note) / tall, 1 - 1.6 / width, height / tall))


def side_by_side(ax: Axes, count: int, *, gap: float = 2.0) -> list[Axes]:
    """Replace an Axes by so many in a row that share its place, ``gap`` em apart.

    >>> with style():
    ...     _, [ax] = sheet("Two columns.", [10])
    ...     len(side_by_side(ax, 2))
    2
    """
    em = float(ax.xaxis.label.get_fontsize())
    box, figure = ax.get_position(), ax.get_figure(root=True)
    assert figure is not None
    apart = gap * em / 72 / figure.get_figwidth()
    width = (box.width - apart * (count - 1)) / count
    ax.remove()
    return [
        figure.add_axes((box.x0 + number * (width + apart), box.y0, width, box.height))
        for number in range(count)
    ]


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
