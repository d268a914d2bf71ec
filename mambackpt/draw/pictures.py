"""A drawing in one call: a finding and data in, a headed sheet with its alt text out."""

from collections.abc import Mapping, Sequence

from mambackpt.draw.charts import (
    bars_height,
    describe_bars,
    describe_curves,
    describe_heatmap,
    draw_bars,
    draw_curves,
    draw_heatmap,
)
from mambackpt.draw.lanes import (
    Lane,
    describe_full_legend,
    describe_lanes,
    draw_full_legend,
    draw_lanes,
    full_legend_height,
    lanes_height,
)
from mambackpt.draw.sheet import Drawing, left_margin, sheet, style


def bars_picture(
    finding: str,
    bars: Mapping[str, float],
    *,
    unit: str,
    highlight: Sequence[int] = (),
    medium: str = "review",
) -> Drawing:
    """Return one bar per name, headed by the finding.

    >>> bars_picture("B is twice A.", {"A": 528, "B": 1056}, unit="tokens").alt
    'B is twice A. In tokens: A 528, B 1,056.'

    ``highlight`` counts the bars that the finding is about, from 0.
    """
    labels, values = list(bars), list(bars.values())
    with style(medium):
        figure, [ax] = sheet(finding, [bars_height(len(bars))], left=left_margin(labels))
        draw_bars(ax, labels, values, unit=unit, highlight=highlight)
    words = [f"{value:,.0f}" for value in values]
    return Drawing(figure, finding, f"{finding} In {unit}: {describe_bars(labels, words)}.")


def curves_picture(
    finding: str,
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    x_label: str,
    y_label: str,
    highlight: Mapping[str, str] | None = None,
    log_y: bool = False,
    x_limits: tuple[float, float] | None = None,
    medium: str = "review",
) -> Drawing:
    """Return one line per name, headed by the finding; the y axis begins at 0 or is logarithmic.

    >>> curves_picture("It falls.", {"a": ([1, 2], [9, 7])}, x_label="x", y_label="y").alt
    'It falls. y over x from 1 to 2: a 9, 7.'

    ``x_limits`` may run backwards.
    """
    with style(medium):
        figure, [ax] = sheet(finding, [13], left=5, right=8)
        if log_y:  # before the labels are placed, and the limits kept
            ax.set_yscale("log")
        draw_curves(
            ax,
            curves,
            x_label=x_label,
            y_label=y_label,
            highlight=highlight,
            from_zero=not log_y,
        )
        ax.xaxis.set_major_formatter("{x:,.0f}")
        if x_limits:
            ax.set_xlim(x_limits)
    first = next(iter(curves.values()))[0]
    ends = f"{first[0]:,} to {first[-1]:,}"
    said = describe_curves(curves, ",.3g" if log_y else ",.0f")
    return Drawing(figure, finding, f"{finding} {y_label} over {x_label} from {ends}: {said}.")


def lanes_picture(finding: str, lanes: Sequence[Lane], *, medium: str = "review") -> Drawing:
    """Return lanes below each other, headed by the finding.

    >>> from mambackpt.draw.lanes import planned_lane
    >>> from mambackpt.geometry import CacheGeometry
    >>> lane = planned_lane(12, 12, CacheGeometry(2, 4, 1, 2), label="H = 2")
    >>> lanes_picture("One lane.", [lane]).alt
    'One lane. H = 2: column 1: checkpoint, key 10    column 2: running.'
    """
    with style(medium):
        left = left_margin(lane.label for lane in lanes)
        said = 2 if any(lane.caption for lane in lanes) else 0
        height = lanes_height(len(lanes), caption_lines=said)
        figure, [ax] = sheet(finding, [height], left=left)
        draw_lanes(ax, lanes, caption_lines=said)
    return Drawing(figure, finding, f"{finding} {describe_lanes(lanes)}")


def heatmap_picture(
    finding: str,
    values: Sequence[Sequence[float]],
    words: Sequence[Sequence[str]],
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    colour: str | None = None,
    medium: str = "review",
) -> Drawing:
    """Return a table of words, shaded by their values, headed by the finding.

    >>> names = {"rows": ["A"], "columns": ["x", "y"]}
    >>> heatmap_picture("Only x.", [[1, 0]], [["1 of 2", "none"]], **names).alt
    'Only x. A: x 1 of 2, y none.'
    """
    most = max(max(row) for row in values)
    with style(medium):
        figure, [ax] = sheet(finding, [2.2 * len(rows)], left=left_margin(rows))
        names = {"rows": rows, "columns": columns}
        draw_heatmap(ax, values, limits=(0, most), words=words, colour=colour, **names)
    return Drawing(figure, finding, f"{finding} {describe_heatmap(rows, columns, words)}.")


def legend_picture(finding: str = "What the marks mean.", *, medium: str = "review") -> Drawing:
    """Return every mark and every kind of column beside what it means.

    >>> legend_picture().alt[:29]
    'What the marks mean. diamond:'
    """
    with style(medium):
        figure, [ax] = sheet(finding, [full_legend_height()], gap=0.4)
        draw_full_legend(ax)
    return Drawing(figure, finding, f"{finding} {describe_full_legend()}.")
