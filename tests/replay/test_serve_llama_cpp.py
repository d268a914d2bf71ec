"""llama.cpp's server, one slot: held to recorded answers and to figures that were published."""

import gzip
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mambackpt import CheckpointError
from mambackpt.replay.serve import Served, TokenRequest, serve_tokens
from mambackpt.replay.serve.llama_cpp import LlamaCppSettings, Prompt, Slot

LETTERS = {chr(ord("a") + n): 259 + n for n in range(26)} | {"|": 285}


def serve(*prompts: Any, **settings: Any) -> list[Served]:
    return serve_tokens(prompts, "llama.cpp", **settings)


def filler(length: int, token: int = 0) -> list[int]:
    return [token] * length


# ---- recorded answers of the running server ------------------------------------------------------


def recorded(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt") as file:
        answers: dict[str, Any] = json.load(file)
    return answers


def test_own_recorded_answers_hold(root: Path) -> None:
    """Any settings, chats and plain prompts, outputs, contexts in host memory."""
    requests = 0
    for case in recorded(root / "tests/data/llama_cpp_answers.json.gz")["cases"]:
        settings = {name: value for name, value in case["settings"].items() if name != "model"}
        slot = Slot(LlamaCppSettings(**settings))
        for answer in case["requests"]:
            text = answer["text"]
            users = [place for place, letter in enumerate(text) if letter == "|"]
            outputs = [LETTERS[answer["forced"]]] * answer["generated"]
            tokens = [LETTERS[letter] for letter in text]
            served = slot.serve(Prompt.of(TokenRequest(tokens, outputs, users)))
            assert served.reused == answer["cached"], (settings, text)
            assert list(served.created) == answer["created"], (settings, text)
            assert sorted(slot.erased) == answer["erased"], (settings, text)
            requests += 1
    assert requests == 824


@pytest.mark.parametrize("version", ["b9294", "b9873", "b10229"])
def test_earlier_releases_place_as_recorded(root: Path, version: str) -> None:
    """120 prompts by themselves, with messages and without."""
    answers = recorded(root / "tests/data/llama_cpp_answers.json.gz")["releases"][version]
    for answer in answers:
        prompt = TokenRequest(filler(answer["length"]), users=answer["users"])
        [served] = serve(prompt, version=version, **answer["settings"])
        assert list(served.created) == answer["created"], answer
    assert len(answers) == 120


@pytest.mark.shared
def test_shared_recorded_answers_hold(shared: Path) -> None:
    names = {"b": "batch", "ub": "ubatch", "ctxcp": "checkpoints", "cms": "min_step"}
    requests = 0
    for case in recorded(shared / "engines/llama_cpp_answers.json.gz")["cases"]:
        settings = {names[k]: v for k, v in case["settings"].items() if k in names}
        settings["host_cache"] = case["settings"]["cache_ram"] > 0
        answers = case["requests"]
        prompts = [
            TokenRequest(a.get("tokens") or filler(a["length"]), users=a.get("users", ()))
            for a in answers
        ]
        for answer, served in zip(answers, serve(*prompts, **settings), strict=True):
            assert (served.reused, list(served.created)) == (answer["cached"], answer["created"])
            requests += 1
    assert requests == 802


# ---- published figures ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "batch", "ubatch", "positions"),
    [
        (14_252, 2048, 512, (13_736, 14_248)),
        (10_000, 2048, 512, (9_484, 9_996)),
        (10_000, 2048, 2048, (7_952, 9_996)),
        (10_000, 4096, 2048, (7_948, 9_996)),
    ],
)
@pytest.mark.parametrize("min_step", [32, 8192])
def test_without_messages_two_checkpoints_near_the_end_whatever_the_least_distance(
    length: int, batch: int, ubatch: int, positions: tuple[int, ...], min_step: int
) -> None:
    [served] = serve(filler(length), batch=batch, ubatch=ubatch, min_step=min_step)
    assert served == Served(0, 0, None, positions, positions)


