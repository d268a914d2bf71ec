"""Every command line that a notebook shows runs as it stands, with generators for the traces."""

import re
import shlex
from pathlib import Path

import nbformat
import pytest
from notebook_tools import NOTEBOOKS, text_cells

from mambackpt.__main__ import main


def command_lines() -> list[str]:
    """The lines in the fences of shell of all notebooks."""
    cells = [cell for path in NOTEBOOKS for cell in text_cells(nbformat.read(path, 4))]
    fences = [re.findall(r"```sh\n(.*?)```", cell.source, re.S) for cell in cells]
    return [line for found in fences for fence in found for line in fence.splitlines() if line]


def test_there_are_commands() -> None:
    assert command_lines()


@pytest.mark.parametrize("line", command_lines())
def test_a_command_of_a_notebook_runs(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 1 is an answer of ``why``: there is no hit."""
    program, *words = shlex.split(line)
    assert [program, *words[:2]] == ["python", "-m", "mambackpt"]
    monkeypatch.chdir(tmp_path)
    assert main(words[2:]) in ((0, 1) if words[2] == "why" else (0,))
    told = capsys.readouterr()
    assert told.out
    assert told.err == ""
