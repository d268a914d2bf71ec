"""Engines over traces: the same as on token lists where an id is a token, and as the plain twin."""

from random import Random
from typing import Any

import pytest

from mambackpt.replay import trace_from_tokens
from mambackpt.replay.serve import serve_tokens
from mambackpt.replay.serve.llama_cpp_traces import walk_trace

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
