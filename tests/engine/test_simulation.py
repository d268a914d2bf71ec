"""The engine's steps: block tables, hits, keys and counts, on documented examples and faults."""

import pytest

from mambackpt.engine import Request, Settings, Simulation, simulate
from mambackpt.engine.blocks import KeyIndex
from mambackpt.engine.events import (
    Hit,
    Keyed,
    Scheduled,
    Written,
)
from mambackpt.engine.groups import replay_boundaries


def tokens(length, salt=0):
    return [salt * 100_003 + n for n in range(length)]


def tables(run, group=1):
    """The row of the only request after each step, '-' for null: columns as block numbers."""
    shown = []
    for frame in run.frames():
        for row in frame.rows:
            if row.group == group:
                cells = {cell.column: cell for cell in row.cells}
                shown.append(
                    " ".join(str(cells[c].block) if c in cells else "-" for c in range(row.width))
                )
    return shown


def keys(run, group=1):
    """(block, position) in the order of publication."""
    return [(e.block, e.position) for e in run.events if isinstance(e, Keyed) and e.group == group]


def chunks(run, name):
    return [e.end for e in run.events if isinstance(e, Scheduled) and e.request == name]


def hits(run):
    return {e.request: e.position for e in run.events if isinstance(e, Hit)}


def one(prompt=400, output=1, **settings):
    settings = {"hash_block_size": 64, **settings}
    return simulate([Request("A", tokens(prompt), output)], Settings(**settings))


# -- block tables as the released allocator was seen to make them


def test_without_checkpoints_the_last_boundary_gets_a_step_of_its_own():
    run = one(internal_checkpoints=False)
    assert tables(run) == ["- - - - - 7", "- - - - - 7 9"]
    assert keys(run) == [(7, 384)]


def test_with_a_checkpoint_one_step_reserves_and_keys_the_column_before():
    run = one()
    assert tables(run) == ["- - - - - 8 9"]
    assert keys(run) == [(8, 384)]


def test_speculative_blocks_follow_the_running_block():
    assert tables(one(speculative_tokens=2)) == ["- - - - - 8 9 10 11"]


def test_a_scratch_block_in_the_checkpoint_column_stays_and_the_other_moves():
    run = one(speculative_tokens=2, budget=256)
    assert tables(run) == ["- - - 5 6 7", "- - - 5 - 7 6 11 12"]
    assert keys(run) == [(7, 384)]


def test_dense_retention_keys_what_was_written_and_nothing_between():
    run = one(retention=None, budget=200)
    assert tables(run) == ["- 4 5", "- - 5 - 9 10", tables(run)[2]]
    assert keys(run)[:5] == [(4, 128), (5, 192), (9, 320), (10, 384)]


def test_one_state_per_interval_evicts_the_transient_checkpoints():
    run = one(retention=128, budget=128)
    assert [position for _, position in keys(run)] == [128, 256, 384]


@pytest.mark.parametrize(("retention", "expected"), [(0, []), (None, [192])])
def test_a_preempted_prompt_is_keyed_past_its_end_only_under_dense_retention(retention, expected):
    """Prompt 150 and 43 outputs, nothing left in the cache: 192 is no boundary of the prompt."""
    sizes = {"mamba_block_size": 32, "hash_block_size": 32, "retention": retention}
    simulation = Simulation([Request("A", tokens(150), 44, preempt_at=(44,))], Settings(**sizes))
    resumed, written = [], []
    for events in simulation:
        if simulation.counts.steps == 43:
            for group in (simulation.attention, *simulation.recurrent):
                group.index = KeyIndex(group.number)
        if simulation.counts.steps > 43:
            resumed += [e.position for e in events if isinstance(e, Keyed) and e.group == 1]
            written += [e.position for e in events if isinstance(e, Written)]
    assert written == [192, 193]
    assert resumed == expected
    assert simulation.counts.preemptions == 1


