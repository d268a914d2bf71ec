"""Copy as code: the command line and the Python line give the very view that is shown."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ipywidgets.widgets import widget as registry

from mambackpt.__main__ import main
from mambackpt.errors import CheckpointValueError
from mambackpt.explore.branches import explore_branches
from mambackpt.explore.capacity import explore_capacity
from mambackpt.explore.command import VIEWS
from mambackpt.explore.engine import explore_engine
from mambackpt.explore.exports import explore_export
from mambackpt.explore.lanes import explore_placement, explore_sequence
from mambackpt.explore.replays import explore_replay
from mambackpt.explore.saving import FORMATS, save_drawing
from mambackpt.explore.widgets import Explorer, explore
from mambackpt.geometry import CacheGeometry
from mambackpt.replay.generators import generate_documents

FINE = CacheGeometry(16, 1600, None, 32, True)
MOVED: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "placement": (explore_placement, [{}, {"M": 768}, {"H": 128, "start": 640, "A": 64}]),
    "sequence": (lambda: explore_sequence(3602, 1600, FINE), [{}, {"drop": False, "A": 16}]),
    "replay": (
        lambda: explore_replay(generate_documents(100)),
        [{"rule": "last+interval(4096)", "pool": 0}, {"block": 1024, "pool": -1, "budget": 4096}],
    ),
    "engine": (explore_engine, [{"step": 4}, {"story": "released-fault", "variant": "vllm-0.29"}]),
    "branches": (explore_branches, [{"third": 127}, {"shared": 100, "variant": "vllm-0.29"}]),
    "capacity": (explore_capacity, [{}, {"model": "kimi-k3", "pool": 320, "tokens": 131_072}]),
    "export": (explore_export, [{}, {"buffer": "recurrent_state", "state": "bfloat16", "row": 2}]),
}


@pytest.fixture(autouse=True)
def _no_widget_is_left() -> Iterator[None]:
    before = set(registry._instances)
    yield
    assert set(registry._instances) == before


def test_every_view_of_the_command_has_an_explorer_here() -> None:
    assert set(MOVED) == set(VIEWS)


@pytest.mark.parametrize("name", MOVED)
def test_both_lines_of_code_give_the_view_that_is_shown(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, moves = MOVED[name]
    explorer: Explorer = make()
    for number, values in enumerate(moves):
        if values.get("pool") == -1:
            values = values | {"pool": explorer._controls["pool"].options[-1][1]}
        explorer.set(**values)
        code = explorer.code
        assert code is not None
        shown = explorer.save(tmp_path, "svg").read_bytes()

        scope: dict[str, Any] = {}
        exec(code.python, scope)
        view = scope["view"]
        drawn = save_drawing(view.draw(), tmp_path / f"python-{number}.svg").read_bytes()
        assert drawn == shown

        words = shlex.split(code.command)
        assert words[:3] == ["python", "-m", "mambackpt"]
        out = tmp_path / f"command-{number}.svg"
        assert main([*words[3:], "--out", str(out)]) == 0
        assert capsys.readouterr().out.startswith(view.finding + "\n")
        assert out.read_bytes() == shown
        assert view.finding in explorer.page.replace("&#x27;", "'")
    explorer.close()


def test_the_code_is_shown_where_it_is_asked_for_and_follows_the_view() -> None:
    explorer = explore_placement()
    tools = explorer._tools
    assert tools.lines.value == ""
    tools.ask.value = True
    assert "--block 1536" in tools.lines.value
    explorer._controls["M"].value = 768
    assert "--block 768" in tools.lines.value
    assert "CacheGeometry(768, 768, 16, 768)" in tools.lines.value
    tools.ask.value = False
    assert tools.lines.value == ""
    explorer.close()


@pytest.mark.parametrize("kind", FORMATS)
def test_a_figure_is_saved_whole_and_never_over_another(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    explorer = explore_placement()
    tools = explorer._tools
    tools.kind.value = kind
    for number in ("", "-2"):
        tools.save.click()
        path = tmp_path / f"placement{number}.{kind}"
        assert str(path) in tools.said.value
        assert path.stat().st_size > 1000
    assert len(list(tmp_path.iterdir())) == 2
    one, two = sorted(tmp_path.iterdir())
    assert one.read_bytes() == two.read_bytes()
    explorer.close()


def test_what_cannot_be_saved_says_so(tmp_path: Path) -> None:
    explorer = explore_placement()
    with pytest.raises(CheckpointValueError, match="cannot be written"):
        explorer.save(tmp_path / "nowhere")
    explorer._controls["H"].value = 0
    with pytest.raises(CheckpointValueError, match="nothing is shown"):
        explorer.save(tmp_path)
    explorer._tools.save.click()
    assert 'role="alert"' in explorer._tools.said.value
    assert not list(tmp_path.iterdir())
    explorer.close()


def test_a_trace_that_no_name_opens_is_called_what_it_is() -> None:
    explorer = explore_replay(generate_documents(50, seed=7))
    code = explorer.code
    assert code is not None
    assert "--trace YOUR_FILE" in code.command
    assert "replay_view(trace, 'none'" in code.python
    explorer.close()


def test_an_explorer_of_yours_has_no_code_to_copy() -> None:
    from ipywidgets import IntSlider

    explorer = explore(lambda tokens: f"{tokens}", tokens=IntSlider(value=3, min=1, max=9))
    assert explorer.code is None
    explorer.close()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["placemnt"], "Try 'placement'"),
        (["placement", "--hash", "0"], "--hash is '0'"),
        (["placement", "--block", "100", "--hash", "64"], "--block is 100 and --hash is 64"),
        (["engine", "--step", "99"], "--step is 99 and the run has 6"),
        (["export", "--row", "8"], "--row is 8"),
        (["placement", "--out", "view.bmp"], "the file's ending is 'bmp'"),
        (["placement", "--out", "nowhere/view.svg"], "nowhere/view.svg cannot be written"),
        (["replay", "--trace", "no-such-file"], "no-such-file"),
    ],
)
def test_the_command_says_what_is_wrong_in_one_sentence(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explore", *words]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert said in told.err
    assert told.err.count("\n") == 1


def test_sizes_that_are_not_given_follow_those_above_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["explore", "sequence", "--prompt", "8000", "--hash", "128"])
    assert re.match(r"A second prompt of 8,000 tokens computes 64:", capsys.readouterr().out)
