"""The notebooks of a checkout: found, run as a reader would, and stripped of what is alive."""

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mambackpt.errors import CheckpointValueError

Notebook = Any  # nbformat's tree of dictionaries
NOTEBOOK_NAMES = "[0-9][0-9]_*.ipynb"
_SECONDS_PER_CELL = 300
# What the hook of the repository takes out of each notebook beside outputs and counts.
EXTRA_KEYS = ("cell.metadata.execution",)
# As JupyterLab writes them: what it finds as it would write it, it does not mark as changed.
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
LANGUAGE = {
    "codemirror_mode": {"name": "ipython", "version": 3},
    "file_extension": ".py",
    "mimetype": "text/x-python",
    "name": "python",
    "nbconvert_exporter": "python",
    "pygments_lexer": "ipython3",
    "version": "3.11.7",
}


def find_notebooks(folder: Path, wanted: Sequence[str] = ()) -> list[Path]:
    """Return the notebooks of a folder in their order, or those that a number names.

    Raises CheckpointValueError where there are none of that number.
    """
    every = sorted(folder.glob(NOTEBOOK_NAMES))
    chosen = [path for path in every if not wanted or path.name[:2] in wanted]
    unknown = {*wanted} - {path.name[:2] for path in every}
    if not every or unknown:
        said = f"{', '.join(sorted(unknown))} of {folder}" if unknown else f"{folder}"
        raise CheckpointValueError(
            f"no notebook is {said}; expected names such as 01_one_sequence_many_blocks.ipynb. "
            f"Try {', '.join(path.name[:2] for path in every) or 'the folder of a checkout'}."
        )
    return chosen


def execute(*notebooks: Notebook, folder: Path, **variables: str) -> None:
    """Execute notebooks in place, one after another, each with another hash seed.

    ``folder`` is where they run; ``variables`` are set in their environment. Side by side in one
    event loop, a client may sleep on an answer that is there until its time is over.
    """
    from nbclient import NotebookClient

    for seed, notebook in enumerate(notebooks):
        client = NotebookClient(
            notebook,
            timeout=_SECONDS_PER_CELL,
            kernel_name="python3",
            resources={"metadata": {"path": str(folder)}},
            record_timing=False,
        )
        own = {"PYTHONHASHSEED": str(seed), **variables}
        client.execute(env=os.environ | own)


def stripped(notebook: Notebook, extra_keys: Sequence[str] = EXTRA_KEYS) -> str:
    """Return the text of a notebook with its kept outputs, and nothing that is alive."""
    import nbformat
    from nbstripout import strip_output

    keys = ["metadata.widgets", *extra_keys]
    bare = strip_output(copy.deepcopy(notebook), False, False, False, extra_keys=keys)
    bare.metadata.update(kernelspec=KERNEL, language_info=LANGUAGE)
    return str(nbformat.writes(bare)) + "\n"  # type: ignore[no-untyped-call]
