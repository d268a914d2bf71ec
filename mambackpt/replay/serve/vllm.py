"""The cache of vllm 0.33.0 for a hybrid model: requests one at a time through the engine room.

The scheduler, its cache groups and its pool are those of `mambackpt.engine`, which is held to the
released scheduler step by step; here its events become one answer a request.
"""

from collections.abc import Iterable, Iterator, Sequence

from mambackpt.engine import Keyed, Request, Settings, Simulation
from mambackpt.replay.serve.requests import Served, TokenRequest


def serve(
    requests: Sequence[TokenRequest],
    *,
    block: int = 64,
    hash_block: int = 16,
    alignment: int | None = 16,
    budget: int = 8192,
    retention: int | None = 0,
    drop: bool = False,
    checkpoints: bool = True,
) -> list[Served]:
    """Return what vllm's cache does with requests that are served one after another.

    >>> for served in serve([TokenRequest(range(100)), TokenRequest(range(120))]):
    ...     print(served)
    Served(attention=0, reused=0, branch=None, created=(96,), kept=(96,))
    Served(attention=96, reused=96, branch=None, created=(112,), kept=(96, 112))

    ``block`` is the Mamba block, ``alignment`` where the kernel can write a checkpoint (None:
    nowhere), ``budget`` the most tokens of one step, all in tokens; ``retention`` and ``drop`` as
    `Settings` has them. States are those of one recurrent group; nothing is evicted. Raises
    CheckpointValueError and CheckpointTypeError as `Settings` does.
    """
    settings = settings_of(block, hash_block, alignment, budget, retention, drop, checkpoints)
    return list(walk(_numbered(requests), settings))


def settings_of(
    block: int,
    hash_block: int,
    alignment: int | None,
    budget: int,
    retention: int | None,
    drop: bool,
    checkpoints: bool,
) -> Settings:
    """Return the engine room's settings: one request at a time, nothing is evicted."""
    return Settings(
        mamba_block_size=block,
        hash_block_size=hash_block,
        checkpoint_alignment=alignment,
        budget=budget,
        retention=retention,
        drop_eagle_block=drop,
        internal_checkpoints=checkpoints,
        max_running=1,
    )


def walk(requests: Iterable[Request], settings: Settings) -> Iterator[Served]:
    """Run requests one after another and yield what was done with each as it ends."""
    simulation = Simulation(requests, settings)
    states, B = simulation.recurrent[0], settings.mamba_block_size
    created: set[int] = set()
    starts: dict[str, int] = {}  # where the running request resumed
    for events in simulation:
        created |= {event.position for event in events if isinstance(event, Keyed) and event.group}
        for live, query in simulation.scheduled:
            hit = starts.setdefault(live.name, query.start)
            if len(live.tokens) < live.total:
                continue
            junction = live.junction
            branch = next((n for n in (junction, junction // B * B) if n in created), None)
            kept = states.positions(live, len(live.tokens))
            made, held = tuple(sorted(created)), tuple(sorted(kept))
            yield Served(junction or hit, hit, branch, made, held)
            created.clear()
            starts.clear()


def _numbered(requests: Sequence[TokenRequest]) -> Iterator[Request]:
    """Yield the engine's requests; tokens of any kind become whole numbers from 0 on."""
    numbers: dict[int, int] = {}

    def number(tokens: Sequence[int]) -> list[int]:
        return [numbers.setdefault(token, len(numbers)) for token in tokens]

    for place, request in enumerate(requests):
        # Without outputs one token is sampled, which is never computed.
        yield Request(str(place), number(request.tokens), number(request.outputs) or 1)
