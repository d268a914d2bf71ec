"""A step as a picture: the rows of its requests, and what every block holds and is found under."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mambackpt.engine.blocks import Block
from mambackpt.engine.events import Allocated, Event
from mambackpt.engine.groups import Group, Live
from mambackpt.engine.lockstep import holds
from mambackpt.engine.recurrent import RecurrentGroup


@dataclass(frozen=True, slots=True)
class Cell:
    """One column of a row: its block, why it is there, what it really holds and is found under.

    ``held`` counts the tokens whose state the block contains (None: never written), ``keyed`` the
    positions that its keys promise; ``right`` is False where a key and the content differ.
    """

    column: int
    block: int
    role: str
    held: int | None
    keyed: tuple[int, ...]
    right: bool


@dataclass(frozen=True, slots=True)
class TableRow:
    """A request's block-table row in one recurrent group after a step; nulls are not cells."""

    request: str
    group: int
    computed: int
    width: int
    running: int
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One step as a picture: its events, the rows of the requests in it, and the cached blocks.

    ``cached`` holds the findable blocks of the recurrent groups that no row shows, oldest first.
    """

    step: int
    events: tuple[Event, ...]
    rows: tuple[TableRow, ...]
    cached: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class PoolBlock:
    """A block of the pool that somebody refers to or a key leads to.

    ``group`` is 0 for attention, whose content is not modelled: ``held`` is None there. ``refs``
    counts the references; the others are those of `Cell`.
    """

    block: int
    group: int
    refs: int
    held: int | None
    keyed: tuple[int, ...]
    right: bool


def take_blocks(lives: Iterable[Live], groups: Sequence[Group]) -> tuple[PoolBlock, ...]:
    """Return every block of these groups that is in use or findable, by number."""
    found: dict[int, tuple[int, Block]] = {}
    for group in groups:
        held = [block for live in lives for block in live.rows[group.number].blocks]
        for block in (*held, *(block for block, _ in group.index)):
            found[block.id] = group.number, block
    found.pop(0, None)  # the null block is nobody's
    blocks = []
    for number, (group_number, block) in sorted(found.items()):
        cell = _cell(block, 0, "")
        right = cell.right or group_number == 0
        blocks.append(PoolBlock(number, group_number, block.refs, cell.held, cell.keyed, right))
    return tuple(blocks)


def take_snapshot(
    step: int, events: tuple[Event, ...], lives: Sequence[Live], groups: Sequence[RecurrentGroup]
) -> Snapshot:
    """Return the picture of a step: its requests' rows, and the cached blocks of the groups."""
    copies = {e.block for e in events if isinstance(e, Allocated) and e.role == "copy"}
    rows = [_row(live, group, copies) for live in lives for group in groups]
    shown = {cell.block for row in rows for cell in row.cells}
    cached = [
        _cell(block, (claim.position - 1) // group.B, "cached")
        for group in groups
        for block, claim in group.index
        if block.id not in shown
    ]
    return Snapshot(step, events, tuple(rows), tuple(cached))


def _row(live: Live, group: RecurrentGroup, copies: set[int]) -> TableRow:
    row = live.rows[group.number]
    cells = [
        _cell(block, column, _role(block, column, live.running, row.reserved, copies))
        for column, block in enumerate(row.blocks)
        if block is not group.pool.null
    ]
    width = len(row.blocks)
    return TableRow(live.name, group.number, live.computed, width, live.running, tuple(cells))


def _role(block: Block, column: int, running: int, reserved: Block | None, copies: set[int]) -> str:
    if block is reserved:
        return "checkpoint"
    if column == running:
        return "running"
    if column > running:
        return "speculative"
    return "copy" if block.id in copies else "kept"


def _cell(block: Block, column: int, role: str) -> Cell:
    claims = sorted(block.claims.values())
    return Cell(
        column,
        block.id,
        role,
        block.content.tokens if block.content else None,
        tuple(claim.position for claim in claims),
        all(holds(block.content, claim) for claim in claims),
    )
