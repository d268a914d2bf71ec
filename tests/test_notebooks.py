"""The course: notebooks run, say nothing that is not computed, and read without a kernel."""

import base64
import copy
import io
import platform
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
import yaml
from nbclient.exceptions import CellExecutionError
from nbformat import v4
from notebook_tools import (
    NOTEBOOKS,
    WIDGET_VIEW,
    Notebook,
    checks_itself,
    code_cells,
    copy_of_the_folder,
    execute,
    failures,
    hooks,
    outputs,
    solved,
    stripped,
    tags,
    text_cells,
    words,
)
from PIL import Image

from mambackpt.course import GLOSSARY, LETTERS
from mambackpt.site.notebooks import KERNEL, LANGUAGE

MOST_BYTES = 300_000

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def load(path: Path) -> Notebook:
    return nbformat.read(path, as_version=4)


class Runs:
    """Each notebook as it is kept, and with its exercises solved, executed once for all tests.

    As it is a notebook runs in the browser's tests.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._done: dict[Path, tuple[Notebook, Notebook]] = {}
        self._failed: dict[Path, CellExecutionError] = {}

    def of(self, path: Path) -> tuple[Notebook, Notebook]:
        if path in self._failed:  # said in full by the first test; not run again
            pytest.fail(f"{path.name} does not run: {self._failed[path].evalue}")
        if path not in self._done:
            plain, answered = load(path), solved(load(path))
            for cell in code_cells(answered):
                cell.outputs = []
            try:
                execute(answered, folder=self.folder, PYTHONHASHSEED="1")
            except CellExecutionError as error:
                self._failed[path] = error
                raise
            self._done[path] = plain, answered
        return self._done[path]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(copy_of_the_folder(tmp_path_factory.mktemp("course") / "notebooks"))


def test_there_are_notebooks() -> None:
    assert [path.name[:2] for path in NOTEBOOKS][:2] == ["01", "02"]


# ---- they run ----------------------------------------------------------------------------------


@every_notebook
def test_a_notebook_runs_and_no_output_holds_a_failure(path: Path, runs: Runs) -> None:
    """N01, ipywidgets #2949: outputs and Output-widget states are scanned; a run alone is blind."""
    assert failures(runs.of(path)[1]) == []


def rerun(plain: Notebook, answered: Notebook) -> str:
    """What a run leaves of a notebook, without the answers: no kept output shows them."""
    again = copy.deepcopy(answered)
    for cell, original in zip(again.cells, plain.cells, strict=True):
        cell.source = original.source
    return stripped(again)


@every_notebook
def test_what_is_committed_is_what_a_run_shows(path: Path, runs: Runs) -> None:
    """To the last byte on the kind of machine that made it; elsewhere an edge may round apart.

    What is committed was another run, without answers and with another hash seed.
    """
    fresh = rerun(*runs.of(path))
    if platform.machine() == "x86_64":
        assert fresh == path.read_text(encoding="utf-8"), "run it, and let the hook strip it"
    for new, old in zip(nbformat.reads(fresh, 4).cells, load(path).cells, strict=True):
        assert new.source == old.source
        shown = zip(new.get("outputs", []), old.get("outputs", []), strict=True)
        for one, other in shown:
            assert_shows_the_same(one, other, old.source)


def assert_shows_the_same(one: Any, other: Any, source: str) -> None:
    """Equal words; pictures that differ at most in how another machine rounds an edge."""
    encoded = re.compile(r"data:image/png;base64,[\w+/=]*")
    assert encoded.sub("", words(one)) == encoded.sub("", words(other)), source
    pictures = [output.get("data", {}).get("image/png") for output in (one, other)]
    assert (pictures[0] is None) == (pictures[1] is None), source
    if pictures[0] is not None:
        a, b = (Image.open(io.BytesIO(base64.b64decode(p))).convert("RGB") for p in pictures)
        assert a.size == b.size, source
        assert np.abs(np.asarray(a, float) - np.asarray(b, float)).mean() < 1, source


@every_notebook
def test_every_answer_in_a_notebook_passes_its_checker(path: Path, runs: Runs) -> None:
    plain, answered = runs.of(path)
    exercises = [n for n, cell in enumerate(plain.cells) if "exercise" in tags(cell)]
    assert exercises, "a notebook has an exercise with a checker"
    for number in exercises:
        checker = answered.cells[number + (not checks_itself(plain.cells[number]))]
        [said] = [words(output).strip() for output in checker.outputs]
        assert said.startswith("Right"), plain.cells[number].source


