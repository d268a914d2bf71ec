"""The parts of a review in a notebook, one at a time."""

from collections.abc import Callable

from mambackpt.draw import show, show_table
from mambackpt.errors import checked_choice
from mambackpt.review import sections
from mambackpt.review.page import Section, Table
from mambackpt.review.question import Question

PARTS: dict[str, Callable[[Question], Section | sections.Drawn]] = {
    "assumptions": sections.assumptions,
    "capacity": sections.capacity,
    "landing": sections.landing,
    "staircase": sections.staircase,
    "rules": sections.rules,
    "missed": sections.missed,
    "retention": sections.retention,
    "lockstep": sections.lockstep,
    "advice": sections.advice,
}


def part_of(question: Question, name: str) -> sections.Drawn:
    """Return one part of a review: its section, and its drawings by name.

    >>> from mambackpt.models import PRESETS
    >>> from mambackpt.replay import generate_chat
    >>> question = Question(model=PRESETS["qwen3-next"], traces=[generate_chat(60)])
    >>> part_of(question, "assumptions")[0].title
    'Assumptions'

    Raises CheckpointValueError for another name.
    """
    made = PARTS[checked_choice("part", name, PARTS)](question)
    return made if isinstance(made, tuple) else (made, {})


def show_part(question: Question, name: str, *, tables: bool = True) -> Section:
    """Show one part of a review in a notebook: its pictures, then its tables; return its section.

    Without ``tables`` only the pictures. Raises as `part_of`.
    """
    section, drawings = part_of(question, name)
    for drawing in drawings.values():
        show(drawing)
    for part in section.parts:
        if tables and isinstance(part, Table):
            show_table(part.header, part.rows, caption=part.caption)
    return section
