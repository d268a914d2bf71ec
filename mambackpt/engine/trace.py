"""One history as plain steps, to be held to another scheduler's: lists, dicts, strings and ints."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, TypeAlias

from mambackpt.engine.events import Preempted
from mambackpt.engine.groups import Group, Live
from mambackpt.engine.lockstep import holds
from mambackpt.engine.settings import Request, Settings
from mambackpt.engine.simulation import Simulation
from mambackpt.errors import CheckpointValueError

FREE_SHOWN = 64  # blocks of the free list in a step: all of a small pool

Step: TypeAlias = dict[str, Any]


def trace_history(requests: Iterable[Request], settings: Settings) -> Iterator[Step]:
    """Yield what every step of one history did, as values that JSON can hold.

    >>> steps = list(trace_history([Request("A", range(100))], Settings(pool_blocks=9)))
    >>> steps[0]["scheduled"], steps[0]["rows"]
    ([['A', 0, 100]], {'A': [[1, 2], [3, 4]]})
    >>> [(position, blocks) for position, _, blocks in steps[0]["keys"][1]]
    [(96, [3])]

    A step has these entries. Blocks are numbers, 0 is the null block; group 0 is attention.

    * ``step``: its number, from 1;
    * ``preempted``: names, in order;
    * ``hits``: for each request that starts, its hit and its junction, in tokens;
    * ``scheduled``: name, start and end of each query, in order;
    * ``rows``: for each running request, in order, its row of blocks in every group;
    * ``copies``: source and target of each copy before the forward pass;
    * ``keys``: per group, position, digest of what is hashed (`digests`) and the blocks found, the
      first one first, sorted; None where nothing has changed since the last step;
    * ``wrong``: group, position, digest and block of every key whose block holds another state;
    * ``free``: the next 64 blocks to take, the first one first.

    Raises CheckpointValueError where the pool has no size, and as `Simulation` does.
    """
    if settings.pool_blocks is None:
        raise CheckpointValueError(
            "pool_blocks is None; expected a size, because a free list that never ends cannot be "
            "compared. Try pool_blocks=4000."
        )
    simulation = Simulation(requests, settings)
    groups = (simulation.attention, *simulation.recurrent)
    last_keys: list[Any] = []
    last_batch: tuple[Live, ...] = ()
    for events in simulation:
        keys = [_keys(group) for group in groups]
        yield {
            "step": simulation.log.step,
            "preempted": [event.request for event in events if isinstance(event, Preempted)],
            "hits": {
                live.name: [query.start, live.junction]
                for live, query in simulation.scheduled
                if live not in last_batch
            },
            "scheduled": [[live.name, q.start, q.end] for live, q in simulation.scheduled],
            "rows": {
                live.name: [[block.id for block in row.blocks] for row in live.rows]
                for live in simulation.batch
            },
            "copies": [[source.id, target.id] for source, target in simulation.copies],
            "keys": None if keys == last_keys else keys,
            "wrong": sorted(_wrong(simulation)),
            "free": list(islice(simulation.pool.free, FREE_SHOWN)),
        }
        last_keys, last_batch = keys, simulation.batch


def _keys(group: Group) -> list[list[Any]]:
    """Return position, digest and blocks of every key of a group."""
    blocks_of: dict[tuple[int, int], list[int]] = {}
    for block, key in group.index.entries():
        blocks_of.setdefault((block.claims[key].position, key), []).append(block.id)
    return sorted([position, key, blocks] for (position, key), blocks in blocks_of.items())


def _wrong(simulation: Simulation) -> Iterator[list[int]]:
    """Yield group, position, digest and block of every broken promise."""
    for group in simulation.recurrent:
        for block, key in group.index.entries():
            claim = block.claims[key]
            if not holds(block.content, claim):
                yield [group.number, claim.position, key, block.id]
