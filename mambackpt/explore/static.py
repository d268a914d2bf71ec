"""An explorer without a kernel: some of its views, computed beforehand, to page through."""

import html
import os
from collections.abc import Iterator
from typing import Any

from ipywidgets import Checkbox, Dropdown

from mambackpt.draw import figure_html, figure_png
from mambackpt.errors import CheckpointError
from mambackpt.explore.controls import Number
from mambackpt.explore.widgets import Explorer, Shown

# In the environment of a kernel whose notebook becomes a page: explorers then leave views.
SWITCH = "MAMBACKPT_STATIC_VIEWS"
MOST_BYTES = 140_000  # of an explorer's views on a page
_STOPS = 6  # of a slider, its ends among them


def asked_for() -> bool:
    """Return whether explorers are to leave views that need no kernel."""
    return os.environ.get(SWITCH) == "1"


def static_views(explorer: Explorer, *, most_bytes: int = MOST_BYTES) -> str:
    """Return HTML with an explorer's view, and others that each move one control away from it.

    >>> from mambackpt.explore import explore_placement
    >>> explorer = explore_placement()
    >>> page = static_views(explorer, most_bytes=60_000)
    >>> page.count('role="group"') > 1, len(page) < 60_000
    (True, True)
    >>> explorer.close()

    A list chooses among them, and two buttons step through it; without script the first is there.
    The explorer stands afterwards as it stood before. Views beyond ``most_bytes`` are left out,
    evenly over the controls.
    """
    start = explorer.values
    views = [("as it opens", _view_html(explorer))]
    size = len(views[0][1])
    waiting = [list(_moves(name, control)) for name, control in explorer.controls.items()]
    try:
        for round_ in range(max(map(len, waiting), default=0)):
            for moves in waiting:
                if round_ < len(moves):
                    name, value, words = moves[round_]
                    explorer.set(**{**start, name: value})
                    made = _view_html(explorer) if value != start[name] else ""
                    new = made not in (body for _, body in views)
                    if made and new and size + len(made) < most_bytes * 0.97:
                        views.append((words, made))
                        size += len(made)
    finally:
        explorer.set(**start)
    order = {words: at for at, moves in enumerate(waiting) for *_, words in moves}
    views[1:] = sorted(views[1:], key=lambda view: order[view[0]])
    return _pager(views)


def _moves(name: str, control: Any) -> Iterator[tuple[str, Any, str]]:
    """Values worth a look, those far apart first, each with its words."""
    label = str(control.description)
    if isinstance(control, Number):
        least, most, step = control.slider.min, control.slider.max, control.slider.step
        stops = [least + (most - least) * n // (_STOPS - 1) // step * step for n in range(_STOPS)]
        for value in dict.fromkeys([stops[-1], stops[2], stops[0], *stops]):
            yield name, value, f"{label}: {value:,}"
    elif isinstance(control, Dropdown):
        for shown, value in control.options[:8]:
            yield name, value, f"{label}: {shown}"
    elif isinstance(control, Checkbox):
        yield name, not control.value, f"{label}: {'no' if control.value else 'yes'}"


def _view_html(explorer: Explorer) -> str:
    """What is shown now, its picture drawn afresh in few bytes; nothing where it was refused."""
    shown = explorer.shown
    if not isinstance(shown, Shown):
        return ""
    try:
        drawing = shown.afresh()
    except CheckpointError:
        return ""
    return figure_html(figure_png(drawing.figure, colours=32), alt=drawing.alt) + shown.below


def _pager(views: list[tuple[str, str]]) -> str:
    options = "".join(f"<option>{html.escape(words)}</option>" for words, _ in views)
    sections = "".join(
        f'<div role="group" aria-label="{html.escape(words)}"{" hidden" if at else ""}>{body}</div>'
        for at, (words, body) in enumerate(views)
    )
    return (
        '<div class="views"><p>Without a kernel: some views, computed beforehand, each one move '
        "away from the first.</p>"
        '<p><button type="button" data-step="-1">Previous view</button> '
        f'<select aria-label="view">{options}</select> '
        '<button type="button" data-step="1">Next view</button></p>'
        f"{sections}<script>{_SCRIPT}</script></div>"
    )


_SCRIPT = """(box => {
  const choice = box.querySelector("select"), views = box.querySelectorAll("[role=group]");
  const show = () => views.forEach((view, at) => { view.hidden = at !== choice.selectedIndex; });
  choice.addEventListener("change", show);
  box.querySelectorAll("button").forEach(button => button.addEventListener("click", () => {
    const count = choice.options.length, step = Number(button.dataset.step);
    choice.selectedIndex = (choice.selectedIndex + step + count) % count;
    show();
  }));
})(document.currentScript.parentElement);"""
