"""The sections of a review: each computes what it says, and says from what."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import TypeAlias

from mambackpt.draw import (
    GREY,
    HIT,
    STATE,
    Drawing,
    bars_height,
    describe_bars,
    describe_curves,
    draw_bars,
    draw_curves,
    draw_lanes,
    fit_y,
    lanes_height,
    left_margin,
    numeral,
    scheduled_lane,
    sheet,
    style,
    write_note,
)
from mambackpt.engine import (
    Report,
    branching_chats,
    check_lockstep,
    chunk_ends,
    compare_variants,
    describe_history,
)
from mambackpt.figures import draw_capacity
from mambackpt.models import HybridModel
from mambackpt.replay import CAUSES, Replay, explain_misses, replay
from mambackpt.review.page import Command, Part, Section, Table, Words
from mambackpt.review.question import Question
from mambackpt.why import explain_hit, resend_stairs, with_drop

Drawn: TypeAlias = tuple[Section, dict[str, Drawing]]
RULES = {
    "last": "the prompt's last boundary",
    "last+junction": "the last boundary and where prefixes part",
    "last+junction+chunk": "the last boundary, where prefixes part and every chunk end",
    "all": "every boundary",
}


@dataclass(frozen=True)
class Compared:
    """One rule on every trace of a question, and the spread of its hit rate."""

    rule: str
    words: str
    replays: Sequence[Replay]

    @property
    def hit(self) -> float:
        """Percent of prompt tokens reused, over all traces."""
        prompts = sum(int(run.prompt.sum()) for run in self.replays)
        return 100 * sum(int(run.reused.sum()) for run in self.replays) / prompts

    @property
    def spread(self) -> tuple[float, float]:
        """Lowest and highest: over the seeds, or over the tenths of a single trace."""
        if len(self.replays) > 1:
            rates = [100 * run.hit_rate for run in self.replays]
        else:
            [run] = self.replays
            cuts = [len(run) * at // 10 for at in range(11)]
            parts = [slice(a, b) for a, b in pairwise(cuts) if b > a]
            rates = [100 * float(run.reused[p].sum() / run.prompt[p].sum()) for p in parts]
        return min(rates), max(rates)


def compare_rules(question: Question) -> list[Compared]:
    """Replay every rule of the review on every trace, with the question's block and pool.

    >>> from mambackpt.models import PRESETS
    >>> from mambackpt.replay import generate_chat
    >>> question = Question(model=PRESETS["qwen3-next"], traces=[generate_chat(60)], block=1024)
    >>> [row.rule for row in compare_rules(question)]
    ['last', 'last+junction', 'last+junction+chunk', 'all']
    """
    return [
        Compared(rule, words, [_replay(question, rule, at) for at in range(len(question.traces))])
        for rule, words in RULES.items()
    ]


def _replay(question: Question, rule: str, at: int = 0) -> Replay:
    return replay(question.traces[at], rule, block=question.geometry.M, **question.options)


def landing(question: Question) -> Drawn:
    """Which states a prompt of each length leaves, and where it resumes when it is sent again."""
    geometry, rows, lanes = question.geometry, [], []
    for length in question.lengths:
        verdict = explain_hit(length, length, question.settings, shared=length)
        rest = verdict.recomputed
        row: list[object] = [length, verdict.chunks, verdict.joint, rest]
        if question.rate is not None:
            row.append(question.rate.words(rest))
        rows.append(row)
        ends = chunk_ends(
            length,
            budget=question.budget,
            mamba_block_size=geometry.M,
            hash_block_size=geometry.H,
            checkpoint_alignment=geometry.A,
            internal_checkpoints=geometry.A is not None,
            drop_eagle_block=question.drop,
        )
        lane = scheduled_lane(
            ends, geometry, internal_checkpoints=geometry.A is not None, label=f"{length:,}\ntokens"
        )
        lanes.append((rest, replace(lane, note=f"{rest:,} to\nrecompute")))
    header = ["prompt (tokens)", "forwards", "resumes at, sent again", "recomputed"]
    header += ["seconds of prefill"] if question.rate is not None else []
    table = Table("Each prompt computed alone, and then sent again.", header, rows)
    shown = [(rest, lane) for rest, lane in lanes if lane.seq_len <= 24 * geometry.M] or lanes[:1]
    most = max(rest for rest, _ in lanes)
    finding = (
        f"Blocks of {geometry.M:,} and hash units of {geometry.H:,} leave up to {most:,} tokens of "
        "these prompts to recompute when they are sent again."
    )
    with style():
        margin = left_margin(lane.label for _, lane in shown)
        figure, [ax] = sheet(finding, [lanes_height(len(shown), keys=True)], left=margin, right=0.6)
        draw_lanes(ax, [lane for _, lane in shown], notes=7.5, keys=True)
    said = (f"{row[0]:,} tokens: {row[1]} forwards, resumes at {row[2]:,}" for row in rows)
    drawing = Drawing(figure, finding, f"{finding} {'; '.join(said)}.")
    return Section("Where checkpoints land", [table]), {"landing": drawing}


def capacity(question: Question) -> Section | Drawn:
    """What the sizes are, and what the pool holds of them."""
    model = question.model
    table = Table("Bytes of one device, sizes in tokens.", ["size", "value"], list(sizes(model)))
    title = "Geometry and capacity"
    counted = model.recurrent_layers and model.attention_layers
    if not question.pool_bytes or not counted:
        missing = "no pool was given (--pool)" if counted else "its layers are not known (--layers)"
        return Section(title, [table, Words([f"What a pool holds is left out: {missing}."])])
    holds = model.capacity(question.pool_bytes, question.max_len)
    rows = [
        ["block ids, one of them the null block", holds.ids],
        ["bytes of a block id", holds.bytes_per_id],
        ["ids of a live request's states", holds.live_recurrent_ids],
        [f"ids of a live request of {question.max_len:,} tokens", holds.live_ids(question.max_len)],
        ["ids of one kept state", holds.recurrent_groups],
        ["tokens that take as many ids", round(holds.state_in_tokens)],
        ["maximum concurrency, as the engine logs it", round(holds.concurrency, 2)],
        ["size in tokens, as the engine logs it", holds.logged_tokens],
    ]
    lengths = [length for length in question.lengths if length >= holds.block]
    cached = [
        [length, *(holds.cached_requests(length, n) for n in (1, length // holds.block))]
        for length in lengths
    ]
    pool = Table(
        f"A pool of {question.pool_bytes / 1e9:,.1f} GB; as vllm 0.33.0 counts.",
        ["what", "value"], rows,
    )  # fmt: skip
    chats = Table(
        "Conversations that stay cached at once, nothing else running.",
        ["tokens", "with the last state alone", "with a state every block"], cached,
    )  # fmt: skip
    with style():
        drawing = draw_capacity(model, question.pool_bytes)
    return Section(title, [table, pool, chats]), {"capacity": drawing}


def staircase(question: Question) -> Drawn:
    """What a prompt that is sent again recomputes, over its length, with and without a drop."""
    settings, block = question.settings, question.geometry.M
    longest = 4 * block
    stairs = {
        "no drop": resend_stairs(replace(settings, drop_eagle_block=False), longest),
        "a unit is dropped": resend_stairs(with_drop(settings), longest),
    }
    mine = stairs["a unit is dropped" if question.drop else "no drop"]
    worst = max(mine.computed)
    at = mine.lengths[mine.computed.index(worst)]
    finding = (
        f"A prompt of {at:,} tokens that is sent again recomputes {worst:,}: the worst of up to "
        f"{longest:,} tokens."
    )
    rows = [
        [length, before, after] for length, before, after in mine.cliffs()[:8]
    ]  # fmt: skip
    table = Table(
        "Cliffs: one more token, and a state lies where the next request can use it.",
        ["prompt (tokens)", "recomputed", "recomputed with one more"], rows,
    )  # fmt: skip
    curves = {words: (list(s.lengths), list(s.computed)) for words, s in stairs.items()}
    with style():
        figure, [ax, note] = sheet(
            finding, [14, 1.4], left=left_margin([numeral(longest)]) + 2, right=11
        )
        for (words, (x, y)), colour in zip(curves.items(), (STATE, GREY), strict=True):
            ax.plot(x, y, color=colour, label=words)
            ax.annotate(words, (x[-1], max(y)), (8, 0), textcoords="offset points", va="center")
        fit_y(ax, [y for _, y in curves.values()], least=0)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(lambda value, _: numeral(value))
        ax.set_xlabel("tokens of a prompt that is sent again")
        ax.set_ylabel("recomputed (tokens)")
        write_note(note, f"Blocks of {block:,}, hash units of {question.geometry.H:,} tokens")
    cliffs = "; ".join(f"{row[0]:,}: {row[1]:,}, then {row[2]:,}" for row in rows)
    drawing = Drawing(figure, finding, f"{finding} Cliffs, {cliffs}.")
    return Section("The staircase of a prompt sent again", [table]), {"staircase": drawing}


def missed(question: Question) -> Drawn:
    """Why the computed tokens of the trace were not reused, under the engine's own placement."""
    found = explain_misses(question.trace, _BASE, block=question.geometry.M, **question.options)
    totals = [row for row in found.totals() if row["tokens"]]
    prompt = int(found.replay.prompt.sum())
    header = ["why it was computed", "tokens", "of all prompt tokens (%)"]
    rows = [[row["cause"], row["tokens"], round(row["percent_of_prompt"], 2)] for row in totals]
    if question.rate is not None:
        header.append("seconds of prefill")
        rows = [[*row, question.rate.words(row[1])] for row in rows]
    believed = int(found.replay.attention.sum()) / prompt
    resumed = int(found.replay.reused.sum()) / prompt
    vetoes = [row for row in totals if row["cause"] != CAUSES[0]]
    most = max(vetoes, key=lambda row: row["tokens"], default=None)
    why = (
        f"most is lost to: {most['cause']}" if most else "nothing that was there is computed again"
    )
    finding = (
        f"A router that counts attention blocks believes in {100 * believed:.1f} % reuse, "
        f"{100 * resumed:.1f} % can be resumed; {why}."
    )
    labels = [row["cause"] for row in totals]
    values = [row["percent_of_prompt"] for row in totals]
    words = [f"{value:.1f} %" for value in values]
    with style():
        figure, [ax] = sheet(finding, [bars_height(len(labels))], left=left_margin(labels))
        chosen = [labels.index(most["cause"])] if most else []
        draw_bars(
            ax, labels, values, unit="computed (% of prompt tokens)", words=words, highlight=chosen
        )
    table = Table(f"Under {_BASE} ({RULES[_BASE]}); {_traffic(question)}.", header, rows)
    alt = f"{finding} Computed: {describe_bars(labels, words)}."
    drawing = Drawing(figure, finding, alt)
    return Section("Why tokens were not reused", [table]), {"why-missed": drawing}


