"""The engine explorer: every step shown is the engine's, and what is wrong is drawn as wrong."""

from collections.abc import Iterator

import pytest
from ipywidgets.widgets import widget as registry

from mambackpt.draw.show import figure_png
from mambackpt.engine import Request, Settings, Simulation, simulate
from mambackpt.errors import CheckpointValueError
from mambackpt.explore.engine import (
    STORIES,
    EngineScreen,
    _Film,
    engine_view,
    explore_engine,
    run_moments,
    run_view,
)
from mambackpt.explore.films import FILMS, story_film
from mambackpt.explore.saving import quick_png


@pytest.fixture(autouse=True)
def _no_widget_is_left() -> Iterator[None]:
    before = set(registry._instances)
    yield
    assert set(registry._instances) == before


@pytest.mark.parametrize("name", STORIES)
def test_the_steps_of_a_story_are_those_of_the_engine(name: str) -> None:
    story = STORIES[name]()
    run = simulate(story.requests, story.settings)
    moments = run_moments(story.requests, story.settings)
    assert len(moments) == run.counts.steps
    assert [e for moment in moments for e in moment.snapshot.events] == run.events
    for number, moment in enumerate(moments, start=1):
        view = run_view(moments, number)
        assert view == engine_view(name, number)
        assert view.finding.startswith(f"Step {number:,} of {len(moments):,}: ")
        assert len(view.rows) == len(moment.snapshot.events)
        assert len(view.blocks) + view.hidden == len(moment.blocks)


@pytest.mark.parametrize("name", STORIES)
def test_references_and_keys_of_a_block_are_those_of_the_pool(name: str) -> None:
    """Counted again from the rows and the indexes, not by the code that shows them."""
    story = STORIES[name]()
    simulation = Simulation(story.requests, story.settings)
    for _ in simulation:
        groups = (simulation.attention, *simulation.recurrent)
        rows = [live.rows[g.number].blocks for live in simulation.running for g in groups]
        keyed = {b.id: len(b.claims) for g in groups for b, _ in g.index}
        for block in simulation.blocks():
            holders = sum(b.id == block.block for row in rows for b in row)
            assert block.refs == holders
            assert len(block.keyed) == keyed.get(block.block, 0)
            assert block.block != 0
        broken = {number for number, _ in simulation.lockstep.audit()}
        assert {b.block for b in simulation.blocks() if not b.right} == broken


def test_the_released_fault_is_drawn_at_the_step_in_which_it_happens() -> None:
    """S03: B's block is keyed 64 and holds the state after 32; C then resumes from it."""
    before, at, after = (engine_view("released-fault", step) for step in (32, 33, 34))
    assert all(block.right for block in before.blocks)
    assert "found under 64 and holds the state after 32" in at.finding
    [wrong] = [block for block in at.blocks if not block.right]
    assert (wrong.held, wrong.keyed) == (32, (64,))
    [lane] = [lane for lane in after.lanes if lane.label == "C"]
    assert [mark.kind for mark in lane.marks] == ["error"]
    fixed = [engine_view("released-fault", step, variant="keep-the-stop") for step in (33, 34)]
    assert all(block.right for view in fixed for block in view.blocks)


def test_each_story_shows_what_it_is_about() -> None:
    hit = engine_view("mid-block-hit", 4)
    assert "B resumes after 96 tokens" in hit.finding
    told = [engine_view("preemption", step).finding for step in range(1, 11)]
    assert sum("B is preempted" in words for words in told) == 1
    assert any("B resumes after 112" in words for words in told)
    reused = {}
    for name in ("puzzle-1500", "puzzle-1600"):
        moments = run_moments(STORIES[name]().requests, STORIES[name]().settings)
        steps = range(1, len(moments) + 1)
        reused[name] = sum("resumes" in run_view(moments, step).finding for step in steps)
    assert reused == {"puzzle-1500": 0, "puzzle-1600": 3}


def test_a_step_that_the_run_does_not_have_is_refused() -> None:
    with pytest.raises(CheckpointValueError, match=r"step is 99 and the run has 6.*Try 6"):
        engine_view("mid-block-hit", 99)
    with pytest.raises(CheckpointValueError, match="Try 'released-fault'"):
        engine_view("released fault")


def test_a_run_of_yours_can_be_stepped_through() -> None:
    requests = [Request(f"R{n}", range(n, 300 + n)) for n in range(40)]
    moments = run_moments(requests, Settings(max_running=1))
    view = run_view(moments, len(moments))
    assert view.hidden > 0
    assert (
        "more are not shown"
        in [text.get_text().replace("\n", " ") for text in view.draw().figure.axes[1].texts][-1]
    )


@pytest.mark.parametrize("name", STORIES)
def test_a_redrawn_step_is_the_picture_of_a_new_explorer(name: str) -> None:
    screen = EngineScreen(engine_view(name, 1))
    for step in (5, 2, 6, 3):
        drawing = screen.draw(engine_view(name, step))
    assert quick_png(drawing.figure) == quick_png(engine_view(name, 3).draw().figure)


@pytest.mark.parametrize("name", STORIES)
def test_nothing_in_a_step_is_cut_off(name: str) -> None:
    steps = len(run_moments(STORIES[name]().requests, STORIES[name]().settings))
    for step in {steps // 2, steps}:
        figure = engine_view(name, step).draw().figure
        figure.canvas.draw()
        for text in [*figure.texts, *(text for ax in figure.axes for text in ax.texts)]:
            if text.get_visible() and text.get_text():
                box = text.get_window_extent()
                assert box.x0 >= 0, text
                assert box.x1 <= figure.bbox.width + 1, text
                assert box.y0 >= 0, text
                assert box.y1 <= figure.bbox.height, text
        [_, pool] = figure.axes
        *boxes, _ = pool.texts
        for text in boxes:
            if text.get_visible():
                room = figure.bbox.width * pool.get_position().width / 7
                assert text.get_window_extent().width <= room, text


def test_buttons_and_requests_lead_to_their_steps() -> None:
    explorer = explore_engine()
    [film] = [child for child in explorer._desk.children if isinstance(child, _Film)]
    first, back, _, following, last, _ = film.children
    for button, step in ((last, 6), (back, 5), (following, 6), (following, 6), (first, 1)):
        button.click()
        assert explorer.values["step"] == step
        assert f"Step {step} of 6" in explorer.page
    film.jump.value = dict(film.jump.options)["request B"]
    assert "B resumes after 96" in explorer.page
    film.play.value = 2
    assert (explorer.values["step"], film.jump.value) == (2, 0)
    explorer._controls["step"].value = 5
    assert film.play.value == 5
    explorer.close()


def test_another_story_begins_at_its_first_step() -> None:
    explorer = explore_engine("released-fault", 34)
    explorer._controls["story"].value = "preemption"
    assert explorer.values["step"] == 1
    assert explorer._controls["step"].slider.max == 10
    assert "Step 1 of 10" in explorer.page
    explorer.close()


@pytest.mark.parametrize("name", [name for name in FILMS if name != "sequence"])
def test_a_story_is_a_film_too(name: str) -> None:
    film = story_film(name)
    assert 5 <= len(film.story) <= 40
    assert figure_png(film.figure)


def test_a_running_state_that_grew_from_a_wrong_one_is_drawn_as_wrong() -> None:
    view = engine_view("released-fault", 34)
    running = [c for lane in view.lanes for c in lane.columns if c.role == "running" and c.held]
    assert [(c.held, c.right) for c in running if not c.right] == [(33, False)]
