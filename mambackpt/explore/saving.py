"""A view's picture as bytes: quickly for the screen, and kept as a file."""

import io
import os
import tempfile
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
from matplotlib import rc_context
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager, get_font
from matplotlib.ft2font import LoadFlags

from mambackpt.draw import Drawing, figure_png, style
from mambackpt.errors import CheckpointValueError, checked_choice

FORMATS = ("svg", "pdf", "png")


def checked_file(path: Path, endings: tuple[str, ...]) -> Path:
    """Return a path that can be written, in a format that its name ends in.

    Said before any work. Raises CheckpointValueError for another ending or no such folder.
    """
    checked_choice("the file's ending", path.suffix.removeprefix("."), endings)
    if not path.parent.is_dir() or path.is_dir():
        raise CheckpointValueError(
            f"{path} cannot be written; expected a file in a folder that is there. Try {path.name}."
        )
    return path


def write_whole(path: Path, data: bytes) -> Path:
    """Write a file whole or not at all, and return its path as it can be opened from anywhere.

    Raises CheckpointValueError where it cannot be written.
    """
    try:
        handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            Path(beside).chmod(0o644)
            Path(beside).replace(path)
        except BaseException:
            Path(beside).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise CheckpointValueError(
            f"{path} cannot be written ({error.strerror}); expected a file in a folder of yours. "
            f"Try {path.name}."
        ) from error
    return path.resolve()


def save_drawing(drawing: Drawing, path: Path) -> Path:
    """Write a drawing in the format that its name ends in, and return the path.

    The same drawing gives the same bytes. Finding and alt text go into the file. Raises
    CheckpointValueError for another ending, and where the file cannot be written.
    """
    kind = checked_file(path, FORMATS).suffix.removeprefix(".")
    if kind == "png":
        return write_whole(path, figure_png(drawing.figure, dpi=150, colours=None))
    finding, alt = drawing.finding, drawing.alt
    about: dict[str, dict[str, str | None]] = {
        "svg": {"Date": None, "Creator": None, "Title": finding, "Description": alt},
        "pdf": {"CreationDate": None, "Creator": None, "Producer": None, "Title": finding,
                "Subject": alt},
    }  # fmt: skip
    page = io.BytesIO()
    with style():
        drawing.figure.savefig(page, format=kind, metadata=cast(Any, about[kind]))
    return write_whole(path, page.getvalue())


def quick_png(figure: Figure) -> bytes:
    """Return a figure as a PNG as quickly as its pixels allow.

    >>> from PIL import Image
    >>> Image.open(io.BytesIO(quick_png(Figure(figsize=(1, 1), dpi=100)))).size
    (100, 100)

    Every row of pixels is told as its difference from the row above, and runs are all that is
    compressed: most of a figure is flat.
    """
    pixels = _pixels(figure)
    height, width, _ = pixels.shape
    lines = np.empty((height, 1 + 3 * width), np.uint8)
    lines[:, 0] = 2  # PNG's filter "up"
    flat = pixels.reshape(height, -1)
    lines[0, 1:] = flat[0]
    np.subtract(flat[1:], flat[:-1], out=lines[1:, 1:])
    packer = zlib.compressobj(1, zlib.DEFLATED, 15, 9, zlib.Z_RLE)
    data = packer.compress(lines.tobytes()) + packer.flush()
    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes((8, 2, 0, 0, 0))
    chunks = ((b"IHDR", header), (b"IDAT", data), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, body) for name, body in chunks)


def _pixels(figure: Figure) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Draw a figure with the renderer that is kept for it."""
    size = (float(figure.bbox.width), float(figure.bbox.height), float(figure.dpi))
    renderer = _RENDERERS.get(figure)
    if renderer is None or renderer.size != size:
        renderer = _RENDERERS[figure] = _ScreenRenderer(*size)
    renderer.clear()  # type: ignore[no-untyped-call]
    with rc_context({"text.hinting": "no_hinting"}):
        figure.draw(renderer)
    return np.asarray(renderer.buffer_rgba())[..., :3]  # type: ignore[no-untyped-call]


class _ScreenRenderer(RendererAgg):
    """Draws a text that was drawn before as one image of all its letters: half of a redraw."""

    def __init__(self, width: float, height: float, dpi: float) -> None:
        super().__init__(width, height, dpi)  # type: ignore[no-untyped-call]
        self.size = (width, height, dpi)

    def draw_text(
        self, gc: Any, x: float, y: float, s: str, prop: Any, angle: float,
        ismath: Any = False, mtext: Any = None,
    ) -> None:  # fmt: skip
        if ismath or angle:
            super().draw_text(gc, x, y, s, prop, angle, ismath, mtext)  # type: ignore[no-untyped-call]
            return
        image, left, down = _lettering(s, prop, self.dpi)
        place = round(x + left), round(y + down) + 1
        self._renderer.draw_text_image(image, *place, 0, gc)


@lru_cache(maxsize=4096)
def _lettering(text: str, prop: Any, dpi: float) -> tuple[Any, float, float]:
    """A text as one image of its letters, and how far it lies right of and below its start."""
    font = get_font(fontManager._find_fonts_by_props(prop))
    font.set_size(prop.get_size_in_points(), dpi)
    font.set_text(text, 0, flags=LoadFlags.NO_HINTING)
    font.draw_glyphs_to_bitmap(antialiased=True)
    left, down = font.get_bitmap_offset()
    return np.array(font.get_image()), left / 64, (down + font.get_descent()) / 64


_RENDERERS: "WeakKeyDictionary[Figure, _ScreenRenderer]" = WeakKeyDictionary()


def _chunk(name: bytes, body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + name + body + zlib.crc32(name + body).to_bytes(4, "big")
