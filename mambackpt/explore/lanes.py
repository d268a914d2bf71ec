"""Explorers of lanes: one query, or one prompt that is sent twice. H, M, U, A as in the planner."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from itertools import groupby
from typing import Any

from ipywidgets import Checkbox, Dropdown, Layout, Widget

from mambackpt.draw import (
    Drawing,
    Frame,
    Lane,
    Lanes,
    describe_lanes,
    lanes_height,
    left_margin,
    numeral,
    planned_lane,
    retitle,
    sequence_finding,
    sequence_frames,
    sheet,
    style,
    table_html,
)
from mambackpt.errors import CheckpointValueError, checked_int
from mambackpt.explore.widgets import Explorer, explore, number, picture
from mambackpt.geometry import CacheGeometry
from mambackpt.planner import Decision, Reason, explain


@dataclass(frozen=True, slots=True)
class View:
    """What an explorer says and shows for one choice of numbers: a finding, lanes, a table."""

    finding: str
    lanes: tuple[Lane, ...]
    rows: tuple[tuple[str, ...], ...] = ()
    header: tuple[str, ...] = ()

    def draw(self) -> Drawing:
        """Return the picture that an explorer shows: for a page without a kernel.

        >>> placement_view(8000, 0, CacheGeometry(1536, 1536, 16, 1536)).draw().finding[:44]
        'The state after 7680 tokens is saved 7680 to'
        """
        return _Screen(self).draw(self)


def placement_view(seq_len: int, start: int, geometry: CacheGeometry) -> View:
    """Return where the checkpoint of one query lands, and which of the six conditions decides.

    >>> view = placement_view(3602, 1984, CacheGeometry(16, 1600, 16, 16))
    >>> print(view.finding)
    The query starts at 1984, which is inside column 1, the column the checkpoint would overwrite.
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
    [decision] = explain([seq_len], [seq_len - start], geometry)
    lane = planned_lane(seq_len, seq_len - start, geometry, label="this query")
    return View(
        decision.sentence,
        (replace(lane, caption=""),),
        tuple(_conditions(decision, seq_len, start, geometry)),
        ("condition", "with these numbers", ""),
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

    Tokens of the prompt, and of one step at most. Raises as `mambackpt.draw.sequence_frames`.
    """
    frames = sequence_frames(prompt, geometry, budget=budget)
    first, second = (_whole(list(same)) for _, same in groupby(frames, lambda f: f.lane.label))
    last_chunk = prompt - [0, *first.ends][-2]
    [decision] = explain([prompt], [last_chunk], geometry)
    return View(
        sequence_finding([replace(frames[-1], lane=second)]),
        (replace(first, caption=decision.sentence), second),
    )


def _whole(frames: Sequence[Frame]) -> Lane:
    """One request's last lane, with all its chunks and what the last frame says as its caption."""
    ends = sorted({frame.lane.total for frame in frames})
    words = frames[-1].sentence.split(": ", 1)[1]
    caption = words[0].upper() + words[1:]
    return replace(frames[-1].lane, start=frames[0].lane.start, ends=tuple(ends), caption=caption)


class _Screen:
    """One figure that shows view after view with the same artists."""

    def __init__(self, view: View) -> None:
        self._lines = 2 if any(lane.caption for lane in view.lanes) else 0
        with style():
            self.figure, [ax] = sheet(
                "\n",  # room for a finding of two lines
                [lanes_height(len(view.lanes), caption_lines=self._lines)],
                left=left_margin(lane.label for lane in view.lanes),
            )
            self._lanes = Lanes(ax, caption_lines=self._lines)

    def draw(self, view: View) -> Drawing:
        """Draw another view in place of the last one."""
        retitle(self.figure, view.finding)
        self._lanes.update(view.lanes)
        alt = f"{view.finding} {describe_lanes(view.lanes)}".strip()
        return Drawing(self.figure, view.finding, alt)

    def page(self, view: View) -> str:
        """Return a view as HTML: the picture with its alt text, and the table below."""
        table = table_html(view.header, view.rows, caption=view.finding) if view.rows else ""
        return picture(self.draw(view)) + table


def explore_views(view: Callable[..., View], **controls: Widget) -> Explorer:
    """Return an explorer of lanes: controls above the view that a function makes of their values.

    >>> from ipywidgets import IntSlider
    >>> tokens = IntSlider(value=3, min=1, max=9)
    >>> explorer = explore_views(lambda tokens: View(f"{tokens} tokens.", ()), tokens=tokens)
    >>> "3 tokens." in explorer.page
    True
    >>> explorer.close()

    One figure shows all views, which saves most of a redraw, so all must have as many lanes as the
    first. Raises what ``view`` raises for the first values; otherwise as `explore`.
    """
    screen = _Screen(view(**{name: control.value for name, control in controls.items()}))

    @wraps(view)
    def page(**values: Any) -> str:
        return screen.page(view(**values))

    return explore(page, **controls)


def _geometry_controls(g: CacheGeometry) -> dict[str, Widget]:
    grids = sorted({1, 16, 64, 128} | ({g.A} if g.A else set()))
    return {
        "M": number("block M", g.M),
        "H": number("hash unit H", g.H),
        "U": number("hit alignment U", g.U),
        "A": Dropdown(
            options=[("cannot export", None), *((f"{grid}", grid) for grid in grids)],
            value=g.A,
            description="kernel grid A",
            style={"description_width": "8em"},
            layout=Layout(width="17em"),
        ),
        "drop": Checkbox(
            value=g.drop_eagle_block,
            description="drop a unit",
            indent=False,
            layout=Layout(width="9em"),
        ),
    }


def _explore_geometry(
    view: Callable[[int, int, CacheGeometry], View], geometry: CacheGeometry, **lengths: Widget
) -> Explorer:
    def shown(M: int, H: int, U: int, A: int | None, drop: bool, **lengths: int) -> View:
        one, other = lengths.values()
        return view(one, other, CacheGeometry(H, M, A, U, drop))

    return explore_views(shown, **lengths, **_geometry_controls(geometry))


def explore_placement(
    seq_len: int = 8000, start: int = 0, geometry: CacheGeometry | None = None
) -> Explorer:
    """Return an explorer of one query: lengths and sizes in, lane, column and conditions out.

    >>> explorer = explore_placement(3602, 1984, CacheGeometry(16, 1600, 16, 16))
    >>> "inside column 1" in explorer.page
    True
    >>> explorer.close()

    Starts at these numbers (default: blocks and hash units of 1,536 tokens, a kernel grid of 16);
    raises as `placement_view` does. Keep it and `close` it, or leave it to the kernel's end.
    """
    return _explore_geometry(
        placement_view,
        geometry or CacheGeometry(1536, 1536, 16, 1536),
        seq_len=number("tokens in all L", seq_len, 16384),
        start=number("computed before", start, 16384, least=0),
    )


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
    return _explore_geometry(
        sequence_view,
        geometry or CacheGeometry(1536, 1536, 16, 1536),
        prompt=number("prompt", prompt, 16384),
        budget=number("tokens per step", budget, 16384),
    )
