"""Run notebooks as a reader would, and find what an execution alone does not report."""

import ast
import copy
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import yaml

from mambackpt.site import NOTEBOOK_NAMES, execute, stripped

__all__ = ["execute", "stripped"]  # as the pages do it

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob(NOTEBOOK_NAMES))
WIDGET_STATE = "application/vnd.jupyter.widget-state+json"
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
_TRACEBACK = re.compile(r"Traceback \(most recent call last\)|^[\w.]*(Error|Exception)\b", re.M)

Notebook = Any  # nbformat's tree of dictionaries


def code_cells(notebook: Notebook) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text_cells(notebook: Notebook) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "markdown"]


def tags(cell: Any) -> list[str]:
    return list(cell.metadata.get("tags", []))


def hooks() -> dict[str, Any]:
    """The pre-commit hooks by their id."""
    settings = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    return {hook["id"]: hook for repo in settings["repos"] for hook in repo["hooks"]}


def copy_of_the_folder(target: Path) -> Path:
    """Copy the notebooks, so that a run does not touch the checkout."""
    shutil.copytree(FOLDER, target, ignore=shutil.ignore_patterns(".*"))
    return target


def outputs(notebook: Notebook) -> Iterator[tuple[str, Any]]:
    """Every output with its place: in a cell, or in an Output widget, whose state is apart."""
    for number, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", []):
            yield f"cell {number}", output
    saved = notebook.metadata.get("widgets", {}).get(WIDGET_STATE, {}).get("state", {})
    for name, model in saved.items():
        for output in model.get("state", {}).get("outputs", None) or []:
            yield f"widget {name[:8]}", nbformat.from_dict(output)


def words(output: Any) -> str:
    """All text of an output, whatever its kind."""
    parts = [output.get("text", ""), *output.get("traceback", [])]
    parts += [text for kind, text in output.get("data", {}).items() if kind.startswith("text/")]
    return "\n".join(part if isinstance(part, str) else "".join(part) for part in parts)


def failures(notebook: Notebook) -> list[str]:
    """Return what went wrong in an executed notebook, also where the execution succeeded."""
    found = []
    for place, output in outputs(notebook):
        said = words(output)
        if output.output_type == "error" or _TRACEBACK.search(said):
            found.append(f"{place}: {output.get('ename', '')} {said[-300:]}")
        elif output.get("name") == "stderr":
            found.append(f"{place}: on stderr: {said[-300:]}")
    return found


def checks_itself(cell: Any) -> bool:
    """Whether an exercise is checked in its own cell, below the answer, and not in the next."""
    return "check_" in cell.source


def solved(notebook: Notebook) -> Notebook:
    """Return a copy in which each exercise is replaced by the answer that follows it.

    An exercise is a cell tagged so. Its answer is the Python of the next folded text, and takes the
    place of the whole cell, which the next one checks; of a cell that checks itself, the place of
    the first statement.
    """
    answered = copy.deepcopy(notebook)
    for number, cell in enumerate(answered.cells):
        if "exercise" in tags(cell):
            later = (c.source for c in answered.cells[number:] if "<details>" in c.source)
            [answer] = re.findall(r"```python\n(.*?)```", next(later), re.S)
            if checks_itself(cell):
                asked = ast.parse(cell.source).body[0].end_lineno
                answer += "\n".join(cell.source.splitlines()[asked:])
            cell.source = answer
    return answered
