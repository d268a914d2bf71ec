"""The timeline is in Chrome's trace event format, and its numbers are the replay's."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mambackpt.errors import CheckpointError
from mambackpt.models import PRESETS
from mambackpt.replay import (
    Case,
    generate_agents,
    generate_chat,
    interleave,
    plain,
    replay,
    timeline_json,
    trace_from_tokens,
)
from mambackpt.replay.command import main

GB = 10**9


def read_events(text: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Parse a trace of the JSON object format, and hold every event to what the format asks for.

    Every event: name, phase, process and thread (whole numbers). X: a start and a length in
    microseconds, in order and one after the other on its thread, or inside another. i: a start and
    a scope. C: a start and numbers. M: a known name, with the argument that it takes.
    """
    document = json.loads(text)
    assert {"traceEvents", "displayTimeUnit", "otherData"} == set(document)
    assert document["displayTimeUnit"] in ("ms", "ns")
    open_until: dict[tuple[int, int], list[float]] = defaultdict(list)
    for event in document["traceEvents"]:
        assert {"name", "ph", "pid", "tid", "ts"} <= set(event)
        assert type(event["pid"]) is type(event["tid"]) is int
        assert min(event["pid"], event["tid"]) > 0, "thread 0 is the idle one"
        assert type(event["ts"]) in (int, float)
        assert event["ts"] >= 0
        kind = event["ph"]
        assert kind in ("X", "i", "C", "M")
        if kind == "X":
            assert type(event["dur"]) is int
            assert event["dur"] > 0
            stack = open_until[event["pid"], event["tid"]]
            while stack and stack[-1] <= event["ts"]:
                stack.pop()
            assert not stack or event["ts"] + event["dur"] <= stack[-1], "slices cross"
            stack.append(event["ts"] + event["dur"])
        elif kind == "i":
            assert event["s"] in ("g", "p", "t")
        elif kind == "C":
            assert event["args"]
            assert all(type(value) in (int, float) for value in event["args"].values())
        else:
            assert event["name"] in ("process_name", "thread_name")
            assert type(event["args"]["name"]) is str
    return document["otherData"], document["traceEvents"]


