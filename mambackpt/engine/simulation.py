"""The engine, step by step: the scheduler, and the steps of allocator, worker and check around it.

One attention group and G recurrent groups share a pool. `Simulation` runs the steps and streams
their events; `simulate` collects them in a `Run`.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from mambackpt.engine.attention import AttentionGroup
from mambackpt.engine.blocks import Block, Pool
from mambackpt.engine.events import (
    Aborted,
    Deferred,
    Event,
    Finished,
    Freed,
    Hit,
    Preempted,
    Scheduled,
)
from mambackpt.engine.groups import (
    Live,
    Log,
    found,
    joint_hit,
    junction,
    replay_boundaries,
)
from mambackpt.engine.lockstep import Counts, Lockstep, Violation
from mambackpt.engine.recurrent import RecurrentGroup
from mambackpt.engine.settings import Request, Settings
from mambackpt.engine.snapshots import PoolBlock, Snapshot, take_blocks, take_snapshot
from mambackpt.engine.variants import Query
from mambackpt.engine.worker import Worker
from mambackpt.errors import CheckpointValueError


@dataclass(slots=True)
class Run:
    """What `simulate` returns: counts, events, violations, and the tokens of every request.

    ``outputs`` are the tokens that the model would sample from the states it really had, also where
    the request's output was given.
    """

    requests: tuple[Request, ...]
    settings: Settings
    counts: Counts
    events: list[Event]
    violations: list[Violation]
    outputs: dict[str, list[int]]

    def snapshots(self) -> Iterator[Snapshot]:
        """Run the same requests again and yield a `Snapshot` after each step.

        >>> run = simulate([Request("A", range(100))], Settings(retention=0))
        >>> [row] = next(run.snapshots()).rows
        >>> [(cell.column, cell.role, cell.held, cell.keyed) for cell in row.cells]
        [(0, 'checkpoint', 96, (96,)), (1, 'running', 100, ())]
        """
        simulation = Simulation(self.requests, self.settings)
        for events in simulation:
            yield simulation.snapshot(events)


class Simulation:
    """The engine's state; iterating runs it and yields each step's events.

    >>> simulation = Simulation([Request("A", range(100), 2)], Settings())
    >>> [len(events) > 0 for events in simulation], simulation.counts.steps
    ([True, True], 2)

    Requests are taken from the iterable as they are needed, so a generator is fine; they must come
    in order of arrival. Nothing of a step is kept. Raises CheckpointValueError when no request can
    ever advance, and for a name that is given twice.
    """

    def __init__(self, requests: Iterable[Request], settings: Settings | None = None) -> None:
        self.settings = settings = settings or Settings()
        self.counts = Counts()
        self.log = Log()
        self.pool = Pool(settings.pool_blocks)
        self.attention = AttentionGroup(settings, self.pool, self.log)
        numbers = range(1, settings.recurrent_groups + 1)
        self.recurrent = [RecurrentGroup(n, settings, self.pool, self.log) for n in numbers]
        self.lockstep = Lockstep(self.recurrent, self.counts)
        self.worker = Worker(settings, self.recurrent, self.log, self.lockstep)
        self.outputs = self.worker.outputs
        self.waiting: deque[Live] = deque()
        self.running: list[Live] = []
        self.scheduled: list[tuple[Live, Query]] = []
        self.batch: tuple[Live, ...] = ()  # what ran or waited its turn in this step, in order
        self.copies: list[tuple[Block, Block]] = []  # this step's, of all groups
        self._threshold = 0  # of long prefills, in this step
        self._ongoing: list[Live] = []  # what runs on in this step
        self._splitter = settings.splitter
        self._geometry, self._block = settings.geometry, settings.scheduler_block
        self._arrivals = iter(requests)
        self._next = next(self._arrivals, None)

    @property
    def violations(self) -> list[Violation]:
        """Every violation so far."""
        return self.lockstep.violations

    def __iter__(self) -> Iterator[tuple[Event, ...]]:
        number = idle = 0
        while self.waiting or self.running or self._next:
            number += 1
            if not (self.waiting or self.running) and self._next:
                number = max(number, self._next.arrival)
            self._admit(number)
            self.log.step, self.log.events = number, []
            self.counts.steps += 1
            self._schedule(number)
            self.batch = tuple(self.running)
            self._abort(number)
            self.lockstep.check_restores(number)
            self.worker.compute(self.scheduled)
            self._publish()
            events = tuple(self.log.events)
            idle = idle + 1 if all(isinstance(event, Deferred) for event in events) else 0
            if idle > max(len(self.settings.budgets), 1):
                self._refuse_to_wait()
            yield events

    # -- scheduling

    def _admit(self, number: int) -> None:
        """Let requests arrive, no more than could be scheduled in this step."""
        while self._next is not None and self._next.arrival <= number:
            if len(self.waiting) >= self.settings.max_running:
                return
            live = Live(self._next, len(self.recurrent) + 1)
            if live.name in self.outputs:
                raise CheckpointValueError(
                    f"request {live.name!r} was given already; expected a name of its own. "
                    f"Try {live.name + '-2'!r}."
                )
            self.waiting.append(live)
            self.outputs[live.name] = []
            self.counts.requests += 1
            arrived = self._next.arrival
            self._next = next(self._arrivals, None)
            if self._next is not None and self._next.arrival < arrived:
                raise CheckpointValueError(
                    f"request {self._next.name!r} arrives at step {self._next.arrival}, after one "
                    f"of step {arrived}; expected the order of arrival. Try sorting by arrival."
                )

    def _schedule(self, number: int) -> None:
        offers = self.settings.budgets
        budget = offers[(number - 1) % len(offers)] if offers else self.settings.budget
        self.scheduled = []
        preempted = [live for live in self.running if number in live.request.preempt_at]
        for live in preempted:
            self._preempt(live)
        self._threshold = self.settings.long_prefill_threshold if self._others_wait(number) else 0
        place = 0
        while place < len(self.running) and budget > 0:
            live = self.running[place]
            end = self.next_end(live, budget)
            if end > live.computed:
                while not self._extend(live, end):
                    victim = self.running[-1]
                    if victim is live and place == 0:
                        raise self._pool_too_small(live)
                    preempted.append(victim)
                    self._preempt(victim)
                    if victim is live:
                        break
                else:
                    budget -= end - live.computed
            place += 1
        self._ongoing = [live for live, _ in self.scheduled]
        while self.waiting and budget > 0 and not preempted:
            if len(self.running) >= self.settings.max_running:
                break
            used = self._start(self.waiting[0], budget)
            if not used:
                break
            self.running.append(self.waiting.popleft())
            budget -= used

    def _others_wait(self, number: int) -> bool:
        """Return whether more than one request is known: a threshold keeps none from starving."""
        arrived = self._next is not None and self._next.arrival <= number
        return len(self.running) + len(self.waiting) + arrived > 1

    def next_end(self, live: Live, budget: int) -> int:
        """Return where a query of at most so many tokens ends; its start means not in this step."""
        known = len(live.tokens)
        rest = known - live.computed
        if live.decodes_now or live.padded:
            rest = 1 + self.settings.speculative_tokens
        offered = min(rest, budget, self._threshold or budget)
        end = self._splitter.end(
            live.computed, offered, prompt=live.prompt, num_tokens=known, junction=live.junction
        )
        if end == live.computed:
            self.log.add(Deferred, live, "no boundary in reach")
        return end

    def _start(self, live: Live, budget: int) -> int:
        """Look up, and schedule the first query of a waiting request; return its tokens."""
        bound = len(live.tokens) - 1
        reach, blocks = self.attention.longest(live, bound)
        groups, unit = self.recurrent, self.recurrent[0].grid
        positions = [group.positions(live, reach) for group in groups]
        hit = joint_hit([range(unit, reach + 1, unit), *positions])
        hits = blocks[: -(-hit // self.attention.b)]
        states = found([group.find(live, hit) for group in groups if hit])
        assert states is not None  # every group has a key there
        if any(map(RecurrentGroup.comes_this_step, groups, states)):
            self.log.add(Deferred, live, "its hit is written in this very step")
            return 0
        live.computed = hit
        live.junction = junction([reach], hit)
        live.keeps = self.kept_columns(live)
        end = self._first_end(live, budget)
        whole = len(live.tokens)
        ready = end > hit and (
            self._fits(live, whole, hits, states, estimate=True)
            and self._fits(live, end, hits, states)
        )
        if not ready:
            if end > hit:
                self.log.add(Deferred, live, "the pool has no room")
            live.reset()
            return 0
        live.running = (hit - 1) // self.settings.mamba_block_size
        self.counts.hits += hit > 0
        self.counts.reused_tokens += hit
        for group, state in zip(self.recurrent, states, strict=False):
            self.log.add(Hit, live, group.number, hit, state.id)
            self.lockstep.expect(live, group, state)
        self._allocate(live, end, hits, states)
        return end - hit

    def _first_end(self, live: Live, budget: int) -> int:
        """Return where the first query ends; one token is padded to the size of a decode step.

        Not beside a prefill that runs on, and not for the first request of an empty cache.
        """
        drafts = self.settings.speculative_tokens
        live.padded = (
            drafts > 0
            and live.computed == len(live.tokens) - 1
            and all(other.decodes_now for other in self._ongoing)
            and (bool(self._ongoing) or live.computed > 0)
        )
        if live.padded and budget < 1 + drafts:
            self.log.add(Deferred, live, "no room for its drafts in this step")
            return live.computed
        end = self.next_end(live, budget)
        if live.padded and live.computed < end != live.computed + 1 + drafts:
            live.padded, end = False, live.computed + 1
        return end

    def kept_columns(self, live: Live) -> frozenset[int]:
        """Return the columns of the boundaries that every retention keeps."""
        B, U, drop = self._geometry.M, self._geometry.U, self._geometry.drop_eagle_block
        kept = list(replay_boundaries(live.prompt, self._block, drop))
        if live.junction:
            kept += [live.junction, live.junction - B] if drop else [live.junction]
        return frozenset(boundary // U * U // B - 1 for boundary in kept)

    def _extend(self, live: Live, end: int) -> bool:
        """Schedule a running request up to ``end``, if the pool has the blocks."""
        for group in self.recurrent:
            group.retire(live)
        if not self._fits(live, end, (), ()):
            return False
        self._allocate(live, end, (), ())
        return True

    def _fits(
        self,
        live: Live,
        end: int,
        hits: Sequence[Block],
        states: Sequence[Block],
        *,
        estimate: bool = False,
    ) -> bool:
        ahead = 0 if estimate else self.settings.num_lookahead_tokens
        needed = self.attention.need(live, end + ahead, hits)
        for n, group in enumerate(self.recurrent):
            needed += group.need(live, end, states[n] if states else None, estimate=estimate)
        return self.pool.has(needed)

    def _allocate(
        self, live: Live, end: int, hits: Sequence[Block], states: Sequence[Block]
    ) -> None:
        start, known = live.computed, min(end, len(live.tokens))
        self.log.add(Scheduled, live, start, end)
        query = self._splitter.query(start, end, live.prefill_end, end)
        if not live.rows[0].blocks:
            self.attention.adopt(live, hits)
            for group, state in zip(self.recurrent, states, strict=False):
                group.adopt(live, state)
        self.attention.allocate(live, end + self.settings.num_lookahead_tokens)
        for group in self.recurrent:
            group.allocate(live, end)
        self.attention.cache(live, known)
        for group in self.recurrent:
            group.cache(live, known, query)
        self.scheduled.append((live, query))
        self.counts.computed_tokens += end - start
        self.counts.prefill_chunks += start < live.prefill_end

    def _preempt(self, live: Live) -> None:
        self.log.add(Preempted, live)
        self.counts.preemptions += 1
        self._drop_blocks(live)
        live.reset()
        self.waiting.appendleft(live)

    def _drop_blocks(self, live: Live) -> None:
        self.running.remove(live)
        for group in (self.attention, *self.recurrent):
            group.free(live)

    def _abort(self, number: int) -> None:
        """Drop requests between scheduling and computing: nothing of their step is published."""
        for live in [*self.running, *self.waiting]:
            gone = live.request.abort_at
            if gone is None or gone > number:
                continue
            self.log.add(Aborted, live)
            if live in self.waiting:
                self.waiting.remove(live)
                continue
            self.scheduled = [entry for entry in self.scheduled if entry[0] is not live]
            for group in (self.attention, *self.recurrent):
                group.withdraw(live)
            self.lockstep.forget(live)
            self._drop_blocks(live)

    # -- publishing

    def _publish(self) -> None:
        """Enter the step's keys, check it, and let finished requests go."""
        if self.settings.speculative_tokens:
            self._cache_accepted()
        self.attention.publish()
        published = [(group, group.publish()) for group in self.recurrent]
        lives = [live for live, _ in self.scheduled]
        self.lockstep.check_step(self.log.step, lives, published)
        self._let_go_of_copies()
        for live in lives:
            if len(live.tokens) == live.total:
                self.log.add(Finished, live)
                self._drop_blocks(live)
        self.counts.evictions = self.log.evicted

    def _cache_accepted(self) -> None:
        """Key what accepted drafts have filled, in the step that accepts them."""
        for live, query in self.scheduled:
            if live.decodes_now:
                self.attention.cache(live, live.computed)
                for group in self.recurrent:
                    group.cache(live, live.computed, query)

    def _let_go_of_copies(self) -> None:
        """Let go of what the step's copies read and wrote, of all groups in one call."""
        groups = (self.attention, *self.recurrent)
        copies = [copy for group in groups for copy in group.copies]
        self.copies = [(source, target) for _, source, target in copies]
        if not copies:
            return
        holders = {block: live for live, *ends in copies for block in ends}
        for block in self.pool.release(block for _, *ends in copies for block in ends):
            self.log.add(Freed, holders[block], block.id)
        for group in groups:
            group.copies.clear()

    def _refuse_to_wait(self) -> None:
        live = (self.running or self.waiting)[0]
        if any(isinstance(event, Deferred) and "pool" in event.reason for event in self.log.events):
            raise self._pool_too_small(live)
        raise self.waits_for_ever(live)

    def waits_for_ever(self, live: Live) -> CheckpointValueError:
        """Return the refusal of a request that no step carries to a boundary."""
        settings = self.settings
        return CheckpointValueError(
            f"request {live.name!r} waits for ever at token {live.computed}: no step of at most "
            f"{max(settings.budgets, default=settings.budget)} tokens reaches a boundary of its "
            f"blocks of {settings.mamba_block_size}; expected progress. Try a budget of at least "
            "one block."
        )

    def _pool_too_small(self, live: Live) -> CheckpointValueError:
        return CheckpointValueError(
            f"pool_blocks is {self.settings.pool_blocks} and request {live.name!r} needs more, "
            f"alone, at token {live.computed} of {live.total}; expected room for one request. "
            f"Try {2 * (self.settings.pool_blocks or 1)}."
        )

    def snapshot(self, events: tuple[Event, ...]) -> Snapshot:
        """Return the state after the step that caused these events, as a picture."""
        return take_snapshot(self.log.step, events, self._lives(), self.recurrent)

    def blocks(self) -> tuple[PoolBlock, ...]:
        """Return what is in the pool after the last step: every block in use or findable.

        >>> simulation = Simulation([Request("A", range(100), 2)], Settings())
        >>> _ = next(iter(simulation))
        >>> [(b.block, b.group, b.refs, b.held, b.keyed) for b in simulation.blocks()]
        [(1, 0, 1, None, (64,)), (2, 0, 1, None, (96,)), (3, 1, 1, 96, (96,)), (4, 1, 1, 100, ())]
        """
        return take_blocks(self._lives(), (self.attention, *self.recurrent))

    def _lives(self) -> tuple[Live, ...]:
        """Whose rows there are: what runs, and what has run in this step."""
        return tuple(dict.fromkeys([*self.running, *(live for live, _ in self.scheduled)]))


def simulate(requests: Iterable[Request], settings: Settings | None = None) -> Run:
    """Run the requests to their end and return everything that happened.

    >>> shared = list(range(100))
    >>> first, second = Request("A", shared, 41), Request("B", [*shared, 1, 2, 3])
    >>> run = simulate([first, second], Settings(max_running=1, retention=0))
    >>> run.counts.hits, run.counts.reused_tokens, run.violations
    (1, 96, [])

    Iterate over a `Simulation` instead to stream the events of very many requests. Raises as that.
    """
    given = tuple(requests)
    simulation = Simulation(given, settings)
    events = [event for step in simulation for event in step]
    return Run(
        given,
        simulation.settings,
        simulation.counts,
        events,
        simulation.violations,
        simulation.outputs,
    )
