"""Figures of how the export kernel moves bytes."""

from collections.abc import Sequence
from dataclasses import asdict

from mambackpt.bench import (
    COPY,
    OURS,
    Benchmark,
    Compilation,
    CompiledKernel,
    LayerShape,
    Timing,
    window_readers,
)
from mambackpt.draw import (
    STATE,
    Drawing,
    bars_height,
    describe_bars,
    describe_curves,
    draw_bars,
    draw_curves,
    draw_heatmap,
    draw_timings,
    fit_y,
    left_margin,
    sheet,
    sheets,
)
from mambackpt.errors import CheckpointValueError
from mambackpt.figures.registry import named

_KERNEL_NAMES = {"plain": "plain shape", "tiled": "ours"}


@named("window-readers")
def _window_readers() -> Drawing:
    """Which program and place reads which input of a window, in the plain shape and in ours."""
    toy = LayerShape("toy", 512, (16, 64))
    channels = range(80, 90)  # where the plain shape's first program ends
    finding = (
        f"Neighbouring places read {toy.state_len} tokens by turns in the plain shape, and "
        "neighbouring channels of 1 token in ours."
    )
    height, tokens = 2.1 * toy.state_len, ["oldest", "middle", "newest"]
    figure, axes = sheet(finding, [height] * 2, left=left_margin(tokens), gap=4.2)
    readers = []
    for ax, (kernel, name) in zip(axes, _KERNEL_NAMES.items(), strict=True):
        programs, places = (part[:, channels] for part in window_readers(Compilation(toy, kernel)))
        words = [
            [f"{program}:{place}" for program, place in zip(*line, strict=True)]
            for line in zip(programs, places, strict=True)
        ]
        limits = (0, toy.state_len)
        columns = [str(channel) for channel in channels]
        shades = programs.tolist()
        draw_heatmap(ax, shades, rows=tokens, columns=columns, limits=limits, words=words)
        ax.set_xlabel(f"channel, read by program:place ({name})")
        readers.append(f"{name}: {words[0][5]}, {words[1][5]}, {words[2][5]}")
    alt = f"Program and place that read channel {channels[5]} of {toy.state_len} tokens. "
    return Drawing(figure, finding, f"{alt}{'; '.join(readers)}. {finding}")


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
    alt = f"Warp instructions per MiB: {describe_bars(labels, words)}. {finding}"
    return Drawing(figure, finding, alt)


_INDEXING = "pool[blocks] = rows"


def _timed(run: Benchmark, layer: str, buffers: str) -> dict[tuple[str, int], Timing]:
    """The timings of one layer's buffers in the run's first regime, by method and size."""
    regime = run.timings[0].regime
    wanted = (layer, buffers, regime)
    rows = {(t.method, t.size): t for t in run.timings if (t.case, t.buffers, t.regime) == wanted}
    if not rows:
        timed = sorted({(t.case, t.buffers) for t in run.timings})
        raise CheckpointValueError(
            f"no timing of {layer!r}, {buffers!r}; expected one of {timed}. Try {timed[0]}."
        )
    return rows


def draw_export_timings(
    run: Benchmark, *, layer: str = "kimi-k3", buffers: str = "token-first", size: int = 64
) -> Drawing:
    """Draw what a measured run says of one export: every method beside one contiguous copy.

    ``size`` counts checkpoints. Raises CheckpointValueError for what the run did not time.
    """
    timed = _timed(run, layer, buffers)
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
    draw_timings(ax, asdict(run), case=layer, buffers=buffers, size=size, regime=regime)
    shares = describe_bars(methods, [f"{timed[method, size].ratio:.0%}" for method in methods])
    alt = f"{layer}, {buffers}, {regime}, on {run.environment.device}: {shares}. {finding}"
    return Drawing(figure, finding, alt)


def draw_roofline(
    run: Benchmark,
    bandwidth: float,
    *,
    layer: str = "kimi-k3",
    buffers: str = "token-first",
) -> Drawing:
    """Draw how much longer than one copy an export takes, and that copy at an assumed bandwidth.

    ``bandwidth`` is in bytes per second, read and written; nothing is measured at it. Raises
    CheckpointValueError for what the run did not time.
    """
    timed = _timed(run, layer, buffers)
    sizes = sorted({size for _, size in timed})
    times = {
        name: (sizes, [timed[method, n].median_us / timed[COPY, n].median_us for n in sizes])
        for name, method in (("plain indexing", _INDEXING), ("export", OURS))
    }
    times["one copy"] = (sizes, [1.0] * len(sizes))
    copy, assumed = timed[COPY, sizes[-1]], f"{bandwidth / 1e12:g} TB/s, assumed"
    floor = copy.bytes / bandwidth * 1e6
    finding = (
        f"{sizes[-1]} checkpoints take the export {times['export'][1][-1]:.2f} times as long as "
        f"one copy; at an assumed {bandwidth / 1e12:g} TB/s that copy would be "
        f"{copy.median_us / floor:,.0f} times as fast."
    )
    left = left_margin([f"one copy, at {assumed}"])
    bars = ["one copy, measured", f"one copy, at {assumed}"]
    note = f"{layer}, {buffers}, {run.timings[0].regime}, on {run.environment.device}."
    pages = sheets(finding, [14, bars_height(2)], left=left, right=9, note=note)
    curves, floors = pages.axes
    fit_y(curves, [values for _, values in times.values()], least=0)
    draw_curves(
        curves,
        times,
        x_label="checkpoints",
        y_label="times as long as one copy",
        highlight={"export": STATE},
        log_x=True,
    )
    measured = [copy.median_us, floor]
    words = [f"{value:,.4g}" if value < 1000 else f"{value:,.0f}" for value in measured]
    unit = f"microseconds for {sizes[-1]} checkpoints"
    draw_bars(floors, bars, measured, unit=unit, words=words)
    listed = ", ".join(map(str, sizes))
    alt = (
        f"Times as long as one copy, for {listed} checkpoints: {describe_curves(times, '.2f')}. "
        f"{describe_bars(bars, words)} microseconds. {finding}"
    )
    return pages.drawing(finding, alt)
