"""The bench: it refuses what is not equal, and its results read back. Nothing here is timed."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mambackpt.bench import command, explorers, export, replays
from mambackpt.bench.command import main
from mambackpt.bench.compiled import LayerShape
from mambackpt.bench.explorers import redraw_table, time_explorers
from mambackpt.bench.export import (
    BUFFERS,
    COPY,
    OURS,
    bench_export,
    export_methods,
    make_export_set,
    refuse_difference,
)
from mambackpt.bench.planner import (
    LOOP,
    PLANNER_GEOMETRY,
    bench_planner,
    plan_with_a_loop,
    planner_cases,
)
from mambackpt.bench.record import Benchmark, Timing, record_environment
from mambackpt.bench.record import timings as timings_of
from mambackpt.errors import CheckpointValueError
from mambackpt.kernels.torch_copies import BASELINES, store_loop
from mambackpt.planner import compute_mamba_prefill_checkpoints
from mambackpt.replay import Replay, Trace, generate_chat

TINY = LayerShape("tiny", 8, (4, 8))


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch):
    """Two buffer sets are enough here: nothing is about caches."""
    monkeypatch.setattr(export, "_CPU_CACHE", 1)


def truth(one):
    store_loop(**one.inputs)


def nothing(one):
    """Stores nothing at all."""


def one_element_off(one):
    truth(one)
    block = int(one.inputs["state_indices"][-1])
    one.inputs["recurrent_state"][block, -1, -1] += 1


def writes_the_null_block(one):
    truth(one)
    one.inputs["conv_state"][0, 0, 0] = 0


@pytest.mark.parametrize("wrong", [nothing, one_element_off, writes_the_null_block])
@pytest.mark.parametrize("buffers", BUFFERS.values(), ids=BUFFERS)
def test_a_method_that_differs_is_not_timed(wrong, buffers):
    reported = []
    with pytest.raises(CheckpointValueError, match=r"planted stores \d+ elements"):
        bench_export(
            [TINY],
            [3],
            buffers=[buffers],
            runs=2,
            methods={"right": truth, "planted": wrong},
            report=reported.append,
        )
    assert reported == []


def test_a_method_that_differs_only_in_a_later_set_is_not_timed():
    sets = [make_export_set(TINY, BUFFERS["dim-first"], 2, device="cpu", seed=n) for n in (0, 1)]
    with pytest.raises(CheckpointValueError, match="planted"):
        refuse_difference("planted", sets, lambda: [truth(sets[0]), nothing(sets[1])])
    refuse_difference("right", sets, lambda: [truth(one) for one in sets])


@pytest.mark.parametrize("buffers", BUFFERS.values(), ids=BUFFERS)
def test_every_method_that_runs_here_stores_what_the_loop_stores(buffers):
    methods = export_methods("cpu")
    methods.pop("torch.compile(indexing)", None)  # compiles for seconds; has its own test
    assert next(iter(methods)) == OURS
    run = bench_export([TINY], [1, 3], buffers=[buffers], threads=[1], runs=2, methods=methods)
    names = [COPY, *methods]
    assert [(t.size, t.method) for t in run.timings] == [
        (n, name) for n in (1, 3) for name in names
    ]
    assert {t.regime for t in run.timings} == {"1 thread"}
    for timing in run.timings:
        assert timing.low_us <= timing.median_us <= timing.high_us
        assert (timing.method == COPY) <= (timing.ratio == 1)


@pytest.mark.parametrize("buffers", BUFFERS.values(), ids=BUFFERS)
def test_bytes_are_those_read_and_written(buffers):
    one = make_export_set(TINY, buffers, 3, device="cpu")
    sizes = {"float32": 4, "bfloat16": 2}
    states = 3 * 32 * (sizes[buffers.source_dtype] + sizes[buffers.state_dtype])
    windows = 3 * 8 * 3 * 2 * 2 * buffers.windows
    assert sum(t.nbytes + s.nbytes for t, s in one.flat) == states + windows


def test_each_number_of_threads_is_a_regime_and_the_setting_is_restored():
    before = torch.get_num_threads()
    run = bench_export(
        [TINY],
        [2],
        buffers=[BUFFERS["token-first"]],
        threads=[1, 2],
        runs=2,
        methods={OURS: truth},
    )
    assert [t.regime for t in run.timings] == ["1 thread"] * 2 + ["2 threads"] * 2
    assert run.environment.threads == [1, 2]
    assert torch.get_num_threads() == before


def test_a_gpu_is_asked_for_only_where_there_is_one(monkeypatch):
    if not torch.cuda.is_available():
        with pytest.raises(CheckpointValueError, match="torch finds none"):
            bench_export([TINY], [1], device="cuda")
    with pytest.raises(CheckpointValueError, match="device is 'tpu'; expected one of cpu, cuda"):
        bench_export([TINY], [1], device="tpu")
    # E05: interpreter times mean nothing, whatever the device.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(CheckpointValueError, match="TRITON_INTERPRET"):
        bench_export([TINY], [1], device="cuda")


def test_no_kernel_is_timed_in_the_interpreter():
    """Only what runs at its own speed here: the exporter, which takes torch, and torch's forms."""
    assert set(export_methods("cpu")) - {"torch.compile(indexing)"} == {OURS, *BASELINES} - {
        "torch.compile(indexing)"
    }
    assert export.PLAIN_KERNEL not in export_methods("cpu")


