"""The lockstep check: does every key's block hold the state that the key promises?

Scheduler, allocator and worker each act on their own view of a step; this compares what they did.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from mambackpt.engine.blocks import Block, Claim, Content
from mambackpt.engine.groups import Entry, Live
from mambackpt.engine.recurrent import RecurrentGroup

# The gravest first: what reaches an output, what will, what wastes a block.
Kind: TypeAlias = Literal[
    "wrong restore",
    "mislabelled",
    "inherited",
    "reserved, not written",
    "written, not reserved",
    "null block",
]


@dataclass(slots=True)
class Counts:
    """What a simulation adds up to; hits and tokens count once per request, not per group.

    ``wrong_restores`` are hits whose block does not hold the prefix they promise; ``mislabelled``
    counts (block, key) pairs that differ, and ``inherited`` those among all such pairs that a
    request wrote which itself had resumed wrongly: they are counted apart. ``prefill_chunks`` are
    (request, chunk) pairs, ``evictions`` blocks that lost their keys to another request.
    """

    requests: int = 0
    steps: int = 0
    hits: int = 0
    wrong_restores: int = 0
    mislabelled: int = 0
    inherited: int = 0
    reused_tokens: int = 0
    computed_tokens: int = 0
    prefill_chunks: int = 0
    preemptions: int = 0
    evictions: int = 0


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken promise: who, when, where; what was claimed and what is held, in tokens.

    ``held`` counts the tokens whose state the block contains (None: it was never written);
    ``claimed`` is None where nothing was promised; ``column`` is -1 for a block that has left the
    request's row.
    """

    kind: Kind
    step: int
    request: str
    group: int
    column: int
    block: int
    claimed: int | None
    held: int | None

    def __str__(self) -> str:
        held = "nothing that was written" if self.held is None else f"the state of {self.held}"
        claimed = "none" if self.claimed is None else f"{self.claimed} tokens"
        return (
            f"step {self.step}, request {self.request}, group {self.group}, column {self.column}: "
            f"{self.kind}: block {self.block} claims {claimed} and holds {held}"
        )


def holds(content: Content | None, claim: Claim) -> bool:
    """Return whether a content is the state after exactly the claimed prefix."""
    return content is not None and content.digest == claim.digest


class Lockstep:
    """Watches one simulation; it looks at the blocks that a step wrote, keyed or restored.

    No other block can have changed: `audit` looks at every keyed block and must agree.
    """

    def __init__(self, groups: Sequence[RecurrentGroup], counts: Counts) -> None:
        self.groups = groups
        self.counts = counts
        self.violations: list[Violation] = []
        self._restores: list[tuple[Live, RecurrentGroup, Block]] = []
        self._writes: list[tuple[Live, RecurrentGroup, Block, int | None]] = []
        self._counted: set[tuple[int, int]] = set()

    def expect(self, live: Live, group: RecurrentGroup, block: Block) -> None:
        """Note that a request is about to resume from this block."""
        self._restores.append((live, group, block))

    def wrote(self, live: Live, group: RecurrentGroup, block: Block, position: int | None) -> None:
        """Note a write of this step: by the forward pass, or (no position) by a copy."""
        self._writes.append((live, group, block, position))

    def forget(self, live: Live) -> None:
        """Drop what an aborted request was about to restore."""
        self._restores = [entry for entry in self._restores if entry[0] is not live]

    def check_restores(self, step: int) -> None:
        """Compare each hit block with the prefix it was hit for, before anything is computed."""
        for live, group, block in self._restores:
            claim = Claim(live.computed, live.digests[live.computed])
            if not holds(block.content, claim):
                self.counts.wrong_restores += not live.tainted
                live.tainted = True
                self._report("wrong restore", step, live, group, block, claim.position)
        self._restores.clear()

    def check_step(
        self,
        step: int,
        scheduled: Iterable[Live],
        published: Iterable[tuple[RecurrentGroup, list[Entry]]],
    ) -> None:
        """Compare this step's reservations, writes and keys with each other."""
        for live in scheduled:
            for group in self.groups:
                self._check_row(step, live, group)
        for group, entries in published:
            for live, block, key, claim, _ in entries:
                self._check_claim(step, live, group, block, key, claim)
        for live, group, block, _ in self._writes:
            for key, claim in block.claims.items():
                self._check_claim(step, live, group, block, key, claim)
        self._writes.clear()

    def _check_row(self, step: int, live: Live, group: RecurrentGroup) -> None:
        """Compare what one request reserved in one group with what was written for it."""
        row = live.rows[group.number]
        wanted, reserved = row.checkpoint, row.reserved
        expected = set(row.blocks[live.running :])
        done = False
        for writer, where, block, position in self._writes:
            if writer is not live or where is not group:
                continue
            if block is group.pool.null:
                self._report("null block", step, live, group, block, None)
            elif position is not None and block not in expected:
                if wanted is not None and block is reserved and position == wanted[0]:
                    done = True
                else:
                    self._report("written, not reserved", step, live, group, block, None)
        if wanted is not None and not done:
            held = reserved or group.pool.null
            self._report("reserved, not written", step, live, group, held, wanted[0])

    def _check_claim(
        self, step: int, live: Live, group: RecurrentGroup, block: Block, key: int, claim: Claim
    ) -> None:
        null = block is group.pool.null
        if (block.id, key) in self._counted or not (null or not holds(block.content, claim)):
            return
        self._counted.add((block.id, key))
        kind: Kind = "null block"
        if not null:
            kind = "inherited" if live.tainted else "mislabelled"
            self.counts.inherited += live.tainted
            self.counts.mislabelled += not live.tainted
        self._report(kind, step, live, group, block, claim.position)

    def _report(
        self,
        kind: Kind,
        step: int,
        live: Live,
        group: RecurrentGroup,
        block: Block,
        claimed: int | None,
    ) -> None:
        row = live.rows[group.number].blocks
        column = row.index(block) if block in row else -1
        held = block.content.tokens if block.content else None
        self.violations.append(
            Violation(kind, step, live.name, group.number, column, block.id, claimed, held)
        )

    def audit(self) -> list[tuple[int, Claim]]:
        """Return every (block, claim) that differs now: the readable truth, block by block."""
        return [
            (block.id, claim)
            for group in self.groups
            for block, claim in group.index
            if block is group.pool.null or not holds(block.content, claim)
        ]
