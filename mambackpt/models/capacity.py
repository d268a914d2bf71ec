"""What a pool holds, counted in block ids, as vllm 0.33.0 counts it.

One block id is one page in every layer of its group. a, r: attention and recurrent layers, M tokens
of a block.
"""

from dataclasses import dataclass

from mambackpt.errors import CheckpointValueError, checked_int


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """A pool of pages, dealt out by block ids; made by `pool_capacity`.

    >>> capacity = pool_capacity(attention_layers=16, recurrent_layers=48, page_bytes=3_211_264,
    ...                          block=784, pool_bytes=20 * 10**9, max_len=262_144)
    >>> capacity.attention_groups, capacity.recurrent_groups, capacity.bytes_per_id, capacity.ids
    (1, 3, 51380224, 389)
    >>> capacity.live_ids(262_144), capacity.cached_ids(8_000, states=1)
    (341, 13)

    Sizes in bytes and tokens. ``ids`` counts the null block, as the engine's log does;
    ``admitted_ids`` leaves it out, as its admission check does.
    """

    attention_layers: int
    recurrent_layers: int
    attention_groups: int
    recurrent_groups: int
    bytes_per_id: int
    ids: int
    block: int
    max_len: int
    drafts: int
    checkpoint_blocks: int

    @property
    def admitted_ids(self) -> int:
        """Ids that requests can have: all but the null block."""
        return max(self.ids - 1, 0)

    @property
    def live_recurrent_ids(self) -> int:
        """Ids that a live request takes for its states, whatever its length."""
        return self.recurrent_groups * (2 + self.drafts + self.checkpoint_blocks)

    def live_ids(self, tokens: int) -> int:
        """Return the ids of a live request of so many tokens."""
        blocks = -(-checked_int("tokens", tokens) // self.block)
        return self.attention_groups * blocks + self.live_recurrent_ids

    def cached_ids(self, tokens: int, states: int) -> int:
        """Return the ids that a finished request of so many tokens leaves, with its kept states.

        >>> capacity = pool_capacity(attention_layers=16, recurrent_layers=48, page_bytes=1,
        ...                          block=784, pool_bytes=1_000, max_len=784)
        >>> [capacity.cached_ids(7_840, states) for states in (0, 1, 10)]
        [10, 13, 40]
        """
        blocks = checked_int("tokens", tokens, least=0) // self.block
        kept = checked_int("states", states, least=0, unit="states")
        return self.attention_groups * blocks + self.recurrent_groups * kept

    def cached_requests(self, tokens: int, states: int) -> int:
        """Return how many finished requests of this size stay in the cache at once.

        Raises CheckpointValueError where such a request leaves nothing.
        """
        each = self.cached_ids(tokens, states)
        if not each:
            raise CheckpointValueError(
                f"a request of {tokens:,} tokens and {states} states leaves no block of "
                f"{self.block:,} tokens; expected at least one. Try {self.block:,} tokens."
            )
        return self.admitted_ids // each

    def live_requests(self, tokens: int) -> int:
        """Return how many requests of so many tokens can be admitted at once."""
        return self.admitted_ids // self.live_ids(tokens)

    @property
    def concurrency(self) -> float:
        """Requests of the longest length that fit, as the engine logs it."""
        return self.ids / self.live_ids(self.max_len)

    @property
    def logged_tokens(self) -> int:
        """The size in tokens that the engine logs: concurrency times the longest length."""
        return int(self.concurrency * self.max_len)

    @property
    def earlier_logged_tokens(self) -> int:
        """What older releases logged: ids // groups x block; times concurrency it is no length."""
        return self.ids // (self.attention_groups + self.recurrent_groups) * self.block

    @property
    def state_in_tokens(self) -> float:
        """Tokens of attention cache that take as many ids as one kept state."""
        return self.recurrent_groups * self.block / self.attention_groups


def pool_capacity(
    *,
    attention_layers: int,
    recurrent_layers: int,
    page_bytes: int,
    block: int,
    pool_bytes: int,
    max_len: int,
    drafts: int = 0,
    checkpoint_blocks: int = 0,
) -> Capacity:
    """Return what a pool of one device holds.

    >>> round(pool_capacity(attention_layers=12, recurrent_layers=36, page_bytes=2_162_688,
    ...                     block=1056, pool_bytes=20 * 10**9, max_len=262_144,
    ...                     checkpoint_blocks=1).concurrency, 6)
    2.984496

    ``page_bytes`` of one block of one layer, ``block`` and ``max_len`` in tokens, ``drafts`` tokens
    of a step, ``checkpoint_blocks`` reserved per group. One attention kind and one recurrent kind,
    pages of equal bytes, mode "align". Raises CheckpointValueError where the pool does not hold one
    id. Source: vllm 0.33.0, its grouping and its logged figures.
    """
    a = checked_int("attention_layers", attention_layers, unit="layers")
    r = checked_int("recurrent_layers", recurrent_layers, unit="layers")
    page = checked_int("page_bytes", page_bytes, unit="bytes")
    pool = checked_int("pool_bytes", pool_bytes, unit="bytes")
    least, most = sorted((a, r))
    size = most if 2 * most < 3 * least else least
    groups = {layers: -(-layers // size) for layers in (a, r)}
    widest = max(-(-layers // count) for layers, count in groups.items())
    per_id = widest * page
    if pool < per_id:
        raise CheckpointValueError(
            f"pool_bytes is {pool:,} and one block id takes {per_id:,} bytes ({widest} layers x "
            f"{page:,}); expected room for at least one. Try {100 * per_id:,}."
        )
    return Capacity(
        attention_layers=a,
        recurrent_layers=r,
        attention_groups=groups[a],
        recurrent_groups=groups[r],
        bytes_per_id=per_id,
        ids=pool // per_id,
        block=checked_int("block", block),
        max_len=checked_int("max_len", max_len),
        drafts=checked_int("drafts", drafts, least=0),
        checkpoint_blocks=checked_int("checkpoint_blocks", checkpoint_blocks, least=0),
    )
