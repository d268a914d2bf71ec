"""The command ``site``: the course as static pages, or its notebooks run again in place."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from mambackpt.cli import checked_output, write_whole
from mambackpt.site.notebooks import execute, find_notebooks, stripped
from mambackpt.site.pages import build_site


def main(argv: Sequence[str]) -> int:
    """Build the site and print its files; ``python -m mambackpt site``."""
    parser = argparse.ArgumentParser(
        prog="mambackpt site",
        description="Run the notebooks of a checkout and write them as static pages, which need no "
        "other file; or run them again in place.",
    )
    add = parser.add_argument
    add("number", nargs="*", help="notebooks, such as 01 04 [all]")
    add("--notebooks", type=Path, default=Path("notebooks"), help="their folder [notebooks]")
    add("--out", type=Path, default=Path("build/site"), help="folder [build/site]")
    add("--as-they-are", action="store_true", help="do not run them: no players")
    add("--in-place", action="store_true", help="run them, keep what they show, write no pages")
    args = parser.parse_args(argv)
    paths = find_notebooks(args.notebooks, args.number)
    if args.in_place:
        for path in paths:
            _run_in_place(path)
            print(path)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    checked_output("--out", str(args.out / "index.html"))
    figures = sorted((args.notebooks / "figures").glob("*.svg"))
    for name, content in build_site(paths, run=not args.as_they_are, figures=figures).items():
        write_whole(args.out / name, content)
        print(f"{args.out / name}  {len(content.encode()):,} bytes")
    return 0


def _run_in_place(path: Path) -> None:
    import nbformat

    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    execute(notebook, folder=path.parent)
    write_whole(path, stripped(notebook))
