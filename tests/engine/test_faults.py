"""Publicly reported faults of prefix caches for hybrid models, run in the engine model."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mambackpt import compute_mamba_prefill_checkpoints
from mambackpt.engine import Request, Settings, Simulation, chunk_ends, simulate
from mambackpt.engine.events import (
    Aborted,
    Allocated,
    Copied,
    Deferred,
    Hit,
    Keyed,
    Preempted,
    Scheduled,
    Unkeyed,
    Written,
)
from mambackpt.engine.groups import Live, joint_hit, junction
from mambackpt.engine.recurrence import Recurrence, State

FIXES = ["keep-the-stop", "refuse-inside-block", "never-key-the-left-block"]


def tokens(length, salt=0):
    return [salt * 1_000_003 + n for n in range(length)]


def alone(*requests, **settings):
    """Run the requests one after the other."""
    return simulate(requests, Settings(max_running=1, **settings))


def hits(run):
    return {e.request: e.position for e in run.events if isinstance(e, Hit) and e.group == 1}


def ends(run, name):
    return [e.end for e in run.events if isinstance(e, Scheduled) and e.request == name]


def steps(run, name):
    return [e.end - e.start for e in run.events if isinstance(e, Scheduled) and e.request == name]


def keyed(run, name=None, group=1):
    named = (e for e in run.events if isinstance(e, Keyed) and e.group == group)
    return [e.position for e in named if name in (None, e.request)]


def whole(block, unit=None, **more):
    """Settings of whole blocks, or of hash units inside them."""
    return {"mamba_block_size": block, "hash_block_size": unit or block, **more}


# -- planner faults, seen from the allocation


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"drop_eagle_block": True}, None),
        ({}, 96),
        ({"checkpoint_alignment": None}, None),
    ],
)
def test_nothing_is_reserved_that_the_kernel_cannot_write(options, expected):
    """Position 88 is off the kernel's grid of 16, 96 is on it (P01, vllm PR #53614)."""
    run = alone(Request("A", tokens(100)), **whole(64, 8), **options)
    reserved = [e for e in run.events if isinstance(e, Allocated) and e.role == "checkpoint"]
    written = {e.position for e in run.events if isinstance(e, Written)}
    assert len(reserved) == (expected is not None)
    assert expected is None or (expected in written and expected in keyed(run))
    assert run.violations == []


@given(
    st.integers(1, 300),
    st.sampled_from([(64, 8), (64, 64), (48, 16), (16, 4)]),
    st.sampled_from([None, 1, 8, 16]),
    st.booleans(),
    st.integers(64, 400),
)
def test_allocator_and_worker_do_what_the_planner_says(prompt, sizes, alignment, drop, budget):
    """Three parties, one predicate: a reservation for each checkpoint, and only there (P01)."""
    block, unit = sizes
    run = alone(
        Request("A", tokens(prompt)),
        **whole(block, unit, retention=None, budget=budget, drop_eagle_block=drop),
        checkpoint_alignment=alignment,
    )
    assert run.violations == []
    for query in (e for e in run.events if isinstance(e, Scheduled)):
        plan = ([query.end], [query.end - query.start], unit, block, alignment, drop, unit)
        [offset], [column] = compute_mamba_prefill_checkpoints(*plan)
        mine = [e for e in run.events if e.step == query.step]
        reserved = [e.column for e in mine if isinstance(e, Allocated) and e.role == "checkpoint"]
        written = [e.position for e in mine if isinstance(e, Written) and e.position != query.end]
        assert reserved == ([column] if offset else [])
        assert written == ([query.start + offset] if offset else [])


@pytest.mark.parametrize("internal", [True, False])
@pytest.mark.parametrize(
    ("prompt", "reused"), [(31, 16), (32, 16), (33, 32), (48, 32), (16, 0), (17, 16)]
)
def test_a_resend_of_a_prompt_that_ends_on_a_boundary_hits_the_block_before(
    prompt, reused, internal
):
    """One token is always recomputed (P02, vllm issue #50235, onnxruntime-genai PR #2573)."""
    again = [Request("A", tokens(prompt)), Request("B", tokens(prompt))]
    run = alone(*again, **whole(16, internal_checkpoints=internal))
    assert hits(run).get("B", 0) == reused


