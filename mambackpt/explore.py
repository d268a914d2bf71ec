"""Explorers: numbers to change beside what they lead to, and checkers for a course's exercises.

`explore` connects controls to a function that returns HTML; what it shows is a pure function of
the controls' values, so that it is tested without a widget. H, M, U, A as in the planner.
"""

import html
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from itertools import groupby
from typing import Any

import numpy as np
from ipywidgets import (
    HTML,
    Checkbox,
    Dropdown,
    HBox,
    IntSlider,
    IntText,
    Layout,
    SelectionSlider,
    Text,
    VBox,
    Widget,
)
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from mambackpt.animate import Frame, sequence_finding, sequence_frames
from mambackpt.draw import (
    Lane,
    Lanes,
    _balanced,
    bars_height,
    describe_columns,
    draw_bars,
    lanes_height,
    left_margin,
    planned_lane,
    sheet,
    style,
)
from mambackpt.errors import CheckpointError, CheckpointValueError
from mambackpt.figures import PLACEMENTS, example_trace, least_block, pool_sizes
from mambackpt.geometry import CacheGeometry, checked_int
from mambackpt.models import PRESETS
from mambackpt.planner import Decision, Reason, explain
from mambackpt.replay import replay
from mambackpt.show import figure_html, show, unhinted
from mambackpt.traces import Trace


@dataclass(frozen=True, slots=True)
class View:
    """What an explorer says and shows for one choice of numbers: a finding, lanes, table rows."""

    finding: str
    lanes: tuple[Lane, ...]
    rows: tuple[tuple[str, ...], ...] = ()

    @property
    def alt(self) -> str:
        """The finding and the columns in words, for whoever cannot see the lanes."""
        columns = (f"{lane.label}: {describe_columns(lane.columns)}." for lane in self.lanes)
        return " ".join([self.finding, *columns])


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
    )


def _conditions(
    decision: Decision, seq_len: int, start: int, g: CacheGeometry
) -> Iterable[tuple[str, str, str]]:
    """Each condition, with these numbers, and whether it holds; after one fails none is asked."""
    at, candidate = decision.position, decision.candidate_column
    read = f"{(start - 1) // g.M:,}, which its state is read from" if start else "−1: it reads none"
    asked = {
        "1 the kernel can export": f"A is {g.A:,}" if g.A else "it has no grid",
        "2 starts on a hash unit": f"{start:,} = {_division(start, g.H)}",
        "3 its column is free": f"{candidate:,} > {read}".replace("-", "−"),
        "4 gains a hash unit": f"{start:,} + {g.H:,} ≤ {at:,}",
        "5 lies inside the query": f"{start:,} < {at:,} < {seq_len:,}",
        "6 lies on the kernel's grid": f"{at:,} − {start:,} = {_division(at - start, g.A or 1)}",
    }
    failed = decision.reason.value
    for number, (condition, numbers) in enumerate(asked.items(), start=1):
        if decision.reason is Reason.ACCEPTED or number < failed:
            yield condition, numbers, "✓ holds"
        elif number == failed:
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

    Tokens of the prompt, and of one step at most. Raises as `mambackpt.animate.sequence_frames`.
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
    """One request's last lane, with all its chunks and what the last step did as its caption."""
    ends = sorted({frame.lane.total for frame in frames})
    told = frames[-1].sentence.split(": ", 1)[1]
    caption = told[0].upper() + told[1:]
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
        self._head = self.figure.texts[0]

    def draw(self, view: View) -> Figure:
        """Draw another view in place of the last one."""
        em = float(self._head.get_fontsize())
        room = self.figure.get_figwidth() * 72 / em - 1.6
        self._head.set_text(_balanced(view.finding, room))
        self._lanes.update(view.lanes)
        return self.figure

    def page(self, view: View) -> str:
        """Return a view as HTML: the picture with its alt text, and the table below."""
        picture = figure_html(_quick_png(self.draw(view)), alt=view.alt, caption="")
        rows = "".join(
            f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>"
            for row in view.rows
        )
        return f"{picture}<table>{rows}</table>" if rows else picture


