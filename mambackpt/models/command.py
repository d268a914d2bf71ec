"""The command ``size``: state and block sizes of models, and what a pool holds of one."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace

from mambackpt.cli import bytes_of, layer_counts, table, whole_number, whole_numbers
from mambackpt.errors import CheckpointValueError
from mambackpt.models.capacity import Capacity
from mambackpt.models.config import from_config
from mambackpt.models.hosts import host_checkpoint_bytes, smallest_chunk
from mambackpt.models.hybrid import HybridModel
from mambackpt.models.layers import KV_DTYPES
from mambackpt.models.presets import PRESETS
from mambackpt.models.slots import balanced_split, host_tier_bytes, slots_per_request

Sizes = dict[str, tuple[float | None, str]]

_LENGTHS, _MAX_LEN = "8000,32000,128000", "262144"
_POOL_ONLY = ("max_len", "seqs", "lengths", "every", "host_tier", "checkpoint_blocks")
_DTYPES = {"recurrent_dtype": "recurrent state", "conv_dtype": "window", "kv_dtype": "attention"}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mambackpt size",
        description="Sizes of hybrid models, side by side where several are named, and what a pool "
        "holds. The bytes are those of one device.",
    )
    say = parser.add_argument
    say("model", nargs="*", help="a preset, a config.json, or a folder with one [the presets]")
    say("--tp", dest="ranks", type=int, help="tensor-parallel ranks")
    say("--dcp", dest="context_ranks", type=int, help="ranks that share a request's tokens")
    say("--pp", dest="stages", type=int, help="pipeline stages, which share the layers")
    say("--spec", type=int, help="draft tokens")
    say("--layers", help="recurrent and attention layers, as 36,12")
    say("--kv-dtype", help=f"dtype of the attention cache: {', '.join(KV_DTYPES)}")
    say("--recurrent-dtype", help="dtype of the recurrent state, such as bf16")
    say("--conv-dtype", help="dtype of the convolution window")
    say("--alignment", dest="checkpoint_alignment", type=int, help="the layers' grid, in tokens")
    say("--block", dest="user_block_size", type=int, help="the block you ask for, in tokens")
    pool = parser.add_argument_group("what a pool holds")
    pool.add_argument("--pool", help="cache of one device, such as 20GB or 16GiB")
    pool.add_argument("--max-len", help=f"tokens of the longest request [{_MAX_LEN}]")
    pool.add_argument("--seqs", help="requests that are to run at once")
    pool.add_argument("--lengths", help=f"of conversations [{_LENGTHS}]")
    pool.add_argument("--host-tier", help="a host tier of SGLang, such as 100GB")
    pool.add_argument("--every", help="blocks between kept states [8]")
    pool.add_argument("--checkpoint-blocks", help="reserved per group [0]")
    say("--json", action="store_true", help="print JSON")
    return parser


def main(argv: Sequence[str]) -> int:
    """Print the sizes of models, or of every preset; ``python -m mambackpt size``.

    >>> main(["qwen3.5-4b", "--alignment", "64", "--json"])  # doctest: +ELLIPSIS
    {"name": "qwen3.5-4b", ... "block_size": 576, ...}
    0

    Returns 0. A refused input raises a CheckpointError.
    """
    args = _parser().parse_args(argv)
    _check_pool(args)
    models = [_model(name, args) for name in args.model or PRESETS]
    pools = [_Pool(model, args) for model in models] if args.pool else []
    if args.json:
        rows = [_as_json(model) for model in models]
        for row, pool in zip(rows, pools, strict=False):
            row["capacity"] = {name: value for name, (value, _) in pool.sizes().items()}
        print(json.dumps(rows[0] if len(args.model) == 1 else rows))
    elif not args.model:
        _print_presets(models)
    else:
        _print_sizes(models, [sizes_of(model) for model in models], args)
        if pools:
            print(f"\nin a pool of {args.pool} on one device:")
            _print_columns(models, [pool.sizes() for pool in pools])
            for pool in pools:
                pool.print_cached()
                pool.print_warnings()
    return 0


def _check_pool(args: argparse.Namespace) -> None:
    """Refuse a pool of no model, and options of a pool without one."""
    if args.pool and not args.model:
        raise CheckpointValueError(
            "--pool is given and no model; expected whose pages fill it. "
            "Try size qwen3.5-27b --pool 20GB."
        )
    for name in _POOL_ONLY:
        if getattr(args, name) is not None and not args.pool:
            raise CheckpointValueError(
                f"--{name.replace('_', '-')} is given without --pool, and says something of a pool "
                "only; expected its bytes. Try --pool 20GB."
            )


def _model(name: str, args: argparse.Namespace) -> HybridModel:
    """The model of this name, served as the options say."""
    model = PRESETS.get(name)
    options = {
        option: value
        for option in (
            *("ranks", "context_ranks", "stages", "spec", "checkpoint_alignment"),
            *("user_block_size", *_DTYPES),
        )
        if (value := getattr(args, option)) is not None
    }
    if args.layers:
        recurrent, attention = layer_counts("--layers", args.layers)
        options |= {"recurrent_layers": recurrent, "attention_layers": attention}
    if model is None:
        return from_config(name, **options)
    if options:
        model = replace(model, **options, source="computed from its preset")
    return model


def _as_json(model: HybridModel) -> dict[str, object]:
    sizes = {name: value for name, (value, _) in sizes_of(model).items()}
    return asdict(model) | {"layer": type(model.recurrent).__name__} | sizes


def _print_presets(models: Sequence[HybridModel]) -> None:
    print(
        f"{'state bytes':>12} {'token bytes':>11} {'block':>6} {'padding':>8} {'checkpoint':>11}  "
        "preset: source"
    )
    for model in models:
        counted = model.recurrent_layers and model.attention_layers
        whole = f"{model.model_state_bytes / 1e6:,.1f} MB" if counted else "--layers ?"
        print(
            f"{model.state_bytes:>12,} {model.token_bytes:>11,} {model.block_size():>6,} "
            f"{model.padding_percent():>7.2f}% {whole:>11}  {model.name}: {model.source}"
        )


def _print_sizes(
    models: Sequence[HybridModel], sizes: Sequence[Sizes], args: argparse.Namespace
) -> None:
    for model in models:
        print(f"{model.name}: {model.source}; on one of {model.ranks} ranks")
        for field, what in _DTYPES.items():
            given = f"--{field.replace('_', '-')}" if getattr(args, field) else _home(model, field)
            print(f"  {what}: {getattr(model, field)} ({given})")
        for note in model.notes:
            print(f"  {note}")
        if model.context_ranks > 1:
            print(
                f"  assumed: {model.context_ranks} ranks share the tokens of the attention cache, "
                "and each holds whole states"
            )
        if model.stages > 1:
            print(f"  assumed: {model.stages} stages share the layers evenly")
    _print_columns(models, sizes)
    for model, of in zip(models, sizes, strict=True):
        if of["model_state_bytes"][0] is None:
            print(
                f"{model.name}: how many layers it has is not known here, so sizes of all layers "
                "are left out. Try --layers RECURRENT,ATTENTION."
            )


def _home(model: HybridModel, field: str) -> str:
    """Where a dtype comes from that no option gave."""
    return "the preset's" if model.name in PRESETS else "see below"


def _print_columns(models: Sequence[HybridModel], sizes: Sequence[Sizes]) -> None:
    """Print sizes of models side by side: a column each, and the words of a row after them."""
    rows = [[*(model.name for model in models), ""]] if len(models) > 1 else []
    for name in sizes[0]:
        values = [of[name][0] for of in sizes]
        beside = _mb(name, values[0]) if len(values) == 1 else ""
        if any(value is not None for value in values):
            rows.append([*map(_said, values), f"  {sizes[0][name][1]}{beside}"])
    widths = [max(16, *(len(row[at]) for row in rows)) for at in range(len(models))]
    for row in rows:
        cells = (cell.rjust(width) for cell, width in zip(row, widths, strict=False))
        print(f"{'  '.join(cells)}{row[-1]}".rstrip())


def _said(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"


def sizes_of(model: HybridModel) -> Sizes:
    """Return each size with its words; None for what needs layer counts that are not known."""
    window = model.recurrent.conv_bytes(model.ranks, model.spec, model.conv_dtype)
    counted = bool(model.recurrent_layers and model.attention_layers)
    state, block = model.state_bytes, model.scheduler_block
    whole = model.model_state_bytes if counted else None
    return {
        "state_bytes": (state, "bytes of one state of one recurrent layer"),
        "conv_bytes": (window, "  of them the convolution window"),
        "recurrent_bytes": (state - window, "  of them the recurrent state"),
        "token_bytes": (model.token_bytes, "bytes one token leaves in one attention layer"),
        "state_in_tokens": (
            round(state / model.token_bytes),
            "tokens of one attention layer that cost as much as a state",
        ),
        "block_size": (model.block_size(), "tokens of a block"),
        "page_bytes": (model.page_bytes(), "bytes of a page (one block of one layer)"),
        "padding_percent": (
            round(model.padding_percent(), 2),
            "percent of a state that its page pads",
        ),
        "shortest_hit": (
            block + 1,
            "tokens of the shortest prompt that can hit, with hash units of a block",
        ),
        "request_bytes": (model.request_bytes(), "bytes a request holds in one recurrent layer"),
        "model_state_bytes": (whole, "bytes of a checkpoint of all recurrent layers"),
        "states_per_gb": (
            10**9 // whole if whole else None,
            "checkpoints of all recurrent layers in a GB",
        ),
        "model_token_bytes": (
            model.model_token_bytes if counted else None,
            "bytes one token leaves in all attention layers",
        ),
        "exchange_rate": (
            round(model.exchange_rate) if counted else None,
            "tokens of attention cache that cost as much as a checkpoint",
        ),
        "smallest_chunk": (smallest_chunk([block]), "tokens of the smallest chunk of a connector"),
        "llama_cpp_host_bytes": (
            _llama_cpp_bytes(model) if counted else None,
            "bytes of host memory of one llama.cpp slot: 32 checkpoints in fp32",
        ),
    }


def _llama_cpp_bytes(model: HybridModel) -> int:
    """Window and state are fp32 there, and one process holds all ranks and stages."""
    layers = model.recurrent_layers or 0
    return host_checkpoint_bytes(layers * model.recurrent.state_bytes(1, 0, "fp32", "fp32"))


def _mb(name: str, size: object) -> str:
    """A size in MB, beside the bytes."""
    named = name.endswith("_bytes") or name == "bytes_per_id"
    return f", {size / 1e6:,.2f} MB" if named and isinstance(size, int) and size >= 10**5 else ""


class _Pool:
    """A pool of one device, and what it holds of a model."""

    def __init__(self, model: HybridModel, args: argparse.Namespace) -> None:
        self.model, self.seqs = model, args.seqs and whole_number("--seqs", args.seqs)
        self.pool_bytes = bytes_of("--pool", args.pool)
        self.max_len = whole_number("--max-len", args.max_len or _MAX_LEN)
        self.lengths = whole_numbers("--lengths", args.lengths or _LENGTHS)
        self.host_tier = args.host_tier and bytes_of("--host-tier", args.host_tier)
        self.every = whole_number("--every", args.every or "8")
        kept = whole_number("--checkpoint-blocks", args.checkpoint_blocks or "0", least=0)
        self.capacity: Capacity = model.capacity(
            self.pool_bytes, self.max_len, checkpoint_blocks=kept
        )

    def sizes(self) -> Sizes:
        """Every size with its words."""
        holds, model = self.capacity, self.model
        slots = slots_per_request("extra_buffer")
        states, _ = balanced_split(
            self.pool_bytes, slots=slots, drafts=model.spec, state_bytes=model.model_state_bytes,
            tokens=self.max_len, token_bytes=model.model_token_bytes,
        )  # fmt: skip
        longest = f"a live request of {self.max_len:,} tokens"
        rows: Sizes = {
            "attention_groups": (holds.attention_groups, "groups of attention layers"),
            "recurrent_groups": (holds.recurrent_groups, "groups of recurrent layers"),
            "bytes_per_id": (holds.bytes_per_id, "bytes of a block id"),
            "ids": (holds.ids, "block ids, one of them the null block"),
            "live_recurrent_ids": (
                holds.live_recurrent_ids,
                "ids that any live request takes for its states",
            ),
            "live_ids": (holds.live_ids(self.max_len), f"ids of {longest}"),
            "state_ids": (holds.recurrent_groups, "ids of one kept state"),
            "state_in_tokens": (
                round(holds.state_in_tokens),
                "tokens of attention cache that take as many ids as a kept state",
            ),
            "concurrency": (round(holds.concurrency, 6), "maximum concurrency, as the log has it"),
            "logged_tokens": (holds.logged_tokens, "GPU KV cache size in tokens, as logged"),
            "earlier_logged_tokens": (
                holds.earlier_logged_tokens,
                "the same line of older releases (times concurrency it is no length)",
            ),
            "slots_per_request": (
                slots,
                "state slots of a running request (SGLang, extra_buffer; "
                f"{slots_per_request('no_buffer')} with no_buffer)",
            ),
            "balanced_state_bytes": (
                states,
                f"bytes for states in a balanced split for {self.max_len:,} tokens (SGLang)",
            ),
        }
        if self.host_tier:
            attention, states = host_tier_bytes(self.host_tier)
            rows["host_tier_bytes"] = (
                attention + states,
                f"bytes of a host tier of that size (SGLang): {states:,} for states, and again "
                "for attention",
            )
        if self.seqs:
            rows["live_at_once"] = (
                holds.live_requests(self.max_len),
                f"requests of {self.max_len:,} tokens that can run at once; asked: {self.seqs:,}",
            )
        return rows

    def print_cached(self) -> None:
        """Print how many conversations stay cached, by length and placement."""
        holds = self.capacity
        rows: list[list[object]] = []
        for tokens in self.lengths:
            blocks = tokens // holds.block
            if tokens > self.max_len:
                rows.append([tokens, *["above --max-len"] * 3])
            elif blocks:
                counts = [1, -(-blocks // self.every), blocks]
                rows.append([tokens, *(holds.cached_requests(tokens, n) for n in counts)])
            else:
                rows.append([tokens, *["below a block"] * 3])
        header = ["tokens", "last state alone", f"every {self.every} blocks", "every block"]
        print(f"\n{self.model.name}: conversations that stay cached at once, by states kept")
        print(table(header, rows, words=0))

    def print_warnings(self) -> None:
        """Say what does not fit."""
        holds = self.capacity
        if holds.block > self.max_len:
            print(
                f"No prompt can hit: a block has {holds.block:,} tokens, --max-len is "
                f"{self.max_len:,}."
            )
        least = holds.live_ids(1)
        if self.seqs and holds.admitted_ids < self.seqs * least:
            print(
                f"Requests will wait for ids, not for bytes: {self.seqs:,} of the shortest take "
                f"{self.seqs * least:,} ids, and there are {holds.admitted_ids:,}. "
                f"Try --seqs {holds.admitted_ids // least}."
            )
