"""Rows are measured once, kept whatever happens, and outliers measured again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from tests.calibrate.measured_rows import ORIGIN, TINY, measured_row, usual_seconds
from tonnage.calibrate import collect as collecting
from tonnage.calibrate.collect import Measurement, collect, estimate_s, row_key
from tonnage.calibrate.points import Point, grouped

ROOT = Path(__file__).parents[2]
needs_torch = pytest.mark.skipif(util.find_spec("torch") is None, reason="torch is not installed")

POINTS = [
    Point("gemm_bf16", {"m": m, "n": n, "k": 256}, m * 1e-5, 1e5, graph=False)
    for n in (128, 256)
    for m in (1, 4, 16, 64)
]


@dataclass
class Row:
    """What a timer gives."""

    data: dict[str, Any]

    def as_row(self) -> dict[str, Any]:
        return {name: value for name, value in self.data.items() if name != "repeat"}


@dataclass
class Timer:
    """Gives made-up seconds; `spreads` and `factors` by m and n, for the first time alone."""

    spreads: Mapping[tuple[int, int], float] = field(default_factory=dict)
    factors: Mapping[tuple[int, int], float] = field(default_factory=dict)
    stops_after: int | None = None
    asked: list[tuple[int, int]] = field(default_factory=list)

    def measure(
        self, kernel: str, axes: Mapping[str, int], largest: Any, *, cold: bool, graph: bool
    ) -> Row | None:
        if self.stops_after is not None and len(self.asked) >= self.stops_after:
            raise KeyboardInterrupt
        place = (axes["m"], axes["n"])
        is_first = place not in self.asked
        self.asked.append(place)
        if axes["n"] == 4096:
            return None
        point = next(one for one in POINTS if dict(one.axes) == dict(axes))
        seconds = usual_seconds(point) * (self.factors.get(place, 1.0) if is_first else 1.0)
        spread = self.spreads.get(place, 1.02) if is_first else 1.02
        return Row(measured_row(point, seconds, spread))


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> Timer:
    made = Timer()
    monkeypatch.setattr(collecting, "_timer", lambda measurement: (made, ORIGIN))
    return made


MEASUREMENT = Measurement("cpu", 1, TINY)


def rows_of(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


@needs_torch
def test_every_point_is_measured_once_and_a_second_run_measures_none(
    timer: Timer, tmp_path: Path
) -> None:
    log = tmp_path / "rows.jsonl"
    first = collect(POINTS, MEASUREMENT, log)
    assert (len(first.rows), first.new_rows) == (8, 8)
    assert len(timer.asked) == 8
    again = collect(POINTS, MEASUREMENT, log)
    assert (len(again.rows), again.new_rows) == (8, 0)
    assert again.rows == first.rows
    assert len(timer.asked) == 8


@needs_torch
def test_an_interrupted_run_leaves_whole_rows_and_the_next_goes_on(
    timer: Timer, tmp_path: Path
) -> None:
    log = tmp_path / "rows.jsonl"
    timer.stops_after = 3
    with pytest.raises(KeyboardInterrupt):
        collect(POINTS, MEASUREMENT, log)
    kept = rows_of(log)
    assert len(kept) == 3
    with log.open("ab") as file:
        file.write(b'{"kernel": "gemm_bf')  # a kill in the middle of a write
    timer.stops_after = None
    done = collect(POINTS, MEASUREMENT, log)
    assert (len(done.rows), done.new_rows) == (8, 5)
    assert rows_of(log)[:3] == kept
    assert len(set(map(row_key, rows_of(log)))) == 8


@needs_torch
def test_outliers_are_measured_again_and_the_shorter_row_holds(
    timer: Timer, tmp_path: Path
) -> None:
    timer.spreads = {(4, 128): 1.6}
    timer.factors = {(1, 256): 30.0}  # longer than four rows and sixteen take
    log = tmp_path / "rows.jsonl"
    done = collect(POINTS, replace(MEASUREMENT, sizes=replace(TINY, repeats=2)), log)
    again = [(row["axes"]["m"], row["axes"]["n"]) for row in rows_of(log) if row["repeat"]]
    assert (4, 128) in again
    assert (1, 256) in again
    assert len(again) == 2
    best = {(row["axes"]["m"], row["axes"]["n"]): row for row in done.rows}
    assert best[1, 256]["timing"]["seconds_median"] == pytest.approx(usual_seconds(POINTS[4]))


@needs_torch
def test_what_stays_spread_is_named(timer: Timer, tmp_path: Path) -> None:
    timer.spreads = {(16, 256): 2.0}
    no_repeats = replace(MEASUREMENT, sizes=replace(TINY, repeats=0))
    done = collect(POINTS, no_repeats, tmp_path / "rows.jsonl")
    assert [row["axes"]["n"] for row in done.doubtful] == [256]


@needs_torch
def test_rows_of_another_machine_are_left_alone(
    timer: Timer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "rows.jsonl"
    collect(POINTS[:4], MEASUREMENT, log)
    other = {**ORIGIN, "threads": 2}
    monkeypatch.setattr(collecting, "_timer", lambda measurement: (_Threaded(), other))
    done = collect(POINTS[:4], MEASUREMENT, log)
    assert done.new_rows == 4
    assert {row["provenance"]["threads"] for row in done.rows} == {2}
    assert len(rows_of(log)) == 8


class _Threaded(Timer):
    def measure(self, *args: Any, **kwargs: Any) -> Row | None:
        row = super().measure(*args, **kwargs)
        assert row is not None
        row.data["provenance"] = {**ORIGIN, "threads": 2}
        return row


@needs_torch
def test_what_a_device_does_not_run_is_named(timer: Timer, tmp_path: Path) -> None:
    missing = Point("gemm_nvfp4", {"m": 1, "n": 4096, "k": 64}, 1e-5, 1e5, graph=False)
    done = collect([*POINTS[:2], missing], MEASUREMENT, tmp_path / "rows.jsonl")
    assert done.not_run == ("gemm_nvfp4",)
    assert len(done.rows) == 2


@needs_torch
def test_progress_says_what_is_measured_and_how_long_the_rest_takes(
    timer: Timer, tmp_path: Path
) -> None:
    told: list[tuple[str, float]] = []
    collect(POINTS, MEASUREMENT, tmp_path / "rows.jsonl", lambda *one: told.append(one))
    assert len(told) == 8
    assert all(text.startswith("measuring gemm_bf16, about ") for text, _ in told)
    assert [share for _, share in told] == sorted(share for _, share in told)


def test_a_group_is_estimated_by_its_weight_and_its_calls() -> None:
    small, *_ = grouped(POINTS)
    (longer,) = grouped([replace(POINTS[3], estimate_s=0.05)])
    assert estimate_s(longer, MEASUREMENT) > estimate_s(small, MEASUREMENT) > 0.0


@needs_torch
def test_killed_at_ten_random_times_no_committed_row_is_lost_and_none_is_there_twice(
    tmp_path: Path,
) -> None:
    log = tmp_path / "rows.jsonl"
    program = [sys.executable, "-m", "tests.calibrate.killed_calibration", str(log), "7"]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(
        program, capture_output=True, text=True, check=False, cwd=ROOT, env=one_thread, timeout=120
    )
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(reports) == 11
    assert sum(report["killed"] for report in reports) == 10
    before: list[str] = []
    for report in reports:
        keys = report["keys"]
        assert len(set(keys)) == len(keys)
        assert keys[: len(before)] == before
        before = keys
    assert sum('"repeat": 0' in key for key in before) == reports[-1]["points"]
    grown = {len(report["keys"]) for report in reports}
    assert len(grown) > 4  # kills fell while rows were being measured
