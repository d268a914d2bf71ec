"""The command ``size``: state and block sizes of a model."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace

from mambackpt.models.config import from_config
from mambackpt.models.hybrid import HybridModel
from mambackpt.models.presets import PRESETS


def main(argv: Sequence[str]) -> int:
    """Print the sizes of one model, or of every preset; ``python -m mambackpt size``.

    >>> main(["qwen3.5-4b", "--alignment", "64", "--json"])  # doctest: +ELLIPSIS
    {"name": "qwen3.5-4b", ... "block_size": 576, ...}
    0

    Returns 0. A refused input raises a CheckpointError.
    """
    parser = argparse.ArgumentParser(prog="mambackpt size", description="Sizes of a hybrid model.")
    say = parser.add_argument
    say("model", nargs="?", help="a preset, or the path of a config.json [list the presets]")
    say("--tp", dest="ranks", type=int, help="tensor-parallel ranks")
    say("--spec", type=int, help="draft tokens")
    say("--kv-dtype", help="dtype of the attention cache, such as fp8")
    say("--recurrent-dtype", help="dtype of the recurrent state, such as bf16")
    say("--conv-dtype", help="dtype of the convolution window")
    say("--alignment", dest="checkpoint_alignment", type=int, help="the layers' grid, in tokens")
    say("--block", dest="user_block_size", type=int, help="the block you ask for, in tokens")
    say("--json", action="store_true", help="print JSON")
    given = vars(parser.parse_args(argv))
    name, as_json = given.pop("model"), given.pop("json")
    options = {option: value for option, value in given.items() if value is not None}
    chosen = list(PRESETS.values()) if name is None else [PRESETS.get(name) or from_config(name)]
    if options:
        source = (
            f"computed from {'its preset' if name in PRESETS or name is None else 'its config'}"
        )
        chosen = [replace(model, **options, source=source) for model in chosen]
    if as_json:
        rows = [
            asdict(model)
            | {"layer": type(model.recurrent).__name__}
            | {size: value for size, (value, _) in _sizes(model).items()}
            for model in chosen
        ]
        print(json.dumps(rows if name is None else rows[0]))
    elif name is None:
        print(
            f"{'state bytes':>12} {'token bytes':>11} {'block':>6} {'padding':>8}  preset: source"
        )
        for model in chosen:
            print(
                f"{model.state_bytes:>12,} {model.token_bytes:>11,} {model.block_size():>6,} "
                f"{model.padding_percent():>7.2f}%  {model.name}: {model.source}"
            )
    else:
        print(f"{chosen[0].name}: {chosen[0].source}; on one of {chosen[0].ranks} ranks")
        for value, words in _sizes(chosen[0]).values():
            print(f"{'unknown' if value is None else f'{value:,}':>16}  {words}")
    return 0


def _sizes(model: HybridModel) -> dict[str, tuple[float | None, str]]:
    """Return each size with its words; None for what needs layer counts that are not known."""
    window = model.recurrent.conv_bytes(model.ranks, model.spec, model.conv_dtype)
    counted = bool(model.recurrent_layers and model.attention_layers)
    per_layer = round(model.state_bytes / model.token_bytes)
    return {
        "state_bytes": (model.state_bytes, "bytes of one state of one recurrent layer"),
        "conv_bytes": (window, "  of them the convolution window"),
        "recurrent_bytes": (model.state_bytes - window, "  of them the recurrent state"),
        "token_bytes": (model.token_bytes, "bytes one token leaves in one attention layer"),
        "state_in_tokens": (
            per_layer,
            "tokens of one attention layer that cost as much as a state",
        ),
        "block_size": (model.block_size(), "tokens of a block"),
        "page_bytes": (model.page_bytes(), "bytes of a page (one block of one layer)"),
        "padding_percent": (
            round(model.padding_percent(), 2),
            "percent of a state that its page pads",
        ),
        "request_bytes": (model.request_bytes(), "bytes a request holds in one recurrent layer"),
        "model_state_bytes": (
            model.model_state_bytes if counted else None,
            "bytes of a checkpoint of all recurrent layers",
        ),
        "model_token_bytes": (
            model.model_token_bytes if counted else None,
            "bytes one token leaves in all attention layers",
        ),
        "exchange_rate": (
            round(model.exchange_rate) if counted else None,
            "tokens of attention cache that cost as much as a checkpoint",
        ),
    }
