"""`tonnage dashboard`: what it starts, and what it says where it cannot."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tonnage.cli import app
from tonnage.cli_dashboard import dashboard, server_command
from tonnage.dashboard import app_path
from tonnage.dashboard.reading import MOST_UPLOAD_BYTES
from tonnage.sim.domain import BadInputError


def test_the_server_has_limits_and_tells_nobody_its_errors() -> None:
    command = server_command(8600, "127.0.0.1")
    assert str(app_path()) in command
    assert f"--server.maxUploadSize={MOST_UPLOAD_BYTES // 10**6}" in command
    assert "--client.showErrorDetails=none" in command
    assert "--browser.gatherUsageStats=false" in command
    assert "-P" in command  # no module is taken from the folder


def test_a_folder_that_is_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="is no folder"):
        dashboard(folder=tmp_path / "none")


def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(BadInputError, match=f"127.0.0.1:{port}: .*choose another --port"):
            dashboard(port=port, folder=tmp_path)


def test_an_address_of_another_machine_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="a --host of this machine"):
        dashboard(host="192.0.2.1", folder=tmp_path)


def test_the_verb_is_there_and_says_what_it_does() -> None:
    told = CliRunner().invoke(app, ["dashboard", "--help"]).output
    for word in ("--port", "--host", "--folder", "Examples:"):
        assert word in told
