"""Every figure, in both media: its numbers, its words, its bytes."""

import itertools
import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib as mpl
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text

from mambackpt import CacheGeometry, CheckpointValueError, Reason, explain
from mambackpt.draw.charts import draw_bars
from mambackpt.draw.sheet import MEDIA, Drawing, sheet, style
from mambackpt.engine import chunk_ends
from mambackpt.figures.command import main
from mambackpt.figures.lessons import puzzle_cures
from mambackpt.figures.lockstep import wrong_restores
from mambackpt.figures.placement import _smallest_outside, _smallest_refused, puzzle_requests
from mambackpt.figures.registry import (
    FIGURES,
    Spread,
    describe_figure,
    draw_figure,
    named,
    reads_trace,
    save_figures,
    save_named,
)
from mambackpt.figures.replays import _first_requests, _optimal_replays, pool_sizes
from mambackpt.figures.words import PLACEMENTS, asked, rule_in_words, short_words
from mambackpt.models.presets import PRESETS
from mambackpt.planner import get_mamba_prefill_checkpoint_reason
from mambackpt.replay.files import load_trace
from mambackpt.replay.generators import example_trace
from mambackpt.replay.rules import expected_recompute, optimal_positions
from mambackpt.replay.run import replay
from mambackpt.replay.trace import trace_from_tokens

EACH = pytest.mark.parametrize(("name", "medium"), list(itertools.product(FIGURES, MEDIA)))
_FOLDER = TemporaryDirectory()


@cache
def run_of(name: str) -> tuple[Drawing, list[Path]]:
    """A figure as it is drawn and written, once for all tests that only look at it."""
    return save_named(name, Path(_FOLDER.name))


@cache
def drawing_of(name: str, medium: str) -> Drawing:
    """One drawing per figure and medium."""
    return run_of(name)[0] if medium == "review" else draw_figure(name, medium=medium)


@cache
def texts_in(name: str, medium: str) -> list[list[tuple[str, "mpl.transforms.Bbox"]]]:
    """The texts of each page, laid out once."""
    return [texts_of(page.figure) for page in drawing_of(name, medium).pages]


def texts_of(figure: Figure) -> list[tuple[str, "mpl.transforms.Bbox"]]:
    """Every text that can be seen, with its extent in pixels."""
    FigureCanvasAgg(figure).draw()
    seen = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
    boxes = [(text.get_text(), text.get_window_extent()) for text in seen]
    return [(words, box) for words, box in boxes if box.width > 0]


@EACH
def test_no_text_is_clipped_and_no_two_overlap(name: str, medium: str) -> None:
    for page, boxes in zip(drawing_of(name, medium).pages, texts_in(name, medium), strict=True):
        figure = page.figure
        assert len(boxes) > 5
        for words, box in boxes:
            inside = figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1
            assert inside, words
            assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1, words  # noqa: PT018
        for (words, box), (other, second) in itertools.combinations(boxes, 2):
            width = min(box.x1, second.x1) - max(box.x0, second.x0)
            height = min(box.y1, second.y1) - max(box.y0, second.y0)
            # Extents include the space of letters that go up or down; two pixels of it may meet.
            assert width <= 0 or height <= 2, (words, other)


@EACH
def test_sizes_are_those_of_the_medium(name: str, medium: str) -> None:
    """A slide is 16:9: what does not fit at its size of type goes on another one."""
    width, tallest, points = {"review": (7.2, 9.0, 9), "slide": (10, 5.6, 14)}[medium]
    pages = drawing_of(name, medium).pages
    assert len(pages) == 1 or medium == "slide"
    for page in pages:
        assert page.figure.get_figwidth() == pytest.approx(width)
        assert page.figure.get_figheight() <= tallest + 1e-6
        sizes = {text.get_fontsize() for text in page.figure.findobj(Text) if text.get_text()}
        assert min(sizes) == points


def end_labels(ax: Axes) -> list[Annotation]:
    """The labels of lines' ends; those of bars are annotations too."""
    named = [text for text in ax.texts if isinstance(text, Annotation) and text.get_text()]
    return [] if ax.patches else named


