"""The command ``animate``: write a film as a GIF, or as a page that plays it."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from mambackpt.cli import table, whole_number
from mambackpt.draw import (
    Frame,
    SequenceAnimation,
    film_gif,
    film_page,
    run_frames,
    sequence_finding,
    sequence_frames,
)
from mambackpt.engine import simulate
from mambackpt.errors import CheckpointValueError, checked_choice
from mambackpt.explore.engine import STORIES
from mambackpt.explore.saving import checked_file, write_whole
from mambackpt.geometry import CacheGeometry

ENDINGS = ("gif", "html")
# Stories in which one request runs at a time: what a film of one lane can tell.
_TOLD = tuple(name for name in STORIES if STORIES[name]().settings.max_running == 1)
FILMS = ("sequence", *_TOLD)


def save_film(animation: SequenceAnimation, path: Path, *, alt: str = "") -> Path:
    """Write a film as the GIF or the page that its name ends in, and return the path.

    ``alt`` says what it shows (default: its finding). Raises CheckpointValueError for another
    ending, and where the file cannot be written.
    """
    words = alt or animation.finding
    if checked_file(path, ENDINGS).suffix == ".gif":
        return write_whole(path, film_gif(animation, alt=words))
    return write_whole(path, film_page(animation, alt=words).encode())


def story_film(name: str, *, medium: str = "review") -> SequenceAnimation:
    """Return the film of a story of the engine explorer.

    >>> story_film("mid-block-hit").finding
    "B resumes inside a block, from the state that A's checkpoint left."

    Raises CheckpointValueError for a story in which requests run at the same time.
    """
    story = STORIES[checked_choice("film", name, _TOLD)]()
    frames = run_frames(simulate(story.requests, story.settings))
    return SequenceAnimation(frames, finding=f"{story.about}.", medium=medium)


def main(argv: Sequence[str]) -> int:
    """Write a film, and print its finding, its frames and the path; exit status 0.

    What is refused raises a CheckpointError.
    """
    parser = argparse.ArgumentParser(prog="mambackpt animate", description=__doc__.split("\n")[0])
    say = parser.add_argument
    say("film", nargs="?", default="sequence", help=f"one of {', '.join(FILMS)} [sequence]")
    say("--prompt", default="8000", help="tokens of a prompt that is sent twice [8000]")
    say("--budget", default="8192", help="tokens of one step [8192]")
    say("--block", default="1536", help="tokens per Mamba block [1536]")
    say("--hash", help="tokens per hash unit [the block]")
    say("--hit-alignment", help="grid of cache hits [the hash unit]")
    say("--alignment", default="16", help="grid of the kernel, or none: it cannot export [16]")
    say("--drop", action="store_true", help="speculative decoding drops a unit")
    say("--medium", default="review", choices=["review", "slide"], help="size [review]")
    say("--out", type=Path, required=True, metavar="FILE", help="film.gif or film.html")
    args = parser.parse_args(argv)
    name = checked_choice("film", args.film, FILMS)
    checked_file(args.out, ENDINGS)
    if name == "sequence":
        frames = _sequence_of(args)
        film = SequenceAnimation(frames, finding=sequence_finding(frames), medium=args.medium)
    else:
        _refuse_unread(parser, args)
        film = story_film(name, medium=args.medium)
    print(film.finding)
    print(table(("frame", ""), [(n, f.sentence) for n, f in enumerate(film.story, 1)], words=2))
    print(save_film(film, args.out))
    return 0


def _sequence_of(args: argparse.Namespace) -> list[Frame]:
    block = whole_number("--block", args.block)
    unit = block if args.hash is None else whole_number("--hash", args.hash)
    hits = unit if args.hit_alignment is None else whole_number(
        "--hit-alignment", args.hit_alignment
    )  # fmt: skip
    grid = None if args.alignment == "none" else whole_number("--alignment", args.alignment)
    geometry = CacheGeometry(unit, block, grid, hits, args.drop)
    prompt, budget = whole_number("--prompt", args.prompt), whole_number("--budget", args.budget)
    return sequence_frames(prompt, geometry, budget=budget)


def _refuse_unread(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """A story has sizes of its own: an option that would be ignored is refused."""
    names = ("prompt", "budget", "block", "hash", "hit_alignment", "alignment", "drop")
    given = [name for name in names if getattr(args, name) != parser.get_default(name)]
    if given:
        option = given[0].replace("_", "-")
        raise CheckpointValueError(
            f"--{option} is given for the film {args.film!r}, which has sizes of its own; expected "
            f"it for the film 'sequence'. Try it without --{option}."
        )
