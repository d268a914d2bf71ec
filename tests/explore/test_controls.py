"""Controls: typed as well as slid, never blank, never cut off, and closed to the last one."""

import gc
import sys
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import matplotlib.pyplot as plt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ipywidgets import Dropdown, IntSlider
from ipywidgets.widgets import widget as registry
from matplotlib.figure import Figure

from mambackpt.draw.sheet import text_width
from mambackpt.errors import CheckpointValueError
from mambackpt.explore.branches import branches_knobs, explore_branches
from mambackpt.explore.capacity import capacity_knobs, explore_capacity
from mambackpt.explore.controls import LABEL_EM, Knob, Number, close, follow
from mambackpt.explore.engine import engine_knobs, explore_engine
from mambackpt.explore.exports import explore_export, export_knobs
from mambackpt.explore.lanes import explore_placement, placement_knobs, sequence_knobs
from mambackpt.explore.replays import explore_replay, replay_knobs
from mambackpt.explore.widgets import _BUSY, _LOOKS, _USERS, Explorer, explore
from mambackpt.replay.generators import generate_documents

KNOBS: dict[str, dict[str, Knob]] = {
    "placement": placement_knobs(),
    "sequence": sequence_knobs(),
    "replay": replay_knobs(generate_documents(50)),
    "engine": engine_knobs(),
    "export": export_knobs(),
    "capacity": capacity_knobs(),
    "branches": branches_knobs(),
}


@pytest.fixture(autouse=True)
def _no_widget_is_left() -> Iterator[None]:
    before = set(registry._instances)
    yield
    assert set(registry._instances) == before
    left = dict(_USERS)
    _USERS.clear()  # a failing test should not fail the next
    assert not left


def test_a_number_is_typed_or_slid_and_both_agree() -> None:
    number = Number("tokens", 8000, most=16384)
    seen: list[int] = []
    number.observe(lambda change: seen.append(change["new"]), "value")
    number.field.value = 300
    number.slider.value = 4096
    number.value = 70
    assert seen == [300, 4096, 70]
    assert (number.field.value, number.slider.value) == (70, 70)
    close(number)


def test_a_typed_number_may_lie_beyond_the_slider_and_stays_as_typed() -> None:
    number = Number("tokens", 8000, most=16384)
    number.field.value = 100_000
    assert (number.value, number.slider.value) == (100_000, 16384)
    number.field.value = -3
    assert (number.value, number.slider.value) == (-3, 1)
    number.slider.value = 12
    assert (number.value, number.field.value) == (12, 12)
    close(number)


def test_a_typed_number_between_two_steps_of_the_slider_stays_as_typed() -> None:
    """A browser moved the slider, and with it the number, to the nearest step."""
    number = Number("hash unit H", 1536, least=16, most=16384, step=16)
    number.field.value = 100
    assert (number.value, number.slider.value) == (100, 96)
    number.slider.value = 112
    assert (number.value, number.field.value) == (112, 112)
    close(number)


def test_a_shorter_slider_takes_its_value_along() -> None:
    number = Number("step", 30, most=34)
    number.stretch(6)
    assert (number.value, number.slider.value, number.field.value) == (6, 6, 6)
    number.stretch(60)
    assert (number.value, number.slider.max) == (6, 60)
    close(number)


@pytest.mark.parametrize("kind", KNOBS)
def test_no_control_shows_a_blank(kind: str) -> None:
    """ipywidgets gives the value None no place among the choices, and shows nothing."""
    for knob in KNOBS[kind].values():
        widget = knob.widget()
        assert widget.value is not None
        if isinstance(widget, Dropdown):
            assert all(value is not None and words for words, value in widget.options)
            for _, value in widget.options:
                widget.value = value
                assert widget.index is not None
        close(widget)


@pytest.mark.parametrize("kind", KNOBS)
def test_no_label_is_cut_off(kind: str) -> None:
    for knob in KNOBS[kind].values():
        assert text_width(knob.label) <= LABEL_EM - 0.5, knob.label


@pytest.mark.parametrize("kind", KNOBS)
def test_options_are_distinct_words(kind: str) -> None:
    options = [knob.option for knob in KNOBS[kind].values()]
    assert len(set(options)) == len(options)
    assert all(option.replace("-", "").isalpha() for option in options)


SIZES = st.fixed_dictionaries({name: st.sampled_from([64, 128, 256]) for name in "MHU"})


