"""Explorers of lanes: one query, or one prompt that is sent twice. H, M, U, A as in the planner."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

from ipywidgets import Widget

from mambackpt.draw import (
    Drawing,
    Lane,
    Lanes,
    describe_lanes,
    lanes_height,
    left_margin,
    numeral,
    planned_lane,
    prefilled_lanes,
    retitle,
    sheet,
    style,
    table_html,
)
from mambackpt.engine import Request, Settings
from mambackpt.errors import CheckpointValueError, checked_int
from mambackpt.explore.controls import Knob, Values, follow, knob_widgets, labels_of
from mambackpt.explore.widgets import Code, Explorer, Habits, Shown
from mambackpt.explore.words import command_line
from mambackpt.geometry import CacheGeometry
from mambackpt.planner import Decision, Reason, explain

# What a view draws and runs through at once, in a tenth of a second; more would freeze the page.
MOST_COLUMNS, MOST_STEPS = 8192, 1024
_USUAL = CacheGeometry(1536, 1536, 16, 1536)


@dataclass(frozen=True, slots=True)
class View:
    """What an explorer says and shows for one choice of numbers: a finding, lanes, a table."""

    finding: str
    lanes: tuple[Lane, ...]
    rows: tuple[tuple[str, ...], ...] = ()
    header: tuple[str, ...] = ()
    caption: str = ""

    def draw(self) -> Drawing:
        """Return the picture that an explorer shows: for a page without a kernel.

        >>> placement_view(8000, 0, CacheGeometry(1536, 1536, 16, 1536)).draw().finding[:44]
        'The state after 7,680 tokens is saved 7,680 '
        """
        return Screen(self).draw(self)

    def table(self) -> str:
        """Return the table below the picture as HTML; nothing where there is none."""
        return table_html(self.header, self.rows, caption=self.caption) if self.rows else ""


def placement_view(seq_len: int, start: int, geometry: CacheGeometry) -> View:
    """Return where the checkpoint of one query lands, and which of the six conditions decides.

    >>> view = placement_view(3602, 1984, CacheGeometry(16, 1600, 16, 16))
    >>> print(view.finding)
    The query starts at 1,984, which is inside column 1, the column the checkpoint would overwrite.
    >>> [row[0] for row in view.rows if row[2].endswith("fails")]
    ['3 its column is free']

    Tokens of the request after the step, and those computed before it. Raises CheckpointValueError
    for a start that leaves nothing to compute.
    """
    checked_int("tokens in all", seq_len)
    if not 0 <= start < seq_len:
        raise CheckpointValueError(
            f"computed before is {start:,} and tokens in all is {seq_len:,}; expected at least one "
            f"token to compute. Try {seq_len - 1:,} or less computed before."
        )
    _refuse_too_much(seq_len, geometry.M)
    [decision] = explain([seq_len], [seq_len - start], geometry)
    lane = planned_lane(seq_len, seq_len - start, geometry, label="this query")
    return View(
        decision.sentence,
        (replace(lane, caption=""),),
        tuple(_conditions(decision, seq_len, start, geometry)),
        ("condition", "with these numbers", ""),
        "Six conditions, asked in this order.",
    )


def _conditions(
    decision: Decision, seq_len: int, start: int, g: CacheGeometry
) -> Iterable[tuple[str, str, str]]:
    """Each condition, with these numbers, and whether it holds; after one fails none is asked."""
    at, candidate = decision.position, decision.candidate_column
    read = numeral((start - 1) // g.M if start else -1, ",")
    read += ", which its state is read from" if start else ": it reads none"
    asked = {
        "1 the kernel can export": f"A is {g.A:,}" if g.A else "it has no grid",
        "2 starts on a hash unit": f"{start:,} = {_division(start, g.H)}",
        "3 its column is free": f"{numeral(candidate, ',')} > {read}",
        "4 gains a hash unit": f"{start:,} + {g.H:,} ≤ {at:,}",
        "5 lies inside the query": f"{start:,} < {at:,} < {seq_len:,}",
        "6 lies on the kernel's grid": f"{at:,} − {start:,} = {_division(at - start, g.A or 1)}",
    }
    failed = decision.reason.value
    for place, (condition, numbers) in enumerate(asked.items(), start=1):
        if decision.reason is Reason.ACCEPTED or place < failed:
            yield condition, numbers, "✓ holds"
        elif place == failed:
            yield condition, numbers, "✗ fails"
        else:
            yield condition, "", "– not asked"


def _division(number: int, unit: int) -> str:
    return f"{number // unit:,} × {unit:,} + {number % unit:,}"


def sequence_view(prompt: int, budget: int, geometry: CacheGeometry) -> View:
    """Return what is left of a prompt in its blocks, and what the same prompt computes again.

    >>> view = sequence_view(8000, 8192, CacheGeometry(1536, 1536, 16, 1536))
    >>> print(view.finding)
    A second prompt of 8,000 tokens computes 320: it resumes from the state saved after 7,680.

    Tokens of the prompt, and of one step at most. Raises as `mambackpt.engine.simulate`, and for
    more than 8,192 columns or 1,024 steps.
    """
    tokens = range(checked_int("prompt", prompt))
    checked_int("budget", budget)
    _refuse_too_much(prompt, geometry.M, budget)
    settings = Settings(
        mamba_block_size=geometry.M,
        hash_block_size=geometry.H,
        checkpoint_alignment=geometry.A,
        cache_hit_alignment_tokens=geometry.U,
        drop_eagle_block=geometry.drop_eagle_block,
        num_hash_lookahead_tokens=geometry.num_hash_lookahead_tokens,
        budget=budget,
        max_running=1,
    )
    twice = [Request("first prompt", tokens), Request("same prompt", tokens)]
    first, second = prefilled_lanes(twice, settings)
    [decision] = explain([prompt], [prompt - [0, *first.lane.ends][-2]], geometry)
    words = second.sentence.split(": ", 1)[1]
    lanes = (
        replace(first.lane, caption=decision.sentence),
        replace(second.lane, caption=words[0].upper() + words[1:]),
    )
    resumed = second.lane.start
    finding = f"A second prompt of {prompt:,} tokens computes {prompt - resumed:,}: "
    finding += (
        f"it resumes from the state saved after {resumed:,}."
        if resumed
        else "no state of its prefix was kept."
    )
    return View(finding, lanes)


def _refuse_too_much(tokens: int, block: int, budget: int | None = None) -> None:
    """Refuse what would take seconds to compute and could not be read."""
    columns, steps = -(-tokens // block), -(-tokens // budget) if budget else 0
    if columns > MOST_COLUMNS:
        raise CheckpointValueError(
            f"{tokens:,} tokens in blocks of {block:,} have {columns:,} columns; expected at most "
            f"{MOST_COLUMNS:,} here. Try mamba_block_size={_rounded(tokens / MOST_COLUMNS)}."
        )
    if budget and steps > MOST_STEPS:
        raise CheckpointValueError(
            f"{tokens:,} tokens take {steps:,} steps of {budget:,}; expected at most "
            f"{MOST_STEPS:,} here. Try budget={_rounded(tokens / MOST_STEPS)}."
        )


def _rounded(least: float) -> int:
    """The least power of two that is not below."""
    return 1 << max(0, int(-(-least // 1) - 1).bit_length())


class Screen:
    """One figure that shows view after view with the same artists."""

    def __init__(self, view: View) -> None:
        self._shape = self._shape_of(view)
        with style():
            self.figure, [ax] = sheet(
                "\n",  # room for a finding of two lines
                [lanes_height(len(view.lanes), caption_lines=self._shape[1])],
                left=left_margin(lane.label for lane in view.lanes),
            )
            self._lanes = Lanes(ax, caption_lines=self._shape[1])

    @staticmethod
    def _shape_of(view: View) -> tuple[int, int]:
        return len(view.lanes), 2 if any(lane.caption for lane in view.lanes) else 0

    def fits(self, view: View) -> bool:
        """Return whether this figure has the places that the view needs."""
        return self._shape_of(view) == self._shape

    def draw(self, view: View) -> Drawing:
        """Draw another view in place of the last one."""
        retitle(self.figure, view.finding)
        self._lanes.update(view.lanes)
        alt = f"{view.finding} {describe_lanes(view.lanes)}".strip()
        return Drawing(self.figure, view.finding, alt)


def explore_views(view: Callable[..., View], **controls: Widget) -> Explorer:
    """Return an explorer of lanes: controls above the view that a function makes of their values.

    >>> from ipywidgets import IntSlider
    >>> tokens = IntSlider(value=3, min=1, max=9)
    >>> explorer = explore_views(lambda tokens: View(f"{tokens} tokens.", ()), tokens=tokens)
    >>> "3 tokens." in explorer.page
    True
    >>> explorer.close()

    One figure shows all views that have as many lanes, which saves most of a redraw. Raises what
    ``view`` raises for the first values; otherwise as `explore`.
    """
    view(**{name: control.value for name, control in controls.items()})
    return explore_knobs_of(view, controls, Habits())


def explore_knobs_of(
    view: Callable[..., View], controls: dict[str, Widget], habits: Habits
) -> Explorer:
    """Return an explorer of lanes with habits of its own; one figure shows all its views."""
    screens: list[Screen] = []

    @wraps(view)
    def shown(**values: Any) -> Shown:
        made = view(**values)
        if not screens or not screens[0].fits(made):
            screens[:] = [Screen(made)]
        return Shown(screens[0].draw(made), made.table(), made.draw)

    return Explorer(shown, controls, habits)


# ---- what can be moved --------------------------------------------------------------------------

_PARAMETERS = {
    "mamba_block_size": "M",
    "hash_block_size": "H",
    "cache_hit_alignment_tokens": "U",
    "checkpoint_alignment": "A",
}


def geometry_knobs(g: CacheGeometry) -> dict[str, Knob]:
    """Return the knobs of a cache's sizes, by the planner's letters, and of the drop."""
    size: dict[str, Any] = {"most": 16384, "step": 16, "least": 16}
    grids = tuple(sorted({0, 1, 16, 64, 128, g.A or 0}))
    return {
        "M": Knob(label="block M", option="block", value=g.M, **size),
        "H": Knob(label="hash unit H", option="hash", value=g.H, **size),
        "U": Knob(label="hit alignment U", option="hit-alignment", value=g.U, **size),
        "A": Knob(
            label="kernel grid A",
            option="alignment",
            value=g.A or 0,
            choices=grids,
            none="cannot export",
        ),
        "drop": Knob(label="drop a unit", option="drop", value=g.drop_eagle_block),
    }


def placement_knobs(
    seq_len: int = 8000, start: int = 0, geometry: CacheGeometry = _USUAL
) -> dict[str, Knob]:
    """Return what can be moved in a placement view."""
    return {
        "seq_len": Knob(label="tokens in all L", option="tokens", value=seq_len, most=16384),
        "start": Knob(label="computed before", option="computed", value=start, least=0, most=16384),
        **geometry_knobs(geometry),
    }


def sequence_knobs(
    prompt: int = 8000, budget: int = 8192, geometry: CacheGeometry = _USUAL
) -> dict[str, Knob]:
    """Return what can be moved in a sequence view."""
    return {
        "prompt": Knob(label="prompt", option="prompt", value=prompt, most=16384),
        "budget": Knob(
            label="tokens per step", option="budget", value=budget, least=64, most=16384, step=64
        ),
        **geometry_knobs(geometry),
    }


def placed(seq_len: int, start: int, **sizes: Any) -> View:
    """Return the placement view of the knobs' values."""
    return placement_view(seq_len, start, _geometry(**sizes))


