"""What explorers leave on a page without a kernel."""

import re

import pytest
from notebook_tools import NOTEBOOKS

from mambackpt.explore import explore_branches, explore_engine
from mambackpt.explore.static import MOST_BYTES, SWITCH, static_views


@pytest.mark.parametrize("make", [explore_branches, explore_engine])
def test_views_hold_what_the_explorer_shows_and_leave_it_as_it_was(make) -> None:
    explorer = make()
    try:
        before, page = explorer.values, explorer.page
        views = static_views(explorer, most_bytes=70_000)
        assert explorer.values == before
        assert explorer.page == page
        assert len(views) < 70_000
        [first] = re.findall(r'alt="([^"]*)"', page)
        alts = re.findall(r'alt="([^"]*)"', views)
        assert alts[0] == first
        pictures = re.findall(r'src="([^"]*)"', views)
        assert len(set(pictures)) == len(pictures) > 1  # each view is another one
        assert "alert" not in views
    finally:
        explorer.close()


def test_only_a_page_asks_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    explorer = explore_engine()
    try:
        assert "text/html" not in explorer._repr_mimebundle_()
        monkeypatch.setenv(SWITCH, "1")
        assert '<div class="views">' in explorer._repr_mimebundle_()["text/html"]
    finally:
        explorer.close()


def test_the_views_of_a_notebook_take_at_most_300_kb() -> None:
    for path in NOTEBOOKS:
        calls = re.findall(r'"(?:explore\.)?explore_\w+\(', path.read_text(encoding="utf-8"))
        assert len(calls) * MOST_BYTES <= 300_000, path.name
