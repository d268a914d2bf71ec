"""The shapes in which traces are published: read as they are, or refused with the sentence."""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mambackpt.errors import CheckpointError, CheckpointValueError
from mambackpt.replay import Trace, load_trace, open_trace, replay, trace_from_tokens
from mambackpt.replay.formats import Line, MessageReader
from mambackpt.replay.trace import TraceRows


def written(path: Path, *records: object, name: str = "t.jsonl") -> Path:
    """A file of JSON records, one a line; text as it is."""
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    data = "".join(line + "\n" for line in lines).encode()
    (path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path / name


def row(prompt: int, ids: list[int], **more: object) -> dict[str, Any]:
    return {"timestamp": 0, "input_length": prompt, "output_length": 1, "hash_ids": ids, **more}


def rows_of(trace: Trace) -> list[list[int]]:
    return [trace.blocks(i) for i in range(len(trace))]


# --- rows with ids --------------------------------------------------------------------------------


def test_dynamo_rows_go_by_other_names_and_say_their_block(tmp_path: Path) -> None:
    first = {"created_time": 500.5, "input_tokens": 130, "output_tokens": 52, "hash_ids": [0, 1, 2]}
    second = {"delay_ms": 250.0, "input_tokens": 190, "output_tokens": 26, "hash_ids": [0, 1, 3]}
    extra = {"session_id": "a", "block_size": 64, "request_id": "r", "priority": 1}
    trace = load_trace(written(tmp_path, {**first, **extra}, {**second, **extra}))
    assert (trace.grain, trace.prompt.tolist()) == (64, [130, 190])
    assert trace.arrival.tolist() == pytest.approx([0.5005, 0.7505])
    assert trace.conversation.tolist() == [0, 0]
    assert trace.output.tolist() == [52, 26]
    assert trace.shared.tolist() == [0, 2]
    assert trace.notes == ("a turn's delay counts from the arrival of the turn before",)


def test_aiperf_rows_with_and_without_a_session(tmp_path: Path) -> None:
    rows = [
        row(600, [0, 1], session_id="s1", timestamp=1000),
        row(1100, [0, 5, 6], session_id="s2", timestamp=1500.25),
        row(700, [0, 7], session_id="s1", timestamp=2000),
    ]
    trace = load_trace(written(tmp_path, *rows))
    assert trace.conversation.tolist() == [0, 1, 0]
    assert trace.arrival.tolist() == [1.0, 1.50025, 2.0]
    assert trace.notes == ()


@pytest.mark.parametrize(
    ("record", "field"),
    [
        (row(64, [0], block_size=32), "block_size"),
        (row(64, [0], session_id=[1]), "session_id"),
        ({**row(64, [0], session_id="new"), "timestamp": None}, "timestamp"),
        ({**row(64, [0], session_id="a", delay=-1), "timestamp": None}, "delay"),
    ],
)
def test_a_wrong_row_is_refused_with_its_field(
    tmp_path: Path, record: dict[str, Any], field: str
) -> None:
    path = written(tmp_path, row(64, [0], block_size=64, session_id="a"), record)
    with pytest.raises(CheckpointValueError, match=rf"t\.jsonl line 2, field {field}: .* Try "):
        load_trace(path)


def test_ids_of_blocks_alone_are_chained_and_the_notes_say_so(tmp_path: Path) -> None:
    """The rows of AIPerf's own page: id 1 follows 0 in one of them and begins another one."""
    rows = [row(1200, [0, 1, 2]), row(1800, [0, 3, 4, 5]), row(1300, [1, 4, 6])]
    trace = load_trace(written(tmp_path, *rows))
    assert trace.shared.tolist() == [0, 1, 0]
    assert rows_of(trace) == [[0, 1], [0, 2, 3], [4, 5]]
    [note] = trace.notes
    assert note.startswith("ids name blocks, not whole prefixes (line 3 has 1 after another prefix")
    assert note in replay(trace, "last", block=512).summary()["notes"]


def test_a_block_that_comes_twice_in_a_prompt_is_chained_too(tmp_path: Path) -> None:
    trace = load_trace(written(tmp_path, row(1536, [7, 7, 7]), row(1536, [7, 7, 2**64 - 1])))
    assert trace.shared.tolist() == [0, 2]


@given(st.lists(st.lists(st.integers(0, 2), max_size=9), min_size=1, max_size=9))
def test_chaining_gives_the_sharing_that_the_tokens_have(texts: list[list[int]]) -> None:
    """Blocks named by their content alone, against the prompts that they are cut from."""
    texts = [[7, *text] for text in texts]
    rows = TraceRows("t", 2)
    for text in texts:
        ids = [10 * text[at] + text[at + 1] for at in range(0, len(text) - 1, 2)]
        rows.add(0.0, len(text), 0, ids=ids)
    rows.chain()
    trace, truth = rows.link(), trace_from_tokens(texts, grain=2)
    assert trace.shared.tolist() == truth.shared.tolist()
    assert rows_of(trace) == rows_of(truth)


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_files_of_other_editors_are_read(tmp_path: Path, name: str) -> None:
    """A mark at the beginning, and two characters at each line's end."""
    text = "\ufeff" + "\r\n".join(json.dumps(row(512, [n])) for n in range(3)) + "\r\n\r"
    assert len(load_trace(written(tmp_path, text, name=name))) == 3
    pretty = "\ufeff" + json.dumps(row(512, [0]), indent=1)
    assert len(load_trace(written(tmp_path, pretty, name=name))) == 1


# --- Claude Code and AgentX -----------------------------------------------------------------------


def agentx(number: int, *prompts: int) -> dict[str, Any]:
    requests = [
        {"t": float(at), "type": "n", "in": tokens, "out": 5, "hash_ids": [*range(tokens // 64)]}
        for at, tokens in enumerate(prompts)
    ]
    return {
        "id": f"c{number}", "models": ["m"], "block_size": 64, "hash_id_scope": "local",
        "requests": requests,
    }  # fmt: skip


def test_conversations_are_the_same_a_line_each_or_pretty_printed_or_in_a_folder_or_a_list(
    tmp_path: Path,
) -> None:
    chats = [agentx(1, 200, 330), agentx(2, 100, 128)]
    lines = load_trace(written(tmp_path, *chats, name="lines.jsonl"))
    pretty = "\n".join(json.dumps(chat, indent=2) for chat in chats)
    folder = tmp_path / "traces"
    folder.mkdir()
    for number, chat in enumerate(chats):
        (folder / f"trace_{number}.json").write_text(json.dumps(chat, indent=1))
    (folder / "README.md").write_text("not a trace")
    others = [
        load_trace(written(tmp_path, pretty, name="pretty.json")),
        load_trace(written(tmp_path, pretty, name="pretty.json.gz")),
        load_trace(folder),
        load_trace(written(tmp_path, json.dumps(chats), name="list.json")),
        load_trace(written(tmp_path, json.dumps(chats, indent=2), name="list2.json")),
    ]
    assert lines.conversation.tolist() == [0, 0, 1, 1]
    assert lines.shared.tolist() == [0, 3, 0, 1]
    for other in others:
        assert rows_of(other) == rows_of(lines)
        assert other.conversation.tolist() == lines.conversation.tolist()


def test_global_ids_are_shared_between_conversations(tmp_path: Path) -> None:
    chats = [agentx(1, 200), agentx(2, 330)]
    assert load_trace(written(tmp_path, *chats)).shared.tolist() == [0, 0]
    chats = [{**chat, "hash_id_scope": "global"} for chat in chats]
    assert load_trace(written(tmp_path, *chats)).shared.tolist() == [0, 3]


@pytest.mark.parametrize(("inner", "arrival"), [(1.0, 6.0), (7.0, 7.0)])
def test_times_of_subagents_count_from_their_group_or_from_the_start(
    tmp_path: Path, inner: float, arrival: float
) -> None:
    """kv-cache-tester writes them after the group's start, AgentX after the conversation's."""
    chat = agentx(1, 64)
    chat["requests"].append(
        {"t": 5.0, "type": "subagent", "requests": [{**agentx(2, 64)["requests"][0], "t": inner}]}
    )
    trace = load_trace(written(tmp_path, chat), subagents=True)
    assert trace.arrival.tolist() == [0.0, arrival]


def test_a_folder_without_traces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointValueError, match=r"is a folder without traces; .*\.jsonl"):
        load_trace(tmp_path)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('{\n "requests": [],\n oops\n}', "line 3, field"),
        ('{\n "requests": [', "line 1, field"),
        ('[\n {"a": 1},\n {"a": }\n]', "line 3, field"),
        ('{"hash_ids": }\n{"hash_ids": [1]}', "line 1, field"),
    ],
)
def test_json_that_breaks_off_is_refused_where_it_does(
    tmp_path: Path, text: str, where: str
) -> None:
    with pytest.raises(CheckpointValueError, match=rf"t\.json {where} \(all\): .* Try "):
        load_trace(written(tmp_path, text, name="t.json"))


def test_a_record_of_a_list_is_named_by_its_number(tmp_path: Path) -> None:
    text = json.dumps([row(512, [0]), row(-1, [0])])
    with pytest.raises(CheckpointValueError, match="line 1 record 2, field input_length"):
        load_trace(written(tmp_path, text))


def test_a_list_of_token_lists_is_one_prompt_each(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps([[1, 2, 3, 4], [1, 2, 9, 9]]))
    assert load_trace(path, grain=2).shared.tolist() == [0, 1]


# --- texts ----------------------------------------------------------------------------------------

SYSTEM = {"role": "system", "content": "You help. " * 20}
ESTIMATE = "an estimate: words and marks count as tokens (--tokenizer is exact)"


def asked(*texts: str) -> list[dict[str, Any]]:
    return [SYSTEM, *({"role": "user", "content": text} for text in texts)]


def test_openai_requests_share_what_their_messages_share(tmp_path: Path) -> None:
    usage = {"prompt_tokens": 126, "completion_tokens": 9}
    records = [
        {"model": "m", "messages": asked("one"), "usage": usage},
        {"custom_id": "b", "body": {"messages": asked("one", "two")}},
        {"request": {"messages": asked("three")}, "response": {"body": {"usage": usage}}},
        {"payload": {"messages": asked("one")}, "output_length": 7, "session_id": "s"},
    ]
    trace = load_trace(written(tmp_path, *records))
    # "system", then three pieces twenty times, then "user" and a word: 63, of 2 tokens each.
    assert trace.prompt.tolist() == [126, 130, 126, 126]
    assert trace.message.tolist() == [122, 126, 122, 122]
    assert trace.output.tolist() == [9, 0, 9, 7]
    assert trace.shared.tolist() == [0, 7, 7, 7]
    assert trace.conversation.tolist() == [-1, -1, -1, 0]
    [note] = trace.notes
    told = ESTIMATE.replace(" (", ", 2.00 each as the file's usage has it (")
    assert note == told


@given(st.integers(1, 400), st.integers(1, 400), st.integers(1, 40))
def test_an_estimate_keeps_the_sharing_and_adds_up_to_the_usage(
    told: int, more: int, grain: int
) -> None:
    """Whatever a word counts, equal prefixes are shared and as long in every prompt."""
    rows = TraceRows("t", grain)
    reader = MessageReader(rows, None)
    texts = ["a b c d e f g h i j", "a b c d e f g h i j k l", "a b x", "a b c d e f g h i j"]
    for text, tokens in zip(texts, (told, more, 1, told), strict=True):
        usage = {"prompt_tokens": tokens, "completion_tokens": 1}
        reader.take(Line(Path("t"), 1), {"text_input": text, "usage": usage})
    reader.finish()
    trace, words, total = rows.link(), [10, 12, 3, 10], 2 * told + more + 1
    assert trace.prompt.tolist() == [max(n * total // 35, 1) for n in words]
    assert sum(words) * total / 35 - 4 < trace.prompt.sum() <= max(total, 4)
    assert trace.shared[3] == trace.length[0]
    assert trace.shared[1] == trace.length[0]
    assert trace.shared[2] <= 2 * total // 35 // grain


def test_an_estimate_is_called_so_wherever_the_trace_is_told(tmp_path: Path) -> None:
    trace = load_trace(written(tmp_path, {"messages": asked("one")}))
    assert trace.name == "t.jsonl (words, an estimate)"
    summary = replay(trace, "last", block=16).summary()
    assert "estimate" in summary["trace"]
    assert ESTIMATE in summary["notes"]


def test_parts_tools_and_replies_of_openai_requests(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "what is this"}, {"type": "image_url", "image_url": {}}]
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}
    records = [
        {"messages": [{"role": "user", "content": parts}]},
        {
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "a b c"},
            ]
        },
        {"messages": [{"role": "user", "content": "hi"}, called], "tools": [{"name": "f"}]},
        {"text_input": "some words here"},
        {"payload": {"prompt": "some words here"}},
    ]
    trace = load_trace(written(tmp_path, *records))
    assert trace.prompt.tolist()[:2] == [4, 2]
    assert trace.output.tolist()[:2] == [0, 4]
    assert trace.prompt.tolist()[3:] == [3, 3]
    assert trace.notes == (ESTIMATE, "left out: parts of messages that are no text (1)")


