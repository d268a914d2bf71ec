"""The engine explorer: a run step by step, what every block holds and what its keys claim."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import matplotlib as mpl
from ipywidgets import Button, Dropdown, HBox, Layout, Play, Widget
from matplotlib.collections import PolyCollection
from matplotlib.text import Text

from mambackpt.draw import (
    CHUNKS,
    ERROR,
    GREY,
    INK,
    STATE,
    Column,
    Drawing,
    Lane,
    Lanes,
    Mark,
    describe_lanes,
    lanes_height,
    left_margin,
    retitle,
    sheet,
    style,
    table_html,
    tint,
)
from mambackpt.engine import (
    VARIANTS,
    Aborted,
    Allocated,
    Cell,
    Copied,
    Deferred,
    Event,
    Evicted,
    Finished,
    Freed,
    Hit,
    Keyed,
    PoolBlock,
    Preempted,
    Request,
    Scheduled,
    Settings,
    Simulation,
    Snapshot,
    TableRow,
    Unkeyed,
    Written,
    find_variant,
)
from mambackpt.errors import CheckpointValueError, checked_choice, checked_int
from mambackpt.explore.controls import Knob, Number, Values, knob_widgets
from mambackpt.explore.widgets import Code, Explorer, Habits, Shown
from mambackpt.explore.words import command_line
from mambackpt.figures import puzzle_requests

_GROUP = 1  # the recurrent group that is drawn; the others of a story move alike
_MOST_LANES, _MOST_BLOCKS, _PER_ROW = 3, 21, 7
_MOST_NAMED = 4  # columns whose blocks a lane names


@dataclass(frozen=True, slots=True)
class Story:
    """Requests and settings worth stepping through, and what to look for."""

    about: str
    requests: tuple[Request, ...]
    settings: Settings


def _chat(prompt: int, shared: int, length: int, third: int) -> tuple[Request, ...]:
    """A, a turn that begins with ``shared`` tokens of A's history, and one that begins as it."""
    first = Request("A", range(prompt), range(1000, 1031))
    second = Request("B", [*first.history[:shared], *range(2000, 2000 + length - shared)])
    return first, second, Request("C", [*second.prompt[:third], 3000])


def _puzzle(shared: int, unique: int) -> Story:
    settings = Settings(
        mamba_block_size=528,
        hash_block_size=528,
        checkpoint_alignment=None,
        internal_checkpoints=False,
        retention=None,
        budget=2048,
        max_running=1,
        # A rule without the stop at the end of a shared prefix.
        variant=replace(find_variant("vllm-0.33"), name="no junction", junction_stop=lambda *_: 0),
    )
    about = f"{shared:,} shared and {unique:,} own tokens, states only where a chunk ends"
    return Story(about, tuple(puzzle_requests(shared, unique)[:4]), settings)


STORIES: dict[str, Callable[[], Story]] = {
    "mid-block-hit": lambda: Story(
        "B resumes inside a block, from the state that A's checkpoint left",
        (Request("A", range(100), 3), Request("B", [*range(100), *range(2000, 2100)], 3)),
        Settings(max_running=1),
    ),
    "released-fault": lambda: Story(
        "B resumes inside a block and runs past its end, whose key then leads to another state",
        _chat(34, 65, 129, 64),
        Settings(max_running=1),
    ),
    "puzzle-1500": lambda: _puzzle(1500, 700),
    "puzzle-1600": lambda: _puzzle(1600, 600),
    "preemption": lambda: Story(
        "two requests grow until the pool is full: one gives its blocks back and starts again",
        (Request("A", range(126), 6), Request("B", range(500, 626), 6)),
        Settings(pool_blocks=9),
    ),
}


@dataclass(frozen=True, slots=True)
class EngineView:
    """One step of a simulation: a finding, the requests' lanes, the pool's blocks, the events.

    ``hidden`` counts blocks of the pool beyond those shown; ``slots`` are the lanes and the rows of
    blocks that every step of the same run has room for.
    """

    finding: str
    lanes: tuple[Lane, ...]
    blocks: tuple[PoolBlock, ...]
    hidden: int
    rows: tuple[tuple[str, str], ...]
    slots: tuple[int, int]

    def draw(self) -> Drawing:
        """Return the picture that the explorer shows: for a page without a kernel."""
        return EngineScreen(self).draw(self)

    def table(self) -> str:
        """Return the step's events in words, as an HTML table."""
        return table_html(("request", "what happens"), self.rows, caption="This step, in order.")


