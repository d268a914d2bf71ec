"""Throw-away environments: an engine's pinned packages in a folder that is removed afterwards."""

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mambackpt.conformance.versions import MODULES, Release
from mambackpt.errors import CheckpointError

# What pip says when it cannot reach the index, and when the index has no such file.
_UNREACHABLE = ("NewConnectionError", "NameResolutionError", "Timeout", "ProxyError", "Max retries")
_ABSENT = ("No matching distribution", "Could not find a version")
_MADE = "made.json"  # written last: a folder without it is half an environment


class UnavailableError(CheckpointError, RuntimeError):
    """An engine that cannot be had here: no package, no index, no room, no such module."""


class EngineSkippedError(CheckpointError, RuntimeError):
    """An engine that this machine's processor cannot run."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A Python that has an engine: its interpreter and the variables that its processes need.

    ``label`` names what is in it; ``seconds`` and ``bytes`` are what making it took, 0 for an
    engine that was there.
    """

    label: str
    python: Path
    variables: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    bytes: int = 0


def is_here(engine: str) -> bool:
    """Return whether an engine can be imported by the interpreter that asks.

    >>> is_here("llama.cpp")
    False
    """
    return importlib.util.find_spec(MODULES[engine]) is not None


def environment_here(engine: str) -> Environment:
    """Return the interpreter that asks as an environment: its own build of the engine is meant.

    Raises UnavailableError where the engine cannot be imported.
    """
    module = MODULES[engine]
    if not is_here(engine):
        raise UnavailableError(
            f"{module} cannot be imported by {sys.executable}; expected the build to be held to "
            "the kit. Try its folder on PYTHONPATH, or leave out --here."
        )
    spec = importlib.util.find_spec(module)
    place = Path(spec.origin).parent if spec and spec.origin else Path()
    try:
        version = importlib.metadata.version(module)
    except importlib.metadata.PackageNotFoundError:
        version = "of no known version"
    # A worker runs in a folder of its own, where a relative path leads nowhere.
    paths = [
        str(Path(p).resolve()) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p
    ]
    return Environment(
        f"{module} {version} in {place}",
        Path(sys.executable),
        {"PYTHONPATH": os.pathsep.join(paths)} if paths else {},
    )


@contextmanager
def make_environment(release: Release, folder: Path | None = None) -> Iterator[Environment]:
    """Make an environment of a release's packages; it goes when the ``with`` statement ends.

    With ``folder`` it is kept there and found again next time. Only the ordinary package index is
    asked. Raises UnavailableError where a package cannot be had or the disk is too full,
    EngineSkippedError where the processor lacks what the engine needs.
    """
    _check_processor(release)
    if folder is not None:
        place = folder / f"{release.engine}-{release.name}"
        yield _found(release, place) or _install(release, place)
        return
    with tempfile.TemporaryDirectory(prefix="mambackpt-engine-") as name:
        yield _install(release, Path(name) / "environment")


def _check_processor(release: Release) -> None:
    flags = Path("/proc/cpuinfo")
    if not release.cpu or not flags.exists():
        return
    missing = [flag for flag in release.cpu if flag not in flags.read_text().split()]
    if missing:
        raise EngineSkippedError(
            f"{release.engine} is skipped: its package needs a processor with "
            f"{' and '.join(missing).upper()}."
        )


def _found(release: Release, place: Path) -> Environment | None:
    """The environment that an earlier run left there, of just these packages."""
    made = place / _MADE
    if not made.exists() or json.loads(made.read_text()) != _requirements(release):
        return None
    return _environment(release, place)


def _requirements(release: Release) -> list[list[str]]:
    return [[*release.packages], [*release.bare], [sys.version]]


def _environment(release: Release, place: Path, seconds: float = 0.0) -> Environment:
    return Environment(
        f"{release.engine} {release.name} ({', '.join(release.bare or release.packages)})",
        place / "bin/python",
        {"PYTHONPATH": str(place / "bare"), "PYTHONDONTWRITEBYTECODE": "1"},
        seconds,
        _bytes_below(place),
    )


def _install(release: Release, place: Path) -> Environment:
    start = time.perf_counter()
    if place.exists():
        shutil.rmtree(place)
    place.mkdir(parents=True)
    free = shutil.disk_usage(place).free // 10**6
    if free < release.megabytes:
        raise UnavailableError(
            f"{place.parent} has {free} MB free; expected {release.megabytes} MB for "
            f"{release.engine} {release.name}. Try another disk: --folder DIR."
        )
    venv.create(place, with_pip=True, symlinks=os.name != "nt")
    if release.packages:
        _pip(release, place, release.packages)
    if release.bare:
        target = ["--no-deps", "--target", str(place / "bare")]
        _pip(release, place, [*target, *release.bare])
    (place / _MADE).write_text(json.dumps(_requirements(release)))
    return _environment(release, place, time.perf_counter() - start)


def _pip(release: Release, place: Path, arguments: Sequence[str]) -> None:
    command = [str(place / "bin/python"), "-m", "pip", "install", "--quiet", "--no-compile"]
    command += ["--no-input", "--no-cache-dir", "--disable-pip-version-check", "--retries", "1"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    what = f"{release.engine} {release.name}"
    if any(word in done.stderr for word in _UNREACHABLE):
        raise UnavailableError(
            f"{what} was not installed: the package index cannot be reached; expected the index "
            "that pip is set up for. Try again with a network, or an index of your own "
            "(PIP_INDEX_URL)."
        )
    last = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
    absent = [line for line in last if any(word in line for word in _ABSENT)]
    if absent:
        raise UnavailableError(
            f"{what} was not installed: {absent[-1].removeprefix('ERROR: ')}; expected a package "
            f"for Python {sys.version_info[0]}.{sys.version_info[1]} on this machine. Try another "
            "Python, or another release: --release."
        )
    raise UnavailableError(
        f"{what} was not installed: {last[-1].removeprefix('ERROR: ')}; expected pip to finish. "
        f"Try it by hand: pip install {' '.join(arguments)}"
    )


def _bytes_below(place: Path) -> int:
    return sum(path.lstat().st_size for path in place.rglob("*") if not path.is_dir())
