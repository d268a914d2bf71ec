"""Lanes: what happens to a sequence, its blocks and their keys, on an Axes of yours.

A `Lane` says what is to be seen, as plain data; `Lanes` draws any number of them with a handful of
artists that a redraw reuses. L, q, M, H as in the planner; c a column.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, TypeAlias, cast

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mambackpt.draw.sheet import (
    CHECKPOINT,
    CHUNKS,
    ERROR,
    FAINT_INK,
    GREY,
    HIT,
    INK,
    PALE,
    STATE,
    Colour,
    em_wide,
    text_width,
    tint,
    wrap,
)
from mambackpt.geometry import CacheGeometry
from mambackpt.planner import Reason, explain

Role: TypeAlias = Literal["null", "previous", "copy", "running", "checkpoint", "speculative"]
_Kind: TypeAlias = Literal["state", "checkpoint", "declined", "hit", "error", "shared"]
_Dash: TypeAlias = Literal["-", ":", "--"]
# Each kind of mark has a shape of its own; hollow means that nothing was stored there.
_MARKERS: dict[str, tuple[str, str, bool]] = {
    "state": ("o", STATE, True),
    "checkpoint": ("D", CHECKPOINT, True),
    "declined": ("D", INK, False),
    "hit": (">", HIT, True),
    "error": ("X", ERROR, True),
    "shared": ("|", INK, True),
}
_EDGES = {
    "null": "#c4c4ca",
    "previous": STATE,
    "copy": STATE,
    "running": STATE,
    "checkpoint": CHECKPOINT,
    "speculative": GREY,
}


@dataclass(frozen=True, slots=True)
class Column:
    """One place of a block-table row: what it is for, what it holds, and what its key promises.

    ``held`` is the position whose state the block contains (None: nothing yet), ``key`` the
    position that a lookup finds it under. A column that is not ``right`` holds another state than
    its place or key promises, and is drawn as an error. ``block`` is its number in the pool, where
    that is to be seen.
    """

    role: Role = "null"
    held: int | None = None
    key: int | None = None
    right: bool = True
    block: int | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """A position worth pointing at; with a ``column``, a line leads from it to that column."""

    position: int
    kind: _Kind
    column: int | None = None
    label: str | None = None


@dataclass(frozen=True, slots=True)
class Lane:
    """One request as it is to be drawn; positions and sizes in tokens.

    Tokens up to ``start`` were computed before; each of ``ends`` closes a prefill chunk; tokens up
    to ``total`` are still to come. The row has ``columns`` of ``block`` tokens. ``caption`` stands
    below, ``note`` to the right.
    """

    label: str
    block: int
    start: int
    ends: tuple[int, ...]
    columns: tuple[Column, ...] = ()
    marks: tuple[Mark, ...] = ()
    total: int = 0
    caption: str = ""
    note: str = ""

    @property
    def seq_len(self) -> int:
        """Tokens of the request after the last chunk."""
        return self.ends[-1] if self.ends else self.start

    @property
    def width(self) -> int:
        """Tokens from the lane's left edge to the end of its last column."""
        return max(self.seq_len, self.total, len(self.columns) * self.block)


