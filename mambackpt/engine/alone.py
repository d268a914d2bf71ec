"""One request's prefill by itself: what keys its states get, wherever it resumes."""

from mambackpt.engine.blocks import KeyIndex
from mambackpt.engine.groups import Live
from mambackpt.engine.settings import Request, Settings
from mambackpt.engine.simulation import Simulation


class PrefillKeys:
    """Which keys a prompt's states get under these settings, where nothing is evicted.

    >>> keys = PrefillKeys(Settings(max_running=1))
    >>> made, there = keys(400, start=96, junction=128)
    >>> sorted(made), sorted(there)
    ([128, 384], [128, 384])

    A call returns the positions, in tokens, that were keyed, and those that are there when the
    prompt is done. The prefill resumes at ``start``, behind a state with a key; attention matched
    up to ``junction`` (0: no further). Nothing else matters. Scheduler and recurrent group are
    those of `Simulation`. Raises CheckpointValueError where no step reaches a boundary.
    """

    def __init__(self, settings: Settings) -> None:
        self._engine, self._budget = Simulation([], settings), settings.budget

    def __call__(
        self, prompt: int, start: int, junction: int
    ) -> tuple[frozenset[int], frozenset[int]]:
        """Return which positions of such a prefill get a key, and which keys are left."""
        engine, group = self._engine, self._engine.recurrent[0]
        group.index = KeyIndex(group.number)  # nobody else's keys
        live = Live(Request("0", range(prompt)), 2)
        live.computed, live.junction = start, junction
        live.keeps = engine.kept_columns(live)
        found = None
        if start:
            found = engine.pool.take(lambda _: None)
            group.key_full(live, found, start)
            group.publish()
        made: set[int] = set()
        while live.computed < prompt:
            end = engine.next_end(live, self._budget)
            if end == live.computed:
                raise engine.waits_for_ever(live)
            query = group.splitter.query(live.computed, end, live.prefill_end, end)
            if live.rows[group.number].blocks:
                group.retire(live)
            group.need(live, end, found)
            group.adopt(live, found)
            group.allocate(live, end)
            group.cache(live, end, query)
            made |= {entry.claim.position for entry in group.publish()}
            group.copies.clear()
            live.computed, found = end, None
        there = {position for position in made if group.find(live, position) is not None}
        return frozenset(made), frozenset(there)
