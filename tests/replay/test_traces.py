"""Traces: what is read is what the file says, or an error that names file, line and field."""

import gzip
import json
import pickle
import re
from dataclasses import astuple
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mambackpt.errors import CheckpointError, CheckpointValueError
from mambackpt.replay.files import load_trace
from mambackpt.replay.generators import (
    GENERATORS,
    PUBLIC_STATISTICS,
    example_trace,
    generate_chat,
)
from mambackpt.replay.trace import Trace, describe_trace, expand, trace_from_tokens


def mooncake(prompt: object, ids: object, timestamp: object = 0, output: object = 1) -> str:
    return json.dumps(
        {
            "timestamp": timestamp,
            "input_length": prompt,
            "output_length": output,
            "hash_ids": ids,
        }
    )


def conversation(*requests: dict[str, object], block: int = 64) -> str:
    return json.dumps({"id": "c", "block_size": block, "requests": list(requests)})


def turn(prompt: int, runs: object, t: object = 0.0, **more: object) -> dict[str, object]:
    return {"t": t, "type": "n", "in": prompt, "out": 5, "runs": runs, **more}


def written(tmp_path: Path, *lines: str, name: str = "trace.jsonl") -> Path:
    path = tmp_path / name
    text = "".join(line + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_the_mooncake_layout_is_read_as_it_is(tmp_path: Path, name: str) -> None:
    lines = [mooncake(1100, [0, 1, 2], 2500), mooncake(1024, [0, 1]), mooncake(700, [0, 7])]
    trace = load_trace(written(tmp_path, *lines, name=name))
    assert trace.grain == 512
    assert trace.arrival.tolist() == [2.5, 0, 0]
    assert trace.prompt.tolist() == [1100, 1024, 700]
    assert [trace.blocks(i) for i in range(3)] == [[0, 1], [0, 1], [0]]
    assert trace.shared.tolist() == [0, 2, 1]
    assert trace.ceiling.tolist() == [0, 512, 512]  # never the last token of a prompt


def test_the_partial_last_block_does_not_count(tmp_path: Path) -> None:
    trace = load_trace(written(tmp_path, mooncake(600, [0, 1]), mooncake(600, [0, 1])))
    assert trace.shared.tolist() == [0, 1]


def test_the_bailian_layout_follows_chats_to_their_first_turn(tmp_path: Path) -> None:
    def line(chat: int, parent: int, ids: list[int], tokens: int) -> str:
        return json.dumps(
            {
                "chat_id": chat,
                "parent_chat_id": parent,
                "timestamp": 1.5,
                "input_length": tokens,
                "output_length": 3,
                "type": "text",
                "turn": 1,
                "hash_ids": ids,
            }
        )

    first, second, third = line(7, -1, [1, 2, 3], 40), line(8, -1, [9], 16), line(9, 7, [1, 2], 32)
    trace = load_trace(written(tmp_path, first, second, third))
    assert (trace.grain, trace.arrival[0]) == (16, 1.5)
    assert trace.conversation.tolist() == [0, 1, 0]
    assert trace.shared.tolist() == [0, 0, 2]


def test_claude_code_ids_are_local_to_their_conversation(tmp_path: Path) -> None:
    one = conversation(turn(200, [[1, 3]]), turn(330, [[1, 2], [9, 3]]))
    other = conversation(turn(200, [[1, 3]], t=9.0))
    trace = load_trace(written(tmp_path, one, other))
    assert trace.shared.tolist() == [0, 2, 0]
    assert len({*trace.blocks(0)} & {*trace.blocks(2)}) == 0


def test_runs_are_joined_where_one_continues_the_other(tmp_path: Path) -> None:
    split = conversation(turn(256, [[1, 4]]), turn(256, [[1, 2], [3, 2]]))
    assert load_trace(written(tmp_path, split)).shared.tolist() == [0, 4]


def test_expanded_ids_and_runs_give_the_same(tmp_path: Path) -> None:
    runs = conversation(turn(256, [[1, 4]]), turn(256, [[1, 2], [7, 2]]))
    ids = json.loads(runs)
    for request in ids["requests"]:
        pairs = request.pop("runs")
        request["hash_ids"] = [i for first, count in pairs for i in range(first, first + count)]
    one = load_trace(written(tmp_path, runs))
    other = load_trace(written(tmp_path, json.dumps(ids), name="ids.jsonl"))
    assert [one.blocks(i) for i in range(2)] == [other.blocks(i) for i in range(2)]


def test_duplicate_conversations_and_subagents_are_kept_on_request(tmp_path: Path) -> None:
    group = {"t": 5.0, "type": "subagent", "requests": [turn(64, [[9, 1]], t=1.0)]}
    line = conversation(turn(64, [[1, 1]]), group)
    path = written(tmp_path, line, line)
    assert len(load_trace(path)) == 1
    assert len(load_trace(path, duplicates=True)) == 2
    assert load_trace(path, subagents=True).arrival.tolist() == [0.0, 6.0]


def test_token_lists_share_whole_prefixes_only(tmp_path: Path) -> None:
    path = written(tmp_path, "[1,2,3,4,5]", "[1,2,3,9,5,6]", "[9,9,3,4]")
    assert load_trace(path, grain=2).shared.tolist() == [0, 1, 0]
    prompts = [[1, 2, 3, 4, 5], [1, 2, 3, 9, 5, 6], [9, 9, 3, 4]]
    assert trace_from_tokens(prompts, grain=2).shared.tolist() == [0, 1, 0]


def test_ids_may_be_64_bit_hashes(tmp_path: Path) -> None:
    big = 2**64 - 1
    lines = [mooncake(1024, [big, 5]), mooncake(1536, [big, 5, 2**40]), mooncake(512, [2**63])]
    trace = load_trace(written(tmp_path, *lines))
    assert trace.shared.tolist() == [0, 2, 0]
    assert trace.size == 4


@pytest.mark.parametrize(
    ("lines", "line", "field"),
    [
        (["{"], 1, "(all)"),
        (["[]"], 1, "(all)"),
        (['{"a": 1}'], 1, "(all)"),
        (["3"], 1, "(all)"),
        (
            [mooncake(512, [0]), "\udcff".encode("utf-8", "surrogateescape").decode("latin1")],
            2,
            "(",
        ),
        ([mooncake(512, [0]), mooncake(-1, [0])], 2, "input_length"),
        ([mooncake(0, [])], 1, "input_length"),
        ([mooncake(512.0, [0])], 1, "input_length"),
        ([mooncake(True, [0])], 1, "input_length"),
        ([mooncake(512, [0], output=-3)], 1, "output_length"),
        ([mooncake(512, [0], timestamp=-3)], 1, "timestamp"),
        ([mooncake(512, [0], timestamp=float("nan"))], 1, "timestamp"),
        ([mooncake(512, [0], timestamp="soon")], 1, "timestamp"),
        ([mooncake(512, [0, 1])], 1, "hash_ids"),
        ([mooncake(1024, [0])], 1, "hash_ids"),
        ([mooncake(512, ["a"])], 1, "hash_ids"),
        ([mooncake(512, [-1])], 1, "hash_ids"),
        ([mooncake(512, [2**64])], 1, "hash_ids"),
        ([mooncake(512, "0")], 1, "hash_ids"),
        (['{"timestamp": 0, "input_length": 512, "hash_ids": [0]}'], 1, "output_length"),
        ([conversation(turn(64, [[1, 2]]))], 1, "runs"),
        ([conversation(turn(128, [[1, 0], [2, 2]]))], 1, "runs"),
        ([conversation(turn(128, [[-1, 2]]))], 1, "runs"),
        ([conversation(turn(128, [[1, 2, 3]]))], 1, "runs"),
        ([conversation(turn(128, 7))], 1, "runs"),
        ([conversation(turn(128, [[1, 2]])), conversation(turn(128, [[1, 1]], t=1))], 2, "runs"),
        (
            [conversation(turn(64, [[1, 1]])), conversation(turn(64, [[1, 2]]), block=32)],
            2,
            "block",
        ),
        (['{"block_size": 64, "requests": 3}'], 1, "requests"),
        (["[1, 2]", '[1, "2"]'], 2, "(all)"),
    ],
)
def test_malformed_input_is_refused_with_file_line_and_field(
    tmp_path: Path, lines: list[str], line: int, field: str
) -> None:
    with pytest.raises(CheckpointValueError) as refusal:
        load_trace(written(tmp_path, *lines, name="bad.jsonl"))
    assert f"bad.jsonl line {line}, field {field}" in str(refusal.value)
    assert re.search(r"; expected \S.*\. Try \S.*\.$", str(refusal.value)), (
        "what to try, and no blank"
    )


def test_a_gzip_file_cut_short_is_refused_and_nothing_half_read_comes_back(tmp_path: Path) -> None:
    path = written(tmp_path, *[mooncake(512, [i]) for i in range(2000)], name="t.jsonl.gz")
    path.write_bytes(path.read_bytes()[:-400])
    with pytest.raises(CheckpointValueError, match=r"t\.jsonl\.gz line \d+, field \(gzip\)"):
        load_trace(path)


def test_a_gzip_file_with_a_damaged_byte_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, *[mooncake(512, [i]) for i in range(2000)], name="t.jsonl.gz")
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 0xFF
    path.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"t\.jsonl\.gz line \d+"):
        load_trace(path)


