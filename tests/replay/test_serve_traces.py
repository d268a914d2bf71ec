"""Engines over traces: the same as on token lists where an id is a token, and as the plain twin."""

import json
import re
from random import Random
from typing import Any

import pytest

from mambackpt import CheckpointError
from mambackpt.__main__ import main
from mambackpt.replay import GENERATORS, replay, replay_engine, serve_tokens, trace_from_tokens
from mambackpt.replay.serve import vllm_traces
from mambackpt.replay.serve.llama_cpp_traces import walk_trace
from mambackpt.replay.serve.traces import walk_tokens

LLAMA_CPP: list[dict[str, Any]] = [
    {},
    {"batch": 64, "ubatch": 8},
    {"batch": 64, "ubatch": 64, "checkpoints": 5, "min_step": 16},
    {"batch": 8, "ubatch": 1, "checkpoints": 0},
    {"batch": 2, "ubatch": 1, "host_cache": False},
    {"batch": 16, "ubatch": 8, "version": "b9294", "min_step": 32},
    {"batch": 16, "ubatch": 8, "version": "b9873"},
]


def random_prompts(seed: int, requests: int = 30) -> list[list[int]]:
    """Prompts over three tokens, so that many share a little by chance."""
    random = Random(seed)
    prompts: list[list[int]] = []
    for _ in range(requests):
        earlier = random.choice(prompts) if prompts and random.random() < 0.8 else []
        kept = random.choice((len(earlier), random.randint(0, len(earlier))))
        more = random.choice((1, 2, random.randint(1, 150)))
        prompts.append(earlier[:kept] + [random.randrange(3) for _ in range(more)])
    return prompts


@pytest.mark.parametrize("settings", LLAMA_CPP, ids=str)
def test_llama_cpp_over_a_trace_of_tokens_is_llama_cpp_on_the_tokens(
    settings: dict[str, Any],
) -> None:
    for seed in range(20):
        prompts = random_prompts(seed)
        rows = list(walk_trace(trace_from_tokens(prompts, grain=1), **settings))
        served = serve_tokens(prompts, "llama.cpp", **settings)
        assert [row[:3] for row in rows] == [
            (s.attention, s.reused, len(s.created)) for s in served
        ]


@pytest.mark.parametrize("grain", [1, 4, 32])
@pytest.mark.parametrize("settings", LLAMA_CPP, ids=str)
def test_the_fast_walk_is_the_plain_one(settings: dict[str, Any], grain: int) -> None:
    for seed in range(20):
        trace = trace_from_tokens(random_prompts(seed), grain=grain)
        assert list(walk_trace(trace, **settings)) == list(
            walk_trace(trace, plainly=True, **settings)
        )


@pytest.mark.parametrize("grain", [1, 4, 32])
@pytest.mark.parametrize("settings", LLAMA_CPP, ids=str)
def test_an_id_stands_for_its_tokens(settings: dict[str, Any], grain: int) -> None:
    for seed in range(10):
        trace = trace_from_tokens(random_prompts(seed), grain=grain)
        rows = [row[:3] for row in walk_trace(trace, **settings)]
        assert rows == [row[:3] for row in walk_tokens(trace, "llama.cpp", **settings)]


@pytest.mark.parametrize("generate", GENERATORS.values(), ids=GENERATORS)
@pytest.mark.parametrize(
    "settings", [{}, {"batch": 512, "ubatch": 128}, {"checkpoints": 3}], ids=str
)
def test_the_fast_walk_is_the_plain_one_on_generated_traces(
    settings: dict[str, Any], generate: Any
) -> None:
    trace = generate(150, seed=1)
    rows = list(walk_trace(trace, **settings))
    assert rows == list(walk_trace(trace, plainly=True, **settings))
    if trace.prompt.sum() < 10**6:
        tokens = list(walk_tokens(trace, "llama.cpp", **settings))
        assert [row[:3] for row in rows] == [row[:3] for row in tokens]


def growing_or_edited(seed: int) -> list[list[int]]:
    """One prompt that grows, or that is cut somewhere and goes on; a few times."""
    random = Random(seed)
    prompt: list[int] = []
    prompts: list[list[int]] = []
    for _ in range(random.randint(3, 6)):
        cut = random.choice((0, 1, 5, random.randint(1, 600))) if seed % 2 else 0
        size = random.choice((random.randint(20, 600), random.randint(600, 3000)))
        prompt = prompt[: max(len(prompt) - cut, 0)] + [random.randrange(250) for _ in range(size)]
        prompts.append(prompt)
    return prompts


@pytest.mark.parametrize("kind", ["growing", "edited"])
def test_the_rule_llamacpp_is_the_server_where_one_conversation_goes_on(kind: str) -> None:
    for seed in range(kind == "edited", 40, 2):
        trace = trace_from_tokens(growing_or_edited(seed), grain=1)
        by_rule = replay(trace, "llamacpp", block=1).reused.tolist()
        assert by_rule == replay_engine(trace, "llama.cpp").reused.tolist()