def sequenced(prompt: int, budget: int, **sizes: Any) -> View:
    """Return the sequence view of the knobs' values."""
    return sequence_view(prompt, budget, _geometry(**sizes))


def _geometry(M: int, H: int, U: int, A: int, drop: bool) -> CacheGeometry:
    return CacheGeometry(H, M, A or None, U, drop)


def lanes_python(function: str) -> Callable[[Values], str]:
    """Return what writes the Python line that calls a view of two lengths and a geometry."""

    def line(values: Values) -> str:
        one, other, M, H, U, A, drop = values.values()
        sizes = f"{H}, {M}, {A or None}, {U}{', True' if drop else ''}"
        return (
            f"from mambackpt import CacheGeometry; from mambackpt.explore import {function}; "
            f"view = {function}({one}, {other}, CacheGeometry({sizes}))"
        )

    return line


def _explore_knobs(
    name: str, view: Callable[..., View], knobs: dict[str, Knob], parameters: Mapping[str, str]
) -> Explorer:
    python = lanes_python(f"{name}_view")
    habits = Habits(
        name=name,
        carry=follow,
        code=lambda values: Code(command_line(name, knobs, values), python(values)),
        labels=labels_of(knobs, {**_PARAMETERS, **parameters}),
    )
    return explore_knobs_of(view, knob_widgets(knobs), habits)


