"""The engine's steps: block tables, hits, keys and counts, on documented examples and faults."""

import pytest

from mambackpt.engine import Request, Settings, Simulation, simulate
from mambackpt.engine.blocks import KeyIndex
from mambackpt.engine.events import (
    Allocated,
    Deferred,
    Evicted,
    Finished,
    Freed,
    Hit,
    Keyed,
    Scheduled,
    Written,
)
from mambackpt.engine.groups import replay_boundaries
from mambackpt.errors import CheckpointTypeError, CheckpointValueError


def tokens(length, salt=0):
    return [salt * 100_003 + n for n in range(length)]


def tables(run, group=1):
    """The row of the only request after each step, '-' for null: columns as block numbers."""
    shown = []
    for snapshot in run.snapshots():
        for row in snapshot.rows:
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


@pytest.mark.parametrize(("drop", "expected"), [(False, [64, 128]), (True, [64, 128, 192])])
def test_under_drop_a_block_past_the_grid_of_hits_is_keyed_to_be_dropped_again(drop, expected):
    """Hits on 128: without the drop nothing beyond a multiple of it can be hit."""
    run = one(200, cache_hit_alignment_tokens=128, drop_eagle_block=drop)
    assert [position for _, position in keys(run, group=0)] == expected


def test_a_drafter_with_an_attention_cache_takes_slots_beyond_the_query():
    """256 tokens and two slots ahead are five blocks of attention."""
    run = one(speculative_tokens=2, num_lookahead_tokens=2, budget=256)
    assert tables(run) == ["- - - 6 7 8", "- - - 6 - 8 7 11 12"]


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
                live.keeps = simulation.kept_columns(live)
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
        {"variant": "keep-the-stop"},
        {"variant": "refuse-inside-block"},
        {"variant": "never-key-the-left-block"},
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
        smallest_case(), Settings(max_running=1, recurrence=True, variant="keep-the-stop")
    )
    assert fixed.outputs == alone
    assert {name for name in alone if released.outputs[name] != alone[name]} == {"third"}


# -- junctions, drafts, pools


def sharers(*names, shared=200, prompt=400):
    return [
        Request(n, [*tokens(shared), *tokens(prompt - shared, k)]) for k, n in enumerate(names, 1)
    ]


@pytest.mark.parametrize(("internal", "last"), [(True, [400]), (False, [384, 400])])
def test_the_second_sharer_keeps_the_junction_and_the_third_resumes_there(internal, last):
    first = Request("first", tokens(400))
    settings = Settings(hash_block_size=64, internal_checkpoints=internal, max_running=1)
    run = simulate([first, *sharers("second", "third")], settings)
    assert chunks(run, "second") == [192, *last]
    keyed = [e.position for e in run.events if isinstance(e, Keyed) and e.group == 1]
    assert keyed == [384, 192, 384, 384]
    assert hits(run) == {"third": 192}
    assert chunks(run, "third") == last


def test_a_shared_prefix_checkpoint_lies_on_the_junction_itself():
    """Attention shares 224 tokens and drops 16: off, a block before 208 is kept; on, 208.

    Without the drop the setting does nothing.
    """
    first = Request("first", tokens(400))
    sizes = {"max_running": 1, "retention": 0, "internal_checkpoints": False}
    for on, drop, kept in ((False, True, 192), (True, True, 208), (True, False, 192)):
        settings = Settings(
            shared_prefix_checkpoint=on,
            drop_eagle_block=drop,
            attention_block_size=16,
            **sizes,
        )
        second, third = sharers("second", "third", shared=225 if drop else 220)
        run = simulate([first, second, third], settings)
        assert chunks(run, "second")[0] == kept
        assert hits(run)["third"] == kept
        assert run.violations == []