def test_masks_keep_the_boundaries_of_prompt_and_junction_or_one_per_interval():
    def kept(retention, prompt, shared):
        simulation = Simulation(
            [Request("A", tokens(shared)), Request("B", tokens(prompt))],
            Settings(hash_block_size=64, retention=retention, max_running=1),
        )
        group = simulation.recurrent[0]
        for _ in simulation:
            live = next((live for live, _ in simulation.scheduled if live.name == "B"), None)
            if live:
                live.junction = shared
                live.keeps = simulation._kept_columns(live)
                return [column for column in range(6) if group.keeps(live, column)]

    assert kept(0, 400, 1) == [5]
    assert kept(0, 400, 200) == [2, 5]
    assert kept(128, 400, 1) == [1, 3, 5]
    assert kept(None, 400, 1) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("prompt", "block", "drop", "expected"),
    [
        (2002, 1600, False, (2001,)),
        (2002, 1600, True, (0,)),
        (3200, 1600, True, (0, 1600)),
        (3202, 1600, True, (1600,)),
        (128, 32, True, (64, 96)),
        (9, 4, True, (4,)),
    ],
)
def test_replay_boundaries(prompt, block, drop, expected):
    assert replay_boundaries(prompt, block, drop) == expected


# -- the smallest case in which the released rule serves a wrong state


def smallest_case():
    first = Request("first", tokens(100), tokens(41, 1))
    shared = list(first.history)
    second = Request("second", [*shared[:139], *tokens(261, 2)])
    third = Request("third", [*shared[:130], *tokens(70, 3)])
    return [first, second, third]


def test_the_smallest_case_step_by_step():
    run = simulate(smallest_case(), Settings(max_running=1))
    keyed = {
        (e.request, e.position): e.block for e in run.events if isinstance(e, Keyed) and e.group
    }
    assert ("first", 96) in keyed
    attention = [e.position for e in run.events if isinstance(e, Keyed) and e.group == 0]
    assert max(p for p in attention[: attention.index(128) + 1]) == 128
    assert hits(run) == {"second": 96, "third": 128}
    assert chunks(run, "second") == [400]
    wrong = [v for v in run.violations if v.kind == "mislabelled"]
    assert [(v.request, v.claimed, v.held, v.column) for v in wrong] == [("second", 128, 96, 1)]
    assert wrong[0].block == keyed["second", 128]
    [restore] = [v for v in run.violations if v.kind == "wrong restore"]
    assert (restore.request, restore.claimed, restore.held) == ("third", 128, 96)
    assert run.counts.wrong_restores == 1


def test_the_smallest_case_stops_at_the_junction_of_the_second_request():
    simulation = Simulation(smallest_case(), Settings(max_running=1))
    junctions = {}
    for _ in simulation:
        junctions |= {live.name: live.junction for live, _ in simulation.scheduled}
    assert junctions == {"first": 0, "second": 128, "third": 0}


@pytest.mark.parametrize(
    "right",
    [
        {"internal_checkpoints": False},
        {"hash_block_size": 64},
        {"rules": "keep-the-stop"},
        {"rules": "refuse-inside-block"},
        {"rules": "never-key-the-left-block"},
    ],
)
def test_the_smallest_case_is_right_without_its_cause(right):
    run = simulate(smallest_case(), Settings(max_running=1, **right))
    assert run.violations == []
    assert run.counts.hits > 0


def test_a_wrong_restore_changes_the_output_and_a_right_one_does_not():
    """The sampled tokens of a real recurrence, modulo a prime (X07, vllm PR #57908)."""
    alone = {
        request.name: simulate([request], Settings(recurrence=True)).outputs[request.name]
        for request in smallest_case()
    }
    released = simulate(smallest_case(), Settings(max_running=1, recurrence=True))
    fixed = simulate(
        smallest_case(), Settings(max_running=1, recurrence=True, rules="keep-the-stop")
    )
    assert fixed.outputs == alone
    assert {name for name in alone if released.outputs[name] != alone[name]} == {"third"}