_BASE = "last+junction"


def rules(question: Question) -> Drawn:
    """The placement rules on the trace, with what their difference is worth."""
    compared = compare_rules(question)
    several = len(question.traces) > 1
    spread = f"{len(question.traces)} seeds" if several else "tenths of the trace"
    rows = [
        [
            row.words,
            row.rule,
            round(row.hit, 2),
            "{:.2f} to {:.2f}".format(*row.spread),
            sum(run.recomputed for run in row.replays),
            round(sum(run.states_written for run in row.replays) / _requests(row.replays), 2),
        ]
        for row in compared
    ]
    ceiling = 100 * _share(compared[0].replays)
    table = Table(
        f"{_traffic(question)}; the attention cache alone would reuse at most {ceiling:.2f} %. "
        f"Spread: lowest and highest of {spread}.",
        ["states kept", "rule", "reused (%)", "spread (%)", "recomputed", "states per request"],
        rows,
    )
    best = max(compared, key=lambda row: row.hit)
    worst = min(compared, key=lambda row: row.hit)
    finding = (
        f"Keeping {best.words} reuses {best.hit:.1f} % of the prompt tokens, {worst.words} "
        f"{worst.hit:.1f} %; an unlimited attention cache would find {ceiling:.1f} %."
    )
    labels = [_LABELS[row.rule] for row in compared]
    words = [f"{row.hit:.1f} %" for row in compared]
    with style():
        figure, [ax, note] = sheet(
            finding, [bars_height(len(compared)), 2.4], left=left_margin(labels)
        )
        draw_bars(
            ax, labels, [row.hit for row in compared], unit="reused (% of prompt tokens)",
            words=words, highlight=[compared.index(best)], bands=[row.spread for row in compared],
        )  # fmt: skip
        write_note(note, f"{_traffic(question)}. Lines: lowest and highest of {spread}.")
    alt = f"{finding} Reused: {describe_bars(labels, words)}."
    parts: list[Part] = [table, Words([_SIMPLIFIED])]
    return Section("Placement rules compared", parts), {"rules": Drawing(figure, finding, alt)}


