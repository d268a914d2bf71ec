"""The command ``review``: a page for a design review of one model and its traffic."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote

from mambackpt.cli import bytes_of, layer_counts, whole_number, whole_numbers
from mambackpt.errors import CheckpointValueError
from mambackpt.models import BootLog, read_boot_log
from mambackpt.replay import PrefillRate, Trace, is_generated, open_trace
from mambackpt.review.pack import build_review, writable
from mambackpt.review.question import LENGTHS, Question
from mambackpt.why import common_budget, find_model, kernel_grid

_LENGTHS = ",".join(map(str, LENGTHS))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mambackpt review",
        description="Write a review of one model and its traffic: a page that needs no other file, "
        "the same as Markdown, and its figures as SVG and PDF.",
    )
    add = parser.add_argument
    add("--model", help="a preset or a config.json [what the log tells]")
    add("--log", help="the engine's boot log: its block, pool and longest request")
    add("--trace", default="chat:2000", help="a trace file, or a generator's size [chat:2000]")
    add("--seeds", help="how many of a generator [3]")
    add("--layers", help="recurrent and attention layers of the model, such as 48,16")
    add("--block", help="tokens per block [the model's]")
    add("--hash", help="tokens per hash unit [the block]")
    add("--alignment", help="grid of the kernel, 0 if it cannot export [the model's kernel]")
    add("--drop", action="store_true", help="speculative decoding drops a block")
    add("--budget", help="tokens of one prefill step [8192, or a larger block]")
    add("--pool", help="cache of one device, such as 20GB [the log's, or unlimited]")
    add("--max-len", help="tokens of the longest request [the log's, or 262144]")
    add("--lengths", default=_LENGTHS, help=f"prompts that are drawn [{_LENGTHS}]")
    add("--histories", default="20", help="random chats of the lockstep check [20]")
    add("--prefill-rate", help="your engine's prompt tokens per second, such as 12000,3000")
    add("--out", required=True, type=Path, help="folder")
    return parser


def main(argv: Sequence[str]) -> int:
    """Write a review and print the paths; ``python -m mambackpt review``."""
    args = _parser().parse_args(argv)
    question = _question(args)
    writable(args.out)
    command = ["python -m mambackpt review " + " ".join(map(quote, _without_out(argv)))]
    review = build_review(question, command=command)
    for path in review.save(args.out):
        print(path)
    return 0


def _question(args: argparse.Namespace) -> Question:
    assumed: list[str] = []
    log = None
    if args.log is not None:
        try:
            log = read_boot_log(Path(args.log).read_text(errors="replace"))
        except OSError as error:
            raise CheckpointValueError(
                f"--log is {args.log!r} ({error.strerror}); expected a boot log. Try --model."
            ) from error
        assumed += [f"The log: {sentence}" for sentence in log.contradictions]
    if args.model is not None:
        model = find_model(args.model)
    elif log is not None and log.settings:
        model = log.settings[0]
        assumed.append(f"The model is the closest of {len(log.settings)} that the log fits.")
    else:
        raise CheckpointValueError(
            "neither --model nor a --log that tells the model is given; expected one. "
            "Try --model qwen3.5-27b."
        )
    if args.layers:
        recurrent, attention = layer_counts("--layers", args.layers)
        model = replace(model, recurrent_layers=recurrent, attention_layers=attention)
    log = log or BootLog()
    block = _number("--block", args.block) or log.block
    unit = _number("--hash", args.hash) or log.hash_unit
    pool = bytes_of("--pool", args.pool) if args.pool else log.pool_bytes
    longest = _number("--max-len", args.max_len) or log.max_len or 262_144
    if unit is None:
        assumed.append("The hash unit is the block: no --hash was given.")
    if args.alignment is None:
        assumed.append(f"The kernel: {kernel_grid(model)[1]}.")
    if not pool:
        assumed.append("Memory is unlimited: no --pool was given.")
    assumed += model.notes
    if not (model.recurrent_layers and model.attention_layers) and pool:
        raise CheckpointValueError(
            f"--pool is given and the layers of {model.name} are not known; expected both counts. "
            "Try --layers RECURRENT,ATTENTION."
        )
    return Question(
        model=model,
        traces=_traces(args),
        block=block,
        hash_block=unit,
        alignment=None if args.alignment is None else _number("--alignment", args.alignment, 0),
        drop=args.drop,
        budget=_budget(args.budget, block or model.block_size()),
        pool_bytes=pool or None,
        max_len=longest,
        lengths=whole_numbers("--lengths", args.lengths),
        rate=PrefillRate.of(args.prefill_rate) if args.prefill_rate else None,
        histories=whole_number("--histories", args.histories),
        assumed=assumed,
    )


def _budget(text: str | None, block: int) -> int:
    """The tokens of one step: those given, or the common ones."""
    budget = whole_number("--budget", text or str(common_budget(block)))
    if budget < block:
        raise CheckpointValueError(
            f"--budget is {budget:,} and the block {block:,}; expected a step that holds a block. "
            f"Try --budget {block}."
        )
    return budget


def _number(option: str, text: str | None, least: int = 1) -> int | None:
    return None if text is None else whole_number(option, text, least=least)


def _traces(args: argparse.Namespace) -> list[Trace]:
    """The trace, or one for each seed of a generator."""
    if is_generated(args.trace):
        seeds = range(whole_number("--seeds", args.seeds or "3"))
        return [open_trace(args.trace, seed=seed)[0] for seed in seeds]
    if args.seeds is not None:
        raise CheckpointValueError(
            f"--seeds is given and {args.trace} is a file; expected a generator. "
            "Try leaving it out: the spread is over the tenths of the trace."
        )
    return [open_trace(args.trace)[0]]


def _without_out(argv: Sequence[str]) -> list[str]:
    """The words of the command without the folder, on which the page does not depend."""
    words, skip = [], False
    for word in argv:
        if skip:
            skip = False
        elif word == "--out":
            skip = True
        elif not word.startswith("--out="):
            words.append(word)
    return [*words, "--out", "review"]
