"""What explorers show, without a browser: pure views first, then the widgets around them."""

import re
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ipywidgets import IntSlider, VBox, Widget
from ipywidgets.widgets import widget as registry

from mambackpt.draw.lanes import Lane
from mambackpt.draw.show import figure_png
from mambackpt.engine import Request, Settings, simulate
from mambackpt.engine.events import Hit
from mambackpt.errors import CheckpointValueError
from mambackpt.explore.branches import branches_view
from mambackpt.explore.lanes import (
    Screen,
    View,
    explore_placement,
    explore_sequence,
    explore_views,
    placement_view,
    sequence_view,
)
from mambackpt.explore.replays import (
    BarScreen,
    explore_replay,
    replay_knobs,
    replay_view,
    replayed_view,
)
from mambackpt.explore.saving import quick_png
from mambackpt.explore.widgets import _USERS, Explorer, explore
from mambackpt.geometry import CacheGeometry
from mambackpt.models import PRESETS
from mambackpt.planner import Reason, compute_mamba_prefill_checkpoints, explain
from mambackpt.replay.generators import generate_documents
from mambackpt.replay.run import replay

PLAIN = CacheGeometry(1536, 1536, 16, 1536)
FINE = CacheGeometry(16, 1600, 16, 16)


def open_widgets() -> set[str]:
    return set(registry._instances)


@pytest.fixture(autouse=True)
def _no_widget_is_left() -> Iterator[None]:
    """Every test here closes what it opens; what stays registered is a leak."""
    before = open_widgets()
    yield
    assert open_widgets() == before
    left = dict(_USERS)
    _USERS.clear()  # a failing test should not fail the next
    assert not left


# ---- views: pure functions of the numbers ------------------------------------------------------

GEOMETRIES = st.builds(
    lambda H, blocks, A, units, drop: CacheGeometry(H, H * blocks, A, H * units, drop),
    st.sampled_from([1, 2, 16]),
    st.integers(1, 8),
    st.sampled_from([None, 1, 16, 64]),
    st.integers(1, 9),
    st.booleans(),
)


@given(st.integers(1, 400), st.integers(0, 399), GEOMETRIES)
def test_a_placement_view_says_what_the_planner_decides(
    seq_len: int, start: int, g: CacheGeometry
) -> None:
    if start >= seq_len:
        start = seq_len - 1
    view = placement_view(seq_len, start, g)
    [decision] = explain([seq_len], [seq_len - start], g)
    [offset], [column] = compute_mamba_prefill_checkpoints(
        [seq_len], [seq_len - start], g.H, g.M, g.A, g.drop_eagle_block, g.U
    )
    [lane] = view.lanes
    assert view.finding == decision.sentence
    assert [n for n, c in enumerate(lane.columns) if c.role == "checkpoint"] == (
        [column] if offset else []
    )
    verdicts = [row[2].split()[-1] for row in view.rows]
    failed = decision.reason.value
    expected = ["holds"] * 6
    if decision.reason is not Reason.ACCEPTED:
        expected = ["holds"] * (failed - 1) + ["fails"] + ["asked"] * (6 - failed)
    assert verdicts == expected


@given(st.integers(1, 400), st.integers(0, 399), GEOMETRIES)
def test_the_numbers_in_a_condition_agree_with_its_verdict(
    seq_len: int, start: int, g: CacheGeometry
) -> None:
    """The table is recomputed from its own words, not from the planner."""
    start = min(start, seq_len - 1)
    for condition, numbers, verdict in placement_view(seq_len, start, g).rows:
        if verdict.endswith("asked"):
            assert numbers == ""
            continue
        said = numbers.replace(",", "").replace("−", "-")
        if condition.startswith("1"):
            holds = said != "it has no grid"
        elif condition.startswith("3"):
            left, right = re.findall(r"-?\d+", said)[:2]
            holds = int(left) > int(right)
        elif condition.startswith("4"):
            first, unit, at = map(int, re.findall(r"\d+", said))
            holds = first + unit <= at
        elif condition.startswith("5"):
            low, at, high = map(int, re.findall(r"\d+", said))
            holds = low < at < high
        else:
            left, right = said.split(" = ")
            times, unit, rest = map(int, re.findall(r"\d+", right))
            assert eval(left) == times * unit + rest
            holds = rest == 0
        assert holds == verdict.endswith("holds"), (condition, numbers, verdict)


