"""Why did the second prompt not hit: the closed form, held to the engine room."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from mambackpt import CheckpointTypeError, CheckpointValueError, Request, Settings, explain_hit
from mambackpt.engine import VARIANTS, Simulation
from mambackpt.replay import replay, trace_from_tokens
from mambackpt.why import CAUSES, find_cures
from mambackpt.why.kept import leave

PUZZLE = Settings(
    mamba_block_size=528,
    hash_block_size=528,
    checkpoint_alignment=None,
    budget=2048,
    retention=None,
)


def prompts(shared: int, own: list[int]) -> list[list[int]]:
    return [[*range(shared), *range(10**6 * n, 10**6 * n + more)] for n, more in enumerate(own, 1)]


def served(settings: Settings, tokens: list[list[int]]) -> list[tuple[int, int, set[int]]]:
    """Attention match, joint hit and all states in reach of each prompt, from the engine room."""
    requests = [Request(str(number), prompt) for number, prompt in enumerate(tokens)]
    simulation, found = Simulation(requests, replace(settings, max_running=1)), {}
    for _ in simulation:
        for live, query in simulation.scheduled:
            match, hit, _ = found.get(live.name, (live.junction or query.start, query.start, set()))
            kept = simulation.recurrent[0].positions(live, live.prompt)
            found[live.name] = match, hit, kept
    return list(found.values())


def draw_settings(draw: Random) -> Settings | None:
    """Sizes at random, those of attention blocks, drop and lookahead too; None if refused."""
    h = draw.choice((4, 8, 16))
    B = h * draw.choice((1, 1, 2, 3, 4))
    chosen: dict[str, Any] = {
        "mamba_block_size": B,
        "hash_block_size": h,
        "cache_hit_alignment_tokens": draw.choice((None, None, h * 2, B, B * 2)),
        "attention_block_size": draw.choice((None, None, None, h)),
        "checkpoint_alignment": draw.choice((None, 1, 4, 8, 16)),
        "internal_checkpoints": draw.random() < 0.7,
        "drop_eagle_block": draw.random() < 0.5,
        "num_hash_lookahead_tokens": draw.choice((0, 0, 0, 1, 3)),
        "shared_prefix_checkpoint": draw.random() < 0.5,
        "budget": draw.choice((8192, B, 2 * B, B + draw.randint(0, 3 * B))),
        "variant": draw.choice(("vllm-0.33", *VARIANTS)),
    }
    R = draw.choice((0, 0, None, 1, 2))
    try:
        settings = Settings(**chosen)
        return replace(settings, retention=R and R * settings.scheduler_block)
    except CheckpointValueError:
        return None


def test_joint_hits_of_random_pairs_are_the_engine_room_s() -> None:
    compared = hits = 0
    for seed in range(450):
        draw = Random(seed)
        settings = draw_settings(draw)
        if settings is None:
            continue
        B = settings.mamba_block_size
        shared = draw.randint(0, 8 * B)
        own = [draw.choice((1, draw.randint(0, 6 * B))) for _ in range(2)]
        own = [more or not shared for more in own]
        tokens = prompts(shared, [*own, own[1]])
        try:
            first, second, third = served(settings, tokens)
        except CheckpointValueError:  # a budget that reaches no boundary
            with pytest.raises(CheckpointValueError, match="no step"):
                explain_hit(tokens[0], tokens[1], settings)
            continue
        verdict = explain_hit(tokens[0], tokens[1], settings)
        lookahead = settings.geometry.num_hash_lookahead_tokens
        assert verdict.joint == second[1], seed
        assert verdict.third == third[1], seed
        assert verdict.attention == second[0] or second[0] == second[1], seed
        ours = {n for n in verdict.states if n % settings.hit_grid == 0}
        assert {n for n in ours if n + lookahead <= len(tokens[0])} == first[2], seed
        assert sum(verdict.causes.values()) == verdict.recomputed, seed
        assert min(verdict.causes.values()) >= 0, seed
        compared, hits = compared + 1, hits + (second[1] > 0)
    assert compared > 300
    assert 0.2 < hits / compared < 0.9


def test_the_puzzle_keeps_two_states_of_which_one_is_in_reach_of_1600_tokens_only() -> None:
    """S01, vllm issue #45238: block 528, budget 2,048, no checkpoint inside a chunk."""
    miss = explain_hit(2200, 2200, PUZZLE, shared=1500)
    assert (miss.states, miss.attention, miss.joint) == ((1584, 2112), 1056, 0)
    assert miss.veto == "state beyond the fork"
    assert miss.third == 1056, "the junction: useful from the third on"
    hit = explain_hit(2200, 2200, PUZZLE, shared=1600)
    assert (hit.states, hit.joint) == ((1584, 2112), 1584)
    for shared, verdict in ((1500, miss), (1600, hit)):
        engine = served(PUZZLE, prompts(shared, [2200 - shared] * 3))
        assert [joint for _, joint, _ in engine[1:]] == [verdict.joint, verdict.third]


