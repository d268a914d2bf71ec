"""Animations: frames that follow the engine's events, none dropped, none told differently."""

import base64
import gc
import io
import re
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from mambackpt import CacheGeometry, CheckpointValueError
from mambackpt.draw.animate import (
    _MOST_FRAMES,
    Frame,
    SequenceAnimation,
    _key_frames,
    animate_sequence,
    film_gif,
    film_page,
    filmstrip,
    player_html,
    prefilled_lanes,
    run_frames,
    sequence_finding,
    sequence_frames,
)
from mambackpt.draw.lanes import Column, draw_lanes, lanes_height
from mambackpt.draw.sheet import left_margin, sheet, style
from mambackpt.engine import Request, Run, Settings, simulate

K3 = CacheGeometry(1536, 1536, 16, 1536)
TOY = CacheGeometry(16, 64, 16, 16)


def pixels(figure: Figure) -> np.ndarray:
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.array(canvas.buffer_rgba())


def roles(frame: Frame) -> list[str]:
    return [column.role for column in frame.lane.columns]


def test_a_prompt_moves_across_blocks_and_another_resumes() -> None:
    frames = sequence_frames(8000, K3)
    assert len(frames) <= _MOST_FRAMES
    first = frames[0].lane
    assert (first.start, first.ends, first.total) == (0, (), 8000)
    assert roles(frames[0]) == ["null"] * 4 + ["checkpoint", "running"]
    assert [column.held for column in first.columns[4:]] == [None, None], "reserved only"
    heads = [frame.lane.seq_len for frame in frames[1:7]]
    assert heads == [1536, 3072, 4608, 6144, 7680, 8000]
    saved = frames[5].lane.columns[4]
    assert (saved.held, saved.key) == (7680, None), "written, not yet found by a lookup"
    assert frames[6].lane.columns[4].key == 7680
    hit = frames[7].lane
    assert [(mark.kind, mark.position) for mark in hit.marks] == [("hit", 7680)]
    assert (hit.start, hit.seq_len, hit.total) == (7680, 7680, 8000)
    assert roles(frames[-1])[4:] == ["previous", "running"]
    assert frames[-1].lane.columns[5].held == 8000


def test_an_in_between_state_is_never_shown_as_stored() -> None:
    """P10, b12x issue #340: of one chunk's boundaries only the last has a state."""
    for frame in sequence_frames(4096, CacheGeometry(256, 256, 16, 256)):
        stored = [column.held for column in frame.lane.columns if column.held is not None]
        assert set(stored) <= {3840, 4096}
        assert all(column == Column() for column in frame.lane.columns[:14])


def test_two_chunks_show_the_previous_state_before_the_running_one() -> None:
    frames = sequence_frames(8000, K3, internal_checkpoints=False)
    ends = [frame for frame in frames if "query ends" in frame.sentence]
    assert roles(ends[0])[4] == "running"
    assert roles(ends[1])[4:] == ["previous", "running"]
    assert [column.key for column in ends[1].lane.columns] == [None] * 4 + [7680, None]


def poisoned() -> Run:
    """A hit inside a block, a chunk that runs past that block's end, and a third request."""
    shared = list(range(100))
    turn = [*shared, *range(1000, 1041)]
    requests = [
        Request("A", shared, turn[100:]),
        Request("B", [*turn[:139], *range(2000, 2261)]),
        Request("C", [*turn[:130], 5, 6, 7]),
    ]
    return simulate(requests, Settings(retention=0, max_running=1))


def test_a_wrong_state_is_drawn_as_an_error_from_its_key_to_its_restore() -> None:
    """S03, vllm PR #51113: a block is keyed at its end and still holds the state it began with."""
    frames = run_frames(poisoned())
    wrong = [frame for frame in frames if any(not c.right for c in frame.lane.columns)]
    first = wrong[0]
    assert first.lane.label == "B"
    [column] = [column for column in first.lane.columns if not column.right]
    assert (column.key, column.held) == (128, 96)
    assert "Key 128 leads to column 1, which holds the state after 96." in first.sentence
    restored = [frame for frame in wrong if frame.lane.label == "C"]
    assert [mark.kind for mark in restored[0].lane.marks] == ["error"]
    assert "finds the state after 128 tokens, but the block holds that after 96" in (
        restored[0].sentence
    )
    for frame in (first, restored[0]):
        assert frames.index(frame) in _key_frames(frames), "the filmstrip shows it"
    last = restored[-1].lane.columns[2]
    assert (last.role, last.right) == ("running", False), "the error is passed on"