# ---- the scan finds what an execution does not report ------------------------------------------

BUTTON = """
from ipywidgets import Button
button = Button()
button.on_click(lambda _: 1 // 0)
button.click()
"""
INTERACTIVE = """
from ipywidgets import IntSlider, interactive
def shown(n):
    return [][n]
interactive(shown, n=IntSlider(value=3))
"""
CAPTURED = """
from ipywidgets import Output, Text
screen, field = Output(), Text()
@screen.capture()
def changed(_):
    raise KeyError("planted")
field.observe(changed, "value")
field.value = "x"
screen
"""
HEALTHY = """
from ipywidgets import IntSlider, Output
screen, slider = Output(), IntSlider()
slider.observe(lambda change: screen.append_stdout(str(change.new)), "value")
slider.value = 3
screen
"""


def test_the_scan_finds_callbacks_that_fail_in_silence(tmp_path: Path) -> None:
    """N01: nbclient reports success for each of these three; only the scan finds them."""
    planted = {"ZeroDivisionError": BUTTON, "IndexError": INTERACTIVE, "KeyError": CAPTURED}
    notebooks = [v4.new_notebook(cells=[v4.new_code_cell(code)]) for code in planted.values()]
    healthy = v4.new_notebook(cells=[v4.new_code_cell(HEALTHY)])
    execute(*notebooks, healthy, folder=tmp_path)  # raises nothing
    for name, notebook in zip(planted, notebooks, strict=True):
        assert any(name in found for found in failures(notebook)), name
    assert failures(healthy) == []
    assert any(place.startswith("widget") for place, _ in outputs(healthy))  # and it was scanned


def test_the_scan_finds_warnings_on_stderr() -> None:
    warned = v4.new_output("stream", name="stderr", text="UserWarning: Animation was deleted")
    notebook = v4.new_notebook(cells=[v4.new_code_cell("", outputs=[warned])])
    assert len(failures(notebook)) == 1


# ---- how they are written ----------------------------------------------------------------------


@every_notebook
def test_cells_are_short_and_half_of_them_are_text(path: Path) -> None:
    notebook = load(path)
    lengths = [len(cell.source.splitlines()) for cell in code_cells(notebook)]
    assert statistics.median(lengths) <= 5
    assert max(lengths) <= 15
    assert 0.7 <= len(text_cells(notebook)) / len(lengths) <= 1.4


@every_notebook
def test_a_notebook_opens_with_a_puzzle_what_it_needs_and_the_words(path: Path) -> None:
    first, second, *_ = cells = load(path).cells
    assert first.cell_type == second.cell_type == "markdown"
    assert first.source.startswith("# ")
    assert "puzzle" in first.source.lower()
    assert re.search(r"\d{2}", first.source), "the puzzle has a number in it"
    assert "*Needs:*" in first.source
    assert "| meaning" in second.source, "the glossary comes first"
    text = "\n".join(re.sub(r"```.*?```", "", c.source, flags=re.S) for c in text_cells(load(path)))
    assert len(re.findall(r"^# ", text, re.M)) == 1
    assert "pip install" not in "\n".join(cell.source for cell in cells)


@every_notebook
def test_every_section_asks_shows_and_is_checked(path: Path) -> None:
    """Ask, show, notice, check: each section has a question, kept output, and an assertion."""
    sections: list[list[Any]] = []
    for cell in load(path).cells:
        if cell.cell_type == "markdown" and cell.source.startswith("## "):
            sections.append([])
        if sections:
            sections[-1].append(cell)
    for section in sections[1:]:  # the first is the glossary
        title = section[0].source.splitlines()[0]
        text = "\n".join(cell.source for cell in section if cell.cell_type == "markdown")
        code = "\n".join(cell.source for cell in section if cell.cell_type == "code")
        assert "**Ask.**" in text, title
        assert "Notice.**" in text, title
        assert any("keep_output" in tags(cell) for cell in section), title
        assert "assert " in code or "check_" in code, title


@every_notebook
def test_answers_are_folded_away_without_script(path: Path) -> None:
    text = "\n".join(cell.source for cell in text_cells(load(path)))
    assert text.count("<details><summary>") == text.count("</details>") >= 1


