"""The cache groups: which blocks a request holds, when they get a key, and what a lookup finds.

B Mamba block, h hash unit, U cache-hit alignment: all in tokens. Group 0 is attention, whose blocks
are modelled by their keys alone; groups 1 and on are recurrent and hold one state per block.
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

    __slots__ = ("allocated", "blocks", "cached", "checkpoint", "reserved", "retired", "tail")

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.allocated = False
        self.cached = 0  # full blocks (attention: tokens) that the keying pass has seen
        self.retired = 0  # columns below are null for good
        self.checkpoint: tuple[int, int] | None = None  # position and column, this step's
        self.reserved: Block | None = None  # the block in that column
        self.tail: int | None = None  # the key inside the running block, which must move to a copy


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


class Pending(NamedTuple):
    """A key that is entered when its step completes, unless its request is aborted."""

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
    """What attention and recurrent groups share: keys, pending keys, taking and releasing."""

    def __init__(self, number: int, settings: Settings, pool: Pool, log: Log) -> None:
        self.number = number
        self.pool = pool
        self.log = log
        self.index = KeyIndex(number)
        self.pending: dict[int, list[Pending]] = {}
        g = settings.geometry
        self.B, self.h, self.U, self.A = g.M, g.H, g.U, g.A
        self.drop, self.lookahead = g.drop_eagle_block, g.num_hash_lookahead_tokens

    def known(self, key: int) -> bool:
        """Return whether a lookup would hit this key, published or about to be."""
        return self.index.find(key) is not None or key in self.pending

    def find(self, key: int) -> Block | None:
        """Return the block to hit, or None if its bytes are not there before the step ends."""
        block = self.index.find(key)
        if any(entry.moved_from is block for entry in self.pending.get(key, ())):
            return None  # its entry is moving to a copy in this very step
        return block

    def is_keyed(self, live: Live, block: Block, position: int) -> bool:
        """Return whether the block has, or will have when the step ends, the key of this prefix."""
        key = live.digests[position + self.lookahead]
        waiting = self.pending.get(key, ())
        return key in block.claims or any(entry.block is block for entry in waiting)

    def key(self, live: Live, block: Block, position: int, moved_from: Block | None = None) -> None:
        """Enter a key for the first ``position`` tokens once this step has completed."""
        if not self.is_keyed(live, block, position):
            key, claim = live.digests[position + self.lookahead], live.digests[position]
            entry = Pending(live, block, key, Claim(position, claim), moved_from)
            self.pending.setdefault(key, []).append(entry)

    def unkey(self, live: Live, block: Block) -> None:
        """Take every key from the block, those of this step too."""
        self._keep_pending(lambda entry: entry.block is not block)
        for key in list(block.claims):
            claim = self.index.remove(block, key)
            self.log.add(Unkeyed, live, self.number, block.id, claim.position)

    def publish(self) -> list[Pending]:
        """Enter this step's keys and return them."""
        entered = []
        for waiting in self.pending.values():
            for entry in waiting:
                source = entry.moved_from
                if source is not None:
                    self.index.remove(source, entry.key)
                    self.log.add(Unkeyed, entry.live, self.number, source.id, entry.claim.position)
                self.index.enter(entry.block, entry.key, entry.claim)
                self.log.add(Keyed, entry.live, self.number, entry.block.id, entry.claim.position)
                entered.append(entry)
        self.pending.clear()
        return entered

    def withdraw(self, live: Live) -> None:
        """Forget what an aborted request would have published in this step."""
        self._keep_pending(lambda entry: entry.live is not live)

    def _keep_pending(self, stays: Callable[[Pending], bool]) -> None:
        kept = {key: list(filter(stays, waiting)) for key, waiting in self.pending.items()}
        self.pending = {key: waiting for key, waiting in kept.items() if waiting}

    def take(self, live: Live, column: int, role: Role) -> Block:
        """Take a block from the pool for a column of the request's row."""
        block = self.pool.take(partial(self.log.evict, live))
        self.log.add(Allocated, live, self.number, column, block.id, role)
        return block

    def release(self, live: Live, block: Block) -> None:
        """Let go of a block; the null block is nobody's."""
        if block is not self.pool.null and self.pool.release(block):
            self.log.add(Freed, live, block.id)

    def free(self, live: Live) -> None:
        """Let go of the whole row, last block first: it is evicted before the earlier ones."""
        for block in reversed(live.rows[self.number].blocks):
            self.release(live, block)


