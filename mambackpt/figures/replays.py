"""Figures of what a checkpoint is worth on a trace."""

from collections.abc import Sequence
from dataclasses import replace

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
    is_slide,
    left_margin,
    numeral,
    sheets,
    side_by_side,
)
from mambackpt.figures.registry import named, replayed
from mambackpt.figures.words import (
    PLACEMENTS,
    asked,
    code_words,
    listed,
    rule_in_words,
    short_words,
)
from mambackpt.models import PRESETS
from mambackpt.replay import Replay, Rule, Trace, generate_shared, optimal, replay

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


_CEILING = "Ceiling: what an unlimited cache of attention alone reuses."
_ONE_AT_A_TIME = "A simplification: one request at a time, no states of decode steps."


def _asked(trace: Trace) -> str:
    words = asked(trace)
    return words[0].upper() + words[1:]


def _millions(tokens: float) -> str:
    return f"{tokens / 1e6:,.3g}\u00a0M"


_NAMES = {rule: short_words(rule, width=19) for rule in PLACEMENTS}
_LABELS = 20.5  # em to the right of curves, for their names in words


@replayed("reuse-against-block")
def _reuse_against_block(trace: Trace) -> Drawing:
    """How much more or less is recomputed with larger blocks, under four rules."""
    blocks = [least_block(trace) * times for times in _MULTIPLES]
    runs = {rule: [replay(trace, rule, block=block) for block in blocks] for rule in PLACEMENTS}
    more = {
        rule: [100 * (run.recomputed / row[0].recomputed - 1) for run in row]
        for rule, row in runs.items()
    }
    below = {rule: [-100 * run.distance for run in row] for rule, row in runs.items()}
    compared = listed(
        [
            f"{abs(more[rule][-1]):.0f} % {'more' if more[rule][-1] > 0 else 'less'} with a state "
            f"at {'every boundary' if rule == 'all' else 'the last boundary only'}"
            for rule in ("all", "last")
        ]
    )
    finding = f"Blocks of {blocks[-1]:,} instead of {blocks[0]:,} tokens recompute {compared}."
    note = f"{_asked(trace)}, unlimited memory. {_CEILING} {code_words(PLACEMENTS)}"
    pages = sheets(finding, [15, 15], left=5, right=_LABELS, note=note)
    chosen = {_NAMES["all"]: STATE, _NAMES["last"]: HIT}
    panels = (
        (more, f"recomputed (%, from {blocks[0]:,})"),
        (below, "reused (points from ceiling)"),
    )
    for ax, (rows, label) in zip(pages.axes, panels, strict=True):
        fit_y(ax, [[0], *rows.values()], headroom=0)
        lines = {_NAMES[rule]: (blocks, row) for rule, row in rows.items()}
        x_label = "tokens per block"
        draw_curves(ax, lines, x_label=x_label, y_label=label, highlight=chosen, log_x=True)
        ax.axhline(0, color=GREY, linewidth=0.8, zorder=0)
    said = "; ".join(
        f"{rule}: {row[0].recomputed / 1e6:,.1f} to {row[-1].recomputed / 1e6:,.1f} million tokens "
        f"recomputed ({numeral(more[rule][-1], '+z.1f')} %), {-below[rule][0]:.1f} to "
        f"{-below[rule][-1]:.1f} points below an unlimited attention cache"
        for rule, row in runs.items()
    )
    alt = f"{finding} {asked(trace)}; from the smallest to the largest block, {said}."
    return pages.drawing(finding, alt)


def _reuse_in_pools(
    trace: Trace, model: str, block: int, pools: Sequence[int]
) -> dict[str, list[float]]:
    """Reused percent by rule, in each pool of so many tokens of the model's attention cache."""
    return {
        rule: [
            100 * _replay_in(trace, rule, block=block, model=model, tokens=tokens).hit_rate
            for tokens in pools
        ]
        for rule in PLACEMENTS
    }