def _quick_png(figure: Figure) -> bytes:
    """Return a figure as a PNG: larger than `figure_png`'s, in half the time."""
    from PIL import Image

    canvas = figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    with unhinted():
        canvas.draw()  # type: ignore[no-untyped-call]
    drawn = io.BytesIO()
    pixels = np.asarray(canvas.buffer_rgba())  # type: ignore[no-untyped-call]
    Image.fromarray(pixels).convert("RGB").save(drawn, format="png", compress_level=1)
    return drawn.getvalue()


def draw_view(view: View) -> Figure:
    """Return what an explorer shows for a view, as a figure: for a page without a kernel.

    >>> view = placement_view(8000, 0, CacheGeometry(1536, 1536, 16, 1536))
    >>> draw_view(view).get_suptitle()[:44]
    'The state after 7680 tokens is saved 7680 to'
    """
    return _Screen(view).draw(view)


def show_view(view: View, *, dpi: int = 96) -> None:
    """Display what an explorer shows for a view: for a page without a kernel.

    >>> show_view(View("Nothing is computed.", ()))
    <figure: Nothing is computed.>

    ``dpi`` as in `mambackpt.show.show`.
    """
    show(draw_view(view), alt=view.alt, caption="", dpi=dpi)


# What each control drives, by the name of the function that shows it: a cell that is run again
# replaces its explorer instead of adding a second callback to a slider that it shares.
_USERS: dict[Widget, dict[str, "Explorer"]] = {}


class Explorer(VBox):  # type: ignore[misc]
    """Controls, and below them what they lead to; made by `explore`."""

    def __init__(self, show: Callable[..., str], controls: dict[str, Widget]) -> None:
        self._show, self._controls = show, controls
        self._name = f"{show.__module__}.{show.__qualname__}"
        self._screen = HTML()
        self._desk = HBox(list(controls.values()), layout=Layout(flex_flow="row wrap"))
        super().__init__([self._desk, self._screen])
        earlier = []
        for control in controls.values():
            users = _USERS.setdefault(control, {})
            earlier += [users[self._name]] if self._name in users else []
            users[self._name] = self
            control.observe(self._update, "value")
        for explorer in earlier:
            explorer.close()
        self._update()

    @property
    def page(self) -> str:
        """The HTML that is shown now."""
        return str(self._screen.value)

    def _update(self, _: object = None) -> None:
        values = {name: control.value for name, control in self._controls.items()}
        try:
            self._screen.value = self._show(**values)
        except CheckpointError as error:
            self._screen.value = f'<p role="alert"><b>⚠ {html.escape(str(error))}</b></p>'

    def close(self) -> None:
        """Let go of every widget, but for controls that another explorer still uses."""
        for control in self._controls.values():
            if control.comm is None:
                continue
            control.unobserve(self._update, "value")
            users = _USERS.get(control, {})
            if users.get(self._name) is self:
                del users[self._name]
            if not users:
                _USERS.pop(control, None)
                _close(control)
        _close(self._desk)
        _close(self._screen)
        self.layout.close()
        super().close()


def _close(widget: Widget) -> None:
    for part in ("style", "layout"):
        if hasattr(widget, part):
            getattr(widget, part).close()
    widget.close()


def explore(show: Callable[..., str], **controls: Widget) -> Explorer:
    """Return controls above what a function of their values shows, as a VBox.

    >>> tokens = IntSlider(value=3, min=1, max=9)
    >>> explorer = explore(lambda tokens: f"{tokens} tokens", tokens=tokens)
    >>> tokens.value = 4
    >>> explorer.page
    '4 tokens'
    >>> explorer.close()

    ``show`` takes the values by the controls' names and returns HTML. What it refuses with an error
    of the `CheckpointError` family is shown as a sentence. A control may be shared; a function of
    the same name on a shared control replaces the earlier explorer. `close` lets go of all widgets.
    """
    return Explorer(show, controls)


