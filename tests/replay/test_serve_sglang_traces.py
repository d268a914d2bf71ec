"""SGLang over traces: the same as on token lists where an id is a token, and as the plain twin."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from mambackpt import CheckpointError
from mambackpt.replay import GENERATORS, Trace, replay_engine, serve_tokens, trace_from_tokens
from mambackpt.replay.serve.sglang_traces import walk_trace
from mambackpt.replay.serve.traces import token_requests, walk_tokens

SETTINGS: list[dict[str, Any]] = [
    {},
    {"chunk": 4, "budget": 12, "interval": 8},
    {"chunk": 3, "budget": 10, "interval": 7},
    {"chunk": 4, "budget": 20, "strategy": "no_buffer"},
    {"chunk": 4, "budget": 8, "per_path": 1},
    {"chunk": 2, "budget": 6, "per_path": 3, "slots": 9},
    {"chunk": 4, "budget": 12, "interval": 4, "slots": 6},
    {"chunk": 1, "budget": 5, "slots": 20},
    {"chunk": 4, "budget": 9, "strategy": "no_buffer", "slots": 4, "per_path": 2},
]


def random_prompts(seed: int, requests: int = 30) -> list[list[int]]:
    """Prompts over three tokens, so that many share a little by chance."""
    random = Random(seed)
    prompts: list[list[int]] = []
    for _ in range(requests):
        earlier = random.choice(prompts) if prompts and random.random() < 0.8 else []
        kept = random.choice((len(earlier), random.randint(0, len(earlier))))
        more = random.choice((1, 2, random.randint(1, random.choice((20, 150)))))
        prompts.append(earlier[:kept] + [random.randrange(3) for _ in range(more)])
    return prompts


def random_trace(seed: int, grain: int) -> Trace:
    """A trace of such prompts with outputs of all lengths."""
    prompts = random_prompts(seed)
    outputs = [Random(seed + n).choice((0, 1, 2, 9, 40)) for n in range(len(prompts))]
    return trace_from_tokens(prompts, grain=grain, outputs=outputs)


def rows_of(walk: Iterator[Any]) -> list[Any]:
    """Rows up to an error, and what it says."""
    rows: list[Any] = []
    try:
        rows.extend(walk)
    except CheckpointError as error:
        rows.append(str(error))
    return rows


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_trace_of_tokens_is_served_as_the_tokens(settings: dict[str, Any]) -> None:
    for seed in range(20):
        prompts = random_prompts(seed)
        rows = list(walk_trace(trace_from_tokens(prompts, grain=1), **settings))
        served = serve_tokens(prompts, "sglang", **settings)
        assert [row[:3] for row in rows] == [
            (s.attention, s.reused, len(s.created)) for s in served
        ]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_outputs_that_nobody_sends_back_are_served_as_tokens_too(settings: dict[str, Any]) -> None:
    for seed in range(20):
        trace = random_trace(seed, 1)
        rows = [row[:3] for row in walk_trace(trace, **settings)]
        served = serve_tokens(token_requests(trace), "sglang", **settings)
        assert rows == [(s.attention, s.reused, len(s.created)) for s in served]


@pytest.mark.parametrize("grain", [1, 4, 32])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_fast_walk_is_the_plain_one(settings: dict[str, Any], grain: int) -> None:
    for seed in range(20):
        trace = random_trace(seed, grain)
        plain = rows_of(walk_trace(trace, plainly=True, **settings))
        assert rows_of(walk_trace(trace, **settings)) == plain


@pytest.mark.parametrize("generate", GENERATORS.values(), ids=GENERATORS)
@pytest.mark.parametrize("settings", [{}, {"budget": 2048, "slots": 60}, {"per_path": 2}], ids=str)
def test_the_fast_walk_is_the_plain_one_on_generated_traces(
    settings: dict[str, Any], generate: Callable[..., Trace]
) -> None:
    trace = generate(150, seed=1)
    rows = list(walk_trace(trace, **settings))
    assert rows == list(walk_trace(trace, plainly=True, **settings))


def test_chunks_of_the_grain_are_served_as_their_tokens() -> None:
    """Where all positions are ends of blocks nothing is lost by blocks: attention aside."""
    settings: dict[str, Any] = {"chunk": 4, "budget": 16, "interval": 4, "slots": 12}
    for seed in range(20):
        trace = trace_from_tokens(random_prompts(seed), grain=4)
        reused = [row[1] for row in walk_trace(trace, **settings)]
        assert reused == [row[1] for row in walk_tokens(trace, "sglang", **settings)]


def test_a_state_of_decoding_keeps_the_whole_prompts_attention_and_takes_a_slot() -> None:
    prompt = list(range(100))
    for output, attention in ((0, 64), (156, 64), (157, 96)):
        outputs = [output, 0]
        trace = trace_from_tokens([prompt, prompt], grain=4, outputs=outputs)
        replayed = replay_engine(trace, "sglang", chunk=64, interval=256)
        assert (replayed.attention[1], replayed.reused[1]) == (attention, 64)
        assert replayed.written[0] == 1 + (output == 157)


def test_fewer_slots_never_hold_more_than_they_are() -> None:
    trace = random_trace(5, 4)
    for slots in (6, 9, 14):
        replayed = replay_engine(trace, "sglang", chunk=4, budget=8, slots=slots)
        # A state that is there already is made again, and held once.
        assert int(replayed.written.sum() - replayed.evicted.sum()) >= 0
        assert int(replayed.evicted.sum()) > 0
    hits = [
        replay_engine(trace, "sglang", chunk=4, budget=8, slots=slots).hit_rate
        for slots in (5, 500)
    ]
    assert all(one <= other for one, other in pairwise(hits))
