"""Charts: bars, timings, curves and heatmaps with direct labels, on an Axes of yours."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, product
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mambackpt.draw.sheet import (
    CHUNKS,
    GREY,
    INK,
    STATE,
    em_wide,
    numeral,
    text_width,
    tint,
)
from mambackpt.errors import CheckpointValueError


def draw_bars(
    ax: Axes,
    labels: Sequence[str],
    values: Sequence[float],
    *,
    unit: str,
    words: Sequence[str] | None = None,
    highlight: Sequence[int] = (),
    bands: Sequence[tuple[float, float]] = (),
) -> Axes:
    """Draw one horizontal bar per label, from 0, with its value beside it, and return the Axes.

    >>> from mambackpt.draw import left_margin, sheet, style
    >>> with style():
    ...     _, [ax] = sheet("B is longer.", [bars_height(2)], left=left_margin("AB"))
    ...     ax = draw_bars(ax, ["A", "B"], [528, 1056], unit="tokens", highlight=[1])

    ``words`` replaces the values as text; ``highlight`` gives rows that the finding is about the
    state's colour and an edge; ``bands`` draws a line from low to high per bar. The values are in
    ``unit``, which becomes the axis label. Raises CheckpointValueError for values that are negative
    or whose number is not that of the labels.
    """
    if len(labels) != len(values) or any(value < 0 for value in values):
        raise CheckpointValueError(
            f"{len(labels)} labels and values {list(values)}; expected one value of at least 0 per "
            "label. Try the same length."
        )
    said = [numeral(value) for value in values] if words is None else list(words)
    line, em = float(mpl.rcParams["lines.linewidth"]), float(mpl.rcParams["font.size"])
    chosen = [row in highlight for row in range(len(labels))]
    bars = ax.barh(
        range(len(labels)), values, 0.62, linewidth=0.6 * line,
        color=[tint(STATE, 0.45) if row else CHUNKS[1] for row in chosen],
        edgecolor=[STATE if row else "none" for row in chosen],
        xerr=np.abs(np.subtract(bands, np.reshape(values, (-1, 1)))).T if bands else None,
        error_kw={"ecolor": INK, "elinewidth": 0.8 * line},
    )  # fmt: skip
    for text in ax.bar_label(bars, said):
        text.set_position((0.5 * em, -0.05 * em))
    whole = em_wide(ax, em)
    widest = max((text_width(text) for text in said), default=0) + 1
    longest = max([*values, *(high for _, high in bands)], default=0) or 1
    ax.set_xlim(0, longest * whole / (whole - widest))
    ax.set_ylim(len(labels) - 0.4, -0.6)
    ax.set_yticks(range(len(labels)), labels)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ticks = [tick for tick in MaxNLocator(5).tick_values(0, longest) if 0 <= tick <= longest]
    ax.set_xticks(ticks)
    ax.spines["bottom"].set_bounds(0, longest)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: numeral(value)))
    ax.set_xlabel(unit)
    return ax


def describe_bars(labels: Sequence[str], words: Sequence[str]) -> str:
    """Return the bars in words, for an alt text.

    >>> describe_bars(["A", "B"], ["528", "1,056"])
    'A 528, B 1,056'
    """
    return ", ".join(f"{label} {said}" for label, said in zip(labels, words, strict=True))


def bars_height(rows: int) -> float:
    """Return the height of so many bars in em."""
    return 1.9 * rows


def draw_timings(
    ax: Axes,
    benchmark: Mapping[str, Any],
    *,
    case: str,
    buffers: str,
    size: int,
    regime: str,
    highlight: str = "export",
) -> Axes:
    """Draw the timings of one case, a bar per method with its 20-80 % band, and return the Axes.

    ``benchmark`` is the JSON that `python -m mambackpt bench` writes, loaded. A bar says its median
    and its share of the reference, timed in the same run. Times are in microseconds. Raises
    CheckpointValueError where nothing was timed for these buffers, this case, size and regime.
    """
    wanted = {"case": case, "buffers": buffers, "size": size, "regime": regime}
    rows = [t for t in benchmark["timings"] if all(t[name] == wanted[name] for name in wanted)]
    if not rows:
        timed = sorted({tuple(t[name] for name in wanted) for t in benchmark["timings"]})
        raise CheckpointValueError(
            f"no timing has {wanted}; expected one of {timed[:8]}. Try the first of them."
        )
    rows.sort(key=lambda timing: float(timing["median_us"]))
    return draw_bars(
        ax,
        [timing["method"] for timing in rows],
        [timing["median_us"] for timing in rows],
        unit="microseconds",
        words=[f"{_digits(t['median_us'])} µs, {t['ratio']:.2f} ×" for t in rows],
        highlight=[at for at, timing in enumerate(rows) if timing["method"] == highlight],
        bands=[(timing["low_us"], timing["high_us"]) for timing in rows],
    )


def _digits(value: float) -> str:
    """At least four digits where there are so many, and never an exponent."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


