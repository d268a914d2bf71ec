"""The check itself: it must notice each broken rule, shrink what fails, and agree with an audit."""

import json
from dataclasses import replace

import pytest

from mambackpt.engine import Request, Settings, Simulation, recurrent, simulate, simulation, worker
from mambackpt.engine.attention import AttentionGroup
from mambackpt.engine.chats import branching_chats
from mambackpt.engine.command import main
from mambackpt.engine.recurrent import RecurrentGroup
from mambackpt.engine.report import (
    check_lockstep,
    compare_variants,
    describe_history,
    shrink_history,
)
from mambackpt.engine.variants import VARIANTS, find_variant, named_variant
from mambackpt.errors import CheckpointValueError

FIXES = ["keep-the-stop", "refuse-inside-block", "never-key-the-left-block"]
CHATS = {"max_running": 1, "budget": 300}
SEEDS = 8


@pytest.fixture(scope="module")
def chats():
    return [branching_chats(seed) for seed in range(SEEDS)]


def tokens(length, salt=0):
    return [salt * 1_000_003 + n for n in range(length)]


def kinds(requests, **settings):
    return {found.kind for found in simulate(requests, Settings(**settings)).violations}


# -- branching chats


def test_a_seed_is_one_system_prompt_and_six_rounds_of_four_conversations(chats):
    requests = chats[0]
    assert len(requests) == 24
    shared = min(len(r.prompt) for r in requests)
    assert shared <= 200 + 160
    assert all(1 <= r.output_length <= 89 for r in requests)
    assert branching_chats(0) == requests != branching_chats(1)


@pytest.mark.parametrize("retention", [0, None])
@pytest.mark.parametrize("drop", [False, True])
def test_the_released_rule_restores_wrong_states_and_only_with_checkpoints_inside_a_block(
    chats, retention, drop
):
    settings = Settings(retention=retention, drop_eagle_block=drop, **CHATS)
    counts = check_lockstep(chats, settings, shrink=False).counts
    assert counts.requests == 24 * SEEDS
    assert counts.wrong_restores > 0
    assert counts.hits > 0.5 * counts.requests
    for change in ({"internal_checkpoints": False}, {"hash_block_size": 64}):
        right = check_lockstep(chats, replace(settings, **change), shrink=False)
        assert right.violations == ()
        assert right.counts.hits > 0.5 * counts.requests


@pytest.mark.parametrize("retention", [0, None])
@pytest.mark.parametrize("drop", [False, True])
def test_each_fix_restores_only_right_states_and_has_a_small_price(chats, retention, drop):
    settings = Settings(retention=retention, drop_eagle_block=drop, **CHATS)
    reports = compare_variants(chats, settings, ["vllm-0.33", "vllm-0.29", *FIXES])
    released = reports.pop("vllm-0.33").counts
    for name, report in reports.items():
        assert report.violations == (), name
    for name in FIXES:
        price = reports[name].counts.prefill_chunks / released.prefill_chunks
        assert 0.9 < price < 1.25, name
        assert reports[name].counts.reused_tokens > 0.99 * released.reused_tokens


def test_several_recurrent_groups_break_together(chats):
    report = check_lockstep(chats[:3], Settings(recurrent_groups=3, **CHATS), shrink=False)
    one = check_lockstep(chats[:3], Settings(**CHATS), shrink=False)
    assert report.counts.wrong_restores == one.counts.wrong_restores > 0
    assert report.counts.mislabelled == 3 * one.counts.mislabelled


def test_what_the_check_counts_is_what_an_audit_of_every_block_finds(chats):
    simulation = Simulation(chats[1], Settings(**CHATS))
    found = set()
    for _ in simulation:
        found.update((block, claim.position) for block, claim in simulation.lockstep.audit())
    wrong = [v for v in simulation.violations if v.kind in ("mislabelled", "inherited")]
    assert found == {(v.block, v.claimed) for v in wrong}
    assert len(wrong) == simulation.counts.mislabelled + simulation.counts.inherited > 0


