"""What a reader gets: JupyterLab in Chromium opens each notebook, runs it, and a slider redraws."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from notebook_tools import NOTEBOOKS, copy_of_the_folder

from mambackpt.bench.browser import (
    find_chromium,
    open_browser,
    open_notebook,
    run_notebook,
    serve_lab,
)

pytestmark = pytest.mark.browser

WITH_EXPLORER = [path for path in NOTEBOOKS if "explore_" in path.read_text(encoding="utf-8")]


def chromium() -> str:
    """Where Chromium is; without one the tests skip, or fail where a browser is required."""
    if found := find_chromium():
        return found
    if os.environ.get("MAMBACKPT_REQUIRE_BROWSER") == "1":
        pytest.fail("MAMBACKPT_REQUIRE_BROWSER=1, and no chromium is on the PATH")
    pytest.skip("needs chromium on the PATH (Debian: apt-get install chromium)")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser(chromium()) as opened:
        yield opened


@pytest.fixture(scope="module")
def lab(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A JupyterLab server on a copy of the notebooks: its address and its token."""
    home = tmp_path_factory.mktemp("lab")
    with serve_lab(copy_of_the_folder(home / "notebooks"), home) as served:
        yield served


class Reader:
    """Opens notebooks, and runs each once for all tests."""

    def __init__(self, browser: Any, lab: tuple[str, str]) -> None:
        self._browser, self._lab = browser, lab
        self._ran: dict[str, Any] = {}

    def open(self, name: str) -> Any:
        """Return a page on which JupyterLab shows a notebook."""
        return open_notebook(self._browser, self._lab, name)

    def run(self, name: str) -> Any:
        """Return the page of a notebook of which all cells were run, without an error."""
        if name not in self._ran:
            page = self._ran[name] = self.open(name)
            run_notebook(page)
            assert not page.locator("[data-mime-type*=error]").count()
        return self._ran[name]


@pytest.fixture(scope="module")
def reader(browser: Any, lab: tuple[str, str]) -> Reader:
    return Reader(browser, lab)


@pytest.mark.parametrize("path", WITH_EXPLORER, ids=lambda path: path.stem)
def test_a_moved_slider_changes_the_picture(path: Path, reader: Reader) -> None:
    page = reader.run(path.name)
    explorer = page.locator(".widget-vbox").first
    picture = explorer.locator("img")
    before = picture.get_attribute("src")
    assert len(picture.get_attribute("alt")) > 20
    handle = explorer.locator(".noUi-handle").first
    handle.scroll_into_view_if_needed()
    handle.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    page.wait_for_function(
        "([image, before]) => image.isConnected ? image.src !== before : true",
        arg=[picture.element_handle(), before],
    )
    assert picture.get_attribute("src") != before


def test_bad_input_shows_a_sentence(reader: Reader) -> None:
    page = reader.run("02_where_checkpoints_land.ipynb")
    explorer = page.locator(".widget-vbox").first
    field = explorer.get_by_label("hash unit H")
    field.fill("0")
    field.press("Enter")
    alert = explorer.get_by_role("alert")
    alert.wait_for()
    assert "hash unit H is 0; expected a positive number of tokens" in alert.inner_text()
    assert "Traceback" not in page.locator(".jp-Notebook").inner_text()


def test_a_player_steps_through_its_frames_by_buttons_slider_and_keys(reader: Reader) -> None:
    page = reader.run("01_one_sequence_many_blocks.ipynb")
    player = page.locator(".animation")
    picture, said = player.locator("img"), player.locator(".film-words")
    picture.scroll_into_view_if_needed()
    assert said.inner_text().startswith("frame 1 of 10: ")
    seen = {picture.get_attribute("src")}
    player.get_by_role("button", name="Next frame").click()
    assert said.inner_text().startswith("frame 2 of 10: ")
    seen.add(picture.get_attribute("src"))
    slider = player.get_by_role("slider")
    slider.focus()
    scrolled = page.locator(".jp-WindowedPanel-outer").first.evaluate("box => box.scrollTop")
    for key, number in (("ArrowRight", 3), ("End", 10), ("ArrowLeft", 9), ("Home", 1)):
        page.keyboard.press(key)
        assert said.inner_text().startswith(f"frame {number} of 10: "), key
        seen.add(picture.get_attribute("src"))
    assert len(seen) == 5  # frames 1, 2, 3, 9 and 10
    after = page.locator(".jp-WindowedPanel-outer").first.evaluate("box => box.scrollTop")
    assert after == scrolled, "the notebook stays where it is"
    player.get_by_role("button", name="Play").click()
    page.wait_for_function(
        "said => said.innerText.startsWith('frame 3 of')", arg=said.element_handle()
    )
    player.get_by_role("button", name="Pause").click()


def test_the_story_is_there_without_a_kernel(reader: Reader) -> None:
    """N07: pictures and folded answers survive in a file that nobody has run or trusted."""
    page = reader.open(NOTEBOOKS[0].name)
    picture = page.locator(".jp-Notebook figure img").first
    picture.wait_for()
    assert picture.evaluate("image => image.naturalWidth") > 300
    answer = page.locator("details").first
    answer.scroll_into_view_if_needed()
    answer.locator("summary").click()
    assert answer.get_attribute("open") is not None


def test_a_missing_browser_is_a_failure_only_where_it_is_required(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.delenv("MAMBACKPT_REQUIRE_BROWSER", raising=False)
    with pytest.raises(pytest.skip.Exception, match="needs chromium"):
        chromium()
    monkeypatch.setenv("MAMBACKPT_REQUIRE_BROWSER", "1")
    with pytest.raises(pytest.fail.Exception, match="no chromium"):
        chromium()
