"""Controls: values that are typed as well as slid, chosen, or switched, and what they are called.

A `Knob` says everything of one value: its label, its option on the command line, its range. The
widget, the option and the words of an error all come from it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import traitlets
from ipywidgets import Checkbox, Dropdown, HBox, IntSlider, IntText, Layout, Text, Widget

Value: TypeAlias = int | str | bool
Values: TypeAlias = Mapping[str, Any]
# Wide enough for the longest label: what a question names must not be cut off.
LABEL_EM = 11.0
_STYLE = {"description_width": f"{LABEL_EM}em"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One value that a reader can change: what it is called and what it may be.

    >>> knob = Knob(label="kernel grid A", option="alignment", value=16, none="cannot export")
    >>> knob.typed(16), knob.typed(0)
    ('16', 'none')

    ``option`` is its name on a command line. A number has a slider from ``least`` to ``most``;
    ``choices`` are values to choose from; text and switches need neither. Where ``none`` says what
    nothing means, the value 0 stands for it: a widget shows no None.
    """

    label: str
    option: str
    value: Value
    least: int = 1
    most: int = 0
    step: int = 1
    choices: tuple[Value, ...] = ()
    none: str = ""

    def typed(self, value: Value) -> str:
        """Return a value as it is typed after the option."""
        return "none" if self.none and not value else f"{value}"

    def shown(self, value: Value) -> str:
        """Return a value as a reader sees it among the choices."""
        if self.none and not value:
            return self.none
        return f"{value:,}" if type(value) is int else str(value)

    def widget(self) -> Widget:
        """Return the control."""
        words = {"description": self.label, "style": _STYLE}
        if isinstance(self.value, bool):
            layout = Layout(width=f"{LABEL_EM + 17}em")
            return Checkbox(value=self.value, indent=True, layout=layout, **words)
        if self.choices:
            options = [(self.shown(value), value) for value in self.choices]
            if self.value not in self.choices:
                options.append((self.shown(self.value), self.value))
            width = Layout(width=f"{LABEL_EM + 17}em")
            return Dropdown(options=options, value=self.value, layout=width, **words)
        if isinstance(self.value, str):
            layout = Layout(width=f"{LABEL_EM + 17}em")
            return Text(value=self.value, continuous_update=False, layout=layout, **words)
        return Number(self.label, self.value, least=self.least, most=self.most, step=self.step)


class Number(HBox):  # type: ignore[misc]
    """A whole number that is typed in a field or slid beside it; both always agree.

    >>> tokens = Number("tokens", 8000, most=16384)
    >>> tokens.field.value = 20000
    >>> tokens.value, tokens.slider.value
    (20000, 16384)
    >>> close(tokens)

    A typed number may lie beyond the slider's ends: what a view cannot take, it says in a sentence.
    """

    value = traitlets.Int(0)

    def __init__(self, label: str, value: int, *, most: int, least: int = 1, step: int = 1) -> None:
        field = Layout(width=f"{LABEL_EM + 6.5}em")
        self.field = IntText(value=value, description=label, style=_STYLE, layout=field)
        self.slider = IntSlider(
            value=least, min=least, max=most, step=step, readout=False,
            layout=Layout(width="10em"), tooltip=label,
        )  # fmt: skip
        super().__init__([self.field, self.slider], layout=Layout(width=f"{LABEL_EM + 17}em"))
        self.value = value
        self._agree()
        self.field.observe(self._typed, "value")
        self.slider.observe(self._slid, "value")
        self.observe(self._agree, "value")

    @property
    def description(self) -> str:
        """What it is called."""
        return str(self.field.description)

    def stretch(self, most: int) -> None:
        """Let the slider end elsewhere; the value comes along."""
        if most != self.slider.max:
            self.value = min(self.value, most)
            with self.hold_trait_notifications():
                self.slider.max = most
            self._agree()

    def _nearest(self) -> int:
        """Where the slider stands: a browser would move it to a step by itself, and the value."""
        least, most, step = self.slider.min, self.slider.max, self.slider.step
        return int(least + (min(max(self.value, least), most) - least) // step * step)

    def _typed(self, _: object) -> None:
        self.value = self.field.value

    def _slid(self, _: object) -> None:
        if self.slider.value != self._nearest():
            self.value = self.slider.value

    def _agree(self, _: object = None) -> None:
        self.field.value = self.value
        self.slider.value = self._nearest()


def knob_widgets(knobs: Mapping[str, Knob]) -> dict[str, Widget]:
    """Return the control of each knob, by its name."""
    return {name: knob.widget() for name, knob in knobs.items()}


def labels_of(knobs: Mapping[str, Knob], parameters: Mapping[str, str]) -> dict[str, str]:
    """Return what the parameters of the functions below a view are called on the screen.

    >>> labels_of({"M": Knob(label="block M", option="block", value=64)}, {"mamba_block_size": "M"})
    {'mamba_block_size': 'block M'}
    """
    return {parameter: knobs[name].label for parameter, name in parameters.items()}


def close(widget: Widget) -> None:
    """Let go of a widget and of everything inside it."""
    for child in getattr(widget, "children", ()):
        close(child)
    for part in ("style", "layout"):
        if hasattr(widget, part):
            getattr(widget, part).close()
    widget.close()


def follow(
    values: Values, before: Values, *, sizes: tuple[str, ...] = ("M", "H", "U")
) -> dict[str, Any]:
    """Return the values after each size took along those below it that were equal to it.

    >>> follow({"M": 1600, "H": 1536, "U": 1536}, {"M": 1536, "H": 1536, "U": 1536})
    {'M': 1600, 'H': 1600, 'U': 1600}
    >>> follow({"M": 1536, "H": 128, "U": 1536}, {"M": 1536, "H": 1536, "U": 1536})
    {'M': 1536, 'H': 128, 'U': 128}
    >>> follow({"M": 1600, "H": 1600, "U": 3200}, {"M": 1600, "H": 800, "U": 3200})
    {'M': 1600, 'H': 1600, 'U': 3200}

    A size that the reader has parted from the one above it stays where it is, and nonsense takes
    nothing along.
    """
    carried = dict(values)
    for place, name in enumerate(sizes):
        if values[name] == before[name] or values[name] < 1:
            continue
        for lower in sizes[place + 1 :]:
            if before[lower] == before[name] and values[lower] == before[lower]:
                carried[lower] = values[name]
    return carried


Carry: TypeAlias = Callable[[Values, Values], Mapping[str, Any]]
