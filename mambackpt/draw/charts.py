"""Charts: bars, timings, curves and heatmaps with direct labels, on an Axes of yours."""

import math
from collections.abc import Mapping, Sequence
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
    said = [f"{value:,.6g}" for value in values] if words is None else list(words)
    line = float(mpl.rcParams["lines.linewidth"])
    em = float(mpl.rcParams["font.size"])
    for row, (value, text) in enumerate(zip(values, said, strict=True)):
        chosen = row in highlight
        ax.barh(
            row, value, 0.62, color=tint(STATE, 0.45) if chosen else CHUNKS[1],
            edgecolor=STATE if chosen else "none", linewidth=0.6 * line,
        )  # fmt: skip
        end = value
        if bands:
            ax.plot(bands[row], [row, row], color=INK, linewidth=0.8 * line, solid_capstyle="butt")
            end = max(value, bands[row][1])
        ax.annotate(
            text, (end, row), (0.5 * em, -0.05 * em), textcoords="offset points", va="center"
        )
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
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    ax.set_xlabel(unit)
    return ax


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
        ax.set_xticks(places, [f"{place:,.6g}" for place in places])
        ax.minorticks_off()
    if from_zero:
        ax.set_ylim(bottom=0)
    ax.set_xlabel(x_label)
    ax.set_ylabel(y_label)
    _label_ends(ax, {name: (x[-1], y[-1]) for name, (x, y) in curves.items()})
    return ax


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
            text = f"{value:,.6g}" if words is None else words[row][at]
            dark = (value - low) > 0.5 * (high - low)
            ax.text(at, row, text, ha="center", va="center", color="black" if dark else "white")
    ax.set_xticks(range(len(columns)), columns)
    ax.set_yticks(range(len(rows)), rows)
    ax.tick_params(which="both", length=0)
    ax.spines[:].set_visible(False)
    return ax
