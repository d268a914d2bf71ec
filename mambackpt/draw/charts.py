"""Charts: bars, timings, curves and heatmaps with direct labels, on an Axes of yours."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator
from matplotlib.transforms import offset_copy

from mambackpt.draw.sheet import (
    CHUNKS,
    GREY,
    INK,
    PALE,
    STATE,
    em_wide,
    is_slide,
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
    ticks: int = 5,
) -> Axes:
    """Draw one horizontal bar per label, from 0, with its value beside it, and return the Axes.

    >>> from mambackpt.draw import left_margin, sheet, style
    >>> with style():
    ...     _, [ax] = sheet("B is longer.", [bars_height(2)], left=left_margin("AB"))
    ...     ax = draw_bars(ax, ["A", "B"], [528, 1056], unit="tokens", highlight=[1])

    ``words`` replaces the values as text; ``highlight`` gives rows that the finding is about the
    state's colour and an edge; ``bands`` draws a line from low to high per bar; the axis has about
    so many ``ticks``. The values are in ``unit``, which becomes the axis label. Raises
    CheckpointValueError for values that are negative or whose number is not that of the labels.
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
    ax.set_xticks([t for t in MaxNLocator(ticks).tick_values(0, longest) if 0 <= t <= longest])
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
    """Return the height of so many bars in em; a slide has them closer."""
    return (1.7 if is_slide() else 1.9) * rows


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
    curve has markers of its own, which its label carries. Curves that lie on each other are named
    once, together, with "=" where they are equal and "≈" where they cannot be told apart. The axes
    keep the limits that they then have; leave a right margin for the labels. Raises
    CheckpointValueError without curves.
    """
    if not curves:
        raise CheckpointValueError(
            "curves is empty; expected at least one. Try a mapping of names to (x, y)."
        )
    chosen = highlight or {}
    lines = {}
    for number, (name, (x, y)) in enumerate(curves.items()):
        [lines[name]] = ax.plot(
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
    # From here on the limits stay: the labels are placed for them.
    ax.set(xlim=ax.get_xlim(), ylim=ax.get_ylim())
    name_lines(ax, _coinciding(ax, lines))
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


def fit_y(
    ax: Axes,
    rows: Iterable[Sequence[float]],
    *,
    least: float | None = None,
    headroom: float = 0.2,
) -> None:
    """Scale the y axis to whole ticks around these values, with room above for names of curves.

    >>> from mambackpt.draw import sheet, style
    >>> with style():
    ...     _, [ax] = sheet("It grows.", [10])
    ...     fit_y(ax, [[3, 17], [9, 12]], least=0)
    >>> [float(end) for end in ax.get_ylim()]
    [0.0, 25.0]

    ``headroom`` is that room, as a share of the values' range. A marker on the uppermost tick is
    not cut.
    """
    values = [value for row in rows for value in row]
    low = min(values) if least is None else least
    top = max(values) + headroom * (max(values) - low)
    ticks = MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(low, top)
    spare = 0.04 * (ticks[-1] - ticks[0]) * (max(values) >= ticks[-1])
    ax.set_ylim(ticks[0], ticks[-1] + spare)
    ax.set_yticks(ticks)


def _coinciding(ax: Axes, lines: Mapping[str, Line2D]) -> dict[str, Line2D]:
    """The lines by name; those that lie on each other under one name, with one marker."""
    em = float(mpl.rcParams["font.size"])
    paths = {
        name: ax.transData.transform(_path(line)) * 72 / ax.figure.dpi
        for name, line in lines.items()
    }
    groups: list[list[str]] = []
    for name, path in paths.items():
        for group in groups:
            other = paths[group[0]]
            near = float(mpl.rcParams["lines.linewidth"]) / 2
            if path.shape == other.shape and np.abs(path - other).max() <= near:
                group.append(name)
                break
        else:
            groups.append([name])
    figure = ax.get_figure(root=True)
    assert figure is not None
    room = (1 - ax.get_position().x1) * figure.get_figwidth() * 72 / em - 2
    named = {}
    for group in groups:
        top = max((lines[name] for name in group), key=lambda line: line.get_zorder())
        words = group[0]
        for name in group:
            lines[name].set(marker=top.get_marker(), markerfacecolor=top.get_markerfacecolor())
        for name in group[1:]:
            same = np.array_equal(_path(lines[name]), _path(lines[group[0]]))
            sign = "=" if same else "\N{ALMOST EQUAL TO}"
            fits = "\n" not in words + name and text_width(f"{words} {sign} {name}") <= room
            words += f"{' ' if fits else chr(10)}{sign} {name}"
        named[words] = top
    return named


def _path(line: Line2D) -> Any:
    """The points of a line, in data."""
    return np.asarray(line.get_xydata())


def name_lines(ax: Axes, lines: Mapping[str, Line2D]) -> None:
    """Name each line to the right of its end, beside its mark; names that would touch move apart.

    >>> from mambackpt.draw import sheet, style
    >>> with style():
    ...     _, [ax] = sheet("2 are near.", [10], right=5)
    ...     lines = {name: ax.plot([0, 1], [0, y])[0] for name, y in (("A", 0.5), ("B", 0.5))}
    ...     name_lines(ax, lines)
    >>> sorted(filter(None, (text.get_text() for text in ax.texts)))
    ['A', 'B']

    Names may have several lines. One that had to move is led to its line's end; the mark is the
    line's marker, or a piece of a line without. Call it when the axes have their limits.
    """
    em = float(mpl.rcParams["font.size"])
    ends = {name: _path(line)[-1] for name, line in lines.items()}
    points = {name: ax.transData.transform(end) * 72 / ax.figure.dpi for name, end in ends.items()}
    ordered = sorted(points, key=lambda name: float(points[name][1]))
    box = np.asarray(ax.bbox.extents) * 72 / ax.figure.dpi
    places = apart(
        [float(points[name][1]) for name in ordered],
        [1.25 * em * (name.count("\n") + 1) for name in ordered],
        (float(box[1]), float(box[3])),
    )
    right = max(float(point[0]) for point in points.values())
    for name, place in zip(ordered, places, strict=True):
        x, y = (float(part) for part in points[name])
        across, up = right - x + 0.9 * em, place - y
        line, end = lines[name], ends[name]
        if math.hypot(across - 0.9 * em, up) > 0.3 * em:
            # From the line's marker to the label's.
            shrink = 0.6 * float(line.get_markersize())
            leader = {"arrowstyle": "-", "color": GREY, "shrinkA": shrink, "shrinkB": shrink}
            leader |= {"linewidth": 0.4 * float(mpl.rcParams["lines.linewidth"])}
            ax.annotate(
                "",
                (end[0], end[1]),
                (across, up),
                textcoords="offset points",
                arrowprops=leader,
                zorder=1,
            )
        _draw_mark(ax, line, (float(end[0]), float(end[1])), (across, up))
        offset = (across + 0.8 * em, up)
        at = (float(end[0]), float(end[1]))
        ax.annotate(name, at, offset, textcoords="offset points", va="center")


def _draw_mark(
    ax: Axes, line: Line2D, end: tuple[float, float], offset: tuple[float, float]
) -> None:
    """The marker of a line, so many points from its end; a short piece of a line without one."""
    transform = offset_copy(ax.transData, ax.get_figure(root=True), *offset, "points")
    where: dict[str, Any] = {"transform": transform, "clip_on": False, "zorder": 4}
    size, marker = float(line.get_markersize()), str(line.get_marker())
    x, y = end
    if marker in ("None", "none", ""):
        em = float(mpl.rcParams["font.size"])
        width, dash = float(line.get_linewidth()), line.get_linestyle()
        where |= {"linestyles": [dash], "linewidths": width, "s": (1.2 * em) ** 2}
        ax.scatter([x], [y], marker="_", color=line.get_color(), **where)
        return
    where |= {"color": line.get_color(), "facecolor": line.get_markerfacecolor()}
    ax.scatter([x], [y], marker=marker, s=0.8 * size**2, **where)


def apart(
    wanted: Sequence[float], heights: Sequence[float], within: tuple[float, float]
) -> list[float]:
    """Return places as near to the wanted ones as labels of these heights allow, none overlapping.

    >>> apart([1, 5, 5], [1, 1, 1], (0, 10))
    [1.0, 4.5, 5.5]

    Least squares: those that touch nobody stay, those that would touch share the way. ``wanted``
    ascends; middles stay ``within`` these ends where there is room.
    """
    steps = [0.0, *((one + other) / 2 for one, other in pairwise(heights))]
    shifts = list(accumulate(steps))
    # What is left is to find the nearest ascending numbers: pool neighbours that are out of order.
    pools: list[tuple[float, int]] = []
    for place, shift in zip(wanted, shifts, strict=True):
        mean, size = place - shift, 1
        while pools and pools[-1][0] > mean:
            before, count = pools.pop()
            mean, size = (before * count + mean * size) / (count + size), count + size
        pools.append((mean, size))
    low, high = within[0], within[1] - shifts[-1]
    level = [max(min(mean, high), low) for mean, size in pools for _ in range(size)]
    return [float(place + shift) for place, shift in zip(level, shifts, strict=True)]


def draw_heatmap(
    ax: Axes,
    values: Sequence[Sequence[float]],
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    limits: tuple[float, float],
    words: Sequence[Sequence[str]] | None = None,
    colour: str | None = None,
) -> Axes:
    """Draw a table of numbers with their size as shade, and return the Axes.

    >>> from mambackpt.draw import left_margin, sheet, style
    >>> with style():
    ...     _, [ax] = sheet("Only one is 0.", [8], left=4)
    ...     ax = draw_heatmap(ax, [[0, 3], [2, 1]], rows="AB", columns="xy", limits=(0, 3))
    >>> ax.images[0].get_clim()
    (0.0, 3.0)

    ``limits`` are the shades' ends, never taken from the first data, which may all be 0;
    ``words`` replaces the numbers as text. Brighter is more, everywhere; ``colour`` shades from
    white to one of the kit's instead: numbers of errors take the error's.
    """
    low, high = (float(limit) for limit in limits)
    shades: Any = "cividis"
    if colour:
        shades = LinearSegmentedColormap.from_list("shades", [(1.0, 1.0, 1.0), tint(colour, 0.6)])
    ax.imshow(np.asarray(values, float), vmin=low, vmax=high, cmap=shades, aspect="auto")
    ax.set_xticks([at + 0.5 for at in range(len(columns) - 1)], minor=True)
    ax.set_yticks([at + 0.5 for at in range(len(rows) - 1)], minor=True)
    ax.grid(which="minor", color=PALE if colour else "white", linewidth=1.5)
    for row, line in enumerate(values):
        for at, value in enumerate(line):
            text = numeral(value) if words is None else words[row][at]
            bright = bool(colour) or (value - low) > 0.5 * (high - low)
            ax.text(at, row, text, ha="center", va="center", color="black" if bright else "white")
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
