"""The figures of exports: the saved timings, a roofline, and instructions, drawn in both media."""

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from mambackpt.bench.compiled import CompiledKernel, static_requests
from mambackpt.bench.export import OURS
from mambackpt.bench.record import Benchmark
from mambackpt.draw.sheet import Drawing, style
from mambackpt.errors import CheckpointValueError
from mambackpt.figures.exports import draw_export_timings, draw_instructions, draw_roofline


@pytest.fixture(scope="module")
def cpu_run(root: Path) -> Benchmark:
    return Benchmark.from_json((root / "notebooks/measurements/cpu.json").read_text())


def texts_fit(drawing: Drawing) -> None:
    figure = drawing.figure
    FigureCanvasAgg(figure).draw()
    shown = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip()]
    assert len(shown) > 8
    for text in shown:
        box = text.get_window_extent()
        assert figure.bbox.x0 <= box.x0, text
        assert box.x1 <= figure.bbox.x1, text
        assert figure.bbox.y0 <= box.y0, text
        assert box.y1 <= figure.bbox.y1, text
    for first, second in itertools.combinations(shown, 2):
        one, other = first.get_window_extent(), second.get_window_extent()
        width = min(one.x1, other.x1) - max(one.x0, other.x0)
        height = min(one.y1, other.y1) - max(one.y0, other.y0)
        assert width <= 0 or height <= 2, (first, second)
    title = figure.get_suptitle().replace("\n", " ")
    assert re.sub(r" \(\d of \d\)$", "", title) == drawing.finding


@pytest.mark.parametrize("medium", ["review", "slide"])
def test_timings_are_drawn_with_the_shares_that_were_measured(cpu_run, medium):
    with style(medium):
        drawing = draw_export_timings(cpu_run, size=64)
        texts_fit(drawing)
    first = cpu_run.timings[0]
    same = [t for t in cpu_run.timings if (t.buffers, t.regime) == ("token-first", first.regime)]
    shares = {t.method: t.ratio for t in same if (t.case, t.size) == ("kimi-k3", 64)}
    assert f"reaches {shares[OURS]:.0%} of" in drawing.finding
    assert f"plain indexing {shares['pool[blocks] = rows']:.0%}." in drawing.finding
    assert all(f"{method} {share:.0%}" in drawing.alt for method, share in shares.items())


@pytest.mark.parametrize("medium", ["review", "slide"])
def test_the_floor_of_a_roofline_is_bytes_over_bandwidth(cpu_run, medium):
    with style(medium):
        drawing = draw_roofline(cpu_run, 4.3e12)
        for page in drawing.pages:
            texts_fit(page)
    curves, floors = [ax for page in drawing.pages for ax in page.figure.axes]
    measured, floor = (bar.get_width() for bar in floors.patches)
    size = max(t.size for t in cpu_run.timings)
    assert floor == pytest.approx(2 * size * 6_512_640 / 4.3e12 * 1e6)
    assert f"{measured / floor:,.0f} times as fast" in drawing.finding
    lines = {line.get_label(): line for line in curves.lines}
    assert set(lines) == {"plain indexing", "export", "one copy"}
    assert set(lines["one copy"].get_ydata()) == {1}, "what the finding compares with"
    assert f"export {lines['export'].get_ydata()[-1]:.2f} times" in drawing.finding


def test_a_slower_export_changes_the_finding(cpu_run):
    slower = replace(
        cpu_run,
        timings=[
            replace(t, median_us=2 * t.median_us, ratio=t.ratio / 2) if t.method == OURS else t
            for t in cpu_run.timings
        ],
    )
    with style():
        assert draw_export_timings(slower).finding != draw_export_timings(cpu_run).finding
        assert draw_roofline(slower, 1e12).finding != draw_roofline(cpu_run, 1e12).finding


def test_what_was_not_timed_is_not_drawn(cpu_run):
    with pytest.raises(CheckpointValueError, match="no timing of 'mamba-1'"):
        draw_export_timings(cpu_run, layer="mamba-1")
    with pytest.raises(CheckpointValueError, match="size is 7 checkpoints; expected one of"):
        draw_export_timings(cpu_run, size=7)
    with pytest.raises(CheckpointValueError, match="no timing of 'kimi-k3', 'other'"):
        draw_roofline(cpu_run, 1e12, buffers="other")


@pytest.mark.parametrize("medium", ["review", "slide"])
def test_instructions_are_compared_target_by_target(medium):
    requests = static_requests(dtypes=[("float32", "float32")])
    counts = {"plain": 200, "tiled": 100}
    compiled = [
        CompiledKernel(
            request,
            programs=4 if request.kernel == "plain" else 2,
            bytes_read=2**20,
            registers=0,
            spills=0,
            instructions=counts[request.kernel] * (3 if request.target == "gfx942" else 1)
            + (100 if (request.kernel, request.target) == ("plain", "gfx942") else 0),
            accesses=(),
            narrow_offsets=0,
            narrow_products=(),
            conversions=(),
        )
        for request in requests
    ]
    with style(medium):
        drawing = draw_instructions(compiled)
        texts_fit(drawing)
    # 4 x 200 against 2 x 100; on gfx942 4 x 700 against 2 x 300, cut to whole times
    assert "takes 4 to 4 times fewer" in drawing.finding
    assert "sm_80, ours 800, sm_80, plain shape" in drawing.alt
    assert "gfx942, plain shape 11,200" in drawing.alt