@pytest.mark.parametrize("name", ["empty.jsonl", "empty.jsonl.gz"])
@pytest.mark.parametrize("lines", [[], ["", "  "]])
def test_an_empty_file_is_refused(tmp_path: Path, name: str, lines: list[str]) -> None:
    with pytest.raises(CheckpointValueError, match=r"empty\.jsonl(\.gz)? is empty"):
        load_trace(written(tmp_path, *lines, name=name))


def test_an_unknown_layout_is_refused_with_those_known(tmp_path: Path) -> None:
    with pytest.raises(CheckpointValueError, match="mooncake, bailian, claude-code, messages"):
        load_trace(written(tmp_path, mooncake(512, [0])), layout="csv")


@pytest.mark.parametrize("grain", [0, -16, 16.0, True])
@pytest.mark.parametrize("name", ["one.jsonl", "empty.jsonl"])
def test_a_grain_that_is_none_is_refused(tmp_path: Path, grain: int, name: str) -> None:
    lines = [mooncake(512, [0])] if name == "one.jsonl" else []
    with pytest.raises(CheckpointError, match="grain is"):
        load_trace(written(tmp_path, *lines, name=name), grain=grain)


def test_prompts_without_tokens_or_with_missing_lengths_are_refused() -> None:
    with pytest.raises(CheckpointValueError, match="prompt 1 is empty"):
        trace_from_tokens([[1], []])
    with pytest.raises(CheckpointValueError, match="end before prompt 1"):
        trace_from_tokens([[1], [2]], outputs=[3])
    with pytest.raises(CheckpointValueError, match="no prompts"):
        trace_from_tokens([])


