"""The figures for a design review: each is a name, a finding, and code that computes both.

A figure is one decorated function that returns a `Drawing`; numbers in its finding come from the
same data as what is drawn. `main` writes them as SVG and PDF, the same bytes on every run.
"""

import argparse
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import TypeVar

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mambackpt.animate import (
    filmstrip,
    key_frames,
    run_frames,
    sequence_finding,
    sequence_frames,
)
from mambackpt.aot import Compilation, CompiledKernel, LayerShape
from mambackpt.bench import COPY, OURS, Benchmark, Timing
from mambackpt.draw import (
    GREY,
    HIT,
    MEDIA,
    STATE,
    Column,
    Lane,
    Mark,
    bars_height,
    draw_bars,
    draw_curves,
    draw_heatmap,
    draw_lanes,
    draw_timings,
    lanes_height,
    left_margin,
    planned_lane,
    scheduled_lane,
    sheet,
    style,
    text_width,
    wrap,
)
from mambackpt.engine import (
    VARIANTS,
    Counts,
    Request,
    Settings,
    branching_chats,
    check_lockstep,
    chunk_ends,
    find_rules,
    shrink_history,
    simulate,
)
from mambackpt.errors import CheckpointValueError
from mambackpt.geometry import CacheGeometry
from mambackpt.models import PRESETS
from mambackpt.planner import (
    Reason,
    describe_reason,
    explain,
    get_mamba_prefill_checkpoint_reason,
)
from mambackpt.replay import Replay, replay
from mambackpt.rules import Rule, optimal
from mambackpt.traces import Trace, generate_documents, load_trace
from mambackpt.watch import window_readers


@dataclass(frozen=True, slots=True)
class Drawing:
    """A figure with what it found, in a sentence, and what it shows, for whoever cannot see it."""

    figure: Figure
    finding: str
    alt: str


T = TypeVar("T")
FIGURES: dict[str, Callable[[], Drawing]] = {}
REPLAYS: dict[str, Callable[[Trace], Drawing]] = {}  # those of FIGURES that replay a trace


def named(name: str) -> Callable[[Callable[[], Drawing]], Callable[[], Drawing]]:
    """Register the function below as the figure of this name."""

    def register(function: Callable[[], Drawing]) -> Callable[[], Drawing]:
        FIGURES[name] = function
        return function

    return register


def replayed(name: str) -> Callable[[Callable[[Trace], Drawing]], Callable[[Trace], Drawing]]:
    """Register the function below as a figure of a request trace, generated unless given."""

    def register(function: Callable[[Trace], Drawing]) -> Callable[[Trace], Drawing]:
        REPLAYS[name] = function
        FIGURES[name] = lambda: function(example_trace())
        return function

    return register


def draw_figure(name: str, *, medium: str = "review", trace: Trace | None = None) -> Drawing:
    """Return a figure by its name, at the size of a medium ("review" or "slide").

    >>> print(draw_figure("one-forward").finding)
    A checkpoint inside the chunk saves a forward: 8,000 tokens take 1 instead of 2.

    A ``trace`` takes the place of the generated one in the figures that replay requests. Raises
    CheckpointValueError for another name or medium.
    """
    if name not in FIGURES:
        raise CheckpointValueError(
            f"figure is {name!r}; expected one of {', '.join(FIGURES)}. Try {next(iter(FIGURES))}."
        )
    with style(medium):
        if trace is not None and name in REPLAYS:
            return REPLAYS[name](trace)
        return FIGURES[name]()


def _lane_sheet(finding: str, lanes: Sequence[Lane], *, notes: float, keys: bool = True) -> Figure:
    """A figure of lanes with short labels on the left and notes on the right."""
    margin = left_margin(lane.label for lane in lanes)
    height = lanes_height(len(lanes), keys=keys)
    figure, [ax] = sheet(finding, [height], left=margin, right=0.6)
    draw_lanes(ax, lanes, notes=notes, keys=keys)
    return figure


@named("one-forward")
def one_forward() -> Drawing:
    """A prompt of 8,000 tokens in blocks of 1,536, without and with an internal checkpoint."""
    prompt, geometry = 8000, CacheGeometry(1536, 1536, 16, 1536)
    lanes = []
    for internal, label in ((False, "states at\nchunk ends"), (True, "checkpoint\ninside")):
        ends = chunk_ends(
            prompt,
            budget=8192,
            mamba_block_size=geometry.M,
            hash_block_size=geometry.H,
            checkpoint_alignment=geometry.A,
            internal_checkpoints=internal,
        )
        lanes.append(scheduled_lane(ends, geometry, internal_checkpoints=internal, label=label))
    without, inside = lanes
    kept = [[c.key for c in lane.columns if c.key] for lane in lanes]
    finding = (
        f"A checkpoint inside the chunk saves a forward: {prompt:,} tokens take "
        f"{len(inside.ends)} instead of {len(without.ends)}."
    )
    alt = (
        f"Two lanes of {prompt:,} tokens over blocks of {geometry.M:,}. With states only at chunk "
        f"ends the prompt runs as {without.note.splitlines()[1]} tokens; with a checkpoint inside "
        f"the chunk it runs at once. Kept after it: the states of {kept[0]} and of {kept[1]} "
        "tokens."
    )
    return Drawing(_lane_sheet(finding, lanes, notes=7.5), finding, alt)


