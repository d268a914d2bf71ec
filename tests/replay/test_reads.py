"""Reads by part of a joined rule: whose state each request resumed after."""

from dataclasses import dataclass
from random import Random
from typing import Any

import pytest

from mambackpt.replay import Case, Replay, Span, Trace, get_rule, replay, trace_from_tokens
from mambackpt.replay.rules import Lengths, Match

JOINED = ["last+junction", "junction+last", "all+last", "last+junction+chunk", "interval(12)+chunk"]
JOINED += ["sglang(2)+last", "ladder(4, 3)+junction+last", "lattice(3)+trtllm(8, branches=True)"]


@dataclass
class ModelBytes:
    """A model with these bytes per token and state."""

    model_token_bytes: int = 1
    model_state_bytes: int = 10


def random_trace(seed: int, grain: int = 4) -> Trace:
    random = Random(seed)
    prompts: list[list[int]] = []
    for _ in range(40):
        earlier = random.choice(prompts) if prompts and random.random() < 0.8 else []
        kept = random.choice((len(earlier), random.randint(0, len(earlier))))
        more = random.choice((1, 2, random.randint(1, 60)))
        prompts.append(earlier[:kept] + [random.randrange(3) for _ in range(more)])
    return trace_from_tokens(prompts, grain=grain)


def read_plainly(trace: Trace, run: Replay, case: Case) -> dict[str, int]:
    """Request by request: read a state, then write down who placed what."""
    parts = case.rule.parts
    reads = {part.name: 0 for part in parts}
    placed_by: dict[int, str] = {}
    for i in range(len(trace)):
        blocks, g = trace.blocks(i), trace.grain
        hit = int(run.reused[i])
        if hit:
            reads[placed_by[blocks[hit // g - 1]]] += 1
        match = Match(int(run.attention[i]), hit)
        asked = Lengths(int(trace.prompt[i]))
        for part in reversed(parts):
            for position in part.place(asked, match, case.sizes):
                first, last, step = (
                    position if isinstance(position, Span) else (position,) * 2 + (1,)
                )
                for p in range(first, min(last, asked.prompt) + 1, step):
                    if p >= g:
                        placed_by[blocks[p // g - 1]] = part.name
    return reads


@pytest.mark.parametrize("rule", JOINED)
@pytest.mark.parametrize("pool", [None, 300])
@pytest.mark.parametrize("plainly", [False, True])
def test_a_read_is_the_parts_that_placed_the_state_last(
    rule: str, pool: int | None, plainly: bool
) -> None:
    options: dict[str, Any] = {"budget": 16}
    if pool:
        options |= {"model": ModelBytes(), "pool_bytes": pool}
    for seed in range(12):
        trace = random_trace(seed)
        run = replay(trace, rule, block=4, plainly=plainly, **options)
        assert run.reads == read_plainly(trace, run, Case.of(trace, rule, block=4, **options))
        assert sum(run.reads.values()) == (run.reused > 0).sum()


def test_the_first_part_that_places_a_position_has_it() -> None:
    trace = trace_from_tokens([[1] * 40] * 2, grain=4)
    assert replay(trace, "last+all", block=4).reads == {"last": 1, "all": 0}
    assert replay(trace, "all+last", block=4).reads == {"all": 1, "last": 0}


def test_a_part_that_places_a_state_again_takes_it_over() -> None:
    # The second prompt resumes at 36, so that "last" has nothing to place, and "all" has it all.
    trace = trace_from_tokens([[1] * 40] * 3, grain=4)
    assert replay(trace, "last+all", block=4).reads == {"last": 1, "all": 1}


def test_a_rule_by_itself_has_all_reads_and_one_without_states_none() -> None:
    trace = trace_from_tokens([[1] * 40] * 3, grain=4)
    assert replay(trace, "last", block=4).reads == {"last": 2}
    assert replay(trace, "attention", block=4).reads == {}
    assert get_rule("last").parts == ()
