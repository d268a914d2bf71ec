"""Figures of where checkpoints land, and why not elsewhere."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from mambackpt.draw import (
    Drawing,
    Lane,
    Mark,
    Pages,
    bars_height,
    describe_bars,
    draw_bars,
    draw_lanes,
    filmstrip,
    is_slide,
    lanes_height,
    left_margin,
    note_height,
    page_head,
    page_slices,
    planned_lane,
    scheduled_lane,
    sequence_finding,
    sequence_frames,
    sheet,
)
from mambackpt.engine import Request, Settings, chunk_ends, find_variant, simulate
from mambackpt.errors import CheckpointValueError
from mambackpt.figures.registry import named
from mambackpt.geometry import CacheGeometry
from mambackpt.models import PRESETS
from mambackpt.planner import Reason, describe_reason, explain, get_mamba_prefill_checkpoint_reason


def _lane_sheets(
    finding: str, lanes: Sequence[Lane], *, notes: float, keys: bool = True, words: str = ""
) -> Pages:
    """Sheets of lanes with short labels on the left, notes on the right and words at the bottom."""
    margin = left_margin(lane.label for lane in lanes)
    height = lanes_height(1, keys=keys)
    beside = 3.6 + note_height(words)
    slices = page_slices(finding, [height] * len(lanes), beside=beside)
    width = max(lane.width for lane in lanes)
    figures, axes = [], []
    for number, rows in enumerate(slices):
        head = page_head(finding, number, len(slices))
        shown = lanes[rows]
        heights = [height * len(shown)]
        figure, [ax] = sheet(head, heights, left=margin, right=0.6, note=words)
        axes.append(draw_lanes(ax, shown, notes=notes, keys=keys, width=width))
        figures.append(figure)
    return Pages(tuple(figures), tuple(axes))


@named("one-forward")
def _one_forward() -> Drawing:
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
    return _lane_sheets(finding, lanes, notes=7.5).drawing(finding, alt)


@named("where-it-lands")
def _where_it_lands() -> Drawing:
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
        label = f"block {block:,}\nunit {hash_unit:,}" + "\none dropped" * drop
        lane = planned_lane(prompt, prompt, geometry, label=label)
        rest.append(prompt - lane.marks[0].position)
        lanes.append(replace(lane, note=f"{rest[-1]:,} to\nrecompute"))
    finding = (
        f"Sent again, a prompt of {prompt:,} tokens recomputes {min(rest):,} to {max(rest):,}: "
        "hash unit, dropped unit and block decide where it resumes."
    )
    words = (
        "Unit: the hash unit, tokens under one key. With a draft model the last unit of a hit is "
        "dropped: the draft needs its hidden states, which only computing it again gives."
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
    return _lane_sheets(finding, lanes, notes=6.2, words="" if is_slide() else words).drawing(
        finding, alt
    )


_TOY_BLOCK = 2  # tokens: the least that tells a block from a token


def _smallest_refused(reason: Reason) -> tuple[int, int, CacheGeometry]:
    """Return the smallest row, in blocks of two tokens, that the planner refuses for this reason.

    >>> seq_len, query_len, geometry = _smallest_refused(Reason.START_OFF_HASH_GRID)
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


def _smallest_outside() -> tuple[int, int, int]:
    """Return the smallest (start, end, position) that the predicate finds not inside the query.

    >>> _smallest_outside()
    (0, 3, 3)

    For blocks of two tokens and a unit of one. No row of the planner gets there.
    """
    for end in range(1, 17):
        for start, position in product(range(end), range(2 * end)):
            reason = get_mamba_prefill_checkpoint_reason(start, end, position, 1, _TOY_BLOCK, 1)
            if reason is Reason.NOT_INSIDE_QUERY:
                return start, end, position
    raise AssertionError("no query of up to 16 tokens fails the fifth condition")


# Each condition by its number and what fails it: the row beside it shows the failure. The fifth,
# that the position lies inside the query, fails in no row of the planner.
_FAILURES = {
    Reason.CANNOT_EXPORT: "1 the kernel\ncannot export",
    Reason.START_OFF_HASH_GRID: "2 starts off\nthe hash grid",
    Reason.COLUMN_TAKEN: "3 its column\nis not free",
    Reason.NO_BLOCK_GAINED: "4 gains less than\na hash unit",
    Reason.OFF_KERNEL_GRID: "6 lies off the\nkernel's grid",
}


@named("reasons")
def _reasons() -> Drawing:
    """One lane per condition that can fail, each with the smallest row that fails it."""
    lanes = []
    for reason, label in _FAILURES.items():
        seq_len, query_len, geometry = _smallest_refused(reason)
        lane = planned_lane(seq_len, query_len, geometry)
        lanes.append(replace(lane, label=label, caption="", note=lane.caption))
    longest = max(lane.seq_len for lane in lanes)
    finding = (
        f"{longest} tokens are enough to fail each of {len(lanes)} of the 6 conditions for a "
        "checkpoint."
    )
    start, end, position = _smallest_outside()
    fifth = describe_reason(Reason.NOT_INSIDE_QUERY, start, end, position, 1, _TOY_BLOCK, 1)
    words = (
        f"Blocks of {_TOY_BLOCK} tokens; hollow: not saved. The fifth, that the position lies "
        "inside the query, fails in no row of up to 16 tokens, only in a direct call."
    )
    alt = f"{len(lanes)} lanes in blocks of {_TOY_BLOCK} tokens, the smallest row that fails each: "
    alt += " ".join(f"{lane.label[0]}: {lane.note}" for lane in lanes)
    pages = _lane_sheets(finding, lanes, notes=27, keys=False, words=words)
    return pages.drawing(finding, f"{alt} {words} It says: {fifth}")


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
def _zero_hit_puzzle() -> Drawing:
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
        variant=replace(find_variant("vllm-0.33"), name="no junction", junction_stop=lambda *_: 0),
    )
    lanes, reuses, states_in_words = [], [], []
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
        states_in_words.append(
            f"{shared:,} shared tokens: states after {_listed(states)}, {hit:,} reusable."
        )
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
        f"no internal checkpoint, one request at a time, no evictions. {' '.join(states_in_words)}"
    )
    words = (
        f"Blocks of {block} tokens, at most {budget:,} tokens in one step, so that the first ends "
        f"at {ends[0]:,}. A state stays where a step ends on a block boundary (dot; triangle: "
        "found again); none at the end of a shared prefix (bar), none inside a step. 8 groups of 8 "
        "requests, one at a time, no evictions."
    )
    return _lane_sheets(finding, lanes, notes=12, words=words).drawing(finding, alt)


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
def _block_sizes() -> Drawing:
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
    bars = describe_bars(labels, [f"{size:,}" for size in sizes])
    return Drawing(figure, finding, f"Bars of tokens per block: {bars}. {finding}")


@named("sequence")
def _sequence() -> Drawing:
    """The filmstrip of a prompt of 8,000 tokens that moves across blocks, and of its repeat."""
    frames = sequence_frames(8000, CacheGeometry(1536, 1536, 16, 1536))
    return filmstrip(frames, finding=sequence_finding(frames), medium=None)