@pytest.mark.parametrize("internal", [True, False])
def test_under_drop_a_resend_of_whole_blocks_resumes_where_a_longer_sibling_does(internal):
    """128 tokens in blocks of 32 (P03, vllm PR #57444).

    A match may be one unit longer than a hit, so the resend resumes at 96, too.
    """
    prompt, sizes = tokens(128), whole(32, drop_eagle_block=True, internal_checkpoints=internal)
    sibling = Request("sibling", [*prompt, *tokens(40, 1)])
    assert hits(alone(Request("A", prompt), sibling, **sizes)) == {"sibling": 96}
    resends = alone(*(Request(name, prompt) for name in ("A", "B", "C")), **sizes)
    assert hits(resends) == {"B": 96, "C": 96}


@pytest.mark.parametrize(("alignment", "reused"), [(1536, 43008), (12288, 36864)])
def test_a_state_is_found_on_the_grid_of_hits_and_never_under_another_position(alignment, reused):
    """A hit grid wider than the block (P04, sglang PR #34780, vllm PR #56991)."""
    prompt = tokens(44449)
    run = alone(
        Request("A", prompt),
        Request("B", [*prompt, 1, 2, 3]),
        **whole(1536, cache_hit_alignment_tokens=alignment, budget=50_000),
    )
    assert hits(run) == {"B": reused}
    assert run.violations == []


@pytest.mark.parametrize("retention", [None, 0])
def test_the_key_of_a_checkpoint_is_its_position_and_not_its_column(retention):
    """Position 1600 in column 1 is keyed 1600, never 3200 (P05, vllm PR #53614)."""
    sizes = whole(1600, drop_eagle_block=True, retention=retention)
    run = alone(Request("A", tokens(3602)), **sizes)
    [snapshot] = run.snapshots()
    cells = {cell.column: cell for cell in snapshot.rows[0].cells}
    assert (cells[1].role, cells[1].held, cells[1].keyed) == ("checkpoint", 1600, (1600,))
    assert 3200 not in keyed(run)
    assert 0 not in cells


def resumed_at_368(**more):
    """A request of 3602 tokens that resumes from the state of 368, inside the first block."""
    first = Request("first", tokens(369), tokens(1300, 1))
    second = Request("second", [*tokens(369), *tokens(3233, 2)])
    return alone(first, second, **whole(1600, 16), **more)


def test_a_resume_inside_a_block_runs_past_its_end_under_the_released_rule():
    """Start 368 of 3602 in blocks of 1600: one chunk (P06, vllm PR #51113)."""
    run = resumed_at_368()
    assert (hits(run), ends(run, "second")) == ({"second": 368}, [3602])


@pytest.mark.parametrize("rules", FIXES[:2])
def test_a_fix_of_the_stop_ends_that_chunk_at_the_block(rules):
    """The block that the state lies in ends at 1600 (P06, vllm PR #51113)."""
    run = resumed_at_368(variant=rules)
    assert (hits(run), ends(run, "second")) == ({"second": 368}, [1600, 3602])
    assert run.violations == []


def test_a_dense_chunk_keeps_one_checkpoint_and_nothing_between():
    """4096 tokens in blocks of 256: 3840 and the end, no other state (P10, b12x issue #340)."""
    run = alone(Request("A", tokens(4096)), **whole(256, retention=None))
    [snapshot] = run.snapshots()
    cells = {cell.column: cell.held for cell in snapshot.rows[0].cells}
    assert cells == {14: 3840, 15: 4096}
    assert keyed(run) == [3840, 4096]


@pytest.mark.parametrize(
    ("prompt", "block", "alignment"), [(1159, 1152, 16), (8000, 1536, 16), (8000, 2096, 1)]
)
def test_the_boundary_is_kept_without_a_second_forward(prompt, block, alignment):
    """A short tail cost a model pass of its own (P12, vllm PR #56960)."""
    boundary = (prompt - 1) // block * block
    for internal, expected in ((True, [prompt]), (False, [boundary, prompt])):
        sizes = whole(block, checkpoint_alignment=alignment, internal_checkpoints=internal)
        run = alone(Request("A", tokens(prompt)), **sizes)
        assert (ends(run, "A"), keyed(run)) == (expected, [boundary])


# -- the state that a request runs in


@pytest.mark.parametrize("block", [16, 32])
def test_a_published_state_is_never_run_in(block):
    """State 16 stays the state of 16, for its producer too (X07, vllm PR #57908)."""
    producer = Request("producer", tokens(17), tokens(40, 1))
    consumer = Request("consumer", [*tokens(17), *tokens(4, 2)], tokens(9, 3))
    sizes = whole(block, 16, internal_checkpoints=False, max_running=1)
    simulation = Simulation([producer, consumer], Settings(**sizes))
    copied = []
    for events in simulation:
        copied += [e for e in events if isinstance(e, Copied)]
        assert simulation.lockstep.audit() == []
    assert simulation.counts.hits == 1
    assert simulation.violations == []
    assert {e.request for e in copied} == {"producer", "consumer"}


