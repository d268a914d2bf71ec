"""Saving: a reader's own figure has the guarantees of the kit's, and no file is half there."""

from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest
from matplotlib.figure import Figure

from mambackpt import CheckpointValueError
from mambackpt.draw.save import checked_formats, save_figure, writable_folder
from mambackpt.draw.sheet import Drawing


def a_figure() -> Figure:
    """A figure as a reader makes one, under settings of the reader's."""
    with mpl.rc_context({"font.size": 13, "axes.facecolor": "#eeeeee"}):
        figure, ax = plt.subplots()
        ax.plot([1, 2], [3, 4])
        ax.set_title("Mine")
    plt.close(figure)
    return figure


def test_a_figure_of_yours_is_written_the_same_on_every_run_with_its_alt_text(
    tmp_path: Path,
) -> None:
    before = dict(mpl.rcParams)
    runs = []
    for run, settings in (("one", {}), ("two", {"svg.hashsalt": "other", "font.size": 30})):
        with mpl.rc_context(settings):
            paths = save_figure(
                a_figure(), tmp_path / run / "mine", alt="A line goes up.", title="It grows.",
                formats=("svg", "pdf", "png"),
            )  # fmt: skip
        assert [path.name for path in paths] == ["mine.svg", "mine.pdf", "mine.png"]
        runs.append([path.read_bytes() for path in paths])
    assert runs[0] == runs[1]
    drawn = runs[0][0].decode()
    assert "<dc:title>It grows.</dc:title>" in drawn
    assert "A line goes up." in drawn
    assert ">Mine</text>" in drawn, "words stay words"
    assert "<dc:date>" not in drawn
    assert b"CreationDate" not in runs[0][1]
    assert dict(mpl.rcParams) == before


def test_a_png_is_sharp_where_it_is_scaled(tmp_path: Path) -> None:
    from PIL import Image

    [path] = save_figure(Figure(figsize=(2, 1)), tmp_path / "mine", alt="Empty.", formats=["png"])
    assert Image.open(path).size == (440, 220)


def test_a_figure_without_alt_text_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointValueError, match=r"alt is '' ?; expected what the figure shows"):
        save_figure(Figure(), tmp_path / "mine")
    assert list(tmp_path.iterdir()) == []


def test_pages_are_numbered(tmp_path: Path) -> None:
    drawing = Drawing(Figure(), "1.", "One.", (Drawing(Figure(), "2.", "Two."),))
    paths = save_figure(drawing, tmp_path / "mine", formats=["svg"])
    assert [path.name for path in paths] == ["mine-1.svg", "mine-2.svg"]


def test_what_cannot_be_drawn_leaves_the_files_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything is drawn before the first file is written, and each is moved into place whole."""
    [svg, pdf] = save_figure(Figure(), tmp_path / "mine", alt="Before.")
    before = svg.read_bytes(), pdf.read_bytes()

    def broken(figure: Figure, kind: str, *_: object, **__: object) -> bytes:
        if kind == "pdf":
            raise ZeroDivisionError
        return b"after"

    monkeypatch.setattr("mambackpt.draw.save.figure_bytes", broken)
    with pytest.raises(ZeroDivisionError):
        save_figure(Figure(), tmp_path / "mine", alt="After.")
    assert (svg.read_bytes(), pdf.read_bytes()) == before
    monkeypatch.setattr("mambackpt.draw.save.figure_bytes", lambda *_, **__: b"after")
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_figure(Figure(), tmp_path / "mine", alt="After.")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.pdf", "mine.svg"]


def test_a_folder_that_cannot_be_written_is_refused_before_any_drawing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for folder in (file, file / "below"):
        with pytest.raises(CheckpointValueError, match="a file; expected a folder"):
            writable_folder(folder, name="--out")
    assert writable_folder(tmp_path / "new" / "deep") == tmp_path / "new" / "deep"
    assert not (tmp_path / "new").exists()

    def refuse(**_: object) -> None:
        raise PermissionError

    monkeypatch.setattr("mambackpt.draw.save.TemporaryFile", refuse)
    with pytest.raises(CheckpointValueError, match="nothing can be written to"):
        save_figure(Figure(), tmp_path / "mine", alt="An empty page.")


def test_formats_are_checked() -> None:
    with pytest.raises(CheckpointValueError, match=r"svg, pdf, png\. Try 'pdf'"):
        checked_formats(["svg", "pfd"])
    with pytest.raises(CheckpointValueError, match="formats is empty"):
        checked_formats([])