@pytest.mark.parametrize(
    ("record", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"content": "no role"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 7}]}, "content"),
        ({"messages": asked("one"), "message_mode": "delta"}, "message_mode"),
        ({"messages": asked("one"), "usage": {"prompt_tokens": "9"}}, "prompt_tokens"),
        ({"messages": asked("one"), "timestamp": "noon"}, "timestamp"),
        ({"request": {"model": "m"}}, "messages"),
        ({"conversations": [{"from": "human"}]}, "conversations"),
        ({"conversations": 7}, "conversations"),
    ],
)
def test_a_malformed_text_record_is_refused_with_its_field(
    tmp_path: Path, record: dict[str, Any], field: str
) -> None:
    with pytest.raises(CheckpointValueError, match=rf"t\.jsonl line 1, field {field}: .* Try "):
        load_trace(written(tmp_path, record))


def test_each_answer_of_a_sharegpt_conversation_was_a_request(tmp_path: Path) -> None:
    turns = [("human", "a " * 30), ("gpt", "b " * 9), ("human", "c " * 5), ("gpt", "d " * 4)]
    record = {"id": "x", "conversations": [{"from": f, "value": v} for f, v in turns]}
    trace = load_trace(written(tmp_path, json.dumps([record, record]), name="sharegpt.json"))
    assert trace.prompt.tolist() == [31, 47] * 2
    assert trace.output.tolist() == [10, 5] * 2
    assert trace.message.tolist() == [0, 41] * 2
    assert trace.shared.tolist() == [0, 1, 1, 2]
    assert trace.conversation.tolist() == [0, 0, 1, 1]
    assert "estimate" in trace.name