@given(st.integers(1, 300), st.sampled_from([64, 100, 8192]), st.booleans(), st.booleans())
def test_a_sequence_view_says_what_the_second_prompt_computes(
    prompt: int, budget: int, drop: bool, inside: bool
) -> None:
    g = CacheGeometry(16, 64, 16 if inside else None, 16, drop)
    view = sequence_view(prompt, budget, g)
    settings = Settings(
        checkpoint_alignment=g.A, drop_eagle_block=drop, budget=budget, max_running=1
    )
    requests = [Request("one", range(prompt)), Request("two", range(prompt))]
    run = simulate(requests, settings)
    hit = max([e.position for e in run.events if isinstance(e, Hit)], default=0)
    assert f"computes {prompt - hit:,}:" in view.finding
    assert view.lanes[0].seq_len == view.lanes[1].seq_len == prompt


@pytest.mark.parametrize(
    ("shared", "length", "third", "variant", "keys", "restores"),
    [
        (139, 400, 130, "vllm-0.33", 1, 1),
        (139, 400, 127, "vllm-0.33", 1, 0),
        (139, 400, 130, "keep-the-stop", 0, 0),
        (128, 400, 130, "vllm-0.33", 1, 1),
        (127, 400, 130, "vllm-0.33", 0, 0),
    ],
)
def test_a_view_of_branches_counts_what_the_run_broke(
    shared: int, length: int, third: int, variant: str, keys: int, restores: int
) -> None:
    """S03: what B and C share with A decides whether a key is wrong, and who restores it."""
    view = branches_view(shared, length, third, variant=variant)
    wrong = {c.held for lane in view.lanes for c in lane.columns if not c.right}
    assert bool(wrong) == bool(keys)
    said = re.findall(r"\b\d+(?= keys? lead| requests? resume)", view.finding)
    assert [int(number) for number in said] == ([keys, restores] if keys else [])
    assert [lane.label for lane in view.lanes] == ["A", "B", "C"]


def test_a_share_that_is_not_there_is_refused() -> None:
    with pytest.raises(CheckpointValueError, match=r"shared is 142 and A has 141.*Try 141"):
        branches_view(142, 400, 130)
    with pytest.raises(CheckpointValueError, match=r"length is 100 and shared is 139"):
        branches_view(139, 100, 130)


def test_a_query_must_have_a_token_to_compute() -> None:
    with pytest.raises(CheckpointValueError, match=r"9,000.*8,000.*Try 7,999 or less"):
        placement_view(8000, 9000, PLAIN)


def test_the_alt_text_names_the_finding_and_the_columns() -> None:
    drawing = placement_view(8000, 0, PLAIN).draw()
    assert drawing.alt.startswith(drawing.finding)
    assert "column 4: checkpoint, key 7,680" in drawing.alt


# ---- pictures ----------------------------------------------------------------------------------

PLACEMENTS = [
    (8000, 0, PLAIN),
    (3602, 1984, FINE),
    (40, 8, CacheGeometry(4, 8, 2, 4)),
    (1, 0, FINE),
]


@pytest.mark.parametrize("numbers", PLACEMENTS)
def test_a_redrawn_picture_is_the_picture_of_a_new_explorer(
    numbers: tuple[int, int, CacheGeometry],
) -> None:
    """Artists that are used again carry nothing over from the view before."""
    view = placement_view(*numbers)
    screen = Screen(placement_view(8000, 0, PLAIN))
    for other in PLACEMENTS:
        screen.draw(placement_view(*other))
    assert figure_png(screen.draw(view).figure) == figure_png(view.draw().figure)


@pytest.mark.parametrize(
    "view",
    [placement_view(*numbers) for numbers in PLACEMENTS]
    + [sequence_view(8000, 8192, PLAIN), sequence_view(3602, 2048, FINE)]
    + [sequence_view(100, 8192, CacheGeometry(16, 64, None, 16))],
    ids=lambda view: view.finding[:30],
)
def test_nothing_in_a_picture_is_cut_off(view: View) -> None:
    figure = view.draw().figure
    figure.canvas.draw()
    texts = [text for ax in figure.axes for text in ax.texts] + list(figure.texts)
    for text in texts:
        if text.get_visible() and text.get_text():
            box = text.get_window_extent()
            assert box.x0 >= 0, text
            assert box.y0 >= 0, text
            assert box.x1 <= figure.bbox.width, text
            assert box.y1 <= figure.bbox.height, text


