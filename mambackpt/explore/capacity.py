"""The capacity explorer: what a pool holds of a model, in block ids and in chats that stay."""

from dataclasses import dataclass
from textwrap import wrap
from typing import Any

import matplotlib as mpl
from matplotlib.ticker import FuncFormatter

from mambackpt.draw import (
    GREY,
    HIT,
    INK,
    STATE,
    Drawing,
    describe_curves,
    em_wide,
    numeral,
    retitle,
    sheet,
    style,
    table_html,
)
from mambackpt.errors import checked_choice, checked_int
from mambackpt.explore.controls import Knob, Values, knob_widgets
from mambackpt.explore.widgets import Code, Explorer, Habits, Shown
from mambackpt.explore.words import command_line
from mambackpt.models import PRESETS, Capacity

_STEPS, _HEIGHT = 8, 14  # lengths of a curve, em of the axes
_LAST, _EACH = "its last state alone", "a state every block"


@dataclass(frozen=True, slots=True)
class CapacityView:
    """What a pool holds: a finding, ids of a chat over its length, and the sizes as a table.

    ``curves`` are the ids that a chat of each of ``lengths`` leaves, by the states that it keeps;
    ``full`` are the pool's ids, ``tokens`` and ``ids`` the chosen chat's.
    """

    finding: str
    lengths: tuple[int, ...]
    curves: tuple[tuple[str, tuple[int, ...]], ...]
    full: int
    tokens: int
    ids: int
    note: str
    rows: tuple[tuple[str, str], ...]
    header: tuple[str, ...] = ("what", "how much")

    def draw(self) -> Drawing:
        """Return the picture that the explorer shows: for a page without a kernel."""
        return CapacityScreen(self).draw(self)

    def table(self) -> str:
        """Return the sizes as an HTML table."""
        return table_html(self.header, self.rows, caption="On one device.")


def capacity_view(
    model: str, pool_bytes: int, tokens: int, *, every: int = 8, max_len: int = 262_144
) -> CapacityView:
    """Return what a pool of one device holds of a model, for chats of so many tokens.

    >>> view = capacity_view("qwen3.5-27b", 20 * 10**9, 8000)
    >>> print(view.finding)
    20 GB have 388 ids for requests: 24 chats of 8,000 tokens stay in the cache, and 22 run at once.

    ``every`` is how many blocks lie between kept states; ``max_len`` are the tokens of the longest
    request that the engine admits. Raises CheckpointValueError for another model, for one whose
    layers are not counted, and where nothing fits.
    """
    chosen = PRESETS[checked_choice("model", model, PRESETS)]
    checked_int("every", every, unit="blocks")
    checked_int("tokens", tokens)
    holds = chosen.capacity(checked_int("pool_bytes", pool_bytes, unit="bytes"), max_len)
    states = _states(holds, tokens, every)
    stay, live = holds.cached_requests(tokens, states), holds.live_requests(tokens)
    finding = (
        f"{pool_bytes / 1e9:,g} GB have {holds.admitted_ids:,} ids for requests: {stay:,} chats of "
        f"{tokens:,} tokens stay in the cache, and {live:,} run at once."
    )
    per_states = f"{holds.cached_ids(tokens, states):,} ({states:,} of its states are kept)"
    rows = (
        ("bytes of an id", f"{holds.bytes_per_id:,}"),
        ("ids, the null block among them", f"{holds.ids:,}"),
        ("tokens of a block", f"{holds.block:,}"),
        ("groups of attention and of recurrent layers",
         f"{holds.attention_groups} and {holds.recurrent_groups}"),
        ("ids of a chat that runs", f"{holds.live_ids(tokens):,}"),
        ("ids that it leaves in the cache", per_states),
        ("tokens of attention cache that cost as many ids as a state",
         f"{holds.state_in_tokens:,.0f}"),
        (f"concurrency for {max_len:,} tokens, as logged", f"{holds.concurrency:.2f}x"),
        ("tokens of cache, as logged", f"{holds.logged_tokens:,}"),
    )  # fmt: skip
    longest = holds.block * max(
        2, (holds.admitted_ids - holds.recurrent_groups) // holds.attention_groups
    )
    blocks = longest // holds.block
    lengths = tuple(
        sorted({holds.block * round(blocks ** (n / _STEPS)) for n in range(_STEPS + 1)})
    )
    ways = {_LAST: 0, f"a state every {every:,} blocks": every, _EACH: 1}
    curves = tuple(
        (words, tuple(holds.cached_ids(n, _states(holds, n, gap)) for n in lengths))
        for words, gap in ways.items()
    )
    note = (
        f"{model}: a state takes {holds.recurrent_groups} ids, a block of {holds.block:,} tokens "
        f"{holds.attention_groups}; an id is {holds.bytes_per_id / 1e6:,.1f} MB."
    )
    mine = holds.cached_ids(tokens, states)
    return CapacityView(finding, lengths, curves, holds.admitted_ids, tokens, mine, note, rows)


def _short(value: float, _: object = None) -> str:
    return numeral(value / 1e6, ",g") + " M" if value >= 1e6 else numeral(round(value), ",")


