"""Random histories: no promise breaks under the fixed rules; a broken rule is noticed."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mambackpt.engine import Request, Settings, Simulation
from mambackpt.engine.blocks import digests
from mambackpt.engine.recurrence import PRIME
from mambackpt.errors import CheckpointValueError

FIXES = ["keep-the-stop", "refuse-inside-block", "never-key-the-left-block"]


@st.composite
def engines(draw, variants=tuple(FIXES)):
    block, unit = draw(st.sampled_from([(8, 2), (16, 4), (16, 16), (12, 4), (32, 8), (6, 1)]))
    budget = draw(st.one_of(st.just(12 * block), st.integers(block // 2, 6 * block)))
    retention = draw(st.sampled_from([None, 0, 0, block, 3 * block]))
    return Settings(
        mamba_block_size=block,
        hash_block_size=unit,
        cache_hit_alignment_tokens=draw(
            st.sampled_from([None] * 6 + [block, 2 * block] * (not retention))
        ),
        checkpoint_alignment=draw(st.sampled_from([1, 1, unit, unit, block, None])),
        internal_checkpoints=draw(st.sampled_from([True] * 5 + [False])),
        drop_eagle_block=draw(st.booleans()),
        num_hash_lookahead_tokens=draw(st.sampled_from([0, 0, 0, 1, 2])),
        retention=retention,
        shared_prefix_checkpoint=draw(st.booleans()),
        speculative_tokens=draw(st.sampled_from([0, 0, 1, 3])),
        recurrent_groups=draw(st.sampled_from([1, 1, 2, 3])),
        budget=budget,
        budgets=draw(st.lists(st.integers(1, budget), max_size=3)),
        long_prefill_threshold=draw(st.sampled_from([0, 0, 0, block // 2, 2 * block])),
        max_running=draw(st.integers(1, 4)),
        pool_blocks=draw(st.sampled_from([None, 24, 40, 80])),
        variant=draw(st.sampled_from(variants)),
    )


@st.composite
def histories(draw, block):
    """Up to eight requests that continue prefixes of earlier ones."""
    known = [()]
    requests, arrival = [], 1
    for n in range(draw(st.integers(2, 8))):
        base = draw(st.sampled_from(known))
        kept = base[: draw(st.integers(0, len(base)))] if draw(st.booleans()) else base
        new = draw(st.integers(1, 4 * block))
        prompt = (*kept, *(1000 * n + i for i in range(new)))
        output = tuple(1000 * n + 500 + i for i in range(draw(st.integers(1, 3 * block))))
        arrival += draw(st.sampled_from([0, 1, 3, 40, 40]))
        request = Request(
            f"r{n}",
            prompt,
            output,
            arrival=arrival,
            abort_at=draw(st.sampled_from([None] * 6 + [arrival, arrival + 2, arrival + 9])),
            preempt_at=draw(
                st.sampled_from([()] * 4 + [(arrival + 1,), (arrival + 3, arrival + 9)])
            ),
            accepted=draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)),
        )
        requests.append(request)
        known.append(request.history)
    return requests


def run_to_end(requests, engine):
    """Run and look at every keyed block after every step; None where nothing can ever advance."""
    simulation = Simulation(requests, engine)
    seen = set()
    try:
        for _ in simulation:
            seen.update(simulation.lockstep.audit())
    except CheckpointValueError as error:
        if "expected progress" in str(error) or "room for one request" in str(error):
            return None, seen
        raise
    return simulation, seen


@settings(suppress_health_check=list(HealthCheck))
@given(st.data())
def test_no_promise_breaks_under_the_fixed_rules(data):
    """Random sizes, budgets, pools, preemptions, aborts and drafts."""
    engine = data.draw(engines())
    requests = data.draw(histories(engine.mamba_block_size))
    simulation, differing = run_to_end(requests, engine)
    assert differing == set()
    if simulation is None:
        return
    assert simulation.violations == []
    for request in requests:
        sampled = simulation.outputs[request.name]
        history = digests(request.history)[len(request.prompt) :]
        truth = [engine.recurrent_groups * digest % PRIME for digest in history]
        assert sampled == truth[: len(sampled)]
        assert request.abort_at is not None or len(sampled) == len(request.output)
    if engine.pool_blocks is not None:
        assert simulation.pool.has(engine.pool_blocks)
        assert not simulation.pool.has(engine.pool_blocks + 1)


@settings(suppress_health_check=list(HealthCheck))
@given(st.data())
def test_the_released_rule_breaks_only_with_checkpoints_and_hits_inside_a_block(data):
    """Or with a threshold below the block, which leaves a start inside one without any hit.

    What the incremental check counts is also what an audit of every keyed block finds.
    """
    engine = data.draw(engines(variants=("vllm-0.33",)))
    requests = data.draw(histories(engine.mamba_block_size))
    simulation, differing = run_to_end(requests, engine)
    g = engine.geometry
    slowed = g.H <= engine.long_prefill_threshold < g.M  # stops inside a block, and then runs on
    inside = (g.M > g.U or (slowed and g.M > g.H)) and engine.internal_checkpoints
    if not inside or engine.checkpoint_alignment is None:
        assert differing == set()
    if simulation is not None:
        wrong = {(v.block, v.claimed) for v in simulation.violations if v.claimed is not None}
        assert {(block, claim.position) for block, claim in differing} <= wrong
        assert bool(differing) == bool(simulation.violations)