# -- each rule, broken

RIGHT = {"variant": "keep-the-stop", "max_running": 1}


def producer_and_consumer():
    """A state inside a block is published; its producer runs on, and another resumes from it."""
    first = Request("first", tokens(97), tokens(30, 1))
    return [first, Request("second", [*first.history[:100], *tokens(60, 2)])]


def test_running_in_a_published_block_is_noticed(monkeypatch):
    """Without copy on write."""
    settings = {**RIGHT, "internal_checkpoints": False}
    assert kinds(producer_and_consumer(), **settings) == set()
    monkeypatch.setattr(RecurrentGroup, "copies_on_write", lambda *_: False)
    assert kinds(producer_and_consumer(), **settings) == {
        "mislabelled",
        "wrong restore",
        "inherited",
    }


def test_a_key_that_precedes_its_state_is_noticed(monkeypatch):
    """A lookup finds what this very step writes."""
    requests = [Request("first", tokens(200)), Request("second", tokens(210))]
    settings = {"variant": "keep-the-stop"}
    assert kinds(requests, **settings) == set()

    monkeypatch.setattr(RecurrentGroup, "comes_this_step", lambda *_: False)
    assert "wrong restore" in kinds(requests, **settings)


def test_a_key_of_an_aborted_step_is_noticed(monkeypatch):
    """The state was never written, the key stays."""
    requests = [
        Request("first", tokens(200), abort_at=1),
        Request("second", tokens(210), arrival=2),
    ]
    settings = {"variant": "keep-the-stop"}
    assert kinds(requests, **settings) == set()
    monkeypatch.setattr(RecurrentGroup, "withdraw", lambda *_: None)
    monkeypatch.setattr(AttentionGroup, "withdraw", lambda *_: None)
    assert kinds(requests, **settings) == {"mislabelled", "wrong restore", "inherited"}


def test_the_minimum_of_the_groups_hits_is_noticed(monkeypatch):
    """Attention reaches 240 after the drop, the states are at 176 and 256: none is at 240."""
    first = Request("first", tokens(200), tokens(61, 1))
    requests = [first, Request("second", [*first.history, *tokens(60, 2)])]
    settings = {**RIGHT, "retention": None, "drop_eagle_block": True}
    assert kinds(requests, **settings) == set()

    def smallest_maximum(positions):
        return min(max(found, default=0) for found in positions)

    find = RecurrentGroup.find

    def deepest(group, live, position):
        return find(group, live, 256 if position == 240 else position)

    monkeypatch.setattr(simulation, "joint_hit", smallest_maximum)
    monkeypatch.setattr(RecurrentGroup, "find", deepest)
    run = simulate(requests, Settings(**settings))
    [restore] = [found for found in run.violations if found.kind == "wrong restore"]
    assert (restore.claimed, restore.held) == (240, 256)


def test_a_checkpoint_reserved_by_its_position_is_noticed(monkeypatch):
    """Position 112 belongs in column 1 of 140 tokens, not in column 112 / 64 - 1."""
    requests, settings = [Request("first", tokens(140))], {**RIGHT, "drop_eagle_block": True}
    assert kinds(requests, **settings) == set()
    monkeypatch.setattr(
        recurrent, "checkpoint_column", lambda query: query.position // query.mamba_block_size - 1
    )
    found = kinds(requests, **settings)
    assert {"reserved, not written", "written, not reserved"} <= found


def test_a_key_on_the_null_block_is_noticed(monkeypatch):
    """Every column of a dense row gets a key, also where there is no block."""
    requests, settings = [Request("first", tokens(200))], {**RIGHT, "retention": None}
    assert kinds(requests, **settings) == set()
    monkeypatch.setattr(RecurrentGroup, "may_key", lambda *_: True)
    assert kinds(requests, **settings) == {"null block"}


