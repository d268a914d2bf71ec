"""The command `why`: its two questions, its defaults, and what it refuses."""

import json
import re

import pytest

from mambackpt.__main__ import main
from mambackpt.why.command import main as why

PAIR = ["--shared", "1500", "--unique", "700"]
PUZZLE = [*PAIR, "--block", "528", "--budget", "2048", "--retention", "dense"]
PUZZLE += ["--alignment", "none"]
CHATS = ["--shared", "6000", "--unique", "0,700", "--model", "qwen3-next", "--live", "6"]


def said_by(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    status = why(words)
    return status, capsys.readouterr().out


def test_a_query_without_an_alignment_is_not_blamed_on_the_kernel(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, said = said_by(["8000", "--block", "1536"], capsys)
    assert status == 0
    assert "after 7,680 tokens is saved" in said
    assert "kernel grid 16" in said, "a default is said"
    status, said = said_by(["8000", "--block", "1536", "--alignment", "none"], capsys)
    assert status == 1
    assert "kernel grid" not in said


def test_the_kernel_grid_is_the_model_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert "GDN layers" in said_by(["8000", "--model", "qwen3.5-4b"], capsys)[1]
    status, said = said_by(["8000", "--model", "nemotron-3-nano"], capsys)
    assert (status, "Mamba-2" in said) == (0, True)
    assert "block 2,096 (of nemotron-3-nano)" in said
    assert "after 6,288 tokens" in said, "P12"


def test_the_puzzle_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    status, said = said_by(PUZZLE, capsys)
    assert status == 1
    assert "1,584 and 2,112 (3 chunks)" in said
    assert re.search(r"attention matches +1,056", said)
    assert re.search(r"joint hit +0 ", said)
    assert "state beyond the fork 1,056" in said
    assert "resumes after 1,056" in said, "a third such prompt"
    assert re.search(r"--budget 1056 +2 +3 +1,144 +the very next prompt", said)
    assert "--max-num-batched-tokens" in said, "the engine's own word"


def test_the_puzzle_as_json_has_verdict_and_cures(capsys: pytest.CaptureFixture[str]) -> None:
    _, said = said_by([*PUZZLE, "--json", "--prefill-rate", "11000"], capsys)
    told = json.loads(said)
    assert (told["attention"], told["joint"], told["veto"]) == (1056, 0, "state beyond the fork")
    assert sum(told["causes"].values()) == told["recomputed"] == 2200
    assert told["cures"][0]["third"] is False
    assert told["seconds_low"] == told["seconds_high"] == 0.2


def test_shared_tokens_below_a_block_are_told_what_would_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, said = said_by(["--shared", "369", "--unique", "2000", "--block", "784"], capsys)
    assert status == 1
    assert "below a block of 784" in said.replace("\n", " ")
    assert "smaller block" in said


def test_a_rule_takes_the_engine_s_place(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--shared", "6000", "--unique", "2000", "--block", "1056", "--rule", "last"]
    status, said = said_by(words, capsys)
    assert status == 1
    assert re.search(r"--rule last\+junction +1 +2 +2,720 +only the third prompt", said)


def test_conversations_share_a_pool(capsys: pytest.CaptureFixture[str]) -> None:
    status, said = said_by([*CHATS, "--pool", "1TB"], capsys)
    assert status == 0
    assert "6 of 6 second prompts resume after 5,280 tokens" in said
    _, said = said_by([*CHATS, "--pool", "1GB"], capsys)
    assert re.search(r"[0-5] of 6 second prompts", said)
    assert "evicted" in said
    assert re.search(r"Up to [0-5] conversations lose nothing", said)
    told = json.loads(said_by([*CHATS, "--pool", "1GB", "--json"], capsys)[1])
    assert told["live"]["intact"] < 6
    most = told["live"]["most"]
    fits = ["--live" if word == "--live" else word for word in CHATS[:-1]] + [str(max(most, 1))]
    assert f"{most} of {most}" in said_by([*fits, "--pool", "1GB"], capsys)[1]


@pytest.mark.parametrize(
    "words",
    [PUZZLE, [*CHATS, "--pool", "1GB"], ["8000", "--block", "1536"]],
    ids=["prompts", "live", "query"],
)
def test_no_seconds_without_a_rate(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    _, said = said_by(words, capsys)
    assert not re.search(r"\d s\b|second[s ]*(of|to)", said)


def test_seconds_are_computed_tokens_over_the_rate_s_that_were_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, said = said_by([*PUZZLE, "--prefill-rate", "11000,2200"], capsys)
    assert "2,200 of 2,200 tokens: 0.20 to 1.00 s" in said
    assert "1,144 tokens: 0.10 to 0.52 s" in said, "were the attention match enough"
    assert "that you gave" in said
    _, said = said_by([*CHATS, "--pool", "1GB", "--prefill-rate", "6700"], capsys)
    assert "1.00 s" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "neither of a query's length and --shared"),
        (["8000", *PAIR, "--block", "528"], "both of a query's length and --shared"),
        (["8000"], "--block is not given, nor is --model"),
        (["8000", "--block", "528", "--rule", "last"], "--rule is given for one query"),
        (["8000", "--block", "528", "--prefill-rate", "9"], "--prefill-rate is given for one"),
        ([*PAIR, "--block", "528", "--formula", "current"], "--formula is given for two prompts"),
        ([*PAIR, "--block", "none"], "--block is 'none'"),
        ([*PAIR, "--block", "528", "--hash", "100"], "--block is 528 and --hash 100"),
        ([*PAIR, "--block", "528", "--retention", "500"], "--retention is 500 with a block of 528"),
        ([*PAIR, "--block", "528", "--retention", "some"], "--retention is 'some'"),
        ([*PAIR, "--block", "528", "--alignment", "off"], "--alignment is 'off'"),
        ([*PAIR, "--block", "528", "--rule", "lst"], "rule is 'lst'.*last"),
        ([*PAIR, "--block", "528", "--budget", "0"], "--budget is '0'"),
        ([*PAIR, "--block", "528", "--prefill-rate", "fast"], "--prefill-rate is 'fast'"),
        ([*PAIR, "--block", "528", "--prefill-rate", "1,2,3"], "--prefill-rate is '1,2,3'"),
        ([*PAIR, "--block", "528", "--live", "4"], "one of --live and --pool"),
        ([*PAIR, "--block", "528", "--live", "4", "--pool", "1GB"], "without --model"),
        ([*CHATS, "--pool", "20"], "--pool is '20'"),
        ([*CHATS, "--pool", "1MB"], "--pool is 1,000,000"),
        ([*CHATS, "--pool", "30MB"], "room for one"),
        ([*CHATS, "--pool", "200MB"], "block ids, and one request"),
        ([*CHATS, "--pool", "1GB", "--rule", "last"], "--live is given with --rule"),
        ([*CHATS, "--pool", "1GB", "--block", "64", "--hash", "64"], "a block that a state fits"),
        ([*CHATS, "--pool", "1GB", "--layers", "48"], "--layers is '48'"),
        ([*CHATS, "--pool", "1GB", "--layers", "8,24"], "3 groups of attention"),
        ([*PAIR, "--block", "528", "--layers", "36,12"], "--layers is given without --model"),
        ([*PAIR, "--model", "qwen-3"], "--model is 'qwen-3'"),
        (["--shared", "0", "--block", "528"], "at least one token"),
        (["--shared", "-3", "--block", "528"], "--shared is '-3'"),
        (["--shared", "9", "--unique", "1,2,3", "--block", "528"], "--unique 1,2,3"),
    ],
)
def test_wrong_input_is_one_sentence_and_status_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["why", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert re.search(message, said.err), said.err
    assert "Try" in said.err
    assert "Traceback" not in said.err
