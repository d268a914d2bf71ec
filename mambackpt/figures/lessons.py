"""Figures that the course leans on: what a state weighs, what a forward saves, what cures cost."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from mambackpt.draw import (
    Column,
    Drawing,
    Lane,
    Mark,
    bars_height,
    describe_bars,
    describe_lanes,
    draw_bars,
    draw_strip,
    is_slide,
    left_margin,
    sheets,
    side_by_side,
)
from mambackpt.engine import (
    Allocated,
    Cell,
    Hit,
    Keyed,
    Request,
    Run,
    Scheduled,
    Settings,
    Snapshot,
    find_variant,
    simulate,
)
from mambackpt.figures.placement import puzzle_requests
from mambackpt.figures.registry import named
from mambackpt.figures.words import listed
from mambackpt.models import PRESETS

_GROUP = 1  # the recurrent group


def _bytes(count: float) -> str:
    return f"{count / 1e6:,.0f} MB" if count >= 1e6 else f"{count / 1e3:,.1f} kB"


@named("to-scale")
def _to_scale() -> Drawing:
    """One checkpoint of Kimi-K3 beside tokens of attention cache, to scale."""
    model, prompt = PRESETS["kimi-k3"], 8000
    block, unit = model.block_size(), model.attention.kernel_block
    wide = model.exchange_rate
    bars = {
        "one checkpoint (all layers)": wide,
        "cache of one block": block,
        f"cache of a prompt of {prompt:,}": prompt,
        "cache of one token": 1,
    }
    finding = (
        f"One checkpoint of Kimi-K3 is as wide as the attention cache of {wide:,.0f} tokens: "
        f"{wide / prompt:.1f} prompts of {prompt:,}."
    )
    note = (
        "Where the block comes from: one attention page must hold one state, "
        f"{model.state_bytes:,} bytes of a layer / {model.token_bytes} bytes of a token = "
        f"{model.state_bytes / model.token_bytes:,.1f} tokens, rounded up to a multiple of {unit} "
        f"= {block:,}. A checkpoint has {model.recurrent_layers} states, a token of cache "
        f"{model.attention_layers} entries: {model.recurrent_layers} × {model.state_bytes:,} / "
        f"({model.attention_layers} × {model.token_bytes}) = {wide:,.0f}."
    )
    words = [
        f"{tokens:,.0f} ({_bytes(tokens * model.model_token_bytes)})" for tokens in bars.values()
    ]
    labels = list(bars)
    pages = sheets(finding, [bars_height(len(bars))], left=left_margin(labels), note=note)
    unit_words = "tokens of attention cache, to scale"
    draw_bars(pages.axes[0], labels, [*bars.values()], unit=unit_words, words=words, highlight=[0])
    alt = f"{finding} Bars in tokens of attention cache: {describe_bars(labels, words)}. {note}"
    return pages.drawing(finding, alt)


# ---- what forwards save ------------------------------------------------------------------------


def _column_of(cell: Cell, *, block: bool = False) -> Column:
    """A cell of the engine's row as it is drawn."""
    role = "previous" if cell.role in ("kept", "copy") else cell.role
    key = max(cell.keyed, default=None)
    number = cell.block if block else None
    return Column(role, cell.held, key, cell.right, number)  # type: ignore[arg-type]