def test_a_worker_that_skips_a_reserved_checkpoint_is_noticed():
    """The worker believes that its kernel cannot write there."""
    requests = [Request("first", tokens(200))]
    engine = Simulation(requests, Settings(**RIGHT))
    released = find_variant("keep-the-stop")
    engine.worker.variant = replace(released, writes_inside=lambda query: False)
    list(engine)
    assert {found.kind for found in engine.violations} == {"reserved, not written", "mislabelled"}


def test_a_worker_that_writes_unasked_is_noticed(monkeypatch):
    """It stores the checkpoint where the query's initial state lies."""
    first = Request("first", tokens(129))
    requests = [first, Request("second", [*tokens(129), *tokens(200, 1)])]
    assert kinds(requests, **RIGHT) == set()
    monkeypatch.setattr(
        worker,
        "checkpoint_column",
        lambda query: max(query.start // query.mamba_block_size - 1, 0),
    )
    found = kinds(requests, **RIGHT)
    assert {"written, not reserved", "reserved, not written", "mislabelled"} <= found


# -- reports


def test_the_smallest_history_cannot_lose_a_token(chats):
    settings = Settings(**CHATS)
    report = check_lockstep(chats, settings)
    smallest = report.smallest
    assert len(smallest) == 3
    assert {v.kind for v in report.broken} == {"mislabelled", "wrong restore"}
    assert sum(len(r.prompt) for r in smallest) < 250
    assert shrink_history(smallest, settings) == smallest
    for place, request in enumerate(smallest):
        rest = [*smallest[:place], *smallest[place + 1 :]]
        assert "wrong restore" not in kinds(rest, **CHATS)
        shorter = replace(request, prompt=request.prompt[:-1])
        cut = [*smallest[:place], shorter, *smallest[place + 1 :]]
        assert "wrong restore" not in kinds(cut, **CHATS)
    lines = describe_history(smallest)
    assert len(lines) == 3
    assert "shares its first" in lines[1]


def test_a_history_without_violations_is_not_shrunk():
    requests = (Request("A", tokens(10)),)
    assert shrink_history(requests, Settings()) == requests


def test_a_variant_is_one_function():
    try:

        @named_variant
        def careless():
            return replace(
                find_variant("vllm-0.33"),
                name="careless",
                stops_at_boundary=lambda query, inside: False,
            )

        requests = [Request("A", tokens(200), 1)]
        assert simulate(requests, Settings(variant="careless")).violations == []
    finally:
        VARIANTS.pop("careless", None)
    with pytest.raises(CheckpointValueError, match="careless"):
        Settings(variant="careless")


# -- the command


def test_the_command_fails_for_the_released_rule_and_names_the_smallest_history(capsys):
    assert main(["--seeds", "3", "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["counts"]["wrong_restores"] > 0
    assert printed["settings"]["variant"] == "vllm-0.33"
    history = [Request(r["name"], r["prompt"], r["output"]) for r in printed["smallest"]]
    again = kinds(history, **CHATS)
    assert again == {violation["kind"] for violation in printed["violations"]}
    assert main(["--seeds", "3"]) == 1
    text = capsys.readouterr().out
    assert "restored a wrong state" in text
    assert "The smallest history" in text


@pytest.mark.parametrize(
    "options",
    [
        ["--no-checkpoints"],
        ["--hash", "64"],
        ["--retention", "none", "--variant", "keep-the-stop"],
        ["--retention", "128", "--variant", "refuse-inside-block", "--groups", "2"],
        ["--variant", "never-key-the-left-block", "--drop", "--alignment", "1"],
    ],
)
def test_the_command_succeeds_without_the_cause(options, capsys):
    assert main(["--seeds", "3", *options]) == 0
    assert "0 hits restored a wrong state" in capsys.readouterr().out


@pytest.mark.parametrize("options", [["--seeds", "0"], ["--block", "60"], ["--retention", "100"]])
def test_the_command_refuses_impossible_sizes(options):
    with pytest.raises(CheckpointValueError):
        main(options)
