"""Static pages of the notebooks: read without Jupyter, with the players working.

Each page needs no other file. What only a kernel could move (sliders, buttons) is left out, with
the picture that stands beside it in the notebook.
"""

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mambackpt.site.notebooks import Notebook, execute

_WIDGET = "application/vnd.jupyter.widget-view+json"
_STYLE = """
:root { color-scheme: light dark; --ink: #26262c; --faint: #5b5b63; --page: #ffffff;
  --line: #d5d5db; --band: #f4f4f6; --link: #1d5fc2; --word: #7a1f6d; --name: #1d4f9e;
  --text: #1b6135; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8ec; --faint: #b3b3bc; --page: #17171b;
  --line: #3a3a42; --band: #202026; --link: #8db8ff; --word: #f0a8e4; --name: #9cc4ff;
  --text: #98d8ae; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 17px/1.6 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main, header nav { max-width: 52rem; margin: 0 auto; padding: 0 1.25rem; }
header { border-bottom: 1px solid var(--line); padding: .8rem 0; font-size: .9rem; }
header nav { display: flex; gap: 1.25rem; flex-wrap: wrap; }
main { padding-bottom: 5rem; }
h1 { font-size: 2rem; line-height: 1.2; margin: 2rem 0 1rem; }
h2 { font-size: 1.35rem; margin: 3rem 0 .75rem; }
a { color: var(--link); }
a.anchor-link { display: none; }
img { max-width: 100%; height: auto; }
figure { margin: 1.5rem 0; }
.picture img { width: 100%; }
figure img, .animation img, .picture img { background: #ffffff; border-radius: 6px; }
figcaption, caption { color: var(--faint); font-size: .92rem; text-align: left; }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .95rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; }
pre { background: var(--band); border-radius: 6px; padding: .7rem .9rem; overflow-x: auto;
  font-size: .85rem; line-height: 1.45; }
code { font-family: ui-monospace, "DejaVu Sans Mono", monospace; }
p code, li code, td code { background: var(--band); padding: 0 .25em; border-radius: 3px; }
details { border-left: 3px solid var(--line); padding-left: 1rem; margin: 1rem 0; }
summary { cursor: pointer; }
.highlight .k, .highlight .kn, .highlight .kc, .highlight .ow { color: var(--word); }
.highlight .nf, .highlight .nb, .highlight .nn, .highlight .nc { color: var(--name); }
.highlight .s, .highlight .s1, .highlight .s2, .highlight .sa, .highlight .si,
.highlight .c1 { color: var(--text); }
.left-out { color: var(--faint); font-size: .92rem; }
.prompt { display: none; }
"""


@dataclass(frozen=True, slots=True)
class Page:
    """One notebook as a page: its file's stem, its title, its puzzle, and its HTML."""

    stem: str
    title: str
    puzzle: str
    body: str


def build_site(
    paths: Sequence[Path], *, run: bool = True, figures: Sequence[Path] = ()
) -> dict[str, str]:
    """Return the files of the site: one page a notebook, and ``index.html`` with the contents.

    With ``run`` the notebooks are executed first, so that players are there; else what is kept in
    them is shown. ``figures`` are SVG files for a gallery. A notebook that fails raises
    nbclient's CellExecutionError, and nothing is returned.
    """
    import nbformat

    pages = []
    for path in paths:
        notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
        if run:
            execute(notebook, folder=path.parent, MAMBACKPT_STATIC_VIEWS="1")
        pages.append(page_of(notebook, path.stem))
    files = {f"{page.stem}.html": whole_page(page, pages) for page in pages}
    files["index.html"] = _contents(pages, figures)
    return files


