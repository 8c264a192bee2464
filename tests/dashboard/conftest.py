"""One queue for the pages under test, with its worker, closed at the end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tonnage.dashboard import state
from tonnage.dashboard.runs import Runs


@pytest.fixture(autouse=True)
def _own_main(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put back the main module, whose place AppTest takes: processes spawned later would run it."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


@pytest.fixture(scope="session")
def _queue() -> Iterator[Runs]:
    yield state.runs()
    state.runs().close()
    state.runs.clear()


@pytest.fixture
def queue(_queue: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Give the queue, and the test a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return _queue