def test_admission_counts_the_private_copy():
    """A hit inside a block takes one block more than its columns (X07, vllm PR #57908)."""
    first, second = Request("first", tokens(40)), Request("second", [*tokens(40), 1, 2, 3])
    sizes = whole(64, 16, internal_checkpoints=False, max_running=1)
    run = simulate([first, second], Settings(**sizes))
    # 43 tokens fit in one column: private copies of the attention block and of the state.
    taken = [e for e in run.events if isinstance(e, Allocated) and e.request == "second"]
    copies = [(0, "copy"), (1, "copy")]
    assert (hits(run), [(e.group, e.role) for e in taken]) == ({"second": 32}, copies)
    simulation = Simulation([first], Settings(**sizes))
    list(simulation)
    group, live = simulation.recurrent[0], Live(second, 2)
    live.computed = 32
    # Of the pool it takes the block that is hit, which is free, and the copy.
    assert group.need(live, 43, group.find(live, 32)) == 2
    assert simulation.attention.need(live, 43, simulation.attention.longest(live, 42).blocks) == 2


def test_a_wrong_convolution_window_changes_the_first_outputs_after_a_resume():
    """Raw inputs belong in the window, not what the convolution made of them (X01, mamba #1027)."""
    layer, text = Recurrence(), list(range(1, 9))
    state = layer.run(layer.initial(), text[:5])
    assert np.array_equal(state.window, layer.inputs(text[2:5]))
    truth = layer.emit(layer.run(layer.initial(), text))
    assert layer.emit(layer.run(state, text[5:])) == truth
    after = State(state.window * layer.taps[-1] % 65521, state.memory)
    assert layer.emit(layer.run(after, text[5:])) != truth


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_chunk_shorter_than_the_window_takes_the_rest_from_its_own_past(length):
    """Offset 2 with a window of 3, and a resumed row of 1 or 2 tokens (X02, vllm PR #56196)."""
    layer, text = Recurrence(), list(range(1, 9))
    start = layer.run(layer.initial(), text[:4])
    state = layer.run(start, text[4 : 4 + length])
    assert np.array_equal(state.window, layer.inputs(text[:8])[1 + length : 4 + length])
    short = layer.run(layer.initial(), text[:length])
    assert np.array_equal(short.window[: 3 - length], layer.initial().window[length:])


def test_the_last_token_is_applied_once():
    """State 32 of a prompt of 32 is one token too deep (S07, LMCache PR #5249)."""
    layer, text = Recurrence(), tokens(32)
    truth = layer.run(layer.initial(), text)
    twice = layer.run(truth, text[-1:])
    assert layer.emit(twice) != layer.emit(truth)
    sizes = whole(16, retention=None, internal_checkpoints=False, budget=16, recurrence=True)
    for length, reused in ((32, 16), (33, 32)):
        prompt = tokens(length)
        run = alone(Request("A", prompt, 5), Request("B", prompt, 5), **sizes)
        assert 32 in keyed(run, "A")
        assert hits(run) == {"B": reused}
        assert run.outputs["A"] == run.outputs["B"]


# -- lookups


def test_a_state_in_the_private_tail_serves_nobody_until_the_junction_is_kept():
    """Blocks of 528, 1500 shared and 700 of its own (S01, vllm issue #45238)."""
    sizes = whole(528, internal_checkpoints=False)
    shared = tokens(1500)
    three = [Request(n, [*shared, *tokens(700, k)]) for k, n in enumerate("ABC", 1)]
    run = alone(*three, **sizes)
    assert ends(run, "A") == [2112, 2200]
    assert hits(run) == {"C": 1056}
    assert ends(run, "B")[0] == 1056


def test_the_steps_of_three_requests_behind_one_prefix():
    """Blocks of 1056, 6000 shared and 2000 of its own (S01, vllm issue #42317)."""
    three = [Request(n, [*tokens(6000), *tokens(2000, k)]) for k, n in enumerate("ABC", 1)]
    run = alone(*three, **whole(1056, internal_checkpoints=False))
    assert steps(run, "A") == [7392, 608]
    assert steps(run, "B") == [5280, 2112, 608]
    assert hits(run) == {"C": 5280}
    assert steps(run, "C") == [2112, 608]


