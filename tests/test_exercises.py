"""The exercise of notebook 05, as a reader would do it: wrong, half right, and right."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

LATE = "    target = (block * block_stride).to(tl.int64)\n"
RIGHT = "    target = block.to(tl.int64) * block_stride\n"
HEAD = """\
import torch
import triton
import triton.language as tl

from mambackpt.course import check_function, exporting

stride = 442_368


"""


@pytest.fixture(scope="module")
def cells(root: Path) -> list[dict]:
    return json.loads((root / "notebooks/05_exporting_states.ipynb").read_text())["cells"]


def source_of(cells: list[dict], words: str, kind: str = "code") -> str:
    [found] = [
        "".join(cell["source"])
        for cell in cells
        if cell["cell_type"] == kind and words in "".join(cell["source"])
    ]
    return found


def check_kernel(cells: list[dict], folder: Path, change: tuple[str, str]) -> ModuleType:
    """The notebook's late kernel, changed as a reader would, its small test and its checker."""
    kernel = source_of(cells, "def late_export(")
    for old, new in (change, ("late_export", "my_export")):
        assert kernel.count(old) == 1
        kernel = kernel.replace(old, new)
    parts = [
        kernel,
        source_of(cells, "late_export[(2, 2)]").replace("late_export", "my_export"),
        source_of(cells, "check_function(")
        .replace("my_export = ...\n", "")
        .replace("check_f", "verdict = check_f"),
    ]
    path = folder / "exercise.py"
    path.write_text(HEAD + "\n\n\n".join(parts) + "\n")
    spec = importlib.util.spec_from_file_location("exercise", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_planted_bug_passes_the_small_test_and_is_caught_by_the_checker(cells, tmp_path):
    """K01, vllm PR #55924: block 4,855 of 442,368 elements is the first beyond 32 bits."""
    verdict = check_kernel(cells, tmp_path, (LATE, LATE)).verdict
    assert not verdict
    assert "(4855, 0, 0)" in str(verdict)
    assert "-2147270656" in str(verdict)


def test_the_answer_in_the_notebook_is_the_late_kernel_repaired(cells, tmp_path):
    text = source_of(cells, "def my_export(", "markdown")
    answer = re.search(r"```python\n(.*?)```", text, re.S)[1]
    late = source_of(cells, "def late_export(").replace("late_export", "my_export")
    assert answer.strip() == late.replace(LATE, RIGHT).strip()
    assert check_kernel(cells, tmp_path, (LATE, RIGHT)).verdict


@pytest.mark.parametrize(
    ("line", "broken", "case"),
    [
        (LATE, "    target = block * block_stride\n", (4855, 0, 0)),
        (LATE, "    target = block.to(tl.int32) * block_stride\n", (4855, 0, 0)),
        (LATE, RIGHT.replace("stride", "stride + 1"), (1, 0, 0)),
        ("row.to(tl.int64) * state_stride", "row * state_stride", (2, 4855, 0)),
        ("tl.program_id(0).to(tl.int64)", "tl.program_id(0)", (1, 0, 2**25)),
    ],
)
def test_every_conversion_is_needed_and_checked(cells, tmp_path, line, broken, case):
    """K01: tokens, rows and tiles times a stride pass 2^31 as blocks do."""
    if line != LATE:  # beside the planted bug, repaired
        cells = json.loads(json.dumps(cells))
        for cell in cells:
            if cell["cell_type"] == "code":
                cell["source"] = "".join(cell["source"]).replace(LATE, RIGHT)
    try:
        verdict = check_kernel(cells, tmp_path, (line, broken)).verdict
    except AssertionError:  # the small test catches what is wrong everywhere
        assert case == (1, 0, 0)
        return
    assert not verdict
    assert str(case) in str(verdict)
