"""Figures of resumed requests: what a checkpoint weighs, and what a wrong state changes."""

from collections.abc import Mapping, Sequence

from mambackpt.draw import (
    ERROR,
    STATE,
    Drawing,
    bars_height,
    describe_bars,
    describe_curves,
    describe_heatmap,
    draw_bars,
    draw_curves,
    draw_heatmap,
    left_margin,
    numeral,
    sheet,
    sheets,
    style,
)
from mambackpt.errors import CheckpointValueError
from mambackpt.figures.registry import named
from mambackpt.models import PRESETS
from mambackpt.resume import Comparison, Fault, Way

_TICKS = (0.01, 0.1, 1, 10)  # of errors that are none of rounding
_FLOOR = 1e-4  # differences below are rounding, in float32 and in these models
_WHOLE = (
    *("qwen3.5-4b", "qwen3-next", "granite-4-h-small", "kimi-linear-48b", "nemotron-3-nano"),
    *("kimi-k3", "nemotron-3-super"),
)


@named("checkpoint-in-tokens")
def _checkpoint_in_tokens() -> Drawing:
    """The bytes of one checkpoint of whole models, in tokens of their own attention cache."""
    models = sorted((PRESETS[name] for name in _WHOLE), key=lambda model: model.exchange_rate)
    names = [model.name for model in models]
    rates = [round(model.exchange_rate) for model in models]
    words = [
        f"{rate:,}  ({model.model_state_bytes / 1e6:,.1f} MB / {model.model_token_bytes:,} B)"
        for rate, model in zip(rates, models, strict=True)
    ]
    finding = (
        f"One checkpoint weighs as much as the attention cache of {min(rates):,} to {max(rates):,} "
        "tokens."
    )
    figure, [ax] = sheet(finding, [bars_height(len(models))], left=left_margin(names))
    unit = "tokens (bytes of a checkpoint of all layers / attention bytes per token)"
    draw_bars(ax, names, rates, unit=unit, words=words, highlight=[0, len(models) - 1])
    bars = describe_bars(names, [f"{rate:,}" for rate in rates])
    return Drawing(figure, finding, f"Bars of tokens per checkpoint: {bars}. {finding}")


def draw_faults(
    rows: Sequence[tuple[str, Fault, Comparison]], *, medium: str = "review"
) -> Drawing:
    """Return a table of next tokens that change: one row a fault, one column a model.

    ``rows`` are those of `mambackpt.resume.fault_rows`. Raises CheckpointValueError without rows.
    """
    if not rows:
        raise CheckpointValueError("rows is empty; expected faults. Try fault_rows().")
    found = {(fault.name, model): comparison for model, fault, comparison in rows}
    names = list(dict.fromkeys(fault.name for _, fault, _ in rows))
    models = list(dict.fromkeys(model for model, _, _ in rows))
    words, shares = [], []
    for name in names:
        cells = [found.get((name, model)) for model in models]
        words.append(["–" if c is None else f"{c.changed} of {len(c.by_token)}" for c in cells])
        shares.append([0.0 if c is None else c.changed / len(c.by_token) for c in cells])
    silent = [name for name, row in zip(names, shares, strict=True) if not any(row)]
    changed = sum(any(row) for row in shares)
    worst = max(comparison.changed for _, fault, comparison in rows if "NaN" not in fault.name)
    tokens = max(len(comparison.by_token) for *_, comparison in rows)
    finding = (
        f"{changed} of {len(names)} faults change the next token, up to {worst} of {tokens} times "
        f"without a NaN; {len(silent)} changes none, and only the logits show it."
    )
    with style(medium):
        pages = sheets(finding, [2.0 * len(names)], left=left_margin(names))
        ax = draw_heatmap(
            pages.axes[0], shares, rows=names, columns=models, limits=(0, 1), words=words,
            colour=ERROR,
        )  # fmt: skip
        ax.set_xlabel("tokens after the resume whose likeliest next token changes")
    return pages.drawing(finding, f"{finding} {describe_heatmap(names, models, words)}.")