@pytest.mark.parametrize(("prompt", "reused"), [(480, 0), (552, 528), (979, 528)])
def test_a_prompt_below_the_block_never_hits(prompt, reused):
    """Blocks of 528 (S01, vllm issue #43587)."""
    run = alone(Request("A", tokens(prompt)), Request("B", tokens(prompt)), **whole(528))
    assert hits(run).get("B", 0) == reused


@pytest.mark.parametrize(
    ("groups", "joint"),
    [
        ([[1, 2, 3], [4], [4], [4]], 0),
        ([range(1, 12), [8, 12], [4, 12], [4, 8, 12]], 0),
        ([[16, 32, 48], [16, 32, 48, 64]], 48),
    ],
)
def test_a_hit_is_in_the_intersection_of_all_groups(groups, joint):
    """The smallest maximum need not exist in every group (S02, vllm PR #56142)."""
    assert joint_hit(groups) == joint


@pytest.mark.parametrize(
    ("attention", "joint", "expected"), [([96, 80], 80, 0), ([96, 80], 64, 80), ([64], 64, 0)]
)
def test_the_junction_is_what_every_attention_group_shares(attention, joint, expected):
    """Target 96, draft 80, states at 80 or 64 (S02, vllm PR #45614)."""
    assert junction(attention, joint) == expected


@pytest.mark.parametrize(
    ("block", "prompt", "budgets"),
    [
        (1600, 2002, [364, 1638]),
        (2048, 2966, [1866, 1100]),
        (1536, 30_000, [27_648, 1024, 30_000]),
        (12_288, 30_000, [12_288, 4000, 30_000]),
    ],
)
@pytest.mark.parametrize("internal", [True, False])
def test_no_truncated_state_gets_the_key_of_a_full_block(block, prompt, budgets, internal):
    """After every step each key counts the tokens that its block holds (S03, vllm PR #51113)."""
    sizes = whole(block, 16 if block % 16 == 0 else block, retention=None)
    settings = Settings(
        **sizes, budget=max(budgets), budgets=budgets, internal_checkpoints=internal
    )
    simulation = Simulation([Request("A", tokens(prompt), 3)], settings)
    for _ in simulation:
        for keyed_block, claim in simulation.recurrent[0].index:
            assert keyed_block.content.tokens == claim.position
    assert simulation.violations == []


def test_a_step_limit_below_the_block_stops_again_at_its_end():
    """364 tokens a step: the block of 1600 holds 1600 when it is keyed (S03, vllm PR #34587)."""
    sizes = whole(1600, retention=None, internal_checkpoints=False)
    run = alone(Request("A", tokens(2002)), **sizes, budget=364)
    assert 1600 in ends(run, "A")
    assert run.violations == []
    assert keyed(run) == [1600]


def test_two_prompts_in_one_step_do_not_share_what_is_not_written():
    """The second waits for the first one's state, then hits it (S04, vllm PR #56525)."""
    requests = [Request("A", [1, 2, 3, 4], 3), Request("B", [1, 2, 3, 5], 3)]
    run = simulate(requests, Settings(**whole(1), internal_checkpoints=False))
    [wait] = [e for e in run.events if isinstance(e, Deferred)]
    [hit] = [e for e in run.events if isinstance(e, Hit)]
    assert (wait.request, hit.request, hit.position) == ("B", "B", 3)
    assert hit.step == wait.step + 1
    assert run.violations == []


def test_a_checkpoint_past_the_hashed_blocks_serves_nobody_in_its_own_step():
    """Hashes that look two tokens ahead: 17 tokens have hashes up to 15, their checkpoint is 14."""
    first = Request("first", tokens(17), [1500])
    second = Request("second", [*first.history, 2000])
    sizes = whole(8, 2, checkpoint_alignment=1, max_running=2, retention=None, budget=96)
    run = simulate([first, second], Settings(**sizes, num_hash_lookahead_tokens=2))
    assert run.violations == []
    assert hits(run) == {"second": 14}


def test_an_aborted_step_publishes_nothing():
    """A producer is gone before its first step computes (S04, vllm PR #29387)."""
    requests = [Request("A", tokens(64), abort_at=1), Request("B", tokens(64), arrival=2)]
    run = simulate(requests, Settings(**whole(16), retention=None))
    assert [e.request for e in run.events if isinstance(e, Aborted)] == ["A"]
    assert hits(run) == {}
    assert {e.request for e in run.events if isinstance(e, Keyed | Written)} == {"B"}


