"""Figures of what is computed although it was there before, and why."""

from collections.abc import Mapping, Sequence
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from mambackpt.draw import (
    CHECKPOINT,
    ERROR,
    GREY,
    HIT,
    STATE,
    Drawing,
    fit_y,
    left_margin,
    name_lines,
    sheet,
    sheets,
    text_width,
    tint,
)
from mambackpt.figures.registry import named, replayed
from mambackpt.figures.replays import least_block, pool_sizes
from mambackpt.figures.words import PLACEMENTS
from mambackpt.models import PRESETS, HybridModel
from mambackpt.replay import VETOES, Missed, PrefillRate, Trace, explain_misses
from mambackpt.why import common_settings, fork_stairs, lost_to_margin, resend_stairs, with_drop

_BLOCKS = 6  # that the stairs climb
_Line = tuple[Sequence[int], Sequence[int], str, str]  # x, y, colour, style


def _draw_stairs(ax: Axes, lines: Mapping[str, _Line], x_label: str, tick: int) -> None:
    """Draw each line once, named at its end; lines that coincide are named together."""
    together: dict[tuple[int, ...], list[str]] = {}
    for name, (_, y, _, _) in lines.items():
        together.setdefault(tuple(y), []).append(name)
    drawn = {}
    for y, names in together.items():
        x, _, colour, style = lines[names[0]]
        [line] = ax.plot(x, y, style, color=colour, label=" = ".join(names))
        drawn[" =\n".join(names)] = line
    x, *_ = next(iter(lines.values()))
    first, longest = (x[0] // tick * tick, x[-1])
    fit_y(ax, list(together), least=0)
    ax.set_xlim(first, longest)
    ticks = range(first, longest + 1, tick)
    ax.set_xticks(ticks, [f"{n:,}" for n in ticks])
    ax.set_yticks(ax.get_yticks(), [f"{n:,.0f}" for n in ax.get_yticks()])
    ax.set_xlabel(x_label)
    ax.set_ylabel("computed again\n(tokens)")
    name_lines(ax, drawn)


@named("staircase", options=("model", "block", "hash", "prefill_rate"))
def _staircase(
    *,
    model: HybridModel | None = None,
    block: int | None = None,
    hash: int | None = None,
    prefill_rate: PrefillRate | None = None,
) -> Drawing:
    """What a prompt computes again when it is sent again, and what two compute that share some."""
    settings = common_settings(model, block=block, hash_unit=hash)
    M, H = settings.mamba_block_size, settings.hash_block_size
    longest, shortest = _BLOCKS * M, max(_BLOCKS * (M - H), 1)
    plain, drop = (
        resend_stairs(s, longest + 1, shortest=shortest) for s in (settings, with_drop(settings))
    )
    forks, dropped = (fork_stairs(s, longest, 2 * M) for s in (settings, with_drop(settings)))
    length, before, after = max(plain.cliffs(), key=lambda cliff: (cliff[1] - cliff[2], cliff[0]))
    timed = ""
    if prefill_rate is not None:
        timed = f" ({prefill_rate.words(before)} against {prefill_rate.words(after)})"
    shared, pair = forks.lengths[-1], forks.verdicts[-1]
    finding = (
        f"{length:,} tokens sent again compute {before:,}, one more only {after:,}{timed}; where "
        f"{shared:,} are shared, the next prompt resumes after {pair.joint:,}, a third after "
        f"{pair.third:,}."
    )
    left = 4.6 + text_width(f"{10 ** len(str(longest)):,}")
    pages = sheets(finding, [8, 8], left=left, right=12)
    upper, lower = pages.axes
    sizes = f"block {M:,}, hash unit {H:,}"
    cliffs = plain.cliffs()
    lines: dict[str, _Line] = {
        "as it is": (plain.lengths[:-1], plain.computed[:-1], STATE, "-"),
        "the ceiling": (plain.lengths[:-1], plain.at_the_ceiling[:-1], GREY, ":"),
        "with the drop": (drop.lengths[:-1], drop.computed[:-1], ERROR, "--"),
    }
    _draw_stairs(upper, lines, f"tokens of a prompt that is sent again ({sizes})", H)
    at, tops = [n for n, *_ in cliffs], [top for _, top, _ in cliffs]
    upper.plot(at, tops, "o", color=STATE, mfc="white", zorder=3)
    lines = {
        "the next prompt": (forks.lengths, forks.computed, ERROR, "-"),
        "a third prompt": (forks.lengths, forks.computed_by_a_third, HIT, "-"),
        "the ceiling": (forks.lengths, forks.at_the_ceiling, GREY, ":"),
        "a third, drop": (dropped.lengths, dropped.computed_by_a_third, HIT, "--"),
    }
    _draw_stairs(lower, lines, f"tokens that prompts share before {2 * M:,} of their own", M)
    told = ", ".join(f"{n:,}: {top:,} then {bottom:,}" for n, top, bottom in cliffs[:_BLOCKS])
    alt = (
        f"{finding} Two staircases for {sizes}, retention 0, budget {settings.budget:,}. Upper: "
        f"tokens that a prompt sent again computes again, with cliffs at {told}; with the drop "
        f"{max(drop.computed):,} at most. Lower: of what prompts share the next computes "
        f"{forks.computed[-1]:,} of {shared:,} again, a third {forks.computed_by_a_third[-1]:,}, "
        f"under the drop {dropped.computed_by_a_third[-1]:,}."
    )
    return pages.drawing(finding, alt)


@named("margin-map", options=("model", "block", "hash", "margin"))
def _margin_map(
    *,
    model: HybridModel | None = None,
    block: int | None = None,
    hash: int | None = None,
    margin: Sequence[int] | None = None,
) -> Drawing:
    """Which lengths of a turn lose their last state to what a lookup computes again."""
    asked = model is not None or block is not None or hash is not None
    grid = common_settings(model, block=block).mamba_block_size if asked else 2048
    margins = list(margin or ([hash or grid] if asked else (64, 448, 1024)))
    lost = {tokens: lost_to_margin(grid, tokens) for tokens in margins}
    words = {
        tokens: f"{len(row):,} of {grid:,} = {100 * len(row) / grid:.6g} %"
        for tokens, row in lost.items()
    }
    about = margins[len(margins) // 2]
    finding = (
        f"Where a lookup computes {about:,} tokens again, {words[about]} of the lengths lose their "
        "last state."
    )
    labels = [f"margin {tokens:,}" for tokens in margins]
    figure, [ax] = sheet(
        finding, [2.2 * len(margins)], left=left_margin(labels),
        right=1 + max(map(text_width, words.values())),
    )  # fmt: skip
    for row, tokens in enumerate(margins):
        ax.barh(row, grid, 0.62, color=tint(HIT, 0.3))
        for first, last in _runs(lost[tokens]):
            ax.barh(
                row, last + 1 - first, 0.62, left=first, color=tint(ERROR, 0.5), edgecolor=ERROR,
                hatch="///", linewidth=0,
            )  # fmt: skip
        ax.annotate(words[tokens], (grid, row), (6, 0), textcoords="offset points", va="center")
    ax.set_yticks(range(len(margins)), labels)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set_ylim(len(margins) - 0.4, -0.6)
    ax.set_xlim(0, grid)
    ax.set_xticks([0, grid // 4, grid // 2, 3 * grid // 4, grid])
    ax.set_xticklabels([f"{tick:,.0f}" for tick in ax.get_xticks()])
    ax.set_xlabel(f"where the last token lies in a grid of states every {grid:,} (hatched: lost)")
    said = "; ".join(f"{label}: {words[n]}" for label, n in zip(labels, margins, strict=True))
    return Drawing(figure, finding, f"{finding} Lost of all lengths, {said}.")


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """First and last of each run of consecutive numbers."""
    runs = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    joined = ([number for _, number in run] for _, run in runs)
    return [(run[0], run[-1]) for run in joined]


_IN_WORDS = {
    "all": "every block's end",
    "last": "only the last boundary",
    "last+junction": "and where prefixes part",
    "last+junction+chunk": "and every chunk's end",
}
_FILLS: dict[str, tuple[str, float, str]] = {
    "state beyond the fork": (ERROR, 0.45, ""),
    "no state there": (ERROR, 0.2, "xxx"),
    "state evicted": (CHECKPOINT, 0.5, ""),
    "attention evicted": (CHECKPOINT, 0.25, "///"),
    "below a block": (STATE, 0.35, "..."),
    "drop": (GREY, 0.5, "---"),
}


def _fill(cause: str) -> dict[str, object]:
    colour, strength, hatch = _FILLS[cause]
    return {
        "facecolor": tint(colour, strength),
        "edgecolor": tint(colour, 0.9) if hatch else "none",
        "hatch": hatch,
        "linewidth": 0,
    }


def _stack(ax: Axes, row: int, missed: Missed) -> float:
    """One bar of shares of the prompt tokens; return where it ends."""
    prompt, at = int(missed.replay.prompt.sum()), 0.0
    for cause in _FILLS:
        share = 100 * float(missed.tokens[cause].sum()) / prompt
        ax.add_patch(Rectangle((at, row - 0.31), share, 0.62, **_fill(cause)))  # type: ignore[arg-type]
        at += share
    return at


def _write_key(ax: Axes, causes: Sequence[str], row: float, width: float, em: float) -> None:
    """Name the fills above the bars, in lines as wide as the Axes."""
    x, line = 0.0, 0
    for cause in causes:
        wide = (text_width(cause) + 3.2) * em
        if x + wide > width:
            x, line = 0.0, line + 1
        up = row + 0.85 * line
        ax.add_patch(Rectangle((x, up - 0.25), 1.3 * em, 0.5, **_fill(cause)))  # type: ignore[arg-type]
        ax.text(x + 1.8 * em, up, cause, va="center")
        x += wide


@replayed("why-missed")
def _why_missed(trace: Trace) -> Drawing:
    """Tokens that were there before and are computed again, by what vetoed their reuse."""
    block, model = 2 * least_block(trace), "qwen3-next"
    [tokens] = pool_sizes(trace, [1 / 3])
    pool = tokens * PRESETS[model].model_token_bytes
    memories = {"unlimited memory": {}, f"a pool of {tokens / 1e6:,.3g} M tokens": {"pool": pool}}
    rows: list[tuple[str, str, Missed]] = []
    for memory, limited in memories.items():
        for rule in PLACEMENTS:
            limits = {"pool_bytes": limited["pool"], "model": model} if limited else {}
            missed = explain_misses(trace, rule, block=block, **limits)  # type: ignore[arg-type]
            rows.append((memory, rule, missed))
    prompt = int(trace.prompt.sum())
    shares = [
        {cause: 100 * int(missed.tokens[cause].sum()) / prompt for cause in VETOES}
        for _, _, missed in rows
    ]
    at = PLACEMENTS.index("last")
    lost = {name: shares[at + n * len(PLACEMENTS)] for n, name in enumerate(memories)}
    most = {name: max(row, key=row.__getitem__) for name, row in lost.items()}
    said = (
        f"'{cause}' in {name} ({lost[name][cause]:.1f}\u00a0% of the prompt tokens)"
        for name, cause in most.items()
    )
    finding = f"With a state at the last boundary alone, most is lost to {', to '.join(said)}."
    labels = [_IN_WORDS[rule] for _, rule, _ in rows]
    causes = [cause for cause in _FILLS if any(row[cause] > 0 for row in shares)]
    places = [row + 1 + row // len(PLACEMENTS) for row in range(len(rows))]
    figure, [ax] = sheet(finding, [1.55 * (places[-1] + 3)], left=left_margin(labels), right=5)
    ends = [_stack(ax, place, missed) for place, (_, _, missed) in zip(places, rows, strict=True)]
    longest = max(ends)
    ax.set_xlim(0, longest)
    ax.set_xticks([tick for tick in ax.get_xticks() if 0 <= tick <= longest])
    ax.set_ylim(places[-1] + 0.6, -2.2)
    em = longest / (ax.get_position().width * figure.get_figwidth() * 72) * _points(ax)
    for place, (_, _, missed), end in zip(places, rows, ends, strict=True):
        waste = 100 * float(missed.wasted.sum()) / prompt
        ax.text(end + 0.5 * em, place, f"{waste:.1f} %", va="center")
    for number, memory in enumerate(memories):
        head = f"{memory}, blocks of {block:,}, {len(trace):,} requests"
        ax.text(0, places[number * len(PLACEMENTS)] - 0.9, head, va="center", weight="bold")
    _write_key(ax, causes, -1.8, longest, em)
    ax.set_yticks(places, labels)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set_xlabel("% of the prompt tokens: seen before, computed again")
    listed = "; ".join(
        f"{memory}, {_IN_WORDS[rule]} ('{rule}'): "
        + ", ".join(f"{cause} {row[cause]:.1f} %" for cause in causes)
        for (memory, rule, _), row in zip(rows, shares, strict=True)
    )
    alt = (
        f"{finding} Stacked bars of {trace.name}, {model}, one request at a time, shares of the "
        f"prompt tokens: {listed}."
    )
    return Drawing(figure, finding, alt)


def _points(ax: Axes) -> float:
    return float(ax.xaxis.label.get_fontsize())
