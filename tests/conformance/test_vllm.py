"""What the released vllm answered, recorded: planner, builder, exporter's kernel and splitter.

`python -m mambackpt conformance --engine vllm --record FILE` records them anew.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from mambackpt.conformance import vllm
from mambackpt.conformance.compare import kit_answer, recorded_differences
from mambackpt.conformance.pieces import Case

RECORDS = Path(__file__).parents[1] / "data" / "vllm_answers.json.gz"


def recorded() -> dict[str, list[dict[str, Any]]]:
    by_piece: dict[str, list[dict[str, Any]]] = {}
    for record in json.loads(gzip.decompress(RECORDS.read_bytes()))["records"]:
        by_piece.setdefault(record["piece"], []).append(record)
    return by_piece


@pytest.mark.parametrize("piece", [piece.name for piece in vllm.PIECES])
def test_every_recorded_answer_of_the_release_is_the_kit_s(piece: str) -> None:
    records = recorded()[piece]
    assert len(records) > 20
    for record in records:
        assert recorded_differences(vllm.PIECES, record) == [], record["case"]


def test_a_changed_answer_is_noticed() -> None:
    """One digit of one answer, in each piece."""
    for records in recorded().values():
        record = next(r for r in records if r["answer"].get("metadata", True))
        text = json.dumps(record["answer"])
        place = max(text.rfind(digit) for digit in "123456789")
        changed = text[:place] + str((int(text[place]) + 1) % 10) + text[place + 1 :]
        assert recorded_differences(vllm.PIECES, {**record, "answer": json.loads(changed)})


def cases(name: str, number: int) -> list[Case]:
    [piece] = [piece for piece in vllm.PIECES if piece.name == name]
    return list(piece.cases(1, number))


def answers(name: str, number: int) -> list[dict[str, Any]]:
    [piece] = [piece for piece in vllm.PIECES if piece.name == name]
    return [kit_answer(piece, case) for case in piece.cases(1, number)]


def test_random_cases_reach_what_a_patch_may_break() -> None:
    """Else 0 differences would say little."""
    rows = [row for answer in answers("planner", 30) for row in answer["requests"]]
    assert sum(row["offset"] > 0 for row in rows) > len(rows) // 10
    assert 0.02 < sum(row["valid"] for row in rows) / len(rows) < 0.98
    built = answers("builder", 60)
    assert sum(answer.get("metadata") is not None for answer in built) > 10
    assert any(-1 in a["metadata"]["block_cols"][2] for a in built if a.get("metadata"))
    splits = [request for answer in answers("splitter", 30) for request in answer["requests"]]
    assert any(request["saved"] for request in splits)
    assert any(len(request["ends"]) > 2 for request in splits)
    exports = [
        (case["settings"], row) for case in cases("exporter", 60) for row in case["requests"]
    ]
    short = [row for s, row in exports if 0 < row["offset"] < (s["state_len"] or s["columns"])]
    assert short, "the engine stores the state of such a row and skips its window"
    assert any(row["block"] == 0 and row["offset"] for _, row in exports)


def test_the_sizes_of_random_cases_differ_where_a_mistake_could_hide() -> None:
    sizes = [case["settings"] for case in cases("planner", 60)]
    assert any(s["U"] not in (s["H"], s["M"]) for s in sizes)
    assert any(s["lookahead"] > 1 for s in sizes)
    assert any(s["A"] is None for s in sizes)
    assert any(s["drop"] and s["lookahead"] for s in sizes)
