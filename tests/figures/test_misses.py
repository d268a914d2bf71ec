"""Figures of what is computed again: their numbers, and the options that they read."""

import re
from pathlib import Path

import pytest

from mambackpt import CheckpointValueError, HybridModel, Settings, explain_hit
from mambackpt.figures.command import main
from mambackpt.figures.misses import _FILLS
from mambackpt.figures.registry import FIGURES, draw_figure
from mambackpt.replay import VETOES, PrefillRate, explain_misses
from mambackpt.replay.generators import example_trace
from mambackpt.why import find_model

REPORT = {"block": 3584}


def test_the_staircase_of_a_floor_of_3584_passes_through_what_was_reported() -> None:
    drawing = draw_figure("staircase", options=REPORT)
    line = drawing.figure.axes[0].lines[0]
    computed = dict(zip(line.get_xdata(), line.get_ydata(), strict=True))
    for prompt, reused in ((7168, 3584), (7169, 7168)):
        assert computed[prompt] == prompt - reused
    assert "21,504 tokens sent again compute 3,584, one more only 1" in drawing.finding
    settings = Settings(mamba_block_size=3584, hash_block_size=3584)
    assert explain_hit(8015, 8015, settings, shared=8015).joint == 7168


def test_stairs_are_verdicts() -> None:
    drawing = draw_figure("staircase", options={"block": 784})
    lower = {str(line.get_label()): line for line in drawing.figure.axes[1].lines}
    settings = Settings(mamba_block_size=784, hash_block_size=784)
    for name, third in (("the next prompt", False), ("a third prompt = the ceiling", True)):
        line = lower[name]
        for shared, computed in zip(line.get_xdata(), line.get_ydata(), strict=True):
            n = int(shared) + 2 * 784
            verdict = explain_hit(n, n, settings, shared=int(shared))
            assert shared - computed == (verdict.third if third else verdict.joint)


@pytest.mark.parametrize("name", ["qwen3.5-4b", "nemotron-3-nano", "kimi-k3-tp8"])
def test_a_staircase_is_that_of_a_model(name: str) -> None:
    model: HybridModel = find_model(name)
    drawing = draw_figure("staircase", options={"model": model, "hash": model.block_size() // 2})
    assert f"block {model.block_size():,}" in drawing.alt
    assert f"hash unit {model.block_size() // 2:,}" in drawing.alt


def test_seconds_stand_in_the_staircase_only_at_a_rate_that_is_given() -> None:
    assert " s " not in draw_figure("staircase", options=REPORT).finding
    rate = PrefillRate.of("1000,500")
    finding = draw_figure("staircase", options={**REPORT, "prefill_rate": rate}).finding
    assert "(3.58 to 7.17 s against under 0.01 s)" in finding


def test_the_margin_map_counts_lengths() -> None:
    drawing = draw_figure("margin-map")
    assert "448 of 2,048 = 21.875 %" in drawing.finding
    asked = draw_figure("margin-map", options={"block": 1536, "margin": [96, 3000]})
    assert "96 of 1,536 = 6.25 %" in asked.alt
    assert "1,536 of 1,536 = 100 %" in asked.alt


def test_why_missed_shows_the_totals_of_the_verdicts() -> None:
    drawing, trace = draw_figure("why-missed"), example_trace()
    missed = explain_misses(trace, "last", block=1024)
    prompt = trace.prompt.sum()
    for cause in VETOES:
        share = 100 * missed.tokens[cause].sum() / prompt
        if cause in drawing.alt:
            assert f"{cause} {share:.1f} %" in drawing.alt.split("; ")[1]
    assert set(_FILLS) == set(VETOES)
    texts = [text.get_text() for text in drawing.figure.axes[0].texts]
    assert f"{100 * missed.wasted.sum() / prompt:.1f} %" in texts


def test_options_that_a_figure_ignores_are_refused(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "new")]
    for words, message in (
        (["one-forward", "--block", "528"], "--block is given for the figure one-forward"),
        (["staircase", "--margin", "64"], "--margin is given for the figure staircase"),
        (["margin-map", "--prefill-rate", "9"], "--prefill-rate is given for the figure margin"),
        (["--hash", "16"], "--hash is given for the figure one-forward"),
        (["staircase", "--block", "0"], "--block is '0'"),
        (["staircase", "--model", "qwen"], "--model is 'qwen'"),
        (["margin-map", "--margin", "x"], "--margin is 'x'"),
        (["staircase", "--prefill-rate", "x"], "--prefill-rate is 'x'"),
        (["staircase", "--block", "528", "--hash", "100"], "--hash is 100 and the block 528"),
        (
            ["margin-map", "--model", "kimi-k3", "--hash", "100"],
            "--hash is 100 and the block 11392",
        ),
    ):
        with pytest.raises(CheckpointValueError, match=re.escape(message)):
            main([*words, *out, "--processes", "1"])
    assert not (tmp_path / "new").exists()


def test_the_command_draws_a_geometry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["staircase", "--model", "qwen3.5-4b", "--hash", "264", "--processes", "1"]
    assert main([*words, "--prefill-rate", "100", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "3,168 tokens sent again compute 264" in said
    assert "2.64 s" in said
    assert {path.name for path in tmp_path.iterdir()} == {"staircase.svg", "staircase.pdf"}
    assert {"staircase", "margin-map", "why-missed"} < set(FIGURES)