def numbers(text: str) -> set[int]:
    """The whole numbers of a text, however they are grouped."""
    joined = re.sub(r"(?<=\d)[,_](?=\d{3}\b)", "", text)
    return {int(found) for found in re.findall(r"(?<![\w.])\d+", joined)}


@every_notebook
def test_every_number_in_the_text_is_in_code_or_in_an_output(path: Path, runs: Runs) -> None:
    """A number of three digits or more that nothing computes or asserts is a finding typed in."""
    computed: set[int] = set()
    for notebook in runs.of(path):
        for cell in code_cells(notebook):
            computed |= numbers(cell.source)
            for output in cell.outputs:
                computed |= numbers(re.sub(r"base64,[\w+/=]*", "", words(output)))
    text = "\n".join(cell.source for cell in text_cells(load(path)))
    text = re.sub(r"```sh\n.*?```", "", text, flags=re.S)  # commands find nothing: they are run
    assert {n for n in numbers(text) if n >= 100} <= computed


MOST_KIT_IMPORTS = 5
MOST_SILENT = 0.4


@every_notebook
def test_code_is_short_speaks_and_imports_little(path: Path, runs: Runs) -> None:
    """A reader stops reading cells that show nothing; ten imports mean that a room has no face.

    An exercise that the next cell checks is where the reader writes, and counts as silent.
    """
    plain, answered = map(code_cells, runs.of(path))
    cells = [cell for cell in plain if cell.source]
    assert statistics.median(len(cell.source.splitlines()) for cell in cells) <= 4
    assert sum(not cell.outputs for cell in answered) / len(answered) < MOST_SILENT
    source = "\n".join(cell.source for cell in cells)
    assert len(re.findall(r"^(?:from|import) mambackpt", source, re.M)) <= MOST_KIT_IMPORTS


@every_notebook
def test_a_notebook_says_what_it_takes_for_granted_and_what_comes_next(path: Path) -> None:
    first, *_, last = text_cells(load(path))
    assert "*Takes for granted:*" in first.source or path == NOTEBOOKS[0]
    following = [*NOTEBOOKS, NOTEBOOKS[0]][NOTEBOOKS.index(path) + 1]
    if path == NOTEBOOKS[-1]:
        assert f"({following.name})" in last.source
        return
    assert f"Next: [{following.name[:2]}, " in last.source
    assert f"({following.name})" in last.source


@every_notebook
def test_links_lead_to_notebooks_that_are_there(path: Path) -> None:
    text = "\n".join(cell.source for cell in text_cells(load(path)))
    names = {notebook.name for notebook in NOTEBOOKS}
    assert set(re.findall(r"\(([^()\s]*\.ipynb)\)", text)) <= names


# ---- words and letters before use --------------------------------------------------------------


def table_rows(notebook: Notebook, head: str) -> tuple[int, dict[str, str]]:
    """Where a notebook's first table of words or letters stands, and its rows."""
    for place, cell in enumerate(notebook.cells):
        lines = cell.source.splitlines()
        heads = [at for at, line in enumerate(lines) if line.startswith(f"| {head} | meaning")]
        if cell.cell_type == "markdown" and heads:
            found = {}
            for line in lines[heads[0] + 2 :]:
                if not line.startswith("| "):
                    break
                word, meaning, *_ = line.strip("| ").split(" | ")
                found[word.strip()] = meaning.strip()
            return place, found
    raise AssertionError(f"no table of {head}s")


def prose(cell: Any) -> str:
    """The words of a text cell, without its title, code and where links lead."""
    bare = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)|^# .*$", " ", cell.source, flags=re.S | re.M)
    return bare if cell.cell_type == "markdown" else ""


def first_use(word: str) -> tuple[str, int]:
    """The notebook and the cell in which a word, or its plural, first stands in the course."""
    form = re.compile(rf"(?<![\w-]){re.escape(word)}s?(?![\w-])", re.I if len(word) > 1 else 0)
    for path in NOTEBOOKS:
        for place, cell in enumerate(load(path).cells):
            if form.search(prose(cell)):
                return path.name[:2], place
    raise AssertionError(f"nobody uses {word!r}")


def defined_in(path: Path) -> dict[str, str]:
    """The words that a notebook's table defines."""
    return table_rows(load(path), "word")[1]


