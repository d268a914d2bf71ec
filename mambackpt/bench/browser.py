"""JupyterLab in Chromium, for those who have both: a server on a folder, and a browser of its own.

The browser asks nobody, and the server's settings, data and history are thrown away with it.
"""

import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mambackpt.errors import CheckpointValueError

# A browser that asks nobody: these keep it off the network.
_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
_SETTINGS = {
    "notebook-extension/tracker": '{"windowingMode": "none"}',  # all cells are in the page
    "apputils-extension/notification": '{"fetchNews": "false", "checkForUpdates": false}',
}
_FOLDERS = {
    "JUPYTER_CONFIG_DIR": "config",
    "JUPYTER_DATA_DIR": "data",
    "IPYTHONDIR": "ipython",
    "JUPYTERLAB_SETTINGS_DIR": "settings",
}
_SECONDS = 60
# Before its kernel is connected a notebook looks ready, and runs nothing when told to.
KERNEL_IS_READY = """() => {
    const context = window.jupyterapp.shell.currentWidget?.sessionContext;
    const kernel = context?.session?.kernel;
    return context?.isReady && kernel?.connectionStatus === "connected" && kernel.status === "idle";
}"""


def find_chromium() -> str | None:
    """Return where Chromium is, or None."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((found for name in names if (found := shutil.which(name))), None)


@contextmanager
def open_browser(path: str) -> Iterator[Any]:
    """Open the Chromium of this path for the length of a ``with`` block."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=path, args=_FLAGS)
        yield opened
        opened.close()


@contextmanager
def serve_lab(folder: Path, home: Path) -> Iterator[tuple[str, str]]:
    """Serve JupyterLab on a folder; yield its address and its token.

    ``home`` is an empty folder for its own files. Raises CheckpointValueError where it does not
    start, with the end of its log.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token = secrets.token_hex(16)
    for name, setting in _SETTINGS.items():
        path = home / f"settings/@jupyterlab/{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True)
        path.write_text(setting)
    environment = os.environ | {name: str(home / part) for name, part in _FOLDERS.items()}
    command = [
        *(sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root"),
        "--ip=127.0.0.1",
        f"--port={port}",
        "--ServerApp.port_retries=0",
        "--LabApp.expose_app_in_browser=True",
        f"--IdentityProvider.token={token}",
        f"--ServerApp.root_dir={folder}",
    ]
    with (home / "log").open("w") as log:
        server = subprocess.Popen(command, cwd=home, env=environment, stdout=log, stderr=log)
        try:
            address = f"http://127.0.0.1:{port}"
            _wait_for(server, f"{address}/api?token={token}", home / "log")
            yield address, token
        finally:
            server.terminate()
            server.wait(_SECONDS)


def _wait_for(server: "subprocess.Popen[bytes]", address: str, log: Path) -> None:
    for _ in range(_SECONDS * 5):
        if server.poll() is not None:
            break
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except OSError:
            time.sleep(0.2)
    raise CheckpointValueError(
        f"JupyterLab did not start; expected its page within {_SECONDS} s. Try the end of its log: "
        f"{log.read_text()[-2000:]}"
    )


def open_notebook(browser: Any, lab: tuple[str, str], name: str) -> Any:
    """Return a page on which JupyterLab shows a notebook."""
    address, token = lab
    page = browser.new_page(viewport={"width": 1300, "height": 1000})
    page.set_default_timeout(_SECONDS * 1000)
    page.goto(f"{address}/lab/tree/{name}?reset&token={token}")
    page.locator(".jp-Notebook .jp-Cell").first.wait_for()
    return page


def run_notebook(page: Any) -> None:
    """Run all cells of the notebook on a page, to the end of the last one."""
    page.wait_for_function(KERNEL_IS_READY)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_text("Run All Cells", exact=True).click()
    number = page.locator(".jp-CodeCell .jp-InputArea-prompt").last
    number.filter(has_text=re.compile(r"\d")).wait_for()
