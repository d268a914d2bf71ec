"""What every test needs: the interpreter's flag, the shared folder, the hypothesis profiles."""

import os
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")  # read by triton when it is first imported
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent

settings.register_profile(
    "fast", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", parent=settings.get_profile("fast"), max_examples=5000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests and examples of resumed models are skipped where `transformers` is not installed."""
    try:
        installed = find_spec("transformers") is not None
    except ValueError:  # somebody has ruled it out
        installed = False
    missing = pytest.mark.skip(reason="needs transformers: the extra [models]")
    for item in items:
        if not installed and (item.path.parent.name == "resume" or "03_resume" in item.name):
            item.add_marker(missing)


def shared_folder() -> Path | None:
    """The folder with the checked vectors and public traces, where there is one."""
    for candidate in (ROOT.parent / "shared", Path(os.environ.get("MAMBACKPT_SHARED", "") or "-")):
        if (candidate / "spec").is_dir():
            return candidate
    return None


@pytest.fixture(scope="session")
def shared() -> Path:
    """The shared folder; the test is skipped where there is none."""
    folder = shared_folder()
    if folder is None:
        pytest.skip("needs ../shared or $MAMBACKPT_SHARED: vectors and public traces")
    return folder


@pytest.fixture(scope="session")
def root() -> Path:
    """The top of the checkout."""
    return ROOT