def explore_placement(
    seq_len: int = 8000, start: int = 0, geometry: CacheGeometry | None = None
) -> Explorer:
    """Return an explorer of one query: lengths and sizes in, lane, column and conditions out.

    >>> explorer = explore_placement(3602, 1984, CacheGeometry(16, 1600, 16, 16))
    >>> "inside column 1" in explorer.page
    True
    >>> explorer.close()

    Starts at these numbers (default: blocks and hash units of 1,536 tokens, a kernel grid of 16);
    raises as `placement_view` does. U follows H, and M takes both along, until you part them. Keep
    it and `close` it, or leave it to the kernel's end.
    """
    knobs = placement_knobs(seq_len, start, geometry or _USUAL)
    return _explore_knobs("placement", placed, knobs, {})


def explore_sequence(
    prompt: int = 8000, budget: int = 8192, geometry: CacheGeometry | None = None
) -> Explorer:
    """Return an explorer of a prompt that is sent twice: what is kept, and what is computed again.

    >>> explorer = explore_sequence(100, geometry=CacheGeometry(16, 64, 16, 16))
    >>> "computes 4" in explorer.page
    True
    >>> explorer.close()

    Starts at these numbers, as `explore_placement` does; raises as `sequence_view` does.
    """
    knobs = sequence_knobs(prompt, budget, geometry or _USUAL)
    return _explore_knobs("sequence", sequenced, knobs, {"budget": "budget"})
