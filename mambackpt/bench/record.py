"""What a timing is: its record, its environment, and the interleaved runs it comes from."""

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import quantiles
from time import perf_counter
from typing import Any

import numpy as np

from mambackpt.errors import CheckpointValueError


@dataclass(frozen=True, slots=True)
class Environment:
    """Where and when timings were taken: enough to read them, nothing that names a machine.

    >>> record_environment("cpu", threads=[1]).threads
    [1]

    ``peak_gb_per_s`` is the memory's nominal bandwidth, where the driver tells it.
    """

    device: str
    cpu: str
    cores: int
    threads: list[int]
    driver: str | None
    peak_gb_per_s: float | None
    versions: dict[str, str]
    date: str


@dataclass(frozen=True, slots=True)
class Timing:
    """How long one call of one method takes on one case.

    ``ratio`` is the reference's median over this one: for exports the share of a contiguous copy's
    speed, for the planner how many times as fast as the loop. Times are in microseconds; ``bytes``
    counts what is read plus what is written (0 where speed is not a matter of bytes); ``buffers``
    names their layout and dtypes, or the container of a planner's rows; ``size`` counts checkpoints
    of one layer, or rows; ``regime`` says what the time includes.
    """

    case: str
    buffers: str
    size: int
    regime: str
    method: str
    median_us: float
    low_us: float
    high_us: float
    runs: int
    bytes: int
    ratio: float

    @property
    def gb_per_s(self) -> float:
        """Bytes read and written per second, in units of 10^9."""
        return self.bytes / self.median_us / 1e3


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One run of timings with its environment; the same format for every kind.

    >>> run = Benchmark("planner", "plain loop", record_environment("cpu", threads=[1]), [])
    >>> Benchmark.from_json(run.to_json()) == run
    True

    ``kind`` is "export", "planner" or "static"; ``static`` holds rows of `static_table`.
    """

    kind: str
    reference: str
    environment: Environment
    timings: list[Timing]
    static: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> str:
        """Return the run as JSON text."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Benchmark":
        """Return the run that `to_json` wrote; CheckpointValueError for any other text."""
        try:
            fields = json.loads(text)
            fields["environment"] = Environment(**fields["environment"])
            fields["timings"] = [Timing(**timing) for timing in fields["timings"]]
            return cls(**fields)
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointValueError(
                f"not a benchmark ({error}); expected JSON from `python -m mambackpt bench`. "
                "Try running it again with --out."
            ) from error


def keep(
    timings: Iterator[Timing], run: Benchmark, report: Callable[[Benchmark], object] | None
) -> None:
    """Add timings to a run, and report it after each."""
    for timing in timings:
        run.timings.append(timing)
        if report:
            report(run)


def each(function: Callable[..., object], turns: Sequence[tuple[Any, ...]]) -> Callable[[], None]:
    """A call of the function with each of these arguments in turn."""

    def run() -> None:
        for arguments in turns:
            function(*arguments)

    return run


def interleave(
    calls: dict[str, Callable[[], None]], runs: int, parts: int
) -> dict[str, list[float]]:
    """Seconds per part of each call, one sample per run; the first round is a warm-up."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for run in range(-1, runs):
        for name, call in calls.items():
            start = perf_counter()
            call()
            if run >= 0:
                samples[name].append((perf_counter() - start) / parts)
    return samples


def timings(
    case: str,
    buffers: str,
    size: int,
    regime: str,
    samples: dict[str, list[float]],
    moved: int,
) -> Iterator[Timing]:
    """One timing per method; the first method is the reference."""
    reference = None
    for method, seconds in samples.items():
        fifths = quantiles(seconds, n=5, method="inclusive")
        median = float(np.median(seconds))
        reference = median if reference is None else reference
        yield Timing(
            case=case,
            buffers=buffers,
            size=size,
            regime=regime,
            method=method,
            median_us=median * 1e6,
            low_us=fifths[0] * 1e6,
            high_us=fifths[-1] * 1e6,
            runs=len(seconds),
            bytes=moved,
            ratio=reference / median,
        )


def record_environment(device: str, *, threads: Sequence[int]) -> Environment:
    """Return what a reader of timings needs to know; no host name, no path."""
    versions = {"python": platform.python_version()}
    for package in ("numpy", "torch", "triton"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        models = [
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ]
        cpu = models[0] if models else cpu
    name, driver, peak = cpu, None, None
    if device == "cuda":
        import torch
        from triton.testing import get_dram_gbps

        name = torch.cuda.get_device_name()
        versions["cuda"] = str(torch.version.cuda)
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            answer = subprocess.run(query, capture_output=True, text=True, check=True).stdout
            driver = answer.split()[0]
        except (OSError, subprocess.CalledProcessError, IndexError):
            driver = None
        try:
            peak = float(get_dram_gbps())
        except (RuntimeError, AttributeError, KeyError, ZeroDivisionError):
            peak = None
    return Environment(
        device=name,
        cpu=cpu,
        cores=os.cpu_count() or 1,
        threads=list(threads),
        driver=driver,
        peak_gb_per_s=peak,
        versions=versions,
        date=datetime.date.today().isoformat(),
    )
