"""The recurrent groups: rows that are null but for the states still needed, one state per block.

B Mamba block, h hash unit, U cache-hit alignment: all in tokens.
"""

from mambackpt.engine.blocks import Block, Pool
from mambackpt.engine.events import Allocated, Role
from mambackpt.engine.groups import Entry, Group, Live, Log, Row, checkpoint_column
from mambackpt.engine.settings import Settings
from mambackpt.engine.variants import Query


class RecurrentGroup(Group):
    """One recurrent cache group: its allocator, its keys, and what a lookup finds."""

    def __init__(self, number: int, settings: Settings, pool: Pool, log: Log) -> None:
        super().__init__(number, settings.mamba_block_size, settings, pool, log)
        self.settings = settings
        self.splitter = settings.splitter
        self.variant = self.splitter.variant
        self.drafts = settings.speculative_tokens
        self.grid = settings.hit_grid
        self.keeps_junctions = settings.keeps_junctions
        self.this_step: set[int] = set()  # keys whose states are not there before the step ends

    # -- lookup

    def positions(self, live: Live, bound: int) -> set[int]:
        """Return every position up to ``bound`` with a key: one state holds a whole prefix."""
        grid = self.grid
        bound = min(bound, self.hashed(live))
        return {n for n in range(grid, bound + 1, grid) if self.find(live, n) is not None}

    def comes_this_step(self, state: Block) -> bool:
        """Return whether the state's key was entered in this step, by whichever block."""
        return state.first_key in self.this_step

    # -- allocation

    def copies_on_write(self, live: Live, hit: Block | None) -> bool:
        """Return whether the request's next block must be a private copy, or leave one behind."""
        inside = hit is not None and live.computed % self.B != 0
        return inside or live.rows[self.number].shared is not None

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

    def adopt(self, live: Live, hit: Block | None) -> None:
        """Pin the state that the request resumes from, before anything is taken from the pool."""
        if hit is None:
            return
        row, column = live.rows[self.number], (live.computed - 1) // self.B
        self.pool.share(hit)
        row.blocks.extend([self.pool.null] * column)
        row.blocks.append(hit)
        row.cached, row.retired = live.computed // self.B, column
        if live.computed % self.B:
            row.shared = hit

    def allocate(self, live: Live, end: int) -> None:
        """Extend the row to ``end`` tokens: nulls, the checkpoint, the running state, scratch."""
        row, null = live.rows[self.number], self.pool.null
        blocks, first = row.blocks, not row.allocated
        copies = self.copies_on_write(live, None)
        row.allocated, row.reserved = True, None
        held, width = len(blocks), -(-end // self.B) + self.drafts
        running = width - self.drafts - 1
        reserved = row.checkpoint[1] if row.checkpoint else -1
        if width <= held and not copies and reserved < 0:
            return
        if copies and first:
            self.move_to_a_copy(live, (live.computed - 1) // self.B)
        elif copies:
            self._leave_a_copy(live)
        skipped = running - (reserved >= 0)
        blocks.extend([null] * (skipped - held))
        if not first:
            for column in range(held - self.drafts, min(held, skipped)):
                self._place(live, len(blocks), running, reserved, blocks[column])
                blocks[column] = null
        while len(blocks) < width:
            self._place(live, len(blocks), running, reserved, None)
        if reserved >= 0:
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

    def _leave_a_copy(self, live: Live) -> None:
        """Let the keys of the state that a request runs on lead to a copy, which nobody holds."""
        row, column = live.rows[self.number], (live.computed - 1) // self.B
        source = row.blocks[column]
        copy = self.take(live, column, "copy")
        self.move_keys(live, source, copy)
        source.refs += 1
        self.copies.append((live, source, copy))
        if copy.first_key is not None:
            self.this_step.add(copy.first_key)
        row.shared = None

    def retire(self, live: Live) -> None:
        """Let go of every state before the last computed token's column."""
        row, null = live.rows[self.number], self.pool.null
        last = (live.computed - 1) // self.B
        if last <= row.retired:
            return
        left = range(last - 1, row.retired - 1, -1)
        self.release(live, [row.blocks[column] for column in left])
        for column in left:
            row.blocks[column] = null
        row.retired = last

    # -- keys

    def keeps_interval(self, column: int) -> bool:
        """Return whether retention keeps a state per so many tokens, and this is one of them."""
        interval = self.settings.retention
        return interval is None or (interval > 0 and (column + 1) % (interval // self.B) == 0)

    def keeps(self, live: Live, column: int) -> bool:
        """Return whether retention keeps the full block in this column."""
        return column in live.keeps or self.keeps_interval(column)

    def may_key(self, block: Block) -> bool:
        """Return whether a block can carry a key at all: the null block cannot."""
        return block is not self.pool.null

    def cache(self, live: Live, end: int, query: Query) -> None:
        """Key what retention keeps of the full blocks, then the checkpoint or the chunk's end.

        ``end`` counts known tokens only, ``query`` may end in drafts.
        """
        row = live.rows[self.number]
        end, hashed = self.cacheable(end), self.hashed(live)
        seen, full = row.cached, min(end, hashed) // self.B
        for column in range(seen, full):
            block = row.blocks[column]
            if (
                self.may_key(block)
                and self.keeps(live, column)
                and self.variant.keys_block(column, query)
            ):
                self.key_full(live, block, (column + 1) * self.B)
        row.cached = max(seen, full)
        if row.checkpoint is not None:
            self._key_checkpoint(live, row, *row.checkpoint)
        elif 0 < end <= hashed and end % self.h == 0:
            self._key_end(live, row, end)
        # Also a block that is full now and was keyed inside before: the engine asks by key.
        for block in row.blocks[seen:full]:
            if block.first_key is not None:
                self.this_step.add(block.first_key)

    def _prompt_position(self, live: Live, unit: int) -> int:
        return self.variant.position(live.prompt, unit, self.drop, self.lookahead)

    def _key_checkpoint(self, live: Live, row: Row, position: int, column: int) -> None:
        block = row.blocks[column]
        retained = position % self.B == 0 and self.keeps_interval(position // self.B - 1)
        prompt = position == self._prompt_position(live, self.U)
        if not (prompt or retained or position == live.junction) or position > self.hashed(live):
            self.unkey(live, block)  # transient: the state overwrites it
            return
        if position not in (claim.position for claim in block.claims.values()):
            self.key_full(live, block, position)
            self.this_step.add(live.digests[position + self.lookahead])

    def _key_end(self, live: Live, row: Row, end: int) -> None:
        at_junction = self.keeps_junctions and live.computed < end == live.junction <= live.prompt
        if not (at_junction or end == self._prompt_position(live, self.h)):
            return
        column = -(-end // self.B) - 1
        block = row.blocks[column]
        if self.may_key(block) and self.key_part(live, block, end):
            self.this_step.add(live.digests[end + self.lookahead])
            if end % self.B:
                row.shared = block

    def publish(self) -> list[Entry]:
        """Report this step's keys: from now on lookups need not wait for them."""
        self.this_step.clear()
        return super().publish()