@pytest.mark.parametrize("accepted", [(0,), (2,), (1, 0, 2), (3, 3, 0)])
def test_drafts_change_nothing_but_the_number_of_steps(accepted):
    """Every sampled token and every key is that of decoding one token at a time."""
    plain = Request("A", tokens(100), 60)
    drafted = Request("A", tokens(100), 60, accepted=accepted)
    again = Request("B", tokens(90), 60, accepted=accepted)
    settings = {"retention": None, "recurrence": True, "max_running": 1}
    slow = simulate([plain, again], Settings(**settings))
    fast = simulate([drafted, again], Settings(speculative_tokens=3, **settings))
    assert fast.outputs == slow.outputs
    assert fast.violations == []
    assert fast.counts.steps <= slow.counts.steps
    written = {(e.column, e.position) for e in fast.events if isinstance(e, Written)}
    assert any(position > 128 for _, position in written)


def test_blocks_without_a_key_are_taken_first_and_then_the_unused_and_the_last_of_a_row():
    """A request lets go of five blocks and three keys: 5 and 3 come back at once, then 6 and on.

    Within a call the last block of a row goes first; of two calls the later one.
    """
    requests = [Request(n, tokens(40, k)) for k, n in enumerate("ABC")]
    settings = Settings(mamba_block_size=16, hash_block_size=16, max_running=1, pool_blocks=10)
    run = simulate(requests, settings)
    freed, taken = {n: [] for n in "ABC"}, {n: [] for n in "ABC"}
    for event in run.events:
        if isinstance(event, Freed | Allocated):
            (freed if isinstance(event, Freed) else taken)[event.request].append(event.block)
    assert freed["A"] == [3, 2, 1, 5, 4]
    assert taken["B"] == [5, 3, 6, 7, 8]
    assert taken["C"] == [8, 6, 9, 10, 2]
    evicted = [(e.group, e.block, e.position) for e in run.events if isinstance(e, Evicted)]
    assert evicted == [(0, 2, 32)]


def test_a_request_that_finds_no_room_waits_and_one_that_outgrows_the_pool_is_preempted():
    requests = [Request("A", tokens(60), 80), Request("B", tokens(60, 1), 80)]
    sizes = {"mamba_block_size": 16, "hash_block_size": 16, "internal_checkpoints": False}
    run = simulate(requests, Settings(pool_blocks=16, **sizes))
    free = simulate(requests, Settings(**sizes))
    assert run.counts.preemptions > 0
    assert run.outputs == free.outputs
    assert run.violations == []
    assert {e.request for e in run.events if isinstance(e, Finished)} == {"A", "B"}


def test_a_preempted_request_resumes_from_the_longest_hit():
    request = Request("A", tokens(100), 60, preempt_at=(30,))
    run = simulate([request])
    again = [e.start for e in run.events if isinstance(e, Scheduled) and e.step > 30]
    assert again[0] == hits(run)["A"] == 96
    assert run.outputs == simulate([Request("A", tokens(100), 60)]).outputs


def test_equal_keys_find_the_block_published_first():
    """Two requests compute the same prefix at the same time; a third hits the first one's block."""
    pair = [Request("A", tokens(100)), Request("B", tokens(100))]
    late = Request("C", tokens(100), arrival=9)
    sizes = {"mamba_block_size": 128, "hash_block_size": 16, "internal_checkpoints": False}
    run = simulate([*pair, late], Settings(**sizes))
    first = next(e for e in run.events if isinstance(e, Keyed) and e.group == 1)
    hit = next(e for e in run.events if isinstance(e, Hit) and e.request == "C")
    copied = next(e for e in run.events if isinstance(e, Allocated) and e.role == "copy")
    assert hit.position == first.position == 96
    assert hit.block == copied.block  # the producer ran on, so its entry moved to the copy


def test_runs_are_reproducible_and_streaming_gives_the_same_events():
    requests = smallest_case()
    run = simulate(requests, Settings(max_running=1))
    assert simulate(requests, Settings(max_running=1)).events == run.events
    streamed = Simulation((request for request in requests), Settings(max_running=1))
    assert [event for step in streamed for event in step] == run.events
    assert streamed.counts == run.counts