def page_of(notebook: Notebook, stem: str) -> Page:
    """Return the page of one notebook as it is."""
    from nbconvert import HTMLExporter

    first = notebook.cells[0].source
    title = first.splitlines()[0].removeprefix("# ").strip()
    story = re.split(r"\*(?:Takes for granted|Needs):\*", first)[0].split("\n", 1)[1]
    puzzle = re.sub(r"\s+", " ", story.replace(".ipynb)", ".html)")).strip()
    exporter = HTMLExporter(template_name="basic")  # type: ignore[no-untyped-call]
    body, _ = exporter.from_notebook_node(_without_widgets(notebook))
    body = re.sub(r'(href="[^":#]+)\.ipynb', r"\1.html", body)
    body = re.sub(r"(<table)", r'<div class="scroll" tabindex="0">\1', body)
    body = body.replace("</table>", "</table></div>").replace("<pre>", '<pre tabindex="0">')
    return Page(stem, title, puzzle, body)


def _without_widgets(notebook: Notebook) -> Notebook:
    """A copy in which a sentence stands where only a kernel could show something."""
    import copy

    bare = copy.deepcopy(notebook)
    for cell in bare.cells:
        outputs: list[Any] = []
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if _WIDGET in data and "text/html" in data:
                data = {"text/html": data["text/html"]}
                output = output | {"data": data, "metadata": {}}
            elif _WIDGET in data:
                said = "Here the notebook has controls to move; run it to use them."
                data = {"text/html": f'<p class="left-out">{said}</p>'}
                output = output | {"data": data, "metadata": {}}
            elif "text/html" in data:
                data.pop("image/png", None)
            outputs.append(output)
        if "outputs" in cell:
            cell.outputs = outputs
    return bare


def _head(title: str) -> str:
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
    )


def whole_page(page: Page, pages: Sequence[Page]) -> str:
    """Return one page as HTML that needs no other file, with links to its neighbours."""
    at = pages.index(page)
    links = ['<a href="index.html">Contents</a>']
    links += [
        f'<a href="{p.stem}.html">Before: {html.escape(p.title)}</a>' for p in pages[:at][-1:]
    ]
    links += [
        f'<a href="{p.stem}.html">Next: {html.escape(p.title)}</a>' for p in pages[at + 1 :][:1]
    ]
    bar = "\n".join(links)
    return (
        f'{_head(page.title)}<header><nav aria-label="Course">{bar}</nav></header>\n'
        f"<main>\n{page.body}\n</main>\n"
        f'<footer><nav aria-label="Course, again" style="max-width:52rem;margin:0 auto;'
        f'padding:1rem 1.25rem;display:flex;gap:1.25rem">{bar}</nav></footer>\n</body>\n</html>\n'
    )


def _contents(pages: Iterable[Page], figures: Sequence[Path]) -> str:
    from nbconvert.filters import markdown2html

    listed = "".join(
        f'<section><h2><a href="{page.stem}.html">{page.stem[:2]} {html.escape(page.title)}</a>'
        f"</h2>{markdown2html(page.puzzle)}</section>\n"
        for page in pages
    )
    gallery = "".join(_in_gallery(path) for path in figures)
    if gallery:
        gallery = f"<section><h2>The figures</h2>\n{gallery}</section>\n"
    return (
        f"{_head('Prefill checkpoints of hybrid models')}<main>\n"
        "<h1>Where must a hybrid model save its state?</h1>\n"
        "<p>An attention cache can be cut at any token; a recurrent state cannot be rewound. These "
        "pages are notebooks of a course on where serving engines save it, whether what they saved "
        "is what the cache promises, and what it is worth.</p>\n"
        f"{listed}{gallery}</main>\n</body>\n</html>\n"
    )


def _in_gallery(path: Path) -> str:
    """A figure's SVG with its finding, both from the file itself."""
    import base64

    drawn = path.read_text(encoding="utf-8")
    said = dict.fromkeys(("title", "description"), "")
    for name in said:
        found = re.search(rf"<dc:{name}>(.*?)</dc:{name}>", drawn, re.S)
        said[name] = html.unescape(found.group(1)) if found else path.stem
    data = base64.b64encode(drawn.encode()).decode()
    return (
        f'<figure class="picture"><img src="data:image/svg+xml;base64,{data}" loading="lazy" '
        f'alt="{html.escape(said["description"])}"><figcaption>{html.escape(path.stem)}'
        f"</figcaption></figure>\n"
    )
