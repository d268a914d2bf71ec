"""What a reader gets: JupyterLab in Chromium opens each notebook, runs it, and a slider redraws."""

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
from pathlib import Path
from typing import Any

import pytest
from notebook_tools import NOTEBOOKS, copy_of_the_folder

pytestmark = pytest.mark.browser

# A browser that asks nobody: these keep it off the network.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SETTINGS = {
    "notebook-extension/tracker": '{"windowingMode": "none"}',  # all cells are in the page
    "apputils-extension/notification": '{"fetchNews": "false", "checkForUpdates": false}',
}
SECONDS = 60
# Before its kernel is connected a notebook looks ready, and runs nothing when told to.
KERNEL_IS_READY = """() => {
    const context = window.jupyterapp.shell.currentWidget?.sessionContext;
    const kernel = context?.session?.kernel;
    return context?.isReady && kernel?.connectionStatus === "connected" && kernel.status === "idle";
}"""
WITH_EXPLORER = [path for path in NOTEBOOKS if "explore_" in path.read_text(encoding="utf-8")]


def chromium() -> str:
    """Where Chromium is; without one the tests skip, or fail where a browser is required."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    if os.environ.get("MAMBACKPT_REQUIRE_BROWSER") == "1":
        pytest.fail("MAMBACKPT_REQUIRE_BROWSER=1, and no chromium is on the PATH")
    pytest.skip("needs chromium on the PATH (Debian: apt-get install chromium)")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=path, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def lab(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A JupyterLab server on a copy of the notebooks: its address and its token."""
    home = tmp_path_factory.mktemp("lab")
    folder = copy_of_the_folder(home / "notebooks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token = secrets.token_hex(16)
    folders = {"JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data", "IPYTHONDIR": "ipython"}
    folders["JUPYTERLAB_SETTINGS_DIR"] = "settings"
    for name, setting in SETTINGS.items():
        path = home / f"settings/@jupyterlab/{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True)
        path.write_text(setting)
    environment = os.environ | {name: str(home / part) for name, part in folders.items()}
    with (home / "log").open("w") as log:
        server = subprocess.Popen(
            [
                *(sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root"),
                "--ip=127.0.0.1",
                f"--port={port}",
                "--ServerApp.port_retries=0",
                "--LabApp.expose_app_in_browser=True",
                f"--IdentityProvider.token={token}",
                f"--ServerApp.root_dir={folder}",
            ],
            cwd=home,
            env=environment,
            stdout=log,
            stderr=log,
        )
        try:
            address = f"http://127.0.0.1:{port}"
            for _ in range(SECONDS * 5):
                assert server.poll() is None, (home / "log").read_text()[-2000:]
                try:
                    urllib.request.urlopen(f"{address}/api?token={token}", timeout=5).close()
                    break
                except OSError:
                    time.sleep(0.2)
            else:
                pytest.fail(f"JupyterLab did not start: {(home / 'log').read_text()[-2000:]}")
            yield address, token
        finally:
            server.terminate()
            server.wait(SECONDS)


class Reader:
    """Opens notebooks, and runs each once for all tests."""

    def __init__(self, browser: Any, lab: tuple[str, str]) -> None:
        self._browser = browser
        self._address, self._token = lab
        self._ran: dict[str, Any] = {}

    def open(self, name: str) -> Any:
        """Return a page on which JupyterLab shows a notebook."""
        page = self._browser.new_page(viewport={"width": 1300, "height": 1000})
        page.set_default_timeout(SECONDS * 1000)
        page.goto(f"{self._address}/lab/tree/{name}?reset&token={self._token}")
        page.locator(".jp-Notebook .jp-CodeCell").first.wait_for()
        return page

    def run(self, name: str) -> Any:
        """Return the page of a notebook of which all cells were run, without an error."""
        if name not in self._ran:
            page = self._ran[name] = self.open(name)
            page.wait_for_function(KERNEL_IS_READY)
            page.get_by_role("menuitem", name="Run", exact=True).click()
            page.get_by_text("Run All Cells", exact=True).click()
            number = page.locator(".jp-CodeCell .jp-InputArea-prompt").last
            number.filter(has_text=re.compile(r"\d")).wait_for()
            assert not page.locator("[data-mime-type*=error]").count()
        return self._ran[name]


@pytest.fixture(scope="module")
def reader(browser: Any, lab: tuple[str, str]) -> Reader:
    return Reader(browser, lab)


@pytest.mark.parametrize("path", WITH_EXPLORER, ids=lambda path: path.stem)
def test_a_moved_slider_changes_the_picture(path: Path, reader: Reader) -> None:
    page = reader.run(path.name)
    explorer = page.locator(".widget-vbox").first
    picture = explorer.locator("img")
    before = picture.get_attribute("src")
    assert len(picture.get_attribute("alt")) > 20
    handle = explorer.locator(".noUi-handle").first
    handle.scroll_into_view_if_needed()
    handle.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    page.wait_for_function(
        "([image, before]) => image.isConnected ? image.src !== before : true",
        arg=[picture.element_handle(), before],
    )
    assert picture.get_attribute("src") != before


def test_bad_input_shows_a_sentence(reader: Reader) -> None:
    page = reader.run("02_where_checkpoints_land.ipynb")
    explorer = page.locator(".widget-vbox").first
    field = explorer.get_by_label("hash unit H")
    field.fill("0")
    field.press("Enter")
    alert = explorer.get_by_role("alert")
    alert.wait_for()
    assert "hash_block_size is 0; expected a positive number of tokens" in alert.inner_text()
    assert "Traceback" not in page.locator(".jp-Notebook").inner_text()


def test_a_player_steps_through_its_frames(reader: Reader) -> None:
    page = reader.run("01_one_sequence_many_blocks.ipynb")
    player = page.locator(".animation")
    picture = player.locator("img")
    picture.scroll_into_view_if_needed()
    before = picture.get_attribute("src")
    player.get_by_role("button", name="Next frame").click()
    assert picture.get_attribute("src") != before


def test_the_story_is_there_without_a_kernel(reader: Reader) -> None:
    """N07: pictures and folded answers survive in a file that nobody has run or trusted."""
    page = reader.open(NOTEBOOKS[0].name)
    picture = page.locator(".jp-Notebook figure img").first
    picture.wait_for()
    assert picture.evaluate("image => image.naturalWidth") > 300
    answer = page.locator("details").first
    answer.scroll_into_view_if_needed()
    answer.locator("summary").click()
    assert answer.get_attribute("open") is not None


def test_a_missing_browser_is_a_failure_only_where_it_is_required(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.delenv("MAMBACKPT_REQUIRE_BROWSER", raising=False)
    with pytest.raises(pytest.skip.Exception, match="needs chromium"):
        chromium()
    monkeypatch.setenv("MAMBACKPT_REQUIRE_BROWSER", "1")
    with pytest.raises(pytest.fail.Exception, match="no chromium"):
        chromium()
