"""The figures for a design review: each is a name, a finding, and code that computes both.

A figure is one decorated function that returns a `Drawing`; numbers in its finding come from the
same data as what is drawn.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

from mambackpt.draw import Drawing, checked_formats, save_figure, style, writable_folder
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
        def of_example() -> Drawing:
            return function(example_trace())

        of_example.__doc__ = function.__doc__
        _REPLAYS[name] = function
        FIGURES[name] = of_example
        return function

    return register


def reads_trace(name: str) -> bool:
    """Return whether a figure replays a request trace, so that yours can take its place."""
    return name in _REPLAYS


def options_of(name: str) -> tuple[str, ...]:
    """Return the options of the command that a figure reads, as they are typed, beside all's."""
    own = (f"--{option.replace('_', '-')}" for option in _OPTIONS.get(name, ()))
    return (*["--trace"] * reads_trace(name), *own)


def describe_figure(name: str) -> str:
    """Return what a figure shows, in one line.

    >>> describe_figure("block-sizes")
    'Tokens per block of real models: one attention page must hold one recurrent state.'
    """
    checked_choice("figure", name, FIGURES)
    return (FIGURES[name].__doc__ or name).strip().splitlines()[0]


def checked_trace(name: str, trace: object, *, option: str = "trace") -> None:
    """Refuse a trace for a figure that reads none: it would be drawn without it."""
    if trace is not None and name not in _REPLAYS:
        raise CheckpointValueError(
            f"{option} is given for the figure {name!r}, which reads none; expected one of "
            f"{', '.join(_REPLAYS)}. Try it without {option}."
        )


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

    A ``trace`` takes the place of the generated one in the figures that replay requests, and is
    refused by the others; what takes long is computed by ``spread``, which is `map` or a pool's.
    ``options`` are a figure's own. Raises CheckpointValueError for another name or medium, and for
    what the figure does not read.
    """
    checked_choice("figure", name, FIGURES)
    checked_trace(name, trace)
    own = checked_options(name, options or {})
    with style(medium):
        if trace is not None:
            return _REPLAYS[name](trace)
        return FIGURES[name](spread) if name in _SPREADING else FIGURES[name](**own)


def save_figures(
    names: Sequence[str],
    folder: Path,
    *,
    medium: str = "review",
    trace: Trace | None = None,
    processes: int | None = None,
    formats: Sequence[str] = ("svg", "pdf"),
    options: Mapping[str, Any] | None = None,
) -> Iterator[tuple[str, list[Path]]]:
    """Draw figures in several processes; yield each one's finding and paths, in this order.

    Default: as many processes as there are cores, at most four. Raises as `save_named`.
    """
    given = {"medium": medium, "trace": trace, "formats": formats, "options": options}
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
    drawing, paths = save_named(name, folder, **given)
    return drawing.finding, paths


def save_named(
    name: str,
    folder: Path,
    *,
    medium: str = "review",
    trace: Trace | None = None,
    spread: Spread = map,
    formats: Sequence[str] = ("svg", "pdf"),
    options: Mapping[str, Any] | None = None,
) -> tuple[Drawing, list[Path]]:
    """Draw a figure by its name and write it in each format; return it with the paths.

    The same bytes on every run; a figure of several pages gets their numbers: ``name-1.svg``. The
    SVG carries finding and alt text. Raises as `draw_figure` and `mambackpt.draw.save_figure`, and
    writes nothing then.
    """
    wanted = checked_formats(formats)
    writable_folder(folder)
    drawing = draw_figure(name, medium=medium, trace=trace, spread=spread, options=options)
    return drawing, save_figure(drawing, folder / name, formats=wanted, medium=medium)