def labels_of(ax: Axes) -> list[tuple[str, float, float, float]]:
    """Every label of a line's end: its words, its middle, that end and its height, in em."""
    em = ax.xaxis.label.get_fontsize() * ax.figure.dpi / 72
    labels = []
    for text in end_labels(ax):
        box = text.get_window_extent()
        lines = text.get_text().count("\n") + 1
        end = ax.transData.transform(text.xy)[1]
        labels.append((text.get_text(), (box.y0 + box.y1) / 2 / em, end / em, 1.25 * lines))
    return sorted(labels, key=lambda label: label[1])


@EACH
def test_a_label_stands_at_its_lines_end_unless_its_neighbours_force_it(
    name: str, medium: str
) -> None:
    """Labels that touch share the way: none is moved further than the others ask for."""
    assert texts_in(name, medium), "laid out"
    for page in drawing_of(name, medium).pages:
        for ax in page.figure.axes:
            em = ax.xaxis.label.get_fontsize() * ax.figure.dpi / 72
            groups: list[list[tuple[str, float, float, float]]] = []
            for label in labels_of(ax):
                below = groups[-1][-1] if groups else None
                if below and label[1] - below[1] < (label[3] + below[3]) / 2 + 0.15:
                    groups[-1].append(label)
                else:
                    groups.append([label])
            for group in groups:
                moved = [middle - end for _, middle, end, _ in group]
                at_an_edge = (
                    group[0][1] < ax.bbox.y0 / em + 0.2 or group[-1][1] > ax.bbox.y1 / em - 0.2
                )
                assert len(group) > 1 or abs(moved[0]) < 0.3 or at_an_edge, group
                assert abs(sum(moved)) / len(moved) < 0.3 or at_an_edge, group


@EACH
def test_a_label_carries_the_mark_of_its_line_beside_dark_grey_words(
    name: str, medium: str
) -> None:
    for page in drawing_of(name, medium).pages:
        for ax in page.figure.axes:
            labels = end_labels(ax)
            colours = {mpl.colors.to_hex(line.get_color()) for line in ax.lines}
            marks = [mark for mark in ax.collections if len(mark.get_offsets()) == 1]
            assert len(marks) >= len(labels)
            for label, mark in zip(labels, marks, strict=False):
                assert tuple(mark.get_offsets()[0]) == tuple(label.xy)
                assert mpl.colors.to_hex(mark.get_edgecolor()[0]) in colours
                assert mpl.colors.to_hex(label.get_color()) == "#33333b"


@EACH
def test_the_title_is_the_finding_and_has_numbers(name: str, medium: str) -> None:
    drawing = drawing_of(name, medium)
    for number, page in enumerate(drawing.pages, start=1):
        title = page.figure.get_suptitle().replace("\n", " ")
        count = f" ({number} of {len(drawing.pages)})" * (len(drawing.pages) > 1)
        assert title == f"{drawing.finding}{count}"
    assert drawing.finding.endswith(".")
    assert re.search(r"\d", drawing.finding)
    assert re.search(r"\d", drawing.alt)
    assert not re.search(r"\d{5}", drawing.finding), "thousands are separated"


@EACH
def test_only_state_checkpoint_hit_and_error_have_colours(name: str, medium: str) -> None:
    """Text is always dark grey; of fills and lines only tints of the four, and greys."""
    allowed = {"#5790fc", "#f89c20", "#e42536", "#964a8b"}
    hues = {round(float(mpl.colors.rgb_to_hsv(mpl.colors.to_rgb(c))[0]), 2) for c in allowed}
    for page in drawing_of(name, medium).pages:
        for text in page.figure.findobj(Text):
            red, green, blue = mpl.colors.to_rgb(text.get_color())
            assert max(red, green, blue) - min(red, green, blue) < 0.05
        for artist in page.figure.findobj(lambda a: hasattr(a, "get_facecolor")):
            for colour in mpl.colors.to_rgba_array(artist.get_facecolor()):
                hue, saturation, _ = mpl.colors.rgb_to_hsv(colour[:3])
                near = min(abs(float(hue) - known) for known in hues)
                assert saturation < 0.05 or near < 0.03, artist


