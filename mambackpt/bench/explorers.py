"""How long an explorer takes to follow a hand: CPU in a real kernel, key to paint in a browser.

What is timed is what a notebook's cell does: the explorers are made by text that a kernel runs, so
nothing here imports them. A view is compared with a new explorer's before it is timed.
"""

import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from mambackpt.bench.browser import (
    find_chromium,
    open_browser,
    open_notebook,
    run_notebook,
    serve_lab,
)
from mambackpt.errors import CheckpointValueError, checked_choice, checked_int


@dataclass(frozen=True, slots=True)
class Move:
    """What a hand does to an explorer: one control, and the values that it is moved to.

    ``make`` and ``values`` are Python, as a cell has it; ``values`` may use ``explorer``.
    """

    explorer: str
    control: str
    make: str
    values: str


@dataclass(frozen=True, slots=True)
class Redraw:
    """Milliseconds of one move's redraws: CPU of the kernel, and from key to paint (None: none)."""

    explorer: str
    control: str
    cpu_ms: tuple[float, ...]
    paint_ms: tuple[float, ...] | None = None


_STORY = "explore_engine('released-fault')"
_RULES = "[f'last+interval({512 * n})' for n in range(9, 99)]"
_POOLS = "[size for _, size in explorer._controls['pool'].options[1:]]"
MOVES = (
    Move("placement", "start", "explore_placement()", "range(1536, 4000, 16)"),
    Move("sequence", "prompt", "explore_sequence()", "range(8001, 9000)"),
    Move("sequence", "M", "explore_sequence()", "range(1552, 9000, 16)"),
    Move("replay", "rule", "explore_replay()", _RULES),
    Move("replay", "pool", "explore_replay()", _POOLS),
    Move("branches", "length", "explore_branches()", "range(142, 500)"),
    Move("engine", "step", _STORY, "range(2, 35)"),
    Move("export", "program", "explore_export()", "range(1, 64)"),
    Move("capacity", "pool", "explore_capacity()", "range(21, 99)"),
)  # fmt: skip

_TIMED = """
import json, time
from mambackpt import explore as _room
def _made():
    return eval({make!r}, vars(_room))
def _timed(runs):
    explorer, fresh = _made(), _made()
    values = [*eval({values!r}, dict(explorer=explorer))]
    name = {control!r}
    fresh.set(**{{name: values[0]}})
    explorer.set(**{{name: values[-1]}}); explorer.set(**{{name: values[0]}})
    if explorer.page != fresh.page or "<figure" not in explorer.page:
        return "a redrawn view differs from a new explorer's"
    fresh.close()
    spent, pages = [], set()
    for value in values[1:runs + 1]:
        begin = time.process_time()
        explorer._controls[name].value = value
        spent.append(1e3 * (time.process_time() - begin))
        pages.add(explorer.page)
    explorer.close()
    return spent if len(pages) == len(spent) else "a move left the view as it was"
print(json.dumps(_timed({runs})))
"""


def time_explorers(
    names: Sequence[str] = (), *, runs: int = 15, in_browser: bool = True
) -> Iterator[Redraw]:
    """Time redraws of explorers in a kernel of their own, and in Chromium where there is one.

    ``names`` are explorers' (default: all). Needs the notebooks' packages, and playwright for the
    browser. Raises CheckpointValueError for another name, and for a view that differs from a new
    explorer's: nothing is timed then.
    """
    known = list(dict.fromkeys(move.explorer for move in MOVES))
    chosen = [checked_choice("explorer", name, known) for name in names] or known
    checked_int("runs", runs, least=2, unit="runs")
    moves = [move for move in MOVES if move.explorer in chosen]
    painted: dict[str, tuple[float, ...]] = {}
    path = find_chromium() if in_browser else None
    if path:
        painted = _paint_times(path, {move.explorer: move for move in reversed(moves)}, runs)
    with _kernel() as client:
        for move in moves:
            cpu = _run(client, move, runs)
            first = move is next(m for m in moves if m.explorer == move.explorer)
            yield Redraw(
                move.explorer, move.control, cpu, painted.get(move.explorer) if first else None
            )


class _kernel:
    """A kernel as a notebook has one, for the length of a ``with`` block."""

    def __enter__(self) -> Any:
        from jupyter_client.manager import start_new_kernel

        self._manager, self._client = start_new_kernel(
            kernel_name="python3", stderr=subprocess.DEVNULL
        )
        return self._client

    def __exit__(self, *_: object) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


