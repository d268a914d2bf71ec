"""Show a figure in a notebook so that it reaches everybody: with alt text, and without a kernel."""

import base64
import html
import io
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from mambackpt.errors import CheckpointValueError


def unhinted() -> AbstractContextManager[None]:
    """Draw letters as wide at every resolution, so that what fits at one fits at all.

    >>> with unhinted():
    ...     drawn = figure_png(Figure(figsize=(1, 1)))
    """
    return rc_context({"text.hinting": "no_hinting"})


def figure_png(figure: Figure, *, dpi: float = 110) -> bytes:
    """Return a figure as a small PNG: 128 colours, the same bytes on every run.

    >>> figure_png(Figure(figsize=(1, 1)))[1:4]
    b'PNG'

    ``dpi`` is in pixels per inch of the figure.
    """
    from PIL import Image

    drawn = io.BytesIO()
    with unhinted():
        figure.savefig(drawn, format="png", dpi=dpi, metadata={"Software": None})
    small = io.BytesIO()
    picture = Image.open(drawn).convert("RGB")
    # An octree keeps the few pixels of a marker in their colour; a median cut would grey them.
    picture = picture.quantize(128, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    picture.save(small, format="png", optimize=True)
    return small.getvalue()


def figure_html(png: bytes, *, alt: str, caption: str | None = None) -> str:
    """Return the HTML of a picture with its alt text and a caption (default: the alt text).

    >>> figure_html(b"...", alt="A < B")[-57:]
    'alt="A &lt; B"><figcaption>A &lt; B</figcaption></figure>'

    Raises CheckpointValueError for a blank alt text.
    """
    if not alt.strip():
        raise CheckpointValueError(
            f"alt is {alt!r}; expected what the figure shows, in a sentence, for whoever cannot "
            "see it. Try the finding."
        )
    data = base64.b64encode(png).decode()
    words = html.escape(alt if caption is None else caption)
    return (
        f'<figure style="margin:0"><img src="data:image/png;base64,{data}" '
        f'style="max-width:100%" alt="{html.escape(alt)}"><figcaption>{words}</figcaption></figure>'
    )


def show(figure: Figure, *, alt: str, caption: str | None = None, dpi: int = 110) -> None:
    """Display a figure with its alt text, as HTML and as a PNG beside it, and close it.

    >>> show(Figure(figsize=(1, 1)), alt="An empty square.")
    <figure: An empty square.>

    Outside a notebook that line is all there is. Viewers that strip HTML show the PNG. ``alt`` is
    required: say what the figure shows.
    Raises CheckpointValueError for a blank alt text; the figure is closed all the same.
    """
    try:
        png = figure_png(figure, dpi=dpi)
        page = figure_html(png, alt=alt, caption=caption)
    finally:
        close(figure)
    data = base64.b64encode(png).decode()
    _display(_Shown(f"<figure: {alt}>", {"text/html": page, "image/png": data}))


class _Shown:
    """Something to display: its text, and what a notebook shows instead."""

    def __init__(self, text: str, bundle: dict[str, str]) -> None:
        self.text, self.bundle = text, bundle

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        return {"text/plain": self.text, **self.bundle}


def _display(shown: _Shown) -> None:
    from IPython.display import display

    display(shown)  # type: ignore[no-untyped-call]


def close(figure: Figure) -> None:
    """Let go of a figure, whether or not pyplot knows it."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        pyplot.close(figure)
    figure.clear()


def show_animation(filmstrip: Figure, player: str, *, alt: str, caption: str | None = None) -> None:
    """Display the filmstrip of an animation, then its player.

    ``player`` is the HTML of `mambackpt.draw.player_html`. The filmstrip is what survives in
    print and without a kernel. Raises as `show` does, before anything is displayed.
    """
    show(filmstrip, alt=alt, caption=caption)
    _display(_Shown(f"<player: {alt}>", {"text/html": player}))


def show_table(header: Sequence[str], rows: Sequence[Sequence[object]], *, caption: str) -> None:
    """Display a table with its caption: numbers to the right, thousands separated.

    >>> show_table(["model", "block"], [["A", 1056]], caption="Tokens per block.")
    Tokens per block.
    model  block
    A      1,056
    """
    body = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *body, strict=True)]
    plain = [caption]
    for cells in (header, *body):
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        plain.append("  ".join(padded).rstrip())
    numeric = [all(isinstance(row[at], int | float) for row in rows) for at in range(len(header))]
    align = ["right" if right else "left" for right in numeric]

    def row_html(cells: Sequence[str], tag: str) -> str:
        parts = zip(cells, align, strict=True)
        return "".join(
            f'<{tag} style="text-align:{side}">{html.escape(cell)}</{tag}>' for cell, side in parts
        )

    lines = "".join(f"<tr>{row_html(cells, 'td')}</tr>" for cells in body)
    table = (
        f"<table><caption>{html.escape(caption)}</caption><thead><tr>{row_html(header, 'th')}"
        f"</tr></thead><tbody>{lines}</tbody></table>"
    )
    _display(_Shown("\n".join(plain), {"text/html": table}))


def quick_png(figure: Figure) -> bytes:
    """Return a figure as a PNG: larger than `figure_png`'s, in half the time."""
    from PIL import Image

    canvas = figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    with unhinted():
        canvas.draw()  # type: ignore[no-untyped-call]
    drawn = io.BytesIO()
    pixels = np.asarray(canvas.buffer_rgba())  # type: ignore[no-untyped-call]
    Image.fromarray(pixels).convert("RGB").save(drawn, format="png", compress_level=1)
    return drawn.getvalue()
