"""The command line that draws a view again."""

import shlex
from collections.abc import Mapping

from mambackpt.explore.controls import Knob, Values


def command_line(name: str, knobs: Mapping[str, Knob], values: Values) -> str:
    """Return the command that draws a view of these values.

    >>> knobs = {"seq_len": Knob(label="tokens in all", option="tokens", value=1, most=9)}
    >>> command_line("placement", knobs, {"seq_len": 8000})
    'python -m mambackpt explore placement --tokens 8000'
    """
    words = ["python -m mambackpt explore", name]
    for key, knob in knobs.items():
        value = values[key]
        if isinstance(knob.value, bool):
            words += [f"--{knob.option}"] if value else []
        else:
            words.append(f"--{knob.option} {shlex.quote(knob.typed(value))}")
    return " ".join(words)