_LABELS = {
    "last": "last boundary",
    "last+junction": "+ where prefixes part",
    "last+junction+chunk": "+ every chunk end",
    "all": "every boundary",
}
_SIMPLIFIED = (
    "One request at a time, no states of decode steps, full blocks only: a comparison of rules, "
    "not a forecast of a server's hit rate."
)


def _requests(replays: Sequence[Replay]) -> int:
    return sum(map(len, replays))


def _share(replays: Sequence[Replay]) -> float:
    return sum(int(r.ceiling.sum()) for r in replays) / sum(int(r.prompt.sum()) for r in replays)


def _traffic(question: Question) -> str:
    requests = sum(map(len, question.traces))
    pool = "unlimited memory"
    if question.pool_bytes:
        pool = f"a pool of {question.pool_bytes / 1e9:,.1f} GB"
    blocks = f"blocks of {question.geometry.M:,}"
    return f"{requests:,} requests ({question.trace.name}), {blocks}, {pool}"


def retention(question: Question) -> Drawn:
    """How far apart states may be kept before more is recomputed than saved."""
    block = question.geometry.M
    every = [block << power for power in range(7)]
    runs = [_replay(question, f"interval({K})") for K in every]
    work = [run.recomputed for run in runs]
    best = every[work.index(min(work))]
    above = [(tokens - min(work)) / 1e6 for tokens in work]
    rows = [
        [K, round(100 * run.hit_rate, 2), run.recomputed, round(run.states_per_request, 2)]
        for K, run in zip(every, runs, strict=True)
    ]
    table = Table(
        f"A state every K tokens and at the last boundary; {_traffic(question)}.",
        ["K (tokens)", "reused (%)", "recomputed", "states per request"],
        rows,
    )
    ends = f"{above[0]:,.2f} M tokens more at {every[0]:,} and {above[-1]:,.2f} M at {every[-1]:,}"
    finding = (
        f"Least is recomputed with a state every {best:,} tokens, {min(work) / 1e6:,.1f} M; {ends}."
    )
    with style():
        figure, [ax] = sheet(finding, [14], left=5, right=9)
        fit_y(ax, [above], least=0)
        draw_curves(
            ax, {"recomputed": (every, above)}, x_label="a state every (tokens)",
            y_label="above the least (M tokens)", highlight={"recomputed": STATE}, log_x=True,
        )  # fmt: skip
        ax.plot(best, 0, "o", color=HIT, zorder=4)
    said = describe_curves({"Above the least, in million tokens": (every, above)}, ",.2f")
    alt = f"{finding} {said}, at {', '.join(f'{K:,}' for K in every)} tokens."
    drawing = Drawing(figure, finding, alt)
    return Section("How far apart to keep states", [table]), {"retention": drawing}


