"""Measure a grid on this machine, row by row, into a log that a killed run goes on with."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonnage.calibrate.points import Group, Point, grouped
from tonnage.calibrate.sizes import Sizes

if TYPE_CHECKING:
    from tonnage.kernels.point_timing import PointTimer
    from tonnage.kernels.provenance import Provenance
    from tonnage.kernels.row_log import RowLog

Row = Mapping[str, Any]
ReportProgress = Callable[[str, float], None]

SPREAD_MOST = 1.25  # p80 over p20 of a row's samples
FALL_MOST = 1.15  # how much longer less work may take than more
_REPEATED_SHARE = 0.1  # of the grid, the worst: more outliers are the machine's noise
_REPEATED_LEAST = 8
# Beside the calls: cutting inputs, writing the row; on a GPU, assumed, capturing the graph too.
_POINT_S = {"cpu": 4e-3, "cuda": 24e-3}
# How fast random weights are made, packed and copied, by a CPU and by a GPU.
_SET_UP_BYTES_PER_S = {"cpu": 0.5e9, "cuda": 2e10}
# Reading a GPU's clocks while it is busy takes 0.2 s, every 4 s (kernels.timing).
_CLOCKS_SHARE = {"cpu": 0.0, "cuda": 0.2 / 4.0}
_SLOWDOWN = 3.0  # a call over its roofline, before any was measured


@dataclass(frozen=True, slots=True)
class Measurement:
    """How to measure: a device (`cpu`, `cuda`, `cuda:1`), a CPU's threads, and the grid's sizes."""

    device: str
    threads: int
    sizes: Sizes
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Collected:
    """The best row of every point, those not to be trusted, and what the device does not run."""

    rows: tuple[Row, ...]
    doubtful: tuple[Row, ...]
    not_run: tuple[str, ...]
    measured_s: float  # wall time of this run
    new_rows: int
    not_reached: int = 0  # points that the budget left no time for


def row_key(row: Row) -> str:
    """Return what makes a row another measurement: kernel, axes, machine, versions, repeat."""
    origin = row["provenance"]
    parts = {name: row[name] for name in ("kernel", "backend", "axes", "cold", "graph", "repeat")}
    parts |= {name: origin[name] for name in ("device", "driver", "threads", "torch", "triton")}
    return json.dumps(parts, sort_keys=True)


def point_key(row: Row) -> str:
    """Return what repeats of one point have in common."""
    return json.dumps([row[name] for name in ("kernel", "axes", "cold", "graph")], sort_keys=True)


def collect(
    points: Iterable[Point],
    measurement: Measurement,
    log: Path,
    progress: ReportProgress | None = None,
    budget_s: float | None = None,
) -> Collected:
    """Measure what the log lacks, then outliers again, and return every point's best row.

    A row is on disk before the next is begun. Rows of other machines, drivers or versions of torch
    and Triton that lie in the log are left alone and not used. After `budget_s` of wall time no
    point is begun.
    """
    from tonnage.kernels.row_log import RowLog

    groups = grouped(points)
    with RowLog(log, row_key) as rows:
        run = _Run(rows, measurement, _Clock(groups, measurement, progress), budget_s)
        run.every(groups)
        run.outliers(groups)
        return run.collected(groups)


class _Run:
    def __init__(
        self, log: RowLog, measurement: Measurement, clock: _Clock, budget_s: float | None
    ) -> None:
        self._log = log
        self._clock = clock
        self._budget_s = budget_s
        self._repeats = measurement.sizes.repeats
        self._timer, self._origin = _timer(measurement)
        self._not_run: set[str] = set()
        self._before = len(log.rows)

    def every(self, groups: Sequence[Group]) -> None:
        known = self._known()
        for group in groups:
            missing = [point for point in group.points if _name(point) not in known]
            self._clock.skip(len(group.points) - len(missing))
            for point in missing:
                if not self._is_over():
                    self._measure(group, point, 0)

    def outliers(self, groups: Sequence[Group]) -> None:
        """Measure again what is spread, or takes longer than more work does."""
        for repeat in range(1, self._repeats + 1):
            known = self._known()
            again = [(group, point) for group in groups for point in _outliers(group, known)]
            again = [pair for pair in again if len(known[_name(pair[1])]) == repeat]
            again = self._worst(again, known)
            self._clock.more([point for _, point in again])
            for group, point in again:
                if not self._is_over():
                    self._measure(group, point, repeat)

    def _is_over(self) -> bool:
        """Say whether the budget is spent; one row there is, however small it was."""
        is_spent = self._budget_s is not None and self._clock.spent_s > self._budget_s
        return is_spent and bool(self._log.rows)

    def _worst(
        self, again: list[tuple[Group, Point]], known: Mapping[str, list[Row]]
    ) -> list[tuple[Group, Point]]:
        """Return the outliers that lie farthest apart, in the order of the grid."""
        most = max(int(_REPEATED_SHARE * len(known)), _REPEATED_LEAST)
        spreads = sorted((_spread(_best(known[_name(point)])) for _, point in again), reverse=True)
        least = spreads[most] if len(spreads) > most else 0.0
        return [one for one in again if _spread(_best(known[_name(one[1])])) > least]

    def collected(self, groups: Sequence[Group]) -> Collected:
        known = self._known()
        wanted = [_name(point) for group in groups for point in group.points]
        rows = [_best(known[name]) for name in wanted if name in known]
        doubtful = [row for row in rows if _spread(row) > SPREAD_MOST]
        fresh = len(self._log.rows) - self._before
        spent_s = self._clock.spent_s
        not_run = tuple(sorted(self._not_run))
        kernels = {point.kernel for group in groups for point in group.points} - self._not_run
        runnable = sum(point.kernel in kernels for group in groups for point in group.points)
        not_reached = max(runnable - len(rows), 0) if self._is_over() else 0
        return Collected(tuple(rows), tuple(doubtful), not_run, spent_s, fresh, not_reached)

    def _measure(self, group: Group, point: Point, repeat: int) -> None:
        self._clock.begin(point, repeat)
        row = self._timer.measure(
            point.kernel, point.axes, group.largest, cold=point.cold, graph=point.graph
        )
        if row is None:
            self._not_run.add(point.kernel)
        else:
            self._log.append({**row.as_row(), "repeat": repeat})
        self._clock.end(point)

    def _known(self) -> dict[str, list[Row]]:
        """Return the rows of this machine by point, in the order of their repeats."""
        known: dict[str, list[Row]] = {}
        for row in self._log.rows:
            if same_machine(row["provenance"], self._origin):
                known.setdefault(point_key(row), []).append(row)
        return known


def _timer(measurement: Measurement) -> tuple[PointTimer, Row]:
    from tonnage.kernels.point_timing import PointTimer
    from tonnage.kernels.timing import Method

    sizes, device = measurement.sizes, measurement.device
    method = Method(
        device=device,
        threads=measurement.threads,
        warm_ups=2,
        samples=sizes.samples,
        sample_s=sizes.sample_s,
        budget_s=sizes.budget_s,
        seed=measurement.seed,
    )
    origin, facts = provenance_of(measurement)
    return PointTimer(method, origin), facts


def provenance_of(measurement: Measurement) -> tuple[Provenance, Row]:
    """Return what is measured on, and the same as rows hold it."""
    from tonnage.kernels.provenance import provenance

    origin = provenance(measurement.device, measurement.threads)
    return origin, asdict(origin)


def same_machine(one: Row, other: Row) -> bool:
    """Say whether two rows' provenances are of one machine with the same versions."""
    names = ("device", "driver", "threads", "torch", "triton")
    return all(one[name] == other[name] for name in names)


