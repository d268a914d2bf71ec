"""The figures for a design review: each is a name, a finding, and code that computes both.

A figure is one decorated function that returns a `Drawing`; numbers in its finding come from the
same data as what is drawn.
"""

import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

from mambackpt.draw import Drawing, style
from mambackpt.errors import CheckpointValueError, checked_choice, checked_int
from mambackpt.replay import Trace, example_trace

Spread: TypeAlias = Callable[..., Iterable[Any]]  # `map`, or a pool's
_Figure: TypeAlias = Callable[..., Drawing]
FIGURES: dict[str, _Figure] = {}
_REPLAYS: dict[str, Callable[[Trace], Drawing]] = {}  # those of FIGURES that replay a trace
_SPREADING: set[str] = set()  # those whose work a pool's `map` can take
_OPTIONS: dict[str, tuple[str, ...]] = {}  # what those take that can be asked of a geometry


def named(
    name: str, *, spreads: bool = False, options: tuple[str, ...] = ()
) -> Callable[[_Figure], _Figure]:
    """Register the function below as the figure of this name.

    One that ``spreads`` has much to compute, and takes a function like `map` to do it with. One
    with ``options`` takes them by name and draws without them too.
    """

    def register(function: _Figure) -> _Figure:
        FIGURES[name] = function
        _OPTIONS[name] = options
        if spreads:
            _SPREADING.add(name)
        return function

    return register


def replayed(name: str) -> Callable[[Callable[[Trace], Drawing]], Callable[[Trace], Drawing]]:
    """Register the function below as a figure of a request trace: the generated one by default."""

    def register(function: Callable[[Trace], Drawing]) -> Callable[[Trace], Drawing]:
        _REPLAYS[name] = function
        FIGURES[name] = lambda: function(example_trace())
        return function

    return register


def checked_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options if the figure reads every one of them.

    Raises CheckpointValueError for one that it would ignore.
    """
    for option in options:
        if option not in _OPTIONS.get(name, ()):
            readers = [figure for figure, read in _OPTIONS.items() if option in read]
            raise CheckpointValueError(
                f"--{option.replace('_', '-')} is given for the figure {name}, which does not read "
                f"it; expected a figure that does: {', '.join(readers) or 'none'}. Try "
                f"figures {(readers or [name])[0]}."
            )
    return dict(options)


def draw_figure(
    name: str,
    *,
    medium: str = "review",
    trace: Trace | None = None,
    spread: Spread = map,
    options: Mapping[str, Any] | None = None,
) -> Drawing:
    """Return a figure by its name, at the size of a medium ("review" or "slide").

    >>> print(draw_figure("one-forward").finding)
    A checkpoint inside the chunk saves a forward: 8,000 tokens take 1 instead of 2.

    A ``trace`` takes the place of the generated one in the figures that replay requests; what takes
    long is computed by ``spread``, which is `map` or a pool's. ``options`` are a figure's own.
    Raises CheckpointValueError for another name or medium, and for an option it does not read.
    """
    checked_choice("figure", name, FIGURES)
    own = checked_options(name, options or {})
    with style(medium):
        if trace is not None and name in _REPLAYS:
            return _REPLAYS[name](trace)
        return FIGURES[name](spread) if name in _SPREADING else FIGURES[name](**own)


def save_figures(
    names: Sequence[str],
    folder: Path,
    *,
    medium: str = "review",
    trace: Trace | None = None,
    processes: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> Iterator[tuple[str, list[Path]]]:
    """Draw figures in several processes; yield each one's finding and paths, in this order.

    Default: as many processes as there are cores, at most four. Raises as `save_figure`.
    """
    given = {"medium": medium, "trace": trace, "options": options}
    most = min(4, os.cpu_count() or 1) if processes is None else processes
    processes = checked_int("processes", most, unit="processes")
    if processes == 1:
        for name in names:
            yield _saved(name, folder, given)
        return
    with ProcessPoolExecutor(processes) as pool:
        whole = [name for name in names if name not in _SPREADING]
        saved = {name: pool.submit(_saved, name, folder, given) for name in whole}
        for name in names:
            if name in saved:
                yield saved[name].result()
            else:
                yield _saved(name, folder, {**given, "spread": pool.map})


def _saved(name: str, folder: Path, given: dict[str, Any]) -> tuple[str, list[Path]]:
    drawing, paths = save_figure(name, folder, **given)
    return drawing.finding, paths


def save_figure(
    name: str,
    folder: Path,
    *,
    medium: str = "review",
    trace: Trace | None = None,
    spread: Spread = map,
    options: Mapping[str, Any] | None = None,
) -> tuple[Drawing, list[Path]]:
    """Draw a figure and write it as SVG and PDF; return it with the paths.

    The same bytes on every run. The SVG carries finding and alt text. Raises as `draw_figure`, and
    writes nothing then.
    """
    drawing = draw_figure(name, medium=medium, trace=trace, spread=spread, options=options)
    blank = dict.fromkeys(("Creator", "Producer"))
    finding, alt = drawing.finding, drawing.alt
    metadata = {
        "svg": {"Date": None, "Creator": None, "Title": finding, "Description": alt},
        "pdf": {"CreationDate": None, **blank, "Title": finding, "Subject": alt},
    }
    paths = []
    for kind, about in metadata.items():
        page = io.BytesIO()
        with style(medium):
            drawing.figure.savefig(page, format=kind, metadata=about)
        paths.append(folder / f"{name}.{kind}")
        folder.mkdir(parents=True, exist_ok=True)
        paths[-1].write_bytes(page.getvalue())
    return drawing, paths
