"""The capacity explorer: ids and chats as the models' room counts them."""

import pytest

from mambackpt.errors import CheckpointValueError
from mambackpt.explore.capacity import CapacityScreen, capacity_view
from mambackpt.explore.saving import quick_png
from mambackpt.models import PRESETS

COUNTED = [name for name, m in PRESETS.items() if m.recurrent_layers and m.attention_layers]


def test_the_finding_counts_as_the_pool_does() -> None:
    for name in COUNTED:
        holds = PRESETS[name].capacity(80 * 10**9, 262_144)
        tokens = 10 * holds.block + 1
        view = capacity_view(name, 80 * 10**9, tokens, every=4)
        assert view.ids == holds.cached_ids(tokens, 3)
        assert view.full == holds.admitted_ids
        assert f"{view.full // view.ids:,} chats of {tokens:,} tokens stay" in view.finding
        assert f"and {holds.live_requests(tokens):,} run at once" in view.finding
        words = dict(view.rows)
        assert words["ids, the null block among them"] == f"{holds.ids:,}"
        assert words["tokens of cache, as logged"] == f"{holds.logged_tokens:,}"


def test_a_published_pool_is_told_as_the_engine_logs_it() -> None:
    rows = dict(capacity_view("qwen3.5-27b", 20 * 10**9, 8000).rows)
    assert rows["tokens of cache, as logged"] == "299,044"


def test_the_curves_are_ids_of_chats_that_keep_more_states_from_below() -> None:
    view = capacity_view("qwen3.5-27b", 20 * 10**9, 8000, every=8)
    last, some, each = (ids for _, ids in view.curves)
    assert all(a <= b <= c for a, b, c in zip(last, some, each, strict=True))
    assert last[-1] <= view.full < each[-1]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"model": "qwen"}, "expected one of"),
        ({"model": "falcon-h1-7b"}, "of falcon-h1-7b is None"),
        ({"tokens": 700}, "leaves no block of 784 tokens"),
        ({"every": 0}, "every is 0"),
        ({"pool_bytes": 0}, "pool_bytes is 0"),
    ],
)
def test_what_cannot_be_held_is_said(wrong: dict[str, object], said: str) -> None:
    usual: dict[str, object] = {"model": "qwen3.5-27b", "pool_bytes": 20 * 10**9, "tokens": 8000}
    with pytest.raises(CheckpointValueError, match=said):
        capacity_view(**{**usual, **wrong})  # type: ignore[arg-type]


def test_a_redrawn_pool_is_the_picture_of_a_new_explorer_and_nothing_is_cut_off() -> None:
    views = [
        capacity_view("qwen3.5-27b", 20 * 10**9, 8000),
        capacity_view("kimi-k3", 640 * 10**9, 1_000_000, every=64),
        capacity_view("qwen3-next", 4 * 10**9, 2000),
    ]
    screen = CapacityScreen(views[0])
    for view in (*views, views[1]):
        figure = screen.draw(view).figure
        figure.canvas.draw()
        for text in (*figure.texts, *figure.axes[0].texts, figure.axes[0].xaxis.label):
            box = text.get_window_extent()
            assert 0 <= box.x0 < box.x1 <= figure.bbox.width, text
            assert 0 <= box.y0 < box.y1 <= figure.bbox.height, text
    assert quick_png(figure) == quick_png(views[1].draw().figure)