def test_the_loop_is_the_planners_rule():
    sizes = [0, 1, 7, 300]
    for case in planner_cases(sizes):
        rows = case.seq_lens, case.query_lens
        for geometry in (
            (128, 1536, 16, False, 128),
            (128, 1536, 16, True, 1536),
            (4, 8, 8, True, 4),
        ):
            expected = compute_mamba_prefill_checkpoints(*rows, *geometry)
            assert plan_with_a_loop(*rows, *geometry) == expected
    assert {case.rows for case in planner_cases(sizes)} == {"prefill", "90 % decode"}


def test_planner_cases_have_rows_of_every_kind():
    [case, *_] = planner_cases([4096])
    offsets, _ = plan_with_a_loop(case.seq_lens, case.query_lens, *PLANNER_GEOMETRY)
    assert 0.5 < np.count_nonzero(offsets) / 4096 < 1
    *_, decode = planner_cases([4096])
    assert 0.85 < decode.query_lens.count(1) / 4096 < 0.95


@pytest.mark.parametrize("row", [([4], [5]), ([4], [-1])])
def test_the_loop_validates_its_rows(row):
    with pytest.raises(ValueError, match="outside"):
        plan_with_a_loop(*row, *PLANNER_GEOMETRY)


def test_a_planner_that_differs_is_not_timed():
    def off_by_one_column(*rows):
        offsets, columns = compute_mamba_prefill_checkpoints(*rows)
        return offsets, [column + (column >= 0) for column in columns]

    reported = []
    with pytest.raises(CheckpointValueError, match="disagree on 256 prefill rows"):
        bench_planner([256], runs=2, planner=off_by_one_column, report=reported.append)
    assert reported == []


def test_planner_timings_compare_with_the_loop():
    run = bench_planner([1, 8], runs=2)
    assert (run.kind, run.reference) == ("planner", LOOP)
    assert len(run.timings) == 2 * 2 * 2 * 2
    assert {t.buffers for t in run.timings} == {"list", "array"}
    for loop, ours in zip(run.timings[::2], run.timings[1::2], strict=True):
        assert (loop.method, ours.method) == (LOOP, "planner")
        assert ours.ratio == pytest.approx(loop.median_us / ours.median_us)


def test_the_band_is_the_middle_three_fifths():
    samples = {"a": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], "b": [0.5] * 6}
    a, b = timings_of("case", "buffers", 1, "regime", samples, 7_000_000)
    assert (a.low_us, a.median_us, a.high_us) == (2e6, 3.5e6, 5e6)
    assert (a.ratio, b.ratio, a.runs) == (1.0, 7.0, 6)
    assert a.gb_per_s == pytest.approx(7_000_000 / 3.5 / 1e9)


