"""The export explorer: which program touches which bytes, in the plain shape and in ours.

Nothing is timed and nothing is moved: the kernels' own address arithmetic runs on paper.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.collections import PolyCollection

from mambackpt.bench import LAYERS, WARPS, Compilation, Touch, plan_on_paper, watch_program
from mambackpt.draw import (
    CHUNKS,
    FAINT_INK,
    STATE,
    Drawing,
    em_wide,
    left_margin,
    retitle,
    sheet,
    style,
    table_html,
    tint,
)
from mambackpt.errors import CheckpointValueError, checked_choice, checked_int
from mambackpt.explore.controls import Knob, Values, knob_widgets
from mambackpt.explore.widgets import Code, Explorer, Habits, Shown
from mambackpt.explore.words import command_line

_KERNELS = {"plain": "plain shape", "tiled": "ours"}
BUFFERS = ("raw_qkv", "conv_state", "recurrent_checkpoint", "recurrent_state")
LAYOUTS = ("token-first", "dim-first")
ROWS = 8  # checkpoints of one launch
_SECTOR = 32  # bytes: the least that memory gives at once
_WIDEST = 16  # bytes: the most that one access of a thread takes
_MOST_STRIPS = 3
_THREADS = 32 * WARPS
_WORDS = {
    "raw_qkv": "the inputs of the windows",
    "conv_state": "the pool of windows",
    "recurrent_checkpoint": "the emitted rows",
    "recurrent_state": "the pool of rows",
}


@dataclass(frozen=True, slots=True)
class Strip:
    """A stretch of memory: the byte it starts at, and the place that touches each element of it.

    ``boxes`` are (byte within the strip, place in the program's tile), of ``itemsize`` bytes.
    """

    start: int
    itemsize: int
    boxes: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class ExportView:
    """What a program of either kernel touches of a buffer: strips of memory, and numbers."""

    finding: str
    strips: tuple[tuple[Strip, ...], ...]
    programs: tuple[str, ...]
    rows: tuple[tuple[str | float, ...], ...]
    header: tuple[str, ...]

    def draw(self) -> Drawing:
        """Return the picture that the explorer shows: for a page without a kernel."""
        return ExportScreen(self).draw(self)

    def table(self) -> str:
        """Return the numbers of both kernels as an HTML table."""
        return table_html(self.header, self.rows, caption="One program of each kernel.")


def export_view(
    layer: str = "kimi-k3",
    buffer: str = "raw_qkv",
    *,
    program: int = 0,
    row: int = 0,
    token_first: bool = True,
    source_dtype: str = "float32",
    state_dtype: str = "float32",
) -> ExportView:
    """Return which bytes of a buffer a program touches, in the plain shape and in ours.

    >>> print(export_view("kimi-k3", "raw_qkv").finding)
    Neighbouring places of a program touch raw_qkv in runs of 2 bytes in the plain shape, of 8,192 \
in ours.

    ``program`` counts those that touch the buffer, from 0; where one kernel has fewer, its last is
    taken. ``row`` is the checkpoint's, of 8 in one launch. Windows are bfloat16. Raises
    CheckpointValueError for names and numbers that are not there.
    """
    checked_choice("layer", layer, LAYERS)
    checked_choice("buffer", buffer, BUFFERS)
    for name, dtype in (("source_dtype", source_dtype), ("state_dtype", state_dtype)):
        checked_choice(name, dtype, ("float32", "bfloat16"))
    number = checked_int("program", program, least=0, unit="programs")
    if checked_int("row", row, least=0, unit="rows") >= ROWS:
        raise CheckpointValueError(
            f"row is {row} and the launch has {ROWS} rows; expected one of them. Try {ROWS - 1}."
        )
    kinds = (source_dtype, state_dtype, token_first)
    first, last = zip(
        *(_touching(layer, kernel, buffer, *kinds) for kernel in _KERNELS), strict=True
    )
    if number > max(b - a for a, b in zip(first, last, strict=True)):
        most = max(b - a for a, b in zip(first, last, strict=True))
        raise CheckpointValueError(
            f"program is {number:,} and {most + 1:,} touch {buffer}; expected one of them, from 0. "
            f"Try {most}."
        )
    strips, told, rows, runs = [], [], [], []
    for kernel, a, b in zip(_KERNELS, first, last, strict=True):
        at = min(a + number, b)
        launch = _launch(layer, kernel, *kinds)
        touch = _touch(launch, at, row, buffer)
        strips.append(_strips_of(touch))
        told.append(f"{_KERNELS[kernel]}\nprogram {at:,}")
        rows.append(_numbers(_KERNELS[kernel], launch.grid[0], a, b, at, touch))
        runs.append(f"{touch.run_bytes:,.4g}")
    finding = (
        f"Neighbouring places of a program touch {buffer} in runs of {runs[0]} bytes in the plain "
        f"shape, of {runs[1]} in ours."
    )
    return ExportView(finding, tuple(strips), tuple(told), tuple(rows), _HEADER)


@lru_cache(maxsize=64)
def _launch(layer: str, kernel: str, source: str, state: str, token_first: bool) -> Any:
    request = Compilation(
        LAYERS[layer], kernel, source_dtype=source, state_dtype=state, token_first=token_first
    )
    return plan_on_paper(request, rows=ROWS)


def _touch(launch: Any, program: int, row: int, buffer: str) -> Touch:
    touches = watch_program(launch.kernel, launch.arguments, program=(program, row))
    [touch] = [touch for touch in touches if touch.buffer == buffer]
    return touch


@lru_cache(maxsize=256)
def _touching(
    layer: str, kernel: str, buffer: str, source: str, state: str, token_first: bool
) -> tuple[int, int]:
    """First and last program that touch a buffer: they stand at one end of the grid."""
    launch = _launch(layer, kernel, source, state, token_first)

    def touches(program: int) -> bool:
        seen = watch_program(launch.kernel, launch.arguments, program=(program, 0))
        return any(touch.buffer == buffer for touch in seen)

    low, high = 0, launch.grid[0] - 1
    from_the_start = touches(low)
    if from_the_start == touches(high):
        return low, high
    while high - low > 1:
        middle = (low + high) // 2
        if touches(middle) == from_the_start:
            low = middle
        else:
            high = middle
    return (0, low) if from_the_start else (high, launch.grid[0] - 1)


def _strips_of(touch: Touch) -> tuple[Strip, ...]:
    """The first sector of each stretch of memory that a program touches, lowest first."""
    at = touch.elements * touch.itemsize
    order = np.argsort(at, kind="stable")
    starts = [0, *(np.flatnonzero(np.diff(at[order]) > _SECTOR) + 1)][:_MOST_STRIPS]
    strips = []
    for start in starts:
        low = int(at[order[start]])
        near = [i for i in order[start : start + _SECTOR] if at[i] < low + _SECTOR]
        boxes = tuple((int(at[i]) - low, int(touch.places[i])) for i in near)
        strips.append(Strip(low, touch.itemsize, boxes))
    return tuple(strips)


_HEADER = (
    "kernel",
    "programs of a checkpoint",
    "touch it",
    "this program",
    "its bytes, from",
    "to",
    "places",
    "places a thread",
    "bytes a run",
    "accesses a thread, at least",
    "accesses per KiB, at least",
)


def _numbers(
    kernel: str, programs: int, first: int, last: int, at: int, touch: Touch
) -> tuple[str | float, ...]:
    """A row of the table; an access stays within a run and takes 16 bytes at most."""
    spots = touch.elements * touch.itemsize
    breaks = np.flatnonzero(np.diff(touch.elements) != 1) + 1
    runs = np.diff([0, *breaks, len(spots)]) * touch.itemsize
    accesses = int(np.ceil(runs / _WIDEST).sum())
    return (
        kernel,
        programs,
        f"{last - first + 1:,} ({first:,} to {last:,})",
        at,
        int(spots.min()),
        int(spots.max()) + touch.itemsize,
        len(spots),
        *(
            int(number) if number == int(number) else round(number, 2)
            for number in (
                len(spots) / _THREADS,
                touch.run_bytes,
                accesses / _THREADS,
                accesses * 1024 / touch.bytes,
            )
        ),
    )


# ---- the picture --------------------------------------------------------------------------------


class ExportScreen:
    """One figure that shows program after program with the same artists."""

    def __init__(self, view: ExportView) -> None:
        with style():
            self.figure, axes = sheet(
                "\n",
                [2.3 * _MOST_STRIPS] * len(view.strips),
                left=left_margin(["plain shape", "program 99,999", "byte 99,999,999,999"]),
                gap=4.6,
            )
            self._panels = [_Panel(ax) for ax in axes]

    def fits(self, view: ExportView) -> bool:
        """Return whether this figure has the places that the view needs."""
        return len(view.strips) == len(self._panels)

    def draw(self, view: ExportView) -> Drawing:
        """Draw another program in place of the last one."""
        retitle(self.figure, view.finding)
        told = []
        for panel, strips, program in zip(self._panels, view.strips, view.programs, strict=True):
            panel.update(strips, program)
            first = strips[0]
            places = ", ".join(str(place) for _, place in first.boxes[:6])
            name = program.replace("\n", ", ")
            told.append(f"{name}: from byte {first.start:,} on, places {places}, ...")
        return Drawing(self.figure, view.finding, f"{view.finding} {' '.join(told)}")


class _Panel:
    """Strips of memory on an Axes: a box for each element, and in it the place that touches it."""

    def __init__(self, ax: Any) -> None:
        self.ax = ax
        em = float(mpl.rcParams["font.size"])
        self._em = em_wide(ax, em) / _SECTOR  # em per byte
        ax.set(xlim=(0, _SECTOR), ylim=(_MOST_STRIPS, 0), yticks=[])
        ax.spines["left"].set_visible(False)
        ax.set_xticks(range(0, _SECTOR + 1, 4))
        self._boxes = PolyCollection([], linewidths=0.6, clip_on=False)
        self._empty = PolyCollection([], linewidths=0.6, clip_on=False)
        ax.add_collection(self._empty, autolim=False)
        ax.add_collection(self._boxes, autolim=False)
        self._places = [
            ax.text(0, 0, "", ha="center", va="center", fontsize=em, parse_math=False)
            for _ in range(_MOST_STRIPS * _SECTOR // 2)
        ]
        self._starts = [
            ax.text(-0.4, n + 0.5, "", ha="right", va="center", fontsize=em, color=FAINT_INK)
            for n in range(_MOST_STRIPS)
        ]

    def update(self, strips: Sequence[Strip], program: str) -> None:
        """Draw these strips."""
        self.ax.set_xlabel(f"bytes from the strip's first, touched by place ({_inline(program)})")
        texts = iter(self._places)
        boxes, faces, empty = [], [], []
        for n, strip in enumerate(strips):
            empty.append(_box(0, n, _SECTOR))
            for byte, place in strip.boxes:
                boxes.append(_box(byte, n, strip.itemsize))
                faces.append(tint(STATE, 0.25 + 0.2 * (place % 2)))
                text = next(texts)
                x = byte + strip.itemsize / 2
                text.set(x=x, y=n + 0.5, text=f"{place:,}", visible=True)
        for text in texts:
            text.set_visible(False)
        for n, start in enumerate(self._starts):
            start.set_text(f"byte {strips[n].start:,}" if n < len(strips) else "")
        self._boxes.set(verts=boxes, facecolor=faces, edgecolor="white")
        self._empty.set(verts=empty, facecolor="white", edgecolor=CHUNKS[1])


def _inline(program: str) -> str:
    return program.replace("\n", ", ")


def _box(x: float, y: float, width: float) -> list[tuple[float, float]]:
    return [(x, y + 0.1), (x + width, y + 0.1), (x + width, y + 0.9), (x, y + 0.9)]


# ---- the explorer -------------------------------------------------------------------------------


def export_knobs(layer: str = "kimi-k3", buffer: str = "raw_qkv") -> dict[str, Knob]:
    """Return what can be moved in an export view."""
    dtypes = ("float32", "bfloat16")
    return {
        "layer": Knob(label="layer of", option="layer", value=layer, choices=tuple(LAYERS)),
        "buffer": Knob(label="buffer", option="buffer", value=buffer, choices=BUFFERS),
        "layout": Knob(
            label="layout of windows", option="layout", value="token-first", choices=LAYOUTS
        ),
        "source": Knob(label="emitted rows", option="source", value="float32", choices=dtypes),
        "state": Knob(label="pool of rows", option="state", value="float32", choices=dtypes),
        "program": Knob(label="program", option="program", value=0, least=0, most=63),
        "row": Knob(label="row", option="row", value=0, least=0, most=ROWS - 1),
    }


def exported(
    layer: str, buffer: str, layout: str, source: str, state: str, program: int, row: int
) -> ExportView:
    """Return the export view of the knobs' values."""
    return export_view(
        layer,
        buffer,
        program=program,
        row=row,
        token_first=checked_choice("layout", layout, LAYOUTS) == "token-first",
        source_dtype=source,
        state_dtype=state,
    )


def _python_of(values: Values) -> str:
    layer, buffer, layout, source, state, program, row = values.values()
    return (
        f"from mambackpt.explore import export_view; view = export_view({layer!r}, {buffer!r}, "
        f"program={program}, row={row}, token_first={layout == 'token-first'}, "
        f"source_dtype={source!r}, state_dtype={state!r})"
    )


def explore_export(layer: str = "kimi-k3", buffer: str = "raw_qkv") -> Explorer:
    """Return an explorer of an export's addresses: row, layout and dtypes in, touched bytes out.

    >>> explorer = explore_export("qwen3-next", "conv_state")
    >>> "in the plain shape" in explorer.page
    True
    >>> explorer.close()

    Raises as `export_view` does.
    """
    knobs = export_knobs(layer, buffer)
    screens: list[ExportScreen] = []

    def shown(**values: Any) -> Shown:
        view = exported(**values)
        if not screens:
            screens.append(ExportScreen(view))
        return Shown(screens[0].draw(view), view.table(), view.draw)

    habits = Habits(
        name="export",
        code=lambda values: Code(command_line("export", knobs, values), _python_of(values)),
        labels={"source_dtype": "emitted rows", "state_dtype": "pool of rows"},
    )
    return Explorer(shown, knob_widgets(knobs), habits)
