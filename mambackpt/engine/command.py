"""The command ``lockstep``: run branching chats under named rules and report broken promises."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from mambackpt.cli import whole_number
from mambackpt.engine.chats import branching_chats
from mambackpt.engine.report import Report, check_lockstep, describe_history
from mambackpt.engine.settings import Settings
from mambackpt.engine.variants import VARIANTS
from mambackpt.errors import CheckpointValueError


def _retention(text: str) -> int | None:
    return None if text in ("none", "dense") else int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mambackpt lockstep",
        description="Run seeds of branching chats through the engine model and compare what every "
        "key promises with what its block holds. Exit status 1 when a promise is broken.",
    )
    add = parser.add_argument
    add("--engine", choices=["vllm", "llama.cpp"], help="[vllm]; llama.cpp has its own options")
    add(
        "--variant",
        default="vllm-0.33",
        choices=list(VARIANTS),
        help="the scheduler's rules, by name",
    )
    add("--block", type=int, default=64, help="tokens per Mamba block")
    add("--hash", type=int, default=16, help="tokens per hash unit")
    add(
        "--attention-block",
        type=int,
        metavar="TOKENS",
        help="tokens per attention block (default: the Mamba block, as the engine has it)",
    )
    add("--alignment", type=int, default=16, help="grid on which the kernel can emit a state")
    add("--retention", type=_retention, default=0, help="0, 'none' (dense), or tokens per state")
    add("--budget", type=int, default=300, help="tokens per step")
    add("--drop", action="store_true", help="speculative decoding drops the last matched unit")
    add("--no-checkpoints", action="store_true", help="without checkpoints inside a chunk")
    add("--groups", type=int, default=1, help="recurrent cache groups")
    add("--seeds", default="30", help="how many chats, of 24 requests each")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def _as_json(report: Report) -> str:
    history = [
        {"name": r.name, "prompt": list(r.prompt), "output": list(r.forced) or r.output}
        for r in report.smallest or ()
    ]
    settings = {**asdict(report.settings), "variant": str(report.settings.variant)}
    return json.dumps(
        {
            "settings": settings,
            "counts": asdict(report.counts),
            "smallest": history,
            "violations": [asdict(violation) for violation in report.broken],
        }
    )


def _as_text(report: Report) -> str:
    counts = report.counts
    lines = [
        f"{counts.requests} requests, {counts.hits} hits, {counts.reused_tokens} tokens reused, "
        f"{counts.prefill_chunks} prefill chunks",
        f"{counts.wrong_restores} hits restored a wrong state",
        f"{counts.mislabelled} blocks carry a key that they do not hold, "
        f"{counts.inherited} more inherited that from a wrong restore",
    ]
    if report.smallest:
        lines += ["", "The smallest history that leads there:"]
        lines += [f"  {line}" for line in describe_history(report.smallest)]
        lines += [f"  {violation}" for violation in report.broken]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 1 when there are violations.

    >>> main(["--seeds", "2", "--variant", "keep-the-stop"])  # doctest: +ELLIPSIS
    48 requests, ... hits, ... tokens reused, ... prefill chunks
    0 hits restored a wrong state
    0 blocks carry a key that they do not hold, 0 more inherited that from a wrong restore
    0

    Raises CheckpointValueError for sizes that contradict each other.
    """
    given = _parser().parse_args(argv)
    if given.block % given.hash:
        raise CheckpointValueError(
            f"--block is {given.block} and --hash {given.hash}; expected a multiple of the hash "
            f"unit. Try --block {-(-given.block // given.hash) * given.hash}."
        )
    settings = Settings(
        mamba_block_size=given.block,
        hash_block_size=given.hash,
        attention_block_size=given.attention_block,
        checkpoint_alignment=given.alignment,
        internal_checkpoints=not given.no_checkpoints,
        drop_eagle_block=given.drop,
        retention=given.retention,
        recurrent_groups=given.groups,
        budget=given.budget,
        max_running=1,
        variant=given.variant,
    )
    seeds = range(whole_number("--seeds", given.seeds))
    report = check_lockstep(map(branching_chats, seeds), settings)
    print(_as_json(report) if given.json else _as_text(report))
    return 1 if report.violations else 0
