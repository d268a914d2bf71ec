"""What tests in a browser share: Chromium or a reason, errors of the console, kept screenshots."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from mambackpt.bench.browser import find_chromium

# Screenshots to be looked at: not in git, and written anew by each run.
SCREENSHOTS = Path(__file__).resolve().parent.parent / "build/screenshots"
# What JupyterLab itself says in every notebook, whatever is in it.
_JUPYTER = re.compile(r"Failed to load resource.*\(Not Found\)|ERR_INTERNET_DISCONNECTED")
# A kernel that has been told something is busy first: two looks, with a moment between them.
_SETTLED = """() => {
    const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
    return kernel.status === "idle" && !document.querySelector(".mambackpt-busy");
}"""


def chromium() -> str:
    """Where Chromium is; without one the tests skip, or fail where a browser is required."""
    if found := find_chromium():
        return found
    if os.environ.get("MAMBACKPT_REQUIRE_BROWSER") == "1":
        pytest.fail("MAMBACKPT_REQUIRE_BROWSER=1, and no chromium is on the PATH")
    pytest.skip("needs chromium on the PATH (Debian: apt-get install chromium)")


def watch_console(page: Any) -> list[str]:
    """Return a list that grows with every error that a page reports."""
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
        "console",
        lambda said: (
            errors.append(said.text)
            if said.type == "error" and not _JUPYTER.search(said.text)
            else None
        ),
    )
    return errors


def settle(page: Any) -> None:
    """Wait until the kernel has answered what the page has told it."""
    for moment in (30, 15):
        page.wait_for_timeout(moment)
        page.wait_for_function(_SETTLED)


def keep_screenshot(shown: Any, name: str) -> None:
    """Keep a picture of a page or a part of it as ``build/screenshots/name.png``."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    shown.screenshot(path=SCREENSHOTS / f"{name}.png")