@replayed("pool-exchange-rates")
def _pool_exchange_rates(trace: Trace) -> Drawing:
    """What each rule loses to the best one in a shared pool, where states cost more and less."""
    block, at = 2 * least_block(trace), 3
    pools = pool_sizes(trace, (1 / 8, 1 / 4, 1 / 2, 1, 2))
    reuse = {name: _reuse_in_pools(trace, name, block, pools) for name in _COSTS}
    costs = {name: f"{PRESETS[name].exchange_rate:,.0f}" for name in _COSTS}
    best = {name: max(PLACEMENTS, key=lambda rule: reuse[name][rule][at]) for name in _COSTS}
    behind = {
        name: {
            rule: [value - max(column) for value, *column in zip(row, *rows.values(), strict=True)]
            for rule, row in rows.items()
        }
        for name, rows in reuse.items()
    }
    first, last = _COSTS[0], _COSTS[-1]
    finding = (
        f"In a pool of {_millions(pools[at])} tokens, a state at every block boundary loses "
        f"{-behind[first]['all'][at]:.1f} points of reuse to the best rule where a state costs "
        f"{costs[first]} tokens of attention cache, and {-behind[last]['all'][at]:.1f} where it "
        f"costs {costs[last]}."
    )
    winners = listed(
        [
            f"'{rule}' where a state costs {listed([costs[n] for n in _COSTS if best[n] == rule])}"
            for rule in dict.fromkeys(best.values())
        ]
    )
    note = (
        f"Pool in million tokens of attention cache, if it held no state; {asked(trace)}, blocks "
        f"of {block:,}. {_ONE_AT_A_TIME} {code_words(PLACEMENTS)} Best in {_millions(pools[at])} "
        f"is {winners}."
    )
    heights = [12.0] * len(_COSTS)
    pages = sheets(finding, heights, left=5, right=_LABELS, over=1.8, note=note)
    for ax, name in zip(pages.axes, _COSTS, strict=True):
        fit_y(ax, [[0], *(row for rows in behind.values() for row in rows.values())], headroom=0)
        lines = {
            _NAMES[rule]: ([tokens / 1e6 for tokens in pools], row)
            for rule, row in behind[name].items()
        }
        ax.set_title(f"{name}: a state costs {costs[name]} tokens")
        draw_curves(
            ax,
            lines,
            x_label="pool (M tokens)",
            y_label="points from the best",
            highlight={_NAMES["all"]: STATE},
            log_x=True,
        )
    said = describe_heatmap(
        [f"{name}, a state costs {cost} tokens" for name, cost in costs.items()],
        list(PLACEMENTS),
        [[f"{row[at]:.1f} %" for row in rows.values()] for rows in reuse.values()],
    )
    alt = f"{finding} {_ONE_AT_A_TIME} Reused in that pool, by model: {said}."
    return pages.drawing(finding, alt)


_WEIGHED = (
    *PLACEMENTS,
    *("interval(2048)", "interval(8192)", "interval(32768)"),
    *("internal", "sglang", "marconi", "llamacpp"),
)
_ON_SLIDE = (*PLACEMENTS, "interval(8192)", "sglang", "llamacpp")


def _optimal_replays(trace: Trace, block: int, counts: Sequence[int]) -> list[Replay]:
    """Replay the best so many fixed positions for the prefixes that this trace shares."""
    rules: list[Rule] = [optimal(n, trace.ceiling.tolist(), grain=trace.grain) for n in counts]
    return [replay(trace, rule, block=block) for rule in rules]


def _joined(rows: dict[str, Replay]) -> dict[tuple[str, ...], Replay]:
    """The rows with the most reuse first; rows that differ in nothing are one, with both names."""
    names: dict[tuple[int, int], list[str]] = {}
    for name, run in rows.items():
        names.setdefault((run.recomputed, run.states_written), []).append(name)
    order = sorted(names)
    same = {(run.recomputed, run.states_written): run for run in rows.values()}
    return {tuple(names[key]): same[key] for key in order}


