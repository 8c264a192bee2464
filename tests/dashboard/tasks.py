"""What the tests of the queue have the worker do."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

from tonnage.sim.domain import InfeasibleError

Told = Callable[[str, float], None]


def doubled(number: int, told: Told) -> int:
    """Return twice the number."""
    told("doubling", 0.5)
    return 2 * number


def stamped(told: Told) -> float:
    """Return when it ran."""
    return time.monotonic()


def endless(told: Told) -> None:
    """Go on until somebody stops it."""
    while True:
        told("still here", 0.25)
        time.sleep(0.01)


def refused(told: Told) -> None:
    """Fail as a scenario does that does not fit."""
    raise InfeasibleError("pools.decode: short of 3 GiB; use kv: fp8_e4m3")


def broken(told: Told) -> None:
    """Fail as no scenario should."""
    raise RuntimeError("secret path")


def with_child(told: Told) -> int:
    """Start a process that goes on, as a pool of processes does, and return its number."""
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid
