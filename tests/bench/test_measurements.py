"""The timings that are kept in the repository: what they say, and what they must not say."""

import re
from pathlib import Path

import pytest

from mambackpt.bench.compiled import LAYERS
from mambackpt.bench.export import COPY
from mambackpt.bench.record import Benchmark


@pytest.fixture(scope="module")
def cpu_run(root: Path) -> Benchmark:
    return Benchmark.from_json((root / "notebooks/measurements/cpu.json").read_text())


def test_the_saved_timings_name_no_machine(root: Path):
    for path in (root / "notebooks/measurements").glob("*.json"):
        text = path.read_text()
        assert not re.search(r"/(home|root|tmp|work|Users)\b|localhost|\.local\b|@", text)


def test_the_saved_timings_say_what_a_reader_of_them_needs(cpu_run):
    assert (cpu_run.kind, cpu_run.reference) == ("export", COPY)
    assert cpu_run.environment.driver is None
    assert {"python", "torch"} <= set(cpu_run.environment.versions)
    for timing in cpu_run.timings:
        assert timing.low_us <= timing.median_us <= timing.high_us
        assert timing.runs >= 9
        assert timing.method != COPY or timing.ratio == 1
        layer = LAYERS[timing.case]
        if timing.buffers == "token-first":
            one = 4 * layer.row_elements + 2 * layer.window_elements
            assert timing.bytes == 2 * timing.size * one
