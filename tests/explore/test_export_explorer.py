"""The export explorer: programs and bytes as the kernels' own arithmetic has them."""

from itertools import product

import pytest

from mambackpt.bench import LAYERS, Compilation, first_touch, plan_on_paper, watch_program
from mambackpt.bench.compiled import LayerShape
from mambackpt.errors import CheckpointValueError
from mambackpt.explore import exports
from mambackpt.explore.exports import BUFFERS, ExportScreen, export_view
from mambackpt.explore.saving import quick_png

TOY = LayerShape("toy", 512, (16, 64))


def test_the_runs_in_the_finding_are_those_of_the_addresses() -> None:
    for layer, buffer, token_first in product(("qwen3-next",), BUFFERS, (True, False)):
        view = export_view(layer, buffer, token_first=token_first)
        for row, kernel in zip(view.rows, ("plain", "tiled"), strict=True):
            request = Compilation(LAYERS[layer], kernel, token_first=token_first)
            run = first_touch(request, buffer).run_bytes
            assert row[8] == round(run, 2)
            assert f"{run:,.4g}" in view.finding


def test_the_programs_that_touch_a_buffer_are_all_that_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every program is watched here; the view halves its way to the first and the last."""
    monkeypatch.setitem(LAYERS, "toy", TOY)
    for buffer, kernel in product(BUFFERS, ("plain", "tiled")):
        launch = plan_on_paper(Compilation(TOY, kernel), rows=exports.ROWS)
        touching = [
            n
            for n in range(launch.grid[0])
            for touch in watch_program(launch.kernel, launch.arguments, program=(n, 0))
            if touch.buffer == buffer
        ]
        first, last = exports._touching("toy", kernel, buffer, "float32", "float32", True)
        assert touching == list(range(first, last + 1))


@pytest.mark.parametrize("buffer", BUFFERS)
def test_all_programs_together_touch_every_byte_once(
    buffer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LAYERS, "toy", TOY)
    elements = TOY.window_elements if buffer in ("raw_qkv", "conv_state") else TOY.row_elements
    size = 2 if buffer in ("raw_qkv", "conv_state") else 4
    for kernel in ("plain", "tiled"):
        first, last = exports._touching("toy", kernel, buffer, "float32", "float32", True)
        launch = exports._launch("toy", kernel, "float32", "float32", True)
        spots = [
            spot
            for n in range(first, last + 1)
            for spot in exports._touch(launch, n, 0, buffer).elements.tolist()
        ]
        assert len(spots) == len(set(spots)) == elements
        assert exports._touch(launch, first, 0, buffer).itemsize == size


def test_boxes_are_places_at_their_bytes() -> None:
    view = export_view("kimi-k3", "raw_qkv")
    plain, ours = view.strips
    width = LAYERS["kimi-k3"].width
    assert [strip.start for strip in plain] == [2 * width * token for token in (9, 10, 11)]
    assert plain[0].boxes[:3] == ((0, 0), (2, 3), (4, 6))
    assert ours[0].boxes[:3] == ((0, 0), (2, 1), (4, 2))


def test_a_row_moves_what_is_touched_by_one_checkpoint() -> None:
    first, second = (export_view("qwen3-next", "conv_state", row=row).rows[1] for row in (0, 1))
    layer = LAYERS["qwen3-next"]
    assert int(second[4]) - int(first[4]) == layer.columns * layer.width * 2


def test_a_narrower_dtype_touches_fewer_bytes_with_as_many_places() -> None:
    wide, narrow = (
        export_view("qwen3-next", "recurrent_state", state_dtype=dtype).rows[1]
        for dtype in ("float32", "bfloat16")
    )
    assert wide[6] == narrow[6]
    assert int(wide[5]) - int(wide[4]) == 2 * (int(narrow[5]) - int(narrow[4]))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"layer": "kimi"}, "Try 'kimi-k3'"),
        ({"buffer": "raw"}, "Try 'raw_qkv'"),
        ({"row": 8}, "Try 7"),
        ({"program": 10**6}, "touch raw_qkv; expected one of them, from 0. Try 431"),
        ({"state_dtype": "float64"}, "expected one of float32, bfloat16"),
    ],
)
def test_what_is_not_there_is_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(CheckpointValueError, match=said):
        export_view(**wrong)  # type: ignore[arg-type]


def test_a_redrawn_program_is_the_picture_of_a_new_explorer() -> None:
    views = [export_view(buffer=buffer) for buffer in BUFFERS]
    screen = ExportScreen(views[0])
    for view in (*views, views[1]):
        drawing = screen.draw(view)
    assert quick_png(drawing.figure) == quick_png(views[1].draw().figure)
    figure = drawing.figure
    figure.canvas.draw()
    for text in (text for ax in figure.axes for text in ax.texts):
        if text.get_visible() and text.get_text():
            assert text.get_window_extent().x0 >= 0