prompts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=12)


@given(prompts, st.integers(1, 3))
def test_sharing_is_what_comparing_prompts_gives(texts: list[list[int]], grain: int) -> None:
    trace = trace_from_tokens(texts, grain=grain)
    full = [tuple(text[: len(text) // grain * grain]) for text in texts]
    for i, text in enumerate(full):
        lengths = range(len(text), -1, -grain)
        shared = next(
            n for n in lengths if n == 0 or any(text[:n] == other[:n] for other in full[:i])
        )
        assert trace.shared[i] * grain == shared
        follows = {o[shared : shared + grain] for o in full[:i] if o[:shared] == text[:shared]}
        assert trace.splits[i] == (shared > 0 and len(follows) == 1 and follows != {()})
        firsts = trace.first_with(np.array(trace.blocks(i), np.int64)).tolist()
        for depth, first in enumerate(firsts, 1):
            prefix = text[: depth * grain]
            assert first == next(j for j, o in enumerate(full) if o[: len(prefix)] == prefix)


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 5))), st.integers(1, 4))
def test_expand_is_the_loop(pairs: list[tuple[int, int]], step: int) -> None:
    first, count = (np.array([pair[k] for pair in pairs], np.int64) for k in range(2))
    assert expand(first, count, step).tolist() == [f + k * step for f, c in pairs for k in range(c)]