def planned_lane(
    seq_len: int,
    query_len: int,
    geometry: CacheGeometry,
    *,
    label: str = "",
    formula: str = "current",
    sentence: bool = False,
) -> Lane:
    """Return the lane of one query as the planner decides it.

    >>> lane = planned_lane(8000, 8000, CacheGeometry(1536, 1536, 16, 1536))
    >>> _describe_columns(lane.columns)
    'column 4: checkpoint, key 7,680    column 5: running'

    A declined query says which condition it fails; with ``sentence``, so does an accepted one.
    Sizes in tokens; raises as `explain` does.
    """
    [decision] = explain([seq_len], [query_len], geometry, formula=formula)
    M, start = geometry.M, seq_len - query_len
    columns = [Column()] * -(-seq_len // M)
    if start:
        columns[(start - 1) // M] = Column("previous", held=start)
    if columns:
        columns[-1] = Column("running", held=seq_len)
    accepted = decision.reason is Reason.ACCEPTED
    if accepted:
        columns[decision.column] = Column("checkpoint", decision.position, decision.position)
    mark = Mark(
        decision.position,
        "checkpoint" if accepted else "declined",
        decision.column if accepted else None,
    )
    return Lane(
        label,
        M,
        start,
        (seq_len,),
        tuple(columns),
        (mark,),
        caption=decision.sentence if sentence or not accepted else "",
    )


def scheduled_lane(
    ends: Sequence[int],
    geometry: CacheGeometry,
    *,
    start: int = 0,
    internal_checkpoints: bool = False,
    label: str = "",
) -> Lane:
    """Return the lane of one prefill in chunks: where each ends, and which states remain.

    >>> geometry = CacheGeometry(1536, 1536, 16, 1536)
    >>> scheduled_lane([7680, 8000], geometry).note
    '2 forwards\\n7,680 + 320'
    >>> _describe_columns(scheduled_lane([8000], geometry, internal_checkpoints=True).columns)
    'column 4: checkpoint, key 7,680    column 5: running'

    A state remains where a chunk ends on the hash grid, and, with ``internal_checkpoints``, where
    the planner puts one inside the last chunk. A state that lies in the column of a later one is
    overwritten. Sizes in tokens.
    """
    columns = [Column()] * -(-ends[-1] // geometry.M)
    marks = []
    for end in ends:
        key = end if end % geometry.H == 0 and end < ends[-1] else None
        column = (end - 1) // geometry.M
        columns[column] = Column("running" if end == ends[-1] else "previous", end, key)
        if key:
            marks.append(Mark(end, "state", column))
    last_start = ends[-2] if len(ends) > 1 else start
    if internal_checkpoints:
        [decision] = explain([ends[-1]], [ends[-1] - last_start], geometry)
        if decision.reason is Reason.ACCEPTED:
            at = decision.position
            columns[decision.column] = Column("checkpoint", at, at)
            marks.append(Mark(at, "checkpoint", decision.column))
    marks = [mark for mark in marks if columns[mark.column or 0].key == mark.position]
    sizes = [end - begin for begin, end in zip((start, *ends[:-1]), ends, strict=True)]
    count = f"{len(ends)} forward{'s' * (len(ends) > 1)}"
    return Lane(
        label,
        geometry.M,
        start,
        tuple(ends),
        tuple(columns),
        tuple(marks),
        note=f"{count}\n{' + '.join(f'{size:,}' for size in sizes)}",
    )


def _describe_columns(columns: Sequence[Column]) -> str:
    """Return what the non-null columns are for, in words.

    >>> _describe_columns([Column(), Column("checkpoint", 32, 32), Column("running", 40)])
    'column 1: checkpoint, key 32    column 2: running'
    """
    parts = []
    for number, column in enumerate(columns):
        if column.role == "null":
            continue
        words: str = column.role
        if column.key is not None:
            words += f", key {column.key:,}"
        if not column.right:
            words += f" (holds {column.held or 0:,} tokens)"
        parts.append(f"column {number}: {words}")
    return "    ".join(parts)


def describe_lanes(lanes: Sequence[Lane]) -> str:
    """Return what the columns of each lane are for, in words: an alt text.

    >>> geometry = CacheGeometry(1536, 1536, 16, 1536)
    >>> describe_lanes([planned_lane(8000, 8000, geometry, label="a prompt")])
    'a prompt: column 4: checkpoint, key 7,680    column 5: running.'
    """
    return " ".join(f"{lane.label}: {_describe_columns(lane.columns)}." for lane in lanes)


class _Painter:
    """A pool of artists on one Axes: each repaint reuses what the last one left."""

    def __init__(self, ax: Axes) -> None:
        self.ax = ax
        self.em = float(mpl.rcParams["font.size"])
        line = float(mpl.rcParams["lines.linewidth"])
        self._boxes = {
            hatch: PolyCollection([], hatch=hatch, linewidths=0.6 * line, zorder=2, clip_on=False)
            for hatch in ("", "////", "xxxx")
        }
        # Text on a hatch needs a plate below it, in a collection of its own to lie above the hatch.
        self._boxes["plate"] = PolyCollection([], linewidths=0, zorder=2.5, clip_on=False)
        self._lines = LineCollection([], linewidths=0.8 * line, zorder=3, clip_on=False)
        for collection in (*self._boxes.values(), self._lines):
            ax.add_collection(collection, autolim=False)
        size = float(mpl.rcParams["lines.markersize"])
        self._marks: dict[str, Line2D] = {}
        for kind, (shape, colour, filled) in _MARKERS.items():
            [self._marks[kind]] = ax.plot(
                [], [], shape, ms=size * (3 if shape == "|" else 1), mew=0.7 * line, mec=colour,
                mfc=colour if filled else "white", zorder=4, clip_on=False,
            )  # fmt: skip
        self._texts: list[Text] = []
        self.begin()

    def begin(self) -> None:
        self._todo: dict[str, list[tuple[list[tuple[float, float]], Colour, Colour, _Dash]]]
        self._todo = {hatch: [] for hatch in self._boxes}
        self._segments: list[tuple[list[tuple[float, float]], str]] = []
        self._points: dict[str, list[tuple[float, float]]] = {kind: [] for kind in self._marks}
        self._used = 0

    def box(
        self, x: float, y: float, width: float, height: float, face: Colour, edge: Colour,
        dash: _Dash = "-", hatch: str = "",
    ) -> None:  # fmt: skip
        corners = [(x, y), (x + width, y), (x + width, y + height), (x, y + height)]
        self._todo[hatch].append((corners, face, edge, dash))

    def line(self, points: list[tuple[float, float]], colour: str) -> None:
        self._segments.append((points, colour))

    def mark(self, kind: str, x: float, y: float) -> None:
        self._points[kind].append((x, y))

    def text(
        self, x: float, y: float, words: str, ha: str = "center", *, va: str = "center",
        colour: str = INK, weight: str = "normal",
    ) -> None:  # fmt: skip
        if not words:
            return
        if self._used == len(self._texts):
            self._texts.append(
                self.ax.text(0, 0, "", fontsize=self.em, parse_math=False, clip_on=False, zorder=5)
            )
        text = self._texts[self._used]
        self._used += 1
        text.set(x=x, y=y, text=words, ha=ha, va=va, color=colour, weight=weight, visible=True)

    def end(self) -> None:
        for hatch, boxes in self._boxes.items():
            todo = self._todo[hatch]
            boxes.set_verts([corners for corners, _, _, _ in todo])
            boxes.set_facecolor([face for _, face, _, _ in todo])
            boxes.set_edgecolor([edge for _, _, edge, _ in todo])
            boxes.set_linestyle([dash for _, _, _, dash in todo] or "-")
        self._lines.set_segments([points for points, _ in self._segments])
        self._lines.set_color([colour for _, colour in self._segments])
        for kind, points in self._points.items():
            self._marks[kind].set_data([x for x, _ in points], [y for _, y in points])
        for unused in self._texts[self._used :]:
            unused.set_visible(False)


class Lanes:
    """Lanes on an Axes that can be drawn again with other lanes, in a few milliseconds.

    >>> from mambackpt.draw import sheet, style
    >>> with style():
    ...     _, [ax] = sheet("Where it lands.", [lanes_height(1)])
    ...     lanes = Lanes(ax)
    >>> for tokens in (8000, 9000):
    ...     ax = lanes.update([planned_lane(tokens, tokens, CacheGeometry(1536, 1536, 16, 1536))])

    From top to bottom, a lane shows positions, the tokens (pale: computed before; grey: chunks),
    the block-table row below the tokens that its columns stand for, keys, and the caption. Where
    columns are too narrow for words, a line of words replaces the keys. ``notes`` is the width in
    em that stays free on the right for the lanes' notes, ``caption_lines`` the lines that a caption
    may take, or those of each lane; without ``keys`` their line is left out. Make it inside
    `style`; `update` needs no context.
    """

    def __init__(
        self,
        ax: Axes,
        *,
        notes: float = 0.0,
        caption_lines: int | Sequence[int] = 0,
        keys: bool = True,
    ) -> None:
        self.ax = ax
        self._keys = keys
        self._notes = notes
        self._caption_lines = caption_lines
        self._painter = _Painter(ax)
        ax.spines["left"].set_visible(False)
        ax.tick_params(axis="y", length=0, pad=0.7 * self._painter.em)
        ax.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: f"{tokens:,.0f}"))
        ax.set_xlabel("tokens")

    def update(self, lanes: Sequence[Lane], *, width: int | None = None) -> Axes:
        """Draw these lanes instead of the last ones; ``width`` in tokens fixes the scale."""
        painter, ax = self._painter, self.ax
        whole = em_wide(ax, painter.em)
        tokens = max([1, *(lane.width for lane in lanes)]) if width is None else width
        self._em = tokens / (whole - self._notes)  # tokens per em
        ax.set_xlim(0, whole * self._em)
        below = self._caption_lines
        lines = [below] * len(lanes) if isinstance(below, int) else [*below][: len(lanes)]
        heights = [lanes_height(1, caption_lines=line, keys=self._keys) for line in lines]
        tops = [0.0, *accumulate(heights)]
        words = (
            text_width(label) * self._em <= lane.block - 0.3 * self._em
            for lane in lanes
            for number, column in enumerate(lane.columns)
            for label in (_role(number, column), _promise(column))
        )
        self._words_fit = all(words)
        painter.begin()
        for lane, top in zip(lanes, tops, strict=False):
            self._draw(lane, top, whole - self._notes)
        painter.end()
        ax.set_ylim(tops[-1] or lanes_height(1, keys=self._keys), 0)
        ax.set_yticks([top + 3.3 for top in tops[: len(lanes)]])
        ax.set_yticklabels([lane.label for lane in lanes], multialignment="right")
        ticks = MaxNLocator(7, integer=True).tick_values(0, tokens)
        spare = (1 - ax.get_position().x1) * whole / ax.get_position().width  # to the right, in em
        room = ax.get_xlim()[1] + spare * self._em
        halves = {tick: text_width(f"{tick:,.0f}") * self._em / 2 for tick in ticks}
        ax.set_xticks([tick for tick in ticks if 0 <= tick <= min(tokens, room - halves[tick])])
        ax.spines["bottom"].set_bounds(0, tokens)
        ax.xaxis.label.set_x(0.5 * tokens / ax.get_xlim()[1])
        return ax

    def _draw(self, lane: Lane, top: float, room: float) -> None:
        painter, em = self._painter, self._em
        self._draw_tokens(lane, top + 1.4)
        self._draw_columns(lane, top + 3.5, room)
        self._draw_marks(lane, top)
        below = top + (6.4 if self._keys and self._has_keys(lane) else 5.2)
        painter.text(0, below, wrap(lane.caption, room), "left", va="top")
        if lane.note:
            right = (room + 1) * em
            painter.text(right, top + 3.3, wrap(lane.note, self._notes - 1), "left")

    def _has_keys(self, lane: Lane) -> bool:
        """Whether something stands between a lane's columns and its caption."""
        return not self._words_fit or any(map(_promise, lane.columns))

    def _draw_tokens(self, lane: Lane, top: float) -> None:
        painter, em, begin = self._painter, self._em, 0
        if lane.total > lane.seq_len:
            painter.box(lane.seq_len, top, lane.total - lane.seq_len, 1.3, "white", PALE)
        for number, end in enumerate((lane.start, *lane.ends)):
            if end == begin:
                continue
            computed = end == lane.start
            face = PALE if computed else CHUNKS[number % 2]
            wide = 1 if em < 1 else end - begin  # a token that is wider than an em has its own box
            for token in range(begin, end, wide):
                painter.box(token, top, wide, 1.3, face, "white")
            # The words stand in the widest stretch without a mark.
            stops = [begin, *(m.position for m in lane.marks if begin < m.position < end), end]
            room, left = max((b - a, a) for a, b in pairwise(sorted(stops)))
            size = f"{end - begin:,}"
            for words in (f"{size} computed before" if computed else f"{size} tokens", size):
                if wide > 1 and (text_width(words) + 1.2) * em <= room:
                    painter.text(left + room / 2, top + 0.63, words)
                    break
            begin = end

    def _draw_columns(self, lane: Lane, top: float, room: float) -> None:
        painter, M, em = self._painter, lane.block, self._em
        for number, last in _spans(lane.columns, bundled=em > M):
            column = lane.columns[number]
            look, wide = _look(column), (last - number + 1) * M
            painter.box(number * M, top, wide, 1.4, *look)
            middle = number * M + wide / 2
            null = column.role == "null"
            numbers = f"{number}" if number == last else f"{number:,} to {last:,}"
            for words in (f"{numbers} null" if null else _role(number, column), numbers):
                width = (text_width(words) + 0.3) * em
                if width <= wide:
                    if look[-1]:
                        plate = (middle - width / 2, top + 0.15, width, 1.1)
                        painter.box(*plate, look[0], "none", "-", "plate")
                    painter.text(middle, top + 0.67, words, colour=FAINT_INK if null else INK)
                    break
            if self._keys and self._words_fit:
                painter.text(middle, top + 2.15, _promise(column))
        if self._keys and not self._words_fit:
            shortened = _shorten(_describe_columns(lane.columns), room)
            # A browser would make one space of four.
            painter.text(0, top + 2.15, shortened.replace("    ", " · "), "left")

    def _draw_marks(self, lane: Lane, top: float) -> None:
        painter, M = self._painter, lane.block
        labels = {lane.seq_len: f"{lane.seq_len:,}"}
        for mark in lane.marks:
            painter.mark(mark.kind, mark.position, top + 2.05)
            labels[mark.position] = f"{mark.position:,}" if mark.label is None else mark.label
            if mark.column is not None:
                down = [(mark.position, top + 2.05), (mark.position, top + 2.75)]
                into = ((mark.column + 0.5) * M, top + 3.5)
                painter.line([*down, into], _MARKERS[mark.kind][1])
        self._label_positions(lane.seq_len, labels, top + 0.7)

    def _label_positions(self, seq_len: int, labels: dict[int, str], y: float) -> None:
        """Write each position before its mark, after it, or above it; else leave it out.

        From right to left, so that the last ones are there. No label stands above another mark.
        """
        em, limit = self._em, self.ax.get_xlim()[1]
        places = sorted(position for position, label in labels.items() if label)
        for before, position in reversed(list(zip([-em, *places], places, strict=False))):
            width, gap = (text_width(labels[position]) + 0.5) * em, 0.6 * em
            after = position + gap * (position < seq_len)
            if position == seq_len and after + width <= limit:
                x, align, limit = after, "left", position - gap
            elif before + gap < position - width and position - gap <= limit:
                x, align, limit = position - gap, "right", position - width
            elif before + gap < position - width / 2 and position + width / 2 <= limit:
                x, align, limit = position, "center", position - width / 2
            elif after + width <= limit:
                x, align, limit = after, "left", position - gap
            else:
                continue
            self._painter.text(x, y, labels[position], align)


def _spans(columns: Sequence[Column], *, bundled: bool) -> list[tuple[int, int]]:
    """First and last number of what is drawn as one box: each column, or ``bundled`` nulls."""
    if not bundled:
        return [(number, number) for number in range(len(columns))]
    spans: list[tuple[int, int]] = []
    for number, column in enumerate(columns):
        null = column.role == "null"
        if null and spans and columns[spans[-1][0]].role == "null":
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    return spans


def _role(number: int, column: Column) -> str:
    """The words in a column that is not null."""
    if column.role == "null":
        return ""
    return f"{number} {column.role}" + ("" if column.block is None else f" #{column.block}")


def _promise(column: Column) -> str:
    """The words below a column: its key, or what it holds where that is another state."""
    words = "" if column.key is None else f"key {column.key:,}"
    return words if column.right else f"{words} ≠ {column.held or 0:,}".strip()


def _shorten(words: str, width: float) -> str:
    """Leave out the beginning of a line that is wider than ``width`` em, what is wrong last."""
    parts = words.split("    ")
    if text_width(words) > width:
        words = "    ".join(sorted(parts, key=lambda part: "(holds" in part))
    while text_width(words) > width and "    " in words.removeprefix("…    "):
        words = f"…    {words.removeprefix('…    ').split('    ', 1)[1]}"
    return words


def _look(column: Column) -> tuple[Colour, Colour, _Dash, str]:
    """Face, edge, dash and hatch of a column: never a colour alone."""
    if not column.right:
        return tint(ERROR), ERROR, "-", "xxxx"
    dash: _Dash = "-" if column.held is not None or column.role == "null" else ":"
    if column.role == "copy" and dash == "-":
        dash = "--"
    if column.role == "checkpoint":
        return tint(CHECKPOINT), CHECKPOINT, dash, "////" if column.held is not None else ""
    face = tint(STATE, 0.45 if column.role == "running" else 0.2)
    if column.held is None or column.role in ("null", "speculative"):
        face = (1.0, 1.0, 1.0)
    return face, _EDGES[column.role], dash, ""


def lanes_height(count: int, *, caption_lines: int | Sequence[int] = 0, keys: bool = True) -> float:
    """Return the height of so many lanes in em; each is nearer to its caption than to the next."""
    lines = [caption_lines] * count if isinstance(caption_lines, int) else caption_lines
    return sum((6.9 if keys else 5.7) + 1.25 * line + 0.6 * (line > 0) for line in lines)


def draw_lanes(
    ax: Axes,
    lanes: Sequence[Lane],
    *,
    notes: float = 0.0,
    caption_lines: int | Sequence[int] = 0,
    keys: bool = True,
    width: int | None = None,
) -> Axes:
    """Draw lanes, one below the other, and return the Axes.

    >>> geometry = CacheGeometry(1536, 1536, 16, 1536)
    >>> from mambackpt.draw import sheet, style
    >>> with style():
    ...     _, [ax] = sheet("One forward is enough.", [lanes_height(1)], left=6)
    ...     ax = draw_lanes(ax, [planned_lane(8000, 8000, geometry, label="8,000 tokens")])

    The arguments are those of `Lanes`; keep a `Lanes` instead to draw again and again.
    """
    drawn = Lanes(ax, notes=notes, caption_lines=caption_lines, keys=keys)
    return drawn.update(lanes, width=width)


_LEGEND: dict[str, str] = {
    "state": "state",
    "checkpoint": "checkpoint",
    "declined": "not saved",
    "hit": "hit",
    "error": "wrong state",
    "shared": "end of the shared prefix",
}
_COLUMN_LEGEND = {
    "reserved": (":", STATE, "reserved, still empty"),
    "copy": ("--", STATE, "private copy"),
}


def legend_of(lanes: Sequence[Lane]) -> list[str]:
    """Return which kinds of marks and columns of these lanes a legend has to name.

    >>> legend_of([planned_lane(8000, 8000, CacheGeometry(1536, 1536, 16, 1536))])
    ['checkpoint']
    """
    columns = [column for lane in lanes for column in lane.columns]
    kinds: list[str] = [mark.kind for lane in lanes for mark in lane.marks]
    kinds += ["error" for column in columns if not column.right]
    kinds += ["copy" for column in columns if column.role == "copy"]
    kinds += ["reserved" for c in columns if c.role != "null" and c.held is None]
    return [kind for kind in (*_LEGEND, *_COLUMN_LEGEND) if kind in kinds]


def legend_rows(kinds: Sequence[str], width: float) -> list[list[str]]:
    """Return the kinds in as many rows of ``width`` em as they need."""
    rows: list[list[str]] = [[]]
    left = width
    for kind in kinds:
        need = 3.4 + text_width(_legend_words(kind))
        if need > left and rows[-1]:
            rows.append([])
            left = width
        rows[-1].append(kind)
        left -= need
    return rows


def _legend_words(kind: str) -> str:
    return _LEGEND[kind] if kind in _LEGEND else _COLUMN_LEGEND[kind][2]


def draw_legend(ax: Axes, kinds: Sequence[str]) -> Axes:
    """Draw a legend of marks and columns over the width of an Axes of its own, and return it.

    >>> from mambackpt.draw import sheet, style
    >>> with style():
    ...     _, [_, ax] = sheet("Where it lands.", [lanes_height(1), 1.4])
    ...     ax = draw_legend(ax, ["checkpoint", "reserved"])
    """
    painter = _Painter(ax)
    width = em_wide(ax, painter.em)
    rows = legend_rows(kinds, width)
    ax.set_axis_off()
    ax.set(xlim=(0, width), ylim=(1.4 * len(rows), 0))
    for number, row in enumerate(rows):
        x, y = 0.6, 1.4 * number + 0.7
        for kind in row:
            if kind in _LEGEND:
                painter.mark(kind, x, y)
            else:
                dash, colour, _ = _COLUMN_LEGEND[kind]
                painter.box(x - 0.4, y - 0.5, 1.4, 1.0, "white", colour, cast(_Dash, dash))
            start = x + (0.8 if kind in _LEGEND else 1.5)
            painter.text(start, y, _legend_words(kind), "left")
            x = start + text_width(_legend_words(kind)) + 2
    painter.end()
    return ax


# What each mark and each kind of column means: the whole legend, drawn once.
_MARKS_TOLD: dict[_Kind, str] = {
    "checkpoint": "diamond: a checkpoint, a state saved inside a step, in passing",
    "declined": "hollow diamond: where a checkpoint would lie that is not saved",
    "state": "dot: a state where a step ends, or where a picture of a film has got to",
    "hit": "triangle: a hit, the tokens after which a request resumes",
    "error": "cross: another state than the one that is promised",
}
_COLUMNS_TOLD: dict[str, tuple[Column, str]] = {
    "null": (Column(), "thin outline: null, no block at all"),
    "reserved": (Column("running"), "dotted outline: a block is reserved, nothing is written yet"),
    "previous": (Column("previous", 1), "pale: holds the state that the step starts from"),
    "running": (Column("running", 1), "full: holds the newest state"),
    "checkpoint": (Column("checkpoint", 1), "hatched: holds a checkpoint"),
    "copy": (Column("copy", 1), "dashed outline: a private copy of a block that was hit"),
    "wrong": (Column("running", 1, right=False), "crossed hatching: holds a wrong state"),
}


def draw_full_legend(ax: Axes) -> Axes:
    """Draw every mark and every kind of column beside what it means, and return the Axes.

    >>> from mambackpt.draw import sheet, style
    >>> with style():
    ...     _, [ax] = sheet("What the marks mean.", [full_legend_height()])
    ...     ax = draw_full_legend(ax)
    """
    painter = _Painter(ax)
    ax.set_axis_off()
    ax.set(xlim=(0, em_wide(ax, painter.em)), ylim=(full_legend_height(), 0))
    rows: list[tuple[str, str | Column]] = [(told, kind) for kind, told in _MARKS_TOLD.items()]
    rows += [(told, column) for column, told in _COLUMNS_TOLD.values()]
    for number, (told, sample) in enumerate(rows):
        y = 1.9 * number + 0.9
        if isinstance(sample, Column):
            painter.box(0.5, y - 0.6, 4.5, 1.2, *_look(sample))
        else:
            painter.mark(sample, 2.75, y)
        painter.text(6, y, told, "left")
    painter.end()
    return ax


def full_legend_height() -> float:
    """Return the height of the whole legend in em."""
    return 1.9 * (len(_MARKS_TOLD) + len(_COLUMNS_TOLD)) + 0.2


def describe_full_legend() -> str:
    """Return the whole legend in words: an alt text.

    >>> describe_full_legend().split("; ")[2]
    'dot: a state where a step ends, or where a picture of a film has got to'
    """
    return "; ".join((*_MARKS_TOLD.values(), *(told for _, told in _COLUMNS_TOLD.values())))
