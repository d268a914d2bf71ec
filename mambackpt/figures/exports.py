"""Figures of how the export kernel moves bytes."""

import math
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
    left_margin,
    sheet,
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
    """Draw measured times over the number of checkpoints, and the floor at an assumed bandwidth.

    ``bandwidth`` is in bytes per second, read and written; nothing is measured at it. Raises
    CheckpointValueError for what the run did not time.
    """
    timed = _timed(run, layer, buffers)
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
        x_label=f"checkpoints ({layer}, {buffers})",
        y_label="microseconds",
        highlight={"export": STATE},
        log_x=True,
    )
    listed = ", ".join(map(str, sizes))
    alt = f"Microseconds for {listed} checkpoints: {describe_curves(curves)}. {finding}"
    return Drawing(figure, finding, alt)