@dataclass(frozen=True, slots=True)
class _Moment:
    """A step that was run: its snapshot, the pool, and the lanes of the requests so far."""

    snapshot: Snapshot
    blocks: tuple[PoolBlock, ...]
    lanes: tuple[Lane, ...]


def run_moments(requests: Sequence[Request], settings: Settings) -> tuple[_Moment, ...]:
    """Run the requests and return each step as it can be looked at.

    >>> moments = run_moments([Request("A", range(100))], Settings())
    >>> [block.block for block in moments[0].blocks]
    [1, 2, 3, 4]

    Raises as `mambackpt.engine.simulate` does.
    """
    simulation = Simulation(requests, settings)
    block = settings.mamba_block_size
    waiting = {
        request.name: Lane(request.name, block, 0, (), total=len(request.prompt))
        for request in requests
    }
    seen: dict[str, Lane] = {}
    moments = []
    for events in simulation:
        snapshot = simulation.snapshot(events)
        for row in snapshot.rows:
            if row.group == _GROUP:
                seen.pop(row.request, None)  # the newest last
                seen[row.request] = _lane_of(row, events, block, waiting[row.request].total)
        for event in events:
            if isinstance(event, Preempted):
                seen[event.request] = _labelled(waiting[event.request], "preempted")
        shown = [name for name in waiting if name in [*seen][-_MOST_LANES:]]
        spare = [name for name in waiting if name not in seen]
        shown += spare[: _MOST_LANES - len(shown)]
        lanes = tuple(seen.get(name, waiting[name]) for name in waiting if name in shown)
        moments.append(_Moment(snapshot, simulation.blocks(), lanes))
        for event in events:
            if isinstance(event, Finished):
                seen[event.request] = _labelled(seen[event.request], "done")
    return tuple(moments)


def _labelled(lane: Lane, became: str) -> Lane:
    return replace(lane, label=f"{lane.label}\n{became}")


def _lane_of(row: TableRow, events: Sequence[Event], block: int, prompt: int) -> Lane:
    """A request's row after a step: what it ran in it, and what its columns hold."""
    mine = [event for event in events if event.request == row.request]
    ran = next((event for event in mine if isinstance(event, Scheduled)), None)
    start, ends = (ran.start, (ran.end,)) if ran else (row.computed, ())
    columns = [Column()] * max(row.width, 1)
    for cell in row.cells:
        columns[cell.column] = _column_of(cell, row.computed)
    marks = []
    for event in mine:
        if isinstance(event, Hit) and event.group == _GROUP:
            at = (event.position - 1) // block
            right = columns[at].right or columns[at].held == event.position
            marks.append(Mark(event.position, "hit" if right else "error", at))
        elif isinstance(event, Written) and event.group == _GROUP and event.position < row.computed:
            marks.append(Mark(event.position, "checkpoint", event.column))
    held = [f"{cell.column} is block {cell.block}" for cell in row.cells]
    more = "... " if len(held) > _MOST_NAMED else ""
    caption = f"Column {more}{', '.join(held[-_MOST_NAMED:])}." if held else ""
    total = max(prompt, row.computed)
    return Lane(
        row.request, block, start, ends, tuple(columns), tuple(marks), total, caption=caption
    )


def _column_of(cell: Cell, computed: int) -> Column:
    role: Any = cell.role if cell.role in ("running", "checkpoint", "speculative") else "previous"
    right = cell.right or not cell.keyed
    if role == "running" and cell.held is not None:
        right = right and cell.held == computed  # after a wrong restore it counts other tokens
    return Column(role, cell.held, max(cell.keyed, default=None), right)


@lru_cache(maxsize=32)
def _moments_of(story: str, variant: str) -> tuple[_Moment, ...]:
    told = STORIES[story]()
    settings = replace(told.settings, variant=variant) if variant else told.settings
    return run_moments(told.requests, settings)


def engine_view(story: str, step: int = 1, *, variant: str | None = None) -> EngineView:
    """Return one step of a story, counted from 1, as the engine's model runs it.

    >>> view = engine_view("mid-block-hit", 4)
    >>> print(view.finding)
    Step 4 of 6: B resumes after 96 tokens and runs tokens 96 to 200.

    ``story`` is a name of `STORIES`, ``variant`` one of `mambackpt.engine.VARIANTS` (None: the
    story's own rules). Raises CheckpointValueError for another name, and for a step that the run
    does not have.
    """
    checked_choice("story", story, STORIES)
    if variant:
        checked_choice("variant", variant, VARIANTS)
    moments = _moments_of(story, variant or "")
    return run_view(moments, step)


