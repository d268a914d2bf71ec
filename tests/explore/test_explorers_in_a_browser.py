"""Every explorer in JupyterLab, driven by keys and mouse through its range and through nonsense."""

from collections.abc import Iterator
from typing import Any

import nbformat
import pytest
from browser_tools import chromium, keep_screenshot, settle, watch_console
from nbformat import v4

from mambackpt.bench.browser import open_browser, open_notebook, run_notebook, serve_lab

pytestmark = pytest.mark.browser

EXPLORERS = ("sequence", "placement", "branches", "replay", "engine", "export", "capacity")
# What a reader sees of an explorer: is anything blank, cut off, or older than the numbers?
_SEEN = """box => ({
    alerts: [...box.querySelectorAll("[role=alert]")].map(e => e.innerText),
    alts: [...box.querySelectorAll("figure img")].map(e => e.alt),
    blank: [...box.querySelectorAll("select")].filter(
        s => s.selectedIndex < 0 || !s.selectedOptions[0].text.trim()).length,
    cut: [...box.querySelectorAll(".widget-label, .widget-button")].filter(
        e => e.offsetParent && e.scrollWidth > e.clientWidth + 1).map(e => e.innerText),
})"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A notebook with one explorer a cell, run."""
    home = tmp_path_factory.mktemp("explorers")
    (home / "notebooks").mkdir()
    cells = [v4.new_code_cell("from mambackpt import explore")]
    cells += [v4.new_code_cell(f"explore.explore_{name}()") for name in EXPLORERS]
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)"}}
    notebook = v4.new_notebook(cells=cells, metadata=metadata)
    nbformat.write(notebook, home / "notebooks/explorers.ipynb")
    with (
        open_browser(chromium()) as browser,
        serve_lab(home / "notebooks", home) as lab,
    ):
        opened = open_notebook(browser, lab, "explorers.ipynb")
        opened.errors = watch_console(opened)
        run_notebook(opened)
        settle(opened)
        yield opened


@pytest.fixture(params=EXPLORERS)
def explorer(page: Any, request: pytest.FixtureRequest) -> Any:
    cell = page.locator(".jp-CodeCell").nth(1 + EXPLORERS.index(request.param))
    box = cell.locator(".jp-OutputArea-output .widget-vbox").first
    box.scroll_into_view_if_needed()
    box.title = request.param
    return box


def seen(explorer: Any) -> dict[str, Any]:
    """What a settled explorer shows; it is always whole: a picture or a sentence, never both."""
    settle(explorer.page)
    found: dict[str, Any] = explorer.evaluate(_SEEN)
    assert found["blank"] == 0
    assert found["cut"] == []
    assert len(found["alerts"]) + len(found["alts"]) == 1, found
    assert all("Traceback" not in said and "failed" not in said for said in found["alerts"])
    return found


def test_an_explorer_opens_whole_and_says_what_its_picture_shows(explorer: Any) -> None:
    found = seen(explorer)
    assert len(found["alts"][0]) > 20
    keep_screenshot(explorer, f"{explorer.title}-opened")


def test_every_slider_is_driven_by_keys_and_by_the_mouse(explorer: Any) -> None:
    for handle in explorer.locator(".noUi-handle").all():
        if not handle.is_visible():
            continue
        before = handle.get_attribute("aria-valuenow")
        handle.focus()
        explorer.page.keyboard.press("End")
        seen(explorer)
        explorer.page.keyboard.press("Home")
        seen(explorer)
        explorer.page.keyboard.press("ArrowRight")
        seen(explorer)
        track = handle.locator("xpath=ancestor::*[contains(@class, 'noUi-base')]")
        track.click(position={"x": track.bounding_box()["width"] * 0.6, "y": 2}, force=True)
        seen(explorer)
        assert before is not None
    keep_screenshot(explorer, f"{explorer.title}-moved")


def test_every_choice_can_be_chosen_by_keys_and_none_is_blank(explorer: Any) -> None:
    for choice in explorer.locator("select:visible").all():
        count = choice.locator("option").count()
        start = choice.evaluate("select => select.selectedIndex")
        choice.focus()
        explorer.page.keyboard.press("Home")
        texts = set()
        for _ in range(min(count, 10)):
            seen(explorer)
            texts.add(choice.evaluate("select => select.selectedOptions[0].text"))
            explorer.page.keyboard.press("ArrowDown")
        assert len(texts) == min(count, 10)
        choice.select_option(index=start)
        seen(explorer)
    for box in explorer.locator("input[type=checkbox]:visible").all():
        box.focus()
        for _ in range(2):
            explorer.page.keyboard.press("Space")
            seen(explorer)


def test_nonsense_is_answered_by_a_sentence_that_goes_away(explorer: Any) -> None:
    for field in explorer.locator("input[type=number]:visible").all():
        start = field.input_value()
        for typed in ("0", "-3", "987654321987"):
            field.fill(typed)
            field.press("Enter")
            said = seen(explorer)["alerts"]
            assert all("Try" in sentence for sentence in said), said
        keep_screenshot(explorer, f"{explorer.title}-nonsense")
        field.fill(start)
        field.press("Enter")
        seen(explorer)
    for field in explorer.locator("input[type=text]:visible").all():
        start = field.input_value()
        field.fill("no such thing")
        field.press("Enter")
        assert "Try" in seen(explorer)["alerts"][0]
        field.fill(start)
        field.press("Enter")
        assert seen(explorer)["alerts"] == []


def test_after_all_that_no_error_was_reported(page: Any) -> None:
    assert page.errors == []
    assert not page.locator("[data-mime-type*=error]").count()
