"""Run the interpreted kernel tests under several Triton releases, each in a folder of its own.

``python tests/kernels/compat.py [VERSION ...]`` puts every release into .compat/triton-VERSION and
lets it shadow the environment's own Triton; torch, numpy and pytest stay as they are. The exit
status is 1 when a release fails.
"""

import os
import subprocess
import sys
from pathlib import Path

# The image that GPU engines ship with, what torch 2.13 pins, and the newest.
VERSIONS = ("3.6.0", "3.7.1", "3.9.0")
ROOT = Path(__file__).resolve().parent.parent.parent
TESTS = "tests/kernels/test_store_checkpoints.py"


def install(version: str) -> Path:
    """Return the folder that holds this release, filling it the first time."""
    folder = ROOT / ".compat" / f"triton-{version}"
    done = folder / ".installed"
    if not done.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        pip += ["--no-deps", "--upgrade", "--target", str(folder), f"triton=={version}"]
        subprocess.run(pip, check=True)
        done.touch()
    return folder


def passes(version: str) -> bool:
    """Return whether the interpreted tests pass under this release."""
    environment = os.environ | {
        "PYTHONPATH": str(install(version)),
        "TRITON_INTERPRET": "1",
        "TRITON_DEFAULT_FP_FUSION": "1",
    }
    asked = "import triton; print(triton.__version__)"
    found = subprocess.run(
        [sys.executable, "-c", asked], env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()
    if found != version:
        print(f"triton {version}: the environment imports {found} instead", flush=True)
        return False
    print(f"triton {version}:", flush=True)
    tests = [sys.executable, "-m", "pytest", TESTS, "-q", "-p", "no:cacheprovider"]
    return subprocess.run(tests, cwd=ROOT, env=environment, check=False).returncode == 0


def main(versions: list[str]) -> int:
    """Try each release and say which passed; return the exit status."""
    outcomes = {version: passes(version) for version in versions or VERSIONS}
    for version, passed in outcomes.items():
        print(f"triton {version}: {'passed' if passed else 'FAILED'}")
    return 0 if all(outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
