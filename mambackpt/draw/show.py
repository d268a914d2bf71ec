"""Show a drawing in a notebook so that it reaches everybody: with alt text, without a kernel."""

import base64
import html
import io
import sys
from collections.abc import Sequence

from matplotlib import rc_context
from matplotlib.figure import Figure

from mambackpt.draw.sheet import Drawing
from mambackpt.errors import CheckpointValueError


def figure_png(figure: Figure, *, dpi: float = 110, colours: int | None = 128) -> bytes:
    """Return a figure as a small PNG, the same bytes on every run.

    >>> figure_png(Figure(figsize=(1, 1)))[1:4]
    b'PNG'

    ``dpi`` is in pixels per inch of the figure. Fewer ``colours`` make fewer bytes; None keeps all
    of them, in half the time. Letters are as wide at every resolution, so what fits at one fits at
    all.
    """
    from PIL import Image

    pixels = io.BytesIO()
    with rc_context({"text.hinting": "no_hinting"}):
        fast = {"compress_level": 1}
        figure.savefig(pixels, format="png", dpi=dpi, metadata={"Software": None}, pil_kwargs=fast)
    if colours is None:
        return pixels.getvalue()
    small = io.BytesIO()
    picture = Image.open(pixels).convert("RGB")
    # An octree keeps the few pixels of a marker in their colour; a median cut would grey them.
    picture = picture.quantize(colours, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    picture.save(small, format="png", optimize=True)
    return small.getvalue()


def figure_html(png: bytes, *, alt: str, caption: str = "") -> str:
    """Return the HTML of a picture with its alt text, and a caption below it.

    >>> figure_html(b"...", alt="A < B", caption="As <b>.")[-62:]
    'alt="A &lt; B"><figcaption>As &lt;b&gt;.</figcaption></figure>'

    Raises CheckpointValueError for a blank alt text.
    """
    if not alt.strip():
        raise CheckpointValueError(
            f"alt is {alt!r}; expected what the figure shows, in a sentence, for whoever cannot "
            "see it. Try the finding."
        )
    data = base64.b64encode(png).decode()
    return (
        f'<figure style="margin:0"><img src="data:image/png;base64,{data}" '
        f'style="max-width:100%" alt="{html.escape(alt)}"><figcaption>{html.escape(caption)}'
        "</figcaption></figure>"
    )


def show(drawing: Drawing, *, caption: str = "", dpi: int = 110) -> None:
    """Display a drawing with its alt text, as HTML and as a PNG beside it, and close its figure.

    >>> show(Drawing(Figure(figsize=(1, 1)), "Nothing is kept.", alt="An empty square."))
    <figure: An empty square.>

    Outside a notebook that line is all there is. Viewers that strip HTML show the PNG.
    Raises CheckpointValueError for a blank alt text; the figure is closed all the same.
    """
    try:
        png = figure_png(drawing.figure, dpi=dpi)
        page = figure_html(png, alt=drawing.alt, caption=caption)
    finally:
        _close(drawing.figure)
    data = base64.b64encode(png).decode()
    _display(_Shown(f"<figure: {drawing.alt}>", {"text/html": page, "image/png": data}))


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


def _close(figure: Figure) -> None:
    """Let go of a figure, whether or not pyplot knows it."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        pyplot.close(figure)
    figure.clear()


def show_table(header: Sequence[str], rows: Sequence[Sequence[object]], *, caption: str) -> None:
    """Display a table with its caption: numbers to the right, thousands separated.

    >>> show_table(["model", "block"], [["A", 1056]], caption="Tokens per block.")
    Tokens per block.
    model  block
    A      1,056
    """
    body = _cells(rows)
    widths = [max(map(len, column)) for column in zip(header, *body, strict=True)]
    plain = [caption]
    for cells in (header, *body):
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        plain.append("  ".join(padded).rstrip())
    page = table_html(header, rows, caption=caption)
    _display(_Shown("\n".join(plain), {"text/html": page}))


def table_html(header: Sequence[str], rows: Sequence[Sequence[object]], *, caption: str) -> str:
    """Return the HTML of a table: what `show_table` displays.

    >>> table_html(["block"], [[1056]], caption="Tokens.")[-60:]
    '<td style="text-align:right">1,056</td></tr></tbody></table>'
    """
    numeric = [all(isinstance(row[at], int | float) for row in rows) for at in range(len(header))]
    align = ["right" if right else "left" for right in numeric]

    def row_html(cells: Sequence[str], tag: str) -> str:
        parts = zip(cells, align, strict=True)
        return "".join(
            f'<{tag} style="text-align:{side}">{html.escape(cell)}</{tag}>' for cell, side in parts
        )

    lines = "".join(f"<tr>{row_html(cells, 'td')}</tr>" for cells in _cells(rows))
    return (
        f"<table><caption>{html.escape(caption)}</caption><thead><tr>{row_html(header, 'th')}"
        f"</tr></thead><tbody>{lines}</tbody></table>"
    )


def _cells(rows: Sequence[Sequence[object]]) -> list[list[str]]:
    return [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