@pytest.mark.parametrize("name", FIGURES)
def test_a_second_run_writes_the_same_bytes(name: str, tmp_path: Path) -> None:
    _, second = save_named(name, tmp_path / "second")
    assert [path.suffix for path in second] == [".svg", ".pdf"]
    for one, other in zip(run_of(name)[1], second, strict=True):
        assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("name", FIGURES)
def test_committed_figures_are_what_the_code_draws(name: str, root: Path) -> None:
    """SVGs only: a PDF's streams depend on the machine's zlib."""
    _, [svg, pdf] = run_of(name)
    committed = root / "notebooks/figures" / svg.name
    assert committed.read_bytes() == svg.read_bytes(), f"run `make figures`: {svg.name}"
    assert (root / "notebooks/figures" / pdf.name).exists()


def test_no_figure_is_kept_that_no_code_draws(root: Path) -> None:
    assert {path.stem for path in (root / "notebooks/figures").iterdir()} == set(FIGURES)


def test_several_processes_write_the_same_bytes_in_the_same_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A figure that spreads its work is drawn here, with what other processes computed."""

    def squares(spread: Spread = map) -> Drawing:
        figure, [ax] = sheet("9 is computed.", [3])
        draw_bars(ax, ["1", "2", "3"], list(spread(abs, [-1, -4, -9])), unit="squares")
        return Drawing(figure, "9 is computed.", "Three bars.")

    names = ["where-it-lands", "squares", "one-forward"]
    for name, value in (("FIGURES", dict(FIGURES)), ("_SPREADING", {"squares"})):
        monkeypatch.setattr(f"mambackpt.figures.registry.{name}", value)
    named("squares", spreads=True)(squares)
    runs = [
        list(save_figures(names, tmp_path / f"{processes}", processes=processes))
        for processes in (1, 2)
    ]
    assert [[svg.stem for _, [svg, _] in run] for run in runs] == [names] * 2
    for (finding, files), (again, others) in zip(*runs, strict=True):
        assert finding == again
        assert [one.read_bytes() for one in files] == [one.read_bytes() for one in others]
    assert runs[1][2][1][0].read_bytes() == run_of("one-forward")[1][0].read_bytes()
    with pytest.raises(CheckpointValueError, match="processes is 0"):
        next(save_figures(names, tmp_path, processes=0))


def test_an_svg_keeps_its_words_as_text_and_carries_finding_and_alt() -> None:
    drawing, [svg, pdf] = run_of("one-forward")
    words = svg.read_text(encoding="utf-8")
    assert "<text" in words
    assert f"<dc:title>{drawing.finding}</dc:title>" in words
    assert drawing.alt in words
    assert "<dc:date>" not in words
    assert b"CreationDate" not in pdf.read_bytes()
    assert b"/FontFile2" in pdf.read_bytes(), "the font itself, so that words can be searched"
    assert b"/Subtype /Type3" not in pdf.read_bytes()


@pytest.mark.parametrize("name", FIGURES)
def test_every_word_of_an_svg_ends_its_fonts_with_sans_serif(name: str) -> None:
    """Where the first font is missing, a browser would else take one with serifs."""
    styles = re.findall(r"<text [^>]*style=\"([^\"]*)\"", run_of(name)[1][0].read_text("utf-8"))
    assert len(styles) > 5
    for style_of_text in styles:
        family = re.search(r"font-family: ([^;]*)", style_of_text)
        assert family is not None
        assert family[1].endswith("sans-serif")
        assert family[1].startswith("'DejaVu Sans'")


def test_drawing_leaves_the_users_settings_alone_and_opens_no_pyplot_figure(tmp_path: Path) -> None:
    import matplotlib.pyplot as plt

    before, opened = dict(mpl.rcParams), plt.get_fignums()
    with mpl.rc_context({"font.size": 31, "lines.linewidth": 9, "svg.hashsalt": "other"}):
        changed = dict(mpl.rcParams)
        _, [svg, _] = save_named("one-forward", tmp_path / "a")
        assert dict(mpl.rcParams) == changed
    _, [again, _] = save_named("one-forward", tmp_path / "b")
    assert svg.read_bytes() == again.read_bytes()
    assert dict(mpl.rcParams) == before
    assert plt.get_fignums() == opened


def test_the_command_prints_findings_and_paths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    formats = ["--format", "svg,pdf,png"]
    assert main(["reasons", "--out", str(tmp_path / "new"), "--medium", "slide", *formats]) == 0
    printed = capsys.readouterr().out
    drawing = drawing_of("reasons", "slide")
    assert drawing.finding in printed
    pages = range(1, len(drawing.pages) + 1)
    names = {f"reasons-{page}.{kind}" for page in pages for kind in ("svg", "pdf", "png")}
    assert {path.name for path in (tmp_path / "new").iterdir()} == names
    for name in names:
        assert name in printed
        assert (tmp_path / "new" / name).stat().st_size > 1000


def test_a_list_says_what_each_figure_shows_and_which_options_it_reads(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--list"]) == 0
    printed = capsys.readouterr().out.split("\n")
    for name in FIGURES:
        at = printed.index(name)
        assert printed[at + 1].strip() == describe_figure(name) != name
        assert ("--trace" in printed[at + 2]) == reads_trace(name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--format", "svg,jpg"], "--format is 'jpg'; expected one of svg, pdf, png"),
        (["--out", "FILE"], "a file; expected a folder"),
        (["--out", "FILE/below"], "a file; expected a folder"),
        (["one-forward", "--trace", "x.jsonl"], "--trace is given for the figure 'one-forward'"),
        (["one-forwrad"], "Try 'one-forward'"),
    ],
)
def test_what_cannot_be_done_is_said_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    monkeypatch.setattr("mambackpt.figures.command.save_figures", lambda *_, **__: 1 / 0)
    with pytest.raises(CheckpointValueError, match=re.escape(message)):
        main([option.replace("FILE", str(file)) for option in options])
    assert file.read_text() == "mine"


def test_an_unknown_name_lists_the_names_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointValueError, match=r"figure is 'no-such'; expected one of one-forward"
    ):
        main(["one-forward", "no-such", "--out", str(tmp_path / "new")])
    assert not (tmp_path / "new").exists()
    with pytest.raises(CheckpointValueError, match="expected one of one-forward"):
        draw_figure("no-such")
    with pytest.raises(CheckpointValueError, match="expected one of review, slide"):
        draw_figure("one-forward", medium="poster")


def words_of(name: str) -> str:
    return "\n".join(words for page in texts_in(name, "review") for words, _ in page)


def test_one_forward_shows_both_schedules() -> None:
    sizes = {"budget": 8192, "mamba_block_size": 1536, "hash_block_size": 1536}
    two = chunk_ends(8000, **sizes)
    one = chunk_ends(8000, checkpoint_alignment=16, internal_checkpoints=True, **sizes)
    assert (two, one) == ([7680, 8000], [8000])
    words = words_of("one-forward")
    assert "7,680 + 320" in words
    assert words.count("key 7,680") == 2
    assert f"take {len(one)} instead of {len(two)}" in drawing_of("one-forward", "review").finding


def test_where_it_lands_shows_position_and_column_of_the_planner() -> None:
    """P05, vllm PR #53614: the column is not position / block - 1; figures must not compute it."""
    words, rest = words_of("where-it-lands"), []
    for H, M, drop in (
        (1536, 1536, False),
        (1536, 1536, True),
        (128, 1536, False),
        (128, 1536, True),
        (2096, 2096, False),
    ):
        [decision] = explain([8000], [8000], CacheGeometry(H, M, 16, H, drop))
        rest.append(8000 - decision.position)
        assert f"{decision.column} checkpoint" in words
        assert f"key {decision.position:,}" in words
        assert f"{rest[-1]:,} to\nrecompute" in words
    assert f"{min(rest):,} to {max(rest):,}" in drawing_of("where-it-lands", "review").finding