def test_a_preempted_request_writes_nothing_before_it_is_scheduled_again():
    """A row of an earlier step must not be used for a later one (B04, vllm PR #35157)."""
    requests = [Request("A", tokens(40), 30), Request("B", tokens(40, 1), 30, preempt_at=(5,))]
    run = simulate(requests, Settings(**whole(16), retention=None))
    [gone] = [e for e in run.events if isinstance(e, Preempted)]
    back = min(
        e.step
        for e in run.events
        if isinstance(e, Scheduled) and e.request == "B" and e.step >= gone.step
    )
    during = range(gone.step, back)
    assert len(during) > 0
    assert not [
        e for e in run.events if isinstance(e, Written) and e.request == "B" and e.step in during
    ]
    assert run.violations == []


def test_the_drop_takes_one_unit_from_attention_and_none_from_the_states():
    """8901 tokens in blocks of 2304: attention matches 6912, the state is at 4608 (S09)."""
    again = [Request("A", tokens(8901)), Request("B", tokens(8901))]
    run = alone(*again, **whole(2304, drop_eagle_block=True, budget=9000))
    assert keyed(run, "A") == [4608]
    assert hits(run) == {"B": 4608}
    assert joint_hit([range(1024, 2049, 1024), [1024, 2048, 3072]]) == 2048
    assert joint_hit([range(4, 45, 4), [16, 32, 48]]) == 32
    assert joint_hit([range(4, 45, 4), [16, 32, 44, 48]]) == 44


def test_retention_zero_keys_the_replay_boundary_and_keeps_it_while_decoding():
    """Block 16, prompt 40, decoded to 60 tokens (S10, vllm PR #56794)."""
    first = Request("A", tokens(40), tokens(21, 1))
    run = alone(first, Request("B", [*tokens(40), *tokens(9, 2)]), **whole(16))
    assert keyed(run, "A") == [32]
    assert hits(run) == {"B": 32}


def test_a_long_prompt_of_many_chunks_leaves_a_hot_prefix_in_the_pool():
    """Its mid-prompt states are freed without a key (S10, vllm PR #57253)."""
    hot = [Request(f"hot {n}", [*tokens(32), *tokens(4, n)]) for n in (1, 2, 3)]
    long = Request("long", tokens(80, 9))
    order = [hot[0], hot[1], long, hot[2]]
    # Attention: 3 + 1 + 1 blocks for the hot prompts and 5 for the long one; states come on top.
    run = alone(*order, **whole(16, internal_checkpoints=False), budget=16, pool_blocks=17)
    assert hits(run)["hot 3"] == 32
    assert keyed(run, "long") == [64]


@pytest.mark.parametrize(("retention", "shared", "reused"), [(None, 50, 48), (0, 40, 0)])
def test_a_shared_part_resumes_from_the_newest_state_inside_it(retention, shared, reused):
    """64 cached, 50 shared: 48 for both kinds of layer; no state inside: 0 (S16, mlx-lm #980)."""
    sizes = whole(16, internal_checkpoints=False, budget=16, retention=retention)
    second = Request("B", [*tokens(shared), *tokens(30, 1)])
    run = alone(Request("A", tokens(64)), second, **sizes)
    first = next(e for e in run.events if isinstance(e, Scheduled) and e.request == "B")
    assert (hits(run).get("B", 0), first.start) == (reused, reused)


def test_a_transient_checkpoint_loses_its_key():
    """One per 128 tokens: the checkpoints of 64, 192 and 320 are written and not kept (S10)."""
    run = alone(Request("A", tokens(400)), **whole(64, retention=128), budget=128)
    written = {e.position for e in run.events if isinstance(e, Written)}
    assert {64, 192, 320} <= written
    assert keyed(run) == [128, 256, 384]
    assert not [e for e in run.events if isinstance(e, Unkeyed)]


def test_the_states_of_1600_and_of_1500_shared_tokens():
    """Block 528: a state lies inside 1600 shared tokens, none inside 1500 (S01, vllm #45238)."""
    for shared, private, boundary in ((1600, 600, 1584), (1500, 700, None)):
        stops = chunk_ends(shared + private, budget=2048, mamba_block_size=528, hash_block_size=528)
        assert stops == [1584, 2112, 2200]
        assert max((stop for stop in stops if stop <= shared), default=None) == boundary
