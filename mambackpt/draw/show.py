"""Show a drawing in a notebook so that it reaches everybody: with alt text, without a kernel."""

import base64
import html
import io
import math
import re
import sys
from collections import Counter
from collections.abc import Sequence

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.text import Text

from mambackpt.draw.save import figure_bytes
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


def figure_html(
    picture: bytes, *, alt: str, caption: str = "", kind: str = "png", width: int | None = None
) -> str:
    """Return the HTML of a picture with its alt text, and a caption below it.

    >>> figure_html(b"...", alt="A < B", caption="As <b>.")[-62:]
    'alt="A &lt; B"><figcaption>As &lt;b&gt;.</figcaption></figure>'

    ``kind`` is "png" or "svg+xml"; ``width`` is what it takes of a page in CSS pixels, where there
    is room. Raises CheckpointValueError for a blank alt text.
    """
    if not alt.strip():
        raise CheckpointValueError(
            f"alt is {alt!r}; expected what the figure shows, in a sentence, for whoever cannot "
            "see it. Try the finding."
        )
    data = base64.b64encode(picture).decode()
    wide = f"width:{width}px;" if width else ""
    return (
        f'<figure style="margin:0"><img src="data:image/{kind};base64,{data}" '
        f'style="{wide}max-width:100%" alt="{html.escape(alt)}"><figcaption>{html.escape(caption)}'
        "</figcaption></figure>"
    )


_READING = 14  # pixels of the smallest text, on a page that is not scaled
_MOST_SVG = 60_000  # bytes: beyond them a picture of pixels, twice as fine, is smaller


def reading_width(figure: Figure) -> int:
    """Return how many CSS pixels wide a figure is where its smallest text has 14 of them.

    >>> from mambackpt.draw import sheet, style
    >>> with style():
    ...     reading_width(sheet("One forward is enough.", [10])[0])
    807
    """
    figure.draw_without_rendering()  # which is when ticks get their labels
    texts = [text for text in figure.findobj(Text) if isinstance(text, Text) and text.get_text()]
    points = min((float(text.get_fontsize()) for text in texts), default=9.0)
    return math.ceil(figure.get_figwidth() * 72 / points * _READING)


def small_svg(figure: Figure) -> bytes:
    """Return a figure as SVG without what a reader does not see: half the bytes."""
    drawn = figure_bytes(figure, "svg", "", "").decode()
    drawn = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<[?!][^>]*>", "", drawn, flags=re.S)
    # Places need a hundredth of a point; what is written there keeps every digit.
    drawn = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d+\.\d\d)\d+", r"\1", tag[0]), drawn)
    drawn = re.sub(r' transform="rotate\(-?0 [^"]*"', "", drawn)
    named = set(re.findall(r"#([\w-]+)", drawn))
    drawn = re.sub(r' id="([\w.-]+)"', lambda m: m[0] if m[1] in named else "", drawn)
    drawn = re.sub(r"<g>\s*(<(?:text|use)\b[^>]*(?:/>|>[^<]*</text>))\s*</g>", r"\1", drawn)
    # Every text names the same fonts: say so once.
    fonts = dict.fromkeys(re.findall(r"font-family: [^;\"]*", drawn))
    if len(fonts) == 1:
        [family] = fonts
        drawn = re.sub(rf"{re.escape(family)};? ?", "", drawn)
        drawn = drawn.replace("<svg ", f'<svg style="{family}" ', 1)
    # A style that many share becomes a class.
    styles = Counter(re.findall(r' style="([^"]*)"', drawn))
    classes = [words for words, count in styles.items() if count > 2]
    for number, words in enumerate(classes):
        drawn = drawn.replace(f' style="{words}"', f' class="c{number}"')
    rules = "".join(f".c{number}{{{words}}}" for number, words in enumerate(classes))
    drawn = drawn.replace("</style>", f"{rules}</style>", 1)
    return re.sub(r">\s+<", "><", re.sub(r"\s+", " ", drawn)).strip().encode()


def show(drawing: Drawing, *, caption: str = "", dpi: int = 110) -> None:
    """Display a drawing with its alt text, as HTML and as a PNG beside it, and close its figure.

    >>> show(Drawing(Figure(figsize=(1, 1)), "Nothing is kept.", alt="An empty square."))
    <figure: An empty square.>

    Outside a notebook that line is all there is. The HTML holds an SVG, so wide that its smallest
    text has 14 pixels and sharp at every scale; where that is too large, a PNG of twice the width.
    Viewers that strip HTML show the PNG of so many ``dpi``. Raises CheckpointValueError for a blank
    alt text; the figure is closed all the same.
    """
    for page in drawing.pages:
        figure = page.figure
        try:
            png, width = figure_png(figure, dpi=dpi), reading_width(figure)
            picture, kind = small_svg(figure), "svg+xml"
            if len(picture) > _MOST_SVG:
                picture, kind = figure_png(figure, dpi=2 * width / figure.get_figwidth()), "png"
            page_html = figure_html(picture, alt=page.alt, caption=caption, kind=kind, width=width)
        finally:
            _close(figure)
        data = base64.b64encode(png).decode()
        _display(_Shown(f"<figure: {page.alt}>", {"text/html": page_html, "image/png": data}))


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
        said = []
        for cell, side in zip(cells, align, strict=True):
            name = tag if cell else "td"  # a head without words is none
            said.append(f'<{name} style="text-align:{side}">{html.escape(cell)}</{name}>')
        return "".join(said)

    lines = "".join(f"<tr>{row_html(cells, 'td')}</tr>" for cells in _cells(rows))
    return (
        f"<table><caption>{html.escape(caption)}</caption><thead><tr>{row_html(header, 'th')}"
        f"</tr></thead><tbody>{lines}</tbody></table>"
    )


def _cells(rows: Sequence[Sequence[object]]) -> list[list[str]]:
    return [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