@given(SIZES, st.sampled_from("MHU"), st.sampled_from([16, 64, 512]))
def test_a_size_takes_along_those_below_that_were_equal_and_no_other(
    before: dict[str, int], moved: str, to: int
) -> None:
    after = follow({**before, moved: to}, before)
    assert after[moved] == to
    for name in "MHU":
        below = "MHU".index(name) > "MHU".index(moved)
        if name != moved and below and before[name] == before[moved] != to:
            assert after[name] == to
        elif name != moved:
            assert after[name] == before[name]


def test_hash_units_of_128_are_hit_on_128_as_the_course_asks() -> None:
    """Notebook 01: setting H = 128 alone still showed 320 tokens computed again."""
    from mambackpt.explore.lanes import explore_sequence

    explorer = explore_sequence()
    assert "computes 320" in explorer.page
    explorer._controls["H"].value = 128
    assert explorer.values["U"] == 128
    assert "computes 64" in explorer.page
    explorer._controls["U"].value = 1536  # parted by the reader
    explorer._controls["H"].value = 256
    assert explorer.values["U"] == 1536
    explorer.close()


def test_a_block_takes_its_equals_along_in_one_redraw() -> None:
    explorer = explore_placement()
    drawn: list[object] = []
    show = explorer._show
    explorer._show = lambda **values: drawn.append(values) or show(**values)  # type: ignore[func-returns-value]
    explorer._controls["M"].value = 1600
    assert (explorer.values["H"], explorer.values["U"]) == (1600, 1600)
    assert len(drawn) == 1
    explorer.close()


def test_a_view_is_marked_as_old_while_the_next_is_computed_and_only_then() -> None:
    """What the mark looks like, and that it waits for 150 ms, is the style sheet's."""
    marked: list[bool] = []
    explorers: list[Explorer] = []

    def show(tokens: int) -> str:
        marked.extend(_BUSY in explorer._frame._dom_classes for explorer in explorers)
        if tokens == 9:
            raise CheckpointValueError("tokens is 9; expected less. Try 8.")
        return f"{1 // (tokens - 7)} tokens"

    slider = IntSlider(value=8, min=1, max=20)
    explorers.append(explore(show, tokens=slider))
    for value in (10, 9):
        slider.value = value
        assert _BUSY not in explorers[0]._frame._dom_classes
    with pytest.raises(ZeroDivisionError):
        slider.value = 7
    assert _BUSY not in explorers[0]._frame._dom_classes
    assert "The view failed: ZeroDivisionError" in explorers[0].page, "no old picture stays"
    assert marked == [True] * 3
    assert "1ms 150ms forwards" in _LOOKS
    explorers[0].close()


MAKERS: dict[str, Any] = {
    "placement": explore_placement,
    "replay": lambda: explore_replay(generate_documents(50)),
    "engine": explore_engine,
    "export": explore_export,
    "capacity": explore_capacity,
    "branches": explore_branches,
}


@pytest.mark.parametrize("kind", MAKERS)
def test_a_closed_explorer_leaves_no_widget_and_no_figure(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: WeakSet[Figure] = WeakSet()

    def recorded(*arguments: Any, **keywords: Any) -> Figure:
        figure = Figure(*arguments, **keywords)
        made.add(figure)
        return figure

    monkeypatch.setattr(sys.modules["mambackpt.draw.sheet"], "Figure", recorded)
    widgets, opened = set(registry._instances), plt.get_fignums()
    explorer = MAKERS[kind]()
    assert set(registry._instances) > widgets
    assert len(made) == 1
    explorer.close()
    explorer.close()
    assert set(registry._instances) == widgets
    del explorer
    gc.collect()
    assert len(made) == 0
    assert plt.get_fignums() == opened


@pytest.mark.parametrize("kind", MAKERS)
def test_every_choice_and_every_nonsense_is_a_picture_or_a_sentence(kind: str) -> None:
    explorer = MAKERS[kind]()
    for name, control in explorer._controls.items():
        usual = explorer.values
        values: list[Any] = [0, -1, 10**9] if isinstance(control, Number) else []
        values += [value for _, value in getattr(control, "options", ())][:6]
        values += ["", "((", "last+", "no"] if name == "rule" else []
        for value in values:
            control.value = value
            page = explorer.page
            assert ("<figure" in page) != ('role="alert"' in page), (name, value)
            assert "Try" in page or "such as" in page or "<figure" in page, page
            assert "Traceback" not in page
        explorer.set(**usual)
        assert "<figure" in explorer.page
    explorer.close()
