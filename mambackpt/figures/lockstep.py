"""Figures of keys that do not hold what they promise."""

from functools import cache
from itertools import product, repeat

from mambackpt.draw import (
    ERROR,
    Drawing,
    describe_heatmap,
    draw_heatmap,
    filmstrip,
    left_margin,
    run_frames,
    sheets,
)
from mambackpt.engine import (
    VARIANTS,
    Counts,
    Request,
    Settings,
    branching_chats,
    check_lockstep,
    shrink_history,
    simulate,
)
from mambackpt.figures.registry import Spread, named

_SETTINGS = {
    ("dense" if retention is None else "R = 0") + ", drop" * drop: (retention, drop)
    for retention, drop in product((0, None), (False, True))
}


_SEEDS = 30  # chats that are counted
_SETTINGS_IN_WORDS = {
    "R = 0": "last boundary",
    "R = 0, drop": "last boundary,\nunit dropped",
    "dense": "every boundary",
    "dense, drop": "every boundary,\nunit dropped",
}
_VARIANTS_IN_WORDS = {
    "vllm-0.33": "as released (vllm-0.33)",
    "without checkpoints": "no internal checkpoint",
    "keep-the-stop": "fix: keep-the-stop",
    "refuse-inside-block": "fix: refuse-inside-block",
    "never-key-the-left-block": "fix: never-key-the-left-block",
}


@cache
def _chats(seeds: int) -> list[list[Request]]:
    return [branching_chats(seed) for seed in range(seeds)]


@cache
def _counts(variant: str, setting: str, seeds: int) -> Counts:
    """What the check counts under one variant and one setting; the unit of work to spread."""
    retention, drop = _SETTINGS[setting]
    settings = Settings(
        internal_checkpoints=variant != "without checkpoints",
        variant=variant if variant in VARIANTS else "vllm-0.33",
        retention=retention,
        drop_eagle_block=drop,
        budget=300,
        max_running=1,
    )
    return check_lockstep(_chats(seeds), settings, shrink=False).counts


def wrong_restores(seeds: int = _SEEDS, *, spread: Spread = map) -> dict[str, dict[str, Counts]]:
    """Return the counts per variant and per setting, over the same branching chats.

    >>> counts = wrong_restores(1)
    >>> list(counts)[:2], list(counts["vllm-0.33"])
    (['vllm-0.33', 'without checkpoints'], ['R = 0', 'R = 0, drop', 'dense', 'dense, drop'])

    One request at a time, a pool without evictions, 300 tokens per step, blocks of 64 tokens, those
    of attention too, hash units of 16. ``spread`` is `map`, or a pool's that spreads the work.
    """
    fixes = [name for name in VARIANTS if not name.startswith("vllm")]
    names = ("vllm-0.33", "without checkpoints", *fixes)
    cases = list(product(names, _SETTINGS))
    counts = dict(
        zip(cases, spread(_counts, *zip(*cases, strict=True), repeat(seeds)), strict=True)
    )
    return {name: {setting: counts[name, setting] for setting in _SETTINGS} for name in names}


@named("wrong-restores", spreads=True)
def _wrong_restores(spread: Spread = map) -> Drawing:
    """Hits that restore the state of another prefix: the released rule against the fixes."""
    table = wrong_restores(spread=spread)
    wrong = {name: [c.wrong_restores for c in row.values()] for name, row in table.items()}
    words = [
        [f"{counts.wrong_restores} of {counts.hits}" for counts in row.values()]
        for row in table.values()
    ]
    released, clean = wrong["vllm-0.33"], [n for n in wrong if not any(wrong[n])]
    fixes = [name for name in wrong if name not in ("vllm-0.33", "without checkpoints")]
    finding = (
        f"In a model of the released rules {min(released)} to {max(released)} hits restore a wrong "
        f"state; {sum(name in clean for name in fixes)} of {len(fixes)} fixes leave none."
    )
    rows = [_VARIANTS_IN_WORDS.get(name, name) for name in table]
    columns = [_SETTINGS_IN_WORDS[setting] for setting in table["vllm-0.33"]]
    note = (
        "Wrong restores of all hits. On a CPU; the released scheduler itself takes the same steps. "
        f"{_SEEDS} chats of {len(_chats(1)[0])} requests, one request at a time, 300 tokens a "
        "step, blocks of 64, hash units of 16. Unit dropped: as speculative decoding asks for."
    )
    height = 2.2 * len(rows)
    pages = sheets(finding, [height], left=left_margin(rows), gap=5.2, note=note)
    draw_heatmap(
        pages.axes[0],
        list(wrong.values()),
        rows=rows,
        columns=columns,
        limits=(0, max(released)),
        words=words,
        colour=ERROR,
    )
    pages.axes[0].set_xlabel("which states are kept")
    said = describe_heatmap(list(table), list(table["vllm-0.33"]), words)
    alt = (
        f"{finding} Wrong restores of all hits, on a CPU; the released scheduler itself takes the "
        f"same steps there. R = 0 keeps the prompt's last boundary, dense every one. {said}."
    )
    return pages.drawing(finding, alt)


@named("smallest-failure")
def _smallest_failure() -> Drawing:
    """The smallest history in which the released rule serves a wrong state, as a filmstrip."""
    first = Request("A", range(100), range(1000, 1041))
    second = Request("B", [*first.history[:139], *range(2000, 2261)])
    third = Request("C", [*first.history[:130], *range(3000, 3010)])
    settings = Settings(retention=0, max_running=1)
    history = shrink_history([first, second, third], settings)
    run = simulate(history, settings)
    [wrong] = [violation for violation in run.violations if violation.kind == "wrong restore"]
    finding = (
        f"A hit promises {wrong.claimed} tokens and restores the state of {wrong.held}: "
        f"{len(history)} requests are enough, in a model of the released rules."
    )
    return filmstrip(run_frames(run), finding=finding, medium=None)
