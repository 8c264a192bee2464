"""A running server and a real browser; without a browser the tests are skipped, with the reason."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: the extra dev")


@pytest.fixture(scope="session")
def browser() -> Iterator[sync_api.Browser]:
    path = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser: install one of {', '.join(_BROWSERS)}")
    with sync_api.sync_playwright() as playwright:
        # As root, in a container: no sandbox of its own, no shared memory to speak of.
        flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        chromium = playwright.chromium.launch(executable_path=path, args=flags)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def server(browser: sync_api.Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Give the address of a dashboard that runs, on a port that was free."""
    folder = tmp_path_factory.mktemp("folder")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tonnage", "dashboard"]
    command += ["--port", str(port), "--folder", str(folder)]
    log = folder.with_suffix(".log")
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            _wait_until_it_answers(f"http://127.0.0.1:{port}/_stcore/health", process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def _wait_until_it_answers(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    pytest.fail(f"the server did not start: {log.read_text()[-500:]}")


@pytest.fixture
def page(browser: sync_api.Browser) -> Iterator[sync_api.Page]:
    """Give a window of a new visitor."""
    context = browser.new_context(viewport={"width": 1280, "height": 1000})
    context.set_default_timeout(30_000)
    yield context.new_page()
    context.close()
