"""The course as static pages: whole, linked, readable without script and without a kernel."""

import re
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest
from nbformat import v4
from notebook_tools import NOTEBOOKS, hooks

from mambackpt import CheckpointValueError
from mambackpt.__main__ import main
from mambackpt.site import build_site, find_notebooks
from mambackpt.site.notebooks import EXTRA_KEYS

EMPTY = {"meta", "img", "path", "use", "br", "hr", "input", "link", "col", "wbr", "source"}


class Whole(HTMLParser):
    """Finds tags that are not closed, pictures without alt text, and links."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        said = dict(attrs)
        self.ids |= {said["id"] or ""} if "id" in said else set()
        if tag not in EMPTY:
            self.open.append(tag)
        if tag == "img" and len(said.get("alt") or "") < 10 and "id" not in said:
            self.wrong.append(f"a picture without words: {said}")
        if tag == "a" and said.get("href"):
            self.links.append(said["href"] or "")

    def handle_endtag(self, tag: str) -> None:
        if tag in EMPTY:  # as XHTML writes it
            return
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"</{tag}> closes nothing")


def read(page: str) -> Whole:
    parser = Whole()
    parser.feed(page)
    return parser


@pytest.fixture(scope="module")
def pages(root: Path) -> dict[str, str]:
    """The notebooks as they are kept; what running them adds is tested with the notebooks."""
    figures = sorted((root / "notebooks/figures").glob("*.svg"))
    return build_site(NOTEBOOKS, run=False, figures=figures)


def test_there_is_a_page_for_each_notebook_and_one_of_contents(pages: dict[str, str]) -> None:
    assert list(pages) == [f"{path.stem}.html" for path in NOTEBOOKS] + ["index.html"]


def test_pages_are_whole_and_every_picture_has_words(pages: dict[str, str]) -> None:
    for name, page in pages.items():
        parsed = read(page)
        assert parsed.wrong == [], name
        assert parsed.open == [], name


def test_links_lead_to_pages_that_exist(pages: dict[str, str]) -> None:
    for name, page in pages.items():
        parsed = read(page)
        local = {link for link in parsed.links if not link.startswith("http")}
        for link in local:
            target, _, part = link.partition("#")
            assert not target or target in pages, (name, link)
            assert target or not part or part in parsed.ids, (name, link)
    reached = read(pages["index.html"]).links
    assert {link for link in reached if link.endswith(".html")} == {*pages} - {"index.html"}


def test_pages_load_nothing_from_elsewhere(pages: dict[str, str]) -> None:
    for name, page in pages.items():
        assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=.https?:", page), name
        assert "@import" not in page


def test_the_same_notebooks_give_the_same_bytes(pages: dict[str, str], root: Path) -> None:
    figures = sorted((root / "notebooks/figures").glob("*.svg"))
    assert build_site(NOTEBOOKS, run=False, figures=figures) == pages


def test_what_only_a_kernel_can_move_is_said_so(tmp_path: Path) -> None:
    widget = {"application/vnd.jupyter.widget-view+json": {"model_id": "a"}, "text/plain": "VBox"}
    cell = v4.new_code_cell("x", outputs=[v4.new_output("display_data", data=widget)])
    text = v4.new_markdown_cell("# One\n\n**A puzzle.** 12?\n\n*Needs:* nothing.")
    nbformat.write(v4.new_notebook(cells=[text, cell]), tmp_path / "01_one.ipynb")
    page = build_site([tmp_path / "01_one.ipynb"], run=False)["01_one.html"]
    assert "run it to use them" in page
    assert "model_id" not in page


def test_a_notebook_is_run_for_its_page(tmp_path: Path) -> None:
    text = v4.new_markdown_cell("# One\n\n**A puzzle.** 12?\n\n*Needs:* nothing.")
    code = v4.new_code_cell("print(6 * 7)")
    nbformat.write(v4.new_notebook(cells=[text, code]), tmp_path / "01_one.ipynb")
    assert "42" in build_site([tmp_path / "01_one.ipynb"])["01_one.html"]


def test_a_run_in_place_keeps_what_is_to_be_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = [v4.new_code_cell("print(6 * 7)"), v4.new_code_cell("print(6 * 7)")]
    cells[1].metadata["tags"] = ["keep_output"]
    path = tmp_path / "01_one.ipynb"
    nbformat.write(v4.new_notebook(cells=cells), path)
    assert main(["site", "--in-place", "--notebooks", str(tmp_path)]) == 0
    again = nbformat.read(path, as_version=4)
    assert [bool(cell.outputs) for cell in again.cells] == [False, True]
    assert path.name in capsys.readouterr().out


def test_a_number_without_a_notebook_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointValueError, match="no notebook is 99 of"):
        find_notebooks(NOTEBOOKS[0].parent, ["99"])
    with pytest.raises(CheckpointValueError, match="the folder of a checkout"):
        find_notebooks(tmp_path)


def test_the_hook_strips_as_the_command_does() -> None:
    assert " ".join(EXTRA_KEYS) == hooks()["nbstripout"]["args"][1]