def test_a_result_reads_back_and_names_no_machine():
    run = bench_planner([1], runs=2)
    text = run.to_json()
    assert Benchmark.from_json(text) == run
    environment = json.loads(text)["environment"]
    assert set(environment["versions"]) >= {"python", "numpy", "torch"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", environment["date"])
    import platform

    for secret in (platform.node(), str(Path.home()), str(Path.cwd())):
        assert len(secret) < 2 or secret not in text


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kind": "export"}', '{"environment": 3}'])
def test_other_text_is_refused(text):
    with pytest.raises(CheckpointValueError, match="not a benchmark"):
        Benchmark.from_json(text)


def test_figures_above_the_memorys_bandwidth_are_pointed_at():
    """E05, triton PR #10149: a kernel that seems faster than memory was served by a cache."""
    timing = Timing(
        "case", "buffers", 1, "kernel only", "copy", 10.0, 9.0, 11.0, 5, 10_000_000, 1.0
    )
    environment = dataclasses.replace(record_environment("cpu", threads=[1]), peak_gb_per_s=900.0)
    assert "above" in command._summary(Benchmark("export", COPY, environment, [timing]))
    slower = dataclasses.replace(timing, median_us=12.0)
    assert "above" not in command._summary(Benchmark("export", COPY, environment, [slower]))


def test_the_command_prints_a_table_and_writes_the_result(tmp_path, capsys):
    out = tmp_path / "planner.json"
    assert main(["planner", "--rows", "1,8", "--runs", "2", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("planner") == 8
    assert "timed in the same run" in printed
    assert len(Benchmark.from_json(out.read_text()).timings) == 16


def test_the_export_command_takes_layers_counts_buffers_and_threads(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(command.LAYERS, "tiny", TINY)
    monkeypatch.setattr(export, "export_methods", lambda device: {OURS: truth})
    out = tmp_path / "export.json"
    words = ["export", "--layer", "tiny", "--checkpoints", "1,2", "--buffers", "dim-first"]
    assert main([*words, "--threads", "1,2", "--runs", "2", "--out", str(out)]) == 0
    assert capsys.readouterr().out.count("contiguous copy_") == 2 * 2 + 1
    assert len(Benchmark.from_json(out.read_text()).timings) == 2 * 2 * 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export", "--layer", "kimi-k9"], "--layer is 'kimi-k9'; expected one of kimi-k3"),
        (["export", "--checkpoints", "8,none"], "--checkpoints is '8,none'"),
        (["export", "--checkpoints", "0"], "--checkpoints is '0'"),
        (
            ["export", "--buffers", "sideways"],
            "--buffers is 'sideways'; expected one of token-first",
        ),
        (["planner", "--rows", ""], "--rows is ''"),
        (["planner", "--runs", "1"], "--runs is 1"),
    ],
)
def test_bad_options_say_what_is_known(words, message):
    with pytest.raises(CheckpointValueError, match=re.escape(message)):
        main(words)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_every_method_is_equal_also_when_replayed_from_a_graph(tmp_path):
    """A process of its own, without the interpreter; the figures are not looked at."""
    out = tmp_path / "gpu.json"
    words = ["--device", "cuda", "--layer", "kimi-k3-tp8", "--checkpoints", "2", "--runs", "2"]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "mambackpt", "bench", "export", *words, "--out", str(out)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    regimes = {timing.regime for timing in Benchmark.from_json(out.read_text()).timings}
    assert regimes == {"kernel only", "with launch"}


def test_a_replay_is_timed_beside_the_plain_one_that_gives_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1500, "output_length": 1, "hash_ids": [1, 2, 3 + n]}
        for n in range(4)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["replay", str(path), "--rule", "last", "--block", "512", "--runs", "2"]) == 0
    assert "4 requests" in capsys.readouterr().out


def test_an_explorer_is_timed_in_a_kernel_of_its_own():
    [first] = list(time_explorers(["placement"], runs=3, in_browser=False))
    assert (first.explorer, first.control, first.paint_ms) == ("placement", "start", None)
    assert len(first.cpu_ms) == 3
    assert redraw_table([first])[0][:2] == ("placement", "start")


def test_an_explorer_that_stands_still_is_not_timed(monkeypatch):
    still = explorers.Move("placement", "start", "explore_placement()", "[0, 0, 0, 0]")
    monkeypatch.setattr(explorers, "MOVES", (still,))
    with pytest.raises(CheckpointValueError, match="a move left the view as it was"):
        list(time_explorers(runs=3, in_browser=False))


def test_an_unknown_explorer_is_refused_before_a_kernel_starts():
    with pytest.raises(CheckpointValueError, match="Try 'placement'"):
        list(time_explorers(["placment"], in_browser=False))


def test_an_engine_is_timed_beside_the_plain_one_that_gives_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["replay", "chat:40", "--engine", "llama.cpp,sglang", "--runs", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["llama.cpp", "sglang"]
    assert lines[3].startswith("chat:40, 40 requests: ")


def test_an_engine_s_timing_that_differs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    served = replays.replay_engine

    def wrong(trace: Trace, engine: str, *, plainly: bool = False) -> Replay:
        made = served(trace, engine, plainly=plainly)
        return made if plainly else dataclasses.replace(made, reused=made.reused + 1)

    monkeypatch.setattr(replays, "replay_engine", wrong)
    with pytest.raises(CheckpointValueError, match=r"llama\.cpp disagree on chat:20"):
        next(replays.time_engines(generate_chat(20), ["llama.cpp"]))
