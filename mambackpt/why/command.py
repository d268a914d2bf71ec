"""The command ``why``: one query, two prompts, or many conversations in one pool."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace

from mambackpt.cli import bytes_of, table, whole_number
from mambackpt.engine import Settings
from mambackpt.errors import CheckpointValueError
from mambackpt.geometry import CacheGeometry
from mambackpt.models import HybridModel
from mambackpt.planner import POSITION_FORMULAS
from mambackpt.replay import PrefillRate
from mambackpt.why.cures import Cure, find_cures
from mambackpt.why.defaults import common_budget, find_model, kernel_grid
from mambackpt.why.kept import positions_in_words
from mambackpt.why.live import LiveVerdict, explain_live
from mambackpt.why.prompts import NEW, HitVerdict, explain_hit
from mambackpt.why.query import tell_query

_PROMPTS_ONLY = ("unique", "rule", "retention", "budget", "live", "pool", "layers", "prefill_rate")
# setting: (the option here, the engine's own words for it)
_OPTIONS = {
    "hash_block_size": ("--hash", "--prefix-match-unit"),
    "budget": ("--budget", "--max-num-batched-tokens"),
    "retention": ("--retention", "prefix_cache_retention_interval"),
    "checkpoint_alignment": ("--alignment", "a prefill kernel that exports on this grid"),
    "shared_prefix_checkpoint": (
        "--shared-prefix-checkpoint",
        "--enable-mamba-shared-prefix-checkpoint",
    ),
    "rule": ("--rule", "another engine's placement"),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mambackpt why",
        description="Why is there no checkpoint for a query (why 8000 --block 1536), or no hit for "
        "a prompt that shares its beginning with an earlier one (why --shared 1500 --unique 700 "
        "--block 528)?",
    )
    add = parser.add_argument
    add("seq_len", type=int, nargs="?", help="one query: tokens after this step")
    add("query_len", type=int, nargs="?", help="one query: tokens of this step [all]")
    add("--shared", help="two prompts: tokens that both begin with")
    add("--unique", help="two prompts: tokens of their own, such as 700 or 700,300 [0]")
    add("--model", help="a preset or a config.json: its block and its kernel's grid")
    add("--block", help="tokens per Mamba block [the model's]")
    add("--hash", help="tokens per hash unit [the block]")
    add("--hit-alignment", help="grid of cache hits [the hash unit]")
    add("--alignment", help="grid of the kernel, or none [the model's kernel; without one, 16]")
    add("--drop", action="store_true", help="speculative decoding drops a block")
    add("--lookahead", default="0", help="tokens a hash looks ahead")
    add("--formula", choices=list(POSITION_FORMULAS), help="one query: of the position [current]")
    add("--budget", help="tokens of one prefill step [8192, or a larger block]")
    add("--retention", help="dense, 0, or keep a state every so many tokens [0]")
    add("--shared-prefix-checkpoint", action="store_true", help="keep a state at a junction")
    add("--rule", help="a placement rule in place of the engine's, such as interval(4096)")
    add("--live", help="so many conversations of this shape in one pool")
    add("--pool", help="bytes of that pool, such as 20GB")
    add("--layers", help="recurrent and attention layers of the model, such as 48,16")
    add("--prefill-rate", help="your engine's prompt tokens per second, such as 12000,3000")
    add("--json", action="store_true")
    return parser


def main(argv: Sequence[str]) -> int:
    """Say why there is no checkpoint, or no hit; exit status 1 where there is none.

    >>> main(["800", "--block", "128", "--hash", "128", "--alignment", "16"])
    The state after 768 tokens is saved 768 tokens into the query, in column 5, and keyed by 768.
    0
    """
    args = _parser().parse_args(argv)
    _check_what_is_asked(args)
    model = _model_of(args)
    geometry, assumed = _geometry_of(args, model)
    if args.seq_len is not None:
        return tell_query(args, geometry, assumed)
    return _tell_prompts(args, model, geometry, assumed)


def _check_what_is_asked(args: argparse.Namespace) -> None:
    """Refuse neither and both questions, and options that the question does not read."""
    if (args.seq_len is None) == (args.shared is None):
        given = "neither" if args.shared is None else "both"
        raise CheckpointValueError(
            f"{given} of a query's length and --shared are given; expected one question. Try why "
            "8000 --block 1536, or why --shared 1500 --unique 700 --block 528."
        )
    if args.seq_len is not None:
        for name in _PROMPTS_ONLY:
            if getattr(args, name) is not None:
                raise CheckpointValueError(
                    f"--{name.replace('_', '-')} is given for one query, which does not read it; "
                    "expected two prompts. Try --shared 1500 in place of the query's length."
                )
    elif args.formula is not None:
        raise CheckpointValueError(
            "--formula is given for two prompts, which the engine room's rules decide; expected "
            "one query. Try leaving it out."
        )
    if (args.live is None) != (args.pool is None):
        raise CheckpointValueError(
            "one of --live and --pool is given; expected both: conversations, and the bytes that "
            "they share. Try --live 8 --pool 20GB."
        )
    if args.live is not None and (args.model is None or args.rule is not None):
        raise CheckpointValueError(
            f"--live is given {'with --rule' if args.rule else 'without --model'}; expected a "
            "model whose pages fill the pool of the engine room. Try --model qwen3-next."
        )


def _model_of(args: argparse.Namespace) -> HybridModel | None:
    if args.model is None:
        if args.layers is not None:
            raise CheckpointValueError(
                "--layers is given without --model; expected a model whose layers these are. "
                "Try --model qwen3.5-4b --layers 24,8."
            )
        return None
    model = find_model(args.model)
    if args.layers is not None:
        counts = args.layers.split(",")
        if len(counts) != 2:
            raise CheckpointValueError(
                f"--layers is {args.layers!r}; expected recurrent and attention layers with a "
                "comma between them. Try --layers 48,16."
            )
        recurrent, attention = (whole_number("--layers", count) for count in counts)
        model = replace(model, recurrent_layers=recurrent, attention_layers=attention)
    return model


def _geometry_of(args: argparse.Namespace, model: HybridModel | None) -> tuple[CacheGeometry, str]:
    """The sizes, and in a sentence those that nobody gave."""
    said = []
    if args.block is None and model is None:
        raise CheckpointValueError(
            "--block is not given, nor is --model; expected the tokens of a block. "
            "Try --block 528, or --model qwen3.5-4b."
        )
    block = whole_number("--block", args.block) if args.block else model.block_size()  # type: ignore[union-attr]
    if not args.block and model is not None:
        said.append(f"block {block:,} (of {model.name})")
    unit = whole_number("--hash", args.hash) if args.hash else block
    if not args.hash:
        said.append(f"hash unit {unit:,} (the block)")
    hits = whole_number("--hit-alignment", args.hit_alignment) if args.hit_alignment else unit
    for option, size in (("--block", block), ("--hit-alignment", hits)):
        if size % unit:
            raise CheckpointValueError(
                f"{option} is {size} and --hash {unit}; expected a multiple of the hash unit. "
                f"Try {option} {-(-size // unit) * unit}."
            )
    grid, words = kernel_grid(model)
    if args.alignment is None:
        said.append(words)
    else:
        exports = args.alignment != "none"
        grid = whole_number("--alignment", args.alignment) if exports else None
    if args.seq_len is None and args.rule is None and args.retention is None:
        said.append("retention 0 (the prompt's last boundary and junctions)")
    if args.seq_len is None and args.budget is None:
        budget = common_budget(block)
        said.append(f"budget {budget:,}" + " (a block)" * (budget == block))
    lookahead = whole_number("--lookahead", args.lookahead, least=0)
    geometry = CacheGeometry(unit, block, grid, hits, args.drop, lookahead)
    sentence = f"Not given, so as vllm 0.33.0 has it: {', '.join(said)}." if said else ""
    return geometry, sentence


def _settings_of(args: argparse.Namespace, geometry: CacheGeometry) -> Settings:
    g, text = geometry, args.retention or "0"
    R = None if text == "dense" else whole_number("--retention", text, least=0)
    if R and R % g.M:
        raise CheckpointValueError(
            f"--retention is {R} with a block of {g.M}; expected dense, 0 or a multiple of the "
            f"block. Try --retention {-(-R // g.M) * g.M}."
        )
    return Settings(
        mamba_block_size=g.M,
        hash_block_size=g.H,
        checkpoint_alignment=g.A,
        cache_hit_alignment_tokens=g.U,
        drop_eagle_block=g.drop_eagle_block,
        num_hash_lookahead_tokens=g.num_hash_lookahead_tokens,
        retention=R,
        shared_prefix_checkpoint=args.shared_prefix_checkpoint,
        budget=whole_number("--budget", args.budget or str(common_budget(g.M))),
        max_running=1,
    )


def _lengths_of(args: argparse.Namespace) -> tuple[int, int, int]:
    """First and second prompt, and what they share."""
    shared = whole_number("--shared", args.shared, least=0)
    own = [whole_number("--unique", part, least=0) for part in (args.unique or "0").split(",")]
    if len(own) > 2 or not shared + min(own):
        raise CheckpointValueError(
            f"--shared is {args.shared} and --unique {args.unique or 0}; expected two prompts of "
            "at least one token. Try --shared 1500 --unique 700,300."
        )
    return shared + own[0], shared + own[-1], shared


def _tell_prompts(
    args: argparse.Namespace, model: HybridModel | None, geometry: CacheGeometry, assumed: str
) -> int:
    first, second, shared = _lengths_of(args)
    settings = _settings_of(args, geometry)
    rate = PrefillRate.of(args.prefill_rate) if args.prefill_rate is not None else None
    verdict = explain_hit(first, second, settings, shared=shared, rule=args.rule)
    cures = find_cures(first, second, settings, shared=shared, rule=args.rule)
    live = None
    if args.live is not None and model is not None:
        live = explain_live(
            *(first, second, shared, settings),
            conversations=whole_number("--live", args.live),
            model=model,
            pool_bytes=bytes_of("--pool", args.pool),
        )
    if args.json:
        print(json.dumps(_as_json(verdict, cures, live, rate)))
    else:
        print("\n".join(_in_words(verdict, cures, rate, settings, assumed)))
        if live is not None:
            print("\n".join(_live_in_words(live, second, rate)))
    return 0 if verdict.joint else 1


def _in_words(
    verdict: HitVerdict,
    cures: list[Cure],
    rate: PrefillRate | None,
    settings: Settings,
    assumed: str,
) -> list[str]:
    v = verdict
    vetoes = {cause: lost for cause, lost in v.causes.items() if cause != NEW and lost}
    because = ", ".join(f"{cause} {lost:,}" for cause, lost in vetoes.items()) or "nothing"
    timed = "" if rate is None else f": {rate.words(v.recomputed)} to the first token"
    chunks = f"{v.chunks} chunk{'s' * (v.chunks > 1)}"
    rows = [
        ["states kept by the first", f"{positions_in_words(v.states)} ({chunks})"],
        ["attention matches", f"{v.attention:,} (what a router or a metric believes)"],
        ["joint hit", f"{v.joint:,} (what can be resumed)"],
        ["lost to", because],
        ["second computes", f"{v.recomputed:,} of {v.second:,} tokens{timed}"],
        ["a third such prompt", f"resumes after {v.third:,}"],
    ]
    if rate is not None:
        matched = v.second - v.attention
        rows.insert(5, ["were the match enough", f"{matched:,} tokens: {rate.words(matched)}"])
    own = f"{v.first - v.shared:,}"
    own += f" and {v.second - v.shared:,}" if v.second != v.first else ""
    lines = [f"Two prompts share {v.shared:,} tokens and have {own} of their own."]
    lines += [f"  {name:<25}{said}" for name, said in rows]
    lines += _cures_in_words(v, cures, rate, settings)
    if rate is not None:
        lines.append(f"Seconds are computed tokens over the {rate} that you gave, and no more.")
    return [*lines, assumed] if assumed else lines


def _change(name: str, value: object) -> str:
    option, _ = _OPTIONS[name]
    if value is True:
        return option
    none = {"retention": "dense", "checkpoint_alignment": "none"}
    return f"{option} {none.get(name, '') if value is None else value}"


def _cures_in_words(
    verdict: HitVerdict, cures: list[Cure], rate: PrefillRate | None, settings: Settings
) -> list[str]:
    if not verdict.lost:
        return []
    if not cures:
        M = settings.mamba_block_size
        tried = "No hash unit, budget, retention, kernel grid or rule that was tried"
        if verdict.best > verdict.joint or verdict.shared >= M:
            return [f"{tried} resumes deeper."]
        return [
            f"{tried} helps: {verdict.shared:,} shared tokens lie below a block of {M:,}. What "
            "does is a smaller block (a smaller state: 16 bits, more ranks), or a longer shared "
            "prefix."
        ]
    header = ["cheapest settings that resume", "states", "chunks", "computes", "helps"]
    rows = []
    for cure in cures:
        changed = " ".join(_change(name, value) for name, value in cure.changes.items())
        helps = "only the third prompt" if cure.third else "the very next prompt"
        timed = "" if rate is None else f", {rate.words(cure.recomputed)}"
        rows.append([changed, cure.states, cure.chunks, cure.recomputed, helps + timed])
    named = dict.fromkeys(name for cure in cures for name in cure.changes)
    words = "; ".join(f"{_OPTIONS[name][0]} is {_OPTIONS[name][1]}" for name in named)
    lines = table(header, rows).splitlines()
    return [*(f"  {line}" for line in lines), f"  (states and chunks of one prompt; {words})"]


def _live_in_words(live: LiveVerdict, second: int, rate: PrefillRate | None) -> list[str]:
    count = len(live.joint)
    least = min(live.joint)
    lines = [
        f"{count:,} such conversations in a pool of {live.ids:,} block ids: {live.intact:,} of "
        f"{count:,} second prompts resume after {live.alone:,} tokens, as they would alone."
    ]
    if live.intact < count:
        gone = sum(a > j for a, j in zip(live.attention, live.joint, strict=True))
        lines.append(
            f"The others resume after {least:,} at the least: state evicted for {gone:,}, "
            f"attention evicted for {count - live.intact - gone:,}. Up to {live.most:,} "
            "conversations lose nothing."
        )
        if rate is not None:
            lines.append(f"The worst of them computes {rate.words(second - least)}.")
    return lines


def _as_json(
    verdict: HitVerdict, cures: list[Cure], live: LiveVerdict | None, rate: PrefillRate | None
) -> dict[str, object]:
    said: dict[str, object] = asdict(verdict) | {
        "recomputed": verdict.recomputed,
        "lost": verdict.lost,
        "veto": verdict.veto,
        "cures": [asdict(cure) for cure in cures],
    }
    if live is not None:
        said["live"] = asdict(live) | {"intact": live.intact}
    if rate is not None:
        low, high = rate.seconds(verdict.recomputed)
        said |= {"seconds_low": low, "seconds_high": high}
    return said
