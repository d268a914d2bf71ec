"""The static site in Chromium: readable by everybody, its parts alive without a kernel."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from browser_tools import chromium, keep_screenshot, watch_console
from notebook_tools import NOTEBOOKS

from mambackpt.bench.browser import open_browser
from mambackpt.explore import explore_branches, explore_engine
from mambackpt.explore.static import static_views
from mambackpt.site import build_site
from mambackpt.site.pages import Page, whole_page

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages of the notebooks as they are, and one with what explorers leave."""
    folder = tmp_path_factory.mktemp("site")
    figures = sorted((NOTEBOOKS[0].parent / "figures").glob("w*.svg"))
    for name, page in build_site(NOTEBOOKS, run=False, figures=figures).items():
        (folder / name).write_text(page, encoding="utf-8")
    views = []
    for explorer in (explore_branches(), explore_engine()):
        views.append(static_views(explorer, most_bytes=90_000))
        explorer.close()
    page = Page("views", "Explorers", "", f"<h1>Explorers</h1>{''.join(views)}")
    (folder / "views.html").write_text(whole_page(page, [page]), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser(chromium()) as opened:
        yield opened


@pytest.mark.parametrize("stem", ["index", "views", *(path.stem for path in NOTEBOOKS)])
def test_a_page_breaks_no_rule_of_accessibility(stem: str, site: Path, browser: Any) -> None:
    """axe-core: contrast, names, headings, landmarks, labels; contrast in the dark, too."""
    page = browser.new_page(viewport={"width": 1280, "height": 720})
    errors = watch_console(page)
    page.goto((site / f"{stem}.html").as_uri())
    broken = Axe().run(page).response["violations"]
    keep_screenshot(page, f"site-{stem[:7]}-light")
    page.emulate_media(color_scheme="dark")
    broken += Axe().run(page, options={"runOnly": ["color-contrast"]}).response["violations"]
    keep_screenshot(page, f"site-{stem[:7]}-dark")
    page.close()
    told = [(rule["id"], [node["html"][:120] for node in rule["nodes"][:3]]) for rule in broken]
    assert told == []
    assert errors == []


def test_views_are_paged_through_without_a_kernel(site: Path, browser: Any) -> None:
    page = browser.new_page()
    page.goto((site / "views.html").as_uri())
    for views in page.locator(".views").all():
        shown = views.locator("[role=group]:visible")
        choice = views.get_by_role("combobox")
        names = choice.locator("option").all_inner_texts()
        assert len(names) > 2
        seen = []
        for _ in names:
            seen.append(shown.get_attribute("aria-label"))
            assert shown.locator("figure img").get_attribute("alt")
            views.get_by_role("button", name="Next view").click()
        assert seen == names
        views.get_by_role("button", name="Previous view").click()
        assert shown.get_attribute("aria-label") == names[-1]
        choice.select_option(names[1])
        assert shown.get_attribute("aria-label") == names[1]
    page.close()


def test_the_first_view_is_there_without_script(site: Path, browser: Any) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto((site / "views.html").as_uri())
    assert page.locator(".views [role=group]:visible figure img").count() == 2
    context.close()
