"""Primitives: structure of what is drawn, not its pixels."""

import itertools
import json

import matplotlib as mpl
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text

from mambackpt import CacheGeometry, CheckpointValueError, Reason, explain
from mambackpt.draw.charts import (
    apart,
    bars_height,
    draw_bars,
    draw_curves,
    draw_heatmap,
    draw_timings,
)
from mambackpt.draw.lanes import (
    Column,
    Lane,
    Lanes,
    Mark,
    _describe_columns,
    draw_lanes,
    draw_legend,
    lanes_height,
    legend_of,
    planned_lane,
    scheduled_lane,
)
from mambackpt.draw.sheet import left_margin, page_slices, sheet, sheets, style, text_width, wrap

K3 = CacheGeometry(1536, 1536, 16, 1536)


def an_axes(height: float = 20, *, left: float = 8, right: float = 1) -> Axes:
    with style():
        _, [ax] = sheet("1 finding.", [height], left=left, right=right)
    return ax


def words_on(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.findobj(Text) if text.get_visible() and text.get_text()]


def test_the_style_ends_with_its_context_and_ignores_the_users_settings() -> None:
    with mpl.rc_context({"font.size": 31, "axes.facecolor": "pink"}):
        before = dict(mpl.rcParams)
        with style("slide"):
            assert mpl.rcParams["font.size"] == 14
            assert mpl.rcParams["axes.facecolor"] == "white"
            assert mpl.rcParams["svg.fonttype"] == "none"
            assert mpl.rcParams["pdf.fonttype"] == 42
            assert mpl.rcParams["image.cmap"] == "cividis"
            cycle = [entry["color"] for entry in mpl.rcParams["axes.prop_cycle"]]
            petroff = [mpl.colors.to_hex(c) for c in mpl.color_sequences["petroff6"]]
            assert [f"#{colour.lstrip('#')}" for colour in cycle] == petroff
        assert dict(mpl.rcParams) == before


def test_an_error_inside_the_style_ends_it_too() -> None:
    before = dict(mpl.rcParams)
    with pytest.raises(ZeroDivisionError), style("slide"):
        raise ZeroDivisionError
    assert dict(mpl.rcParams) == before


def test_lanes_return_their_axes_and_name_what_they_show() -> None:
    ax = an_axes(lanes_height(1))
    with style():
        assert draw_lanes(ax, [planned_lane(8000, 8000, K3, label="a prompt")]) is ax
    words = words_on(ax)
    for expected in ("a prompt", "7,680", "8,000", "8,000 tokens", "0 null", "4 checkpoint"):
        assert expected in words
    assert "5 running" in words
    assert "key 7,680" in words


def test_a_checkpoint_is_drawn_in_the_column_before_the_running_one() -> None:
    """P05, vllm PR #53614: 1,600 lies in column 1, not 0, and is keyed by its own position."""
    lane = planned_lane(3602, 3602, CacheGeometry(1600, 1600, 16, 1600, True))
    assert lane.columns[0] == Column()
    assert lane.columns[1] == Column("checkpoint", held=1600, key=1600)
    assert lane.marks == (Mark(1600, "checkpoint", 1),)


def test_only_one_checkpoint_is_drawn_for_a_long_chunk() -> None:
    """P10, b12x issue #340: 256 to 3,584 have no state; their columns are null."""
    lane = planned_lane(4096, 4096, CacheGeometry(256, 256, 16, 256))
    assert [c.role for c in lane.columns] == ["null"] * 14 + ["checkpoint", "running"]
    assert lane.columns[14].key == 3840