def run_view(moments: Sequence[_Moment], step: int) -> EngineView:
    """Return one step of a run of yours, as `run_moments` gives it.

    >>> moments = run_moments([Request("A", range(100))], Settings())
    >>> run_view(moments, 1).finding
    'Step 1 of 1: A runs tokens 0 to 100.'

    Raises CheckpointValueError for a step that the run does not have.
    """
    number = checked_int("step", step, unit="steps")
    if number > len(moments):
        raise CheckpointValueError(
            f"step is {number:,} and the run has {len(moments):,}; expected one of them. "
            f"Try {len(moments)}."
        )
    moment = moments[number - 1]
    shown, hidden = _worth_showing(moment)
    most = min(_MOST_BLOCKS, max(len(m.blocks) for m in moments))
    slots = len(moment.lanes), -(-most // _PER_ROW)
    rows = tuple((event.request, _words_of(event)) for event in moment.snapshot.events)
    finding = f"Step {number:,} of {len(moments):,}: {_told(moment)}"
    return EngineView(finding, moment.lanes, shown, hidden, rows, slots)


def _worth_showing(moment: _Moment) -> tuple[tuple[PoolBlock, ...], int]:
    """The blocks that are drawn: wrong ones, then those in use, then the newest, by number."""
    ranked = sorted(moment.blocks, key=lambda b: (b.right, not b.refs, -b.block))[:_MOST_BLOCKS]
    shown = tuple(sorted(ranked, key=lambda block: block.block))
    return shown, len(moment.blocks) - len(shown)


def _told(moment: _Moment) -> str:
    """What a step did, in one sentence; what is wrong comes first."""
    wrong = [block for block in moment.blocks if not block.right]
    parts = []
    hits = {e.request: e for e in moment.snapshot.events if isinstance(e, Hit)}
    for event in moment.snapshot.events:
        who = event.request
        if isinstance(event, Scheduled):
            words = f"runs tokens {event.start:,} to {event.end:,}"
            if who in hits:
                words = f"resumes after {hits[who].position:,} tokens and {words}"
            parts.append(f"{who} {words}")
        elif isinstance(event, Preempted | Aborted | Deferred):
            parts.append(f"{who} {_words_of(event)}")
    sentence = "; ".join(parts) + "." if parts else "nothing runs."
    if wrong:
        [block, *_] = wrong
        keys = " and ".join(f"{key:,}" for key in block.keyed)
        sentence += (
            f" Block {block.block} is found under {keys} and holds the state after "
            f"{block.held or 0:,}."
        )
    return sentence


def _words_of(event: Event) -> str:
    """What an event says after its request's name."""
    if isinstance(event, Scheduled):
        return f"runs tokens {event.start:,} to {event.end:,}"
    if isinstance(event, Deferred):
        return f"waits: {event.reason}"
    if isinstance(event, Allocated):
        return f"takes block {event.block} for column {event.column} ({event.role})"
    if isinstance(event, Copied):
        return f"has block {event.source} copied to block {event.target}"
    if isinstance(event, Written):
        return f"writes the state after {event.position:,} tokens to block {event.block}"
    if isinstance(event, Keyed):
        return f"enters a key: the first {event.position:,} tokens lead to block {event.block}"
    if isinstance(event, Unkeyed):
        return f"takes the key of {event.position:,} tokens from block {event.block}"
    if isinstance(event, Hit):
        return f"finds block {event.block} for its first {event.position:,} tokens"
    if isinstance(event, Evicted):
        return f"reuses block {event.block}, which loses its key of {event.position:,} tokens"
    if isinstance(event, Freed):
        return f"lets go of block {event.block}"
    if isinstance(event, Preempted):
        return "is preempted: it gives its blocks back and starts again"
    if isinstance(event, Aborted):
        return "is aborted"
    assert isinstance(event, Finished)
    return "has its last token"


# ---- the picture --------------------------------------------------------------------------------


class EngineScreen:
    """One figure that shows step after step with the same artists."""

    def __init__(self, view: EngineView) -> None:
        self._slots = view.slots
        lanes, rows = view.slots
        with style():
            self.figure, [top, bottom] = sheet(
                "\n",
                [lanes_height(lanes, caption_lines=1), 4.7 * rows],
                left=left_margin(["preempted", *(lane.label for lane in view.lanes)]),
                gap=4.6,
            )
            self._lanes = Lanes(top, caption_lines=1)
            self._pool = _Pool(bottom, rows)

    def fits(self, view: EngineView) -> bool:
        """Return whether this figure has the places that the view needs."""
        return self._slots == view.slots

    def draw(self, view: EngineView) -> Drawing:
        """Draw another step in place of the last one."""
        retitle(self.figure, view.finding)
        self._lanes.update(view.lanes)
        self._pool.update(view.blocks, view.hidden)
        blocks = "; ".join(_block_words(block).replace("\n", ", ") for block in view.blocks)
        alt = f"{view.finding} {describe_lanes(view.lanes)} Blocks of the pool: {blocks or 'none'}."
        return Drawing(self.figure, view.finding, alt)


def _block_words(block: PoolBlock) -> str:
    keys = "+".join(f"{key:,}" for key in block.keyed) or "none"
    keys = f"key {keys}" if len(keys) <= 8 else f"{len(block.keyed)} keys, {block.keyed[-1]:,}"
    head = f"#{block.block}  ×{block.refs}"
    if block.group == 0:
        return f"{head}\nattention\n{keys}"
    held = "nothing" if block.held is None else f"{block.held:,}"
    return f"{head}\nholds {held}\n{keys}"


class _Pool:
    """The pool's blocks as boxes on an Axes; each repaint reuses what the last one left."""

    def __init__(self, ax: Any, rows: int) -> None:
        self._em = float(mpl.rcParams["font.size"])
        line = 0.6 * float(mpl.rcParams["lines.linewidth"])
        ax.set_axis_off()
        ax.set(xlim=(0, _PER_ROW), ylim=(rows, 0))
        self._plain = PolyCollection([], linewidths=line, clip_on=False)
        self._wrong = PolyCollection([], linewidths=line, hatch="xxxx", clip_on=False)
        self._plates = PolyCollection([], linewidths=0, clip_on=False)
        for boxes in (self._plain, self._wrong, self._plates):
            ax.add_collection(boxes, autolim=False)
        self._texts = [
            ax.text(
                n % _PER_ROW + 0.48, n // _PER_ROW + 0.45, "", ha="center", va="center",
                parse_math=False, fontsize=self._em, linespacing=1.15,
            )
            for n in range(rows * _PER_ROW)
        ]  # fmt: skip
        self._note: Text = ax.text(0, rows + 0.08, "", va="top", fontsize=self._em)

    def update(self, blocks: Sequence[PoolBlock], hidden: int) -> None:
        """Draw these blocks, and say how many more there are."""
        plain, faces, edges, dashes, wrong, plates = [], [], [], [], [], []
        for n, block in enumerate(blocks):
            x, y = n % _PER_ROW, n // _PER_ROW
            box = _corners(x, y, 0.96, 0.9)
            if not block.right:
                wrong.append(box)
                plates.append(_corners(x + 0.06, y + 0.06, 0.84, 0.78))
                continue
            strength = 0.45 if block.refs else 0.12
            plain.append(box)
            faces.append(tint(STATE, strength) if block.group else tint(CHUNKS[0], strength * 1.6))
            edges.append(STATE if block.group else GREY)
            dashes.append("-" if block.refs else ":")
        self._plain.set(verts=plain, facecolor=faces, edgecolor=edges, linestyle=dashes or "-")
        self._wrong.set(verts=wrong, facecolor=tint(ERROR), edgecolor=ERROR)
        self._plates.set(verts=plates, facecolor=tint(ERROR))
        for n, text in enumerate(self._texts):
            words = _block_words(blocks[n]) if n < len(blocks) else ""
            text.set(text=words, color=INK, visible=bool(words))
        more = f" {hidden:,} more are not shown." if hidden else ""
        self._note.set_text(
            "Blocks of the pool: number, ×references (0: only its key keeps it), what it\n"
            f"holds and what it is found under, in tokens.{more}"
        )


def _corners(x: float, y: float, width: float, height: float) -> list[tuple[float, float]]:
    return [(x, y), (x + width, y), (x + width, y + height), (x, y + height)]


# ---- the explorer -------------------------------------------------------------------------------


def engine_knobs(story: str = "mid-block-hit", step: int = 1) -> dict[str, Knob]:
    """Return what can be moved in an engine view."""
    most = len(_moments_of(checked_choice("story", story, STORIES), ""))
    return {
        "story": Knob(label="story", option="story", value=story, choices=tuple(STORIES)),
        "variant": Knob(
            label="scheduler rules",
            option="variant",
            value="",
            choices=("", *VARIANTS),
            none="the story's own",
        ),
        "step": Knob(label="step", option="step", value=step, most=most),
    }


def stepped(story: str, variant: str, step: int) -> EngineView:
    """Return the engine view of the knobs' values."""
    return engine_view(story, step, variant=variant or None)


def _python_of(values: Values) -> str:
    story, variant, step = values.values()
    rules = f", variant={variant!r}" if variant else ""
    return (
        f"from mambackpt.explore import engine_view; view = engine_view({story!r}, {step}{rules})"
    )


def explore_engine(story: str = "mid-block-hit", step: int = 1) -> Explorer:
    """Return an explorer of a simulation: play it, step through it, or jump to a request.

    >>> explorer = explore_engine("released-fault")
    >>> "Step 1 of" in explorer.page
    True
    >>> explorer.close()

    ``story`` is a name of `STORIES`. Raises as `engine_view` does.
    """
    knobs = engine_knobs(story, step)
    controls = knob_widgets(knobs)
    number: Number = controls["step"]
    screens: list[EngineScreen] = []

    def shown(story: str, variant: str, step: int) -> Shown:
        view = stepped(story, variant, step)
        if not screens or not screens[0].fits(view):
            screens[:] = [EngineScreen(view)]
        return Shown(screens[0].draw(view), view.table(), view.draw)

    film = _Film(number)

    def carry(values: Values, before: Values) -> Mapping[str, Any]:
        carried = dict(values)
        moments = _moments_of(values["story"], values["variant"])
        if values["story"] != before["story"]:
            carried["step"] = 1
        elif values["variant"] != before["variant"]:
            carried["step"] = min(values["step"], len(moments))
        number.stretch(len(moments))
        film.offer(moments)
        return carried

    habits = Habits(
        name="engine",
        carry=carry,
        code=lambda values: Code(command_line("engine", knobs, values), _python_of(values)),
    )
    return Explorer(shown, controls, habits, beside=[film])


class _Film(HBox):  # type: ignore[misc]
    """Play, step, and jump: buttons that move a number; nothing else knows of them."""

    def __init__(self, number: Number) -> None:
        self._number = number
        self.play = Play(value=number.value, min=1, max=1, interval=700)
        self.jump = Dropdown(
            options=[("any request", 0)], value=0, description="go to", layout=Layout(width="17em")
        )
        moves: dict[str, Callable[[int], int]] = {
            "|◀ first": lambda step: 1,
            "◀ back": lambda step: max(step - 1, 1),
            "next ▶": lambda step: min(step + 1, number.slider.max),
            "last ▶|": lambda step: int(number.slider.max),
        }
        buttons: list[Widget] = []
        for words, move in moves.items():
            button = Button(description=words, layout=Layout(width="auto"))
            button.on_click(lambda _, move=move: self._go(move(number.value)))
            buttons.append(button)
        super().__init__([*buttons[:2], self.play, *buttons[2:], self.jump])
        self.play.observe(lambda change: self._go(change["new"]), "value")
        self.jump.observe(self._jumped, "value")
        number.observe(self._agree, "value")

    def offer(self, moments: Sequence[_Moment]) -> None:
        """Know how long the run is, and in which step each request first runs."""
        if self.play.max != len(moments):
            self.play.max = len(moments)
        first: dict[str, int] = {}
        for step, moment in enumerate(moments, start=1):
            for event in moment.snapshot.events:
                if isinstance(event, Scheduled):
                    first.setdefault(event.request, step)
        options = [("any request", 0), *((f"request {name}", at) for name, at in first.items())]
        if tuple(options) != tuple(self.jump.options):
            self.jump.options = options

    def _go(self, step: int) -> None:
        self._number.value = step

    def _jumped(self, _: object) -> None:
        if self.jump.value:
            self._go(self.jump.value)

    def _agree(self, _: object) -> None:
        if 1 <= self._number.value <= self.play.max:
            self.play.value = self._number.value
        if self.jump.value not in (0, self._number.value):
            self.jump.value = 0
