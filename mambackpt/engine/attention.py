"""The attention group: blocks that were filled token by token, looked up from the front.

b tokens per block, h per hash unit, U the grid of hits. What the released engine runs is b = B, the
Mamba block: whole blocks have keys, and the prompt's last hash unit has one inside its block.
"""

from collections.abc import Sequence
from typing import NamedTuple

from mambackpt.engine.blocks import Block, Pool
from mambackpt.engine.groups import Group, Live, Log
from mambackpt.engine.settings import Settings


class Reach(NamedTuple):
    """How far a hit may reach in the attention cache, and the blocks that match, maybe one more."""

    tokens: int
    blocks: list[Block]


class AttentionGroup(Group):
    """The attention cache, modelled by its keys alone: a key needs every block before it."""

    def __init__(self, settings: Settings, pool: Pool, log: Log) -> None:
        super().__init__(0, settings.attention_block, settings, pool, log)
        self.looks_inside = self.b > self.U

    def longest(self, live: Live, bound: int) -> Reach:
        """Return the longest hit of at most ``bound`` tokens.

        Under drop the last unit of a match is computed again, so the match may be one unit longer.
        """
        b, U = self.b, self.U
        unit = self.h if self.looks_inside else b
        bound = min(bound + unit * self.drop, self.hashed(live) // self.h * self.h)
        blocks: list[Block] = []
        while (tokens := len(blocks) * b) + b <= bound:
            block = self.find(live, tokens + b)
            if block is None:
                break
            blocks.append(block)
        if self.looks_inside:
            for position in range(min(tokens + b - U, bound // U * U), tokens, -U):
                block = self.find(live, position)
                if block is not None:
                    blocks.append(block)
                    tokens = position
                    break
        if self.drop and tokens:
            tokens -= min(U, b)
        return Reach(tokens // U * U, blocks)

    def need(self, live: Live, end: int, hits: Sequence[Block]) -> int:
        """Return how many blocks of the pool a query that ends at ``end`` takes."""
        held = len(live.rows[0].blocks) + len(hits)
        copies = bool(hits) and live.computed % self.b != 0
        new = max(-(-end // self.b) - held, 0)
        return new + copies + sum(not block.refs for block in hits)

    def adopt(self, live: Live, hits: Sequence[Block]) -> None:
        """Pin the blocks of a hit, before anything is taken from the pool."""
        row = live.rows[0]
        for block in hits:
            self.pool.share(block)
        row.blocks.extend(hits)
        row.cached = live.computed // self.b
        if hits and live.computed % self.b:
            row.shared = hits[-1]

    def allocate(self, live: Live, end: int) -> None:
        """Extend the row to ``end`` tokens."""
        row = live.rows[0]
        if row.shared is not None:
            self.move_to_a_copy(live, live.computed // self.b)
        for column in range(len(row.blocks), -(-end // self.b)):
            row.blocks.append(self.take(live, column, "attention"))

    def cache(self, live: Live, end: int) -> None:
        """Key every full block, and the prompt's last hash unit where it ends inside a block."""
        row, b = live.rows[0], self.b
        end = self.cacheable(end)
        hashed = self.hashed(live) // self.h * self.h
        full = min(end, hashed) // b
        for column in range(row.cached, full):
            self.key_full(live, row.blocks[column], (column + 1) * b)
        row.cached = max(row.cached, full)
        if b == self.h:
            return
        # A resend matches all but the prompt's last token; a match that is dropped again, all.
        last = min((live.prompt if self.drop else live.prompt - 1) // self.h * self.h, hashed)
        if 0 < last <= end and last % b and last // b < len(row.blocks):
            self.key_part(live, row.blocks[last // b], last)
