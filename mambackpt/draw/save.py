"""Write a figure to files: the same bytes on every run, with its alt text, whole or not at all."""

import io
from collections.abc import Iterable
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryFile
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from mambackpt.draw.sheet import Drawing, style
from mambackpt.errors import CheckpointValueError, checked_choice

FORMATS = ("svg", "pdf", "png")
_SHARP = 220  # pixels per inch of a PNG: text of a review is 27 pixels high


def checked_formats(formats: Iterable[str], *, name: str = "formats") -> list[str]:
    """Return formats, each once and each one that can be written.

    >>> checked_formats(["svg", "png", "svg"])
    ['svg', 'png']

    Raises CheckpointValueError for another format, and for none.
    """
    wanted = list(dict.fromkeys(checked_choice(name, kind, FORMATS) for kind in formats))
    if not wanted:
        raise CheckpointValueError(
            f"{name} is empty; expected some of {', '.join(FORMATS)}. Try 'svg'."
        )
    return wanted


def writable_folder(folder: Path, *, name: str = "folder") -> Path:
    """Return a folder that exists or can be made, and can be written to; nothing is made yet.

    >>> writable_folder(Path(".")).name
    ''

    Raises CheckpointValueError otherwise: before the work of drawing, not after it.
    """
    known = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not known.is_dir():
        what = "a file" if known == folder else f"below {str(known)!r}, a file"
        raise CheckpointValueError(
            f"{name} is {str(folder)!r}, {what}; expected a folder. Try {str(known.parent)!r}."
        )
    try:
        TemporaryFile(dir=known).close()  # permissions alone do not tell, least of all the root's
    except OSError as error:
        raise CheckpointValueError(
            f"{name} is {str(folder)!r}, and nothing can be written to {str(known)!r}; expected a "
            "folder of yours. Try 'figures'."
        ) from error
    return folder


def save_figure(
    figure: Figure | Drawing,
    path: Path | str,
    *,
    alt: str = "",
    title: str = "",
    formats: Iterable[str] = ("svg", "pdf"),
    medium: str = "review",
) -> list[Path]:
    """Write a figure of yours, or a drawing of the kit's, in each format, and return the paths.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     paths = save_figure(Figure(), Path(folder, "mine"), alt="An empty page.")
    ...     [path.name for path in paths]
    ['mine.svg', 'mine.pdf']

    ``path`` has no suffix; ``alt`` says what is to be seen, for whoever cannot see it, and is
    required where a `Drawing` does not bring its own; ``title`` is the finding. The same bytes on
    every run, whatever the reader's settings; words stay words. A drawing of several pages gets
    their numbers: ``mine-1.svg``. Everything is drawn before the first file is written. Raises
    CheckpointValueError for a blank alt text, another format, and a folder that cannot be written.
    """
    drawing = figure if isinstance(figure, Drawing) else Drawing(figure, title, alt)
    alt = alt or drawing.alt
    if not alt.strip():
        raise CheckpointValueError(
            f"alt is {alt!r}; expected what the figure shows, in a sentence, for whoever cannot "
            "see it. Try the finding."
        )
    wanted, path = checked_formats(formats), Path(path)
    writable_folder(path.parent)
    pages = {}
    for number, page in enumerate(drawing.pages, start=1):
        name = path.name if len(drawing.pages) == 1 else f"{path.name}-{number}"
        for kind in wanted:
            content = figure_bytes(page.figure, kind, title or page.finding, alt, medium=medium)
            pages[path.parent / f"{name}.{kind}"] = content
    path.parent.mkdir(parents=True, exist_ok=True)
    for file, content in pages.items():
        _write_whole(file, content)
    return list(pages)


def figure_bytes(
    figure: Figure, kind: str, title: str, alt: str, *, medium: str = "review"
) -> bytes:
    """Return a figure as the bytes of a file that carries its title and its alt text."""
    about: dict[str, dict[str, str | None]] = {
        "svg": {"Date": None, "Creator": None, "Title": title, "Description": alt},
        "pdf": {**dict.fromkeys(("CreationDate", "Creator", "Producer")), "Title": title},
        "png": {"Software": None, "Title": title, "Description": alt},
    }
    about["pdf"]["Subject"] = alt
    settings: dict[str, Any] = {"facecolor": figure.get_facecolor()}
    if kind == "png":
        settings["dpi"] = _SHARP
    page = io.BytesIO()
    # Letters are as wide at every resolution, so what fits at one fits at all.
    hinting = "no_hinting" if kind == "png" else "default"
    with style(medium), rc_context({"text.hinting": hinting}):
        figure.savefig(page, format=kind, metadata=about[kind], **settings)
    return page.getvalue()


def _write_whole(file: Path, content: bytes) -> None:
    """Write a file beside its place and move it there: nobody sees half of one."""
    with NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}.", delete=False) as beside:
        half = Path(beside.name)
        try:
            beside.write(content)
            beside.close()
            half.chmod(0o644)
            half.replace(file)
        except BaseException:
            half.unlink()
            raise
