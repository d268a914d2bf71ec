"""SGLang's cache: the public facts of its rule, and recorded answers of the running engine."""

import gzip
import json
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from mambackpt.conformance.sglang import random_case
from mambackpt.errors import CheckpointValueError
from mambackpt.replay.serve import Served, TokenRequest, serve_tokens

RECORDED = (
    "decode",
    "no_buffer_decode",
    "per_path_2_decode",
    "states_7_decode",
    "states_9",
    "unaligned",
)


def served(*requests: TokenRequest | list[int], **settings: Any) -> list[Served]:
    return serve_tokens(requests, "sglang", **settings)


@pytest.fixture
def fresh() -> Iterator[Any]:
    """A source of tokens that nothing else has."""
    source = count(10**6)
    return lambda length: [next(source) for _ in range(length)]


# --- what is public about the rule ----------------------------------------------------------------


def test_the_tree_keeps_attention_as_deep_as_the_newest_state_only(fresh: Any) -> None:
    first = fresh(128)
    second = first[:112] + fresh(16)
    third = second + fresh(144)
    answers = served(first, second, third, third + fresh(100))
    assert [a.attention for a in answers] == [0, 112, 112, 256]
    assert [a.reused for a in answers] == [0, 0, 64, 256]


def test_decoding_keeps_the_newest_multiple_of_the_track_interval(fresh: Any) -> None:
    told = fresh(900)
    first, again = served(TokenRequest(told[:500], told[500:]), told)
    assert first.created == (448, 768)
    assert again.reused == 768


def test_the_decode_grid_is_a_multiple_of_chunk_and_interval(fresh: Any) -> None:
    told = fresh(120)
    first, *_ = served(TokenRequest(told[:20], told[20:]), chunk=4, interval=6)
    assert first.created == (20, 108)  # of lcm(4, 6) up to 20 + 100 - 1


def test_a_last_token_out_is_not_cached(fresh: Any) -> None:
    told = fresh(256)
    assert served(TokenRequest(told[:200], told[200:]))[0].created == (192,)
    told += fresh(1)
    assert served(TokenRequest(told[:200], told[200:]))[0].created == (192, 256)


def test_without_buffers_only_ends_are_kept_and_no_forks(fresh: Any) -> None:
    prompt = fresh(1000)
    first, again = served(prompt, prompt, strategy="no_buffer")
    assert (first.created, again.reused) == ((1000,), 0)
    told = fresh(609)
    first, again = served(TokenRequest(told[:601], told[601:]), told[:601], strategy="no_buffer")
    assert first.created == (601, 608)
    assert (again.attention, again.branch, again.reused) == (600, 576, 0)


def test_a_branching_point_replaces_the_state_of_its_extend(fresh: Any) -> None:
    trunk = fresh(1000)
    first, second, third = served(trunk, trunk[:700] + fresh(300), trunk[:700] + fresh(9))
    assert first.created == (960,)
    assert (second.reused, second.branch, second.created) == (0, 640, (640,))
    assert third.reused == 640


def test_a_branching_point_off_the_chunks_of_its_extend_is_named_and_not_kept(fresh: Any) -> None:
    # The first extend ends at 10, off the grid of 4: what is tracked after it is, too.
    trunk = fresh(40)
    short, long, branched = served(
        trunk[:11], trunk, trunk[:29] + fresh(9), chunk=4, budget=10, strategy="extra_buffer"
    )
    assert short.created == (8,)
    assert long.created == (16, 26, 36)
    assert (branched.reused, branched.branch, branched.created) == (26, 28, (34,))


def test_a_chunked_prompt_loses_its_shallowest_states_first(fresh: Any) -> None:
    prompt = fresh(2944)
    first, again = served(prompt, prompt[:1216], slots=6, budget=512)
    assert first.kept == (1536, 2048, 2560, 2944)
    assert again.reused == 0


def test_the_cap_per_path_drops_the_shallowest_states_and_keeps_the_tail(fresh: Any) -> None:
    prompt = fresh(1400)
    first, longer = served(prompt[:1000], prompt, per_path=1, budget=256)
    assert first.kept == (768, 960)
    assert longer.kept == (1216, 1344)


