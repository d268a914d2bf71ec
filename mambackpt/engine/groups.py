"""What attention and recurrent cache groups share: rows of blocks, and the keys of this step.

A key is entered when its query is scheduled, and taken back if the request is aborted in that step.
Group 0 is attention, groups 1 and on are recurrent.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from mambackpt.engine.blocks import Block, Claim, KeyIndex, Pool, digests, extend
from mambackpt.engine.events import Allocated, Event, Evicted, Freed, Keyed, Role, Unkeyed
from mambackpt.engine.settings import Request, Settings
from mambackpt.engine.variants import Query


def replay_boundaries(prompt: int, block: int, drop_eagle_block: bool) -> tuple[int, ...]:
    """Return the positions that a resend, and under drop also a longer sibling, resumes from.

    >>> replay_boundaries(3200, 1600, True), replay_boundaries(2002, 1600, False)
    ((0, 1600), (2001,))

    Tokens in, tokens out; without the drop the caller floors them. Rule of vllm 0.33.0.
    """
    if not drop_eagle_block:
        return (prompt - 1,)
    resend = max((prompt - 1) // block * block - block, 0)
    sibling = max(prompt // block * block - block, 0)
    return tuple(sorted({resend, sibling}))


def junction(attention_hits: Sequence[int], joint: int) -> int:
    """Return where the prefix seen before ends, if states reach less far than attention does.

    >>> junction([96, 80], 80), junction([96, 80], 64)
    (0, 80)

    ``attention_hits`` are the hits of all attention-type groups, in tokens; what they all share
    counts. 0 means that there is nothing to gain.
    """
    shared = min(attention_hits)
    return shared if shared > joint else 0


def joint_hit(positions: Sequence[Iterable[int]]) -> int:
    """Return the largest position that every group has: an intersection, not a minimum.

    >>> joint_hit([[1, 2, 3], [4]]), joint_hit([[1, 2, 3, 4], [2, 4], [2]])
    (0, 2)
    """
    return max(set.intersection(*map(set, positions)), default=0)


def checkpoint_column(query: Query) -> int:
    """Return the column before the running state's, which takes a query's checkpoint."""
    return -(-query.end // query.mamba_block_size) - 2


class Row:
    """What one request holds in one group: its block-table row and the bookkeeping around it."""

    __slots__ = ("allocated", "blocks", "cached", "checkpoint", "reserved", "retired", "shared")

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.allocated = False
        self.cached = 0  # full blocks that the keying pass has seen
        self.retired = 0  # columns below are null for good
        self.checkpoint: tuple[int, int] | None = None  # position and column, this step's
        self.reserved: Block | None = None  # the block in that column
        self.shared: Block | None = None  # the block it stands inside of, if others find it there


class Live:
    """A request in flight: its tokens, its place, and its rows."""

    def __init__(self, request: Request, groups: int) -> None:
        self.request = request
        self.name = request.name
        self.prompt = len(request.prompt)
        self.total = self.prompt + request.output_length
        self.tokens = list(request.prompt)
        self.digests = digests(request.prompt)
        self.groups = groups
        self.decodes = 0  # decode steps so far: the place in the cycle of accepted drafts
        self.reset()

    def reset(self) -> None:
        """Forget every block: what a new or a preempted request starts from."""
        self.rows = [Row() for _ in range(self.groups)]
        self.computed = 0
        self.junction = 0
        self.keeps: frozenset[int] = frozenset()
        self.running = -1  # column of the running state
        self.accepted = 1  # which of the drafts' states was the last accepted
        self.decodes_now = False  # did its last query end in a sampled token?
        self.padded = False  # does its first query end in places for drafts that nobody made?
        self.tainted = False

    @property
    def prefill_end(self) -> int:
        """Where the prefill ends: all known tokens but the one to decode next."""
        return max(self.prompt, len(self.tokens) - 1)

    def append(self, token: int) -> None:
        """Add a generated token."""
        self.tokens.append(token)
        self.digests.append(extend(self.digests[-1], token))


def found(blocks: Sequence[Block | None]) -> list[Block] | None:
    """Return the blocks, or None unless each is there."""
    there = [block for block in blocks if block is not None]
    return there if len(there) == len(blocks) else None


class Entry(NamedTuple):
    """A key of this step: who entered it, where, and the block that it was moved from."""

    live: Live
    block: Block
    key: int
    claim: Claim
    moved_from: Block | None


class Log:
    """Where the events of the current step go."""

    def __init__(self) -> None:
        self.step = 0
        self.events: list[Event] = []
        self.evicted = 0  # blocks that lost their keys

    def add(self, kind: Callable[..., Event], live: Live, *details: object) -> None:
        """Record an event of this request in this step."""
        self.events.append(kind(self.step, live.name, *details))

    def evict(self, live: Live, block: Block) -> None:
        """Take every key from a block that is reused for this request."""
        self.evicted += 1
        for key in list(block.claims):
            index = block.index
            assert index is not None
            claim = index.remove(block, key)
            self.add(Evicted, live, index.group, block.id, claim.position)


class Group:
    """What all groups do alike: enter keys, copy a shared block, take blocks and let them go.

    b tokens per block of this group, B per Mamba block, h per hash unit; hits lie on the grid of U.
    """

    def __init__(self, number: int, b: int, settings: Settings, pool: Pool, log: Log) -> None:
        self.number = number
        self.b = b
        self.pool = pool
        self.log = log
        self.index = KeyIndex(number)
        self.entries: list[Entry] = []  # this step's keys
        self.copies: list[tuple[Live, Block, Block]] = []  # before this step's forward pass
        g = settings.geometry
        self.B, self.h, self.U, self.A = g.M, g.H, g.U, g.A
        self.drop, self.lookahead = g.drop_eagle_block, g.num_hash_lookahead_tokens
        self.hits_inside = g.U < g.M  # may a hit end inside a block?
        self.whole = settings.scheduler_block

    # -- keys

    def find(self, live: Live, position: int) -> Block | None:
        """Return the block that the first ``position`` tokens of the request lead to."""
        return self.index.find(live.digests[position + self.lookahead])

    def hashed(self, live: Live) -> int:
        """Return how many tokens have hashes, which may look ahead."""
        return len(live.tokens) - self.lookahead

    def cacheable(self, end: int) -> int:
        """Return up to where a query's end may be keyed: where hits land, and what they drop."""
        if self.hits_inside:
            return end
        whole = end // self.whole * self.whole
        return min(end, whole + self.b) if self.drop and whole else whole

    def key(self, live: Live, block: Block, position: int) -> None:
        """Make the block findable under the first ``position`` tokens of the request."""
        key, claim = live.digests[position + self.lookahead], live.digests[position]
        self._enter(Entry(live, block, key, Claim(position, claim), None))

    def key_full(self, live: Live, block: Block, position: int) -> None:
        """Key a block that is full now; what it was findable under before goes."""
        self.unkey(live, block)
        self.key(live, block, position)

    def key_part(self, live: Live, block: Block, position: int) -> bool:
        """Key a block inside, besides its end; return whether that was not done already."""
        new = live.digests[position + self.lookahead] not in block.claims
        if new:
            self.key(live, block, position)
        return new

    def unkey(self, live: Live, block: Block) -> None:
        """Take every key from the block."""
        if not block.claims:
            return
        now = {entry.key for entry in self.entries if entry.block is block}
        self.entries = [entry for entry in self.entries if entry.block is not block]
        for key in list(block.claims):
            claim = self.index.remove(block, key)
            if key not in now:
                self.log.add(Unkeyed, live, self.number, block.id, claim.position)

    def move_keys(self, live: Live, source: Block, target: Block) -> None:
        """Let every key of one block lead to another, which a copy will fill."""
        for key in list(source.claims):
            claim = self.index.remove(source, key)
            self._enter(Entry(live, target, key, claim, source))

    def _enter(self, entry: Entry) -> None:
        self.index.enter(entry.block, entry.key, entry.claim)
        self.entries.append(entry)

    def publish(self) -> list[Entry]:
        """Report this step's keys: what they promise has been computed now."""
        if not self.entries:
            return []
        entries, self.entries = self.entries, []
        for live, block, _, claim, source in entries:
            if source is not None:
                self.log.add(Unkeyed, live, self.number, source.id, claim.position)
            self.log.add(Keyed, live, self.number, block.id, claim.position)
        return entries

    def withdraw(self, live: Live) -> None:
        """Take back what an aborted request keyed and would have copied in this step."""
        for entry in reversed(self.entries):
            if entry.live is live:
                self.index.remove(entry.block, entry.key)
                if entry.moved_from is not None:
                    self.index.enter(entry.moved_from, entry.key, entry.claim)
        self.entries = [entry for entry in self.entries if entry.live is not live]
        for copy in [copy for copy in self.copies if copy[0] is live]:
            self.copies.remove(copy)
            self.release(live, copy[1:])

    # -- blocks

    def take(self, live: Live, column: int, role: Role) -> Block:
        """Take a block from the pool for a column of the request's row."""
        block = self.pool.take(partial(self.log.evict, live))
        self.log.add(Allocated, live, self.number, column, block.id, role)
        return block

    def release(self, live: Live, blocks: Iterable[Block]) -> None:
        """Let go of blocks in one call; the null block is nobody's."""
        null = self.pool.null
        for block in self.pool.release(block for block in blocks if block is not null):
            self.log.add(Freed, live, block.id)

    def free(self, live: Live) -> None:
        """Let go of the whole row, last block first: it is evicted before the earlier ones."""
        self.release(live, reversed(live.rows[self.number].blocks))

    def move_to_a_copy(self, live: Live, column: int) -> None:
        """Let a resumed request work on a copy of the block that its hit ends inside of.

        Block and copy are held until the step's copies are done: see `Simulation`.
        """
        row = live.rows[self.number]
        source = row.blocks[column]
        row.blocks[column] = copy = self.take(live, column, "copy")
        copy.refs += 1
        self.copies.append((live, source, copy))
        row.shared = None
