"""The explorer of placement rules: a rule of yours against the usual ones on a trace."""

from dataclasses import dataclass

from ipywidgets import Dropdown, Layout, SelectionSlider, Text

from mambackpt.draw import Drawing, bars_height, draw_bars, left_margin, sheet, style
from mambackpt.explore.widgets import Explorer, explore, number
from mambackpt.figures import PLACEMENTS, least_block, pool_sizes
from mambackpt.models import PRESETS
from mambackpt.replay import Trace, example_trace, replay


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
        with style():
            height = bars_height(len(self.rules))
            figure, [ax] = sheet(self.finding, [height], left=left_margin(self.rules), gap=5)
            unit = f"million tokens recomputed\n{self.note}"
            values = [tokens / 1e6 for tokens in self.recomputed]
            draw_bars(ax, self.rules, values, unit=unit, words=self.words, highlight=[self.mine])
        bars = (f"{rule}: {words}" for rule, words in zip(self.rules, self.words, strict=True))
        alt = f"{self.finding} Million tokens recomputed, {'; '.join(bars)}. {self.note}"
        return Drawing(figure, self.finding, alt)


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


def explore_replay(trace: Trace | None = None, rule: str = "interval(8192)") -> Explorer:
    """Return an explorer of placement rules: a rule of yours against the usual ones on a trace.

    >>> from mambackpt.replay import trace_from_tokens
    >>> explorer = explore_replay(trace_from_tokens([[7] * 4000, [7] * 4000], grain=512), "none")
    >>> "none recomputes 8,000 tokens" in explorer.page
    True
    >>> explorer.close()

    ``trace`` is a generated one by default. Rules are names of `mambackpt.replay.rules`, joined
    with "+"; what is wrong with one is shown as a sentence. Raises as `replay_view`.
    """
    trace = example_trace() if trace is None else trace
    least = least_block(trace)

    def drawn(rule: str, block: int, budget: int, model: str, pool: int | None) -> Drawing:
        view = replay_view(trace, rule, block=block, budget=budget, model=model, pool=pool)
        return view.draw()

    words = {"style": {"description_width": "8em"}, "layout": Layout(width="25em")}
    pools = [(f"{size:,} tokens", size) for size in pool_sizes(trace, (1 / 8, 1 / 4, 1 / 2, 1, 2))]
    models = [name for name, model in PRESETS.items() if model.recurrent_layers]
    return explore(
        drawn,
        rule=Text(value=rule, description="your rule", continuous_update=False, **words),
        block=SelectionSlider(
            options=[least << n for n in range(4)],
            description="block",
            continuous_update=False,
            **words,
        ),
        budget=number("tokens per step", 8192),
        model=Dropdown(options=models, value="qwen3-next", description="model", **words),
        pool=Dropdown(options=[("unlimited", None), *pools], description="pool", **words),
    )
