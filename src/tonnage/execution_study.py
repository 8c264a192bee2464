"""What `execute` reports beside predicted and executed figures: intervals, and the drift."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tonnage.execution import ExecutionReport
from tonnage.execution_intervals import (
    FigureIntervals,
    figures_with,
    intervals_of,
    without_drift,
)
from tonnage.pools import built_pools, times_of
from tonnage.scenarios.schema import Scenario
from tonnage.scenarios.schema_pools import Role
from tonnage.sim.cost.strata import Phase, correction
from tonnage.step_times import StepTimes
from tonnage.watched_devices import Watch


@dataclass(frozen=True, slots=True)
class ExecutionStudy:
    """An execution with the intervals of its figures and, where there is one, without its drift."""

    report: ExecutionReport
    intervals: tuple[FigureIntervals, ...]
    drift: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of the `execute` verb."""
        found = self.report.to_dict()
        for point, intervals in zip(found["points"], self.intervals, strict=True):
            for name, pair in point["figures"].items():
                pair |= _judged(pair["executed"], name, intervals)
        return found | {"drift": self.drift}


def _judged(executed: float, name: str, intervals: FigureIntervals) -> dict[str, Any]:
    low, high = intervals.predicted[name]
    is_known = low < high  # the datasheet gives a bound, and no interval
    return {
        "predicted_interval": [low, high] if is_known else None,
        "executed_interval": list(intervals.executed[name]),
        "inside": low <= executed <= high if is_known else None,
    }


def studied(scenario: Scenario, report: ExecutionReport, watch: Watch) -> ExecutionStudy:
    """Add intervals and drift to an execution whose devices were watched."""
    times = times_of(scenario, built_pools(scenario))
    intervals = tuple(intervals_of(scenario, times, report, watch.spreads))
    if not watch.drift:
        why = watch.why_not or "the device runs none of the kernels that the profile measured"
        return ExecutionStudy(report, intervals, {"profile": None, "why_not": why})
    reasons = [watch.why_not, *(found.why_not_divided() for found in watch.drift.values())]
    why_not = next((one for one in reasons if one is not None), None)
    points = [] if why_not is not None else _without(scenario, times, report, watch)
    drift = {
        "profile": watch.profile,
        "why_not": why_not,
        "pools": {role: found.to_dict() for role, found in watch.drift.items()},
        "points": points,
    }
    return ExecutionStudy(report, intervals, drift)


def _without(
    scenario: Scenario, times: Mapping[Role, StepTimes], report: ExecutionReport, watch: Watch
) -> list[dict[str, Any]]:
    """Return executed figures and errors of every point with the drift divided out."""
    ratios: dict[Role, dict[Phase, float]] = {
        role: {phase: one.ratio for phase, one in found.phases.items()}
        for role, found in watch.drift.items()
    }
    corrections = {
        role: correction(without_drift(pool.measurements, ratios.get(role, {})), pool.visited)
        for role, pool in report.pools.items()
    }
    executed = figures_with(scenario, times, corrections)
    raw = report.to_dict()["points"]
    return [
        {
            "concurrency": point["concurrency"],
            "rate_per_s": point["rate_per_s"],
            "figures": {
                name: {"executed": found[name], "error": _error(pair, found[name])}
                for name, pair in point["figures"].items()
                if name in found
            },
        }
        for point, found in zip(raw, executed, strict=True)
    ]


def _error(pair: Mapping[str, Any], executed: float) -> float | None:
    return pair["predicted"] / executed - 1.0 if executed else None
