"""Run notebooks as a reader would, and find what an execution alone does not report."""

import asyncio
import copy
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import yaml
from nbclient import NotebookClient
from nbstripout import strip_output

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("[0-9][0-9]_*.ipynb"))
WIDGET_STATE = "application/vnd.jupyter.widget-state+json"
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
_SECONDS_PER_CELL = 300
_TRACEBACK = re.compile(r"Traceback \(most recent call last\)|^[\w.]*(Error|Exception)\b", re.M)

Notebook = Any  # nbformat's tree of dictionaries


def code_cells(notebook: Notebook) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text_cells(notebook: Notebook) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "markdown"]


def tags(cell: Any) -> list[str]:
    return list(cell.metadata.get("tags", []))


def execute(*notebooks: Notebook, folder: Path) -> None:
    """Execute notebooks in place, at the same time, each with another hash seed."""

    async def both() -> None:
        jobs = []
        for seed, notebook in enumerate(notebooks):
            client = NotebookClient(
                notebook,
                timeout=_SECONDS_PER_CELL,
                kernel_name="python3",
                resources={"metadata": {"path": str(folder)}},
                record_timing=False,
            )
            jobs.append(client.async_execute(env=os.environ | {"PYTHONHASHSEED": str(seed)}))
        await asyncio.gather(*jobs)

    asyncio.run(both())


def hooks() -> dict[str, Any]:
    """The pre-commit hooks by their id."""
    settings = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    return {hook["id"]: hook for repo in settings["repos"] for hook in repo["hooks"]}


def stripped(notebook: Notebook) -> str:
    """Return the text that the pre-commit hook leaves of a notebook."""
    _, extra_keys = hooks()["nbstripout"]["args"]
    keys = ["metadata.widgets", *extra_keys.split()]
    bare = strip_output(copy.deepcopy(notebook), False, False, False, extra_keys=keys)
    return nbformat.writes(bare) + "\n"


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


def solved(notebook: Notebook) -> Notebook:
    """Return a copy in which each exercise is replaced by the answer that follows it.

    An exercise is a cell tagged so; the next cell checks it, and the Python of the next folded
    answer stands in its place, so it must be the whole cell.
    """
    answered = copy.deepcopy(notebook)
    for number, cell in enumerate(answered.cells):
        if "exercise" in tags(cell):
            later = (c.source for c in answered.cells[number:] if "<details>" in c.source)
            [answer] = re.findall(r"```python\n(.*?)```", next(later), re.S)
            cell.source = answer
    return answered
