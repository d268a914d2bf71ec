"""`replay --why`: totals, one verdict per request, a file whole or not at all, and seconds."""

import csv
import io
import json
import re
from pathlib import Path

import pytest

from mambackpt import CheckpointValueError
from mambackpt.__main__ import main
from mambackpt.replay import CAUSES, PrefillRate, explain_misses, generate_chat

CHAT = ["replay", "chat:300", "--block", "1024", "--rule", "last"]
POOL = ["--model", "qwen3-next", "--pool", "40GB"]


def test_totals_are_those_of_the_replay(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CHAT, "--why"]) == 0
    said = capsys.readouterr().out
    missed = explain_misses(generate_chat(300), "last", block=1024)
    assert f"computed          {missed.replay.recomputed:,} tokens" in said
    attention = 100 * missed.replay.attention.sum() / missed.replay.prompt.sum()
    assert f"attention matches {attention:.2f} %" in said
    for row in missed.totals():
        assert re.search(rf"{row['cause']} +{row['tokens']:,} ", said)
    assert not re.search(r"\d s\b", said), "no rate was given"


def test_json_and_csv_have_one_verdict_per_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CHAT, *POOL, "--rule", "last,all", "--why", "--json"]) == 0
    points = json.loads(capsys.readouterr().out)
    assert [point["rule"] for point in points] == ["last", "all"]
    assert main([*CHAT, *POOL, "--rule", "last,all", "--why", "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == 600
    said = [request for point in points for request in point["requests"]]
    for row, request in zip(rows, said, strict=True):
        assert row == {name: str(value) for name, value in request.items()}
        causes = sum(int(row[cause.replace(" ", "_")]) for cause in CAUSES)
        assert causes == int(row["computed"]) == int(row["prompt"]) - int(row["joint_hit"])


def test_a_file_of_verdicts_is_the_printed_csv(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "verdicts.csv"
    assert main([*CHAT, "--why", "--csv", "--why-csv", str(path), "--prefill-rate", "900"]) == 0
    assert path.read_text() == capsys.readouterr().out
    assert [*tmp_path.iterdir()] == [path]
    row = next(csv.DictReader(path.open()))
    assert float(row["seconds_low"]) == pytest.approx(int(row["computed"]) / 900, abs=1e-6)


def test_out_and_the_file_of_verdicts_are_both_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, verdicts = tmp_path / "told.json", tmp_path / "verdicts.csv"
    words = [*CHAT, "--why", "--json", "--out", str(out), "--why-csv", str(verdicts)]
    assert main(words) == 0
    assert capsys.readouterr().out == ""
    [point] = json.loads(out.read_text())
    assert len(point["requests"]) == len(verdicts.read_text().splitlines()) - 1


def test_a_block_off_the_trace_s_grain_is_a_lower_bound_and_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*CHAT, "--block", "528", "--why"]) == 0
    assert "note: block 528 is no multiple" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["", "missing/verdicts.csv"])
def test_where_no_file_can_be_is_refused_before_any_work(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["replay", "no-such-trace", "--why-csv", f"{tmp_path}/{name}"]
    assert main(words) == 2
    assert "--why-csv" in capsys.readouterr().err


def test_seconds_are_a_range_of_the_two_rates(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CHAT, "--why", "--prefill-rate", "12000,3000"]) == 0
    said = capsys.readouterr().out
    missed = explain_misses(generate_chat(300), "last", block=1024)
    middle = sorted((missed.replay.prompt - missed.replay.reused).tolist())[150]
    assert f"the middle request {middle / 12000:.2f} to {middle / 3000:.2f} s" in said
    assert "as you say" in said


def test_a_rate_without_verdicts_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CHAT, "--prefill-rate", "12000"]) == 2
    assert "--prefill-rate is given without --why" in capsys.readouterr().err


def test_why_of_an_engine_s_own_cache_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "chat:50", "--engine", "sglang", "--why"]) == 2
    assert "--why is given with --engine" in capsys.readouterr().err


def test_rates_in_words() -> None:
    assert str(PrefillRate.of("3000,12000")) == "12,000 and 3,000 prompt tokens a second"
    assert PrefillRate.of("12_000").words(6000) == "0.50 s"
    assert PrefillRate.of("12000").words(1) == "under 0.01 s"
    for wrong in ("", "0", "-3", "inf", "nan", "1,2,3", "12k", "9;9"):
        with pytest.raises(CheckpointValueError, match="prompt tokens per second"):
            PrefillRate.of(wrong)


def test_nothing_else_in_the_kit_turns_tokens_into_seconds(root: Path) -> None:
    """The bench times what it runs; the conformance commands say what they took."""
    rated = {
        path.relative_to(root / "mambackpt").as_posix()
        for path in (root / "mambackpt").rglob("*.py")
        if re.search(r"\} s\b|prefill_rate|PrefillRate", path.read_text())
        and path.parent.name not in ("bench", "conformance")
    }
    assert rated == {
        *("replay/__init__.py", "replay/seconds.py", "replay/missed_command.py"),
        *("why/command.py", "figures/command.py", "figures/misses.py"),
        *("review/question.py", "review/command.py"),
    }
    files = {name: (root / "mambackpt" / name).read_text() for name in rated}
    spoken = {name for name, text in files.items() if re.search(r"\} s\b", text)}
    assert spoken == {"replay/seconds.py"}


@pytest.mark.shared
@pytest.mark.parametrize(("rule", "requests", "share"), [("last", 384, 91.8)])
def test_few_requests_of_a_public_trace_make_most_of_its_waste(
    rule: str, requests: int, share: float, shared: Path
) -> None:
    """Mooncake's conversation trace: 3 % of the requests reuse little and waste most."""
    from mambackpt.replay import load_trace

    trace = load_trace(shared / "traces/mooncake_conversation_trace.jsonl.gz")
    bands = {row["reused"]: row for row in explain_misses(trace, rule, block=512).bands()}
    assert bands["to 25 %"]["requests"] == requests
    assert bands["to 25 %"]["percent_of_waste"] == pytest.approx(share, abs=0.05)
