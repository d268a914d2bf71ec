"""Many conversations of one shape in one pool: who still finds its state?"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mambackpt.engine import Request, Settings, Simulation
from mambackpt.errors import CheckpointValueError, checked_int
from mambackpt.models import HybridModel, pool_capacity


@dataclass(frozen=True, slots=True)
class LiveVerdict:
    """What the second prompts of N conversations find in a pool that all of them share.

    ``ids`` are the blocks of the pool, without the null block; ``attention`` and ``joint`` have one
    entry per conversation, in tokens. ``most`` is how many conversations may take turns, up to N,
    so that each second prompt resumes as deep as it would alone.
    """

    ids: int
    attention: tuple[int, ...]
    joint: tuple[int, ...]
    alone: int
    most: int

    @property
    def intact(self) -> int:
        """How many second prompts resume as deep as alone."""
        return sum(joint >= self.alone for joint in self.joint)


def pool_ids(model: HybridModel, block: int, pool_bytes: int) -> tuple[int, int]:
    """Return the block ids of a pool, without the null block, and the recurrent groups.

    >>> from dataclasses import replace
    >>> from mambackpt.models import PRESETS
    >>> model = replace(PRESETS["qwen3.5-4b"], recurrent_layers=24, attention_layers=8)
    >>> pool_ids(model, 528, 10**9)
    (56, 3)

    Bytes; counted by `pool_capacity`. Raises CheckpointValueError for a model without
    layer counts, a block that a state does not fit into, and several groups of attention. Source:
    vllm 0.33.0.
    """
    attention, recurrent = model.attention_layers, model.recurrent_layers
    if not attention or not recurrent:
        raise CheckpointValueError(
            f"{model.name} has {recurrent or 'unknown'} recurrent and {attention or 'unknown'} "
            "attention layers; expected both counts, as a pool holds all layers. "
            "Try --layers 48,16."
        )
    page = block * model.token_bytes
    if page < model.state_bytes:
        raise CheckpointValueError(
            f"--block is {block}, whose attention page has {page:,} bytes, and a state "
            f"{model.state_bytes:,}; expected a block that a state fits into. "
            f"Try {model.block_size()}."
        )
    try:
        capacity = pool_capacity(
            attention_layers=attention,
            recurrent_layers=recurrent,
            page_bytes=page,
            block=block,
            pool_bytes=pool_bytes,
            max_len=block,
        )
    except CheckpointValueError as error:
        raise CheckpointValueError(str(error).replace("pool_bytes is", "--pool is")) from None
    if capacity.attention_groups > 1:
        raise CheckpointValueError(
            f"{model.name} has {capacity.attention_groups} groups of attention layers; the engine "
            "room models one. Try a model with fewer attention than recurrent layers."
        )
    if not capacity.admitted_ids:
        raise CheckpointValueError(
            f"--pool is {pool_bytes:,} bytes, one block id; expected room for one request. "
            f"Try --pool {1 + 100 * capacity.bytes_per_id // 10**9}GB."
        )
    return capacity.admitted_ids, capacity.recurrent_groups


def explain_live(
    first: int,
    second: int,
    shared: int,
    settings: Settings,
    *,
    conversations: int,
    model: HybridModel,
    pool_bytes: int,
) -> LiveVerdict:
    """Let N conversations of this shape take turns in one pool, through the engine room.

    >>> from dataclasses import replace
    >>> from mambackpt.models import PRESETS
    >>> model = replace(PRESETS["qwen3.5-4b"], recurrent_layers=24, attention_layers=8)
    >>> settings = Settings(mamba_block_size=528, hash_block_size=528)
    >>> found = explain_live(6000, 6700, 6000, settings, conversations=4, model=model,
    ...                      pool_bytes=10**9)
    >>> found.ids, found.joint, found.most
    (56, (0, 0, 0, 0), 3)

    First every conversation sends its first prompt, then each its second, one at a time. Tokens and
    bytes. Raises CheckpointValueError where the pool has no room for one request.
    """
    ids, groups = pool_ids(model, settings.mamba_block_size, pool_bytes)
    count = checked_int("live", conversations, unit="conversations")
    limited = replace(settings, recurrent_groups=groups, pool_blocks=ids, max_running=1)
    free = replace(limited, pool_blocks=None)
    [(_, alone)] = _seconds_of(_requests(first, second, shared, 1), free)

    def found_by(number: int) -> list[tuple[int, int]]:
        return _seconds_of(_requests(first, second, shared, number), limited)

    try:
        found = found_by(count)
        intact, most = [joint >= alone for _, joint in found], count
        if not all(intact):
            low, most = 0, count  # low conversations are fine, `most` are too many
            while most - low > 1:
                middle = (low + most) // 2
                fine = all(joint >= alone for _, joint in found_by(middle))
                low, most = (middle, most) if fine else (low, middle)
            most = low
    except CheckpointValueError as error:
        if "pool_blocks" not in str(error):
            raise
        raise CheckpointValueError(
            f"--pool is {pool_bytes:,} bytes, {ids:,} block ids, and one request of "
            f"{max(first, second):,} tokens needs more; expected room for one. "
            f"Try --pool {4 * pool_bytes / 1e9:.0f}GB."
        ) from None
    attention, joint = zip(*found, strict=True)
    return LiveVerdict(ids, attention, joint, alone, most)


def _requests(first: int, second: int, shared: int, count: int) -> Iterator[Request]:
    """All first prompts, then all second ones; conversations share nothing with each other."""
    span = first + second  # token ids of one conversation
    for turn, length in ((1, first), (2, second)):
        for chat in range(count):
            start = chat * span
            own = start + shared + (first - shared) * (turn == 2)
            tail = range(own, own + length - shared)
            yield Request(f"chat {chat}, turn {turn}", [*range(start, start + shared), *tail])


def _seconds_of(requests: Iterator[Request], settings: Settings) -> list[tuple[int, int]]:
    """Attention match and joint hit of every second prompt."""
    simulation = Simulation(requests, settings)
    found: dict[str, tuple[int, int]] = {}
    for _ in simulation:
        for live, query in simulation.scheduled:
            if live.name.endswith("turn 2"):
                found.setdefault(live.name, (live.junction or query.start, query.start))
    return list(found.values())