def test_the_same_run_without_checkpoints_shows_no_error() -> None:
    run = poisoned()
    plain = Settings(retention=0, max_running=1, internal_checkpoints=False)
    frames = run_frames(simulate(run.requests, plain))
    assert all(column.right for frame in frames for column in frame.lane.columns)


def test_decode_steps_share_a_frame() -> None:
    frames = run_frames(poisoned())
    [decoding] = [frame for frame in frames if "generated" in frame.sentence]
    assert decoding.sentence == "A: 40 tokens are generated in 40 steps."
    assert decoding.lane.seq_len == 140


def test_a_prefill_of_one_token_is_no_decode_step() -> None:
    frames = sequence_frames(1, TOY)
    assert [frame.weight for frame in frames] == [1, 2, 1, 2]


@settings(max_examples=40)
@given(
    prompt=st.integers(1, 1200),
    per_block=st.sampled_from([1, 4]),
    A=st.sampled_from([None, 16]),
    drop=st.booleans(),
    budget=st.sampled_from([256, 8192]),
    retention=st.sampled_from([None, 0]),
)
def test_frames_end_as_the_engine_does(
    prompt: int, per_block: int, A: int | None, drop: bool, budget: int, retention: int | None
) -> None:
    geometry = CacheGeometry(16, 16 * per_block, A, 16, drop)
    frames = sequence_frames(prompt, geometry, budget=budget, retention=retention)
    assert 2 <= len(frames) <= _MOST_FRAMES
    assert frames[-1].lane.seq_len == prompt
    assert frames[-1].lane.columns[-1].held == prompt
    assert all(column.right for frame in frames for column in frame.lane.columns)
    marks = [mark for frame in frames for mark in frame.lane.marks]
    resumed = max((mark.position for mark in marks if mark.kind == "hit"), default=0)
    finding = sequence_finding(frames)
    assert (f"after {resumed:,}." in finding) if resumed else ("no state" in finding)
    strip = _key_frames(frames)
    assert strip == sorted(set(strip))
    assert 2 <= len(strip) <= 6
    assert strip[-1] == len(frames) - 1


def test_too_many_steps_are_refused_and_not_cut() -> None:
    with pytest.raises(CheckpointValueError, match=r"needs \d+ frames; expected at most 40"):
        sequence_frames(4000, TOY, budget=64)


def test_a_filmstrip_has_four_to_six_panels_of_key_frames() -> None:
    frames = sequence_frames(8000, K3)
    assert 4 <= len(_key_frames(frames)) <= 6
    drawing = filmstrip(frames, finding="1 finding.")
    labels = [label.get_text() for label in drawing.figure.axes[0].get_yticklabels()]
    assert labels == [f"frame {at + 1}" for at in _key_frames(frames)]
    assert drawing.alt == " ".join(frames[at].sentence for at in _key_frames(frames))
    assert len(filmstrip(frames, finding="1.", panels=2).figure.axes[0].get_yticks()) == 2
    with pytest.raises(CheckpointValueError, match="panels is 1"):
        filmstrip(frames, finding="1 finding.", panels=1)


def test_frame_k_equals_the_still_of_step_k() -> None:
    frames = sequence_frames(8000, K3)
    animation = SequenceAnimation(frames, finding="1 finding.")
    width = max(frame.lane.width for frame in frames)
    left = left_margin(["first prompt", "same prompt"])
    for number in (3, 0, 5, len(frames) - 1):
        animation.update(number)
        with style():
            still, [ax] = sheet("1 finding.", [lanes_height(1, caption_lines=2)], left=left)
            draw_lanes(ax, [frames[number].captioned], caption_lines=2, width=width)
        assert np.array_equal(pixels(animation.figure), pixels(still)), number
    player_html(animation, alt="A sequence.")


def embedded_frames(page: str) -> int:
    """How many pictures a page really contains."""
    return page.count("data:image/png;base64,")