_SHAPES = ("o", "s", "^", "D", "v", "P", "X", "*")


def draw_curves(
    ax: Axes,
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    x_label: str,
    y_label: str,
    highlight: Mapping[str, str] | None = None,
    log_x: bool = False,
    from_zero: bool = False,
) -> Axes:
    """Draw one line per name, labelled at its end, and return the Axes.

    >>> from mambackpt.draw import left_margin, sheet, style
    >>> with style():
    ...     _, [ax] = sheet("They cross.", [14], left=5, right=8)
    ...     ax = draw_curves(ax, {"all": ([1, 2], [9, 7]), "last": ([1, 2], [5, 8])},
    ...                      x_label="block (tokens)", y_label="reused (%)")

    ``highlight`` maps the names that the finding is about to a colour; the others are grey. Every
    curve has markers of its own. Leave a right margin for the labels. Raises CheckpointValueError
    without curves.
    """
    if not curves:
        raise CheckpointValueError(
            "curves is empty; expected at least one. Try a mapping of names to (x, y)."
        )
    chosen = highlight or {}
    for number, (name, (x, y)) in enumerate(curves.items()):
        ax.plot(
            x, y, marker=_SHAPES[number % len(_SHAPES)], color=chosen.get(name, GREY),
            mfc=chosen.get(name, "white"), label=name, zorder=3 if name in chosen else 2,
        )  # fmt: skip
    if log_x:
        ax.set_xscale("log", base=2)
        places = sorted({place for x, _ in curves.values() for place in x})
        ax.set_xticks(places, [numeral(place) for place in places])
        ax.minorticks_off()
    if from_zero:
        ax.set_ylim(bottom=0)
    ax.set_xlabel(x_label)
    ax.set_ylabel(y_label)
    _label_ends(ax, {name: (x[-1], y[-1]) for name, (x, y) in curves.items()})
    return ax


def describe_curves(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], spec: str = ",.0f"
) -> str:
    """Return the values of each curve in words, for an alt text; ``spec`` as in `format`.

    >>> describe_curves({"all": ([1, 2], [9, 7]), "last": ([1, 2], [5, 8])})
    'all 9, 7; last 5, 8'
    """
    values = {
        name: ", ".join(numeral(value, spec) for value in y) for name, (_, y) in curves.items()
    }
    return "; ".join(f"{name} {said}" for name, said in values.items())


def fit_y(ax: Axes, rows: Iterable[Sequence[float]], *, least: float | None = None) -> None:
    """Scale the y axis to whole ticks around these values, with room above for names of curves.

    >>> from mambackpt.draw import sheet, style
    >>> with style():
    ...     _, [ax] = sheet("It grows.", [10])
    ...     fit_y(ax, [[3, 17], [9, 12]], least=0)
    >>> [float(end) for end in ax.get_ylim()]
    [0.0, 25.0]
    """
    values = [value for row in rows for value in row]
    low = min(values) if least is None else least
    top = max(values) + 0.2 * (max(values) - low)
    ticks = MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(low, top)
    ax.set_ylim(ticks[0], ticks[-1])
    ax.set_yticks(ticks)