def _run(client: Any, move: Move, runs: int) -> tuple[float, ...]:
    printed: list[str] = []

    def hook(message: dict[str, Any]) -> None:
        content = message["content"]
        if message["msg_type"] == "stream" and content["name"] == "stdout":
            printed.append(content["text"])
        elif message["msg_type"] == "error":
            printed.append(json.dumps(f"{content['ename']}: {content['evalue']}"))

    code = _TIMED.format(make=move.make, values=move.values, control=move.control, runs=runs)
    client.execute_interactive(code, output_hook=hook, timeout=300)
    answer = json.loads("".join(printed))
    if isinstance(answer, str):
        raise CheckpointValueError(
            f"the {move.explorer} explorer cannot be timed: {answer}; expected the picture of a "
            "new explorer. Try the explorers' tests."
        )
    return tuple(answer)


# A key is pressed at one time of the page's clock; the frame after the picture's change is another.
_WATCH = """box => {
    window.pressed = 0; window.painted = [];
    document.addEventListener("keydown", () => { window.pressed = performance.now(); }, true);
    let last = box.querySelector("figure img").src;
    new MutationObserver(() => {
        const image = box.querySelector("figure img");
        if (!image || image.src === last) return;
        last = image.src;
        const begun = window.pressed;
        image.decode().then(() => requestAnimationFrame(() => setTimeout(
            () => window.painted.push(performance.now() - begun))));
    }).observe(box, {subtree: true, childList: true, attributes: true});
}"""


def _paint_times(path: str, moves: dict[str, Move], runs: int) -> dict[str, tuple[float, ...]]:
    """Press ArrowRight on each explorer's first slider; from key down to the next frame."""
    times: dict[str, tuple[float, ...]] = {}
    with tempfile.TemporaryDirectory() as folder:
        notebooks, home = Path(folder, "notebooks"), Path(folder, "home")
        notebooks.mkdir()
        home.mkdir()
        for name, move in moves.items():
            (notebooks / f"{name}.ipynb").write_text(_notebook_of(move))
        with serve_lab(notebooks, home) as lab, open_browser(path) as browser:
            for name in moves:
                page = open_notebook(browser, lab, f"{name}.ipynb")
                run_notebook(page)
                times[name] = _press_and_wait(page, runs)
                page.close()
    return times


def _press_and_wait(page: Any, runs: int) -> tuple[float, ...]:
    from playwright.sync_api import TimeoutError

    explorer = page.locator(".jp-OutputArea-output .widget-vbox").first
    explorer.locator("figure img").wait_for()
    handle = explorer.locator(".noUi-handle").first
    handle.scroll_into_view_if_needed()
    explorer.evaluate(_WATCH)
    handle.focus()
    for number in range(runs + 1):
        page.keyboard.press("ArrowRight")
        try:
            page.wait_for_function(
                "count => window.painted.length > count", arg=number, timeout=3000
            )
        except TimeoutError:
            break  # the slider is at its end
        page.wait_for_timeout(50)
    return tuple(page.evaluate("window.painted")[1:])


def _notebook_of(move: Move) -> str:
    source = f"from mambackpt.explore import *\nexplorer = {move.make}\nexplorer"
    cell: dict[str, Any] = {"cell_type": "code", "id": "1", "source": source}
    cell |= {"metadata": {}, "outputs": [], "execution_count": None}
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    about = {"kernelspec": kernel}
    return json.dumps({"cells": [cell], "metadata": about, "nbformat": 4, "nbformat_minor": 5})


def redraw_table(redraws: Sequence[Redraw]) -> list[tuple[str, ...]]:
    """Return the rows of a table: medians, with the band of 20 to 80 %.

    >>> redraw_table([Redraw("engine", "step", (30.0, 32.0, 31.0))])
    [('engine', 'step', '31', '30-32', '-', '-')]
    """
    rows = []
    for redraw in redraws:
        cells = [redraw.explorer, redraw.control]
        for times in (redraw.cpu_ms, redraw.paint_ms):
            if times:
                low, *_, high = quantiles(times, n=5) if len(times) > 4 else sorted(times)
                cells += [f"{median(times):.0f}", f"{low:.0f}-{high:.0f}"]
            else:
                cells += ["-", "-"]
        rows.append(tuple(cells))
    return rows
