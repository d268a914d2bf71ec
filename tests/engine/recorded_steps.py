"""Recorded steps of the released scheduler, written short: what tests and `record_steps` share.

A case's tokens are written as runs ``[first, count]``, after numbering them in the order of their
first use. A step leaves out what is empty or as before, and the digests of keys.
"""

import gzip
import json
from pathlib import Path

RECORDED = Path(__file__).parent.parent / "data" / "vllm_steps.json.gz"
FREE_SHOWN = 4


def renumbered(case):
    """The case with tokens numbered in the order of their first use."""
    numbers = {}

    def number(tokens):
        return [numbers.setdefault(token, len(numbers)) for token in tokens]

    requests = [
        {**request, "prompt": number(request["prompt"]), "output": number(request["output"])}
        for request in case["requests"]
    ]
    return {**case, "requests": requests}


def runs(tokens):
    """Tokens as runs of following numbers."""
    found = []
    for token in tokens:
        if found and token == sum(found[-1]):
            found[-1][1] += 1
        else:
            found.append([token, 1])
    return found


def tokens(found):
    """The tokens of runs."""
    return [first + n for first, count in found for n in range(count)]


def map_tokens(case, change):
    requests = [
        {**request, "prompt": change(request["prompt"]), "output": change(request["output"])}
        for request in case["requests"]
    ]
    return {**case, "requests": requests}


def short(steps):
    """Steps without digests and numbers that follow, rows and keys only where they have changed."""
    written, before = [], {"step": 0, "rows": {}, "keys": [], "free": None, "counts": None}
    for step in json.loads(json.dumps(list(steps))):
        counts = [[name, end - start] for name, start, end in step.pop("scheduled")]
        entries = {
            **step,
            "scheduled": counts if counts != before["counts"] else None,
            "step": step["step"] if step["step"] != before["step"] + 1 else None,
            "rows": {n: row for n, row in step["rows"].items() if before["rows"].get(n) != row},
            "running": [*step["rows"]] if [*step["rows"]] != [*before["rows"]] else None,
            "keys": step["keys"] and differing(before["keys"], step["keys"]),
            "wrong": sorted(
                [group, position, block] for group, position, _, block in step["wrong"]
            ),
            "free": step["free"][:FREE_SHOWN] if step["free"] != before["free"] else None,
        }
        before = {**step, "keys": step["keys"] or before["keys"], "counts": counts}
        written.append({name: value for name, value in entries.items() if value})
    return written


def differing(before, keys):
    """What is new and what is gone in each group's keys, as positions and blocks."""
    groups = []
    for old, new in zip(before or [[]] * len(keys), keys, strict=True):
        came = [
            [position, *blocks]
            for position, key, blocks in new
            if [position, key, blocks] not in old
        ]
        went = [
            [position, *blocks]
            for position, key, blocks in old
            if [position, key, blocks] not in new
        ]
        groups.append([came, went])
    return groups


def read():
    """The recorded cases, each with its steps."""
    recorded = json.loads(gzip.decompress(RECORDED.read_bytes()))
    for entry in recorded["histories"]:
        yield map_tokens(entry["case"], tokens), entry["steps"]


def write(release, histories):
    """Write cases and steps; the same ones give the same bytes."""
    entries = [{"case": map_tokens(case, runs), "steps": short(steps)} for case, steps in histories]
    text = json.dumps({"release": release, "histories": entries}, separators=(",", ":"))
    RECORDED.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