def _label_ends(ax: Axes, ends: Mapping[str, tuple[float, float]]) -> None:
    """Name each curve to the right of its end, moved apart so that no two names overlap."""
    em = float(mpl.rcParams["font.size"])
    points = {name: ax.transData.transform(end) * 72 / ax.figure.dpi for name, end in ends.items()}
    ordered = sorted(points, key=lambda name: float(points[name][1]))
    heights: list[float] = []
    for name in ordered:
        lowest = heights[-1] + 1.3 * em if heights else -math.inf
        heights.append(max(float(points[name][1]), lowest))
    middle = sum(heights) / len(heights) - sum(float(points[n][1]) for n in ordered) / len(heights)
    right = max(float(point[0]) for point in points.values())
    for name, height in zip(ordered, heights, strict=True):
        x, y = (float(part) for part in points[name])
        offset = (right - x + 0.8 * em, height - middle - y)
        ax.annotate(name, ends[name], offset, textcoords="offset points", va="center")


def name_ends(ax: Axes, ends: Mapping[str, tuple[float, float]]) -> None:
    """Name each curve to the right of its own end; a name moves least, where two would meet.

    >>> from mambackpt.draw import sheet, style
    >>> with style():
    ...     _, [ax] = sheet("2 are near.", [10], right=5)
    ...     name_ends(ax, {"A": (1, 0.5), "B": (1, 0.5), "C": (1, 0.9)})
    >>> sorted(filter(None, (text.get_text() for text in ax.texts)))
    ['A', 'B', 'C']

    Names may have several lines. Call it when the axes have their limits. A name that had to move
    has a leader to its end.
    """
    em = float(mpl.rcParams["font.size"])
    scale = 72 / ax.figure.dpi
    floor = float(ax.bbox.y0) * scale - 0.3 * em
    ups = {name: float(ax.transData.transform(end)[1]) * scale for name, end in ends.items()}
    tall = {name: 1.25 * em * (1 + name.count("\n")) for name in ends}
    groups: list[list[str]] = []
    for name in sorted(ups, key=ups.__getitem__):
        groups.append([name])
        while len(groups) > 1:
            _, top = _span(groups[-2], ups, tall, floor)
            bottom, _ = _span(groups[-1], ups, tall, floor)
            if bottom >= top:
                break
            groups[-2:] = [groups[-2] + groups[-1]]
    for group in groups:
        low, _ = _span(group, ups, tall, floor)
        for name in group:
            moved = low + tall[name] / 2 - ups[name]
            low += tall[name]
            at, aside = ends[name], (1.4 * em, moved)
            ax.annotate(name, at, aside, textcoords="offset points", va="center")
            if abs(moved) > 2:  # a leader of its own: it is no part of the words
                leader = {"arrowstyle": "-", "color": GREY, "shrinkA": 0.0, "shrinkB": 0.0}
                ax.annotate(
                    "", at, (1.2 * em, moved), textcoords="offset points", arrowprops=leader
                )


def _span(
    group: Sequence[str], ups: Mapping[str, float], tall: Mapping[str, float], floor: float
) -> tuple[float, float]:
    """Bottom and top of names that stand on each other around the middle of their ends."""
    middle = sum(ups[name] for name in group) / len(group)
    height = sum(tall[name] for name in group)
    low = max(middle - height / 2, floor)
    return low, low + height