def test_a_sharegpt_conversation_may_begin_with_an_answer_and_end_with_a_question(
    tmp_path: Path,
) -> None:
    turns = [("gpt", "hello"), ("human", "a b"), ("gpt", "c"), ("human", "d")]
    record = {"conversations": [{"from": f, "value": v} for f, v in turns]}
    trace = load_trace(written(tmp_path, record))
    assert trace.prompt.tolist() == [5, 9]
    assert trace.output.tolist() == [2, 0]


def test_with_a_tokenizer_texts_are_tokens(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"a": 0, "b": 1, "user": 2, "?": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    path = written(tmp_path, {"messages": [{"role": "user", "content": "a b a b"}]})
    for where in (tmp_path, tmp_path / "tokenizer.json"):
        trace = load_trace(path, tokenizer=where, grain=1)
        assert trace.prompt.tolist() == [5]
        assert trace.name == "t.jsonl"
        assert trace.notes == (f"tokens of {where.name}, without what a chat template adds",)
    with pytest.raises(CheckpointValueError, match=r"--tokenizer .*nowhere cannot be read"):
        load_trace(path, tokenizer=tmp_path / "nowhere")


def test_a_tokenizer_that_cannot_be_used_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = written(tmp_path, {"messages": asked("one")})
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(CheckpointValueError, match=r"not installed; .*pip install tokenizers"):
        load_trace(texts, tokenizer="x")
    ids = written(tmp_path, row(512, [0]), name="ids.jsonl")
    with pytest.raises(CheckpointValueError, match="layout mooncake, which has ids and no texts"):
        load_trace(ids, tokenizer="x")


# --- lengths without prefixes ---------------------------------------------------------------------

BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,4720,18,4738,Conversation log
45,GPT-4,0,0,0,Conversation log
118,ChatGPT,3600,276,3876,Conversation log"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:05.4799600,3180,8"""
ROWS = "\n".join(
    json.dumps({"timestamp": 1500, "input_length": n, "output_length": 3}) for n in (9, 8)
)


@pytest.mark.parametrize(
    ("name", "text", "prompts", "arrivals"),
    [
        ("burst.csv", BURST, [4720, 3600], [0, 113]),
        ("azure.csv.gz", AZURE, [4808, 3180], [0, 1.5]),
        ("rows,with=comma.jsonl", ROWS, [9, 8], [1.5, 1.5]),
    ],
)
def test_a_file_of_lengths_is_refused_with_the_call_that_keeps_them_and_that_call_runs(
    tmp_path: Path, name: str, text: str, prompts: list[int], arrivals: list[float]
) -> None:
    path = written(tmp_path, text, name=name)
    with pytest.raises(CheckpointValueError, match="nothing of which requests share a prefix") as e:
        load_trace(path)
    call = str(e.value).split("Try ")[1].split(" to keep")[0]
    assert call == f"lengths:{path},share=0.5,groups=64"
    trace, _ = open_trace(call)
    assert trace.prompt.tolist() == prompts
    assert trace.arrival.tolist() == arrivals
    assert trace.notes[0] == "the sharing is made up: groups=64, 50 % of each prompt"
    one, _ = open_trace(f"lengths:{path},share=0.75,groups=1")
    assert one.shared.tolist() == [0, min(prompts) * 3 // 4 // 16]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{BURST}\n7,ChatGPT,many,2,3,x", "line 5, field request tokens: given 'many'"),
        (f"{BURST}\n7,ChatGPT", "line 5, field .all.: given 2 columns"),
        (f"{BURST}\nnoon,ChatGPT,1,2,3,x", "line 5, field timestamp: given 'noon'"),
        ('{"a": 1}', "line 1, field .all.: .*expected a row of lengths"),
        (BURST.split("\n")[0], "no request with prompt tokens"),
    ],
)
def test_malformed_lengths_are_refused_with_file_line_and_field(
    tmp_path: Path, text: str, message: str
) -> None:
    path = written(tmp_path, text, name="b.csv")
    with pytest.raises(CheckpointValueError, match=rf"b\.csv .*{message}.*Try "):
        open_trace(f"lengths:{path}")


def test_a_text_that_is_no_trace_is_refused_with_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"line 1, field .all.*mooncake.*messages.*Try JSON"):
        load_trace(written(tmp_path, "hello\nworld"))
