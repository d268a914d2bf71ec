"""Animations: a sequence moves across blocks, as frames of plain data, a filmstrip and a player.

A `Frame` is a lane and a sentence. The filmstrip, the player and a still of frame k are all drawn
from the same frames by `mambackpt.draw`, so none of them can tell another story. The frames follow
the events of a simulated run: what they show is what the engine's model did.
"""

import hashlib
import html
import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, cast

from matplotlib.animation import FuncAnimation, HTMLWriter
from matplotlib.artist import Artist
from matplotlib.figure import Figure

from mambackpt.draw.lanes import (
    Column,
    Lane,
    Lanes,
    Mark,
    Role,
    draw_lanes,
    draw_legend,
    lanes_height,
    legend_of,
    legend_rows,
)
from mambackpt.draw.sheet import (
    Drawing,
    Pages,
    foot_axes,
    left_margin,
    medium_width,
    note_height,
    page_head,
    page_slices,
    sheet,
    style,
    wrap,
)
from mambackpt.draw.show import figure_png
from mambackpt.engine import (
    Allocated,
    Cell,
    Event,
    Hit,
    Keyed,
    Request,
    Run,
    Scheduled,
    Settings,
    Snapshot,
    TableRow,
    Written,
    simulate,
)
from mambackpt.errors import CheckpointValueError, checked_int
from mambackpt.geometry import CacheGeometry

_MOST_FRAMES = 40
_MOST_MEGABYTES = 0.5
_CAPTION_LINES = 2
_GROUP = 1  # the first recurrent group; the others move alike


@dataclass(frozen=True, slots=True)
class Frame:
    """One picture of an animation: a lane, the sentence that goes with it, and its weight.

    A filmstrip shows frames of weight 2 (a lookup, a query's end) first, then of weight 1; never
    those of weight 0, in which the sequence only moves along.
    """

    lane: Lane
    sentence: str
    weight: int = 1

    @property
    def captioned(self) -> Lane:
        """The lane with the sentence below it."""
        return replace(self.lane, caption=self.sentence)


def sequence_frames(
    prompt: int,
    geometry: CacheGeometry,
    *,
    budget: int = 8192,
    internal_checkpoints: bool = True,
    retention: int | None = 0,
) -> list[Frame]:
    """Return the frames of a prompt that is prefilled, and of a second one that resumes from it.

    >>> frames = sequence_frames(8000, CacheGeometry(1536, 1536, 16, 1536))
    >>> print(frames[-1].sentence)
    same prompt: the query ends. Column 5 holds the state after 8,000 tokens.
    >>> frames[-1].lane.columns[4].key
    7680

    ``prompt`` and ``budget`` (per step) in tokens, ``retention`` as in `Settings`. A long prompt
    moves several blocks at a time. Raises as `mambackpt.engine.simulate` does, and
    CheckpointValueError for a run that needs more than 40 frames.
    """
    tokens = range(checked_int("prompt", prompt))
    settings = Settings(
        mamba_block_size=geometry.M,
        hash_block_size=geometry.H,
        checkpoint_alignment=geometry.A,
        cache_hit_alignment_tokens=geometry.U,
        drop_eagle_block=geometry.drop_eagle_block,
        num_hash_lookahead_tokens=geometry.num_hash_lookahead_tokens,
        internal_checkpoints=internal_checkpoints,
        retention=retention,
        budget=budget,
        max_running=1,
    )
    return run_frames(
        simulate([Request("first prompt", tokens), Request("same prompt", tokens)], settings)
    )


