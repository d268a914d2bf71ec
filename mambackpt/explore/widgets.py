"""Explorers: numbers to change beside what they lead to.

`explore` connects controls to a function that returns a drawing; what it shows is a pure function
of the controls' values, so that it is tested without a widget.
"""

import html
from collections.abc import Callable

from ipywidgets import HTML, HBox, IntSlider, IntText, Layout, VBox, Widget

from mambackpt.draw import Drawing, figure_html, figure_png
from mambackpt.errors import CheckpointError

# What each control drives, by the name of the function that shows it: a cell that is run again
# replaces its explorer instead of adding a second callback to a slider that it shares.
_USERS: dict[Widget, dict[str, "Explorer"]] = {}


class Explorer(VBox):  # type: ignore[misc]
    """Controls, and below them what they lead to; `explore` returns it."""

    def __init__(self, show: Callable[..., str | Drawing], controls: dict[str, Widget]) -> None:
        self._show, self._controls = show, controls
        self._name = f"{show.__module__}.{show.__qualname__}"
        self._screen = HTML()
        self._desk = HBox(list(controls.values()), layout=Layout(flex_flow="row wrap"))
        super().__init__([self._desk, self._screen])
        earlier = []
        for control in controls.values():
            users = _USERS.setdefault(control, {})
            earlier += [users[self._name]] if self._name in users else []
            users[self._name] = self
            control.observe(self._update, "value")
        for explorer in earlier:
            explorer.close()
        self._update()

    @property
    def page(self) -> str:
        """The HTML that is shown now."""
        return str(self._screen.value)

    def _update(self, _: object = None) -> None:
        values = {name: control.value for name, control in self._controls.items()}
        try:
            shown = self._show(**values)
            self._screen.value = shown if isinstance(shown, str) else picture(shown)
        except CheckpointError as error:
            self._screen.value = f'<p role="alert"><b>⚠ {html.escape(str(error))}</b></p>'

    def close(self) -> None:
        """Let go of every widget, but for controls that another explorer still uses."""
        for control in self._controls.values():
            if control.comm is None:
                continue
            control.unobserve(self._update, "value")
            users = _USERS.get(control, {})
            if users.get(self._name) is self:
                del users[self._name]
            if not users:
                _USERS.pop(control, None)
                _close(control)
        _close(self._desk)
        _close(self._screen)
        self.layout.close()
        super().close()


def picture(drawing: Drawing) -> str:
    """The HTML of a drawing that is soon replaced by the next: more bytes, in half the time."""
    return figure_html(figure_png(drawing.figure, dpi=100, colours=None), alt=drawing.alt)


def _close(widget: Widget) -> None:
    for part in ("style", "layout"):
        if hasattr(widget, part):
            getattr(widget, part).close()
    widget.close()


def explore(show: Callable[..., str | Drawing], **controls: Widget) -> Explorer:
    """Return controls above what a function of their values shows, as a VBox.

    >>> tokens = IntSlider(value=3, min=1, max=9)
    >>> explorer = explore(lambda tokens: f"{tokens} tokens", tokens=tokens)
    >>> tokens.value = 4
    >>> explorer.page
    '4 tokens'
    >>> explorer.close()

    ``show`` takes the values by the controls' names and returns a drawing, or HTML. What it refuses
    with an error of the `CheckpointError` family is shown as a sentence. A control may be shared; a
    function of the same name on a shared control replaces the earlier explorer. `close` lets go of
    all widgets.
    """
    return Explorer(show, controls)


def number(label: str, value: int, most: int | None = None, least: int = 1) -> Widget:
    """A slider up to ``most``, or a field where no bound would be right."""
    layout = Layout(width="31em" if most else "13em")
    words = {"description": label, "style": {"description_width": "8em"}, "layout": layout}
    if most is None:
        return IntText(value=value, **words)
    return IntSlider(value=value, min=least, max=max(most, value), **words)