def test_the_finding_does_not_run_into_the_lanes() -> None:
    for view in (sequence_view(8000, 8192, PLAIN), *(placement_view(*n) for n in PLACEMENTS)):
        figure = view.draw().figure
        figure.canvas.draw()
        lowest = figure.texts[0].get_window_extent().y0
        assert lowest >= figure.axes[0].get_window_extent().y1


# ---- widgets -----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [explore_placement, explore_sequence])
def test_every_control_changes_what_is_shown_and_none_fails(make: type) -> None:
    """N01: a callback that fails must fail a test, which an execution of the notebook does not."""
    explorer = make()
    assert isinstance(explorer, VBox)
    seen = {explorer.page}
    for name, value in (("H", 128), ("U", 1536), ("drop", True), ("A", 0), ("A", 64), ("M", 768)):
        explorer._controls[name].value = value
        assert "<figure" in explorer.page
        seen.add(explorer.page)
    for control, value in zip(explorer._controls.values(), (5000, 3072), strict=False):
        control.value = value
        assert "<figure" in explorer.page
        seen.add(explorer.page)
    assert len(seen) >= 6
    explorer.close()


def test_a_page_is_a_pure_function_of_the_controls() -> None:
    explorer = explore_placement()
    before = explorer.page
    explorer._controls["seq_len"].value = 3000
    assert explorer.page != before
    explorer._controls["seq_len"].value = 8000
    assert explorer.page == before
    explorer.close()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("H", 0, "hash unit H is 0; expected a positive number of tokens"),
        ("M", -1, "block M is -1"),
        ("H", 100, "block M is 1536 and hash unit H is 100; expected block M to be a multiple"),
        ("U", 1000, "hit alignment U is 1000 and hash unit H is 1536"),
        ("start", 9000, "expected at least one token to compute"),
    ],
)
def test_bad_input_is_answered_with_a_sentence(name: str, value: int, said: str) -> None:
    explorer = explore_placement()
    good, before = explorer.page, explorer.values
    control = explorer._controls[name]
    control.value = value
    assert said in explorer.page
    assert "Try " in explorer.page
    assert 'role="alert"' in explorer.page
    assert "Traceback" not in explorer.page
    assert "<img" not in explorer.page  # no picture of other numbers
    assert not re.search(r"\b(\w+_size|\w+_tokens|budget)\b", explorer.page)
    explorer.set(**before)
    assert explorer.page == good
    explorer.close()


