"""The explorer of placement rules: a rule of yours against the usual ones on a trace."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from textwrap import wrap
from typing import Any, TypeAlias

import numpy as np

from mambackpt.draw import Drawing, bars_height, draw_bars, left_margin, retitle, sheet, style
from mambackpt.errors import CheckpointError, CheckpointValueError, checked_choice
from mambackpt.explore.controls import Knob, Values, knob_widgets, labels_of
from mambackpt.explore.widgets import Code, Explorer, Habits, Shown
from mambackpt.explore.words import command_line
from mambackpt.figures import PLACEMENTS, least_block, pool_sizes
from mambackpt.models import PRESETS
from mambackpt.replay import Replay, Trace, example_trace, open_trace, replay

# rule, block, budget, model, pool in tokens: what one replay depends on, beside its trace
_Replayed: TypeAlias = Callable[[str, int, int, str, int | None], Replay]


@dataclass(frozen=True, slots=True)
class ReplayView:
    """What rules do to a trace: a finding, and per rule the tokens recomputed, in words too."""

    finding: str
    rules: tuple[str, ...]
    recomputed: tuple[int, ...]
    words: tuple[str, ...]
    mine: int
    note: str

    def draw(self) -> Drawing:
        """Return the picture that the explorer shows: for a page without a kernel."""
        return BarScreen(self).draw(self)

    def table(self) -> str:
        """Return nothing: the bars say all of it."""
        return ""


class BarScreen:
    """One sheet of bars for all views of as many rules; the rules' names may be of any length."""

    def __init__(self, view: ReplayView) -> None:
        self._labels = view.rules
        with style():
            self.figure, [self._ax] = sheet(
                "\n", [bars_height(len(view.rules))], left=left_margin(view.rules), gap=7
            )

    def fits(self, view: ReplayView) -> bool:
        """Return whether this sheet has the margin that the view needs."""
        return view.rules == self._labels

    def draw(self, view: ReplayView) -> Drawing:
        """Draw another view in place of the last one."""
        retitle(self.figure, view.finding)
        with style():
            parts: list[Any] = [*self._ax.containers, *self._ax.texts]
            for part in parts:
                part.remove()
            note = "\n".join(wrap(view.note, 80))
            unit = f"million tokens recomputed\n{note}"
            values = [tokens / 1e6 for tokens in view.recomputed]
            draw_bars(
                self._ax, view.rules, values, unit=unit, words=view.words, highlight=[view.mine]
            )
        bars = (f"{rule}: {words}" for rule, words in zip(view.rules, view.words, strict=True))
        alt = f"{view.finding} Million tokens recomputed, {'; '.join(bars)}. {view.note}"
        return Drawing(self.figure, view.finding, alt)


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

    >>> from mambackpt.replay import trace_from_tokens
    >>> trace = trace_from_tokens([[7] * 40, [7] * 33 + [8] * 7, [7] * 40], grain=8)
    >>> replay_view(trace, "interval(8)", block=16).finding
    'interval(8) recomputes 56 tokens: as many as the best of 4 others.'

    ``pool`` is in tokens of the model's attention cache (None: unlimited memory), block and budget
    are tokens. Where a rule keeps the very states of a usual one, the note says so. Raises as
    `mambackpt.replay.replay`, and for a pool of a model whose layers are not counted.
    """
    return _compared(_replays_of(trace), trace, rule, block, budget, model, pool)


def _replays_of(trace: Trace) -> _Replayed:
    def replayed(rule: str, block: int, budget: int, model: str, pool: int | None) -> Replay:
        if pool is None:
            return replay(trace, rule, block=block, budget=budget)
        size = pool * _token_bytes(model)
        return replay(trace, rule, block=block, budget=budget, model=model, pool_bytes=size)

    return replayed


def _token_bytes(model: str) -> int:
    chosen = PRESETS[checked_choice("model", model, PRESETS)]
    if not (chosen.recurrent_layers and chosen.attention_layers):
        counted = [name for name, m in PRESETS.items() if m.recurrent_layers and m.attention_layers]
        raise CheckpointValueError(
            f"model is {model!r}, whose layers are not counted, and a pool holds those of all "
            f"layers; expected one of {', '.join(counted)}, or an unlimited pool. "
            f"Try {counted[0]!r}."
        )
    return chosen.model_token_bytes


def _remembered(replayed: _Replayed) -> _Replayed:
    """The same replays, each computed once: moving one knob leaves most of them as they were."""
    known: dict[tuple[str, int, int, str, int | None], Replay] = {}

    def remembered(rule: str, block: int, budget: int, model: str, pool: int | None) -> Replay:
        # Without a limit of memory no byte counts, so every model's replay is the same.
        asked = rule, block, budget, model if pool is not None else "", pool
        if asked not in known:
            known[asked] = replayed(rule, block, budget, model, pool)
        return known[asked]

    return remembered


def _compared(
    replayed: _Replayed,
    trace: Trace,
    rule: str,
    block: int,
    budget: int,
    model: str,
    pool: int | None,
) -> ReplayView:
    checked_choice("model", model, PRESETS)
    names = tuple(dict.fromkeys((*PLACEMENTS, rule)))
    runs = [replayed(name, block, budget, model, pool) for name in names]
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
    note += "".join(f" {said[0].upper()}{said[1:]}." for said in runs[mine].notes)
    same = [name for name, run in zip(names, runs, strict=True) if _alike(run, runs[mine])]
    same.remove(rule)
    if same:
        note += (
            f" {rule} keeps the same states as {' and '.join(same)} here: a position counts at "
            f"the block end of {trace.grain:,} before it."
        )
    return ReplayView(finding, names, work, words, mine, note)


def _alike(one: Replay, other: Replay) -> bool:
    """Whether two replays reused and wrote the same for every request."""
    return np.array_equal(one.reused, other.reused) and np.array_equal(one.written, other.written)


def replay_knobs(trace: Trace, rule: str = "none") -> dict[str, Knob]:
    """Return what can be moved in a replay view of this trace."""
    least = least_block(trace)
    block: dict[str, Any] = {"least": trace.grain, "most": 8 * least, "step": trace.grain}
    pools = (0, *pool_sizes(trace, (1 / 8, 1 / 4, 1 / 2, 1, 2)))
    return {
        "rule": Knob(label="your rule", option="rule", value=rule),
        "block": Knob(label="block", option="block", value=least, **block),
        "budget": Knob(
            label="tokens per step", option="budget", value=8192, least=512, most=32768, step=512
        ),
        "model": Knob(
            label="model", option="model", value="qwen3-next", choices=tuple(sorted(PRESETS))
        ),
        "pool": Knob(
            label="pool in tokens", option="pool", value=0, choices=pools, none="unlimited"
        ),
    }


def replayed_view(
    trace: Trace, rule: str, block: int, budget: int, model: str, pool: int
) -> ReplayView:
    """Return the replay view of the knobs' values; a pool of 0 stands for unlimited memory."""
    return replay_view(trace, rule, block=block, budget=budget, model=model, pool=pool or None)


