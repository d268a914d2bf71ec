"""The README's promises: every command line runs as it stands, and nothing it names is missing."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
SHELL = [
    line.split(" #")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", TEXT, re.S)
    for line in block.splitlines()
]
KIT = [line for line in SHELL if line.startswith(".venv/bin/python -m mambackpt ")]


@pytest.mark.parametrize("line", KIT, ids=[" ".join(line.split()[3:6]) for line in KIT])
def test_a_command_line_of_the_readme_runs_as_it_stands(line: str, tmp_path: Path) -> None:
    """In a copy of what it reads, so that what it writes is not left in the checkout."""
    (tmp_path / "notebooks").symlink_to(ROOT / "notebooks")
    (tmp_path / "build").mkdir()
    words = shlex.split(line)[1:]
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    # 1 where the answer is no: no checkpoint, no hit, a contradiction.
    assert done.returncode in ((0, 1) if words[2] == "why" else (0,)), done.stderr
    assert done.stdout.strip()


def test_every_make_target_of_the_readme_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake ([a-z]+)", TEXT):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_every_file_that_the_readme_links_to_exists() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert len(links) > 10
    for link in links:
        assert (ROOT / link).exists(), link


def test_the_readme_lists_every_notebook_and_every_command() -> None:
    from mambackpt.__main__ import COMMANDS

    for path in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"):
        assert f"(notebooks/{path.name})" in TEXT
    for command in {*COMMANDS} - {"site"}:
        assert re.search(rf"-m mambackpt {command}\b|`{command}`|make {command}", TEXT), command