def test_an_error_that_is_no_refusal_is_not_hidden() -> None:
    """N01: only the kit's refusals are turned into a sentence."""

    def broken(tokens: int) -> str:
        return str(1 // (tokens - 2))

    tokens = IntSlider(value=1, min=0, max=9)
    explorer = explore(broken, tokens=tokens)
    with pytest.raises(ZeroDivisionError):
        tokens.value = 2
    explorer.close()


def test_a_shared_slider_drives_one_callback_however_often_a_cell_runs() -> None:
    """N04, ipywidgets #3882: three runs of a cell gave three calls per change of a slider."""
    calls = []

    def show(tokens: int) -> str:
        calls.append(tokens)
        return f"{tokens}"

    slider = IntSlider(value=1, min=0, max=9)
    explorers = [explore(show, tokens=slider) for _ in range(3)]
    calls.clear()
    slider.value = 5
    assert calls == [5]
    assert explorers[-1].page == "5"
    explorers[-1].close()


def test_two_different_explorers_may_share_a_slider() -> None:
    def one(tokens: int) -> str:
        return f"one {tokens}"

    def two(tokens: int) -> str:
        return f"two {tokens}"

    slider = IntSlider(value=1, min=0, max=9)
    first, second = explore(one, tokens=slider), explore(two, tokens=slider)
    slider.value = 2
    assert (first.page, second.page) == ("one 2", "two 2")
    first.close()
    slider.value = 3
    assert second.page == "two 3"
    second.close()


def test_an_explorer_of_views_shows_what_the_function_makes_of_the_controls() -> None:
    def shown(tokens: int) -> View:
        if tokens == 9:
            raise CheckpointValueError("tokens is 9; expected less. Try 8.")
        lane = Lane("request", 4, 0, (tokens,), total=16)
        return View(f"{tokens} tokens.", (lane,))

    slider = IntSlider(value=8, min=0, max=16)
    runs = [explore_views(shown, tokens=slider) for _ in range(2)]  # a cell that is run again
    pages = [explorer.page for explorer in runs]
    assert pages[0] == pages[1]
    slider.value = 12
    assert "12 tokens." in runs[1].page
    assert runs[0].page == pages[0]  # the earlier run is deaf
    fresh = explore_views(shown, tokens=IntSlider(value=12, min=0, max=16))
    assert runs[1].page == fresh.page  # one figure for all views leaves nothing behind
    slider.value = 9
    assert "expected less" in runs[1].page
    for explorer in (runs[1], fresh):
        explorer.close()


@pytest.mark.parametrize("make", [explore_placement, explore_sequence])
def test_closing_lets_go_of_every_widget(make: type) -> None:
    before = open_widgets()
    explorer: Explorer = make()
    controls: list[Widget] = list(explorer._controls.values())
    assert open_widgets() > before
    explorer.close()
    assert open_widgets() == before
    page = explorer.page
    controls[0].value = 7000  # a closed explorer is deaf
    assert explorer.page == page
    explorer.close()  # twice is once


def test_a_redraw_makes_no_new_artists() -> None:
    """What keeps a redraw fast, without a clock: artists are used again."""
    screen = Screen(placement_view(8000, 0, PLAIN))
    for tokens in (16000, 300, 16000):
        screen.draw(placement_view(tokens, 0, FINE))
        screen.draw(placement_view(tokens, 0, PLAIN))
    [ax] = screen.figure.axes
    before = [id(artist) for artist in ax.get_children()]
    for tokens in (300, 8000, 16000):
        screen.draw(placement_view(tokens, 0, PLAIN))
    assert [id(artist) for artist in ax.get_children()] == before


def test_the_picture_really_changes() -> None:
    one, other = (figure_png(placement_view(*numbers).draw().figure) for numbers in PLACEMENTS[:2])
    assert one != other


def test_an_empty_view_is_a_picture_too() -> None:
    lane = Lane("nothing", 4, 0, ())
    assert figure_png(View("Nothing is there.", (lane,)).draw().figure)


def test_more_columns_than_can_be_read_are_refused_at_once() -> None:
    """M = H = U = 1 froze the page for 20 s."""
    ones = CacheGeometry(1, 1, 1, 1)
    for view in (sequence_view(1000, 8192, ones), placement_view(8192, 0, ones)):
        assert "999" in view.finding or "8,191" in view.finding
    with pytest.raises(CheckpointValueError, match=r"9,000 columns.*8,192.*Try mamba_block_size=2"):
        sequence_view(9000, 8192, ones)
    explorer = explore_placement(16384, geometry=CacheGeometry(16, 16, 16, 16))
    explorer._controls["M"].value = 1
    assert "16,384 columns; expected at most 8,192 here. Try block M = 2" in explorer.page
    explorer.close()
    with pytest.raises(CheckpointValueError, match=r"8,000 steps.*Try budget=8"):
        sequence_view(8000, 1, CacheGeometry(64, 64, 16, 64))
    sequence_view(9000, 8192, CacheGeometry(2, 2, 2, 2))  # what it said to try


def test_frames_that_nobody_sees_are_no_limit() -> None:
    view = sequence_view(8000, 528, CacheGeometry(528, 528, 16, 528))
    assert len(view.lanes[0].ends) > 10


def test_columns_that_are_too_narrow_to_read_are_bundled() -> None:
    drawing = sequence_view(8000, 8192, CacheGeometry(16, 16, 16, 16)).draw()
    [ax] = drawing.figure.axes
    words = [text.get_text() for text in ax.texts if text.get_visible()]
    assert words.count("0 to 497 null") == 2
    boxes = sum(len(boxes.get_paths()) for boxes in ax.collections)
    assert boxes < 40


# ---- replays -----------------------------------------------------------------------------------

REQUESTS = generate_documents(120)


@pytest.mark.parametrize("pool", [None, 500_000])
def test_a_replay_view_tells_what_the_replays_found(pool: int | None) -> None:
    view = replay_view(REQUESTS, "interval(32768)", block=512, model="kimi-k3", pool=pool)
    alt = view.draw().alt
    size = None if pool is None else pool * 13_824
    for rule, recomputed, words in zip(view.rules, view.recomputed, view.words, strict=True):
        run = replay(REQUESTS, rule, block=512, model="kimi-k3", pool_bytes=size)
        assert recomputed == run.recomputed
        assert f"{100 * run.hit_rate:.1f} % reused" in words
        assert words in alt
    least = min(view.recomputed[:-1])
    assert view.rules[view.mine] == "interval(32768)"
    assert f"{abs(view.recomputed[-1] - least):,} " in view.finding
    assert "one at a time" in alt


def test_a_rule_that_is_among_the_usual_ones_is_shown_once() -> None:
    view = replay_view(REQUESTS, "last", block=512)
    assert (view.rules.count("last"), len(view.rules), view.mine) == (1, 4, 1)
    assert "of 3 others" in view.finding


def test_a_rule_that_keeps_what_another_keeps_is_said_to() -> None:
    """interval(100) silently equalled `all` at a block of 512."""
    said = replay_view(REQUESTS, "interval(100)", block=512).note
    assert "interval(100) keeps the same states as all here" in said
    assert "the same states" not in replay_view(REQUESTS, "interval(4096)", block=512).note


def test_an_explorer_of_replays_follows_its_controls_and_says_what_is_wrong() -> None:
    explorer = explore_replay(REQUESTS)
    try:
        total = int(REQUESTS.prompt.sum())
        assert f"none recomputes {total:,} tokens" in explorer.page
        explorer._controls["rule"].value = "last+junction"
        explorer._controls["pool"].value = explorer._controls["pool"].options[-1][1]
        view = replay_view(
            REQUESTS, "last+junction", block=512, pool=explorer._controls["pool"].value
        )
        assert view.finding in explorer.page
        for wrong, meant in (("lasst", "last"), ("LAST", "last"), ("all+Junction", "junction")):
            explorer._controls["rule"].value = wrong
            assert 'role="alert"' in explorer.page
            assert f"Try &#x27;{meant}&#x27;" in explorer.page
        explorer.set(rule="last+chunk", budget=100)
        assert "tokens per step is 100" in explorer.page
        explorer.set(budget=8192, block=700)
        assert "so the reuse told is a lower bound" in explorer.page
    finally:
        explorer.close()


def test_every_model_can_be_chosen_and_an_uncounted_one_says_what_it_lacks() -> None:
    assert set(replay_knobs(REQUESTS)["model"].choices) == set(PRESETS)
    for name, model in PRESETS.items():
        assert replay_view(REQUESTS, "last", block=512, model=name)
        if model.recurrent_layers and model.attention_layers:
            assert replay_view(REQUESTS, "last", block=512, model=name, pool=500_000)
        else:
            with pytest.raises(CheckpointValueError, match=f"'{name}', whose layers are not"):
                replay_view(REQUESTS, "last", block=512, model=name, pool=500_000)


def test_the_rule_that_an_explorer_begins_with_solves_no_challenge() -> None:
    """Notebook 06 asks for a rule that beats the usual ones: none is given away."""
    trace = generate_documents(300)
    knobs = replay_knobs(trace)
    for pool in knobs["pool"].choices:
        for block in (512, 1024, 4096):
            view = replayed_view(trace, str(knobs["rule"].value), block, 8192, "qwen3-next", pool)
            others = [n for at, n in enumerate(view.recomputed) if at != view.mine]
            assert view.recomputed[view.mine] >= min(others)


def test_redrawn_bars_are_the_bars_of_a_new_explorer() -> None:
    views = [replay_view(REQUESTS, "none", block=block) for block in (512, 1024, 2048)]
    screen = BarScreen(views[0])
    for view in (*views, views[1]):
        drawing = screen.draw(view)
    assert quick_png(drawing.figure) == quick_png(views[1].draw().figure)