def run_frames(run: Run, *, most: int = _MOST_FRAMES) -> list[Frame]:
    """Return the frames of a simulated run, in which one request runs at a time.

    >>> run = simulate([Request("A", range(100))], Settings(retention=0))
    >>> for frame in run_frames(run):
    ...     print(frame.sentence)
    A: tokens 0 to 100 are scheduled. Reserved: column 0 (checkpoint), column 1 (running).
    A: 64 tokens in. This state exists in the kernel only: the next token overwrites it.
    A: 96 tokens in. The kernel emits this state: it is stored in column 0.
    A: the query ends. Column 1 holds the state after 100 tokens. Key 96 leads to column 0.

    Shows the first recurrent group; decode steps of one request become one frame. Raises
    CheckpointValueError where more than ``most`` frames would be needed.
    """
    block = run.settings.mamba_block_size
    prompts = {request.name: len(request.prompt) for request in run.requests}
    queries = [q for snapshot in run.snapshots() for q in _Query.of_snapshot(snapshot, prompts)]
    runs = [list(same) for _, same in groupby(queries, lambda q: (q.row.request, q.is_decode))]
    chunks = sum(len(same) for same in runs if not same[0].is_decode)
    # A chunk has up to three frames of its own; the rest of them is shared for moving along.
    walk = max(1, (most - 3 * chunks - len(runs)) // max(1, chunks))
    frames: list[Frame] = []
    for same in runs:
        if same[0].is_decode:
            name, tokens = same[0].row.request, same[-1].row.computed - same[0].start
            words = f"{name}: {tokens:,} tokens are generated in {len(same):,} steps."
            frames.append(Frame(same[-1].lane(block, same[-1].end), words, weight=0))
        else:
            for query in same:
                frames += query.frames(block, walk)
    if len(frames) > most:
        raise CheckpointValueError(
            f"the run needs {len(frames)} frames; expected at most {most}. Try a larger budget, a "
            "shorter prompt or fewer requests."
        )
    return frames


@dataclass(frozen=True, slots=True)
class _Query:
    """One query of one request: its events and the block-table row that they lead to."""

    row: TableRow
    events: tuple[Event, ...]
    start: int
    end: int
    is_decode: bool

    @classmethod
    def of_snapshot(cls, snapshot: Snapshot, prompts: Mapping[str, int]) -> "list[_Query]":
        queries = []
        for row in snapshot.rows:
            mine = [event for event in snapshot.events if event.request == row.request]
            scheduled = [event for event in mine if isinstance(event, Scheduled)]
            if row.group == _GROUP and scheduled:
                seen = tuple(e for e in mine if getattr(e, "group", _GROUP) == _GROUP)
                start, end = scheduled[0].start, scheduled[0].end
                queries.append(cls(row, seen, start, end, start >= prompts[row.request]))
        return queries

    def frames(self, block: int, walk: int) -> list[Frame]:
        """Look up, reserve, move along, end: what the query does, one frame after the other."""
        name, frames = self.row.request, []
        allocated = [e for e in self.events if isinstance(e, Allocated)]
        written = {e.position: e.column for e in self.events if isinstance(e, Written)}
        hits = [e for e in self.events if isinstance(e, Hit)]
        for hit in hits:
            lane = self.lane(block, self.start)
            held = lane.columns[(hit.position - 1) // block].held
            words = f"{name}: a lookup finds the state after {hit.position:,} tokens"
            words += "." if held == hit.position else f", but the block holds that after {held:,}."
            frames.append(Frame(lane, words, weight=2))
        reserved = ", ".join(f"column {e.column} ({e.role})" for e in allocated)
        words = f"{name}: tokens {self.start:,} to {self.end:,} are scheduled."
        words += f" Reserved: {reserved}." if reserved else ""
        lane = self.lane(block, self.start, waiting=True)
        frames.append(Frame(lane, words, weight=0 if hits else 1))
        for head in self._heads(block, walk, set(written)):
            words = f"{name}: {head:,} tokens in. "
            words += (
                f"The kernel emits this state: it is stored in column {written[head]}."
                if head in written
                else "This state exists in the kernel only: the next token overwrites it."
            )
            frames.append(Frame(self.lane(block, head), words, weight=int(head in written)))
        words = f"{name}: the query ends.{self._last_words()}"
        frames.append(Frame(self.lane(block, self.end, done=True), words, weight=2))
        return frames

    def _last_words(self) -> str:
        """What the last frame says about the states that were written and keyed."""
        cells, words = {cell.block: cell for cell in self.row.cells}, ""
        for event in self.events:
            cell = cells.get(getattr(event, "block", -1))
            if cell is None or cell.held is None:
                continue
            if isinstance(event, Written) and event.position == self.end:
                other = "" if cell.held == self.end else ", which are not the request's"
                words += f" Column {cell.column} holds the state after {cell.held:,} tokens{other}."
            elif isinstance(event, Keyed):
                other = "" if cell.right else f", which holds the state after {cell.held:,}"
                words += f" Key {event.position:,} leads to column {cell.column}{other}."
        return words

    def _heads(self, block: int, walk: int, written: set[int]) -> list[int]:
        """The positions at which the moving sequence is shown: boundaries, and every write."""
        boundaries = range((self.start // block + 1) * block, self.end, block)
        stride = math.ceil(len(boundaries) / walk) if boundaries else 1
        inside = {position for position in written if self.start < position < self.end}
        return sorted({*boundaries[stride - 1 :: stride], *inside})

    def lane(
        self, block: int, head: int, *, waiting: bool = False, done: bool | None = None
    ) -> Lane:
        """The request as it is when ``head`` tokens are computed.

        ``waiting`` shows what is reserved before anything is computed; keys are entered once the
        query is ``done`` (default: at its end).
        """
        done = head == self.end if done is None else done
        entered = {(e.block, e.position) for e in self.events if isinstance(e, Keyed)}
        written = {e.column: e.position for e in self.events if isinstance(e, Written)}
        hits = {e.block: e.position for e in self.events if isinstance(e, Hit)}
        reserved = {e.column for e in self.events if isinstance(e, Allocated)}
        columns = [Column()] * self.row.width
        lookup = head == self.start and not waiting  # which comes before any reservation
        for cell in self.row.cells:
            keys = [key for key in cell.keyed if done or (cell.block, key) not in entered]
            fresh = cell.column in reserved and cell.block not in hits
            if not (fresh and lookup):
                before = None if fresh else self.start  # what a block holds until it is written
                held = cell.held if written.get(cell.column, 0) <= head else before
                columns[cell.column] = _column(cell, keys, held, head)
            elif at := {(at - 1) // block: at for at in hits.values()}.get(cell.column):
                # The block that was found is copied to this column, and perhaps written on.
                ahead = self.end - at if cell.column in written else 0
                copied = (cell.held or 0) - ahead
                columns[cell.column] = Column("previous", copied, at, right=copied == at)
        marks = [Mark(at, "hit", (at - 1) // block) for at in hits.values()]
        marks += [
            Mark(position, "checkpoint", number)
            for number, position in written.items()
            if position <= min(head, self.end - 1)
        ]
        if self.start < head and head not in [mark.position for mark in marks]:
            marks.append(
                Mark(head, "state", {at: number for number, at in written.items()}.get(head))
            )
        for at, mark in enumerate(marks):
            column = columns[mark.column] if mark.column is not None else Column()
            if not column.right and not (mark.kind == "hit" and column.held == mark.position):
                marks[at] = replace(mark, kind="error")
        ends = (head,) if head > self.start else ()
        return Lane(
            self.row.request, block, self.start, ends, tuple(columns), tuple(marks), self.end
        )


def _column(cell: Cell, keys: Sequence[int], held: int | None, head: int) -> Column:
    """What a drawn column shows of a cell of the engine's row."""
    role: Role = "previous"
    if cell.role in ("running", "checkpoint", "speculative", "copy"):
        role = cast(Role, cell.role)
    right = cell.right or not keys
    if role == "running" and held == cell.held is not None:
        right = right and held == head  # a state that was restored wrongly counts other tokens
    return Column(role, held, max(keys, default=None), right)


def _key_frames(frames: Sequence[Frame], *, panels: int = 6) -> list[int]:
    """Return which frames a filmstrip of at most so many panels shows, counted from 0.

    >>> _key_frames(sequence_frames(8000, CacheGeometry(1536, 1536, 16, 1536)))
    [0, 5, 6, 7, 9]
    """
    panels = checked_int("panels", panels, least=2, unit="panels")
    shown: list[int] = []
    for weight in (2, 1):
        keys = [at for at, frame in enumerate(frames) if frame.weight == weight]
        room = panels - len(shown)
        if len(keys) > room:
            keys = [keys[round(n * (len(keys) - 1) / max(1, room - 1))] for n in range(room)]
        shown += keys
    return sorted(shown)


def filmstrip(
    frames: Sequence[Frame], *, finding: str, panels: int = 6, medium: str | None = "review"
) -> Drawing:
    """Return the key frames of an animation below each other, headed by a finding.

    >>> frames = sequence_frames(100, CacheGeometry(16, 64, 16, 16))
    >>> filmstrip(frames, finding=sequence_finding(frames), panels=2).alt[:28]
    'first prompt: the query ends'

    Labels count the animation's frames from 1. ``medium`` as in `mambackpt.draw.style`; None keeps
    the style that is in force. Raises CheckpointValueError for fewer than two panels.
    """
    keys = _key_frames(frames, panels=panels)
    lanes = [replace(frames[at].captioned, label=f"frame {at + 1}") for at in keys]
    with nullcontext() if medium is None else style(medium):
        pages = draw_strip(finding, lanes, width=_width(frames))
    return pages.drawing(finding, " ".join(frames[at].sentence for at in keys))


def draw_strip(
    finding: str,
    lanes: Sequence[Lane],
    *,
    width: int | None = None,
    notes: float = 0.0,
    note: str = "",
) -> Pages:
    """Return sheets of captioned lanes with one legend below, as many as the medium needs.

    >>> frames = sequence_frames(100, CacheGeometry(16, 64, 16, 16))
    >>> with style("slide"):
    ...     len(draw_strip("A hit.", [frame.captioned for frame in frames]).figures)
    4

    ``width`` in tokens fixes the scale of all of them; ``notes`` is the width in em for the lanes'
    own notes, ``note`` stands on every page. Call it inside `style`.
    """
    left = left_margin(lane.label for lane in lanes)
    kinds = legend_of(lanes)
    room = medium_width() - left - 1 - notes
    legend = 1.4 * len(legend_rows(kinds, medium_width() - 1.6)) + 0.2 if kinds else 0.0
    lines = [wrap(lane.caption, room).count("\n") + 1 if lane.caption else 0 for lane in lanes]
    heights = [lanes_height(1, caption_lines=[line]) for line in lines]
    width = max(lane.width for lane in lanes) if width is None else width
    gap = 3.8 + legend
    slices = page_slices(finding, heights, beside=gap + note_height(note))
    figures, axes = [], []
    for number, rows in enumerate(slices):
        head = page_head(finding, number, len(slices))
        figure, [ax] = sheet(head, [sum(heights[rows])], left=left, gap=gap, note=note)
        draw_lanes(ax, lanes[rows], notes=notes, caption_lines=lines[rows], width=width)
        if kinds:
            draw_legend(foot_axes(figure, legend, note), legend_of(lanes[rows]))
        figures.append(figure)
        axes.append(ax)
    return Pages(tuple(figures), tuple(axes))


class SequenceAnimation(FuncAnimation):
    """An animation that knows its frames; keep it, or its player, until it has been shown."""

    def __init__(self, frames: Sequence[Frame], *, finding: str, medium: str = "review") -> None:
        self.story = tuple(frames)
        self.medium = medium
        self._scale = _width(frames)
        with style(medium):
            height = lanes_height(1, caption_lines=_CAPTION_LINES)
            left = left_margin(frame.lane.label for frame in frames)
            self.figure, [ax] = sheet(finding, [height], left=left)
            self._lanes = Lanes(ax, caption_lines=_CAPTION_LINES)
        super().__init__(
            *(self.figure, self.update, len(frames)),
            interval=1200,
            repeat=False,
            cache_frame_data=False,
        )

    def update(self, number: int) -> list[Artist]:
        """Draw one frame, counted from 0."""
        return [self._lanes.update([self.story[number].captioned], width=self._scale)]


def animate_sequence(
    prompt: int,
    geometry: CacheGeometry,
    *,
    budget: int = 8192,
    internal_checkpoints: bool = True,
    retention: int | None = 0,
    medium: str = "review",
) -> SequenceAnimation:
    """Return the animation of a prompt that moves across blocks, and of another that resumes.

    >>> animation = animate_sequence(100, CacheGeometry(16, 64, 16, 16))
    >>> len(animation.story)
    7
    >>> html = player_html(animation, alt="A sequence moves across two blocks.")

    The arguments are those of `sequence_frames`; ``medium`` as in `mambackpt.draw.style`.
    """
    frames = sequence_frames(
        prompt,
        geometry,
        budget=budget,
        internal_checkpoints=internal_checkpoints,
        retention=retention,
    )
    return SequenceAnimation(frames, finding=sequence_finding(frames), medium=medium)


def sequence_finding(frames: Sequence[Frame]) -> str:
    """Return what the frames of `sequence_frames` show, in one sentence.

    >>> sequence_finding(sequence_frames(8000, CacheGeometry(1536, 1536, 16, 1536)))
    'A second prompt of 8,000 tokens computes 320: it resumes from the state saved after 7,680.'
    """
    last = frames[-1].lane
    # The last lane is the last query's; the first query of the same prompt is where it resumed.
    resumed = min(frame.lane.start for frame in frames if frame.lane.label == last.label)
    computed = f"A second prompt of {last.seq_len:,} tokens computes {last.seq_len - resumed:,}:"
    if not resumed:
        return f"{computed} no state of its prefix was kept."
    return f"{computed} it resumes from the state saved after {resumed:,}."


def player_html(
    animation: SequenceAnimation, *, alt: str, most_megabytes: float = _MOST_MEGABYTES
) -> str:
    """Return an animation as HTML: a player that starts on demand, and its frames in words.

    It ends with the last frame. The same animation gives the same bytes; nothing is fetched. Raises
    CheckpointValueError where a frame does not fit into ``most_megabytes`` (10^6 bytes): matplotlib
    alone would drop it and go on.
    """
    with tempfile.TemporaryDirectory() as folder, style(animation.medium):
        path = Path(folder, "player.html")
        limit = most_megabytes * 1e6 / 2**20  # matplotlib counts in MiB
        writer = _SmallFrames(1, embed_frames=True, default_mode="once", embed_limit=limit)
        animation.save(path, writer, dpi=90)
        page = path.read_text(encoding="utf-8")
    every, kept = len(animation.story), _embedded_frames(page)
    if kept != every:
        raise CheckpointValueError(
            f"{kept} of {every} frames fit into {most_megabytes} MB; expected all of them. "
            f"Try most_megabytes={math.ceil(10 * most_megabytes * every / max(1, kept)) / 10}, or "
            "fewer frames."
        )
    return _own_player(page, animation, alt)


class _SmallFrames(HTMLWriter):
    """matplotlib's player, with frames of few colours: a third of the bytes."""

    def setup(self, fig: Figure, *arguments: Any, **keywords: Any) -> None:
        super().setup(fig, *arguments, **keywords)
        self.fig = cast(Figure, _SmallFigure(fig))


class _SmallFigure:
    def __init__(self, figure: Figure) -> None:
        self.figure = figure

    def savefig(self, target: BinaryIO, *, dpi: float, **_: object) -> None:
        target.write(figure_png(self.figure, dpi=dpi))


def _embedded_frames(page: str) -> int:
    """How many frames a player's HTML really contains."""
    return len(re.findall(r'frames\[\d+\] = "data:image', page))


def _own_player(page: str, animation: SequenceAnimation, alt: str) -> str:
    """Make matplotlib's player self-contained, the same on every run, and readable in words."""
    page = re.sub(r"<link[^>]*>", "", page)  # an icon font from a network
    page = re.sub(
        r'aria-label="([^"]*)"([^>]*)>\s*<i class=[^>]*></i>', r'aria-label="\1"\2>\1', page
    )
    page = page.replace("</style>", ".anim-buttons button {width: auto; padding: 0 .5em}</style>")
    page = page.replace('<img id="_anim', f'<img alt="{html.escape(alt)}" id="_anim')
    random = re.search(r"_anim_img([0-9a-f]{32})", page)
    assert random is not None
    content = page.replace(random[1], "")
    page = page.replace(random[1], hashlib.sha256(content.encode()).hexdigest()[:32])
    words = "".join(f"<li>{html.escape(frame.sentence)}</li>" for frame in animation.story)
    return f"{page}<details><summary>Every frame in words</summary><ol>{words}</ol></details>"


def _width(frames: Sequence[Frame]) -> int:
    return max(frame.lane.width for frame in frames)
