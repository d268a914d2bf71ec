"""Figures of what a checkpoint is worth on a trace."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from mambackpt.draw import (
    GREY,
    HIT,
    STATE,
    Drawing,
    bars_height,
    describe_heatmap,
    draw_bars,
    draw_curves,
    draw_heatmap,
    fit_y,
    left_margin,
    name_points,
    numeral,
    sheet,
    write_note,
)
from mambackpt.figures.registry import named, replayed
from mambackpt.models import PRESETS
from mambackpt.replay import Replay, Rule, Trace, generate_shared, optimal, replay

_T = TypeVar("_T")
PLACEMENTS = ("all", "last", "last+junction", "last+junction+chunk")
# What a state costs in tokens of attention cache differs by a factor of ten from each to the next.
_COSTS = ("kimi-k3", "qwen3-next", "kimi-k3-tp16-bf16")
_MULTIPLES = (1, 2, 3, 4, 8)  # block sizes, of the least


def least_block(trace: Trace, tokens: int = 512) -> int:
    """Return the least multiple of the trace's own block that has so many tokens."""
    return -(-tokens // trace.grain) * trace.grain


def pool_sizes(trace: Trace, shares: Sequence[float]) -> list[int]:
    """Return pools in tokens of attention cache, as shares of what all distinct blocks take.

    Rounded to two digits.
    """
    distinct = int(trace.fresh_runs[1].sum()) * trace.grain
    return [int(float(f"{distinct * share:.2g}")) for share in shares]


def _replay_in(
    trace: Trace, rule: str, *, block: int, model: str, tokens: int, eviction: str | None = None
) -> Replay:
    """Replay in a pool that holds so many tokens of the model's attention cache, or states."""
    pool = tokens * PRESETS[model].model_token_bytes
    return replay(trace, rule, block=block, model=model, pool_bytes=pool, eviction=eviction)


def _first_requests(trace: Trace, count: int) -> Trace:
    """Return the trace of the first ``count`` requests."""
    runs = int(trace.row[min(count, len(trace))])
    per_request = ("arrival", "prompt", "output", "conversation", "message", "shared")
    return replace(
        trace,
        **{name: getattr(trace, name)[:count] for name in per_request},
        row=trace.row[: count + 1],
        first=trace.first[:runs],
        count=trace.count[:runs],
    )


def _asked(trace: Trace) -> str:
    return f"{len(trace):,} requests ({trace.name})"


def _together(values: Mapping[str, _T]) -> dict[_T, str]:
    """The names of each value, joined."""
    return {
        value: " or ".join(name for name, other in values.items() if other == value)
        for value in values.values()
    }


_ONE_AT_A_TIME = "A simplification: one request at a time, no states of decode steps."


def _millions(tokens: float) -> str:
    return f"{tokens / 1e6:,.3g}\u00a0M"


@replayed("reuse-against-block")
def _reuse_against_block(trace: Trace) -> Drawing:
    """Reused share and recomputed tokens of four rules against the block size."""
    blocks = [least_block(trace) * times for times in _MULTIPLES]
    runs = {rule: [replay(trace, rule, block=block) for block in blocks] for rule in PLACEMENTS}
    work = {rule: [run.recomputed / 1e6 for run in row] for rule, row in runs.items()}
    reuse = {rule: [100 * run.hit_rate for run in row] for rule, row in runs.items()}
    changes = {rule: 100 * (row[-1] / row[0] - 1) for rule, row in work.items()}
    compared = (
        f"{abs(changes[rule]):.0f} % {'more' if changes[rule] > 0 else 'less'} under '{rule}'"
        for rule in ("all", "last")
    )
    finding = (
        f"Blocks of {blocks[-1]:,} instead of {blocks[0]:,} tokens recompute {', '.join(compared)}."
    )
    figure, [*axes, notes] = sheet(finding, [13, 13, 1], left=5, right=13)
    chosen = {"all": STATE, "last": HIT}
    for ax, rows, label in zip(
        axes, (reuse, work), ("reused (% of prompt)", "recomputed (M tokens)"), strict=True
    ):
        fit_y(ax, rows.values(), least=0 if rows is work else None)
        lines = {rule: (blocks, row) for rule, row in rows.items()}
        draw_curves(
            ax, lines, x_label="tokens per block", y_label=label, highlight=chosen, log_x=True
        )
    write_note(notes, f"{_asked(trace)}, unlimited memory")
    said = (
        f"{rule}: {row[0]:.1f} to {row[-1]:.1f} % reused, {work[rule][0]:,.1f} to "
        f"{work[rule][-1]:,.1f} million tokens recomputed"
        for rule, row in reuse.items()
    )
    alt = f"{finding} {_asked(trace)}; from the smallest to the largest block, {'; '.join(said)}."
    return Drawing(figure, finding, alt)


@replayed("pool-exchange-rates")
def _pool_exchange_rates(trace: Trace) -> Drawing:
    """The same rules in shared pools, for models whose states cost more and less."""
    block = 2 * least_block(trace)
    pools = pool_sizes(trace, (1 / 8, 1 / 4, 1 / 2, 1, 2))
    rates = {name: PRESETS[name].exchange_rate for name in _COSTS}
    reuse = {
        name: {
            rule: [
                100 * _replay_in(trace, rule, block=block, model=name, tokens=tokens).hit_rate
                for tokens in pools
            ]
            for rule in ("attention", *PLACEMENTS)
        }
        for name in _COSTS
    }
    at = 3
    best = {name: max(PLACEMENTS, key=lambda rule: reuse[name][rule][at]) for name in _COSTS}
    costs = _together({f"{rates[name]:,.0f}": rule for name, rule in best.items()})
    winners = (f"'{rule}' where a state costs {cost}" for rule, cost in costs.items())
    finding = (
        f"In a pool of {_millions(pools[at])} tokens the best rule is {', '.join(winners)} tokens "
        "of attention cache."
    )
    figure, [*axes, notes] = sheet(finding, [11] * len(rates) + [3], left=5, right=13)
    shown = [row for rows in reuse.values() for row in rows.values()]
    places = [tokens / 1e6 for tokens in pools]
    for ax, name in zip(axes, _COSTS, strict=True):
        fit_y(ax, shown, least=0)
        lines = {
            "attention alone" if rule == "attention" else rule: (places, row)
            for rule, row in reuse[name].items()
        }
        label = f"{name}, a state costs {rates[name]:,.0f} tokens: pool (M tokens)"
        highlight = {best[name]: HIT}
        draw_curves(ax, lines, x_label=label, y_label="reused (%)", highlight=highlight, log_x=True)
    write_note(
        notes,
        f"Pool in million tokens of attention cache, if it held no state; {_asked(trace)}, blocks "
        f"of {block:,}. {_ONE_AT_A_TIME}",
    )
    said = describe_heatmap(
        [f"{name}, a state costs {rates[name]:,.0f} tokens" for name in _COSTS],
        list(reuse[_COSTS[0]]),
        [[f"{row[at]:.1f} %" for row in reuse[name].values()] for name in _COSTS],
    )
    alt = f"{finding} {_ONE_AT_A_TIME} Reused in that pool, by model: {said}."
    return Drawing(figure, finding, alt)


_WEIGHED = (
    *PLACEMENTS,
    *("interval(2048)", "interval(8192)", "interval(32768)"),
    *("internal", "sglang", "marconi", "llamacpp"),
)


def _optimal_replays(trace: Trace, block: int, counts: Sequence[int]) -> list[Replay]:
    """Replay the best so many fixed positions for the prefixes that this trace shares."""
    rules: list[Rule] = [optimal(n, trace.ceiling.tolist(), grain=trace.grain) for n in counts]
    return [replay(trace, rule, block=block) for rule in rules]


@replayed("states-against-reuse")
def _states_against_reuse(trace: Trace) -> Drawing:
    """What each rule reuses for the states that it writes, and the best fixed positions."""
    block, counts = least_block(trace), (1, 2, 4, 8, 16, 32)
    runs = {rule: replay(trace, rule, block=block) for rule in _WEIGHED}
    points = {rule: (run.states_per_request, 100 * run.hit_rate) for rule, run in runs.items()}
    floor = [
        (run.states_per_request, 100 * run.hit_rate)
        for run in _optimal_replays(trace, block, counts)
    ]
    most = points["all"]
    others = sorted((rule for rule in points if rule != "all"), key=lambda rule: -points[rule][1])
    near = [rule for rule in others if points[rule][1] >= points[others[0]][1] - 1]
    chosen = min(near, key=lambda rule: points[rule][0])
    states, reused = points[chosen]
    best = max(floor, key=lambda point: point[1])
    gap = reused - best[1]
    finding = (
        f"'{chosen}' comes within {most[1] - reused:.1f} points of 'all' with {states:.2f} states "
        f"per request instead of {most[0]:.1f}; the best {counts[-1]} fixed positions stay "
        f"{abs(gap):.1f} points {'below' if gap > 0 else 'above'} it."
    )
    figure, [ax, notes] = sheet(finding, [22, 1], left=5, right=17)
    ax.set_xscale("log", base=2)
    x, y = zip(*floor, *points.values(), strict=True)
    powers = range(math.floor(math.log2(min(x))), math.ceil(math.log2(max(x))) + 1)
    ax.set_xlim(2.0 ** (powers[0] - 0.3), 2.0 ** powers[-1])
    said_powers = [f"{1 << power}" if power >= 0 else f"1/{1 << -power}" for power in powers]
    ax.set_xticks([2.0**power for power in powers], said_powers)
    fit_y(ax, [y])
    ax.plot(x[: len(floor)], y[: len(floor)], ".-", color=GREY, zorder=1)
    for rule, (across, up) in points.items():
        kind = HIT if rule == chosen else GREY
        ax.plot(across, up, "o", color=kind, mfc=kind if rule == chosen else "white", zorder=3)
    ax.set_xlabel("states written per request")
    write_note(notes, f"{_asked(trace)}, blocks of {block:,}, unlimited memory")
    ax.set_ylabel("reused (% of prompt)")
    ends = {f"{n}": point for n, point in zip(counts, floor, strict=True)}
    order = sorted(points, key=lambda rule: -points[rule][1])
    letters = {rule: "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[at] for at, rule in enumerate(order)}
    name_points(ax, {**ends, **{letters[rule]: points[rule] for rule in order}}, floor)
    keys = [f"{letters[rule]}  {rule}" for rule in order]
    keys.append(f"{counts[0]} ... {counts[-1]}  best so many\nfixed positions, known\nin advance")
    ax.text(1.03, 1, "\n".join(keys), va="top", linespacing=1.5, transform=ax.transAxes)
    said = ", ".join(f"{rule} {up:.1f} % with {at:.2f}" for rule, (at, up) in points.items())
    fixed = ", ".join(f"{name} {up:.1f} % with {at:.2f}" for name, (at, up) in ends.items())
    alt = (
        f"{finding} Reused, with states per request: {said}. Best so many fixed positions: {fixed}."
    )
    return Drawing(figure, finding, alt)


@replayed("retention")
def _retention(trace: Trace) -> Drawing:
    """What it costs to keep a state every K tokens: recomputation, and states."""
    block, model = least_block(trace), "qwen3-next"
    every = [block << power for power in range(7)]
    pools = pool_sizes(trace, (1 / 2, 1 / 8))
    runs = {"unlimited": [replay(trace, f"interval({K})", block=block) for K in every]}
    for tokens in pools:
        runs[f"{_millions(tokens)} tokens"] = [
            _replay_in(trace, f"interval({K})", block=block, model=model, tokens=tokens)
            for K in every
        ]
    work = {name: [run.recomputed / 1e6 for run in row] for name, row in runs.items()}
    best = {name: every[row.index(min(row))] for name, row in work.items()}
    limited = {name.removesuffix(" tokens"): best[name] for name in list(work)[1:]}
    in_pools = (f"every {K:,} in a pool of {where}" for K, where in _together(limited).items())
    finding = (
        f"Least is recomputed with a state every {best['unlimited']:,} tokens in unlimited memory, "
        f"{', '.join(in_pools)} tokens."
    )
    figure, [*axes, notes] = sheet(finding, [14, 9, 1], left=5, right=11)
    fit_y(axes[0], work.values(), least=0)
    label = "recomputed (M tokens)"
    lines = {name: (every, row) for name, row in work.items()}
    draw_curves(axes[0], lines, x_label="interval K (tokens)", y_label=label, log_x=True)
    for name, row in work.items():
        axes[0].plot(best[name], min(row), "o", color=HIT, zorder=4)
    written = [run.states_per_request for run in runs["unlimited"]]
    states = {"unlimited": (every, written)}
    label = "states per request"
    x_label = "interval K (tokens)"
    fit_y(axes[1], [written], least=0)
    draw_curves(axes[1], states, x_label=x_label, y_label=label, log_x=True)
    write_note(notes, f"{_asked(trace)}, {model}. {_ONE_AT_A_TIME}")
    said = "; ".join(
        f"{name}: {row[0]:,.1f} at {every[0]:,}, least {min(row):,.1f} at {best[name]:,}, "
        f"{row[-1]:,.1f} at {every[-1]:,}"
        for name, row in work.items()
    )
    alt = (
        f"{finding} Million tokens recomputed with one state every K tokens and at the last "
        f"boundary, {said}. States written per request: {written[0]:.1f} to {written[-1]:.2f}."
    )
    return Drawing(figure, finding, alt)


_EVICTED = ("last", "last+junction", "last+junction+chunk", "interval(4096)")
_ORDERS = ("lru", "hit-node", "thinning", "flops")


@replayed("evictions")
def _evictions(trace: Trace) -> Drawing:
    """What survives in a tight pool: one order of last use against orders that look at states."""
    trace, model = _first_requests(trace, 1000), "qwen3-next"
    [tokens], block = pool_sizes(trace, [1 / 3]), 2 * least_block(trace)
    reuse = {
        rule: [
            100
            * _replay_in(
                trace, rule, block=block, model=model, tokens=tokens, eviction=order
            ).hit_rate
            for order in _ORDERS
        ]
        for rule in _EVICTED
    }
    gains = {
        (rule, order): value - row[0]
        for rule, row in reuse.items()
        for order, value in zip(_ORDERS[1:], row[1:], strict=True)
    }
    (rule, order), gain = max(gains.items(), key=lambda item: item[1])
    worst, loss = min(gains.items(), key=lambda item: item[1])
    finding = (
        f"Against one LRU order, looking at states changes reuse by {numeral(loss, '+z.1f')} "
        f"points ('{worst[1]}' under '{worst[0]}') to {numeral(gain, '+z.1f')} ('{order}' under "
        f"'{rule}')."
    )
    figure, [ax, notes] = sheet(finding, [2.4 * len(reuse), 3], left=left_margin(reuse))
    limits = (min(map(min, reuse.values())), max(map(max, reuse.values())))
    words = [[f"{value:.1f} %" for value in row] for row in reuse.values()]
    draw_heatmap(
        ax, list(reuse.values()), rows=list(reuse), columns=_ORDERS, limits=limits, words=words
    )
    ax.set_xlabel("reused, by order of eviction")
    write_note(
        notes,
        f"{model}, a pool of {_millions(tokens)} tokens, blocks of {block:,}, {_asked(trace)}; "
        f"'flops' weighs by the shape of a 7B hybrid. {_ONE_AT_A_TIME}",
    )
    return Drawing(figure, finding, f"{finding} {describe_heatmap(list(reuse), _ORDERS, words)}.")


@replayed("reads-by-part")
def _reads_by_part(trace: Trace) -> Drawing:
    """Whose states are read under a joined rule, in unlimited memory and in a pool."""
    rule, model, block = "last+junction+chunk", "qwen3-next", least_block(trace)
    [tokens] = pool_sizes(trace, [1 / 2])
    runs = {
        "unlimited memory": replay(trace, rule, block=block),
        f"a pool of {_millions(tokens)} tokens": _replay_in(
            trace, rule, block=block, model=model, tokens=tokens
        ),
    }
    shares = {
        name: {part: 100 * count / max(sum(run.reads.values()), 1) for part, count in reads}
        for name, run in runs.items()
        for reads in [run.reads.items()]
    }
    unlimited, pooled = shares.values()
    most, least = (
        max(unlimited, key=unlimited.__getitem__),
        min(unlimited, key=unlimited.__getitem__),
    )
    finding = (
        f"'{most}' placed the states of {unlimited[most]:.1f} % of the reads, '{least}' of "
        f"{unlimited[least]:.1f} %; in {list(shares)[1]} {pooled[most]:.1f} and "
        f"{pooled[least]:.1f} %."
    )
    parts = list(unlimited)
    heights = [bars_height(len(parts))] * len(runs)
    figure, [*axes, notes] = sheet(finding, [*heights, 2], left=left_margin(parts))
    chosen = [parts.index(most)]
    for ax, (name, run) in zip(axes, runs.items(), strict=True):
        row = [shares[name][part] for part in parts]
        words = [
            f"{share:.1f} % ({run.reads[part]:,})" for part, share in zip(parts, row, strict=True)
        ]
        draw_bars(ax, parts, row, unit=f"% of reads, {name}", words=words, highlight=chosen)
    for ax in axes:
        ax.set_xlim(0, max(ax.get_xlim()[1] for ax in axes))
    write_note(
        notes,
        f"A read: a request resumes after a state. '{rule}', blocks of {block:,}, {model}, "
        f"{_asked(trace)}. {_ONE_AT_A_TIME}",
    )
    said = describe_heatmap(
        [f"in {name}" for name in shares],
        parts,
        [[f"{share:.1f} %" for share in row.values()] for row in shares.values()],
    )
    return Drawing(figure, finding, f"{finding} Reads by the part of '{rule}', {said}.")


@named("interval-u")
def _interval_u() -> Drawing:
    """Two long chats in one pool: too dense a retention evicts itself, too sparse recomputes."""
    block, model, pool = 2176, "qwen3-next", 42 * 10**8
    lengths = {"prefix": 0, "suffix": 60_000, "output": 100, "turn": 100}
    trace = generate_shared(80, groups=2, turns=40, edits=0.5, **lengths)
    every = [block * times for times in (1, 2, 3, 6, 12, 24, 48)]
    limits = {"unlimited memory": None, f"a pool of {pool / 1e9:g} GB": pool}
    reuse = {
        name: [
            100
            * replay(trace, f"interval({K})", block=block, model=model, pool_bytes=limit).hit_rate
            for K in every
        ]
        for name, limit in limits.items()
    }
    pooled = list(reuse.values())[1]
    best = pooled.index(max(pooled))
    finding = (
        f"Two chats of 60,000 tokens in {pool / 1e9:g} GB reuse {pooled[0]:.0f} % with a state "
        f"every {block:,} tokens, {pooled[best]:.0f} % with one every {every[best]:,}, and "
        f"{pooled[-1]:.0f} % with the prompt's last alone."
    )
    figure, [ax, notes] = sheet(finding, [13, 3], left=5, right=2)
    fit_y(ax, reuse.values(), least=0)
    for (name, row), mark, kind in zip(reuse.items(), ("o", "s"), (GREY, HIT), strict=True):
        ax.plot(every, row, marker=mark, color=kind, mfc="white" if kind == GREY else kind)
        at, offset = (2, (0.9, -0.9)) if row == pooled else (0, (0.8, 0.8))
        ax.annotate(name, (every[at], row[at]), xytext=offset, textcoords="offset fontsize")
    ax.set_xscale("log", base=2)
    ax.set_xticks(every, [f"{K:,}" for K in every])
    ax.minorticks_off()
    ax.set_xlabel("a state every so many tokens, and at the prompt's last block boundary")
    ax.set_ylabel("reused (% of prompt)")
    sizes = PRESETS[model]
    write_note(
        notes,
        f"{len(trace)} requests, a turn of each chat after the other; half of the turns append, "
        f"half send another text from a random token on. Blocks of {block:,}; bytes of {model}: "
        f"{sizes.model_state_bytes / 1e6:.1f} MB a state, {sizes.model_token_bytes:,} B a token. "
        f"{_ONE_AT_A_TIME}",
    )
    said = "; ".join(
        f"in {name} "
        + ", ".join(f"{value:.1f} % at {K:,}" for K, value in zip(every, row, strict=True))
        for name, row in reuse.items()
    )
    return Drawing(figure, finding, f"{finding} Reused by the interval, {said}.")