def smaller_rows(seq_len: int, query_len: int) -> list[tuple[int, int]]:
    rows = [(L, q) for L in range(1, seq_len + 1) for q in range(1, L + 1)]
    return [row for row in rows if row < (seq_len, query_len)]


@pytest.mark.parametrize(
    "reason", [r for r in Reason if r not in (Reason.ACCEPTED, Reason.NOT_INSIDE_QUERY)]
)
def test_the_smallest_row_of_a_reason_is_refused_for_it_and_no_smaller_one_is(
    reason: Reason,
) -> None:
    seq_len, query_len, geometry = _smallest_refused(reason)
    assert explain([seq_len], [query_len], geometry)[0].reason is reason
    aligned = (None,) if reason is Reason.CANNOT_EXPORT else (1, 2, 4)
    for L, q in smaller_rows(seq_len, query_len):
        for H, U, drop, A in itertools.product((1, 2), (1, 2, 4), (False, True), aligned):
            if U % H == 0:
                [other] = explain([L], [q], CacheGeometry(H, 2, A, U, drop))
                assert other.reason is not reason


def test_no_row_is_refused_for_the_fifth_condition_and_the_direct_call_is() -> None:
    with pytest.raises(CheckpointValueError, match="NOT_INSIDE_QUERY"):
        _smallest_refused(Reason.NOT_INSIDE_QUERY)
    start, end, position = _smallest_outside()
    reason = get_mamba_prefill_checkpoint_reason(start, end, position, 1, 2, 1)
    assert reason is Reason.NOT_INSIDE_QUERY
    assert (start, end, position) == (0, 3, 3)
    assert "in no row of up to 16 tokens" in words_of("reasons").replace("\n", " ")