@replayed("states-against-reuse")
def _states_against_reuse(trace: Trace) -> Drawing:
    """What each rule leaves unused, and the states that it writes for it."""
    block, counts = least_block(trace), (4, 32)
    weighed = _ON_SLIDE if is_slide() else _WEIGHED
    runs = {rule: replay(trace, rule, block=block) for rule in _WEIGHED}
    best = [f"best {n} fixed positions, in hindsight" for n in counts]
    fixed = dict(zip(best, _optimal_replays(trace, block, counts), strict=True))
    others = sorted((rule for rule in runs if rule != "all"), key=lambda rule: runs[rule].distance)
    near = [r for r in others if runs[r].distance <= runs[others[0]].distance + 0.01]
    chosen = min(near, key=lambda rule: runs[rule].states_per_request)
    gap = 100 * (runs[chosen].distance - runs["all"].distance)
    finding = (
        f"'{chosen}' ({rule_in_words(chosen)}) leaves {gap:.1f} points more unused than a state at "
        f"every boundary, with {runs[chosen].states_per_request:.2f} states per request instead of "
        f"{runs['all'].states_per_request:.1f}."
    )
    rows = _joined({rule: runs[rule] for rule in weighed} | fixed)
    labels = [
        "\n= ".join(name if name in fixed else short_words(name) for name in names)
        for names in rows
    ]
    typed = [" = ".join(name for name in names if name not in fixed) for names in rows]
    note = (
        f"{_asked(trace)}, blocks of {block:,}, unlimited memory. "
        f"{code_words([name for name in typed if name], rows=True)} {_CEILING}"
    )
    spare = 1.25 * max(label.count("\n") for label in labels)
    height = bars_height(len(labels)) + spare * len(labels)
    pages = sheets(finding, [height], left=left_margin(labels), note=note)
    unused, states = side_by_side(pages.axes[0], 2, gap=1.5)
    highlight = [at for at, label in enumerate(labels) if short_words(chosen) in label]
    draw_bars(
        unused,
        labels,
        [100 * run.distance for run in rows.values()],
        unit="points below the ceiling",
        words=[f"{100 * run.distance:.1f}" for run in rows.values()],
        highlight=highlight,
    )
    draw_bars(
        states,
        [""] * len(labels),
        [run.states_per_request for run in rows.values()],
        unit="states per request",
        words=[f"{run.states_per_request:.2f}" for run in rows.values()],
        highlight=highlight,
    )
    said = ", ".join(
        f"{rule} {100 * run.hit_rate:.1f} % with {run.states_per_request:.2f}"
        for rule, run in runs.items()
    )
    hindsight = ", ".join(
        f"{name} {100 * run.hit_rate:.1f} % with {run.states_per_request:.2f}"
        for name, run in fixed.items()
    )
    alt = f"{finding} Reused, with states per request: {said}, {hindsight}."
    return pages.drawing(finding, alt)


@replayed("retention")
def _retention(trace: Trace) -> Drawing:
    """What it costs to keep a state every K tokens: recomputation, and states."""
    block, model = least_block(trace), "qwen3-next"
    every = [block << power for power in range(7)]
    pools = pool_sizes(trace, (1 / 2, 1 / 8))
    runs = {"unlimited memory": [replay(trace, f"interval({K})", block=block) for K in every]}
    for tokens in pools:
        runs[f"a pool of {_millions(tokens)}"] = [
            _replay_in(trace, f"interval({K})", block=block, model=model, tokens=tokens)
            for K in every
        ]
    work = {name: [run.recomputed / 1e6 for run in row] for name, row in runs.items()}
    best = {name: every[row.index(min(row))] for name, row in work.items()}
    least = {
        f"every {K:,}": listed([name for name in best if best[name] == K])
        for K in dict.fromkeys(best.values())
    }
    finding = (
        "Least is recomputed with a state "
        f"{listed([f'{K} tokens in {where}' for K, where in least.items()])}."
    )
    note = (
        f"{_asked(trace)}, {model}: a state costs {PRESETS[model].exchange_rate:,.0f} "
        f"tokens of attention cache, in which pools are counted too. {_ONE_AT_A_TIME} --rule is "
        "interval(K); a filled mark is the least of its line."
    )
    pages = sheets(finding, [14, 9], left=5, right=12, note=note)
    fit_y(pages.axes[0], work.values(), least=0)
    lines = {name: (every, row) for name, row in work.items()}
    x_label = "a state every K tokens, and at the last boundary"
    draw_curves(pages.axes[0], lines, x_label=x_label, y_label="recomputed (M tokens)", log_x=True)
    for (name, row), line in zip(work.items(), list(pages.axes[0].lines), strict=True):
        marker = str(line.get_marker())
        pages.axes[0].plot(best[name], min(row), marker, color=HIT, zorder=4)
    written = [run.states_per_request for run in runs["unlimited memory"]]
    fit_y(pages.axes[1], [written], least=0)
    draw_curves(
        pages.axes[1],
        {"unlimited memory": (every, written)},
        x_label=x_label,
        y_label="states per request",
        log_x=True,
    )
    said = "; ".join(
        f"{name}: {row[0]:,.1f} at {every[0]:,}, least {min(row):,.1f} at {best[name]:,}, "
        f"{row[-1]:,.1f} at {every[-1]:,}"
        for name, row in work.items()
    )
    alt = (
        f"{finding} Million tokens recomputed with one state every K tokens and at the last "
        f"boundary, {said}. States written per request: {written[0]:.1f} to {written[-1]:.2f}."
    )
    return pages.drawing(finding, alt)


_EVICTED = ("last", "last+junction", "last+junction+chunk", "interval(4096)")
_ORDERS = {
    "lru": "oldest use\n(lru)",
    "hit-node": "oldest hit\n(hit-node)",
    "thinning": "covers least\n(thinning)",
    "flops": "saves least\n(flops)",
}


