"""Explorers: numbers to change beside what they lead to.

`explore` connects controls to a function that returns a drawing; what it shows is a pure function
of the controls' values, so that it is tested without a widget.
"""

import html
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ipywidgets import HTML, Button, Dropdown, HBox, Layout, ToggleButton, VBox, Widget

from mambackpt.draw import Drawing, figure_html
from mambackpt.errors import CheckpointError, CheckpointValueError
from mambackpt.explore.controls import Carry, Values, close
from mambackpt.explore.saving import FORMATS, quick_png, save_drawing

# What each control drives, by the name of the function that shows it: a cell that is run again
# replaces its explorer instead of adding a second callback to a slider that it shares.
_USERS: dict[Widget, dict[str, "Explorer"]] = {}
_BUSY = "mambackpt-busy"
# The sign and the grey come by themselves, 150 ms after the kernel has begun and not yet ended: a
# quick redraw shows neither.
_LOOKS = f"""<style>
@keyframes mambackpt-stale {{to {{opacity: 0.35; filter: grayscale(1)}}}}
@keyframes mambackpt-sign {{to {{visibility: visible}}}}
.{_BUSY} .widget-html-content {{animation: mambackpt-stale 1ms 150ms forwards}}
.{_BUSY}::before {{content: "computing …"; visibility: hidden; position: absolute; z-index: 1;
  padding: 0 0.6em; background: #33333b; color: white;
  animation: mambackpt-sign 1ms 150ms forwards}}
.mambackpt-page .widget-html-content {{line-height: 1.35}}
.mambackpt-page caption {{text-align: left; font-weight: bold; padding: 0.4em 0}}
.mambackpt-page td, .mambackpt-page th {{padding: 0.1em 0.6em; vertical-align: top}}
.mambackpt-code pre {{white-space: pre-wrap; user-select: all; margin: 0.4em 0}}
</style>"""
# JupyterLab takes arrow keys for itself before a list of choices sees them, unless an attribute
# asks it not to. A widget cannot set one; whoever moves into a list gets it here.
_KEYS = """<img src="data:," alt="" hidden onerror="
  this.closest('.mambackpt-explorer')?.addEventListener('focusin', moved => {
    if (moved.target.tagName === 'SELECT') moved.target.dataset.lmSuppressShortcuts = 'true';
  });
">"""


@dataclass(frozen=True, slots=True)
class Code:
    """What reproduces a view: a command line, and a line of Python that makes ``view``."""

    command: str
    python: str


@dataclass(frozen=True, slots=True)
class Shown:
    """What an explorer shows: a picture, HTML below it, and how the same picture is made afresh."""

    picture: Drawing
    below: str
    afresh: Callable[[], Drawing]


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """What an explorer does beside showing.

    ``name`` is that of a saved figure; ``carry`` changes the values that go along with a change;
    ``code`` writes what reproduces a view; ``labels`` say what a parameter is called on the screen.
    """

    name: str = "view"
    carry: Carry | None = None
    code: Callable[[Values], Code] | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


class Explorer(VBox):  # type: ignore[misc]
    """Controls, and below them what they lead to; `explore` returns it."""

    def __init__(
        self,
        show: Callable[..., str | Drawing | Shown],
        controls: dict[str, Widget],
        habits: Habits | None = None,
        *,
        beside: Sequence[Widget] = (),
    ) -> None:
        self._show, self._controls, self._habits = show, controls, habits or Habits()
        self._name = f"{show.__module__}.{show.__qualname__}"
        self._screen = HTML()
        # The sign is on a box around the page: on the page itself it would draw the page once more.
        self._frame = VBox([self._screen])
        self._frame.add_class("mambackpt-page")
        self._desk = HBox(
            [*controls.values(), *beside], layout=Layout(flex_flow="row wrap", width="100%")
        )
        self._tools = _Tools(self)
        self._held = False
        self._values = self.values
        self._drawn: str | Drawing | Shown | None = None
        super().__init__([self._desk, self._frame, self._tools, HTML(_LOOKS + _KEYS)])
        self.add_class("mambackpt-explorer")
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

    @property
    def values(self) -> dict[str, Any]:
        """The controls' values, by name."""
        return {name: control.value for name, control in self._controls.items()}

    @property
    def controls(self) -> dict[str, Widget]:
        """The controls, by name."""
        return dict(self._controls)

    @property
    def shown(self) -> str | Drawing | Shown | None:
        """What is shown now; None where it was refused."""
        return self._drawn

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """The live widget, and where a page is made of the notebook, views without a kernel."""
        from mambackpt.explore.static import asked_for, static_views

        bundle = super()._repr_mimebundle_(**kwargs)
        if asked_for():
            bundle["text/html"] = static_views(self)
        return bundle

    @property
    def code(self) -> Code | None:
        """What reproduces the view that is shown now; None where nothing is known to."""
        habit = self._habits.code
        return habit(self.values) if habit else None

    def set(self, **values: Any) -> None:
        """Set several controls, and show the view once."""
        self._held = True
        try:
            for name, value in values.items():
                self._controls[name].value = value
        finally:
            self._held = False
        self._update()

    def save(self, folder: str | Path = ".", kind: str = "svg") -> Path:
        """Write the figure that is shown now under a name of its own, and return the path.

        ``kind`` is "svg", "pdf" or "png". Raises CheckpointValueError where nothing is shown, and
        for a folder that cannot be written.
        """
        drawn = self._drawn
        if isinstance(drawn, Shown):
            drawing = drawn.afresh()
        elif isinstance(drawn, Drawing):
            drawing = drawn
        else:
            raise _nothing_to_save()
        return save_drawing(drawing, _free_path(Path(folder), self._habits.name, kind))

    def _update(self, _: object = None) -> None:
        if self._held:
            return
        self._carry()
        self._frame.add_class(_BUSY)
        self._drawn, page = None, ""
        try:
            self._drawn = self._show(**self._values)
            page = _page(self._drawn)
        except CheckpointError as error:
            page = _alert(self._in_their_words(str(error)))
        except Exception as error:  # no refusal: it is raised, and no old picture stays
            page = _alert(f"The view failed: {type(error).__name__}. The log says more.")
            raise
        finally:
            self._screen.value = page
            self._frame.remove_class(_BUSY)
            self._tools.refresh()

    def _carry(self) -> None:
        """Take along what goes with a change, without showing the view in between."""
        values = self.values
        if self._habits.carry is not None:
            carried = self._habits.carry(values, self._values)
            self._held = True
            try:
                for name, value in carried.items():
                    self._controls[name].value = value
            finally:
                self._held = False
        self._values = self.values

    def _in_their_words(self, message: str) -> str:
        """Call parameters what the controls are called."""
        for parameter, label in self._habits.labels.items():
            message = re.sub(rf"\b{parameter}\b(?!=)", label, message)
            message = re.sub(rf"\b{parameter}=", f"{label} = ", message)
        return message

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
                close(control)
        kept = set(self._controls.values())
        self._desk.children = [child for child in self._desk.children if child not in kept]
        self._drawn = None
        for child in self.children:
            close(child)
        self.layout.close()
        super().close()


