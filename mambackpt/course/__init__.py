"""What the course goes by: its words and letters, the story it tells, its exercises' checkers."""

from mambackpt.course import story
from mambackpt.course.exercises import (
    KeyedBlock,
    Prefix,
    Verdict,
    check_answer,
    check_function,
    invariant_cases,
    judge_variant,
    keeps_promises,
)
from mambackpt.course.words import GLOSSARY, LETTERS

__all__ = [
    "GLOSSARY",
    "LETTERS",
    "KeyedBlock",
    "Prefix",
    "Verdict",
    "check_answer",
    "check_function",
    "invariant_cases",
    "judge_variant",
    "keeps_promises",
    "story",
]