def test_369_shared_tokens_in_a_block_of_784_reuse_nothing_and_nothing_cures_it() -> None:
    settings = Settings(mamba_block_size=784, hash_block_size=784)
    verdict = explain_hit(2369, 2369, settings, shared=369)
    assert (verdict.attention, verdict.joint, verdict.third) == (0, 0, 0)
    assert verdict.veto == "below a block"
    assert find_cures(2369, 2369, settings, shared=369) == []


@pytest.mark.parametrize(
    ("prompt", "reused"), [(2015, 0), (8015, 7168), (32_015, 28_672), (47_074, 46_592)]
)
def test_a_floor_of_3584_leaves_what_was_reported(prompt: int, reused: int) -> None:
    settings = Settings(mamba_block_size=3584, hash_block_size=3584)
    verdict = explain_hit(prompt, prompt, settings, shared=prompt)
    assert verdict.joint == reused
    assert (verdict.veto is None) == (verdict.lost == 0)


def test_a_prompt_that_ends_on_a_boundary_is_resumed_a_block_before() -> None:
    """P02, vllm issue #50235: a byte-identical repeat of an exact multiple of the block."""
    settings = Settings(mamba_block_size=1536, hash_block_size=1536)
    found = [explain_hit(n, n, settings, shared=n).joint for n in (3071, 3072, 3073)]
    assert found == [1536, 1536, 3072]


def test_each_veto_is_named() -> None:
    beyond = explain_hit(2200, 2200, PUZZLE, shared=1500)
    below = explain_hit(2200, 2200, PUZZLE, shared=500)
    drop = explain_hit(
        8000, 8000, Settings(mamba_block_size=1536, hash_block_size=1536, drop_eagle_block=True),
        shared=8000,
    )  # fmt: skip
    ahead = explain_hit(
        300, 300,
        Settings(mamba_block_size=64, hash_block_size=64, num_hash_lookahead_tokens=8, budget=64,
                 retention=None),
        shared=194,
    )  # fmt: skip
    nowhere = explain_hit(2200, 2200, PUZZLE, shared=1500, rule="none")
    assert [v.veto for v in (beyond, below, drop, ahead, nowhere)] == [
        "state beyond the fork",
        "below a block",
        "drop",
        "lookahead",
        "no state there",
    ]
    assert drop.causes["drop"] == 1536
    assert ahead.causes["lookahead"] == 64, "a key of 192 tokens covers 200"
    assert set(CAUSES) == set(beyond.causes)
    assert "attention matches 1,056" in str(beyond)


@pytest.mark.parametrize(
    "rule", ["last", "all", "last+junction", "interval(48)", "sglang(16)", "marconi", "internal"]
)
@pytest.mark.parametrize("drop", [False, True])
def test_with_a_placement_rule_the_hits_are_the_replay_s(rule: str, drop: bool) -> None:
    for seed in range(12):
        draw = Random(seed)
        shared, own = draw.randint(1, 300), [draw.randint(0, 200) for _ in range(2)]
        tokens = prompts(shared, [*own, own[1]])
        settings = Settings(
            mamba_block_size=32, hash_block_size=16, budget=128, drop_eagle_block=drop
        )
        verdict = explain_hit(tokens[0], tokens[1], settings, rule=rule)
        run = replay(
            trace_from_tokens(tokens, grain=16), rule, block=32, budget=128, lookup_margin=16 * drop
        )
        assert (verdict.attention, verdict.joint) == (run.attention[1], run.reused[1])
        assert sum(verdict.causes.values()) == verdict.recomputed
        assert min(verdict.causes.values()) >= 0