def test_the_cap_per_path_spares_forks(fresh: Any) -> None:
    trunk = fresh(64)
    *_, last = served(
        trunk + fresh(64), trunk + fresh(64), trunk + fresh(640), per_path=1, budget=64
    )
    assert last.kept == (64, 640, 704)


def test_a_leaf_takes_its_attention_with_its_state_and_an_inner_node_does_not(fresh: Any) -> None:
    # Five slots, of which each request pins three: two states stay beside it, then its own comes.
    prompt = fresh(128)
    for others, attention in ((1, 127), (2, 127), (3, 64)):
        between = [fresh(64) for _ in range(others)]
        last = served(prompt, *between, prompt, slots=5, budget=64)[-1]
        assert (last.attention, last.reused) == (attention, 0 if others > 1 else 64)


def test_a_prompt_sent_again_makes_its_state_again(fresh: Any) -> None:
    prompt = fresh(128)
    again = served(prompt, prompt, budget=64)[1]
    assert (again.reused, again.created, again.kept) == (64, (128,), (64, 128))


# --- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "lazy"}, "strategy is 'lazy'; expected one of extra_buffer, no_buffer"),
        ({"chunk": 0}, "chunk is 0; expected"),
        ({"per_path": 0}, "per_path is 0; expected"),
        ({"slots": 0}, "slots is 0; expected"),
        ({"slots": 2}, "slots is 2; expected room for the 3 that a request needs.*Try slots=4"),
        ({"page": 16}, "a setting of sglang is 'page'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointValueError, match=message):
        served(list(range(200)), **settings)


# --- recorded answers -----------------------------------------------------------------------------


def test_every_recorded_request_is_answered_as_the_engine_did(root: Path) -> None:
    # Recorded with conformance/workers/sglang.py: all modes, and settings off every grid.
    recorded = json.loads(
        gzip.decompress((root / "tests/data/sglang_answers.json.gz").read_bytes())
    )
    modes, requests = set(), 0
    for case in recorded["cases"]:
        settings, rows = case["settings"], case["rows"]
        asked = [TokenRequest(r["tokens"], r["outputs"]) for r in case["requests"]]
        if "error" in rows[-1]:
            with pytest.raises(CheckpointValueError, match="slots is"):
                served(*asked[: len(rows)], **settings)
            rows = rows[:-1]
        for answer, row in zip(served(*asked[: len(rows)], **settings), rows, strict=True):
            assert answer == Served(
                row["attention"],
                row["reused"],
                row["branch"],
                tuple(row["created"]),
                tuple(row["kept"]),
            )
        requests += len(rows)
        modes.add((settings["strategy"], settings["per_path"] is None, settings["slots"] is None))
    assert len(modes) == 8
    assert requests > 300


@pytest.mark.shared
@pytest.mark.parametrize("mode", RECORDED)
def test_the_shared_recorded_answers_agree_in_every_row(shared: Path, mode: str) -> None:
    file = shared / "engines" / f"sglang_{mode}.json.gz"
    if not file.exists():
        pytest.skip("the shared folder has no recorded answers of engines")
    settings: dict[str, Any] = {"strategy": "no_buffer" if "no_buffer" in mode else "extra_buffer"}
    for name, key in (("per_path", "per_path"), ("states", "slots")):
        if limit := re.search(rf"{name}_(\d+)", mode):
            settings[key] = int(limit[1])
    for case in json.loads(gzip.decompress(file.read_bytes()))["cases"]:
        asked = map(TokenRequest, case["prompts"], case["outputs"])
        grids = {name: case[name] for name in ("chunk", "budget", "interval")}
        answers = served(*asked, **grids, **settings)
        for answer, row in zip(answers, case["rows"], strict=True):
            assert (answer.attention, answer.reused) == (row["attention"], row["joint"])
            assert (answer.branch, list(answer.kept)) == (row["branch"], row["kept"])
            assert {*row["tracked"]} <= {*answer.created}


def test_a_seed_gives_the_same_case_everywhere() -> None:
    assert random_case(7) == random_case(7)
    assert random_case(7) != random_case(8)