@pytest.mark.parametrize("min_step", [32, 8192])
def test_the_voice_assistant_recomputes_1022_of_5558_tokens(min_step: int) -> None:
    prompt = filler(5_514)
    settings = {"batch": 1024, "ubatch": 1024, "min_step": min_step}
    _, served = serve(prompt + filler(46, 1), prompt + filler(44, 2), **settings)
    assert (served.attention, served.reused, 5_558 - served.reused) == (5_514, 4_536, 1_022)


@pytest.mark.parametrize(("batch", "recomputed"), [(64, 146), (32, 5_639)])
def test_an_edit_longer_than_the_batch_starts_again(batch: int, recomputed: int) -> None:
    prompt = filler(5_514)
    edited = prompt + filler(125, 2)
    _, served = serve(prompt + filler(43, 1), edited, batch=batch, ubatch=batch)
    assert len(edited) - served.reused == recomputed


@pytest.mark.parametrize(
    ("version", "positions"),
    [
        ("b9294", (8_192, 13_736, 14_248)),
        ("b9873", (13_736,)),
        ("b10229", (13_736, 14_248)),
    ],
)
def test_releases_place_differently(version: str, positions: tuple[int, ...]) -> None:
    [served] = serve(filler(14_252), version=version)
    assert served.created == positions


# ---- the rule, event by event --------------------------------------------------------------------


def test_a_prompt_that_goes_on_resumes_at_the_live_end() -> None:
    first = TokenRequest(range(1000), outputs=range(5000, 5010))
    unread = [*range(1000), *range(5000, 5010), *range(50)]  # the last output was not computed
    _, served = serve(first, unread)
    assert (served.attention, served.reused) == (1009, 1009)


def test_a_prompt_sent_again_leaves_one_token_to_compute() -> None:
    _, served = serve(range(1000), range(1000))
    assert (served.attention, served.reused) == (999, 996)


def test_the_live_end_is_not_among_the_checkpoints() -> None:
    [served] = serve(range(1000))
    assert served.kept == served.created == (484, 996)


def test_messages_are_kept_where_the_last_begins_and_where_far_enough() -> None:
    users = [100, 110, 200, 2000, 2500]
    [served] = serve(TokenRequest(filler(4000), users=users), min_step=50)
    assert served.created == (100, 200, 2000, 2500, 3484, 3996)


def test_nothing_is_kept_of_a_message_that_begins_the_prompt() -> None:
    [served] = serve(TokenRequest(filler(3), users=[0]))
    assert served.created == ()


def test_what_lies_above_the_resume_position_is_erased_but_one_token_above_it() -> None:
    slot = Slot(LlamaCppSettings(batch=64, ubatch=64))
    prompts = [range(100), [*range(99), 500, 501], [*range(96), *filler(104, 7)]]
    for tokens in prompts:
        served = slot.serve(Prompt.of(TokenRequest(tokens)))
    assert served.reused == 96
    assert slot.erased == []  # the checkpoint at 97 stays, with token 96 of another prompt
    assert served.kept == (36, 96, 97, 136, 196)


@pytest.mark.parametrize(
    ("min_step", "kept"),
    [(0, (36, 52, 56, 72, 76)), (8, (12, 32, 52, 72, 76)), (30, (12, 52, 72, 76))],
)
def test_a_full_list_thins_out_what_others_made_close_together_then_loses_the_oldest(
    min_step: int, kept: tuple[int, ...]
) -> None:
    grown = [filler(length) for length in (20, 24, 40, 60, 80)]
    answers = serve(*grown, batch=8, ubatch=8, checkpoints=5, min_step=min_step)
    assert [served.created for served in answers] == [
        (12, 16), (20,), (32, 36), (52, 56), (72, 76)
    ]  # fmt: skip
    assert answers[-1].kept == kept


def test_no_checkpoints_may_be_asked_for() -> None:
    _, served = serve(range(1000), range(999), checkpoints=0)
    assert (served.attention, served.reused, served.kept) == (998, 0, ())


