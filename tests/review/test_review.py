"""The review pack: whole, the same twice, and every number from what the kit computes."""

import json
import re
from pathlib import Path

import pytest

from mambackpt import CheckpointValueError
from mambackpt.__main__ import main
from mambackpt.engine import branching_chats, check_lockstep
from mambackpt.models import PRESETS
from mambackpt.replay import generate_chat, replay
from mambackpt.review import Question, Review, build_review
from mambackpt.review.page import Picture, Section, Table, Words, html_page, markdown_page
from mambackpt.review.sections import compare_rules, lockstep

CONFIG = {
    "model_type": "qwen3_next", "num_attention_heads": 16, "num_key_value_heads": 2,
    "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "num_hidden_layers": 48, "full_attention_interval": 4, "mamba_ssm_dtype": "float32",
}  # fmt: skip


def question_of(**options: object) -> Question:
    given = {"model": PRESETS["qwen3-next"], "traces": [generate_chat(80)], "histories": 2}
    return Question(**given | options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def review() -> Review:
    return build_review(question_of(pool_bytes=20 * 10**9), command=["python -m mambackpt review"])


def test_the_pack_is_a_page_its_markdown_and_every_figure_twice(review: Review) -> None:
    names = ("capacity", "landing", "staircase", "rules", "why-missed", "retention")
    drawn = [f"{name}.{kind}" for name in names for kind in ("svg", "pdf")]
    assert list(review.files) == [*drawn, "review.md", "index.html"]


def test_a_step_is_at_least_a_block_by_itself_and_by_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine whose step cannot hold a block does not start; kimi-k3's is beyond 8,192."""
    command = ["review", "--model", "kimi-k3", "--trace", "chat:20", "--histories", "1"]
    assert main([*command, "--out", str(tmp_path / "default")]) == 0
    assert "| tokens of one step | 11,392 |" in (tmp_path / "default/review.md").read_text()
    capsys.readouterr()
    assert main([*command, "--budget", "4096", "--out", str(tmp_path / "small")]) == 2
    assert "Try --budget 11392" in capsys.readouterr().err
    assert not (tmp_path / "small").exists()


def test_a_second_run_gives_the_same_bytes(review: Review) -> None:
    again = build_review(question_of(pool_bytes=20 * 10**9), command=["python -m mambackpt review"])
    assert again.files == review.files


def test_the_page_needs_no_other_file_and_every_picture_has_words(review: Review) -> None:
    page = review.files["index.html"].decode()
    assert not re.search(r"(src|href)=.(https?:|[\w-]+\.(svg|css|js))", page)
    assert page.count("<img") == page.count('alt="') == 6
    assert "prefers-color-scheme: dark" in page
    for alt in re.findall(r'alt="([^"]*)"', page):
        assert len(alt) > 40


def test_markdown_and_page_have_the_same_sections(review: Review) -> None:
    page, text = (review.files[name].decode() for name in ("index.html", "review.md"))
    headings = re.findall(r'<h2 id="part-\d+">(.*?)</h2>', page)
    assert re.findall(r"^## (.*)$", text, re.M) == headings
    assert headings[0] == "Assumptions"
    assert headings[-2:] == ["What to set, and how to check it", "How this page was made"]
    for name in re.findall(r"\]\((.*?)\)", text):
        assert name in review.files


def test_rules_are_compared_as_the_replay_has_them() -> None:
    question = question_of(traces=[generate_chat(80, seed=seed) for seed in range(2)], block=1024)
    for row in compare_rules(question):
        runs = [replay(trace, row.rule, block=1024) for trace in question.traces]
        reused, prompt = (sum(int(getattr(r, n).sum()) for r in runs) for n in ("reused", "prompt"))
        assert row.hit == pytest.approx(100 * reused / prompt)
        assert row.spread == (
            min(100 * run.hit_rate for run in runs),
            max(100 * run.hit_rate for run in runs),
        )


def test_the_spread_of_one_trace_is_over_its_tenths() -> None:
    [row, *_] = compare_rules(question_of(block=1024))
    low, high = row.spread
    assert low <= row.hit <= high


def test_the_lockstep_result_is_that_of_the_same_settings() -> None:
    """Fine hash units: the released scheduler keys a block that does not hold its state."""
    question = question_of(model=PRESETS["kimi-k3-tp8"], hash_block=128, histories=4)
    counts = check_lockstep(map(branching_chats, range(4)), question.scaled).counts
    assert counts.mislabelled > 0
    said = " ".join(
        sentence for part in lockstep(question).parts if isinstance(part, Words)
        for sentence in part.sentences
    )  # fmt: skip
    assert f"{counts.wrong_restores:,} restored a state" in said
    assert "The smallest history" in said


def test_settings_are_scaled_by_what_they_all_share() -> None:
    question = question_of(model=PRESETS["kimi-k3-tp8"], hash_block=128)
    assert (question.scale, question.scaled.mamba_block_size) == (16, 96)
    assert question.scaled.checkpoint_alignment == 1
    assert question.scaled.budget * 16 == 8192


# ---- pages -------------------------------------------------------------------------------------


def test_words_cannot_break_a_page() -> None:
    section = Section(
        "A < B & C",
        [
            Words(["<script>alert(1)</script>"]),
            Table("a|b", ["x|y"], [["<b>"], ["|"]]),
            Picture("p", b"<svg/>", 'say "hi"'),
        ],
    )
    page = html_page("T", "L", [section])
    assert "<script>" not in page
    assert 'alt="say &quot;hi&quot;"' in page
    assert "| \\| |" in markdown_page("T", "L", [section])


# ---- the command -------------------------------------------------------------------------------


def test_the_command_writes_a_review_of_a_config_a_log_and_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, log = tmp_path / "config.json", tmp_path / "boot.log"
    config.write_text(json.dumps(CONFIG))
    log.write_text(
        "Setting attention block size to 1056 tokens to ensure ...\n"
        "Padding mamba page size by 0.76% to ensure ...\nAvailable KV cache memory: 18.63 GiB\n"
    )
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 0, "input_length": 2112, "output_length": 1, "hash_ids": [0, 1, 2, 3, 4]}]
    trace.write_text("\n".join(map(json.dumps, rows * 20)))
    words = ["--model", str(config), "--log", str(log), "--trace", str(trace), "--histories", "2"]
    assert main(["review", *words, "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "index.html" in said
    text = (tmp_path / "out/review.md").read_text()
    assert "1,056" in text
    assert "20.0 GB" in text
    assert main(["review", *words, "--out", str(tmp_path / "again")]) == 0
    for path in (tmp_path / "out").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "neither --model nor a --log"),
        (["--model", "qwen3-nxt"], "--model is 'qwen3-nxt'"),
        (["--model", "falcon-h1-7b", "--pool", "20GB"], "Try --layers RECURRENT,ATTENTION"),
        (["--model", "qwen3-next", "--pool", "20"], "Try --pool 20GB"),
        (["--model", "qwen3-next", "--log", "no-such.log"], "--log is 'no-such.log'"),
        (["--model", "qwen3-next", "--trace", "no-such.jsonl"], "no-such.jsonl cannot be read"),
        (["--model", "qwen3-next", "--lengths", "8k"], "--lengths is '8k'"),
        (["--model", "qwen3-next", "--prefill-rate", "fast"], "--prefill-rate is 'fast'"),
        (["--model", "qwen3-next", "--hash", "100"], "multiple of hash_block_size"),
    ],
)
def test_a_wrong_input_is_said_and_nothing_is_written(
    words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["review", *words, "--out", str(tmp_path / "out")]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_a_file_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(CheckpointValueError, match="expected a folder that can be written"):
        Review("T", {"index.html": b""}).save(tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


def test_an_interrupted_save_leaves_no_broken_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written before stays as it was; what was not begun is not there."""
    Review("T", {"a.svg": b"old", "index.html": b"old"}).save(tmp_path)
    written = Path.replace

    def interrupted(self: Path, target: Path) -> Path:
        if Path(target).name == "index.html":
            raise KeyboardInterrupt
        return written(self, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Review("T", {"a.svg": b"new", "index.html": b"new"}).save(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "a.svg": b"new",
        "index.html": b"old",
    }