CASES = [
    (PUZZLE, 1500, 700),
    (replace(PUZZLE, retention=0), 1500, 700),
    (Settings(mamba_block_size=1056, budget=8192), 6000, 2000),
    (Settings(mamba_block_size=64, hash_block_size=64, drop_eagle_block=True), 300, 100),
    (Settings(mamba_block_size=1536, hash_block_size=1536, drop_eagle_block=True), 8000, 0),
]


@pytest.mark.parametrize(("settings", "shared", "own"), CASES)
def test_a_cure_hits_in_the_engine_room_and_costs_what_it_says(
    settings: Settings, shared: int, own: int
) -> None:
    length = shared + own
    cures = find_cures(length, length, settings, shared=shared)
    assert cures
    now = explain_hit(length, length, settings, shared=shared)
    for cure in cures:
        sizes = dict(cure.changes)
        if "hash_block_size" in sizes:
            sizes |= {"cache_hit_alignment_tokens": None}
        cured = replace(settings, **sizes)
        tokens = prompts(shared, [own] * 3)
        _, second, third = served(cured, tokens)
        assert length - (third if cure.third else second)[1] == cure.recomputed
        assert len(leave(length, cured).states) == cure.states
        assert cure.recomputed < now.recomputed
        assert not cure.third or second[1] < now.best, "else it would help the very next"
    for third in (False, True):
        prices = [cure.price for cure in cures if cure.third is third]
        assert prices == sorted(prices)
    assert [cure.third for cure in cures] == sorted(cure.third for cure in cures)


def test_cures_with_a_rule_are_rules_and_hit_in_the_replay() -> None:
    cures = find_cures(2200, 2200, PUZZLE, shared=1500, rule="last")
    assert {"rule": "interval(1056)"} in [dict(cure.changes) for cure in cures if not cure.third]
    assert {"rule": "last+junction"} in [dict(cure.changes) for cure in cures if cure.third]
    trace = trace_from_tokens(prompts(1500, [700] * 3), grain=528)
    for cure in cures:
        sizes = {"budget": 2048, **cure.changes}
        run = replay(trace, sizes["rule"], block=528, budget=sizes["budget"])
        assert 2200 - run.reused[2 if cure.third else 1] == cure.recomputed


def test_what_hits_wholly_needs_no_cure() -> None:
    settings = Settings(mamba_block_size=16, hash_block_size=16)
    assert explain_hit(33, 33, settings, shared=33).lost == 0
    assert find_cures(33, 33, settings, shared=33) == []


def test_lists_and_lengths_say_the_same() -> None:
    first, second = prompts(1500, [700, 300])
    assert explain_hit(first, second, PUZZLE) == explain_hit(2200, 1800, PUZZLE, shared=1500)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((100, 100), {}, "without shared"),
        ((100, 50), {"shared": 60}, "shared is 60 and the shorter prompt has 50"),
        (([], [1]), {}, "0 and 1 tokens"),
        ((0, 5), {"shared": 0}, "first is 0"),
        ((9, 9), {"shared": -1}, "shared is -1"),
    ],
)
def test_prompts_that_are_none_are_refused(
    arguments: Any, options: dict[str, int], message: str
) -> None:
    with pytest.raises(CheckpointValueError, match=message):
        explain_hit(*arguments, **options)


def test_a_list_beside_a_length_is_refused() -> None:
    with pytest.raises(CheckpointTypeError, match="two token lists, or two lengths"):
        explain_hit([1, 2], 5, shared=1)


def test_settings_that_the_closed_form_does_not_know_are_refused() -> None:
    with pytest.raises(CheckpointValueError, match="speculative_tokens is 3"):
        explain_hit(100, 100, Settings(speculative_tokens=3), shared=50)
    with pytest.raises(CheckpointValueError, match="budgets is"):
        explain_hit(100, 100, Settings(budgets=(64, 128)), shared=50)