def lockstep(question: Question) -> Section:
    """Whether the released scheduler keeps its promises under these settings, on random chats."""
    settings, unit = question.scaled, question.scale
    chats = [branching_chats(seed) for seed in range(question.histories)]
    report = check_lockstep(chats, settings)
    counts = report.counts
    scale = f", counted in units of {unit:,} tokens" if unit > 1 else ""
    words = [
        f"{counts.requests:,} requests of random branching chats{scale}, one at a time, no "
        f"evictions: {counts.hits:,} hits, of which {counts.wrong_restores:,} restored a state "
        f"that is not the one its key promises; {counts.mislabelled:,} blocks carry a key that "
        "they do not hold.",
    ]
    title = "Does every key hold its state?"
    if not report.smallest:
        words.append("Every promise was kept.")
        return Section(title, [Words(words), _lockstep_table({str(settings.variant): report})])
    words.append("The smallest history that breaks a promise:")
    history = [*describe_history(report.smallest), *map(str, report.broken)]
    table = _lockstep_table(compare_variants(chats, settings))
    return Section(title, [Words(words), Words(history, listed=True), table])


def _lockstep_table(reports: Mapping[str, Report]) -> Table:
    rows = [
        [name, found.counts.hits, found.counts.wrong_restores, found.counts.mislabelled,
         found.counts.reused_tokens, found.counts.prefill_chunks]
        for name, found in reports.items()
    ]  # fmt: skip
    header = ["scheduler", "hits", "wrong restores", "wrong keys", "reused", "prefill chunks"]
    return Table("The same chats under each scheduler's rules, and what a fix costs.", header, rows)


