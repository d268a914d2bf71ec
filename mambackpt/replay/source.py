"""Which trace a command replays: a file, a folder, or a generator with its numbers."""

import argparse
from collections.abc import Callable
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from mambackpt.cli import whole_number
from mambackpt.errors import CheckpointValueError, checked_choice
from mambackpt.replay.files import LAYOUTS, load_trace
from mambackpt.replay.generators import GENERATORS, PUBLIC_STATISTICS
from mambackpt.replay.live import interleave
from mambackpt.replay.loads import generate_lengths, generate_shared
from mambackpt.replay.trace import Trace, TraceStatistics

LOADS: dict[str, Callable[..., Trace]] = {"shared": generate_shared, "lengths": generate_lengths}
SHAPES = (
    "Files are JSON (one record a line, pretty-printed, or in a list; .gz; or a folder of such "
    "files): Mooncake, Dynamo and AIPerf rows (mooncake), Bailian rows, Claude Code and AgentX "
    "conversations (claude-code), OpenAI requests (messages), ShareGPT, lists of token ids "
    f"(tokens). Generators: {', '.join(GENERATORS)} with a size, as in chat:2000; "
    "shared:groups=64,prefix=2048,suffix=128,requests=1024 (also output, zipf, turns, turn, "
    "edits); "
    "lengths:FILE.csv,share=0.5,groups=64 for BurstGPT's and Azure's tables."
)


def add_trace_options(parser: argparse.ArgumentParser) -> None:
    """Add the trace and what it can be told to a command's options."""
    add = parser.add_argument
    add("trace", help="a trace file or folder, or a generator, as in chat:2000")
    add("--layout", choices=LAYOUTS, help="of the file [from its first record]")
    add("--grain", help="tokens per block of the trace [its layout's, or its generator's]")
    add("--seed", help="of a generator [0]")
    add("--live", metavar="N", help="conversations at once, turn by turn [the trace's own order]")
    add("--tokenizer", metavar="PATH", help="tokenizer.json for texts [words, an estimate]")


def trace_of(options: argparse.Namespace) -> tuple[Trace, TraceStatistics | None]:
    """Return the trace of these options, and what is known of the public one it is modelled on."""
    return open_trace(
        options.trace,
        layout=options.layout,
        grain=None if options.grain is None else whole_number("--grain", options.grain, example=16),
        seed=None if options.seed is None else whole_number("--seed", options.seed, least=0),
        live=None if options.live is None else whole_number("--live", options.live, example=8),
        tokenizer=options.tokenizer,
    )


def is_generated(words: str) -> bool:
    """Whether these words name a generator and no file.

    >>> is_generated("chat:2000"), is_generated("my-trace.jsonl")
    (True, False)
    """
    return words.partition(":")[0] in {**GENERATORS, **LOADS} and not Path(words).exists()


def open_trace(
    words: str,
    *,
    layout: str | None = None,
    grain: int | None = None,
    seed: int | None = None,
    live: int | None = None,
    tokenizer: str | None = None,
) -> tuple[Trace, TraceStatistics | None]:
    """Return the trace that these words name, and what is known of the public one behind it.

    >>> trace, public = open_trace("shared:groups=2,prefix=100,suffix=10,requests=4")
    >>> trace.prompt.tolist(), public
    ([110, 110, 110, 110], None)

    A generator stands with its numbers (tokens, requests); what is none is a path, which
    `load_trace` reads. ``live`` conversations are held at once, where it is given. Raises
    CheckpointValueError for what cannot be read or made, and for what would not be heeded: a layout
    or a tokenizer for a generator, a seed for a file.
    """
    kind, sized, numbers = words.partition(":")
    known = {**GENERATORS, **LOADS}
    public, generated = None, is_generated(words)
    ignored = {"--layout": layout, "--tokenizer": tokenizer} if generated else {"--seed": seed}
    for option, value in ignored.items():
        if value is not None:
            raise CheckpointValueError(
                f"{option} is given and {words} is a {'generator' if generated else 'file'}; "
                f"expected it with a {'file' if generated else 'generator'}. Try leaving it out."
            )
    try:
        if generated:
            if kind == "lengths" and not numbers.strip():
                raise CheckpointValueError(
                    f"{words} names no file; expected one with lengths. "
                    "Try lengths:FILE.csv,share=0.5,groups=64."
                )
            told = _numbers(kind, known[kind], numbers) if sized else {}
            if grain is not None:
                told.setdefault("grain", grain)
            trace = known[kind](**{"seed": seed or 0, **told})
            public = PUBLIC_STATISTICS.get(kind)
        else:
            trace = load_trace(words, layout=layout, grain=grain, tokenizer=tokenizer)
    except OSError as error:
        raise CheckpointValueError(
            f"{error.filename or words} cannot be read ({error.strerror or error}); expected a "
            f"trace file. Try a generator: {', '.join(known)}."
        ) from error
    return (trace if live is None else interleave(trace, live)), public


def _numbers(kind: str, generator: Callable[..., Trace], text: str) -> dict[str, Any]:
    """The arguments of a generator in ``2000``, ``groups=8,prefix=100`` or ``FILE,share=0.5``."""
    parameters = signature(generator).parameters
    told: dict[str, Any] = {}
    if "path" not in parameters and "=" not in text:
        try:
            return {"requests": whole_number("", text)}
        except CheckpointValueError as error:
            raise CheckpointValueError(
                f"the size in {kind}:{text} is {text!r}; expected how many requests. "
                f"Try {kind}:1000."
            ) from error
    parts = text.split(",")
    if "path" in parameters:
        settings = len(parts)
        while settings > 1 and parts[settings - 1].partition("=")[0] in parameters:
            settings -= 1
        told["path"] = ",".join(parts[:settings])
        parts = parts[settings:]
    names = [name for name in parameters if name != "path"]
    for part in parts:
        name, _, value = part.partition("=")
        checked_choice(f"{kind}: setting", name.strip(), names)
        told[name.strip()] = _value(f"{kind}:{name.strip()}", parameters[name.strip()], value)
    return told


def _value(option: str, parameter: Parameter, text: str) -> int | float:
    """A setting's number, of the kind of its default."""
    kind = float if isinstance(parameter.default, float) else int
    try:
        number = kind(text)
        if number >= 0 and number < 1e15:
            return number
    except ValueError:
        pass
    expected = "a number" if kind is float else "a whole number"
    name, default = option.split(":")[1], parameter.default or kind(1)
    raise CheckpointValueError(
        f"{option} is {text!r}; expected {expected} of at least 0. Try {name}={default}."
    )