def _lane_of(run: Run, name: str) -> Lane:
    """A request's queries, and its row after the last of them."""
    M = run.settings.mamba_block_size
    queries, row, hits = [], None, []
    for snapshot in run.snapshots():
        queries += [e for e in snapshot.events if isinstance(e, Scheduled) and e.request == name]
        hits += [
            e
            for e in snapshot.events
            if isinstance(e, Hit) and e.request == name and e.group == _GROUP
        ]
        rows = [r for r in snapshot.rows if r.request == name and r.group == _GROUP]
        row = rows[0] if rows else row
    assert row is not None
    columns = [Column()] * row.width
    marks = [Mark(hit.position, "hit", (hit.position - 1) // M) for hit in hits]
    for cell in row.cells:
        columns[cell.column] = column = _column_of(cell)
        if column.key and column.key not in [mark.position for mark in marks]:
            kind = "checkpoint" if cell.role == "checkpoint" else "state"
            marks.append(Mark(column.key, kind, cell.column))  # type: ignore[arg-type]
    ends = tuple(query.end for query in queries)
    return Lane("", M, queries[0].start, ends, tuple(columns), tuple(marks))


@named("forwards")
def _forwards() -> Drawing:
    """What 8,000 tokens at blocks of 1,536 save in two forwards and in one, and who finds it."""
    prompt, block = range(8000), 1536
    common = Settings(
        mamba_block_size=block,
        hash_block_size=block,
        cache_hit_alignment_tokens=block,
        max_running=1,
    )
    blind = replace(
        find_variant("vllm-0.33"),
        name="neither",
        runs_through=lambda _: True,
        writes_inside=lambda _: False,
        junction_stop=lambda *_: 0,
    )
    cases = {
        "stop before the end": replace(common, internal_checkpoints=False),
        "checkpoint inside": common,
        "neither": replace(common, variant=blind),
    }
    lanes, computed, forwards = [], [], []
    for label, settings in cases.items():
        run = simulate([Request("first", prompt), Request("next", prompt)], settings)
        first, second = (_lane_of(run, name) for name in ("first", "next"))
        sizes = [end - start for start, end in zip((0, *first.ends), first.ends, strict=False)]
        saved = [f"{column.key:,}" for column in first.columns if column.key]
        again = second.seq_len - second.start
        count = f"{len(sizes)} forward{'s' * (len(sizes) > 1)}"
        ran = listed([f"{size:,}" for size in sizes])
        kept = f"the state after {saved[0]}" if saved else "none"
        lanes += [
            replace(first, label=label, caption=f"First: {count}, {ran} tokens. Kept: {kept}."),
            replace(
                second,
                label="the next",
                caption=f"Next: finds {second.start:,} tokens, computes {again:,}.",
            ),
        ]
        computed.append(again)
        forwards.append(len(sizes))
    finding = (
        f"A checkpoint inside saves in {forwards[1]} forward what a stop saves in {forwards[0]}: "
        f"the next request computes {computed[1]:,} of {len(prompt):,} tokens, with neither "
        f"{computed[2]:,}."
    )
    pages = draw_strip(finding, lanes)
    alt = f"{finding} {' '.join(lane.caption for lane in lanes)} {describe_lanes(lanes)}"
    return pages.drawing(finding, alt)


# ---- the hit in the middle of a block ----------------------------------------------------------


_SHARED = 96  # tokens: a multiple of the hash unit inside a block


@dataclass(frozen=True, slots=True)
class _MidBlock:
    """What happens to the block of a hit inside a block, taken from the engine's snapshots.

    ``stored``: A ends; ``found``: B looks up and runs; ``full``: B's copy gets its key; ``ahead``:
    the step after that; ``later``: C looks up.
    """

    block: int
    stored: Snapshot
    found: Snapshot
    full: Snapshot
    ahead: Snapshot
    later: Snapshot

    @classmethod
    def simulated(cls, settings: Settings) -> "_MidBlock":
        history = [
            Request("A", range(100)),
            Request("B", [*range(_SHARED), *range(1000, 1014)], 22),
            Request("C", [*range(_SHARED), *range(2000, 2014)]),
        ]
        snapshots = simulate(history, settings).snapshots()
        by_request: dict[str, list[Snapshot]] = {name: [] for name in "ABC"}
        for snapshot in snapshots:
            by_request[snapshot.rows[0].request].append(snapshot)
        steps = by_request["B"]
        full = next(at for at, step in enumerate(steps) if _of(step, Keyed))
        return cls(
            settings.mamba_block_size,
            *(by_request["A"][0], steps[0], steps[full], steps[full + 1], by_request["C"][0]),
        )

    def row(self, snapshot: Snapshot, label: str, caption: str) -> Lane:
        """The request as it is after a step."""
        [seen] = [r for r in snapshot.rows if r.group == _GROUP]
        columns = [Column()] * seen.width
        for cell in seen.cells:
            columns[cell.column] = _column_of(cell, block=True)
        marks = [
            Mark(column.key, "checkpoint" if column.role == "checkpoint" else "state", number)
            for number, column in enumerate(columns)
            if column.key
        ]
        [query] = [e for e in snapshot.events if isinstance(e, Scheduled)]
        return Lane(
            *(label, self.block, query.start, (query.end,), tuple(columns), tuple(marks)),
            caption=caption,
            note=_keys_of(snapshot),
        )

    def before(self, snapshot: Snapshot, column: Column, label: str, caption: str) -> Lane:
        """A request before its first step: what stands where it resumes."""
        [query] = [e for e in snapshot.events if isinstance(e, Scheduled)]
        [hit] = _of(snapshot, Hit)
        at = (hit.position - 1) // self.block
        columns = [Column()] * -(-query.end // self.block)
        columns[at] = column
        return Lane(
            *(label, self.block, query.start, (), tuple(columns), (Mark(hit.position, "hit", at),)),
            total=query.end,
            caption=caption,
            note=_keys_of(snapshot),
        )


def _of(snapshot: Snapshot, kind: type) -> list[Any]:
    """The events of one kind in a step's recurrent group."""
    return [e for e in snapshot.events if isinstance(e, kind) and getattr(e, "group", 0) == _GROUP]


def _keys_of(snapshot: Snapshot) -> str:
    """Which block is found under which key after a step, wherever it lies."""
    cells = [cell for row in snapshot.rows if row.group == _GROUP for cell in row.cells]
    keys = {c.block: c.keyed for c in (*snapshot.cached, *cells) if c.keyed}
    lines = [f"#{block}: key {key:,}" for block in sorted(keys) for key in keys[block]]
    return "\n".join(["in the pool", *lines])


@named("mid-block-hit")
def _mid_block_hit() -> Drawing:
    """A hit inside a block: where the block lies, when it is copied, and who keeps which key."""
    settings = Settings(retention=None, max_running=1)
    story = _MidBlock.simulated(settings)
    [hit], [again] = _of(story.found, Hit), _of(story.later, Hit)
    [copy] = [e for e in _of(story.found, Allocated) if e.role == "copy"]
    [key], [fresh] = _of(story.full, Keyed), _of(story.ahead, Allocated)
    home = next(c for r in story.stored.rows for c in r.cells if c.block == hit.block)
    held, M = hit.position, story.block
    kept = Column("previous", held, held, block=hit.block)
    lanes = [
        story.row(
            *(story.stored, "A ends"),
            f"Key {held} leads to block #{hit.block}, in A's column {home.column}.",
        ),
        story.before(
            *(story.found, kept, "B looks up"),
            f"From {held} on, B reads column ({held} \N{MINUS SIGN} 1) // {M} = {copy.column}: "
            f"#{hit.block} stands there.",
        ),
        story.before(
            *(story.found, Column("copy", held, block=copy.block), "B, copied"),
            f"The state is copied to #{copy.block}, B's alone, without a key.",
        ),
        story.row(
            *(story.full, f"B, {key.position} in"),
            f"#{copy.block} is full: key {key.position} leads to the state at its end.",
        ),
        story.row(
            *(story.ahead, "B goes on"),
            f"The next token runs in a copy of it: #{fresh.block}, in column {fresh.column}.",
        ),
        story.before(
            *(story.later, replace(kept, block=again.block), "C looks up"),
            f"C shares {_SHARED} tokens too, and finds #{again.block} as A left it.",
        ),
    ]
    finding = (
        f"A hit inside a block is copied before the first step: #{hit.block} keeps key {held}, "
        f"the copy #{copy.block} gets key {key.position} when full."
    )
    words = (
        f"Blocks of {M} tokens, hash units of {settings.hash_block_size}, every boundary kept; #: "
        "number of a block in the pool. From the snapshots of the engine's model."
    )
    pages = draw_strip(finding, lanes, notes=8, note="" if is_slide() else words)
    alt = f"{finding} {words} {' '.join(lane.caption for lane in lanes)}"
    return pages.drawing(finding, alt)


# ---- the price of each cure --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cure:
    """One change to the puzzle's service: what it costs and whom it helps, by simulation.

    Over all 64 requests: ``computed`` tokens, prefill ``chunks``, states ``kept`` under a key.
    ``resumed`` has what each request of the first group resumes after.
    """

    name: str
    computed: int
    chunks: int
    kept: int
    resumed: tuple[int, ...]

    @property
    def helps(self) -> str:
        """The first request that it helps, in words.

        >>> Cure("none", 9, 9, 9, (0, 0, 1056)).helps
        'helps from the 3rd request on'
        """
        first = next((at for at, tokens in enumerate(self.resumed, start=1) if tokens), 0)
        ordinal = {2: "2nd", 3: "3rd"}.get(first, f"{first}th")
        return f"helps from the {ordinal} request on" if first else "helps nobody"


def puzzle_cures(shared: int = 1500, unique: int = 700) -> list[Cure]:
    """Return what each cure of the puzzle costs, cheapest first: tokens, then chunks, then states.

    >>> puzzle_cures()[0].name
    'checkpoint inside the step'
    """
    return list(_cured(shared, unique))


def _puzzle_service() -> Settings:
    released = find_variant("vllm-0.33")
    return Settings(
        mamba_block_size=528,
        hash_block_size=528,
        checkpoint_alignment=None,
        internal_checkpoints=False,
        retention=None,
        budget=2048,
        max_running=1,
        variant=replace(released, name="no junction", junction_stop=lambda *_: 0),
    )


def puzzle_hits(shared: int, unique: int) -> int:
    """Return how many of the 64 requests of the puzzle's service reuse a prefix.

    >>> puzzle_hits(1600, 600), puzzle_hits(1500, 700)
    (56, 0)
    """
    return simulate(puzzle_requests(shared, unique), _puzzle_service()).counts.hits


@cache
def _cured(shared: int, unique: int) -> tuple[Cure, ...]:
    released, as_it_is = find_variant("vllm-0.33"), _puzzle_service()
    inside = replace(as_it_is, internal_checkpoints=True, checkpoint_alignment=16)
    changes = {
        "as it is": as_it_is,
        "steps of up to 8,192": replace(as_it_is, budget=8192),
        "checkpoint inside, retention 0": replace(inside, retention=0),
        "stop where prefixes part": replace(as_it_is, variant=released),
        "checkpoint inside the step": inside,
        "steps of 1,056": replace(as_it_is, budget=1056),
        "steps of 528": replace(as_it_is, budget=528),
    }
    cures = [_cure(name, settings, shared, unique) for name, settings in changes.items()]
    return tuple(sorted(cures, key=lambda cure: (cure.computed, cure.chunks, cure.kept)))


def _cure(name: str, settings: Settings, shared: int, unique: int) -> Cure:
    requests = puzzle_requests(shared, unique)
    run = simulate(requests, settings)
    events = [event for snapshot in run.snapshots() for event in snapshot.events]
    hits = {e.request: e.position for e in events if isinstance(e, Hit) and e.group == _GROUP}
    kept = sum(isinstance(e, Keyed) and e.group == _GROUP for e in events)
    counts = run.counts
    resumed = tuple(hits.get(request.name, 0) for request in requests[:8])
    return Cure(name, counts.computed_tokens, counts.prefill_chunks, kept, resumed)


@named("cures")
def _cures() -> Drawing:
    """The price of each cure of the zero-hit puzzle, and which request it helps first."""
    cures = puzzle_cures()
    before = next(cure for cure in cures if cure.name == "as it is")
    best = cures[0]
    next_one = [c for c in cures if c.resumed[1]]
    third = [c for c in cures if c.resumed[2] and not c.resumed[1]]
    finding = (
        f"{len(next_one)} of {len(cures) - 1} changes help the very next request, {len(third)} "
        f"the third; cheapest, a {best.name}, runs {best.chunks} chunks instead of "
        f"{before.chunks}."
    )
    shown = (
        [c for c in cures if c.computed < before.computed or c is before] if is_slide() else cures
    )
    note = (
        "64 requests of 1,500 shared and 700 own tokens, blocks of 528, 2,048 tokens a step. That "
        "budget ends the first step at 1,584, behind the shared prefix; the step's own checkpoint "
        "lies one block lower, at 1,056, and cures. Where only a prompt's last boundary is kept "
        "(retention 0), it does not."
    )
    labels = [f"{cure.name}\n{cure.helps}" for cure in shown]
    pages = sheets(finding, [2.8 * len(shown)], left=left_margin(labels), note=note)
    columns = side_by_side(pages.axes[0], 3, gap=1.2)
    highlight = [shown.index(best)]
    for ax, kind, unit in zip(
        columns,
        ("computed", "chunks", "kept"),
        ("tokens computed", "prefill chunks", "states kept"),
        strict=True,
    ):
        values = [int(getattr(cure, kind)) for cure in shown]
        names = labels if ax is columns[0] else [""] * len(shown)
        draw_bars(ax, names, values, unit=unit, highlight=highlight, ticks=2)
    said = "; ".join(
        f"{c.name}: {c.computed:,} tokens, {c.chunks} chunks, {c.kept} states, {c.helps}"
        for c in cures
    )
    return pages.drawing(finding, f"{finding} {said}. {note}")
