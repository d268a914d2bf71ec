"""A review pack: an HTML page, the same as Markdown, and figures, written whole or not at all."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version

from mambackpt.cli import checked_output, write_whole
from mambackpt.draw import Drawing, style
from mambackpt.errors import CheckpointValueError
from mambackpt.review.page import Command, Picture, Section, Words, html_page, markdown_page
from mambackpt.review.question import Question
from mambackpt.review.show import PARTS, part_of


@dataclass(frozen=True)
class Review:
    """The pages of a review and its figures, by the names of their files."""

    title: str
    files: Mapping[str, bytes]

    def save(self, folder: Path) -> list[Path]:
        """Write every file into a folder, each whole, the page last; return the paths.

        Other files of the folder stay. Raises CheckpointValueError where it cannot be written.
        """
        writable(folder)
        for name, content in self.files.items():
            write_whole(folder / name, content)
        return [folder / name for name in self.files]


def writable(folder: Path) -> None:
    """Make a folder, or say why nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointValueError(
            f"--out is {str(folder)!r} ({error.strerror}); expected a folder that can be written. "
            "Try --out review."
        ) from error
    checked_output("--out", folder / "index.html")


def build_review(question: Question, *, command: Sequence[str] = ()) -> Review:
    """Compute every section of a review and return its files; nothing is written.

    >>> from mambackpt.models import PRESETS
    >>> from mambackpt.replay import generate_chat
    >>> question = Question(
    ...     model=PRESETS["qwen3-next"], traces=[generate_chat(60)], block=1024, histories=1
    ... )
    >>> list(build_review(question).files)[-2:]
    ['review.md', 'index.html']

    ``command`` are the lines that make the same review. The same question gives the same bytes.
    """
    page: list[Section] = []
    files: dict[str, bytes] = {}
    for part in PARTS:
        section, drawings = part_of(question, part)
        pictures = []
        for name, drawing in drawings.items():
            files |= {f"{name}.{kind}": drawn for kind, drawn in _drawn(drawing).items()}
            pictures.append(Picture(name, files[f"{name}.svg"], drawing.alt))
        page.append(Section(section.title, [*pictures, *section.parts]))
    page.append(_how(command))
    title = f"Prefill checkpoints of {question.model.name}"
    lead = (
        "Where the recurrent state must be saved so that the next request with the same prefix can "
        "resume, what fits, and whether what is saved is what the cache promises."
    )
    files["review.md"] = markdown_page(title, lead, page).encode()
    files["index.html"] = html_page(title, lead, page).encode()
    return Review(title, files)


def _drawn(drawing: Drawing) -> dict[str, bytes]:
    about = {
        "svg": {"Date": None, "Creator": None, "Title": drawing.finding},
        "pdf": {"CreationDate": None, "Creator": None, "Producer": None, "Title": drawing.finding},
    }
    drawn = {}
    for kind, metadata in about.items():
        page = io.BytesIO()
        with style():
            drawing.figure.savefig(page, format=kind, metadata=metadata)
        drawn[kind] = page.getvalue()
    return drawn


def _how(command: Sequence[str]) -> Section:
    def installed(name: str) -> str:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            return f"{name} is not installed"

    names = map(installed, ("mambackpt", "numpy", "matplotlib"))
    parts: list[Words | Command] = [Words([f"Python {python_version()}, {', '.join(names)}."])]
    if command:
        parts = [Words(["The same page, byte for byte:"]), Command(command), *parts]
    return Section("How this page was made", parts)