def test_reasons_has_one_lane_per_condition_that_a_row_can_fail() -> None:
    words = words_of("reasons")
    for number in range(1, 7):
        assert bool(re.search(rf"^{number} \w+ ", words, re.MULTILINE)) == (number != 5)
    assert "0 checkpoint" not in words, "nothing is stored for a refused row"


def reused_by_hand(shared: int) -> tuple[int, int]:
    """Requests that reuse something, and tokens, one at a time: the rule as a plain loop."""
    kept: set[tuple[int, ...]] = set()
    hits = tokens = 0
    for request in puzzle_requests(shared, 2200 - shared):
        prompt = request.prompt
        start = max((n for n in range(0, 2200, 528) if n and prompt[:n] in kept), default=0)
        hits, tokens = hits + (start > 0), tokens + start
        for end in chunk_ends(
            2200, start=start, budget=2048, mamba_block_size=528, hash_block_size=528
        ):
            if end % 528 == 0:
                kept.add(prompt[:end])
    return hits, tokens


def test_the_zero_hit_puzzle_is_counted_from_kept_states() -> None:
    """S01, vllm issue #45238: the only state in reach lies behind the shared prefix."""
    assert reused_by_hand(1600) == (56, 56 * 1584)
    assert reused_by_hand(1500) == (0, 0)
    words = words_of("zero-hit-puzzle")
    assert "56 of 64 requests\nreuse 1,584 tokens" in words
    assert "0 of 64 requests\nreuse 0 tokens" in words
    assert "1,500 shared" in words
    said = words.replace("\n", " ")
    assert "Blocks of 528 tokens, at most 2,048 tokens in one step" in said, "what decides it"


def test_block_sizes_are_the_models_own() -> None:
    words = words_of("block-sizes")
    for name, size in (("qwen3.5-4b", 528), ("nemotron-3-nano", 2096), ("kimi-k3", 11392)):
        assert PRESETS[name].block_size() == size
        assert f"{name}\n" in f"{words}\n"
        assert f"{size:,}  (" in words


