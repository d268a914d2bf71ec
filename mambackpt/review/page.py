"""Pages: sections of words, tables and pictures as one HTML page and as Markdown.

Both pages are the same bytes for the same sections. The HTML page needs no other file: pictures
are inside it.
"""

import base64
import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Words:
    """Sentences, or a list of them with ``listed``."""

    sentences: Sequence[str]
    listed: bool = False


@dataclass(frozen=True, slots=True)
class Command:
    """Lines for a shell."""

    lines: Sequence[str]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a header with a caption; numbers stand to the right."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[object]]


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture by the name of its file: its SVG, headed by what it found, and what it shows."""

    name: str
    svg: bytes
    alt: str


Part: TypeAlias = Words | Command | Table | Picture


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with what stands below it."""

    title: str
    parts: Sequence[Part]


_STYLE = """
:root { color-scheme: light dark; --ink: #26262c; --faint: #5b5b63; --page: #ffffff;
  --line: #d5d5db; --band: #f4f4f6; --link: #1d5fc2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8ec; --faint: #b3b3bc; --page: #17171b;
  --line: #3a3a42; --band: #202026; --link: #8db8ff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 54rem; margin: 0 auto; padding: 2rem 1.25rem 5rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .5rem; }
h2 { font-size: 1.3rem; margin: 3rem 0 .75rem; padding-top: .75rem;
  border-top: 1px solid var(--line); }
a { color: var(--link); }
nav ol { columns: 2; padding-left: 1.4rem; }
table { border-collapse: collapse; width: 100%; font-size: .92rem;
  font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; margin: 1rem 0; }
caption { text-align: left; color: var(--faint); padding-bottom: .35rem; }
th, td { text-align: left; padding: .3rem .7rem .3rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th.number, td.number { text-align: right; white-space: nowrap; }
figure { margin: 1.5rem 0; }
figure img { display: block; width: 100%; height: auto; background: #ffffff; border-radius: 6px;
  padding: 10px; border: 1px solid var(--line); }
figcaption { color: var(--faint); font-size: .92rem; margin-top: .4rem; }
pre { background: var(--band); border: 1px solid var(--line); border-radius: 6px;
  padding: .7rem .9rem; overflow-x: auto; font-size: .88rem; }
@media (max-width: 40rem) { nav ol { columns: 1; } }
@media print { nav { display: none; } h2 { break-after: avoid; } figure { break-inside: avoid; } }
"""


def html_page(title: str, lead: str, sections: Iterable[Section]) -> str:
    """Return a page that needs no other file and follows the reader's light or dark setting.

    >>> page = html_page("Review", "One model.", [Section("Sizes", [Words(["A < B."])])])
    >>> page.count("<h2"), "<p>A &lt; B.</p>" in page
    (1, True)
    """
    listed = list(sections)
    contents = "".join(
        f'<li><a href="#part-{at}">{html.escape(section.title)}</a></li>'
        for at, section in enumerate(listed, start=1)
    )
    body = "\n".join(
        f'<section aria-labelledby="part-{at}"><h2 id="part-{at}">{html.escape(section.title)}</h2>'
        f"\n{chr(10).join(map(_part_html, section.parts))}\n</section>"
        for at, section in enumerate(listed, start=1)
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{html.escape(title)}</h1>\n<p>{html.escape(lead)}</p>\n"
        f'<nav aria-label="Contents"><ol>{contents}</ol></nav>\n{body}\n</main>\n</body>\n</html>\n'
    )


def markdown_page(title: str, lead: str, sections: Iterable[Section]) -> str:
    """Return the same as Markdown, with pictures beside it as ``NAME.svg``.

    >>> print(markdown_page("Review", "One model.", [Section("Sizes", [Words(["A < B."])])]))
    # Review
    <BLANKLINE>
    One model.
    <BLANKLINE>
    ## Sizes
    <BLANKLINE>
    A < B.
    <BLANKLINE>
    """
    blocks = [f"# {title}", lead]
    for section in sections:
        blocks += [f"## {section.title}", *map(_part_markdown, section.parts)]
    return "\n\n".join(blocks) + "\n"


def _part_html(part: Part) -> str:
    if isinstance(part, Words):
        said = [html.escape(sentence) for sentence in part.sentences]
        if part.listed:
            return f"<ul>{''.join(f'<li>{words}</li>' for words in said)}</ul>"
        return "\n".join(f"<p>{words}</p>" for words in said)
    if isinstance(part, Command):
        return f"<pre><code>{html.escape(chr(10).join(part.lines))}</code></pre>"
    if isinstance(part, Picture):
        data = base64.b64encode(part.svg).decode()
        files = f"{part.name}.svg and {part.name}.pdf, beside this page"
        return (
            f'<figure><img src="data:image/svg+xml;base64,{data}" alt="{html.escape(part.alt)}">'
            f"<figcaption>{files}</figcaption></figure>"
        )
    return _table_html(part)


def _table_html(table: Table) -> str:
    numeric = _numeric(table)

    def row(cells: Sequence[str], tag: str) -> str:
        marked = zip(cells, numeric, strict=True)
        return "".join(
            f"<{tag}{' class=number' if right else ''}"
            f"{' scope=col' if tag == 'th' else ''}>{html.escape(cell)}</{tag}>"
            for cell, right in marked
        )

    body = "".join(f"<tr>{row([_cell(c) for c in cells], 'td')}</tr>" for cells in table.rows)
    return (
        '<div class="wide" tabindex="0" role="region" aria-label="'
        f'{html.escape(table.caption)}"><table><caption>{html.escape(table.caption)}</caption>'
        f"<thead><tr>{row(table.header, 'th')}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _part_markdown(part: Part) -> str:
    if isinstance(part, Words):
        sentences = [f"* {words}" if part.listed else words for words in part.sentences]
        return ("\n" if part.listed else "\n\n").join(sentences)
    if isinstance(part, Command):
        return "```\n" + "\n".join(part.lines) + "\n```"
    if isinstance(part, Picture):
        return f"![{part.alt}]({part.name}.svg)"
    rows = [[_cell(cell).replace("|", "\\|") for cell in cells] for cells in part.rows]
    rule = ["---:" if right else "---" for right in _numeric(part)]
    lines = [f"| {' | '.join(cells)} |" for cells in (part.header, rule, *rows)]
    return f"{part.caption}\n\n" + "\n".join(lines)


def _numeric(table: Table) -> list[bool]:
    """For each column, whether it holds numbers alone."""
    return [
        all(isinstance(row[at], int | float) for row in table.rows)
        for at in range(len(table.header))
    ]


def _cell(cell: object) -> str:
    if isinstance(cell, float):
        return f"{cell:,.2f}"
    return f"{cell:,}" if type(cell) is int else str(cell)