@given(
    st.integers(1, 40),
    st.integers(0, 3),
    st.sampled_from(["last", "all", "last+junction", "none"]),
    st.sampled_from([None, GB // 2, 3 * GB, 50 * GB]),
    st.sampled_from(["lru", "thinning"]),
)
def test_the_slices_and_counters_add_up_to_the_replay(
    requests: int, seed: int, rule: str, pool: int | None, eviction: str
) -> None:
    trace, model = generate_chat(requests, seed=seed), PRESETS["qwen3-next"]
    options: dict[str, Any] = {"block": 1056, "model": model}
    if pool is not None:
        options |= {"pool_bytes": pool, "eviction": eviction}
    made = replay(trace, rule, **options)
    about, events = read_events(timeline_json(trace, rule, **options))
    assert "1 microsecond is 1 token of prompt" in about["axis"]
    lengths = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            lengths[event["name"]].append(event["dur"])
    assert lengths["reused"] == [int(n) for n in made.reused if n]
    assert sum(lengths["recomputed"]) == made.recomputed
    written = {e["args"]["request"]: e["args"]["states_written"] for e in events if e["ph"] == "X"}
    assert [written[i] for i in range(requests)] == made.written.tolist()
    held = [e["args"] for e in events if e["ph"] == "C" and e["name"] == "bytes held"]
    assert len(held) == requests
    assert pool is None or all(sum(each.values()) <= pool for each in held)
    if pool is None:
        assert held[-1]["states"] == made.states_written * model.model_state_bytes
        blocks = held[-1]["attention"] // (model.model_token_bytes * 32)
        ours = trace.finer(32)
        assert blocks == len({block for i in range(requests) for block in ours.blocks(i)})


def test_requests_of_no_conversation_share_a_track_and_bytes_need_a_model() -> None:
    _, events = read_events(timeline_json(trace_from_tokens([[7] * 40] * 3), "last", block=16))
    [track] = [e for e in events if e["name"] == "thread_name"]
    assert track["args"]["name"] == "requests of no known conversation"
    assert {e["tid"] for e in events} == {track["tid"]}
    assert {e["name"] for e in events if e["ph"] == "C"} == {"states held"}


@pytest.mark.parametrize("state_pool", [None, GB])
@pytest.mark.parametrize("eviction", ["lru", "thinning", "supersede"])
def test_what_is_told_to_be_held_is_what_the_pool_holds(
    eviction: str, state_pool: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[Any] = []

    class Watched(plain._PlainPool):
        def __init__(self, case: Case) -> None:
            super().__init__(case)
            pools.append(self)

    monkeypatch.setattr(plain, "_PlainPool", Watched)
    case = Case.of(
        interleave(generate_chat(60), 6), "last+junction", block=512, model="qwen3-next",
        pool_bytes=4 * GB, state_pool_bytes=state_pool, eviction=eviction,
    )  # fmt: skip

    def check(kept: plain.Kept) -> None:
        [pool] = pools
        assert kept.states == sum(key < 0 for key in pool.states)
        assert kept.blocks == sum(key >= 0 for key in pool.blocks)
        bytes_held = kept.blocks * case.block_bytes + kept.states * case.state_bytes
        assert bytes_held == pool.used + pool.state_used

    plain.replay_plainly(case, plain.expand_rows(case.trace), check)
    assert len(pools) == 1


def test_a_conversation_is_a_track_with_its_requests_in_order() -> None:
    trace = interleave(generate_agents(60), 3)
    _, events = read_events(timeline_json(trace, "interval(4096)", block=512))
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {chat + 2: f"conversation {chat}" for chat in trace.conversation.tolist()}
    for chat in set(trace.conversation.tolist()):
        asked = [e for e in events if e["ph"] == "X" and e["tid"] == chat + 2]
        numbers = list(dict.fromkeys(e["args"]["request"] for e in asked))
        assert numbers == [i for i, c in enumerate(trace.conversation.tolist()) if c == chat]
    starts = [int(trace.prompt[:i].sum()) for i in range(60)]
    for event in events:
        if event["ph"] == "i":
            inside = max(start for start in starts if start <= event["ts"])
            assert event["ts"] - inside == event["args"]["token"]


def test_the_command_writes_a_timeline_beside_its_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "t.json"
    assert main(["chat:30", "--rule", "last", "--timeline", str(out)]) == 0
    assert "chat:30: 30 requests" in capsys.readouterr().out
    about, _ = read_events(out.read_text())
    assert (about["rule"], about["block"], about["requests"]) == ("last", 512, 30)
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--timeline", "{tmp}"], "is a folder"),
        (["--timeline", "{tmp}/no/t.json"], "which is no folder"),
        (["--out", "{tmp}/no/t.csv"], "which is no folder"),
        (
            ["--timeline", "{tmp}/t.json", "--rule", "all,last"],
            "there are 2; .*all, last at 512",
        ),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_any_work(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mambackpt.replay.command.trace_of", lambda _: pytest.fail("worked"))
    with pytest.raises(CheckpointError, match=message):
        main(["chat:30", *(word.replace("{tmp}", str(tmp_path)) for word in words)])


@pytest.mark.parametrize("option", ["--timeline", "--out"])
def test_an_interrupted_run_leaves_the_file_as_it_was(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "t.json"
    out.write_text("before")

    def interrupted(*_: object, **__: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("mambackpt.replay.command.timeline_json", interrupted)
    monkeypatch.setattr("mambackpt.replay.command._told", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main(["chat:30", "--rule", "last", option, str(out)])
    assert out.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


def test_a_table_is_written_where_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "hits.csv"
    assert main(["chat:30", "--rule", "last,all", "--csv", "--out", str(out)]) == 0
    assert capsys.readouterr().out == ""
    assert main(["chat:30", "--rule", "last,all", "--csv"]) == 0
    assert out.read_text() == capsys.readouterr().out


def test_notes_stand_above_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat:30", "--block", "512,528", "--live", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    notes = [line for line in lines if line.startswith("note: ")]
    assert len(notes) == 3
    assert "4 conversations are live" in notes[0]
    assert "lower bound" in notes[1]
    assert notes[2].endswith("with --grain 16 the reuse told is exact")
    assert main(["chat:30", "--block", "512,528", "--grain", "16"]) == 0
    assert "note: " not in capsys.readouterr().out


def test_an_engines_replay_names_its_trace_as_the_others_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["shared:requests=20,groups=4,turns=2", "--engine", "sglang", "--live", "2"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert out.startswith("shared:20, 2 live: 20 requests")
    assert "note: 2 conversations are live at once" in out
