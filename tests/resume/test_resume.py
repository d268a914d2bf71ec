"""A resumed request answers as a cold one; a wrong state does not, and the same check says so."""

import json

import pytest

from mambackpt.__main__ import main
from mambackpt.resume import (
    ARCHITECTURES,
    CASES,
    Comparison,
    Fault,
    Row,
    Way,
    bf16_errors,
    compare,
    late_memories,
    load_model,
    spread,
    wrong_restore,
)
from mambackpt.resume.faults import FAULTS, on_any_token, short_cut, with_memory


def test_every_resumed_request_answers_as_a_cold_one(equality: list[Row]) -> None:
    """Within what the model itself shows between one run and two, which is rounding."""
    assert {row.model for row in equality} == set(ARCHITECTURES)
    assert {row.case for row in equality} == {case.name for case in CASES}
    for row in equality:
        assert row.comparison.equal, row
        assert row.comparison.allowed < 1e-4, row
        assert row.comparison.changed == 0, row


def test_a_state_from_a_step_s_end_gives_every_bit_of_a_run_that_kept_its_cache(
    equality: list[Row],
) -> None:
    """Pools, exporter and restore lose nothing: what is left is the model's own rounding."""
    ended = [row for row in equality if not row.inside]
    assert ended
    assert all(row.same_bits for row in ended)


def test_a_state_is_taken_inside_one_forward_where_the_layers_can_emit_it(
    equality: list[Row],
) -> None:
    """The grid of the gated delta rule is 64 tokens, of KDA 16; the others emit anywhere."""
    for row in equality:
        assert row.inside == (row.position % ARCHITECTURES[row.model].alignment == 0), row


def test_the_offsets_are_16_and_64_and_one_before_the_end_and_odd(equality: list[Row]) -> None:
    shown = {(row.position, row.prompt - row.position) for row in equality}
    assert {(16, 16), (64, 64), (64, 1), (37, 33)} <= shown


def test_every_fault_is_caught_by_the_same_check(
    faults: list[tuple[str, Fault, Comparison]],
) -> None:
    assert {fault.name for _, fault, _ in faults} == set(FAULTS)
    for model, fault, comparison in faults:
        assert not comparison.equal, (model, fault.name)


def test_a_wrong_state_moves_a_logit_by_more_than_one(
    faults: list[tuple[str, Fault, Comparison]],
) -> None:
    """Rounding to bf16 moves it by less than a tenth; where the window is right, a memory counts
    for as much as these weights let it."""
    for model, fault, comparison in faults:
        if fault.name == "memory stored in bf16":
            assert comparison.difference < 0.1, model
        elif fault.name == "another request's memory":
            assert comparison.difference > 0.05, model
        else:
            assert comparison.difference > 1, (model, fault.name)
            assert comparison.changed > 0, (model, fault.name)


def test_a_block_that_was_never_written_gives_no_number_or_a_plausible_answer(
    faults: list[tuple[str, Fault, Comparison]],
) -> None:
    for _, fault, comparison in faults:
        if fault.name == "never written, NaN":
            assert comparison.changed == len(comparison.by_token)
            assert min(comparison.by_token) == float("inf")
        if fault.name == "never written, zeros":
            assert comparison.difference < float("inf")
            assert 0 < comparison.changed < len(comparison.by_token)


@pytest.mark.parametrize("name", [n for n, one in ARCHITECTURES.items() if one.scan])
def test_a_late_window_spoils_the_memory_and_the_gates_forget_it(name: str) -> None:
    """X01's kind: the window is out of sight after three tokens, what they wrote is not."""
    errors = late_memories(load_model(name))
    assert errors[3] > 0.5
    assert errors[3] > errors[64] > 1e-3


def test_the_wrong_restore_is_the_one_of_notebook_04() -> None:
    wrong = wrong_restore()
    assert (len(wrong.prompt), wrong.promised, wrong.held) == (140, 128, 96)


