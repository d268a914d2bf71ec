"""The command ``lockstep --engine llama.cpp``: what states have read, beside what is promised."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from mambackpt.cli import whole_number
from mambackpt.replay.serve.llama_cpp import LlamaCppSettings
from mambackpt.replay.serve.stale import (
    History,
    StaleReport,
    check_states,
    describe_prompts,
    random_prompts,
    watch_states,
)


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status: 1 when a state was wrong.

    >>> main(["--seeds", "5"])
    5 histories, 34 requests, 14 hits, 283 tokens reused
    0 hits restored a state that had read another token
    0
    """
    parser = argparse.ArgumentParser(
        prog="mambackpt lockstep --engine llama.cpp",
        description="Serve random prompts as llama.cpp's server does and compare what every state "
        "has read with the tokens that its place promises. Exit status 1 when one differs. The "
        "sizes are small so that a person can count the smallest history.",
    )
    add = parser.add_argument
    add("--engine", help="llama.cpp")
    add("--batch", default="8", help="tokens of one step [8; the server's default is 2048]")
    add("--ubatch", default="8", help="of a micro-batch [8; the server's default is 512]")
    add("--checkpoints", default="32", help="the most that a context has [32]")
    add("--min-step", default="8192", help="least distance of checkpoints [8192]")
    add("--no-host-cache", action="store_true", help="one context only")
    add("--seeds", default="2000", help="how many histories, of four to twelve prompts each [2000]")
    add("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    settings = LlamaCppSettings(
        batch=whole_number("--batch", options.batch),
        ubatch=whole_number("--ubatch", options.ubatch),
        checkpoints=whole_number("--checkpoints", options.checkpoints, least=0),
        min_step=whole_number("--min-step", options.min_step, least=0),
        host_cache=not options.no_host_cache,
    )
    longest = max(60, settings.batch + 2 * settings.ubatch)
    seeds = range(whole_number("--seeds", options.seeds))
    report = check_states((random_prompts(seed, longest) for seed in seeds), settings)
    print(json.dumps(asdict(report)) if options.json else _as_text(report))
    return 1 if report.wrong else 0


def _as_text(report: StaleReport) -> str:
    lines = [
        f"{report.histories} histories, {report.requests} requests, {report.hits} hits, "
        f"{report.reused_tokens} tokens reused",
        f"{report.wrong} hits restored a state that had read another token",
    ]
    if report.smallest:
        lines += ["", "The smallest history in which a state outlives a resume right below it:"]
        lines += _history(report.smallest, report.settings)
    if report.from_nothing:
        lines += ["", "The smallest in which one outlives a prompt that resumed nowhere:"]
        lines += _history(report.from_nothing, report.settings)
    if report.wrong:
        lines += [
            "",
            "The server erases what lies above the resume position, but not a checkpoint exactly "
            "one token above it.",
            f"With that one erased too: {report.wrong_if_strict} of the same hits.",
        ]
    return "\n".join(lines)


def _history(history: History, settings: LlamaCppSettings) -> list[str]:
    """The prompts, their tokens, where each resumes, and what is wrong."""
    served, wrong = watch_states(history, settings)
    rows = zip(describe_prompts(history), history, served, strict=True)
    lines = [
        f"  {told}; resumes after {answer.reused}, keeps {list(answer.created)}: "
        f"{' '.join(map(str, tokens))}"
        for told, tokens, answer in rows
    ]
    return [*lines, *(f"  {one}" for one in wrong)]
