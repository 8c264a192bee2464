"""A calibration that its budget ends makes a profile of what it has, and the next goes on."""

from __future__ import annotations

from datetime import date
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.calibrate.measured_rows import ORIGIN, TINY, measured_row, measured_rows, usual_seconds
from tonnage.calibrate import collect as collecting
from tonnage.calibrate.collect import Measurement, collect
from tonnage.calibrate.grid import grid
from tonnage.calibrate.own_profile import profile_of
from tonnage.calibrate.points import Point, grouped
from tonnage.calibrate.wanted import wanted_of
from tonnage.scenarios.catalogue import load_gpu
from tonnage.sim.cost.operator_models import operator_models

GPU = load_gpu("cpu")


def planned(*names: str) -> list[Point]:
    points = grid(wanted_of(names, "cpu"), TINY, GPU, on_gpu=False).points
    return [point for group in grouped(points) for point in group.points]


@pytest.mark.parametrize("share", [0.01, 0.4, 0.7])
def test_any_beginning_of_a_grid_makes_a_profile(share: float) -> None:
    points = planned("laptop")
    begun = points[: max(1, round(share * len(points)))]
    profile = profile_of(measured_rows(begun), "cpu", day=date(2026, 11, 30))
    operator_models(profile, GPU)
    assert sum(len(table) for table in profile.tables.values()) > 0.5 * len(begun)


class _Row:
    def __init__(self, data: Any) -> None:
        self.data = data

    def as_row(self) -> Any:
        return {name: value for name, value in self.data.items() if name != "repeat"}


def test_no_point_is_begun_after_the_budget_and_the_next_run_measures_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    points = {one.identity: one for one in planned("laptop-gqa")}

    class Timer:
        def measure(self, kernel: str, axes: Any, largest: Any, *, cold: bool, graph: bool) -> _Row:
            point = points[Point(kernel, axes, 0.0, 0.0, cold, graph).identity]
            return _Row(measured_row(point, usual_seconds(point)))

    seconds = count()
    monkeypatch.setattr(collecting, "_timer", lambda measurement: (Timer(), ORIGIN))
    monkeypatch.setattr(collecting.time, "monotonic", lambda: float(next(seconds)))
    log = tmp_path / "rows.jsonl"
    first = collect(points.values(), Measurement("cpu", 1, TINY), log, budget_s=40.0)
    assert 0 < first.new_rows <= 40
    assert first.not_reached == len(points) - first.new_rows
    rest = collect(points.values(), Measurement("cpu", 1, TINY), log)
    assert (rest.new_rows, rest.not_reached) == (first.not_reached, 0)