def test_the_rule_llamacpp_has_no_slots() -> None:
    """Two conversations that share a beginning: the server has one context of each."""
    one, two = [1] * 5000, [1] * 600 + [2] * 4000
    trace = trace_from_tokens([one, two, [*one, 3]], grain=1)
    assert replay(trace, "llamacpp", block=1).reused.tolist() == [0, 0, 5000]
    assert replay_engine(trace, "llama.cpp", host_cache=False).reused.tolist() == [0, 0, 0]
    assert replay_engine(trace, "llama.cpp").reused.tolist() == [0, 0, 5000]


def test_a_replay_by_an_engine_says_what_was_set() -> None:
    trace = trace_from_tokens([range(100), range(120)], grain=4)
    replayed = replay_engine(trace, "llama.cpp", batch=64, ubatch=64)
    assert replayed.rule == "llama.cpp(batch=64, ubatch=64)"
    assert replayed.summary()["reused_tokens"] == 100
    assert (replayed.written.tolist(), replayed.evicted.tolist()) == ([2, 2], [0, 0])


@pytest.mark.parametrize(
    ("engine", "settings", "says"),
    [
        ("llama", {}, "engine is 'llama'; expected one of .*Try 'llama.cpp'"),
        ("llama.cpp", {"block": 16}, "a setting of llama.cpp is 'block'; expected one of batch"),
        ("llama.cpp", {"ubatch": 0}, "ubatch is 0; expected a positive number of tokens. Try 16"),
    ],
)
def test_what_an_engine_does_not_have_is_taught(
    engine: str, settings: dict[str, Any], says: str
) -> None:
    trace = trace_from_tokens([range(100)], grain=4)
    with pytest.raises(CheckpointError, match=says):
        replay_engine(trace, engine, **settings)


# ---- the command ---------------------------------------------------------------------------------


def test_the_command_serves_a_trace_with_an_engine_s_settings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["replay", "chat:100", "--engine", "llama.cpp", "--ubatch", "1024"]
    assert main([*words, "--host-cache", "off", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["rule"] == "llama.cpp(ubatch=1024, host_cache=False)"
    assert main([*words, "--host-cache=off", "--plainly", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == summary


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--engine", "lama.cpp"], "--engine is 'lama.cpp'; expected one of .*Try 'llama.cpp'"),
        (["--engine", "llama.cpp", "--batch", "x"], "--batch is 'x'; expected a whole number"),
        (["--engine", "llama.cpp", "--host-cache", "no"], "--host-cache is 'no'; .*Try"),
        (["--engine", "llama.cpp", "--version", "b9999"], "version is 'b9999'; .*Try"),
    ],
)
def test_the_command_teaches(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", "chat:10", *words]) == 2
    assert re.search(says, capsys.readouterr().err)


def test_lockstep_of_llama_cpp_finds_the_four_requests(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lockstep", "--engine", "llama.cpp", "--seeds", "1000"]) == 1
    told = capsys.readouterr().out
    assert "D resumes after 2 tokens, but the state that B made has read another token 1" in told
    assert "With that one erased too: 0" in told
    assert main(["lockstep", "--engine=llama.cpp", "--seeds", "1000", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (len(report["smallest"]), report["wrong_if_strict"]) == (4, 0)


# ---- vllm by its keys alone ----------------------------------------------------------------------


def random_vllm(seed: int) -> tuple[list[list[int]], int, dict[str, Any]]:
    """Prompts, a grain, and settings: hash units of a block, or smaller ones."""
    random = Random(seed)
    grain, blocks = random.choice((1, 1, 2, 4)), random.choice((1, 2, 3, 4, 6))
    block = grain * blocks
    units = [grain * n for n in range(1, blocks + 1) if blocks % n == 0]
    settings = {
        "block": block,
        "hash_block": random.choice((block, random.choice(units))),
        "alignment": random.choice((None, 1, grain, block, 2 * block)),
        "budget": block * random.choice((1, 2, 3, 5, 50)) + grain * random.choice((0, 0, 1, 2)),
        "retention": random.choice((None, 0, block, 2 * block, 3 * block)),
        "drop": random.random() < 0.4,
        "checkpoints": random.random() < 0.7,
    }
    prompts = [prompt[:90] for prompt in random_prompts(seed, requests=10)]
    return prompts, grain, settings


def test_vllm_by_its_keys_alone_is_the_engine_room() -> None:
    kinds = set()
    for seed in range(300):
        prompts, grain, settings = random_vllm(seed)
        trace = trace_from_tokens(prompts, grain=grain)
        plain = list(vllm_traces.walk_trace(trace, plainly=True, **settings))
        assert list(vllm_traces.walk_trace(trace, **settings)) == plain, settings
        kinds |= {(settings["hash_block"] < settings["block"], row[1] > 0) for row in plain}
    assert len(kinds) == 4  # hits and misses, inside blocks and on their ends


def test_what_may_be_none_can_be_said_on_the_command_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = ["--block", "512", "--hash-block", "512"]
    command = ["replay", "chat:40", "--engine", "vllm", *sizes]
    assert main([*command, "--retention", "none", "--alignment", "none"]) == 0
    assert "retention=None" in capsys.readouterr().out
    assert main([*command, "--budget", "none"]) == 2
    assert "--budget is 'none'" in capsys.readouterr().err