def test_frames_show_rows_roles_and_what_is_held_and_claimed():
    run = simulate(smallest_case(), Settings(max_running=1))
    snapshots = list(run.snapshots())
    assert len(snapshots) == run.counts.steps
    assert [event for snapshot in snapshots for event in snapshot.events] == run.events
    [row] = next(f for f in snapshots if f.rows and f.rows[0].request == "second").rows
    cells = {cell.column: cell for cell in row.cells}
    assert (row.computed, row.width, row.running) == (400, 7, 6)
    assert set(cells) == {1, 5, 6}
    assert (cells[1].role, cells[1].held, cells[1].keyed, cells[1].right) == (
        "copy",
        96,
        (128,),
        False,
    )
    assert (cells[5].role, cells[5].held, cells[5].keyed, cells[5].right) == (
        "checkpoint",
        384,
        (384,),
        True,
    )
    assert cells[6].role == "running"
    [kept] = next(f for f in snapshots if f.rows and f.rows[0].request == "second").cached
    assert (kept.role, kept.held, kept.keyed, kept.right) == ("cached", 96, (96,), True)


# -- what cannot run


@pytest.mark.parametrize(
    "options",
    [
        {"mamba_block_size": 60},
        {"hash_block_size": 0},
        {"checkpoint_alignment": 0},
        {"retention": 100},
        {"retention": -64},
        {"budget": 0},
        {"budget": 100, "budgets": [200]},
        {"speculative_tokens": 64},
        {"recurrent_groups": 0},
        {"max_running": 0},
        {"pool_blocks": 0},
        {"variant": "vllm-9"},
        {"num_hash_lookahead_tokens": -1},
        {"cache_hit_alignment_tokens": 24},
    ],
)
def test_settings_refuse_what_contradicts(options):
    with pytest.raises(CheckpointValueError):
        Settings(**options)


@pytest.mark.parametrize("output", [0, -1, ()])
def test_a_request_generates_at_least_one_token(output):
    with pytest.raises(CheckpointValueError):
        Request("A", [1, 2], output)


@pytest.mark.parametrize("prompt", [["a"], [1.0], [-1], [True]])
def test_a_prompt_holds_token_ids(prompt):
    with pytest.raises(CheckpointTypeError):
        Request("A", prompt)


def test_a_budget_that_reaches_no_boundary_is_refused_and_not_waited_for():
    settings = Settings(budget=64, budgets=[40, 50], internal_checkpoints=False)
    with pytest.raises(CheckpointValueError, match="expected progress"):
        simulate([Request("A", tokens(300))], settings)


@pytest.mark.parametrize("output", [1, 200])
def test_a_pool_too_small_for_one_request_is_refused(output):
    settings = Settings(pool_blocks=5)
    with pytest.raises(CheckpointValueError, match="room for one request"):
        simulate([Request("A", tokens(400 if output == 1 else 100), output)], settings)


def test_requests_need_their_own_names_and_the_order_of_arrival():
    with pytest.raises(CheckpointValueError, match="name of its own"):
        simulate([Request("A", [1]), Request("A", [2])])
    with pytest.raises(CheckpointValueError, match="order of arrival"):
        simulate([Request("A", [1], arrival=5), Request("B", [2], arrival=2)])


def test_a_step_without_requests_is_skipped():
    run = simulate([Request("A", [1]), Request("B", [2], arrival=1_000_000)])
    assert run.counts.steps == 2


def test_an_internal_checkpoint_of_a_deferred_request_is_not_reserved():
    requests = [Request("A", tokens(200)), Request("B", tokens(200))]
    run = simulate(requests)
    assert [e.request for e in run.events if isinstance(e, Deferred)] == ["B"]
    assert run.violations == []
    assert hits(run) == {"B": 192}