def _code_of(trace: Trace, knobs: dict[str, Knob]) -> Callable[[Values], Code]:
    source = cache(lambda: _named_by(trace))

    def code(values: Values) -> Code:
        rule, block, budget, model, pool = values.values()
        named = source()
        command = command_line("replay", knobs, values)
        command = command.replace(" replay ", f" replay --trace {named or 'YOUR_FILE'} ", 1)
        opened = f"open_trace({trace.name!r})[0]" if named else "trace"
        imports = "from mambackpt.replay import open_trace; " if named else ""
        python = (
            f"{imports}from mambackpt.explore import replay_view; view = replay_view({opened}, "
            f"{rule!r}, block={block}, budget={budget}, model={model!r}, pool={pool or None})"
        )
        return Code(command, python)

    return code


def _named_by(trace: Trace) -> str:
    """The name that opens this very trace again; nothing for one that only a variable has."""
    try:
        again, _ = open_trace(trace.name)
    except (CheckpointError, OSError):
        return ""
    same = again.grain == trace.grain and all(
        np.array_equal(getattr(again, part), getattr(trace, part))
        for part in ("prompt", "first", "count", "output")
    )
    return trace.name if same else ""


def explore_replay(trace: Trace | None = None, rule: str = "none") -> Explorer:
    """Return an explorer of placement rules: a rule of yours against the usual ones on a trace.

    >>> from mambackpt.replay import trace_from_tokens
    >>> explorer = explore_replay(trace_from_tokens([[7] * 4000, [7] * 4000], grain=512), "none")
    >>> "none recomputes 8,000 tokens" in explorer.page
    True
    >>> explorer.close()

    ``trace`` is a generated one by default. Rules are names of `mambackpt.replay.rules`, joined
    with "+"; what is wrong with one is shown as a sentence. Raises as `replay_view`.
    """
    chosen = example_trace() if trace is None else trace
    replayed = _remembered(_replays_of(chosen))
    screens: list[BarScreen] = []

    def shown(rule: str, block: int, budget: int, model: str, pool: int) -> Shown:
        view = _compared(replayed, chosen, rule.strip(), block, budget, model, pool or None)
        if not screens or not screens[0].fits(view):
            screens[:] = [BarScreen(view)]
        return Shown(screens[0].draw(view), view.table(), view.draw)

    knobs = replay_knobs(chosen, rule)
    habits = Habits(
        name="replay",
        code=_code_of(chosen, knobs),
        labels=labels_of(knobs, {"pool_bytes": "pool", "budget": "budget", "rule": "rule"}),
    )
    return Explorer(shown, knob_widgets(knobs), habits)