def assumptions(question: Question) -> Section:
    """What the numbers rest on: the model's shape and dtypes, the settings, the traffic."""
    model, geometry = question.model, question.geometry
    rows = [
        ["model", model.name],
        ["recurrent layers", f"{model.recurrent_layers}, {_shape(model.recurrent)}"],
        ["attention layers", f"{model.attention_layers}, {_shape(model.attention)}"],
        ["source of the shapes", model.source],
        ["dtypes", f"recurrent state {model.recurrent_dtype}, window {model.conv_dtype}, "
                   f"attention cache {model.kv_dtype}"],
        ["ranks, draft tokens", f"{model.ranks}, {model.spec}"],
        ["block, hash unit, hits on", f"{geometry.M:,}, {geometry.H:,}, {geometry.U:,} tokens"],
        ["grid of the kernel", f"{geometry.A} tokens" if geometry.A else "none: no state inside "
                                                                         "a chunk"],
        ["speculative decoding drops a unit", "yes" if geometry.drop_eagle_block else "no"],
        ["tokens of one step", f"{question.budget:,}"],
        ["traffic", _traffic(question)],
    ]  # fmt: skip
    parts: list[Part] = [Table("What every number rests on.", ["setting", "value"], rows)]
    if question.assumed:
        parts.append(Words(list(question.assumed), listed=True))
    return Section("Assumptions", parts)


def _shape(layer: object) -> str:
    given = asdict(layer).items()  # type: ignore[call-overload]
    sizes = ", ".join(f"{name} {value}" for name, value in given if value is not None)
    return f"{type(layer).__name__} ({sizes})"


def sizes(model: HybridModel) -> Iterator[list[object]]:
    """The sizes of a model, each with its words."""
    yield ["one state of one recurrent layer (bytes)", model.state_bytes]
    yield ["one token in one attention layer (bytes)", model.token_bytes]
    yield ["a page: one block of one layer (bytes)", model.page_bytes()]
    if model.recurrent_layers and model.attention_layers:
        yield ["a checkpoint of all recurrent layers (bytes)", model.model_state_bytes]
        yield ["one token in all attention layers (bytes)", model.model_token_bytes]
        yield ["tokens of attention cache that cost as much", round(model.exchange_rate)]


def advice(question: Question) -> Section:
    """What to set, what it rests on, and the commands that check it on another trace."""
    compared = compare_rules(question)
    best = max(compared, key=lambda row: row.hit)
    near = [row for row in compared if row.hit >= best.hit - 1]
    chosen = min(near, key=lambda row: sum(run.states_written for run in row.replays))
    states = sum(run.states_written for run in chosen.replays) / _requests(chosen.replays)
    words = [
        f"Keep {chosen.words} ({chosen.rule}): {chosen.hit:.1f} % reused, within a point of the "
        f"best of the rules above, with the fewest states ({states:.2f} per request).",
    ]
    geometry = question.geometry
    if question.drop:
        lost = geometry.U
        words.append(
            f"Speculative decoding drops a unit: every hit ends {lost:,} tokens earlier. Weigh it."
        )
    if geometry.H == geometry.M:
        words.append(
            f"The hash unit is the block: nothing shorter than {geometry.M:,} tokens can hit. A "
            "finer unit helps prompts below a block, but see whether every key holds its state."
        )
    name, block = question.model.name, geometry.M
    aligned = question.scaled.checkpoint_alignment
    grid = "--no-checkpoints" if aligned is None else f"--alignment {aligned}"
    lines = [
        f"python -m mambackpt replay YOUR-TRACE --rule {chosen.rule},all --block {block}",
        f"python -m mambackpt size {name}",
        f"python -m mambackpt lockstep --block {question.scaled.mamba_block_size} --hash "
        f"{question.scaled.hash_block_size} {grid} --budget {question.scaled.budget}"
        f"{' --drop' * question.drop}",
    ]
    said: list[Part] = [
        Words(words, listed=True), Words(["To check it on your own:"]), Command(lines)
    ]  # fmt: skip
    return Section("What to set, and how to check it", said)