def explore_views(view: Callable[..., View], **controls: Widget) -> Explorer:
    """Return an explorer of lanes: controls above the view that a function makes of their values.

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


def _number(label: str, value: int, most: int | None = None, least: int = 1) -> Widget:
    """A slider up to ``most``, or a field where no bound would be right."""
    layout = Layout(width="31em" if most else "13em")
    words = {"description": label, "style": {"description_width": "8em"}, "layout": layout}
    if most is None:
        return IntText(value=value, **words)
    return IntSlider(value=value, min=least, max=max(most, value), **words)


def _geometry_controls(g: CacheGeometry) -> dict[str, Widget]:
    grids = sorted({1, 16, 64, 128} | ({g.A} if g.A else set()))
    return {
        "M": _number("block M", g.M),
        "H": _number("hash unit H", g.H),
        "U": _number("hit alignment U", g.U),
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
        seq_len=_number("tokens in all L", seq_len, 16384),
        start=_number("computed before", start, 16384, least=0),
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
        prompt=_number("prompt", prompt, 16384),
        budget=_number("tokens per step", budget, 16384),
    )


@dataclass(frozen=True, slots=True, repr=False)
class Verdict:
    """What a checker says; ``right`` is None before there is an answer."""

    right: bool | None
    sentence: str

    def __bool__(self) -> bool:
        return self.right is True

    def __repr__(self) -> str:
        return self.sentence


_UNANSWERED = Verdict(None, "No answer yet. Replace the ... above, and run both cells again.")


def check_answer(given: object, right: object, *, hint: str) -> Verdict:
    """Return whether an exercise's answer is right; where it is not, the hint.

    >>> check_answer(..., 7680, hint="Count whole blocks.")
    No answer yet. Replace the ... above, and run both cells again.
    >>> check_answer(8000, 7680, hint="Count whole blocks.")
    Not yet: 8000. Count whole blocks.
    >>> bool(check_answer(7680, 7680, hint="Count whole blocks."))
    True
    """
    if given is ...:
        return _UNANSWERED
    if type(given) is type(right) and given == right:
        return Verdict(True, f"Right: {right!r}.")
    return Verdict(False, f"Not yet: {given!r}. {hint}")


def check_function(
    mine: Callable[..., Any], truth: Callable[..., Any], cases: Sequence[tuple[Any, ...]]
) -> Verdict:
    """Return whether a function answers every case as the truth does; else the first that differs.

    >>> check_function(lambda n: n // 2, lambda n: -(-n // 2), [(2,), (3,)])
    Not yet: for (3,) yours gives 1, the rule 2.
    >>> check_function(lambda n: (n + 1) // 2, lambda n: -(-n // 2), [(2,), (3,)])
    Right: the same in all 2 cases.

    Raises CheckpointValueError without cases: that check could not fail.
    """
    if not cases:
        raise CheckpointValueError("cases is empty; expected at least one. Try [(8000, 1536)].")
    for case in cases:
        given, right = mine(*case), truth(*case)
        if given is ...:
            return _UNANSWERED
        if given != right:
            return Verdict(False, f"Not yet: for {case} yours gives {given!r}, the rule {right!r}.")
    return Verdict(True, f"Right: the same in all {len(cases)} cases.")


# --- replays --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReplayView:
    """What rules do to a trace: a finding, and per rule the tokens recomputed, in words too."""

    finding: str
    rules: tuple[str, ...]
    recomputed: tuple[int, ...]
    words: tuple[str, ...]
    mine: int
    note: str

    @property
    def alt(self) -> str:
        """The finding and every bar in words, for whoever cannot see them."""
        bars = (f"{rule}: {words}" for rule, words in zip(self.rules, self.words, strict=True))
        return f"{self.finding} Million tokens recomputed, {'; '.join(bars)}. {self.note}"


def replay_view(
    trace: Trace,
    rule: str,
    *,
    block: int,
    budget: int = 8192,
    model: str = "qwen3-next",
    pool: int | None = None,
) -> ReplayView:
    """Return what a rule and the usual ones recompute on a trace.

    >>> from mambackpt.traces import trace_from_tokens
    >>> trace = trace_from_tokens([[7] * 40, [7] * 33 + [8] * 7, [7] * 40], grain=8)
    >>> replay_view(trace, "interval(8)", block=16).finding
    'interval(8) recomputes 56 tokens: as many as the best of 4 others.'

    ``pool`` is in tokens of the model's attention cache (None: unlimited memory), block and budget
    are tokens. Raises as `mambackpt.replay.replay`.
    """
    names = tuple(dict.fromkeys((*PLACEMENTS, rule)))
    size = None if pool is None else pool * PRESETS[model].model_token_bytes
    runs = [
        replay(trace, name, block=block, budget=budget, model=model, pool_bytes=size)
        for name in names
    ]
    work = tuple(run.recomputed for run in runs)
    mine = names.index(rule)
    least = min(tokens for at, tokens in enumerate(work) if at != mine)
    gap = work[mine] - least
    compared = f"{abs(gap):,} {'more' if gap > 0 else 'fewer'} than" if gap else "as many as"
    finding = (
        f"{rule} recomputes {work[mine]:,} tokens: {compared} the best of {len(names) - 1} others."
    )
    words = tuple(
        f"{run.recomputed / 1e6:,.3g} M, {100 * run.hit_rate:.1f} % reused, "
        f"{run.states_per_request:.2f} states"
        for run in runs
    )
    memory = "unlimited memory" if pool is None else f"a pool of {pool:,} tokens for {model}"
    note = f"{len(trace):,} requests, one at a time, in {memory}."
    return ReplayView(finding, names, work, words, mine, note)


def draw_replay(view: ReplayView) -> Figure:
    """Return what the explorer of replays shows, as a figure: for a page without a kernel."""
    with style():
        height = bars_height(len(view.rules))
        figure, [ax] = sheet(view.finding, [height], left=left_margin(view.rules), gap=5)
        unit = f"million tokens recomputed\n{view.note}"
        values = [tokens / 1e6 for tokens in view.recomputed]
        draw_bars(ax, view.rules, values, unit=unit, words=view.words, highlight=[view.mine])
    return figure


def show_replay(view: ReplayView, *, dpi: int = 96) -> None:
    """Display what the explorer of replays shows: for a page without a kernel."""
    show(draw_replay(view), alt=view.alt, caption="", dpi=dpi)


def explore_replay(trace: Trace | None = None, rule: str = "interval(8192)") -> Explorer:
    """Return an explorer of placement rules: a rule of yours against the usual ones on a trace.

    >>> from mambackpt.traces import trace_from_tokens
    >>> explorer = explore_replay(trace_from_tokens([[7] * 4000, [7] * 4000], grain=512), "none")
    >>> "none recomputes 8,000 tokens" in explorer.page
    True
    >>> explorer.close()

    ``trace`` is a generated one unless given. Rules are names of `mambackpt.rules`, joined with
    "+"; what is wrong with one is shown as a sentence. Raises as `replay_view`.
    """
    trace = example_trace() if trace is None else trace
    least = least_block(trace)

    def page(rule: str, block: int, budget: int, model: str, pool: int | None) -> str:
        view = replay_view(trace, rule, block=block, budget=budget, model=model, pool=pool)
        return figure_html(_quick_png(draw_replay(view)), alt=view.alt, caption="")

    words = {"style": {"description_width": "8em"}, "layout": Layout(width="25em")}
    pools = [(f"{size:,} tokens", size) for size in pool_sizes(trace, (1 / 8, 1 / 4, 1 / 2, 1, 2))]
    models = [name for name, model in PRESETS.items() if model.recurrent_layers]
    return explore(
        page,
        rule=Text(value=rule, description="your rule", continuous_update=False, **words),
        block=SelectionSlider(
            options=[least << n for n in range(4)],
            description="block",
            continuous_update=False,
            **words,
        ),
        budget=_number("tokens per step", 8192),
        model=Dropdown(options=models, value="qwen3-next", description="model", **words),
        pool=Dropdown(options=[("unlimited", None), *pools], description="pool", **words),
    )