def test_a_pickled_trace_leaves_its_caches_behind() -> None:
    trace = generate_chat(300)
    plain = len(pickle.dumps(trace))
    assert len(trace.paths.owner) == trace.size
    copy: Trace = pickle.loads(pickle.dumps(trace))
    assert len(pickle.dumps(trace)) == plain
    assert copy.blocks(299) == trace.blocks(299)


USED = {"documents": len(example_trace()), "agents": 1500}  # by the figures, by notebook 06


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("seed", [0, 1])
def test_generated_traces_are_like_the_public_ones(name: str, seed: int) -> None:
    public, like = PUBLIC_STATISTICS[name], describe_trace(GENERATORS[name](6000, seed=seed))
    assert like.requests == 6000
    assert like.follow_up_share == pytest.approx(public.follow_up_share, abs=0.08)
    assert like.append_share == pytest.approx(public.append_share, abs=0.05)
    assert like.reuse_ceiling == pytest.approx(public.reuse_ceiling, abs=0.05)
    assert like.prompt_median == pytest.approx(public.prompt_median, rel=0.2)
    assert like.prompt_mean == pytest.approx(public.prompt_mean, rel=0.2)
    assert like.output_mean == pytest.approx(public.output_mean, rel=0.1)
    deep = {"agents": 0.2}.get(name, 0.4)  # chats and documents branch less deep, as they say
    assert like.branch_depth == pytest.approx(public.branch_depth, rel=deep)


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_is_what_its_page_says_at_every_size_it_names(name: str) -> None:
    """Its default size, that of the figures and notebooks, and a long one; two seeds."""
    claims = re.findall(
        r"\* ([\d,]+) requests: (\d+) % follow-ups, reuse ceiling (\d+) %",
        GENERATORS[name].__doc__ or "",
    )
    sizes = [int(size.replace(",", "")) for size, _, _ in claims]
    default = GENERATORS[name].__defaults__
    assert default is not None
    assert {*default, USED.get(name, default[0])} <= {*sizes}
    for size, (_, follow_ups, ceiling) in zip(sizes, claims, strict=True):
        for seed in (0, 1):
            like = describe_trace(GENERATORS[name](size, seed=seed))
            assert 100 * like.follow_up_share == pytest.approx(int(follow_ups), abs=1.5)
            assert 100 * like.reuse_ceiling == pytest.approx(int(ceiling), abs=1.5)


@pytest.mark.parametrize("name", GENERATORS)
def test_what_a_request_shares_with_the_one_before_it(name: str) -> None:
    trace = GENERATORS[name](300, seed=2)
    rows = [trace.blocks(i) for i in range(len(trace))]
    shared = [0]
    for before, after in pairwise(rows):
        same = [a == b for a, b in zip(before, after, strict=False)]
        shared.append([*same, False].index(False))
    assert trace.shared_with_previous.tolist() == shared


@pytest.mark.parametrize("name", GENERATORS)
def test_a_seed_fixes_a_generated_trace(name: str) -> None:
    one, same, other = (GENERATORS[name](200, seed=seed) for seed in (3, 3, 4))
    assert one.prompt.tolist() == same.prompt.tolist()
    assert one.first.tolist() == same.first.tolist()
    assert one.prompt.tolist() != other.prompt.tolist()
    assert (np.diff(one.arrival) >= 0).all()


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_refuses_a_number_that_is_none(name: str) -> None:
    with pytest.raises(CheckpointValueError, match="requests is 0"):
        GENERATORS[name](0)


@pytest.mark.shared
@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("mooncake_conversation_trace", "chat"),
        ("mooncake_synthetic_trace", "documents"),
        ("claude_code_weka_rle", "agents"),
    ],
)
def test_the_public_traces_are_read_whole_and_are_as_stated(
    shared: Path, file: str, name: str
) -> None:
    trace = load_trace(shared / "traces" / f"{file}.jsonl.gz")
    stated = astuple(PUBLIC_STATISTICS[name])
    assert astuple(describe_trace(trace)) == pytest.approx(stated, rel=2e-5)


@pytest.mark.shared
def test_all_requests_of_the_claude_code_file_can_be_kept(shared: Path) -> None:
    path = shared / "traces" / "claude_code_weka_rle.jsonl.gz"
    assert len(load_trace(path, duplicates=True)) == 48_658
    assert len(load_trace(path, duplicates=True, subagents=True)) == 49_334