@given(
    seq_len=st.integers(1, 400),
    query_len=st.integers(1, 400),
    H=st.sampled_from([1, 4, 16]),
    per_block=st.sampled_from([1, 2, 4]),
    A=st.sampled_from([None, 1, 16]),
    drop=st.booleans(),
)
def test_a_planned_lane_agrees_with_the_planner(
    seq_len: int, query_len: int, H: int, per_block: int, A: int | None, drop: bool
) -> None:
    geometry = CacheGeometry(H, H * per_block, A, H, drop)
    query_len = min(query_len, seq_len)
    [decision] = explain([seq_len], [query_len], geometry)
    lane = planned_lane(seq_len, query_len, geometry)
    assert len(lane.columns) == -(-seq_len // geometry.M)
    assert lane.columns[-1] == Column("running", held=seq_len)
    kept = [n for n, column in enumerate(lane.columns) if column.role == "checkpoint"]
    [mark] = lane.marks
    assert mark.position == decision.position
    if decision.reason is Reason.ACCEPTED:
        assert kept == [decision.column] == [mark.column]
        assert lane.caption == ""
    else:
        assert kept == []
        assert (mark.kind, mark.column) == ("declined", None)
        assert lane.caption == decision.sentence


def test_a_state_that_a_later_chunk_overwrites_is_not_drawn_as_kept() -> None:
    lane = scheduled_lane([100, 120], CacheGeometry(4, 64, None, 4))
    assert _describe_columns(lane.columns) == "column 1: running"
    assert lane.marks == ()
    assert lane.note == "2 forwards\n100 + 20"


def test_a_column_that_holds_another_state_is_an_error_in_shape_and_words() -> None:
    wrong = Column("previous", held=96, key=128, right=False)
    ax = an_axes(lanes_height(1))
    with style():
        draw_lanes(ax, [Lane("B", 64, 96, (), (Column(), wrong))])
    assert "key 128 ≠ 96" in words_on(ax)
    crossed = [c for c in ax.collections if c.get_hatch() == "xxxx"]
    assert [len(c.get_paths()) for c in crossed] == [1]
    assert _describe_columns([wrong]) == "column 0: previous, key 128 (holds 96 tokens)"


def test_roles_differ_in_more_than_their_colour() -> None:
    """Dash, hatch, words, and markers of different shapes: grey print keeps them apart."""
    row = [Column(), Column("checkpoint", 64, 64), Column("running", 100), Column("running")]
    ax = an_axes(lanes_height(1))
    with style():
        draw_lanes(ax, [Lane("A", 64, 0, (100,), tuple(row), (Mark(64, "checkpoint", 1),))])
    hatched = [c for c in ax.collections if c.get_hatch() == "////"]
    assert [len(c.get_paths()) for c in hatched] == [1]
    shapes = [line.get_marker() for line in ax.lines]
    assert len(shapes) == len(set(zip(shapes, (line.get_mfc() for line in ax.lines), strict=True)))


def test_narrow_columns_get_a_line_of_words_instead() -> None:
    ax = an_axes(lanes_height(1))
    with style():
        draw_lanes(ax, [planned_lane(30000, 30000, CacheGeometry(528, 528, 16, 528))])
    assert "column 55: checkpoint, key 29,568 · column 56: running" in words_on(ax)


def test_a_redraw_reuses_every_artist() -> None:
    """A new rectangle per block was ten times too slow for a slider."""
    ax = an_axes(lanes_height(2))
    with style():
        lanes = Lanes(ax)
    lanes.update([planned_lane(9000, 9000, K3), planned_lane(8000, 8000, K3)])
    before = [id(artist) for artist in (*ax.collections, *ax.lines, *ax.texts)]
    for tokens in (8000, 100, 8999):
        lanes.update([planned_lane(tokens, tokens, K3)])
        after = [id(artist) for artist in (*ax.collections, *ax.lines, *ax.texts)]
        assert after[: len(before)] == before
        assert len(after) <= len(before) + 2
    assert sum(isinstance(artist, PolyCollection) for artist in ax.collections) == 4


def test_a_redraw_leaves_nothing_of_the_last_one() -> None:
    ax, fresh = an_axes(lanes_height(1)), an_axes(lanes_height(1))
    with style():
        lanes = Lanes(ax)
        lanes.update([planned_lane(30000, 30000, CacheGeometry(64, 64, 16, 64), label="long")])
        lanes.update([planned_lane(8000, 8000, K3, label="short")])
        draw_lanes(fresh, [planned_lane(8000, 8000, K3, label="short")])
    assert words_on(ax) == words_on(fresh)
    pictures = []
    for axes in (ax, fresh):
        canvas = axes.figure.canvas
        assert isinstance(canvas, FigureCanvasAgg)
        canvas.draw()
        pictures.append(np.asarray(canvas.buffer_rgba()))
    assert np.array_equal(*pictures)


@pytest.mark.parametrize("sizes", [(8000, 64), (300, 16), (30000, 528)])
def test_labels_of_a_lane_do_not_overlap_and_stay_inside(sizes: tuple[int, int]) -> None:
    tokens, block = sizes
    geometry = CacheGeometry(16, block // 16 * 16, 16, 16)
    for start in (0, 16, tokens // 2 // 16 * 16):
        ax = an_axes(lanes_height(1, caption_lines=2))
        with style():
            lane = planned_lane(tokens, tokens - start, geometry, label="query", sentence=True)
            draw_lanes(ax, [lane], caption_lines=2)
        assert isinstance(ax.figure, Figure)
        FigureCanvasAgg(ax.figure).draw()
        shown = [t for t in ax.figure.findobj(Text) if t.get_visible() and t.get_text()]
        boxes = [(t.get_text(), t.get_window_extent()) for t in shown]
        for words, box in boxes:
            assert box.x0 >= 0, words
            assert box.x1 <= ax.figure.bbox.x1, words
        for (words, a), (other, b) in itertools.combinations(boxes, 2):
            across = min(a.x1, b.x1) - max(a.x0, b.x0)
            down = min(a.y1, b.y1) - max(a.y0, b.y0)
            assert across <= 0 or down <= 2, (words, other)


def test_bars_start_at_zero_and_say_their_values() -> None:
    ax = an_axes(bars_height(2))
    with style():
        assert draw_bars(ax, ["A", "B"], [528, 11392], unit="tokens", highlight=[1]) is ax
    assert ax.get_xlim()[0] == 0
    assert [bar.get_x() for bar in ax.patches] == [0, 0]  # type: ignore[attr-defined]
    assert {"A", "B", "528", "11,392", "tokens"} <= set(words_on(ax))
    with pytest.raises(CheckpointValueError, match="one value of at least 0 per label"):
        draw_bars(ax, ["A"], [1, 2], unit="tokens")


TIMINGS = {
    "environment": {"device": "cpu"},
    "timings": [
        {
            "case": "kimi-k3",
            "buffers": "token-first",
            "size": 8,
            "regime": "with launch",
            "method": method,
            "median_us": median,
            "low_us": median - 1,
            "high_us": median + 5,
            "ratio": ratio,
        }
        for method, median, ratio in (("index_copy_", 40.0, 0.5), ("export", 20.0, 1.0))
    ],
}


def test_timings_show_median_band_and_share() -> None:
    ax = an_axes(bars_height(2))
    chosen = {"case": "kimi-k3", "buffers": "token-first", "size": 8, "regime": "with launch"}
    with style():
        assert draw_timings(ax, TIMINGS, **chosen) is ax
    words = words_on(ax)
    assert words.index("export") < words.index("index_copy_")
    assert "20 µs, 1.00 ×" in words
    [bands] = ax.collections
    assert [segment[:, 0].tolist() for segment in bands.get_segments()] == [[19, 25], [39, 45]]
    with pytest.raises(CheckpointValueError, match="no timing has"):
        draw_timings(ax, TIMINGS, **(chosen | {"size": 9}))


def test_a_benchmark_written_by_the_kit_can_be_drawn() -> None:
    bench = pytest.importorskip("mambackpt.bench")
    timing = bench.Timing("planner", "lists", 4096, "call", "numpy", 9, 8, 12, 5, 0, 3.1)
    environment = bench.record_environment("cpu", threads=[1])
    made = bench.Benchmark("planner", "plain loop", environment, [timing])
    ax = an_axes(bars_height(1))
    with style():
        draw_timings(
            ax,
            json.loads(made.to_json()),
            case="planner",
            buffers="lists",
            size=4096,
            regime="call",
        )
    assert "9 µs, 3.10 ×" in words_on(ax)


def test_curves_are_labelled_at_their_ends_without_overlap() -> None:
    x = [512, 1024, 2048, 4096]
    curves = {f"rule {n}": (x, [50, 55 + n, 58, 57 + n / 100]) for n in range(5)}
    ax = an_axes(16, left=6, right=10)
    with style():
        draw_curves(
            ax, curves, x_label="block", y_label="%", log_x=True, highlight={"rule 1": "C0"}
        )
    assert isinstance(ax.figure, Figure)
    FigureCanvasAgg(ax.figure).draw()
    labels = [text for text in ax.texts if text.get_text()]  # a leader is an annotation too
    boxes = [text.get_window_extent() for text in labels]
    assert [text.get_text() for text in labels] == list(curves)
    for a, b in itertools.combinations(boxes, 2):
        assert min(a.y1, b.y1) - max(a.y0, b.y0) <= 2
    assert max(box.x1 for box in boxes) <= ax.figure.bbox.x1
    markers = [line.get_marker() for line in ax.lines]
    assert len(set(markers)) == 5, "never colour alone"
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["512", "1,024", "2,048", "4,096"]


def labels_on(ax: Axes) -> dict[str, tuple[float, float]]:
    """Each label's middle and its line's end, from the bottom in em."""
    canvas = ax.figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    canvas.draw()
    em, found = 9 * ax.figure.dpi / 72, {}
    for text in ax.texts:
        if isinstance(text, Annotation) and text.get_text():
            box = text.get_window_extent()
            end = ax.transData.transform(text.xy)[1]
            found[text.get_text()] = ((box.y0 + box.y1) / 2 / em, end / em)
    return found


def test_a_label_alone_stands_at_its_lines_end() -> None:
    """One mean shift for all labels moved those that touched nobody by many points."""
    x = [1, 2]
    curves = {"low": (x, [0, 0]), "one": (x, [9.9, 9.9]), "two": (x, [10, 10])}
    ax = an_axes(20, left=6, right=8)
    with style():
        draw_curves(ax, curves, x_label="x", y_label="y")
    labels = labels_on(ax)
    low, end = labels["low"]
    assert low == pytest.approx(end, abs=0.15)
    moved = [middle - end for middle, end in (labels["one"], labels["two"])]
    assert moved[0] == pytest.approx(-moved[1], abs=0.1), "both share the way"
    leaders = [t for t in ax.texts if isinstance(t, Annotation) and not t.get_text()]
    assert len(leaders) == 2, "who moved is led to its line"


def test_lines_that_lie_on_each_other_are_named_once_together() -> None:
    x = [1, 2, 3]
    curves = {
        "last": (x, [1, 2, 3]),
        "last+junction": (x, [1, 2, 3]),
        "all": (x, [9, 9, 9]),
        "nearly": (x, [9, 9, 9.001]),
    }
    ax = an_axes(20, left=6, right=14)
    with style():
        draw_curves(ax, curves, x_label="x", y_label="y", highlight={"last+junction": "#964a8b"})
    assert set(labels_on(ax)) == {"last = last+junction", "all \N{ALMOST EQUAL TO} nearly"}
    marker = {line.get_label(): line.get_marker() for line in ax.lines}
    assert marker["last"] == marker["last+junction"], "one line, one marker"
    assert [mpl.colors.to_hex(mark.get_edgecolor()[0]) for mark in ax.collections] == [
        "#964a8b",
        "#9c9ca1",
    ]


@given(
    st.lists(st.floats(0, 100), min_size=1, max_size=8).map(sorted),
    st.floats(0.5, 5),
)
def test_labels_that_are_moved_apart_keep_their_order_and_move_least(
    wanted: list[float], height: float
) -> None:
    places = apart(wanted, [height] * len(wanted), (-1000, 1000))
    for one, other in itertools.pairwise(places):
        assert other - one >= height - 1e-9
    # Least squares: no pool of neighbours gains by moving together.
    for start, end in itertools.combinations(range(len(wanted) + 1), 2):
        free_below = start == 0 or places[start] - places[start - 1] > height + 1e-6
        free_above = end == len(wanted) or places[end] - places[end - 1] > height + 1e-6
        if free_below and free_above:
            moved = [place - want for place, want in zip(places, wanted, strict=True)][start:end]
            assert sum(moved) == pytest.approx(0, abs=1e-6)


def test_labels_stay_inside_where_there_is_room() -> None:
    assert apart([0, 0], [2, 2], (1, 9)) == [1, 3]
    assert apart([9, 9], [2, 2], (1, 9)) == [7, 9]


def test_a_slide_is_split_into_pages_of_about_as_many_rows() -> None:
    with style("slide"):
        assert page_slices("A finding.", [9.0] * 5) == [slice(0, 2), slice(2, 4), slice(4, 6)]
        assert page_slices("A finding.", [99.0, 99.0]) == [slice(0, 1), slice(1, 2)]
        pages = sheets("A finding.", [9.0] * 5, note="A note.")
        assert len(pages.axes) == 5
        drawing = pages.drawing("A finding.", "An alt text.")
        assert [page.finding for page in drawing.pages] == ["A finding."] * len(pages.figures)
        [tall] = sheets("A finding.", [99.0], note="A note.").figures
        assert tall.get_figheight() == pytest.approx(5.6), "lowered to what a page holds"
    with style():
        assert page_slices("A finding.", [9.0] * 5) == [slice(0, 5)]


def test_a_legend_names_what_the_lanes_show_and_nothing_else() -> None:
    planned = planned_lane(8000, 8000, K3)
    copied = Lane("B", 64, 96, (), (Column(), Column("copy", 96)), (Mark(96, "hit", 1),), 110)
    assert legend_of([planned]) == ["checkpoint"]
    assert legend_of([planned, copied]) == ["checkpoint", "hit", "copy"]
    ax = an_axes(2)
    with style():
        draw_legend(ax, ["hit", "copy"])
    assert words_on(ax) == ["hit", "private copy"]


def test_shades_are_not_frozen_by_data_that_is_all_zero() -> None:
    """F01, matplotlib #8467: limits chosen from a first array of zeros never change again."""
    ax = an_axes(10)
    with style():
        draw_heatmap(ax, np.zeros((4, 4)), rows="abcd", columns="wxyz", limits=(0, 15))
    [image] = ax.images
    assert image.get_clim() == (0, 15)
    canvas = ax.figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    frames = []
    for data in (np.zeros((4, 4)), np.arange(16).reshape(4, 4)):
        image.set_data(data)
        assert image.get_clim() == (0, 15)
        canvas.draw()
        frames.append(np.array(canvas.buffer_rgba()))
    assert (frames[0] != frames[1]).any(axis=2).mean() > 0.2


@given(
    st.lists(st.sampled_from(["a", "block", "checkpoint", "1,584"]), min_size=1).map(" ".join),
    st.floats(3, 30),
)
def test_wrapped_lines_keep_the_words_and_the_width(words: str, width: float) -> None:
    lines = wrap(words, width).split("\n")
    assert " ".join(lines) == words
    for line in lines:
        assert text_width(line) <= width or " " not in line.strip()


def test_a_sheet_has_the_heights_it_was_asked_for() -> None:
    with style():
        figure, axes = sheet("A finding of 3 words. " * 12, [5, 10], left=6)
    em = 9 / 72
    heights = [ax.get_position().height * figure.get_figheight() for ax in axes]
    assert heights == pytest.approx([5 * em, 10 * em])
    assert axes[0].get_position().y0 > axes[1].get_position().y1
    assert figure.get_suptitle().count("\n") >= 2
    assert left_margin(["ab\nlonger"]) == left_margin(["longer"])