def test_a_figure_is_added_by_one_decorated_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mambackpt.figures.registry.FIGURES", dict(FIGURES))

    @named("mine")
    def mine() -> Drawing:
        figure, _ = sheet("1 is found.", [3])
        return Drawing(figure, "1 is found.", "Nothing but a title.")

    assert draw_figure("mine", medium="slide").figure.get_figwidth() == 10
    with style():
        assert mine().figure.get_figwidth() == pytest.approx(7.2)


def test_wrong_restores_are_counted_by_the_lockstep_check() -> None:
    table = wrong_restores()
    assert all(counts.wrong_restores > 0 for counts in table["vllm-0.33"].values())
    for name, row in table.items():
        for counts in row.values():
            assert counts.requests == 720
            assert name == "vllm-0.33" or counts.wrong_restores == 0
    counts = table["vllm-0.33"]["R = 0"]
    assert f"{counts.wrong_restores} of {counts.hits}" in words_of("wrong-restores")
    assert "model" in drawing_of("wrong-restores", "review").finding, "seen on a CPU only"


def test_the_smallest_failure_shows_the_key_and_what_its_block_holds() -> None:
    """S03, vllm PR #51113: a block is keyed at its end and holds the state it began with."""
    words = words_of("smallest-failure")
    assert "key 64 ≠ 32" in words
    assert "promises 64 tokens and restores the state of 32" in (
        drawing_of("smallest-failure", "review").finding
    )


# ---- replays of request traces -----------------------------------------------------------------


def test_reuse_against_block_draws_the_changes_that_its_title_names() -> None:
    trace, drawing = example_trace(), drawing_of("reuse-against-block", "review")
    work = drawing.figure.axes[0]
    lines = {line.get_label(): line for line in work.lines}
    for rule in PLACEMENTS:
        line = lines[short_words(rule, width=19)]
        runs = [replay(trace, rule, block=int(x)).recomputed for x in line.get_xdata()]
        assert list(line.get_ydata()) == [100 * (run / runs[0] - 1) for run in runs]
        if rule in ("all", "last"):
            change = line.get_ydata()[-1]
            words = f"{abs(change):.0f} % {'more' if change > 0 else 'less'} with a state at"
            assert words in drawing.finding


def test_the_pool_figure_draws_what_each_rule_loses_to_the_best_of_its_pool() -> None:
    trace, drawing = example_trace(), drawing_of("pool-exchange-rates", "review")
    pool = pool_sizes(trace, [1])[0]
    said = words_of("pool-exchange-rates").replace("\n", " ")
    panels = drawing.figure.axes
    for ax, name in zip(panels, ("kimi-k3", "qwen3-next", "kimi-k3-tp16-bf16"), strict=True):
        size = pool * PRESETS[name].model_token_bytes
        runs = {
            rule: 100 * replay(trace, rule, block=1024, model=name, pool_bytes=size).hit_rate
            for rule in PLACEMENTS
        }
        best = max(runs, key=lambda rule: runs[rule])
        rate = f"{PRESETS[name].exchange_rate:,.0f}"
        assert ax.get_title(loc="left") == f"{name}: a state costs {rate} tokens"
        lines = {line.get_label(): list(line.get_ydata()) for line in ax.lines}
        for rule in PLACEMENTS:
            assert lines[short_words(rule, width=19)][3] == runs[rule] - runs[best]
        assert re.search(rf"'{re.escape(best)}' where a state costs [^']*{rate}", said)
        if name != "qwen3-next":
            assert f"{runs[best] - runs['all']:.1f}" in drawing.finding
    assert "one request at a time" in said
    assert len({ax.get_ylim() for ax in panels}) == 1, "small multiples on one scale"
    colours = [{line.get_label(): line.get_color() for line in ax.lines} for ax in panels]
    assert colours[0] == colours[1] == colours[2], "a colour means the same in every panel"


def test_rows_that_are_equal_are_named_once_and_every_rule_says_its_code_word_once() -> None:
    words = words_of("states-against-reuse")
    assert f"{short_words('last')}\n= {rule_in_words('internal')}" in words
    said = words.replace("\n", " ")
    for rule in ("all", "sglang", "marconi", "llamacpp", "interval(2048)"):
        assert len(re.findall(rf"(?<![\w']){re.escape(rule)}(?![\w'])", said)) >= 1
    run = replay(example_trace(), "sglang", block=512)
    assert f"{run.states_per_request:.2f}" in drawing_of("states-against-reuse", "review").finding