@pytest.mark.parametrize("name", [n for n, one in ARCHITECTURES.items() if "Mamba" in one.layer])
def test_a_window_is_complete_where_the_query_s_first_inputs_are_too_few(name: str) -> None:
    """X02, vllm PR #56196: the missing part comes from the window before the query."""
    model = load_model(name)
    assert on_any_token(model)
    completed = compare(*short_cut(model, "complete"), 10 * spread(model))
    assert completed.equal
    assert not compare(*short_cut(model, "engine"), completed.allowed).equal


@pytest.mark.parametrize("name", [n for n, one in ARCHITECTURES.items() if one.scan])
def test_bf16_memories_err_and_a_gate_forgets_the_error(name: str) -> None:
    """After 1, 10, 100 and 1,000 tokens; ten cycles err about as much as the last of them."""
    model = load_model(name)
    assert with_memory(model)
    errors = bf16_errors(model)
    assert [*errors.once] == [*errors.cycles] == [1, 10, 100, 1000]
    for found in (errors.once, errors.cycles):
        assert found[1] > errors.allowed
        assert found[1000] < found[1]
    assert errors.cycles[1] < 10 * errors.once[1]


def test_recurrent_layers_alone_are_right_up_to_the_first_attention(ways: dict[str, Way]) -> None:
    """Their inputs are outputs of the attention layers before them."""
    alone = ways["recurrent layers alone"]
    assert alone.exact_layers == 3
    assert max(alone.errors[:3]) < 1e-5 < 0.1 < min(alone.errors[3:])
    assert not alone.comparison.equal
    assert alone.comparison.changed > 0
    assert not ways["all but attention itself"].comparison.equal


def test_what_closes_the_gap_is_the_whole_model_or_kept_inputs(ways: dict[str, Way]) -> None:
    whole, kept = ways["the whole model"], ways["recurrent layers, inputs kept"]
    assert whole.comparison.equal
    assert kept.comparison.equal
    assert whole.exact_layers == kept.exact_layers == len(whole.errors) == 6
    assert kept.cost < ways["recurrent layers alone"].cost < whole.cost == 1
    assert kept.kept_bytes == 6 * 64 * 4  # layers, width, float32


# ---- the command ---------------------------------------------------------------------------------


def test_the_command_prints_the_equality_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", "--model", "lfm2,mamba-2"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 + 16 + 1
    assert said[-1] == "16 of 16 resumed requests answer as a cold one."
    assert main(["resume", "--model", "lfm2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["comparison"]["equal"] for row in rows} == {True}


def test_the_command_leaves_with_1_where_an_answer_differs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], equality: list[Row]
) -> None:
    row = equality[0]
    off = [Row(*(getattr(row, n) for n in Row.__slots__[:-1]), Comparison((1.0,), 1, 1e-6))]
    monkeypatch.setattr("mambackpt.resume.command.equality_rows", lambda _: off)
    assert main(["resume"]) == 1
    assert "DIFFERS" in capsys.readouterr().out


def test_the_command_tells_what_each_fault_changes(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    faults: list[tuple[str, Fault, Comparison]],
) -> None:
    monkeypatch.setattr("mambackpt.resume.command.fault_rows", lambda _: faults)
    assert main(["resume", "--faults"]) == 0
    said = capsys.readouterr().out
    assert f"{len(faults)} of {len(faults)} are caught." in said
    assert "no number" in said
    assert main(["resume", "--faults", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == len(faults)


def test_the_command_tells_the_gap_and_bf16(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ways: dict[str, Way]
) -> None:
    monkeypatch.setattr("mambackpt.resume.command.gap_ways", lambda: [*ways.values()])
    for words, said in ((["--gap"], "3 of 6"), (["--bf16", "--model", "falcon-h1"], "ten times")):
        assert main(["resume", *words]) == 0
        assert said in capsys.readouterr().out
        assert main(["resume", *words, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)


def test_an_unknown_model_is_refused_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["resume", "--model", "mamba2"]) == 2
    assert "Try 'mamba-2'" in capsys.readouterr().err