@replayed("evictions")
def _evictions(trace: Trace) -> Drawing:
    """What orders that look at states lose and gain in a tight pool, against last use alone."""
    whole, trace, model = trace, _first_requests(trace, 1000), "qwen3-next"
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
    gains = {rule: [value - row[0] for value in row] for rule, row in reuse.items()}
    changes = [change for row in gains.values() for change in row[1:]]
    finding = (
        "Orders of eviction that look at states change what is reused by "
        f"{numeral(min(changes), '+z.1f')} to {numeral(max(changes), '+z.1f')} points, against "
        "evicting the oldest use."
    )
    note = (
        f"{model}: a state costs {PRESETS[model].exchange_rate:,.0f} tokens; a pool of "
        f"{_millions(tokens)} tokens, blocks of {block:,}, {asked(trace, whole)}; 'flops' weighs "
        f"age and work per byte, by the shape of a 7B hybrid. {_ONE_AT_A_TIME} "
        f"{code_words(_EVICTED, rows=True)}"
    )
    rows = [short_words(rule, width=18) for rule in _EVICTED]
    words = [
        [f"{row[0]:.1f} %", *(numeral(change, "+z.1f") for change in gains[rule][1:])]
        for rule, row in reuse.items()
    ]
    height = 2.9 * len(reuse)
    pages = sheets(finding, [height], left=left_margin(rows), gap=5.2, note=note)
    low, high = min(0.0, *changes), max(0.0, *changes)
    draw_heatmap(
        pages.axes[0],
        list(gains.values()),
        rows=rows,
        columns=list(_ORDERS.values()),
        limits=(low, high or 1.0),
        words=words,
    )
    pages.axes[0].set_xlabel("what goes first; points against the first column")
    said = describe_heatmap(list(reuse), list(_ORDERS), words)
    return pages.drawing(finding, f"{finding} Reused, and points of difference: {said}.")


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
        name: {
            part: 100 * count / max(sum(run.reads.values()), 1) for part, count in run.reads.items()
        }
        for name, run in runs.items()
    }
    unlimited, pooled = shares.values()
    most = max(unlimited, key=unlimited.__getitem__)
    least = min(unlimited, key=unlimited.__getitem__)
    finding = (
        f"States kept at {rule_in_words(most)} served {unlimited[most]:.1f} % of the reads, those "
        f"{rule_in_words(least)} {unlimited[least]:.1f} %; in {list(shares)[1]} "
        f"{pooled[most]:.1f} and {pooled[least]:.1f} %."
    )
    parts = [f"{rule_in_words(part)} ({part})" for part in unlimited]
    note = (
        f"A read: a request resumes after a state. --rule is {rule}; blocks of {block:,}, {model}, "
        f"{asked(trace)}. {_ONE_AT_A_TIME}"
    )
    heights = [bars_height(len(parts))] * len(runs)
    pages = sheets(finding, heights, left=left_margin(parts), note=note)
    for ax, (name, run) in zip(pages.axes, runs.items(), strict=True):
        row = list(shares[name].values())
        words = [
            f"{share:.1f} % ({count:,})"
            for share, count in zip(row, run.reads.values(), strict=True)
        ]
        chosen = [list(unlimited).index(most)]
        draw_bars(ax, parts, row, unit=f"% of reads, {name}", words=words, highlight=chosen)
    for ax in pages.axes:
        ax.set_xlim(0, max(ax.get_xlim()[1] for ax in pages.axes))
    said = describe_heatmap(
        [f"in {name}" for name in shares],
        list(unlimited),
        [[f"{share:.1f} %" for share in row.values()] for row in shares.values()],
    )
    return pages.drawing(finding, f"{finding} Reads by the part of '{rule}', {said}.")


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
    sizes = PRESETS[model]
    note = (
        f"{len(trace)} requests, a turn of each chat after the other; half of the turns append, "
        f"half send another text from a random token on. Blocks of {block:,}; bytes of {model}: "
        f"{sizes.model_state_bytes / 1e6:.1f} MB a state, {sizes.model_token_bytes:,} B a token. "
        f"--rule is interval(K). {_ONE_AT_A_TIME}"
    )
    pages = sheets(finding, [13], left=5, right=11, note=note)
    fit_y(pages.axes[0], reuse.values(), least=0)
    draw_curves(
        pages.axes[0],
        {name: (every, row) for name, row in reuse.items()},
        x_label="a state every K tokens, and at the prompt's last block boundary",
        y_label="reused (% of prompt)",
        highlight={list(limits)[1]: HIT},
        log_x=True,
    )
    said = "; ".join(
        f"in {name} "
        + ", ".join(f"{value:.1f} % at {K:,}" for K, value in zip(every, row, strict=True))
        for name, row in reuse.items()
    )
    return pages.drawing(finding, f"{finding} Reused by the interval, {said}.")