def test_rules_are_said_in_words() -> None:
    assert rule_in_words("last+junction+chunk") == (
        "the prompt's last boundary, where prefixes part and every chunk end"
    )
    assert rule_in_words("interval(every=4096)") == "every 4,096 tokens, and the last boundary"
    assert rule_in_words("halfway") == "halfway", "a reader's own rule has its name"
    for name in ("reuse-against-block", "pool-exchange-rates"):
        assert "only the prompt's last boundary" in words_of(name).replace("\n", " ")


def test_a_trace_of_fewer_requests_says_so() -> None:
    trace = example_trace()
    assert asked(trace) == "2,000 requests (generated documents)"
    first = _first_requests(trace, 1000)
    assert asked(first, trace) == "the first 1,000 of 2,000 requests (generated documents)"
    assert asked(trace, trace) == asked(trace)


def test_the_line_of_the_best_fixed_positions_is_what_the_programme_promises() -> None:
    """Reused by the best positions: the overlaps, less the expected recomputation."""
    trace = example_trace()
    overlaps = [int(o) // trace.grain for o in trace.ceiling]
    weights = [overlaps.count(unit) for unit in range(max(overlaps) + 1)]
    for count, run in zip((1, 4), _optimal_replays(trace, 512, (1, 4)), strict=True):
        lost = expected_recompute(weights, optimal_positions(weights, count)) * len(trace)
        assert run.reused.sum() == trace.ceiling.sum() - round(lost) * trace.grain


def test_retention_and_evictions_show_the_replays_own_numbers() -> None:
    trace = example_trace()
    every = [512 << power for power in range(7)]
    work = [replay(trace, f"interval({K})", block=512).recomputed for K in every]
    best = every[work.index(min(work))]
    assert f"every {best:,} tokens in unlimited memory" in drawing_of("retention", "review").finding
    head = _first_requests(trace, 1000)
    pool = pool_sizes(head, [1 / 3])[0] * PRESETS["qwen3-next"].model_token_bytes
    run = replay(head, "last", block=1024, model="qwen3-next", pool_bytes=pool, eviction="thinning")
    lru = replay(head, "last", block=1024, model="qwen3-next", pool_bytes=pool).hit_rate
    words = words_of("evictions")
    assert f"{100 * lru:.1f} %" in words
    assert f"\N{MINUS SIGN}{100 * (lru - run.hit_rate):.1f}" in words


def test_only_numbers_get_a_minus_sign(tmp_path: Path) -> None:
    """A sentence keeps its hyphens, even where no order loses anything."""
    mine = tmp_path / "mine.jsonl"
    prompts = [[*range(3000), *range(n * 10_000, n * 10_000 + 900)] for n in range(1, 9)]
    mine.write_text("".join(f"{prompt}\n" for prompt in prompts))
    drawing = draw_figure("evictions", trace=load_trace(mine))
    assert "by +0.0 to +0.0 points" in drawing.finding
    for name in FIGURES:
        assert not re.search(r"[a-z]\N{MINUS SIGN}", drawing_of(name, "review").finding)
        assert not re.search(r"(^|[ (])-\d", words_of(name)), "a number has a true minus sign"
    assert re.search(r"\N{MINUS SIGN}\d", drawing_of("evictions", "review").finding)


def test_the_first_requests_are_replayed_as_the_whole_trace_began() -> None:
    trace = example_trace()
    head = _first_requests(trace, 300)
    assert len(head) == 300
    for rule in PLACEMENTS:
        whole = replay(trace, rule, block=1024).reused[:300]
        assert (replay(head, rule, block=1024).reused == whole).all()


def test_a_trace_of_yours_takes_the_generated_ones_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.jsonl"
    prompts = [[*range(3000), *range(n * 10_000, n * 10_000 + 900)] for n in range(1, 9)]
    mine.write_text("".join(f"{prompt}\n" for prompt in prompts))
    assert main(["reuse-against-block", "--trace", str(mine), "--out", str(tmp_path)]) == 0
    drawing = draw_figure("reuse-against-block", trace=load_trace(mine))
    assert drawing.finding in capsys.readouterr().out
    assert "8 requests (mine.jsonl)" in drawing.alt
    with pytest.raises(CheckpointValueError, match="'one-forward', which reads none"):
        draw_figure("one-forward", trace=load_trace(mine))
    names = ["one-forward", "retention"]
    assert [reads_trace(name) for name in names] == [False, True]


def test_the_readme_opens_with_the_numbers_that_the_puzzle_computes(root: Path) -> None:
    opening = (root / "README.md").read_text().split("An attention cache")[0]
    computed = drawing_of("zero-hit-puzzle", "review").alt
    numbers = set(re.findall(r"\d[\d,]*\d", opening))
    assert {"56", "64", "1,600", "1,500", "528", "2,048", "1,584", "2,112"} <= numbers
    assert numbers <= set(re.findall(r"\d[\d,]*\d", computed))


# ---- what the course leans on ------------------------------------------------------------------


def test_a_checkpoint_is_drawn_as_wide_as_its_bytes() -> None:
    model = PRESETS["kimi-k3"]
    [ax] = drawing_of("to-scale", "review").figure.axes
    widths = [bar.get_width() for bar in ax.patches]
    assert widths == [model.exchange_rate, model.block_size(), 8000, 1]
    words = words_of("to-scale").replace("\n", " ")
    assert "32,507 (449 MB)" in words
    assert f"rounded up to a multiple of {model.attention.kernel_block} = 11,392" in words


def test_a_cure_costs_what_the_simulation_counts_and_the_replay_says() -> None:
    """Steps of 2,048 end at 1,584; what is kept below 1,500 decides."""
    cures = {cure.name: cure for cure in puzzle_cures()}
    helps = {name: cure.resumed[:3] for name, cure in cures.items()}
    assert helps["checkpoint inside the step"] == (0, 1056, 1056)
    assert helps["stop where prefixes part"] == (0, 0, 1056)
    for name in ("as it is", "steps of up to 8,192"):
        assert helps[name] == (0, 0, 0)
    assert helps["checkpoint inside, retention 0"] == (0, 0, 0), "'internal' keeps what 'last' does"
    trace = trace_from_tokens([list(r.prompt) for r in puzzle_requests(1500, 700)], grain=4)
    for name, rule in (
        ("as it is", "last+chunk"),
        ("stop where prefixes part", "last+junction+chunk"),
        ("checkpoint inside, retention 0", "internal"),
        ("checkpoint inside, retention 0", "last"),
    ):
        run = replay(trace, rule, block=528, budget=2048)
        assert run.recomputed == cures[name].computed, (name, rule)
    drawing = drawing_of("cures", "review")
    assert drawing.finding.startswith("3 of 6 changes help the very next request, 1 the third")


def test_one_forward_with_a_checkpoint_saves_what_two_save() -> None:
    words = words_of("forwards").replace("\n", " ")
    assert "First: 2 forwards, 7,680 and 320 tokens. Kept: the state after 7,680." in words
    assert "First: 1 forward, 8,000 tokens. Kept: the state after 7,680." in words
    assert "First: 1 forward, 8,000 tokens. Kept: none." in words
    assert words.count("Next: finds 7,680 tokens, computes 320.") == 2
    assert words.count("Next: finds 0 tokens, computes 8,000.") == 1


def test_the_hit_block_changes_its_column_and_keeps_its_key() -> None:
    """A query that starts at s reads column (s - 1) // M; its copy has no key until it is full."""
    words = words_of("mid-block-hit")
    for column in ("0 checkpoint #3", "1 previous #3", "1 copy #6", "1 running #6", "2 running #8"):
        assert column in words
    assert words.count("in the pool\n#3: key 96\n#6: key 128") == 3
    assert "(96 \N{MINUS SIGN} 1) // 64 = 1" in words