def test_conversations_come_back_from_host_memory() -> None:
    one, two = filler(1000, 1), filler(1000, 2)
    prompts = [one, two, one + filler(10, 3), two + filler(10, 4)]
    assert [served.reused for served in serve(*prompts)] == [0, 0, 1000, 1000]
    assert [served.reused for served in serve(*prompts, host_cache=False)] == [0, 0, 0, 0]


@pytest.mark.parametrize(("shared", "stays"), [(500, True), (499, False)])
def test_a_context_is_left_where_less_than_half_of_it_would_be_kept(
    shared: int, stays: bool
) -> None:
    long = filler(1000, 1)
    other = filler(shared, 1) + filler(600, 2)
    _, _, served = serve(long, other, [*long, 3])
    assert (served.reused == 1000) == (not stays)


def test_a_context_of_host_memory_comes_back_where_a_quarter_of_it_is_kept() -> None:
    other = filler(50, 9)
    for shared, attention in ((250, 250), (249, 0)):
        prompts = [filler(1000, 1), other, filler(shared, 1) + filler(100, 2)]
        assert serve(*prompts)[-1].attention == attention


@given(
    seed=st.integers(0, 10**6),
    batch=st.integers(2, 80),
    ubatch=st.integers(1, 80),
    checkpoints=st.integers(0, 6),
    min_step=st.integers(0, 60),
    host_cache=st.booleans(),
)
def test_what_is_reused_was_kept_and_is_shared(
    seed: int, batch: int, ubatch: int, checkpoints: int, min_step: int, host_cache: bool
) -> None:
    random = Random(seed)
    prompts: list[list[int]] = []
    for _ in range(8):
        earlier = random.choice(prompts) if prompts else []
        kept = earlier[: random.randint(0, len(earlier))]
        prompts.append([*kept, *(random.randrange(3) for _ in range(random.randint(1, 90)))])
    answers = serve(
        *prompts,
        batch=batch,
        ubatch=ubatch,
        checkpoints=checkpoints,
        min_step=min_step,
        host_cache=host_cache,
    )
    for place, (tokens, served) in enumerate(zip(prompts, answers, strict=True)):
        states = {0} | {len(earlier) for earlier in prompts[:place]}
        states |= {position for earlier in answers[:place] for position in earlier.kept}
        assert served.reused in states
        assert 0 <= served.reused <= served.attention < len(tokens)
        assert all(served.reused <= position < len(tokens) for position in served.created)
        assert [*served.created] == sorted(served.created)
        assert [*served.kept] == sorted({*served.kept})
        assert len(served.kept) <= checkpoints


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "settings", "says"),
    [
        ("llama", {}, "engine is 'llama'; expected one of .*Try 'llama.cpp'"),
        ("llama.cpp", {"u_batch": 1}, "a setting of llama.cpp is 'u_batch'; .*Try 'ubatch'"),
        ("llama.cpp", {"batch": 0}, "batch is 0; expected a positive number of tokens"),
        ("llama.cpp", {"checkpoints": -1}, "checkpoints is -1; .*Try"),
        ("llama.cpp", {"host_cache": 8192}, "host_cache is 8192; expected True or False. Try True"),
        ("llama.cpp", {"version": "b1"}, "version is 'b1'; expected one of b9294, .*Try 'b10229'"),
    ],
)
def test_a_wrong_setting_is_taught(engine: str, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        serve_tokens([[1, 2, 3]], engine, **settings)


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (lambda: TokenRequest([]), "tokens are empty; expected at least one. Try"),
        (lambda: TokenRequest(["a"]), r"tokens is \['a'\]; expected integers in order. Try"),  # type: ignore[list-item]
        (lambda: TokenRequest([1, 2], users=[2]), r"users is \[2\] for a prompt of 2 .*Try users="),
        (lambda: TokenRequest([1, 2], users=[1, 0]), r"users is \[1, 0\] .*Try users=\[0, 1\]"),
    ],
)
def test_a_wrong_request_is_taught(request_: Any, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        request_()
