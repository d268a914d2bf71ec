"""What a reader gets: JupyterLab in Chromium opens each notebook, runs it, and a slider redraws."""

import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from browser_tools import chromium, keep_screenshot, watch_console
from notebook_tools import NOTEBOOKS, copy_of_the_folder

from mambackpt.bench.browser import (
    KERNEL_IS_READY,
    open_browser,
    open_notebook,
    run_notebook,
    serve_lab,
)
from mambackpt.site.notebooks import LANGUAGE

pytestmark = pytest.mark.browser


def load(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


WITH_EXPLORER = [path for path in NOTEBOOKS if "explore_" in path.read_text(encoding="utf-8")]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser(chromium()) as opened:
        yield opened


@pytest.fixture(scope="module")
def lab(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A JupyterLab server on a copy of the notebooks: its address and its token."""
    home = tmp_path_factory.mktemp("lab")
    folder = copy_of_the_folder(home / "notebooks")
    for path in folder.glob("*.ipynb"):  # written by this patch version of Python
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(LANGUAGE["version"], platform.python_version()))
    with serve_lab(folder, home) as served:
        yield served


class Reader:
    """Opens notebooks, and runs each once for all tests."""

    def __init__(self, browser: Any, lab: tuple[str, str]) -> None:
        self._browser, self._lab = browser, lab
        self._opened: dict[str, Any] = {}
        self._ran: set[str] = set()
        self.errors: dict[str, list[str]] = {}

    def open(self, name: str) -> Any:
        """Return a page on which JupyterLab shows a notebook."""
        if name not in self._opened:
            page = self._opened[name] = open_notebook(self._browser, self._lab, name)
            self.errors[name] = watch_console(page)
        return self._opened[name]

    def run(self, name: str) -> Any:
        """Return the page of a notebook of which all cells were run."""
        page = self.open(name)
        if name not in self._ran:
            run_notebook(page)
            self._ran.add(name)
        return page


@pytest.fixture(scope="module")
def reader(browser: Any, lab: tuple[str, str]) -> Reader:
    return Reader(browser, lab)


every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@every_notebook
def test_a_notebook_reads_before_it_is_run_and_opening_does_not_change_it(
    path: Path, reader: Reader
) -> None:
    """N07: pictures and folded answers survive in a file that nobody has run or trusted."""
    page = reader.open(path.name)
    page.wait_for_function(KERNEL_IS_READY)
    assert not page.evaluate("window.jupyterapp.shell.currentWidget.context.model.dirty")
    for picture in page.locator(".jp-Notebook figure img").all():
        assert picture.evaluate("image => image.decode().then(() => image.naturalWidth)") > 300
        assert len(picture.get_attribute("alt")) > 20
    answer = page.locator("details").first
    answer.scroll_into_view_if_needed()
    answer.locator("summary").click()
    assert answer.get_attribute("open") is not None
    page.locator(".jp-Notebook .jp-Cell").first.scroll_into_view_if_needed()
    keep_screenshot(page, f"{path.stem[:2]}-opened")


@every_notebook
def test_a_notebook_runs_in_the_browser_without_an_error(path: Path, reader: Reader) -> None:
    page = reader.run(path.name)
    asked = sum("exercise" in cell.metadata.get("tags", ()) for cell in load(path).cells)
    assert page.get_by_text("No answer yet. Replace").count() == asked >= 1
    assert not page.locator("[data-mime-type*=error]").count()
    assert not page.get_by_text("Traceback (most recent call last)").count()
    assert reader.errors[path.name] == []


@pytest.mark.parametrize("path", WITH_EXPLORER, ids=lambda path: path.stem)
def test_a_moved_slider_changes_the_picture(path: Path, reader: Reader) -> None:
    page = reader.run(path.name)
    explorer = page.locator(".mambackpt-explorer").first
    picture = explorer.locator("figure img")
    before = picture.get_attribute("src")
    assert len(picture.get_attribute("alt")) > 20
    handle = explorer.locator(".noUi-handle:visible").first
    handle.scroll_into_view_if_needed()
    handle.focus()
    for key in ("Home", "ArrowRight", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    page.wait_for_function(
        "([image, before]) => image.isConnected ? image.src !== before : true",
        arg=[picture.element_handle(), before],
    )
    assert picture.get_attribute("src") != before


def test_bad_input_shows_a_sentence(reader: Reader) -> None:
    page = reader.run("02_where_checkpoints_land.ipynb")
    explorer = page.locator(".mambackpt-explorer").first
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


def test_the_start_page_leads_to_every_notebook(reader: Reader) -> None:
    page = reader.open("start.ipynb")
    links = page.locator(".jp-RenderedMarkdown a[href*='ipynb']")
    links.first.wait_for()
    assert {link.inner_text()[:2] for link in links.all()} == {path.name[:2] for path in NOTEBOOKS}
    keep_screenshot(page, "start-opened")


# Words that a reader needs, and how far their colour is from the one behind them (WCAG: 4.5).
_CONTRAST = """box => {
    const light = colour => {
        const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map(v => {
            const part = v / 255;
            return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
        });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = element => {
        for (let at = element; at; at = at.parentElement) {
            const colour = getComputedStyle(at).backgroundColor;
            if (!/rgba\\(.*, 0\\)|transparent/.test(colour)) return colour;
        }
        return "rgb(255, 255, 255)";
    };
    const words = box.querySelectorAll("td, th, caption, .widget-label, .film-words, button");
    return [...words].filter(e => e.innerText.trim() && e.offsetParent).map(e => {
        const [a, b] = [light(getComputedStyle(e).color), light(behind(e))];
        return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), e.innerText];
    }).filter(([ratio]) => ratio < 4.5);
}"""


def test_a_dark_theme_keeps_words_readable_and_pictures_on_white(reader: Reader) -> None:
    page = reader.run("02_where_checkpoints_land.ipynb")
    change = "theme => window.jupyterapp.commands.execute('apputils:change-theme', {theme})"
    page.evaluate(change, "JupyterLab Dark")
    try:
        page.wait_for_function("document.body.dataset.jpThemeLight === 'false'")
        explorer = page.locator(".mambackpt-explorer").first
        assert explorer.evaluate(_CONTRAST) == []
        for table in page.locator(".jp-RenderedHTML table").all():
            assert table.evaluate(_CONTRAST) == []
        explorer.scroll_into_view_if_needed()
        keep_screenshot(page, "02-dark")
    finally:
        page.evaluate(change, "JupyterLab Light")


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