@named("where-it-lands")
def where_it_lands() -> Drawing:
    """The same prompt under hash units of a block and of 128 tokens, with a drop, and in 2,096."""
    prompt = 8000
    lanes, rest = [], []
    for hash_unit, block, drop in (
        (1536, 1536, False),
        (1536, 1536, True),
        (128, 1536, False),
        (128, 1536, True),
        (2096, 2096, False),
    ):
        geometry = CacheGeometry(hash_unit, block, 16, hash_unit, drop)
        label = f"block {block:,}\nunit {hash_unit:,}" + "\ndrop" * drop
        lane = planned_lane(prompt, prompt, geometry, label=label)
        rest.append(prompt - lane.marks[0].position)
        lanes.append(replace(lane, note=f"{rest[-1]:,} to\nrecompute"))
    finding = (
        f"Sent again, a prompt of {prompt:,} tokens recomputes {min(rest):,} to {max(rest):,}: "
        "hash unit, drop and block decide where it resumes."
    )
    alt = (
        f"Five lanes of {prompt:,} tokens with the checkpoint's position and column: "
        + "; ".join(
            f"{lane.label.replace(chr(10), ', ')}: position {lane.marks[0].position:,}, "
            f"column {lane.marks[0].column}"
            for lane in lanes
        )
        + "."
    )
    return Drawing(_lane_sheet(finding, lanes, notes=6.6), finding, alt)


_TOY_BLOCK = 2  # tokens: the least that tells a block from a token


def smallest_refused(reason: Reason) -> tuple[int, int, CacheGeometry]:
    """Return the smallest row, in blocks of two tokens, that the planner refuses for this reason.

    >>> seq_len, query_len, geometry = smallest_refused(Reason.START_OFF_HASH_GRID)
    >>> seq_len, query_len, geometry.H
    (2, 1, 2)

    Smallest in seq_len, then query_len, hash unit, hit alignment, drop and checkpoint alignment, in
    this order. Raises CheckpointValueError for a reason that no row of up to 16 tokens meets.
    """
    aligned: tuple[int | None, ...] = (1, 2, 4)
    if reason is Reason.CANNOT_EXPORT:
        aligned = (None,)
    for seq_len in range(1, 17):
        for query_len, H, U, drop, A in product(
            range(1, seq_len + 1), (1, 2), (1, 2, 4), (False, True), aligned
        ):
            if U % H == 0:
                geometry = CacheGeometry(H, _TOY_BLOCK, A, U, drop)
                if explain([seq_len], [query_len], geometry)[0].reason is reason:
                    return seq_len, query_len, geometry
    raise CheckpointValueError(
        f"no row of up to 16 tokens is refused for {reason.name}; expected a reason that a row can "
        "meet. Try Reason.COLUMN_TAKEN."
    )


def smallest_outside() -> tuple[int, int, int]:
    """Return the smallest (start, end, position) that the predicate finds not inside the query.

    >>> smallest_outside()
    (0, 3, 3)

    For blocks of two tokens and a unit of one. No row of the planner gets there.
    """
    for end in range(1, 17):
        for start, position in product(range(end), range(2 * end)):
            reason = get_mamba_prefill_checkpoint_reason(start, end, position, 1, _TOY_BLOCK, 1)
            if reason is Reason.NOT_INSIDE_QUERY:
                return start, end, position
    raise AssertionError("no query of up to 16 tokens fails the fifth condition")


_CONDITIONS = {
    Reason.CANNOT_EXPORT: "1 the kernel\ncan export",
    Reason.START_OFF_HASH_GRID: "2 starts on a\nhash unit",
    Reason.COLUMN_TAKEN: "3 its column\nis free",
    Reason.NO_BLOCK_GAINED: "4 gains a\nhash unit",
    Reason.NOT_INSIDE_QUERY: "5 lies inside\nthe query",
    Reason.OFF_KERNEL_GRID: "6 lies on the\nkernel's grid",
}


