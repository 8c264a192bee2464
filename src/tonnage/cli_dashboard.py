"""The `dashboard` verb: the pages for a browser, served by Streamlit."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from tonnage.sim.domain import BadInputError

_UPLOAD_MB = 20


def dashboard(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Where it listens.")] = 8501,
    host: Annotated[
        str, typer.Option(help="The address it listens on; 0.0.0.0 is every one.")
    ] = "127.0.0.1",
    folder: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The folder whose files scenarios may name."),
    ] = None,
) -> None:
    """Serve the dashboard to browsers until it is stopped with Ctrl-C.

    Scenarios, traces and profiles are read from the folder alone, by default the one it is started
    in. Runs of all visitors go through one queue and one process. Anybody who reaches the address
    can use it: listen on another one than 127.0.0.1 in a network that you trust.

    \b
    Examples:
      tonnage dashboard
      tonnage dashboard --port 8600 --folder scenarios
      tonnage dashboard --host 0.0.0.0
    """
    if find_spec("streamlit") is None:
        raise BadInputError("dashboard: Streamlit is missing; pip install 'tonnage[dashboard]'")
    place = folder or Path()
    if not place.is_dir():
        raise BadInputError(f"--folder {place}: is no folder; name one that exists")
    _check_free(port, host)
    command = server_command(port, host)
    if sys.platform == "win32":
        raise typer.Exit(subprocess.run(command, cwd=place, check=False).returncode)
    os.chdir(place)
    os.execv(command[0], command)  # so that a signal to this process reaches the server


def _check_free(port: int, host: str) -> None:
    """Refuse an address that is taken, or is not this machine's."""
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(address[0]) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address[4])
    except OSError as error:
        reason = error.strerror or error
        mend = "choose another --port, or a --host of this machine"
        raise BadInputError(f"dashboard: {host}:{port}: {reason}; {mend}") from error


def server_command(port: int, host: str) -> list[str]:
    """Return the command that serves the pages."""
    from tonnage.dashboard import app_path

    options = {
        "server.port": port,
        "server.address": host,
        "server.headless": "true",
        "server.maxUploadSize": _UPLOAD_MB,
        "server.maxMessageSize": 100,
        "server.fileWatcherType": "none",
        "server.enableStaticServing": "false",
        "browser.gatherUsageStats": "false",
        "client.showErrorDetails": "none",
        "client.toolbarMode": "viewer",
        "theme.light.primaryColor": "#0072B2",
        "theme.dark.primaryColor": "#56B4E9",
    }
    flags = [f"--{name}={value}" for name, value in options.items()]
    # -P: what lies in the folder is data, never a module.
    return [sys.executable, "-P", "-m", "streamlit", "run", os.fspath(app_path()), *flags]