class _Tools(VBox):  # type: ignore[misc]
    """Below a view: save its figure, and show the code that reproduces it."""

    def __init__(self, explorer: Explorer) -> None:
        self._explorer = explorer
        wide = Layout(width="auto", flex="0 0 auto")
        self.save = Button(description="save figure", layout=wide)
        self.kind = Dropdown(
            options=[(kind.upper(), kind) for kind in FORMATS], value="svg",
            layout=Layout(width="5.5em", flex="0 0 auto"), tooltip="format of the saved figure",
        )  # fmt: skip
        self.ask = ToggleButton(value=False, description="copy as code", layout=wide)
        self.said = HTML()
        self.lines = HTML()
        self.lines.add_class("mambackpt-code")
        asks = [self.ask] if explorer._habits.code else []
        super().__init__([HBox([self.save, self.kind, *asks]), self.said, self.lines])
        self.save.on_click(self._save)
        self.ask.observe(self.refresh, "value")
        self._spare = [] if asks else [self.ask]

    def refresh(self, _: object = None) -> None:
        """Show the code of what is shown now, where it is asked for; forget what was saved."""
        self.said.value = ""
        code = self._explorer.code if self.ask.value else None
        self.lines.value = "" if code is None else _code_html(code)

    def _save(self, _: object) -> None:
        try:
            path = self._explorer.save(kind=self.kind.value)
            self.said.value = f'<span role="status">saved {html.escape(str(path))}</span>'
        except CheckpointError as error:
            self.said.value = _alert(str(error))

    def close(self) -> None:
        """Let go of the button that is not shown, too."""
        for widget in self._spare:
            close(widget)
        super().close()


def _free_path(folder: Path, name: str, kind: str) -> Path:
    """The first name of its kind that nothing has: an earlier figure is not written over."""
    path, number = folder / f"{name}.{kind}", 1
    while path.exists():
        number += 1
        path = folder / f"{name}-{number}.{kind}"
    return path


def _nothing_to_save() -> CheckpointError:
    return CheckpointValueError(
        "nothing is shown that could be saved; expected a picture. Try other numbers."
    )


def _code_html(code: Code) -> str:
    return "".join(
        f"<pre aria-label='{label}'>{html.escape(line)}</pre>"
        for label, line in (("command line", code.command), ("Python", code.python))
    )


def _page(shown: str | Drawing | Shown) -> str:
    if isinstance(shown, str):
        return shown
    if isinstance(shown, Drawing):
        return picture(shown)
    return picture(shown.picture) + shown.below


def _alert(message: str) -> str:
    return f'<p role="alert"><b>⚠ {html.escape(message)}</b></p>'


def picture(drawing: Drawing) -> str:
    """The HTML of a drawing that is soon replaced by the next: more bytes, in half the time."""
    return figure_html(quick_png(drawing.figure), alt=drawing.alt)


def explore(show: Callable[..., str | Drawing | Shown], **controls: Widget) -> Explorer:
    """Return controls above what a function of their values shows, as a VBox.

    >>> from ipywidgets import IntSlider
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
