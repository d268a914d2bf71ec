"""Showing: alt text is required, a PNG lies beside the HTML, figures are closed."""

import base64
import io
import re
import sys

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from mambackpt import CheckpointValueError
from mambackpt.draw.sheet import Drawing, sheet, style
from mambackpt.draw.show import figure_html, figure_png, show, show_table, small_svg
from mambackpt.figures.registry import draw_figure


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """What a notebook would receive, one mapping of kinds to contents per display."""
    bundles: list[dict[str, str]] = []
    monkeypatch.setattr(
        "IPython.display.display", lambda thing: bundles.append(thing._repr_mimebundle_())
    )
    return bundles


def test_a_figure_is_shown_with_its_alt_text_and_closed(shown: list[dict[str, str]]) -> None:
    figure, _ = plt.subplots()
    drawing = Drawing(figure, "A state is kept.", '7,680 < 8,000 & "kept"')
    show(drawing, caption="Notice the column.")
    [bundle] = shown
    assert set(bundle) == {"text/plain", "text/html", "image/png"}
    page = bundle["text/html"]
    assert page.startswith("<figure")
    assert 'alt="7,680 &lt; 8,000 &amp; &quot;kept&quot;"' in page
    assert "<figcaption>Notice the column.</figcaption></figure>" in page
    embedded = re.search(r"data:image/svg\+xml;base64,([^\"]+)", page)
    assert embedded is not None
    assert base64.b64decode(embedded[1]).startswith(b"<svg")
    assert base64.b64decode(bundle["image/png"]).startswith(b"\x89PNG")
    assert not plt.fignum_exists(figure.number)
    assert figure.axes == []


@pytest.mark.parametrize("alt", ["", "  \n"])
def test_a_blank_alt_text_is_refused_and_the_figure_closed(
    alt: str, shown: list[dict[str, str]]
) -> None:
    figure, _ = plt.subplots()
    with pytest.raises(CheckpointValueError, match=r"alt is .* Try the finding"):
        show(Drawing(figure, "A state is kept.", alt))
    assert shown == []
    assert not plt.fignum_exists(figure.number)
    with pytest.raises(CheckpointValueError):
        figure_html(b"", alt=alt)


def test_the_smallest_text_has_14_pixels_and_is_sharp_at_every_scale(
    shown: list[dict[str, str]],
) -> None:
    drawing = draw_figure("one-forward")
    show(drawing)
    page = shown[0]["text/html"]
    width = re.search(r"width:(\d+)px;max-width:100%", page)
    assert width is not None
    points = 7.2 * 72
    assert 14 <= int(width[1]) / points * 9 < 14.1
    assert int(width[1]) < 1000, "it fits beside the prompts of a page of 1,280 pixels"
    assert "data:image/svg+xml" in page


def test_a_drawing_too_large_as_svg_is_shown_in_pixels_twice_as_fine(
    shown: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["mambackpt.draw.show"], "_MOST_SVG", 10)
    show(draw_figure("one-forward"))
    embedded = re.search(r"data:image/png;base64,([^\"]+)", shown[0]["text/html"])
    assert embedded is not None
    picture = Image.open(io.BytesIO(base64.b64decode(embedded[1])))
    assert picture.width == pytest.approx(2 * 807, abs=2)


def test_every_page_of_a_drawing_is_shown(shown: list[dict[str, str]]) -> None:
    pages = tuple(Drawing(Figure(), f"Page {n}.", f"Page {n}.") for n in (2, 3))
    show(Drawing(Figure(), "Page 1.", "Page 1.", pages))
    assert [bundle["text/plain"] for bundle in shown] == [f"<figure: Page {n}.>" for n in (1, 2, 3)]


def test_a_small_svg_says_its_fonts_once_and_keeps_its_words() -> None:
    drawn = small_svg(draw_figure("one-forward").figure).decode()
    assert drawn.count("font-family") == 1
    assert "sans-serif" in drawn
    assert "8,000 tokens" in drawn
    assert "<metadata>" not in drawn


def test_alt_is_required() -> None:
    with pytest.raises(TypeError):
        Drawing(Figure(), "A state is kept.")  # type: ignore[call-arg]


def test_all_colours_are_kept_where_bytes_do_not_matter() -> None:
    figure = Figure(figsize=(1, 1))
    figure.figimage(np.arange(110 * 110 * 3, dtype=np.uint8).reshape(110, 110, 3))
    pictures = (figure_png(figure, colours=colours) for colours in (128, None))
    few, every = (Image.open(io.BytesIO(picture)).convert("RGB") for picture in pictures)
    assert few.size == every.size == (110, 110)
    assert len(few.getcolors()) <= 128 < len(every.getcolors(2**24))


def test_a_picture_is_small_and_the_same_on_every_run() -> None:
    pictures = [figure_png(draw_figure("where-it-lands").figure) for _ in range(2)]
    assert pictures[0] == pictures[1]
    assert len(pictures[0]) < 40_000, "a notebook of six such figures stays below 300 kB"


def test_a_table_aligns_numbers_and_escapes_words(shown: list[dict[str, str]]) -> None:
    show_table(["model", "block"], [["<K3>", 11392], ["B", 528]], caption="Tokens per block.")
    [bundle] = shown
    assert bundle["text/plain"].splitlines() == [
        "Tokens per block.",
        "model  block",
        "<K3>   11,392",
        "B      528",
    ]
    assert "&lt;K3&gt;" in bundle["text/html"]
    assert '<td style="text-align:right">11,392</td>' in bundle["text/html"]
    assert "<caption>Tokens per block.</caption>" in bundle["text/html"]


def test_a_rare_mark_keeps_its_colour_in_the_small_picture() -> None:
    """Grey ramps fill the palette; the one mark in colour must not be averaged away."""
    figure = Figure(figsize=(4, 2))
    figure.figimage(np.linspace(0, 1, 440 * 220).reshape(220, 440), cmap="cividis")
    figure.text(0.5, 0.5, "\N{BLACK SQUARE}", color="#9c0fbf", fontsize=6)
    picture = Image.open(io.BytesIO(figure_png(figure))).convert("RGB")
    red, green, blue = np.asarray(picture, int).reshape(-1, 3).T
    assert ((abs(red - 0x9C) < 12) & (abs(green - 0x0F) < 12) & (abs(blue - 0xBF) < 12)).any()


def test_letters_are_as_wide_at_every_resolution() -> None:
    """Else a line that is wrapped to fit would be cut off in a smaller picture."""
    figure = Figure(figsize=(7, 1))
    figure.text(0, 0.5, "Key 128 leads to column 1, which holds the state after 96 tokens.", size=9)
    ends = []
    for dpi in (72, 80, 84, 96, 110, 150):
        pixels = np.asarray(Image.open(io.BytesIO(figure_png(figure, dpi=dpi))).convert("L"))
        ends.append(np.flatnonzero((pixels < 128).any(axis=0)).max() / pixels.shape[1])
    assert max(ends) - min(ends) < 0.005


def test_a_small_svg_keeps_every_digit_that_is_written() -> None:
    """A title that computed 0.0023 once said 0.00."""
    with style():
        figure, [ax] = sheet("Off by 0.00233 after token 20.", [6])
        ax.plot([0, 0.123456789], [0, 1])
    assert "Off by 0.00233 after token 20." in small_svg(figure).decode()
