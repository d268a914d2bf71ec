"""The figures of notebook 03: their numbers are those of the tables they are given."""

import re

import matplotlib as mpl
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from mambackpt import PRESETS, CheckpointValueError
from mambackpt.draw import MEDIA, Drawing
from mambackpt.figures import draw_fading, draw_faults, draw_figure, draw_gap
from mambackpt.resume import Comparison, Fault, Way

EACH_MEDIUM = pytest.mark.parametrize("medium", [*MEDIA])


def compared(*errors: float, changed: int) -> Comparison:
    return Comparison(errors, changed, 1e-6)


def fault(name: str) -> Fault:
    return Fault(name, "what happens", lambda model: NotImplemented, lambda model: True)


FAULTS = [
    ("one", fault("late window"), compared(*[2.0] * 64, changed=7)),
    ("two", fault("late window"), compared(*[2.0] * 64, changed=41)),
    ("one", fault("in bf16"), compared(*[0.01] * 64, changed=0)),
]
FADING = {
    name: {
        "late window": compared(*[2.0] * 32, *[last] * 32, changed=7),
        "in bf16": compared(*[1e-7] * 64, changed=0),
    }
    for name, last in (("one", 0.5), ("two", 0.02))
}
WAYS = [
    Way("the whole model", (1e-7,) * 6, compared(0.0, changed=0), 1.0),
    Way("recurrent layers alone", (1e-7,) * 3 + (0.5, 0.6, 1.7), compared(1.0, changed=1), 0.85),
]


def assert_nothing_is_clipped(drawing: Drawing) -> None:
    for page in drawing.pages:
        FigureCanvasAgg(page.figure).draw()
        inside = page.figure.bbox.padded(1)
        for text in page.figure.findobj(Text):
            if text.get_visible() and text.get_text():
                box = text.get_window_extent()
                assert mpl.transforms.Bbox.intersection(inside, box).height == box.height, text
                assert inside.x0 <= box.x0, text
                assert box.x1 <= inside.x1, text


@EACH_MEDIUM
def test_a_table_of_faults_counts_changed_tokens_and_dashes_what_cannot_happen(medium: str) -> None:
    drawing = draw_faults(FAULTS, medium=medium)
    cells = {text.get_text() for text in drawing.figure.axes[0].texts}
    assert cells == {"7 of 64", "41 of 64", "0 of 64", "–"}
    assert drawing.finding.startswith("1 of 2 faults change the next token, up to 41 of 64 times")
    assert "late window: one 7 of 64, two 41 of 64" in drawing.alt
    assert_nothing_is_clipped(drawing)


@EACH_MEDIUM
def test_errors_fade_in_doubling_steps_and_rounding_is_cut_off(medium: str) -> None:
    drawing = draw_fading(FADING, highlight="late window", medium=medium)
    first, second = [ax for page in drawing.pages for ax in page.figure.axes]
    late, rounded = first.lines
    assert late.get_xdata().tolist() == [1, 2, 4, 8, 16, 32, 64]
    assert late.get_ydata().tolist() == [2.0] * 6 + [0.5]
    assert set(rounded.get_ydata()) == {0.01}
    assert second.get_ylim() == first.get_ylim()
    assert "33 to 64 tokens later" in drawing.finding
    assert "by 0.5 in one and 0.02 in two" in drawing.finding
    assert_nothing_is_clipped(drawing)


@EACH_MEDIUM
def test_a_gap_s_figure_says_where_states_are_right_and_what_a_way_costs(medium: str) -> None:
    drawing = draw_gap(WAYS, medium=medium)
    cells = [text.get_text() for text in drawing.figure.axes[0].texts]
    assert cells == ["right"] * 9 + ["50 %", "60 %", "170 %"]
    assert re.search(r"right up to the first attention layer, and 50 to 170 %", drawing.finding)
    labels = [label.get_text() for label in drawing.figure.axes[0].get_xticklabels()]
    assert labels == [f"layer {n}" for n in (1, 2, 3, 5, 6, 7)]
    assert_nothing_is_clipped(drawing)


def test_a_checkpoint_of_kimi_k3_weighs_as_much_as_32507_tokens_of_its_attention() -> None:
    drawing = draw_figure("checkpoint-in-tokens")
    assert round(PRESETS["kimi-k3"].exchange_rate) == 32_507
    assert "kimi-k3 32,507" in drawing.alt


def test_figures_of_nothing_are_refused() -> None:
    with pytest.raises(CheckpointValueError, match="rows is empty"):
        draw_faults([])
