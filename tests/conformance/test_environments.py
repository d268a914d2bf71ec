"""Throw-away environments: what is asked of pip, what it may answer, what is left behind."""

import subprocess
import tempfile
import venv
from pathlib import Path
from typing import Any

import pytest

from mambackpt.conformance import environments
from mambackpt.conformance.environments import (
    EngineSkippedError,
    UnavailableError,
    environment_here,
    make_environment,
)
from mambackpt.conformance.versions import MODULES, RELEASES, Release
from mambackpt.errors import CheckpointValueError

RELEASE = Release("llama.cpp", "b1", ("wheel==1", "light==2"), ("heavy==3",), megabytes=1)


class Pip:
    """Stands in for the processes that would install something."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, errors: str = "") -> None:
        self.commands: list[list[str]] = []
        self.errors = errors
        monkeypatch.setattr(environments, "subprocess", self)
        monkeypatch.setattr(venv, "create", lambda place, **_: (place / "bin").mkdir())

    def run(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        return subprocess.CompletedProcess(command, bool(self.errors), "", self.errors)


@pytest.fixture(autouse=True)
def _temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))


def left(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "temporary").iterdir())


def test_large_packages_come_without_what_they_require(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = Pip(monkeypatch)
    with make_environment(RELEASE) as environment:
        assert environment.python.is_relative_to(tmp_path)
        assert environment.variables["PYTHONPATH"].startswith(str(tmp_path))
    light, heavy = pip.commands
    assert light[-2:] == ["wheel==1", "light==2"]
    assert "--no-deps" not in light
    assert heavy[-1] == "heavy==3"
    assert "--no-deps" in heavy
    assert left(tmp_path) == []


def test_an_environment_goes_when_its_user_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Pip(monkeypatch)
    with pytest.raises(RuntimeError, match="the user"), make_environment(RELEASE):
        raise RuntimeError("the user")
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (
            "WARNING: Retrying after NewConnectionError\nERROR: No matching distribution found",
            "the package index cannot be reached",
        ),
        ("ERROR: No matching distribution found for heavy==3", "a package for Python 3"),
        ("ERROR: metadata is broken", "metadata is broken; expected pip to finish"),
    ],
)
def test_what_pip_says_becomes_a_sentence(
    said: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Pip(monkeypatch, said)
    with pytest.raises(UnavailableError, match=sentence) as raised, make_environment(RELEASE):
        pass
    assert "Try " in str(raised.value)
    assert left(tmp_path) == []


def test_a_full_disk_is_refused_before_anything_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = Pip(monkeypatch)
    huge = Release("vllm", "1", ("a==1",), megabytes=10**9)
    with pytest.raises(UnavailableError, match="MB free"), make_environment(huge):
        pass
    assert pip.commands == []


def test_a_processor_without_a_flag_skips_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    pip = Pip(monkeypatch)
    picky = Release("llama.cpp", "b1", ("a==1",), megabytes=1, cpu=("avx9",))
    if not Path("/proc/cpuinfo").exists():
        pytest.skip("needs a list of the processor's flags")
    with pytest.raises(EngineSkippedError, match="a processor with AVX9"), make_environment(picky):
        pass
    assert pip.commands == []


def test_a_kept_environment_is_found_again_and_made_anew_when_its_packages_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = Pip(monkeypatch)
    for _ in range(2):
        with make_environment(RELEASE, tmp_path / "kept"):
            pass
    assert len(pip.commands) == 2
    with make_environment(
        Release("llama.cpp", "b1", ("wheel==2",), megabytes=1), tmp_path / "kept"
    ):
        pass
    assert pip.commands[-1][-1] == "wheel==2"


def test_half_an_environment_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Pip(monkeypatch, "ERROR: no space left")
    with pytest.raises(UnavailableError), make_environment(RELEASE, tmp_path / "kept"):
        pass
    pip = Pip(monkeypatch)
    with make_environment(RELEASE, tmp_path / "kept"):
        pass
    assert len(pip.commands) == 2


def test_an_engine_that_is_not_here_is_refused() -> None:
    with pytest.raises(UnavailableError, match="xllamacpp cannot be imported"):
        environment_here("llama.cpp")


def test_a_build_that_is_here_is_named_by_its_place_and_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A patched copy of an engine is often given as a relative path."""
    (tmp_path / "patched" / "xllamacpp").mkdir(parents=True)
    (tmp_path / "patched" / "xllamacpp" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("patched")
    monkeypatch.setenv("PYTHONPATH", "patched")
    environment = environment_here("llama.cpp")
    assert environment.label.endswith(str(Path("patched") / "xllamacpp"))
    assert environment.variables == {"PYTHONPATH": str(tmp_path / "patched")}


def test_every_package_of_every_release_is_pinned() -> None:
    assert RELEASES.keys() == MODULES.keys()
    for releases in RELEASES.values():
        assert len({release.name for release in releases}) == len(releases)
        for release in releases:
            for package in (*release.packages, *release.bare):
                assert package.count("==") == 1, package


def test_a_release_that_is_not_in_the_table_is_refused() -> None:
    from mambackpt.conformance import find_release

    with pytest.raises(CheckpointValueError, match="add a line to the table of versions"):
        find_release("vllm", "0.1.0")
