"""The command: what it prints, the status it leaves with, and that nothing stays behind."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from mambackpt.__main__ import main
from mambackpt.conformance import command
from mambackpt.conformance.environments import EngineSkippedError, Environment
from mambackpt.conformance.pieces import Piece, seeded
from mambackpt.conformance.versions import Release

WORKER = str(Path(__file__).parent / "fake_engine.py")
ENGINE = ["conformance", "--engine", "llama.cpp", "--seed", "3", "--cases", "20"]


def piece(says: str = "") -> Piece:
    return Piece(
        name="doubling",
        worker=WORKER,
        cases=seeded(lambda seed: {"requests": [{"tokens": [7] * (seed % 40 + 1)}]}),
        answer=lambda case: {
            "requests": [
                {"cached": 2 * len(request["tokens"]), "created": [len(request["tokens"])]}
                for request in case["requests"]
            ]
        },
        reused=lambda answer: [request["cached"] for request in answer["requests"]],
        environment=(("FAKE_ENGINE", says),),
    )


@pytest.fixture
def _fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    @contextmanager
    def make(release: Release, folder: Path | None) -> Iterator[Environment]:
        says = {"b9873": "wrong"}.get(release.name, "")
        yield Environment(f"fake {release.name}", Path(sys.executable), {"FAKE_ENGINE": says}, 2, 5)

    monkeypatch.setattr(command, "pieces_of", lambda engine: [piece()])
    monkeypatch.setattr(command, "make_environment", make)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.usefixtures("_fake")
def test_an_engine_that_agrees_leaves_with_0(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(ENGINE) == 0
    said = capsys.readouterr().out
    assert "fake b11549, seed 3" in said
    assert "doubling: 20 requests in 20 cases, 0 differ" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_fake")
def test_a_difference_leaves_with_1_and_shows_the_smallest_case(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "pieces_of", lambda engine: [piece("wrong")])
    assert main(ENGINE) == 1
    said = capsys.readouterr().out
    assert "requests[0]: {tokens: [7, 7, 7, 7, 7, 7, 7, 7, 7, 7]}" in said
    assert "at 0, the engine: {cached: 21}" in said
    assert "at 0, the kit:    {cached: 20}" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_fake")
def test_a_worker_that_dies_leaves_with_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "pieces_of", lambda engine: [piece("garbage")])
    assert main(ENGINE) == 2
    assert "Loading weights" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_fake")
def test_an_engine_that_the_machine_cannot_run_is_no_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(release: Release, folder: Path | None) -> Environment:
        raise EngineSkippedError("llama.cpp is skipped: no AVX2.")

    monkeypatch.setattr(command, "make_environment", make)
    assert main(ENGINE) == 0
    assert "skipped" in capsys.readouterr().out


@pytest.mark.usefixtures("_fake")
def test_drift_counts_the_requests_that_resume_elsewhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "pieces_of", lambda engine: [replace(piece(), environment=())])
    assert main([*ENGINE, "--drift", "b9873, b10229"]) == 0
    row = capsys.readouterr().out.splitlines()[-1]
    # lengths 1 to 20: the older one reuses a token more from ten on
    assert row == "| b9873 to b10229 | doubling | 20 | 11 (55.0 %) | 11 | 0 | 431 to 420 | 0 |"


@pytest.mark.usefixtures("_fake")
def test_recorded_answers_are_the_same_bytes_each_time(tmp_path: Path) -> None:
    files = [tmp_path / "one.gz", tmp_path / "other.gz"]
    for file in files:
        assert main([*ENGINE, "--record", str(file)]) == 0
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--engine", "vllm", "--release", "0.1"], "release is '0.1'"),
        (["--release", "0.33.0"], "--release is given for 3 engines"),
        (["--engine", "vllm", "--piece", "plan"], "Try 'planner'"),
        (["--engine", "vllm", "--drift", "0.33.0"], "names 1 release"),
        (["--cases", "none"], "--cases is 'none'"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["conformance", *words]) == 2
    assert sentence in capsys.readouterr().err