def _states(holds: Capacity, tokens: int, every: int) -> int:
    """States of a chat: one every so many blocks and its last; 0 stands for the last alone.

    A chat below one block leaves none that a lookup of whole blocks finds.
    """
    blocks = tokens // holds.block
    return -(-blocks // every) if every else min(blocks, 1)


class CapacityScreen:
    """One figure that shows pool after pool with the same artists."""

    def __init__(self, view: CapacityView) -> None:
        with style():
            self.figure, [self._ax] = sheet("\n", [_HEIGHT], left=6.5, right=13.5, gap=6)
            ax, em = self._ax, float(mpl.rcParams["font.size"])
            ax.set(xscale="log", yscale="log", ylabel="ids that it leaves")
            ax.minorticks_off()
            shapes = zip(((HIT, "o"), (GREY, "s"), (STATE, "^")), view.curves, strict=True)
            self._lines = [
                ax.plot([], [], marker, ls="-", color=colour, mfc=colour)[0]
                for (colour, marker), _ in shapes
            ]
            [self._full] = ax.plot([], [], color=INK, linewidth=1, linestyle=":")
            [self._mine] = ax.plot([], [], "D", color=INK, mfc="white", ms=7, zorder=5)
            self._names = [
                ax.text(0, 0, "", va="center", fontsize=em, clip_on=False, parse_math=False)
                for _ in view.curves
            ]
            self._words = ax.text(0, 0, "", va="bottom", fontsize=em, parse_math=False)
            for axis in (ax.xaxis, ax.yaxis):
                axis.set_major_formatter(FuncFormatter(_short))
            self._em = em_wide(ax, em)

    def fits(self, view: CapacityView) -> bool:
        """Return whether this figure has the places that the view needs."""
        return len(view.curves) == len(self._lines)

    def draw(self, view: CapacityView) -> Drawing:
        """Draw another pool in place of the last one."""
        retitle(self.figure, view.finding)
        ax, left, right = self._ax, view.lengths[0], max(view.lengths[-1], view.tokens)
        low = min(view.ids, *(ids[0] for _, ids in view.curves)) / 1.3
        top = 1.6 * max(view.full, view.ids, *(ids[-1] for _, ids in view.curves))
        ax.set(xlim=(min(left, view.tokens) / 1.2, right), ylim=(low, top))
        for axis, (least, most) in ((ax.xaxis, ax.get_xlim()), (ax.yaxis, ax.get_ylim())):
            powers = [10**n for n in range(15) if least <= 10**n <= most]
            powers = powers[:: -(-len(powers) // 4) or 1]
            axis.set_ticks(powers if len(powers) > 1 else [least, most])
        for line, (_, ids) in zip(self._lines, view.curves, strict=True):
            line.set_data(view.lengths, ids)
        self._full.set_data(ax.get_xlim(), [view.full] * 2)
        self._mine.set_data([view.tokens], [view.ids])
        self._name(view)
        start = ax.get_xlim()[0]
        words = f"pool full: {view.full:,} ids"
        self._words.set(x=1.05 * start, y=1.03 * view.full, text=words)
        note = "\n".join(wrap(view.note, 80))
        ax.set_xlabel(f"tokens of a chat (hollow diamond: yours)\n{note}")
        curves = {words: (view.lengths, ids) for words, ids in view.curves}
        listed = ", ".join(f"{length:,}" for length in view.lengths)
        alt = f"{view.finding} Ids of chats of {listed} tokens: {describe_curves(curves)}."
        return Drawing(self.figure, view.finding, alt)

    def _name(self, view: CapacityView) -> None:
        """Name each curve beside its end, moved up where two names would touch."""
        (left, right), (low, top) = self._ax.get_xlim(), self._ax.get_ylim()
        apart, above = (top / low) ** (1.4 / _HEIGHT), 0.0
        ends = sorted(zip(view.curves, self._names, strict=True), key=lambda end: end[0][1][-1])
        for (words, ids), text in ends:
            above = max(ids[-1], above * apart)
            text.set(x=right * (right / left) ** (0.8 / self._em), y=above, text=words)


def capacity_knobs(model: str = "qwen3.5-27b", pool_gb: int = 20) -> dict[str, Knob]:
    """Return what can be moved in a capacity view."""
    long: dict[str, Any] = {"least": 1024, "most": 262_144, "step": 1024}
    return {
        "model": Knob(label="model", option="model", value=model, choices=tuple(sorted(PRESETS))),
        "pool": Knob(label="pool in GB", option="pool-gb", value=pool_gb, most=640),
        "tokens": Knob(label="tokens of a chat", option="tokens", value=8192, **long),
        "every": Knob(label="blocks per state", option="every", value=8, most=64),
        "longest": Knob(label="longest request", option="longest", value=262_144, **long),
    }


def held(model: str, pool: int, tokens: int, every: int, longest: int) -> CapacityView:
    """Return the capacity view of the knobs' values."""
    return capacity_view(model, pool * 10**9, tokens, every=every, max_len=longest)


def _python_of(values: Values) -> str:
    model, pool, tokens, every, longest = values.values()
    return (
        f"from mambackpt.explore import capacity_view; view = capacity_view({model!r}, "
        f"{pool} * 10**9, {tokens}, every={every}, max_len={longest})"
    )


def explore_capacity(model: str = "qwen3.5-27b", pool_gb: int = 20) -> Explorer:
    """Return an explorer of a pool: model, bytes and lengths in, ids and chats that fit out.

    >>> explorer = explore_capacity("qwen3-next", 80)
    >>> "stay in the cache" in explorer.page
    True
    >>> explorer.close()

    Raises as `capacity_view` does.
    """
    knobs = capacity_knobs(model, pool_gb)
    screens: list[CapacityScreen] = []

    def shown(**values: Any) -> Shown:
        view = held(**values)
        if not screens:
            screens.append(CapacityScreen(view))
        return Shown(screens[0].draw(view), view.table(), view.draw)

    habits = Habits(
        name="capacity",
        code=lambda values: Code(command_line("capacity", knobs, values), _python_of(values)),
        labels={
            "pool_bytes": "pool in GB",
            "max_len": "longest request",
            "tokens": "tokens of a chat",
            "every": "blocks per state",
        },
    )
    return Explorer(shown, knob_widgets(knobs), habits)
