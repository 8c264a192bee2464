"""Calibrate a tiny grid again and again, killed at random times; print what the log held after.

Run as a program, with OMP_NUM_THREADS=1: it imports torch once and forks, so that ten kills take
seconds, and a pool of threads does not survive a fork. Prints a line of JSON per kill, the keys of
the whole rows in the log, and last those after an undisturbed run.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from tests.calibrate.measured_rows import TINY
from tonnage.calibrate.collect import Measurement, collect, row_key
from tonnage.calibrate.grid import grid
from tonnage.calibrate.wanted import wanted_of
from tonnage.scenarios.catalogue import load_gpu

KILLS = 10
KERNELS = ("noop", "norm", "add", "gate", "sample", "tag_check", "kv_copy_bf16", "gemm_bf16")
MOST_BYTES = 2e5
CHILD_S_MOST = 20


def keys_in(log: Path) -> list[str]:
    """Return the keys of the rows that are on disk whole, in their order."""
    data = log.read_bytes() if log.exists() else b""
    lines = data[: data.rfind(b"\n") + 1].splitlines()
    return [row_key(json.loads(line)) for line in lines]


def rows_on_disk(log: Path) -> int:
    """Return how many whole rows a log has."""
    return log.read_bytes().count(b"\n") if log.exists() else 0


def wait_for_rows(log: Path, rows: int, child: int) -> bool:
    """Wait until a log has so many rows; say no where the child has ended before."""
    while rows_on_disk(log) < rows:
        if os.waitpid(child, os.WNOHANG) != (0, 0):
            return False
        time.sleep(1e-4)
    return True


def main(log: Path, seed: int) -> None:
    """Kill ten runs after a random number of rows and a random time, then let one end."""
    points = [
        point
        for point in grid(wanted_of(("laptop-gqa",), "cpu"), TINY, load_gpu("cpu"), False).points
        if point.kernel in KERNELS and point.held_bytes < MOST_BYTES
    ]
    measurement = Measurement("cpu", 1, TINY)
    collect(points[::8], measurement, log.with_suffix(".first"))  # whatever is imported late
    dice = random.Random(seed)
    for turn in range(KILLS + 1):
        rows = rows_on_disk(log) + dice.randint(0, 6)
        child = os.fork()
        if child == 0:
            signal.alarm(CHILD_S_MOST)
            collect(points, measurement, log)
            os._exit(0)
        killed = turn < KILLS and wait_for_rows(log, rows, child)
        if killed:
            time.sleep(dice.uniform(0.0, 0.01))
            os.kill(child, signal.SIGKILL)
        if killed or turn == KILLS:
            os.waitpid(child, 0)
        print(json.dumps({"killed": killed, "keys": keys_in(log), "points": len(points)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