class AttentionGroup(Group):
    """The attention cache: every computed multiple of h gets a key, and hits share its blocks."""

    def longest(self, live: Live, bound: int) -> int:
        """Return the longest hit of at most ``bound`` tokens, one unit less under drop."""
        digest, ahead = live.digests, self.lookahead
        bound = min(bound, len(live.tokens) - ahead)
        hit = 0
        while hit + self.B <= bound and self.known(digest[hit + self.B + ahead]):
            hit += self.B
        inside = range(min(hit + self.B - self.h, bound // self.h * self.h), hit, -self.h)
        hit = next((n for n in inside if self.known(digest[n + ahead])), hit)
        return max(hit // self.U * self.U - (self.U if self.drop else 0), 0)

    def hit_blocks(self, live: Live, hit: int) -> list[Block] | None:
        """Return the blocks of a hit, or None if bytes are not there before the step ends."""
        ends = (min(start + self.B, hit) for start in range(0, hit, self.B))
        return found([self.find(live.digests[end + self.lookahead]) for end in ends])

    def need(self, live: Live, end: int, hits: Sequence[Block]) -> int:
        """Return how many blocks of the pool a query that ends at ``end`` takes."""
        held = len(live.rows[0].blocks) + len(hits)
        return max(-(-end // self.B) - held, 0) + sum(not block.refs for block in hits)

    def allocate(self, live: Live, end: int, hits: Sequence[Block]) -> None:
        """Extend the row to ``end`` tokens, after the blocks of a hit."""
        row = live.rows[0]
        for block in hits:
            self.pool.share(block)
        if hits:
            row.blocks.extend(hits)
            row.cached = live.computed
        for column in range(len(row.blocks), -(-end // self.B)):
            row.blocks.append(self.take(live, column, "attention"))

    def cache(self, live: Live, end: int) -> None:
        """Key every multiple of h that has been computed and hashed."""
        row, h = live.rows[0], self.h
        hashed = min(end, len(live.tokens) - self.lookahead)
        for position in range(row.cached // h * h + h, hashed + 1, h):
            self.key(live, row.blocks[(position - 1) // self.B], position)
            row.cached = position


class RecurrentGroup(Group):
    """One recurrent cache group: a row is null but for the states that are still needed."""

    def __init__(self, number: int, settings: Settings, pool: Pool, log: Log) -> None:
        super().__init__(number, settings, pool, log)
        self.settings = settings
        self.splitter = settings.splitter
        self.variant = self.splitter.variant
        self.drafts = settings.speculative_tokens
        self.grid = settings.hit_grid
        self.copies: list[tuple[Live, Block, Block]] = []  # before this step's forward pass
        self.sources: list[tuple[Live, Block]] = []  # what those copies read or leave behind

    # -- lookup

    def positions(self, live: Live, bound: int) -> set[int]:
        """Return every position up to ``bound`` with a key: one state holds a whole prefix."""
        digest, ahead = live.digests, self.lookahead
        bound = min(bound, len(live.tokens) - ahead)
        return {n for n in range(self.grid, bound + 1, self.grid) if self.known(digest[n + ahead])}

    def state(self, live: Live, hit: int) -> Block | None:
        """Return the block to resume from, or None if it is written in this very step."""
        return self.find(live.digests[hit + self.lookahead])

    # -- allocation

    def copies_on_write(self, live: Live, hit: Block | None) -> bool:
        """Return whether the request's next block must be a private copy, or leave one behind."""
        inside = hit is not None and live.computed % self.B != 0
        return inside or live.rows[self.number].tail is not None

    def reserve(self, live: Live, end: int) -> tuple[int, int] | None:
        """Return position and column of the checkpoint that a query to ``end`` will write."""
        start, prefill_end = live.computed, live.prefill_end
        if end - start <= self.h or (self.settings.retention == 0 and end < prefill_end):
            return None
        query = self.splitter.query(start, end, prefill_end, end)
        if not self.variant.writes_inside(query):
            return None
        row, column = live.rows[self.number], checkpoint_column(query)
        held = len(row.blocks)
        spare = (
            column >= held
            or row.blocks[column] is self.pool.null
            or (row.allocated and column >= held - self.drafts)
        )
        return (query.position, column) if column >= 0 and spare else None

    def need(self, live: Live, end: int, hit: Block | None, *, estimate: bool = False) -> int:
        """Return how many blocks a query to ``end`` takes; note its checkpoint, unless estimating.

        ``hit`` is the block that the request resumes from in this step.
        """
        row = live.rows[self.number]
        held = len(row.blocks) + (0 if hit is None else (live.computed - 1) // self.B + 1)
        copies = self.copies_on_write(live, hit)
        checkpoint = self.reserve(live, end)
        new = -(-end // self.B) + self.drafts - held
        if copies:
            new = max(new, 0) + 1
        if new > 0:
            first = 0 if row.allocated else self.drafts
            new = min(new, 1 + copies + (checkpoint is not None) + first)
        if not estimate:
            row.checkpoint = checkpoint
        return max(new, 0) + (hit is not None and not hit.refs)

    def allocate(self, live: Live, end: int, hit: Block | None) -> None:
        """Extend the row to ``end`` tokens: nulls, the checkpoint, the running state, scratch."""
        row, null = live.rows[self.number], self.pool.null
        blocks, first = row.blocks, not row.allocated
        copies = self.copies_on_write(live, hit)
        if hit is not None:
            column = (live.computed - 1) // self.B
            blocks.extend([null] * column)
            blocks.append(hit)
            self.pool.share(hit)
            row.cached, row.retired = live.computed // self.B, column
        row.allocated, row.reserved = True, None
        held, width = len(blocks), -(-end // self.B) + self.drafts
        running = width - self.drafts - 1
        reserved = row.checkpoint[1] if row.checkpoint else -1
        if width <= held and not copies and reserved < 0:
            return
        if copies:
            self._copy_on_write(live, row, first)
        skipped = running - (reserved >= 0)
        blocks.extend([null] * (skipped - held))
        if not first:
            for column in range(held - self.drafts, min(held, skipped)):
                self._place(live, len(blocks), running, reserved, blocks[column])
                blocks[column] = null
        while len(blocks) < width:
            self._place(live, len(blocks), running, reserved, None)
        if reserved >= 0:
            if blocks[reserved] is null:
                blocks[reserved] = self.take(live, reserved, "checkpoint")
            row.reserved = blocks[reserved]

    def _place(
        self, live: Live, column: int, running: int, reserved: int, scratch: Block | None
    ) -> None:
        """Append a block to the row: old scratch that moves here, or a new one."""
        role: Role = "speculative"
        if column <= running:
            role = "checkpoint" if column == reserved else "running"
        if scratch is None:
            scratch = self.take(live, column, role)
        else:
            self.log.add(Allocated, live, self.number, column, scratch.id, role)
        live.rows[self.number].blocks.append(scratch)

    def _copy_on_write(self, live: Live, row: Row, first: bool) -> None:
        """Leave a keyed state behind: a resumed request moves to a copy, a producer's key does."""
        column = (live.computed - 1) // self.B
        kept = row.blocks[column]
        copy = self.take(live, column, "copy")
        self.copies.append((live, kept, copy))
        if first:
            row.blocks[column] = copy
            self.sources.append((live, kept))
        else:
            assert row.tail is not None
            if row.tail in kept.claims:
                self.key(live, copy, kept.claims[row.tail].position, moved_from=kept)
            self.sources.append((live, copy))  # findable, but nobody's
        row.tail = None

    def retire(self, live: Live) -> None:
        """Let go of every state before the last computed token's column."""
        row, last = live.rows[self.number], (live.computed - 1) // self.B
        for column in range(last - 1, row.retired - 1, -1):
            block = row.blocks[column]
            if block is not self.pool.null:
                row.blocks[column] = self.pool.null
                self.release(live, block)
        row.retired = max(row.retired, last)

    # -- keys

    def keeps(self, live: Live, column: int) -> bool:
        """Return whether retention keeps the full block in this column."""
        interval = self.settings.retention
        if interval is None or column in live.keeps:
            return True
        return interval > 0 and (column + 1) % (interval // self.B) == 0

    def may_key(self, block: Block) -> bool:
        """Return whether a block can carry a key at all: the null block cannot."""
        return block is not self.pool.null

    def cache(self, live: Live, end: int, query: Query) -> None:
        """Key what retention keeps of the full blocks, then the checkpoint or the chunk's end.

        ``end`` counts known tokens only, ``query`` may end in drafts.
        """
        row = live.rows[self.number]
        hashed = len(live.tokens) - self.lookahead
        full = min(end, hashed) // self.B
        for column in range(row.cached, full):
            block = row.blocks[column]
            if (
                self.may_key(block)
                and self.keeps(live, column)
                and self.variant.keys_block(column, query)
            ):
                self.key(live, block, (column + 1) * self.B)
        row.cached = max(row.cached, full)
        if row.checkpoint is not None:
            self._key_checkpoint(live, row, *row.checkpoint)
        elif end % self.h == 0 and end <= hashed:
            self._key_end(live, row, end)

    def _prompt_position(self, live: Live, unit: int) -> int:
        return self.variant.position(live.prompt, unit, self.drop, self.lookahead)

    def _key_checkpoint(self, live: Live, row: Row, position: int, column: int) -> None:
        block = row.blocks[column]
        retained = position % self.B == 0 and self.keeps(live, position // self.B - 1)
        prompt = position == self._prompt_position(live, self.U)
        hashed = position + self.lookahead <= len(live.tokens)
        if not hashed or not (prompt or retained or position == live.junction):
            self.unkey(live, block)  # transient: the state overwrites it
            return
        if not self.is_keyed(live, block, position):
            self.unkey(live, block)
            self.key(live, block, position)

    def _key_end(self, live: Live, row: Row, end: int) -> None:
        at_junction = (
            self.settings.shared_prefix_checkpoint
            and live.computed < end == live.junction <= live.prompt
        )
        if not (at_junction or end == self._prompt_position(live, self.h)):
            return
        block = row.blocks[-(-end // self.B) - 1]
        if self.may_key(block) and not self.is_keyed(live, block, end):
            self.key(live, block, end)
            if end % self.B:
                row.tail = live.digests[end + self.lookahead]

    def withdraw(self, live: Live) -> None:
        """Forget what an aborted request would have copied and published in this step."""
        super().withdraw(live)
        self.copies = [entry for entry in self.copies if entry[0] is not live]

    def end_step(self) -> None:
        """Let go of what this step's copies have read or left behind."""
        for live, block in self.sources:
            self.release(live, block)
        self.sources.clear()
        self.copies.clear()
