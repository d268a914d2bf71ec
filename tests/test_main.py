"""The command line: what it prints, and the status it leaves with."""

import json

import pytest

from mambackpt.__main__ import COMMANDS, main


def test_why_says_where_the_checkpoint_lands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", "8000", "--block", "1536", "--alignment", "16"]) == 0
    assert "after 7,680 tokens is saved" in capsys.readouterr().out


def test_why_says_why_there_is_none_and_leaves_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["why", "3602", "1618", "--block", "1600", "--hash", "16", "--alignment", "16"]
    assert main(words) == 1
    assert "inside column 1" in capsys.readouterr().out
    assert main([*words, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["reason"] == "COLUMN_TAKEN"


def test_refused_input_is_one_sentence_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", "10", "11", "--block", "16"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("mambackpt why: row 0 has query_len 11 and seq_len 10")


def test_an_unknown_command_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["wy"])
    assert left.value.code == 2
    assert "why" in capsys.readouterr().err


def test_no_command_lists_the_commands_with_what_each_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 0
    told = " ".join(capsys.readouterr().out.split())
    for name, (_, does) in COMMANDS.items():
        assert f"{name} {does}" in told


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_help_page(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    assert f"mambackpt {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("library", "part"), [("torch", "'.'"), ("matplotlib", "'.[notebooks]'"), ("triton", "'.'")]
)
def test_a_missing_library_is_named_with_what_to_try(
    library: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a public name, which loads its module on first use."""
    import mambackpt

    def missing(module: str) -> object:
        raise ModuleNotFoundError(f"No module named {library!r}", name=library)

    monkeypatch.setattr(mambackpt, "import_module", missing)
    monkeypatch.delitem(vars(mambackpt), "MambaPrefillCheckpointExporter", raising=False)
    with pytest.raises(ModuleNotFoundError, match=f"{library} is not installed") as error:
        _ = mambackpt.MambaPrefillCheckpointExporter
    assert "make lab" in str(error.value)
    assert part in str(error.value)


def test_a_command_whose_library_is_missing_leaves_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(module: str) -> object:
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")

    monkeypatch.setattr("mambackpt.__main__.import_module", missing)
    assert main(["figures"]) == 2
    assert "matplotlib is not installed" in capsys.readouterr().err