def test_the_tables_of_the_notebooks_are_the_glossary() -> None:
    """What a table adds beyond it are words from before, or of that notebook alone."""
    for path in NOTEBOOKS:
        mine = GLOSSARY.get(path.name[:2], {})
        assert {word: defined_in(path).get(word) for word in mine} == mine, path.name
    assert table_rows(load(NOTEBOOKS[0]), "letter")[1] == LETTERS


@pytest.mark.parametrize(
    ("number", "word"),
    [(n, word) for n, rows in GLOSSARY.items() for row in rows for word in row.split(", ")]
    + [("01", letter) for letter in LETTERS],
)
def test_a_word_is_first_used_where_it_is_defined_or_later(number: str, word: str) -> None:
    [path] = [path for path in NOTEBOOKS if path.name.startswith(number)]
    place, _ = table_rows(load(path), "letter" if word in LETTERS else "word")
    assert first_use(word) >= (number, place)


# ---- what is committed reads without a kernel --------------------------------------------------


@every_notebook
def test_the_file_is_small_and_names_no_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) <= MOST_BYTES
    bare = re.sub(r'(base64,|"image/png": ")[\w+/=\\]*', "", text)
    assert not re.search(r"(?<![\w.])/(home|root|tmp|work|Users)/|site-packages", bare)
    assert platform.node() not in bare


@every_notebook
def test_nothing_alive_is_committed(path: Path) -> None:
    notebook = load(path)
    assert notebook.metadata == {"kernelspec": KERNEL, "language_info": LANGUAGE}
    for cell in code_cells(notebook):
        assert cell.execution_count is None
        assert bool(cell.outputs) == ("keep_output" in tags(cell)), cell.source
        assert set(tags(cell)) <= {"keep_output", "exercise"}
        for output in cell.outputs:
            assert output.output_type == "display_data"
            assert "<script" not in words(output)
            assert WIDGET_VIEW not in output.data


@every_notebook
def test_every_kept_picture_has_alt_text_and_a_plain_twin(path: Path) -> None:
    kept = [output for cell in code_cells(load(path)) for output in cell.outputs]
    assert kept
    for output in kept:
        page = output.data["text/html"]
        if "<img" in page:
            [alt] = re.findall(r'<img [^>]*alt="([^"]*)"', page)
            assert len(alt) > 20
            assert output.data["image/png"]
        else:
            assert "<table" in page
            assert "<caption" in page


@every_notebook
def test_every_live_output_has_a_static_one_in_its_cell_or_the_next(path: Path, runs: Runs) -> None:
    """N07, ipywidgets #3888: a saved widget does not come back; what it shows must be there too."""
    cells = code_cells(runs.of(path)[1])
    for cell, following in zip(cells, [*cells[1:], None], strict=True):
        if not any(WIDGET_VIEW in output.get("data", {}) for output in cell.outputs):
            continue
        beside = [*cell.outputs, *(following.outputs if following else [])]
        assert any("image/png" in output.get("data", {}) for output in beside), cell.source
        assert "keep_output" in tags(cell) + (tags(following) if following else [])


# ---- the hooks ---------------------------------------------------------------------------------


def test_the_hooks_are_the_tools_that_are_installed(root: Path) -> None:
    settings = yaml.safe_load((root / ".pre-commit-config.yaml").read_text())
    assert [repo["repo"] for repo in settings["repos"]] == ["local"]  # nothing is fetched
    assert list(hooks()) == ["ruff", "ruff-format", "nbstripout"]
    for hook in hooks().values():
        assert hook["language"] == "system"
        assert hook["entry"].startswith(".venv/bin/")


def test_the_hooks_leave_the_notebooks_as_they_are(root: Path, tmp_path: Path) -> None:
    shutil.copy(root / "pyproject.toml", tmp_path)
    (tmp_path / "mambackpt").symlink_to(root / "mambackpt")  # imports are sorted by who owns them
    (tmp_path / "notebooks").mkdir()
    copies = []
    for path in NOTEBOOKS:
        assert stripped(load(path)) == path.read_text(encoding="utf-8")
        copies.append(shutil.copy(path, tmp_path / "notebooks"))
    for hook in hooks().values():
        tool, *arguments = hook["entry"].removeprefix(".venv/bin/").split()
        command = [sys.executable, "-m", tool, *arguments, *hook.get("args", []), *copies]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    for path in NOTEBOOKS:
        assert (tmp_path / "notebooks" / path.name).read_bytes() == path.read_bytes()