def name_points(
    ax: Axes, points: Mapping[str, tuple[float, float]], line: Sequence[tuple[float, float]]
) -> None:
    """Name each point where the name meets no other and not the line; close points share names.

    >>> from mambackpt.draw import sheet, style
    >>> with style():
    ...     _, [ax] = sheet("Two points are one.", [10])
    ...     name_points(ax, {"A": (0.5, 0.5), "B": (0.5, 0.5), "C": (0.1, 0.9)}, [])
    >>> [text.get_text() for text in ax.texts]
    ['A, B', 'C']

    Call it when the axes have their limits. A marker that is the letter itself would hide another
    at the same place.
    """
    em = float(ax.xaxis.label.get_fontsize())
    scale = 72 / ax.figure.dpi / em

    def place(point: tuple[float, float]) -> tuple[float, float]:
        across, up = ax.transData.transform(point) * scale
        return float(across), float(up)

    groups: dict[tuple[float, float], list[str]] = {}
    for name, point in points.items():
        at = place(point)
        close = (c for c in groups if max(abs(place(c)[0] - at[0]), abs(place(c)[1] - at[1])) < 0.4)
        groups.setdefault(next(close, point), []).append(name)
    taken = [(x - 0.4, y - 0.4, x + 0.4, y + 0.4) for x, y in map(place, groups)]
    for (x, y), (right, top) in pairwise(map(place, line)):
        parts = [number / 12 for number in range(13)]
        path = [(x + part * (right - x), y + part * (top - y)) for part in parts]
        taken += [(x - 0.1, y - 0.1, x + 0.1, y + 0.1) for x, y in path]
    for point, names in groups.items():
        words = ", ".join(names)
        width, (x, y) = text_width(words) + 0.3, place(point)
        spots = [
            (x + (distance if side > 0 else -distance - width), y + up - 0.65)
            for distance, side, up in product((0.6, 1.4), (1, -1), (0, 0.9, -0.9, 1.7, -1.7))
        ]
        boxes = [(left, bottom, left + width, bottom + 1.3) for left, bottom in spots]
        box = min(boxes, key=lambda box: sum(_meet(box, other) for other in taken))
        taken.append(box)
        offset = ((box[0] - x) * em, ((box[1] + box[3]) / 2 - y) * em)
        ax.annotate(words, point, offset, textcoords="offset points", va="center")


def _meet(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """The area that two boxes share."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    return max(width, 0) * max(min(one[3], other[3]) - max(one[1], other[1]), 0)


def draw_heatmap(
    ax: Axes,
    values: Sequence[Sequence[float]],
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    limits: tuple[float, float],
    words: Sequence[Sequence[str]] | None = None,
) -> Axes:
    """Draw a table of numbers with their size as shade, and return the Axes.

    >>> from mambackpt.draw import left_margin, sheet, style
    >>> with style():
    ...     _, [ax] = sheet("Only one is 0.", [8], left=4)
    ...     ax = draw_heatmap(ax, [[0, 3], [2, 1]], rows="AB", columns="xy", limits=(0, 3))
    >>> ax.images[0].get_clim()
    (0.0, 3.0)

    ``limits`` are the shades' ends, never taken from the first data, which may all be 0;
    ``words`` replaces the numbers as text.
    """
    low, high = (float(limit) for limit in limits)
    ax.imshow(np.asarray(values, float), vmin=low, vmax=high, cmap="cividis", aspect="auto")
    ax.set_xticks([at + 0.5 for at in range(len(columns) - 1)], minor=True)
    ax.set_yticks([at + 0.5 for at in range(len(rows) - 1)], minor=True)
    ax.grid(which="minor", color="white", linewidth=1.5)
    for row, line in enumerate(values):
        for at, value in enumerate(line):
            text = numeral(value) if words is None else words[row][at]
            dark = (value - low) > 0.5 * (high - low)
            ax.text(at, row, text, ha="center", va="center", color="black" if dark else "white")
    ax.set_xticks(range(len(columns)), columns)
    ax.set_yticks(range(len(rows)), rows)
    ax.tick_params(which="both", length=0)
    ax.spines[:].set_visible(False)
    return ax


def describe_heatmap(
    rows: Sequence[str], columns: Sequence[str], words: Sequence[Sequence[str]]
) -> str:
    """Return a table of words in a sentence, for an alt text.

    >>> describe_heatmap(["A", "B"], ["x", "y"], [["0", "3"], ["2", "1"]])
    'A: x 0, y 3; B: x 2, y 1'
    """
    cells = (describe_bars(columns, line) for line in words)
    return "; ".join(f"{row}: {said}" for row, said in zip(rows, cells, strict=True))