def draw_fading(
    models: Mapping[str, Mapping[str, Comparison]], *, highlight: str, medium: str = "review"
) -> Drawing:
    """Return how each fault's error fades: one panel a model, one curve a fault.

    ``models`` maps names of models to comparisons by fault, of 64 tokens each; the finding is about
    the fault ``highlight``. A point is the largest error of a logit since the point before it.
    """
    panels = {model: {name: _fading(one) for name, one in m.items()} for model, m in models.items()}
    ends = {model: panel[highlight][1][-1] for model, panel in panels.items()}
    told = " and ".join(f"{end:.1g} in {model}" for model, end in ends.items())
    last = max(panels[next(iter(panels))][highlight][0])
    finding = (
        f"{last // 2 + 1} to {last} tokens later, a {highlight} still moves a logit by {told}: "
        "three wrong tokens stay in what they wrote."
    )
    with style(medium):
        labels = [name for panel in panels.values() for name in panel]
        right = left_margin(labels) + 0.4
        pages = sheets(finding, [11] * len(panels), left=6.8, right=right, gap=4.4)
        for ax, (model, panel) in zip(pages.axes, panels.items(), strict=True):
            ax.set(xlim=(0.9, 1.1 * last), ylim=(_TICKS[0], _TICKS[-1]))
            ax.set_yscale("log")
            draw_curves(
                ax,
                panel,
                x_label=f"tokens after the resume, {model}",
                y_label="logits off by",
                highlight={highlight: STATE},
                log_x=True,
            )
            ax.set(xlim=(0.9, 1.1 * last), ylim=(_TICKS[0], _TICKS[-1]))
            ax.set_yticks(_TICKS, [numeral(tick) for tick in _TICKS])
            ax.minorticks_off()
    alt = "; ".join(f"{model}: {describe_curves(panel, '.1g')}" for model, panel in panels.items())
    return pages.drawing(finding, f"{finding} {alt}.")


def _fading(comparison: Comparison) -> tuple[list[int], list[float]]:
    """The largest error in tokens 1, 2, 3 to 4, 5 to 8, and so on, as two digits.

    What is smaller than the axis is cut off; rounding is another on another machine.
    """
    errors = comparison.by_token
    ends = [1 << power for power in range(len(errors).bit_length()) if 1 << power <= len(errors)]
    starts = [0, *ends[:-1]]
    largest = [max(errors[a:b]) for a, b in zip(starts, ends, strict=True)]
    return ends, [max(float(f"{error:.1e}"), _TICKS[0]) for error in largest]


def draw_gap(ways: Sequence[Way], *, medium: str = "review") -> Drawing:
    """Return the error that each way of closing the gap leaves in each recurrent layer's state.

    ``ways`` are those of `mambackpt.resume.gap_ways`.
    """
    names = [f"{way.name}\n{100 * way.cost:.0f} % of the products" for way in ways]
    columns = [f"layer {at + 1 + at // 3}" for at in range(len(ways[0].errors))]
    words = [["right" if e < _FLOOR else f"{100 * e:.0f} %" for e in way.errors] for way in ways]
    [alone] = [way for way in ways if way.name == "recurrent layers alone"]
    wrong = alone.errors[alone.exact_layers :]
    finding = (
        f"Run alone, the recurrent layers are right up to the first attention layer, and "
        f"{100 * min(wrong):.0f} to {100 * max(wrong):.0f} % off behind it."
    )
    with style(medium):
        pages = sheets(finding, [2.9 * len(names)], left=left_margin(names))
        values = [[min(error, 1.0) for error in way.errors] for way in ways]
        ax = draw_heatmap(
            pages.axes[0], values, rows=names, columns=columns, limits=(0, 1), words=words,
            colour=ERROR,
        )  # fmt: skip
        ax.set_xlabel("error of a state, of its largest element; layers 4 and 8 are attention")
    return pages.drawing(finding, f"{finding} {describe_heatmap(names, columns, words)}.")
