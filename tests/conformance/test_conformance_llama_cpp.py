"""llama.cpp's cases and its worker, without the engine."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import pytest

from mambackpt.conformance.llama_cpp import LETTERS, USER, answer_case, make_case


@pytest.fixture(scope="module")
def worker(root: Path) -> ModuleType:
    """The worker's script, with stand-ins for the packages of its own environment."""
    path = root / "mambackpt/conformance/workers/llama_cpp.py"
    spec = importlib.util.spec_from_file_location("llama_cpp_worker", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("xllamacpp", "gguf"):
            patch.setitem(sys.modules, name, MagicMock())
        spec.loader.exec_module(module)
    return module


def test_worker_and_cases_mean_the_same_tokens(worker: ModuleType) -> None:
    assert (worker.LETTERS, worker.USER) == (LETTERS, USER)
    assert worker.VOCABULARY == 3 + 256 + 26 + 2


def test_cases_are_made_of_what_the_worker_can_send(worker: ModuleType) -> None:
    chats = 0
    for seed in range(300):
        case = make_case(seed)
        assert case == make_case(seed)
        for request in case["requests"]:
            assert request["tokens"]
            if request["users"]:
                chats += 1
                said = worker.messages_of(request)
                first, *rest = said if said[0]["role"] == "system" else [{"content": ""}, *said]
                text = first["content"] + "".join("|" + message["content"] for message in rest)
                assert [USER if c == "|" else LETTERS[ord(c) - ord("a")] for c in text] == (
                    request["tokens"]
                )
    assert chats > 300


def test_cases_reach_all_that_a_slot_does() -> None:
    """Hits, erasures, long conversations."""
    hits = erased = long = 0
    for seed in range(60):
        case = make_case(seed)
        answers = answer_case(case)["requests"]
        hits += sum(answer["cached"] > 0 for answer in answers)
        erased += sum(len(answer["erased"]) for answer in answers)
        long += len(answers) > 20
    assert min(hits, erased) > 100
    assert long


def test_what_happened_is_read_from_the_log(worker: ModuleType, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "0.1 I slot create_check: id  0 | task 0 | created context checkpoint 1 of 32 "
        "(pos_min = 35, pos_max = 35, n_tokens = 36, size = 0.002 MiB)\n"
        "0.2 I slot      release: id  0 | task 0 | stop processing: n_tokens = 40, truncated = 0\n"
        "0.3 I slot   operator(): id  0 | task 7 | erased invalidated context checkpoint "
        "(pos_min = 35, pos_max = 35, n_tokens = 36, n_past = 0)\n"
        "0.4 I slot create_check: id  0 | task 7 | superseding context checkpoint at "
        "n_tokens = 12\n"
        "0.5 I slot create_check: id  0 | task 7 | created context checkpoint 1 of 32 "
        "(pos_min = 11, pos_max = 11, n_tokens = 12, size = 0.002 MiB)\n"
        "0.6 I slot      release: id  0 | task 7 | stop processing: n_tokens = 20, truncated = 0\n"
    )
    assert worker.read_log(log, 2) == [
        {"created": [36], "erased": []},
        {"created": [12], "erased": [12, 36]},
    ]


def test_a_request_with_users_elsewhere_is_refused(worker: ModuleType) -> None:
    with pytest.raises(ValueError, match="users is"):
        worker.messages_of({"tokens": [LETTERS[0], USER], "users": [0]})