def test_a_player_embeds_every_frame_once_and_the_same_bytes_each_time() -> None:
    pages = []
    for _ in range(2):
        animation = animate_sequence(8000, K3)
        pages.append(player_html(animation, alt="A < B"))
    assert pages[0] == pages[1]
    page = pages[0]
    assert embedded_frames(page) == len(animation.story) == 10
    assert len(page) < 0.5e6
    assert 'alt="A &lt; B"' in page
    assert "http" not in page.replace("http://www.w3.org", "")
    assert page.count("<li>") == 10


def test_without_a_script_a_film_leaves_its_last_frame_in_words_and_no_dead_button() -> None:
    animation = animate_sequence(100, TOY)
    static = re.sub(r"<script>.*?</script>", "", player_html(animation, alt="A film."), flags=re.S)
    assert embedded_frames(static) == 1
    last = len(animation.story)
    assert f"frame {last} of {last}: {animation.story[-1].sentence}" in static
    assert "<button" not in static
    assert "<input" not in static
    [picture] = re.findall(r"base64,([\w+/=]+)", static)
    animation.update(last - 1)
    assert base64.b64decode(picture) == animation.pictures()[-1]


def test_a_film_on_a_page_and_as_a_gif_has_the_same_frames() -> None:
    animation = animate_sequence(100, TOY)
    page = film_page(animation, alt="A film.")
    assert embedded_frames(page) == len(animation.story)
    assert page.startswith("<!doctype html>")
    assert f"<title>{animation.finding}</title>" in page
    assert "{{" not in page
    data = film_gif(animation, alt="A film.")
    assert data == film_gif(animation, alt="A film.")
    gif = Image.open(io.BytesIO(data))
    assert getattr(gif, "n_frames", 1) == len(animation.story)
    assert gif.info["comment"] == b"A film."
    assert "loop" not in gif.info, "it plays once"
    for number, picture in enumerate(animation.pictures()):
        gif.seek(number)
        still = np.asarray(Image.open(io.BytesIO(picture)).convert("RGB"), int)
        assert np.abs(np.asarray(gif.convert("RGB"), int) - still).mean() < 2, number


def test_every_request_ends_as_its_last_prefill_frame_shows() -> None:
    run = poisoned()
    ended = prefilled_lanes(run.requests, run.settings)
    assert [frame.lane.label for frame in ended] == ["A", "B", "C"]
    for frame in ended:
        shown = [f for f in run_frames(run) if f.lane.label == frame.lane.label and f.weight == 2]
        assert frame.lane.columns == shown[-1].lane.columns
        assert frame.sentence == shown[-1].sentence
    assert any(not column.right for column in ended[1].lane.columns)


def test_frames_that_do_not_fit_are_an_error_and_never_dropped() -> None:
    """F03, jupyter-archive #242: a writer that is given a limit drops frames and only logs it."""
    one = sequence_frames(100, TOY)
    frames = [one[at % len(one)] for at in range(12)]
    animation = SequenceAnimation(frames, finding="1 finding.")
    with pytest.raises(CheckpointValueError, match=r"^\d of 12 frames fit into 0.02 MB"):
        player_html(animation, alt="Too long.", most_megabytes=0.02)
    assert embedded_frames(player_html(animation, alt="Long.", most_megabytes=5)) == 12


def test_an_animation_that_is_returned_is_not_collected_undrawn() -> None:
    """N02, matplotlib #1656: a dropped reference means blank output and a late warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        animation = animate_sequence(100, TOY)
        gc.collect()
        page = player_html(animation, alt="A sequence.")
        del animation
        gc.collect()
    assert embedded_frames(page) > 0


def test_an_animation_opens_no_pyplot_figure_and_leaves_settings_alone() -> None:
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    before, opened = dict(mpl.rcParams), plt.get_fignums()
    player_html(animate_sequence(100, TOY), alt="A sequence.")
    filmstrip(sequence_frames(100, TOY), finding="1 finding.", medium="slide")
    assert dict(mpl.rcParams) == before
    assert plt.get_fignums() == opened


def test_a_second_prompt_of_several_queries_is_told_by_where_it_resumed() -> None:
    """Two queries and nothing kept, under the drop: all 100 tokens are computed again."""
    frames = sequence_frames(100, CacheGeometry(64, 64, None, 64, True), budget=64)
    assert sequence_finding(frames) == (
        "A second prompt of 100 tokens computes 100: no state of its prefix was kept."
    )