@named("reasons")
def reasons() -> Drawing:
    """One lane per condition, each with the smallest row that fails it."""
    lanes = []
    for reason, label in _CONDITIONS.items():
        if reason is Reason.NOT_INSIDE_QUERY:
            start, end, position = smallest_outside()
            words = describe_reason(reason, start, end, position, 1, _TOY_BLOCK, 1)
            note = f"{words} Shown by a direct call: no row of the planner gets here."
            nulls = [Column()] * (-(-end // _TOY_BLOCK) - 1)
            columns = (*nulls, Column("running", end))
            marks = (Mark(position, "declined"),)
            lane = Lane("", _TOY_BLOCK, start, (end,), columns, marks)
        else:
            seq_len, query_len, geometry = smallest_refused(reason)
            lane = planned_lane(seq_len, query_len, geometry)
            note = lane.caption
        lanes.append(replace(lane, label=label, caption="", note=note))
    longest = max(lane.seq_len for lane in lanes)
    finding = (
        f"{longest} tokens are enough to fail each of the {len(lanes)} conditions for a checkpoint."
    )
    alt = f"{len(lanes)} lanes in blocks of {_TOY_BLOCK} tokens, the smallest row that fails each: "
    alt += " ".join(f"{lane.label[0]}: {lane.note}" for lane in lanes)
    return Drawing(_lane_sheet(finding, lanes, notes=27, keys=False), finding, alt)


def puzzle_requests(shared: int, unique: int) -> list[Request]:
    """Return 64 requests: 8 groups of 8 that share their first tokens, group after group."""
    span = shared + unique  # token ids of different groups and tails never meet
    return [
        Request(
            f"{group}-{member}",
            [
                *range(group * span, group * span + shared),
                *range((8 + 8 * group + member) * span, (8 + 8 * group + member) * span + unique),
            ],
        )
        for group in range(8)
        for member in range(8)
    ]


@named("zero-hit-puzzle")
def zero_hit_puzzle() -> Drawing:
    """1,600 + 600 tokens against 1,500 + 700: where the states lie decides everything."""
    block, budget = 528, 2048
    geometry = CacheGeometry(block, block, None, block)
    settings = Settings(
        mamba_block_size=block,
        hash_block_size=block,
        checkpoint_alignment=None,
        internal_checkpoints=False,
        retention=None,
        budget=budget,
        max_running=1,
        # A rule without the stop at the end of a shared prefix.
        rules=replace(find_rules("vllm-0.33"), name="no junction", junction_stop=lambda *_: 0),
    )
    lanes, reuses, told = [], [], []
    for shared, unique in ((1600, 600), (1500, 700)):
        requests = puzzle_requests(shared, unique)
        counts = simulate(requests, settings).counts
        ends = chunk_ends(
            shared + unique, budget=budget, mamba_block_size=block, hash_block_size=block
        )
        lane = scheduled_lane(ends, geometry, label=f"{shared:,} shared\n+ {unique:,} own")
        states = [column.key for column in lane.columns if column.key]
        hit = max((at for at in states if at <= shared), default=0)
        assert counts.reused_tokens == counts.hits * hit  # the lane shows what the run did
        reuses.append(f"{counts.hits} of {len(requests)} requests")
        told.append(f"{shared:,} shared tokens: states after {_listed(states)}, {hit:,} reusable.")
        note = f"{reuses[-1]}\nreuse {hit:,} tokens"
        # The keys below the columns name the states already.
        marks = [
            replace(mark, label="", kind="hit" if mark.position == hit else "state")
            for mark in lane.marks
        ]
        marks.append(Mark(shared, "shared", label=f"{shared:,} shared"))
        lanes.append(replace(lane, marks=tuple(marks), note=note))
    finding = (
        f"{reuses[0]} reuse a shared prefix of {lanes[0].marks[-1].position:,} tokens, "
        f"{reuses[1].split()[0]} reuse one of {lanes[1].marks[-1].position:,}: no state lies in it."
    )
    alt = (
        f"{finding} Blocks of {block}, budget {budget:,}, no stop at the end of a shared prefix, "
        f"no internal checkpoint, one request at a time, no evictions. {' '.join(told)}"
    )
    return Drawing(_lane_sheet(finding, lanes, notes=12), finding, alt)


def _listed(numbers: Sequence[int]) -> str:
    return " and ".join(f"{number:,}" for number in numbers)


_SHOWN_MODELS = (
    "kimi-k3-tp16-bf16",
    "granite-4-h-tiny",
    "qwen3.5-4b",
    "qwen3-next-bf16",
    "qwen3.5-27b",
    "falcon-h1-34b",
    "qwen3.5-35b-a3b",
    "kimi-k3-tp8",
    "qwen3.5-27b-fp8-mtp3",
    "nemotron-3-nano",
    "nemotron-3-super",
    "kimi-k3",
)


@named("block-sizes")
def block_sizes() -> Drawing:
    """Tokens per block of real models: one attention page must hold one recurrent state."""
    models = sorted((PRESETS[name] for name in _SHOWN_MODELS), key=lambda model: model.block_size())
    sizes = [model.block_size() for model in models]
    labels = [model.name for model in models]
    finding = (
        f"One attention page must hold one state: blocks of {min(sizes):,} to {max(sizes):,} "
        "tokens, the shortest prefix that can hit without finer hash units."
    )
    words = [
        f"{size:,}  ({model.state_bytes / 1e6:.2f} MB / {model.token_bytes:,} B)"
        for size, model in zip(sizes, models, strict=True)
    ]
    figure, [ax] = sheet(finding, [bars_height(len(models))], left=left_margin(labels))
    unit = "tokens per block (bytes of a state / attention bytes per token, rounded up)"
    draw_bars(ax, labels, sizes, unit=unit, words=words, highlight=[0, len(models) - 1])
    alt = "Bars of tokens per block: " + ", ".join(
        f"{label} {size:,}" for label, size in zip(labels, sizes, strict=True)
    )
    return Drawing(figure, finding, f"{alt}. {finding}")


@named("sequence")
def sequence() -> Drawing:
    """The filmstrip of a prompt of 8,000 tokens that moves across blocks, and of its repeat."""
    frames = sequence_frames(8000, CacheGeometry(1536, 1536, 16, 1536))
    finding = sequence_finding(frames)
    alt = " ".join(frames[at].sentence for at in key_frames(frames))
    return Drawing(filmstrip(frames, finding=finding, medium=None), finding, alt)


@cache
def wrong_restores(seeds: int = 30) -> dict[str, dict[str, Counts]]:
    """Return the counts per rule and per setting, over the same branching chats.

    >>> counts = wrong_restores(1)
    >>> list(counts)[:2], list(counts["vllm-0.33"])
    (['vllm-0.33', 'without checkpoints'], ['R = 0', 'R = 0, drop', 'dense', 'dense, drop'])

    One request at a time, a pool without evictions, 300 tokens per step, blocks of 64 tokens, hash
    units of 16.
    """
    histories = [branching_chats(seed) for seed in range(seeds)]
    fixes = [name for name in VARIANTS if not name.startswith("vllm")]
    found: dict[str, dict[str, Counts]] = {}
    for name in ("vllm-0.33", "without checkpoints", *fixes):
        found[name] = {}
        for retention, drop in product((0, None), (False, True)):
            settings = Settings(
                internal_checkpoints=name != "without checkpoints",
                rules=name if name in VARIANTS else "vllm-0.33",
                retention=retention,
                drop_eagle_block=drop,
                budget=300,
                max_running=1,
            )
            label = ("dense" if retention is None else "R = 0") + ", drop" * drop
            found[name][label] = check_lockstep(histories, settings, shrink=False).counts
    return found


@named("wrong-restores")
def draw_wrong_restores() -> Drawing:
    """Hits that restore the state of another prefix: the released rule against the fixes."""
    found = wrong_restores()
    wrong = {name: [c.wrong_restores for c in row.values()] for name, row in found.items()}
    words = [
        [f"{counts.wrong_restores} of {counts.hits}" for counts in row.values()]
        for row in found.values()
    ]
    released, clean = wrong["vllm-0.33"], [n for n in wrong if not any(wrong[n])]
    fixes = [name for name in wrong if name not in ("vllm-0.33", "without checkpoints")]
    finding = (
        f"In a model of the released rules {min(released)} to {max(released)} hits restore a wrong "
        f"state; {sum(name in clean for name in fixes)} of {len(fixes)} fixes leave none."
    )
    rows, columns = list(found), list(found["vllm-0.33"])
    figure, [ax] = sheet(finding, [2.2 * len(rows)], left=left_margin(rows))
    limits = (0, max(released))
    draw_heatmap(ax, list(wrong.values()), rows=rows, columns=columns, limits=limits, words=words)
    ax.set_xlabel("wrong restores of all hits, per retention R and block drop")
    said = (
        f"{name}: " + ", ".join(f"{c} {w}" for c, w in zip(columns, row, strict=True))
        for name, row in zip(rows, words, strict=True)
    )
    alt = f"{finding} Wrong restores of all hits, on a CPU. {'; '.join(said)}."
    return Drawing(figure, finding, alt)


@named("smallest-failure")
def smallest_failure() -> Drawing:
    """The smallest history in which the released rule serves a wrong state, as a filmstrip."""
    first = Request("A", range(100), range(1000, 1041))
    second = Request("B", [*first.history[:139], *range(2000, 2261)])
    third = Request("C", [*first.history[:130], *range(3000, 3010)])
    settings = Settings(retention=0, max_running=1)
    history = shrink_history([first, second, third], settings)
    run = simulate(history, settings)
    frames = run_frames(run)
    [wrong] = [found for found in run.violations if found.kind == "wrong restore"]
    finding = (
        f"A hit promises {wrong.claimed} tokens and restores the state of {wrong.held}: "
        f"{len(history)} requests are enough, in a model of the released rules."
    )
    alt = " ".join(frames[at].sentence for at in key_frames(frames))
    return Drawing(filmstrip(frames, finding=finding, medium=None), finding, alt)


_KERNEL_NAMES = {"plain": "plain shape", "tiled": "ours"}


@named("window-readers")
def window_readers_map() -> Drawing:
    """Which program and lane reads which input of a window, in the plain shape and in ours."""
    toy = LayerShape("toy", 512, (16, 64))
    channels = range(80, 90)  # where the plain shape's first program ends
    finding = (
        f"Neighbouring lanes read {toy.state_len} tokens by turns in the plain shape, and "
        "neighbouring channels of 1 token in ours."
    )
    height, tokens = 2.1 * toy.state_len, ["oldest", "middle", "newest"]
    figure, axes = sheet(finding, [height] * 2, left=left_margin(tokens), gap=4.2)
    told = []
    for ax, (kernel, name) in zip(axes, _KERNEL_NAMES.items(), strict=True):
        programs, lanes = (part[:, channels] for part in window_readers(Compilation(toy, kernel)))
        words = [
            [f"{program}:{lane}" for program, lane in zip(*line, strict=True)]
            for line in zip(programs, lanes, strict=True)
        ]
        limits = (0, toy.state_len)
        columns = [str(channel) for channel in channels]
        shades = programs.tolist()
        draw_heatmap(ax, shades, rows=tokens, columns=columns, limits=limits, words=words)
        ax.set_xlabel(f"channel, read by program:lane ({name})")
        told.append(f"{name}: {words[0][5]}, {words[1][5]}, {words[2][5]}")
    alt = f"Program and lane that read channel {channels[5]} of {toy.state_len} tokens. "
    return Drawing(figure, finding, f"{alt}{'; '.join(told)}. {finding}")


def draw_instructions(compiled: Sequence[CompiledKernel]) -> Drawing:
    """Draw the instructions of both kernels for token-first windows, a pair of bars per target.

    Call it inside `mambackpt.draw.style`, as the two functions below.
    """
    shown = [one for one in compiled if one.request.token_first]
    labels = [f"{one.request.target}, {_KERNEL_NAMES[one.request.kernel]}" for one in shown]
    costs = {label: one.instructions_per_mib for label, one in zip(labels, shown, strict=True)}
    ratios = [
        costs[label.replace("ours", "plain shape")] / cost
        for label, cost in costs.items()
        if label.endswith("ours")
    ]
    finding = (
        f"Counted by its text, our kernel takes {int(min(ratios))} to {int(max(ratios))} times "
        "fewer instructions for the same bytes."
    )
    figure, [ax] = sheet(finding, [bars_height(len(labels))], left=left_margin(labels))
    words = [f"{cost:,.0f}" for cost in costs.values()]
    chosen = [at for at, label in enumerate(labels) if label.endswith("ours")]
    unit = "warp instructions per MiB of checkpoint, at most: branches not taken count too"
    draw_bars(ax, labels, list(costs.values()), unit=unit, words=words, highlight=chosen)
    listed = ", ".join(f"{label} {word}" for label, word in zip(labels, words, strict=True))
    return Drawing(figure, finding, f"Warp instructions per MiB: {listed}. {finding}")


_INDEXING = "pool[blocks] = rows"


def _timed(run: Benchmark, layer: str, variant: str) -> dict[tuple[str, int], Timing]:
    """The timings of one layer and variant in the run's first regime, by method and size."""
    regime = run.timings[0].regime
    wanted = (layer, variant, regime)
    found = {(t.method, t.size): t for t in run.timings if (t.case, t.variant, t.regime) == wanted}
    if not found:
        timed = sorted({(t.case, t.variant) for t in run.timings})
        raise CheckpointValueError(
            f"no timing of {layer!r}, {variant!r}; expected one of {timed}. Try {timed[0]}."
        )
    return found


def draw_export_timings(
    run: Benchmark, *, layer: str = "kimi-k3", variant: str = "token-first", size: int = 64
) -> Drawing:
    """Draw what a measured run says of one export: every method beside one contiguous copy.

    ``size`` counts checkpoints. Raises CheckpointValueError for what the run did not time.
    """
    timed = _timed(run, layer, variant)
    methods = sorted({method for method, _ in timed})
    if size not in {size for _, size in timed}:
        sizes = sorted({size for _, size in timed})
        raise CheckpointValueError(
            f"size is {size} checkpoints; expected one of {sizes}. Try {sizes[-1]}."
        )
    regime = run.timings[0].regime
    finding = (
        f"Exporting {size} checkpoints reaches {timed[OURS, size].ratio:.0%} of the speed of one "
        f"contiguous copy, plain indexing {timed[_INDEXING, size].ratio:.0%}."
    )
    figure, [ax] = sheet(finding, [bars_height(len(methods))], left=left_margin(methods))
    draw_timings(ax, asdict(run), case=layer, variant=variant, size=size, regime=regime)
    shares = ", ".join(f"{method} {timed[method, size].ratio:.0%}" for method in methods)
    alt = f"{layer}, {variant}, {regime}, on {run.environment.device}: {shares}. {finding}"
    return Drawing(figure, finding, alt)


def draw_roofline(
    run: Benchmark,
    bandwidth: float,
    *,
    layer: str = "kimi-k3",
    variant: str = "token-first",
) -> Drawing:
    """Draw measured times over the number of checkpoints, and the floor at an assumed bandwidth.

    ``bandwidth`` is in bytes per second, read and written; nothing is measured at it. Raises
    CheckpointValueError for what the run did not time.
    """
    timed = _timed(run, layer, variant)
    sizes = sorted({size for _, size in timed})
    curves = {
        name: (sizes, [timed[method, size].median_us for size in sizes])
        for name, method in (("plain indexing", _INDEXING), ("export", OURS), ("one copy", COPY))
    }
    floor = [timed[COPY, size].bytes / bandwidth * 1e6 for size in sizes]
    assumed = f"{bandwidth / 1e12:g} TB/s, assumed"
    gap = timed[COPY, sizes[-1]].median_us / floor[-1]
    slower = timed[OURS, sizes[-1]].median_us / timed[COPY, sizes[-1]].median_us
    finding = (
        f"{sizes[-1]} checkpoints take the export {slower:.2f} times as long as one copy; at an "
        f"assumed {bandwidth / 1e12:g} TB/s that copy would be {gap:,.0f} times as fast."
    )
    figure, [ax] = sheet(finding, [18], left=8, right=11)
    curves[assumed] = (sizes, floor)
    drawn = [value for _, values in curves.values() for value in values]
    powers = range(math.floor(math.log10(min(drawn))), math.ceil(math.log10(max(drawn))) + 1)
    ax.set_yscale("log")
    ax.set_yticks([10.0**n for n in powers], [f"{10.0**n:,.10g}" for n in powers])
    ax.set_ylim(10.0 ** powers[0], 10.0 ** powers[-1])
    draw_curves(
        ax,
        curves,
        x_label=f"checkpoints ({layer}, {variant})",
        y_label="microseconds",
        highlight={"export": STATE},
        log_x=True,
    )
    listed = "; ".join(
        f"{name} " + ", ".join(f"{value:,.0f}" for value in values)
        for name, (_, values) in curves.items()
    )
    alt = f"Microseconds for {', '.join(map(str, sizes))} checkpoints: {listed}. {finding}"
    return Drawing(figure, finding, alt)


# --- replays of request traces --------------------------------------------------------------------

PLACEMENTS = ("all", "last", "last+junction", "last+junction+chunk")
# What a state costs in tokens of attention cache differs by a factor of ten from each to the next.
_COSTS = ("kimi-k3", "qwen3-next", "kimi-k3-tp16-bf16")
_STEPS = (1, 2, 3, 4, 8)  # block sizes, as multiples of the least


@cache
def example_trace() -> Trace:
    """Return the generated trace that figures replay unless another one is given."""
    return generate_documents(2000)


def least_block(trace: Trace, tokens: int = 512) -> int:
    """Return the least multiple of the trace's own block that has so many tokens."""
    return -(-tokens // trace.grain) * trace.grain


def pool_sizes(trace: Trace, shares: Sequence[float]) -> list[int]:
    """Return pools in tokens of attention cache, as shares of what all distinct blocks take.

    Rounded to two digits.
    """
    distinct = int(trace.fresh_runs[1].sum()) * trace.grain
    return [int(float(f"{distinct * share:.2g}")) for share in shares]


def replay_in(
    trace: Trace, rule: str, *, block: int, model: str, tokens: int, eviction: str | None = None
) -> Replay:
    """Replay in a pool that holds so many tokens of the model's attention cache, or states."""
    pool = tokens * PRESETS[model].model_token_bytes
    return replay(trace, rule, block=block, model=model, pool_bytes=pool, eviction=eviction)


def first_requests(trace: Trace, count: int) -> Trace:
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


def _together(values: Mapping[str, T]) -> dict[T, str]:
    """The names of each value, joined."""
    return {
        value: " or ".join(name for name, other in values.items() if other == value)
        for value in values.values()
    }


def _fit_y(ax: Axes, rows: Iterable[Sequence[float]], *, least: float | None = None) -> None:
    """Scale an axis to whole ticks around these values, with room above for names of curves."""
    values = [value for row in rows for value in row]
    low = min(values) if least is None else least
    top = max(values) + 0.2 * (max(values) - low)
    ticks = MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(low, top)
    ax.set_ylim(ticks[0], ticks[-1])
    ax.set_yticks(ticks)


def _note(ax: Axes, words: str) -> None:
    """Write a note over the width of an Axes that is there for it."""
    em = float(ax.xaxis.label.get_fontsize())
    width = ax.bbox.width * 72 / ax.figure.dpi / em
    ax.set_axis_off()
    ax.text(0, 1, wrap(words, width), va="top", transform=ax.transAxes)


_ONE_AT_A_TIME = "A simplification: one request at a time, no states of decode steps."


def _millions(tokens: float) -> str:
    return f"{tokens / 1e6:,.3g}\u00a0M"


@replayed("reuse-against-block")
def reuse_against_block(trace: Trace) -> Drawing:
    """Reused share and recomputed tokens of four rules against the block size."""
    blocks = [least_block(trace) * step for step in _STEPS]
    found = {rule: [replay(trace, rule, block=block) for block in blocks] for rule in PLACEMENTS}
    work = {rule: [run.recomputed / 1e6 for run in runs] for rule, runs in found.items()}
    reuse = {rule: [100 * run.hit_rate for run in runs] for rule, runs in found.items()}
    changes = {rule: 100 * (row[-1] / row[0] - 1) for rule, row in work.items()}
    told = (
        f"{abs(changes[rule]):.0f} % {'more' if changes[rule] > 0 else 'less'} under '{rule}'"
        for rule in ("all", "last")
    )
    finding = (
        f"Blocks of {blocks[-1]:,} instead of {blocks[0]:,} tokens recompute {', '.join(told)}."
    )
    figure, [*axes, notes] = sheet(finding, [13, 13, 1], left=5, right=13)
    chosen = {"all": STATE, "last": HIT}
    for ax, rows, label in zip(
        axes, (reuse, work), ("reused (% of prompt)", "recomputed (M tokens)"), strict=True
    ):
        _fit_y(ax, rows.values(), least=0 if rows is work else None)
        lines = {rule: (blocks, row) for rule, row in rows.items()}
        draw_curves(
            ax, lines, x_label="tokens per block", y_label=label, highlight=chosen, log_x=True
        )
    _note(notes, f"{_asked(trace)}, unlimited memory")
    said = (
        f"{rule}: {row[0]:.1f} to {row[-1]:.1f} % reused, {work[rule][0]:,.1f} to "
        f"{work[rule][-1]:,.1f} million tokens recomputed"
        for rule, row in reuse.items()
    )
    alt = f"{finding} {_asked(trace)}; from the smallest to the largest block, {'; '.join(said)}."
    return Drawing(figure, finding, alt)


@replayed("pool-exchange-rates")
def pool_exchange_rates(trace: Trace) -> Drawing:
    """The same rules in shared pools, for models whose states cost more and less."""
    block = 2 * least_block(trace)
    pools = pool_sizes(trace, (1 / 8, 1 / 4, 1 / 2, 1, 2))
    rates = {name: PRESETS[name].exchange_rate for name in _COSTS}
    reuse = {
        name: {
            rule: [
                100 * replay_in(trace, rule, block=block, model=name, tokens=tokens).hit_rate
                for tokens in pools
            ]
            for rule in ("attention", *PLACEMENTS)
        }
        for name in _COSTS
    }
    at = 3
    best = {name: max(PLACEMENTS, key=lambda rule: reuse[name][rule][at]) for name in _COSTS}
    costs = _together({f"{rates[name]:,.0f}": rule for name, rule in best.items()})
    told = (f"'{rule}' where a state costs {cost}" for rule, cost in costs.items())
    finding = (
        f"In a pool of {_millions(pools[at])} tokens the best rule is {', '.join(told)} tokens of "
        "attention cache."
    )
    figure, [*axes, notes] = sheet(finding, [11] * len(rates) + [3], left=5, right=13)
    shown = [row for rows in reuse.values() for row in rows.values()]
    places = [tokens / 1e6 for tokens in pools]
    for ax, name in zip(axes, _COSTS, strict=True):
        _fit_y(ax, shown, least=0)
        lines = {
            "attention alone" if rule == "attention" else rule: (places, row)
            for rule, row in reuse[name].items()
        }
        label = f"{name}, a state costs {rates[name]:,.0f} tokens: pool (M tokens)"
        highlight = {best[name]: HIT}
        draw_curves(ax, lines, x_label=label, y_label="reused (%)", highlight=highlight, log_x=True)
    _note(
        notes,
        f"Pool in million tokens of attention cache, if it held no state; {_asked(trace)}, blocks "
        f"of {block:,}. {_ONE_AT_A_TIME}",
    )
    said = (
        f"{name}, a state costs {rates[name]:,.0f} tokens: "
        + ", ".join(f"{rule} {row[at]:.1f} %" for rule, row in reuse[name].items())
        for name in _COSTS
    )
    alt = f"{finding} {_ONE_AT_A_TIME} Reused in that pool, by model: {'; '.join(said)}."
    return Drawing(figure, finding, alt)


_WEIGHED = (
    *PLACEMENTS,
    *("interval(2048)", "interval(8192)", "interval(32768)"),
    *("internal", "sglang", "marconi", "llamacpp"),
)


def optimal_replays(trace: Trace, block: int, counts: Sequence[int]) -> list[Replay]:
    """Replay the best so many fixed positions for the prefixes that this trace shares."""
    rules: list[Rule] = [optimal(n, trace.ceiling.tolist(), grain=trace.grain) for n in counts]
    return [replay(trace, rule, block=block) for rule in rules]


@replayed("states-against-reuse")
def states_against_reuse(trace: Trace) -> Drawing:
    """What each rule reuses for the states that it writes, and the best fixed positions."""
    block, counts = least_block(trace), (1, 2, 4, 8, 16, 32)
    runs = {rule: replay(trace, rule, block=block) for rule in _WEIGHED}
    points = {rule: (run.states_per_request, 100 * run.hit_rate) for rule, run in runs.items()}
    floor = [
        (run.states_per_request, 100 * run.hit_rate)
        for run in optimal_replays(trace, block, counts)
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
    _fit_y(ax, [y])
    ax.plot(x[: len(floor)], y[: len(floor)], ".-", color=GREY, zorder=1)
    for rule, (across, up) in points.items():
        kind = HIT if rule == chosen else GREY
        ax.plot(across, up, "o", color=kind, mfc=kind if rule == chosen else "white", zorder=3)
    ax.set_xlabel("states written per request")
    _note(notes, f"{_asked(trace)}, blocks of {block:,}, unlimited memory")
    ax.set_ylabel("reused (% of prompt)")
    ends = {f"{n}": point for n, point in zip(counts, floor, strict=True)}
    order = sorted(points, key=lambda rule: -points[rule][1])
    letters = {rule: "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[at] for at, rule in enumerate(order)}
    _name_points(ax, {**ends, **{letters[rule]: points[rule] for rule in order}}, floor)
    keys = [f"{letters[rule]}  {rule}" for rule in order]
    keys.append(f"{counts[0]} ... {counts[-1]}  best so many\nfixed positions, known\nin advance")
    ax.text(1.03, 1, "\n".join(keys), va="top", linespacing=1.5, transform=ax.transAxes)
    said = ", ".join(f"{rule} {up:.1f} % with {at:.2f}" for rule, (at, up) in points.items())
    fixed = ", ".join(f"{name} {up:.1f} % with {at:.2f}" for name, (at, up) in ends.items())
    alt = (
        f"{finding} Reused, with states per request: {said}. Best so many fixed positions: {fixed}."
    )
    return Drawing(figure, finding, alt)


def _name_points(
    ax: Axes, points: dict[str, tuple[float, float]], line: Sequence[tuple[float, float]]
) -> None:
    """Name each point where the name meets no other and not the line; close points share names."""
    em = float(ax.xaxis.label.get_fontsize())
    scale = 72 / ax.figure.dpi / em

    def place(point: tuple[float, float]) -> tuple[float, float]:
        across, up = ax.transData.transform(point) * scale
        return float(across), float(up)

    groups: dict[tuple[float, float], list[str]] = {}
    for name, point in points.items():
        at = place(point)
        close = (c for c in groups if max(abs(place(c)[0] - at[0]), abs(place(c)[1] - at[1])) < 0.4)
        groups.setdefault(next(close, point), []).append(name)
    taken = [(x - 0.4, y - 0.4, x + 0.4, y + 0.4) for x, y in map(place, groups)]
    for (x, y), (right, top) in pairwise(map(place, line)):
        steps = [number / 12 for number in range(13)]
        path = [(x + part * (right - x), y + part * (top - y)) for part in steps]
        taken += [(x - 0.1, y - 0.1, x + 0.1, y + 0.1) for x, y in path]
    for point, names in groups.items():
        words = ", ".join(names)
        width, (x, y) = text_width(words) + 0.3, place(point)
        spots = [
            (x + (distance if side > 0 else -distance - width), y + up - 0.65)
            for distance, side, up in product((0.6, 1.4), (1, -1), (0, 0.9, -0.9, 1.7, -1.7))
        ]
        boxes = [(left, bottom, left + width, bottom + 1.3) for left, bottom in spots]
        box = min(boxes, key=lambda box: sum(_meet(box, other) for other in taken))
        taken.append(box)
        offset = ((box[0] - x) * em, ((box[1] + box[3]) / 2 - y) * em)
        ax.annotate(words, point, offset, textcoords="offset points", va="center")


def _meet(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """The area that two boxes share."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    return max(width, 0) * max(min(one[3], other[3]) - max(one[1], other[1]), 0)


@replayed("retention")
def retention(trace: Trace) -> Drawing:
    """What it costs to keep a state every K tokens: recomputation, and states."""
    block, model = least_block(trace), "qwen3-next"
    every = [block << power for power in range(7)]
    pools = pool_sizes(trace, (1 / 2, 1 / 8))
    runs = {"unlimited": [replay(trace, f"interval({K})", block=block) for K in every]}
    for tokens in pools:
        runs[f"{_millions(tokens)} tokens"] = [
            replay_in(trace, f"interval({K})", block=block, model=model, tokens=tokens)
            for K in every
        ]
    work = {name: [run.recomputed / 1e6 for run in row] for name, row in runs.items()}
    best = {name: every[row.index(min(row))] for name, row in work.items()}
    limited = {name.removesuffix(" tokens"): best[name] for name in list(work)[1:]}
    told = (f"every {K:,} in a pool of {where}" for K, where in _together(limited).items())
    finding = (
        f"Least is recomputed with a state every {best['unlimited']:,} tokens in unlimited memory, "
        f"{', '.join(told)} tokens."
    )
    figure, [*axes, notes] = sheet(finding, [14, 9, 1], left=5, right=11)
    _fit_y(axes[0], work.values(), least=0)
    label = "recomputed (M tokens)"
    lines = {name: (every, row) for name, row in work.items()}
    draw_curves(axes[0], lines, x_label="interval K (tokens)", y_label=label, log_x=True)
    for name, row in work.items():
        axes[0].plot(best[name], min(row), "o", color=HIT, zorder=4)
    written = [run.states_per_request for run in runs["unlimited"]]
    states = {"unlimited": (every, written)}
    label = "states per request"
    x_label = "interval K (tokens)"
    _fit_y(axes[1], [written], least=0)
    draw_curves(axes[1], states, x_label=x_label, y_label=label, log_x=True)
    _note(notes, f"{_asked(trace)}, {model}. {_ONE_AT_A_TIME}")
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


EVICTED = ("last", "last+junction", "last+junction+chunk", "interval(4096)")
ORDERS = ("lru", "hit-node", "thinning", "flops")


@replayed("evictions")
def evictions(trace: Trace) -> Drawing:
    """What survives in a tight pool: one order of last use against orders that look at states."""
    trace, model = first_requests(trace, 1000), "qwen3-next"
    [tokens], block = pool_sizes(trace, [1 / 3]), 2 * least_block(trace)
    reuse = {
        rule: [
            100
            * replay_in(
                trace, rule, block=block, model=model, tokens=tokens, eviction=order
            ).hit_rate
            for order in ORDERS
        ]
        for rule in EVICTED
    }
    gains = {
        (rule, order): value - row[0]
        for rule, row in reuse.items()
        for order, value in zip(ORDERS[1:], row[1:], strict=True)
    }
    (rule, order), gain = max(gains.items(), key=lambda item: item[1])
    worst, loss = min(gains.items(), key=lambda item: item[1])
    finding = (
        f"Against one LRU order, looking at states changes reuse by {loss:+.1f} points "
        f"('{worst[1]}' under '{worst[0]}') to {gain:+.1f} ('{order}' under '{rule}')."
    ).replace("-", "−", 1)
    figure, [ax, notes] = sheet(finding, [2.4 * len(reuse), 3], left=left_margin(reuse))
    limits = (min(map(min, reuse.values())), max(map(max, reuse.values())))
    words = [[f"{value:.1f} %" for value in row] for row in reuse.values()]
    draw_heatmap(
        ax, list(reuse.values()), rows=list(reuse), columns=ORDERS, limits=limits, words=words
    )
    ax.set_xlabel("reused, by order of eviction")
    _note(
        notes,
        f"{model}, a pool of {_millions(tokens)} tokens, blocks of {block:,}, {_asked(trace)}; "
        f"'flops' weighs by the shape of a 7B hybrid. {_ONE_AT_A_TIME}",
    )
    said = (
        f"{name}: " + ", ".join(f"{order} {word}" for order, word in zip(ORDERS, row, strict=True))
        for name, row in zip(reuse, words, strict=True)
    )
    return Drawing(figure, finding, f"{finding} {'; '.join(said)}.")


def save_figure(
    name: str, folder: Path, *, medium: str = "review", trace: Trace | None = None
) -> tuple[Drawing, list[Path]]:
    """Draw a figure and write it as SVG and PDF; return it with the paths.

    The same bytes on every run. The SVG carries finding and alt text. Raises as `draw_figure`, and
    writes nothing then.
    """
    drawing = draw_figure(name, medium=medium, trace=trace)
    blank = dict.fromkeys(("Creator", "Producer"))
    finding, alt = drawing.finding, drawing.alt
    metadata = {
        "svg": {"Date": None, "Creator": None, "Title": finding, "Description": alt},
        "pdf": {"CreationDate": None, **blank, "Title": finding, "Subject": alt},
    }
    paths = []
    for kind, about in metadata.items():
        made = io.BytesIO()
        with style(medium):
            drawing.figure.savefig(made, format=kind, metadata=about)
        paths.append(folder / f"{name}.{kind}")
        folder.mkdir(parents=True, exist_ok=True)
        paths[-1].write_bytes(made.getvalue())
    return drawing, paths


def main(argv: Sequence[str]) -> int:
    """Write figures and print each one's finding and paths; ``python -m mambackpt figures``."""
    parser = argparse.ArgumentParser(
        prog="mambackpt figures",
        description="Draw the design-review figures as SVG and PDF.",
        epilog=f"Figures: {', '.join(FIGURES)}.",
    )
    parser.add_argument("name", nargs="*", help="figures to draw [all]")
    parser.add_argument("--out", type=Path, default=Path("notebooks/figures"), help="folder")
    parser.add_argument("--medium", default="review", choices=list(MEDIA), help="size [review]")
    parser.add_argument("--trace", type=Path, help="a request trace for the figures of replays")
    args = parser.parse_args(argv)
    names = args.name or list(FIGURES)
    unknown = [name for name in names if name not in FIGURES]
    if unknown:
        raise CheckpointValueError(
            f"no figure is named {', '.join(unknown)}; expected names among {', '.join(FIGURES)}. "
            "Try without a name for all of them."
        )
    trace = load_trace(args.trace) if args.trace else None
    for name in names:
        drawing, paths = save_figure(name, args.out, medium=args.medium, trace=trace)
        print(f"{drawing.finding}\n    {'  '.join(map(str, paths))}")
    return 0
