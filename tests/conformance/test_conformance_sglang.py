"""SGLang's cases, and its worker's stand-ins, without the engine."""

import gzip
import importlib.util
import json
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from mambackpt.conformance.sglang import PIECES, answer_case, random_case


@pytest.fixture(scope="module")
def worker(root: Path) -> ModuleType:
    """The worker's script, which imports nothing of the engine before it serves."""
    path = root / "mambackpt/conformance/workers/sglang.py"
    spec = importlib.util.spec_from_file_location("sglang_worker", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_recorded_answers_of_the_engine_do_not_differ_and_changed_ones_do(root: Path) -> None:
    [piece] = PIECES
    recorded = json.loads(
        gzip.decompress((root / "tests/data/sglang_answers.json.gz").read_bytes())
    )
    for case in recorded["cases"]:
        ours = json.loads(json.dumps(piece.answer(case)))
        assert not piece.differences(case, {"rows": case["rows"]}, ours)
        changed = [{"reused": -1}, *case["rows"][1:]]
        assert piece.differences(case, {"rows": changed}, ours)


def test_cases_reach_all_modes_and_all_that_a_cache_does() -> None:
    """Forks, decode states, evictions, engines that stop: in every combination of settings."""
    modes: Counter[tuple[bool, ...]] = Counter()
    branches = hits = stopped = decoded = lost = 0
    for seed in range(150):
        case = random_case(seed)
        settings = case["settings"]
        limits = (settings["per_path"] is None, settings["slots"] is None)
        modes[settings["strategy"] == "no_buffer", *limits] += 1
        for request, row in zip(case["requests"], answer_case(case)["rows"], strict=False):
            if "error" in row:
                stopped += 1
                continue
            branches += row["branch"] in row["created"]
            hits += row["reused"] > 0
            decoded += max(row["created"], default=0) > len(request["tokens"])
            lost += not {*row["created"]} <= {*row["kept"]}
    assert len(modes) == 8
    assert min(branches, hits, decoded, lost) > 30
    assert stopped


def test_a_stand_in_gives_whatever_is_asked_of_it(worker: ModuleType) -> None:
    module = worker._Module("nothing")
    thing = module.Thing

    @module.decorate
    def function() -> int:
        return 7

    class Child(thing):  # type: ignore[misc, valid-type]
        pass

    thing["key"] = thing.part  # takes items, and forgets them
    assert function() == 7
    assert isinstance(Child(), Child)
    assert not isinstance(3, thing)
    assert list(thing) == []
    assert thing | None is thing


def test_only_packages_that_are_missing_are_stood_in_for(worker: ModuleType) -> None:
    finder = worker._Finder(["json", "no_such_package"])
    assert finder.find_spec("json") is None
    assert finder.find_spec("no_such_package.part") is not None