def _name(point: Point) -> str:
    values = (point.kernel, dict(point.axes), point.cold, point.graph)
    return json.dumps(values, sort_keys=True)


# --- outliers -----------------------------------------------------------------------------------


def _spread(row: Row) -> float:
    timing = row["timing"]
    return float(timing["seconds_p80"] / timing["seconds_p20"])


def _seconds(row: Row) -> float:
    return float(row["timing"]["seconds_median"])


def _best(rows: Sequence[Row]) -> Row:
    """Return the row with the shortest p80: what disturbs a measurement makes it longer."""
    return min(rows, key=lambda row: float(row["timing"]["seconds_p80"]))


def _outliers(group: Group, known: Mapping[str, list[Row]]) -> list[Point]:
    measured = [
        (point, _best(known[_name(point)])) for point in group.points if _name(point) in known
    ]
    found = []
    for index, (point, row) in enumerate(measured):
        after = [_seconds(later) for _, later in measured[index + 1 : index + 3]]
        falls = bool(after) and _seconds(row) > FALL_MOST * max(after)
        if falls or _spread(row) > SPREAD_MOST:
            found.append(point)
    return found


# --- time left ----------------------------------------------------------------------------------


class _Clock:
    """Says what is measured and how long the rest will take, from what the past took."""

    def __init__(
        self, groups: Sequence[Group], measurement: Measurement, progress: ReportProgress | None
    ) -> None:
        self._progress = progress
        self._begun = time.monotonic()
        self._left_s = sum(estimate_s(group, measurement) for group in groups)
        self._points = sum(len(group.points) for group in groups)
        self._done = 0
        self._estimated_s = 0.0
        self._shown = ""
        self._mean_s = self._left_s / max(self._points, 1)

    @property
    def spent_s(self) -> float:
        """Wall time since the clock was made."""
        return time.monotonic() - self._begun

    def skip(self, points: int) -> None:
        self._done += points
        self._left_s -= points * self._mean_s

    def more(self, points: Sequence[Point]) -> None:
        self._points += len(points)
        self._left_s = len(points) * self._mean_s

    def begin(self, point: Point, repeat: int) -> None:
        if self._progress is None:
            return
        pace = self.spent_s / self._estimated_s if self._estimated_s > 1.0 else 1.0
        left_s = max(self._left_s, 0.0) * pace
        again = " again" if repeat else ""
        text = f"measuring {point.kernel}{again}, about {_rough(left_s)} left"
        self._progress(text, self._done / max(self._points, 1))

    def end(self, point: Point) -> None:
        self._done += 1
        self._estimated_s += self._mean_s
        self._left_s -= self._mean_s


def _rough(seconds: float) -> str:
    """Return a time as it is said: to ten seconds, or to minutes."""
    if seconds < 90:
        return f"{max(10, round(seconds / 10) * 10)} s"
    return f"{round(seconds / 60)} min"


def estimate_s(group: Group, measurement: Measurement) -> float:
    """Return about how long a group takes: making its inputs, then a few calls of every point."""
    sizes, kind = measurement.sizes, measurement.device.partition(":")[0]
    held = max(point.held_bytes for point in group.points)
    calls_s = 0.0
    for point in group.points:
        call_s = _SLOWDOWN * point.estimate_s
        longest_s = max(sizes.samples * max(sizes.sample_s, call_s), 0.0)
        calls_s += min(longest_s, max(sizes.budget_s, 3 * call_s)) + 2 * call_s + _POINT_S[kind]
    return held / _SET_UP_BYTES_PER_S[kind] + calls_s * (1.0 + _CLOCKS_SHARE[kind])
