"""The command ``log``: what the boot log of an engine tells."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from mambackpt.cli import table, whole_number
from mambackpt.errors import CheckpointValueError
from mambackpt.models.boot_log import BootLog, read_boot_log
from mambackpt.models.capacity import Capacity
from mambackpt.models.config import from_config
from mambackpt.models.hybrid import HybridModel
from mambackpt.models.presets import PRESETS

_SHOWN = 6


def main(argv: Sequence[str]) -> int:
    """Read a boot log and print what it says, what it was started with, and what follows.

    Returns 1 where the log contradicts itself, else 0.
    """
    parser = argparse.ArgumentParser(
        prog="mambackpt log",
        description="Read an engine's boot log: the settings that give its block and padding, what "
        "contradicts itself, and what follows. Exit status 1 where something contradicts itself.",
    )
    parser.add_argument("file", help="a log, or - for standard input")
    parser.add_argument("--model", help="what was served: a preset or a config.json [any preset]")
    parser.add_argument("--chats", help="conversations that are to stay cached")
    parser.add_argument("--tokens", default="8000", help="tokens of such a conversation [8000]")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    models = [PRESETS.get(args.model) or from_config(args.model)] if args.model else []
    log = read_boot_log(_text(args.file), models)
    tokens = whole_number("--tokens", args.tokens)
    chats = whole_number("--chats", args.chats) if args.chats else None
    wrong = [*log.contradictions, *_too_few(log, chats, tokens)]
    if args.json:
        print(json.dumps(_as_json(log, wrong)))
        return 1 if wrong else 0
    print("The log says:")
    print("\n".join(f"  {line}" for line in _said(log)))
    print("\n".join(_started_with(log)))
    print("What follows:")
    print("\n".join(f"  {line}" for line in _follows(log, tokens)))
    if wrong:
        print("What cannot be right:")
        print("\n".join(f"  {line}" for line in wrong))
    return 1 if wrong else 0


def _text(file: str) -> str:
    if file == "-":
        return sys.stdin.read()
    try:
        return Path(file).read_text(errors="replace")
    except OSError as error:
        raise CheckpointValueError(
            f"{file} cannot be read ({error.strerror}); expected a boot log. "
            "Try 'vllm serve ... 2>&1 | python -m mambackpt log -'."
        ) from error


def _said(log: BootLog) -> Iterator[str]:
    pool = None if log.pool_bytes is None else log.pool_bytes / 2**30
    sizes = {
        "tokens of a block": log.block,
        "percent of a state that its page pads": log.padding,
        "GiB of cache on the worker with the least": pool,
        "tokens of the cache, as logged": log.cache_tokens,
        "tokens of the longest request": log.max_len,
        "requests of that length at once, as logged": log.concurrency,
        "requests at once at most": log.seqs,
        "groups of layers": len(log.groups) or None,
        "tensor-parallel ranks": log.ranks,
        "draft tokens": log.drafts,
        "tokens of a hash unit": log.hash_unit,
        "tokens of the scheduler's block": log.scheduler_block,
    }
    for words, size in sizes.items():
        if size is not None:
            yield f"{size:>14,.2f}  {words}" if isinstance(size, float) else f"{size:>14,}  {words}"
    if log.served:
        yield f"{'':>14}  the model is {log.served}"


def _started_with(log: BootLog) -> Iterator[str]:
    if log.block is None:
        yield "Which model was served cannot be told: the log does not say the block's size."
        return
    found = log.settings
    padding = "" if log.padding is None else f" and {log.padding:.2f} %"
    if not found:
        yield (
            f"No known model, dtype, draft tokens and ranks give {log.block:,} tokens{padding}. "
            "Try --model with its config.json."
        )
        return
    yield f"What gives {log.block:,} tokens{padding} ({len(found)} ways, closest first):"
    header = ["model", "state", "window", "attention", "grid", "drafts", "ranks", "padding %"]
    rows: list[list[object]] = [
        [
            m.name, m.recurrent_dtype, m.conv_dtype, _kv(m), m.checkpoint_alignment or "-", m.spec,
            m.ranks, f"{m.padding_percent():.4f}", m.state_bytes,
        ]
        for m in found[:_SHOWN]
    ]  # fmt: skip
    for line in table([*header, "state bytes"], rows, words=4).splitlines():
        yield f"  {line}"
    if len(found) > _SHOWN:
        yield f"  and {len(found) - _SHOWN} more. Try --model to keep to one."
    if log.served and not any(log.names(model) for model in found):
        yield f"  None of them is {log.served}. Try --model with its config.json."


def _kv(model: HybridModel) -> str:
    return "int8/fp8 per token, head" if "per_token" in model.kv_dtype else model.kv_dtype


def _follows(log: BootLog, tokens: int) -> Iterator[str]:
    if log.block is not None:
        unit = log.hash_unit or log.scheduler_block or log.block
        told = "" if log.hash_unit else ", if the hash unit is the block (the log does not say)"
        yield f"{unit + 1:,} tokens are the shortest prompt that can hit{told}."
    holds = log.capacity
    if holds is None:
        yield (
            "How much fits cannot be told without the lines on memory and length, and a model "
            "whose layers are known."
        )
    else:
        yield from _what_fits(log, holds, tokens)
    name = log.settings[0].name if log.settings else "MODEL"
    has_pool = log.pool_bytes is not None and log.pool_bytes > 0
    pool = f" --pool {(log.pool_bytes or 0) / 2**30:.2f}GiB" if has_pool else ""
    longest = f" --max-len {log.max_len}" if log.max_len and pool else ""
    options = _options(log.settings[0]) if log.settings else ""
    yield f"More: python -m mambackpt size {name}{options}{pool}{longest}"


def _what_fits(log: BootLog, holds: Capacity, tokens: int) -> Iterator[str]:
    served = log.settings[0]
    drafting = ", draft layers not counted" if served.spec else ""
    yield (
        f"With the layers of {served.name}, the first above ({holds.recurrent_layers} recurrent, "
        f"{holds.attention_layers} attention{drafting}):"
    )
    assert log.max_len is not None
    yield (
        f"{holds.ids:,} block ids of {holds.bytes_per_id:,} bytes; a live request takes "
        f"{holds.live_recurrent_ids} for its states and {holds.attention_groups} for each "
        f"{holds.block:,} tokens."
    )
    live = holds.live_requests(log.max_len)
    yield f"Requests of {log.max_len:,} tokens that fit at once: {live:,}."
    if log.concurrency and abs(holds.concurrency / log.concurrency - 1) > 0.02:
        yield (
            f"But the log says {log.concurrency:.2f} and these layers make "
            f"{holds.concurrency:.2f}: the model is another, or something else fills its pool."
        )
    if tokens >= holds.block:
        yield (
            f"Conversations of {tokens:,} tokens that stay cached: "
            f"{holds.cached_requests(tokens, 1):,} with their last state alone, "
            f"{holds.cached_requests(tokens, tokens // holds.block):,} with one every block."
        )
    else:
        yield (
            f"Conversations of {tokens:,} tokens leave nothing in the cache: a block has "
            f"{holds.block:,}."
        )


def _options(model: HybridModel) -> str:
    """The options that serve the preset of this name as the log says."""
    preset = PRESETS.get(model.name, model)
    fields = {
        "--recurrent-dtype": "recurrent_dtype", "--conv-dtype": "conv_dtype",
        "--kv-dtype": "kv_dtype", "--spec": "spec", "--tp": "ranks",
        "--alignment": "checkpoint_alignment",
    }  # fmt: skip
    changed = (
        f" {option} {getattr(model, name)}"
        for option, name in fields.items()
        if getattr(model, name) != getattr(preset, name)
    )
    return "".join(changed)


def _too_few(log: BootLog, chats: int | None, tokens: int) -> Iterator[str]:
    """Say where fewer conversations fit than are to stay cached."""
    holds = log.capacity
    if chats and holds and tokens >= holds.block:
        fit = holds.cached_requests(tokens, 1)
        if fit < chats:
            yield (
                f"Of {chats:,} conversations of {tokens:,} tokens {fit:,} stay cached, with their "
                "last state alone: the others are computed anew."
            )
    elif chats and log.concurrency and log.max_len:
        room = round(log.concurrency * log.max_len)
        if room < chats * tokens:
            yield (
                f"{chats:,} conversations of {tokens:,} tokens are {chats * tokens:,} tokens, and "
                f"{log.concurrency:.2f} x {log.max_len:,} = {room:,} fit, states not counted: not "
                "all of them stay cached."
            )


def _as_json(log: BootLog, wrong: Sequence[str]) -> dict[str, object]:
    said = asdict(log)
    del said["models"]
    fields = (
        "name",
        "recurrent_dtype",
        "conv_dtype",
        "kv_dtype",
        "spec",
        "ranks",
        "state_bytes",
        "checkpoint_alignment",
    )
    ways = [{name: getattr(model, name) for name in fields} for model in log.settings]
    capacity = asdict(log.capacity) if log.capacity else None
    return said | {"settings": ways, "capacity": capacity, "contradictions": list(wrong)}
