"""How sure predicted and executed figures are: the scenario simulated with all steps off one way.

Predicted: every step at the low, then at the high end of its prediction's interval, all operators
off the same way, as in `explain`. Executed: every step at the lowest 20 % quantile, then at the
highest 80 % quantile, of the samples of a measured step of its stratum. Both are cautious: real
steps are not all off at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tonnage import api
from tonnage.execution import ExecutionReport, PoolExecution, compared
from tonnage.scenarios.schema import Scenario
from tonnage.scenarios.schema_pools import Role
from tonnage.sim.cost.operator_times import interval_factors
from tonnage.sim.cost.step_time import StepPredictor
from tonnage.sim.cost.strata import (
    CorrectedExecutor,
    Correction,
    Measurement,
    Phase,
    Stratum,
    Visited,
)
from tonnage.step_times import StepTimes

Figures = dict[str, float]
Interval = tuple[float, float]
Corrections = Mapping[Role, Correction]


@dataclass(frozen=True, slots=True)
class FigureIntervals:
    """The intervals of one point's figures, by name."""

    predicted: Mapping[str, Interval]
    executed: Mapping[str, Interval]


def intervals_of(
    scenario: Scenario,
    times: Mapping[Role, StepTimes],
    report: ExecutionReport,
    spreads: Mapping[Role, Sequence[Interval]],
) -> list[FigureIntervals]:
    """Return the intervals of every point's figures."""
    pools = report.pools
    factors = {
        role: step_intervals(times[role].executor, pool.visited) for role, pool in pools.items()
    }
    ranges = {role: measured_ranges(pool, spreads[role]) for role, pool in pools.items()}
    bounds = [[_corrections(pools, found, end) for end in (0, 1)] for found in (factors, ranges)]
    predicted, executed = (
        [figures_with(scenario, times, one) for one in corrections] for corrections in bounds
    )
    found = []
    for index, (one, other) in enumerate(_centres(report)):
        found.append(
            FigureIntervals(
                _spanned([one, *(ends[index] for ends in predicted)]),
                _spanned([other, *(ends[index] for ends in executed)]),
            )
        )
    return found


def step_intervals(
    predictor: StepPredictor, visited: Mapping[Stratum, Visited]
) -> dict[Stratum, Interval]:
    """Return the factors of each stratum's prediction, from one step of it."""
    return {
        stratum: interval_factors(predictor.times(seen.samples()[0]))
        for stratum, seen in visited.items()
    }


def measured_ranges(pool: PoolExecution, spreads: Sequence[Interval]) -> dict[Stratum, Interval]:
    """Return measured over predicted of each stratum: its steps' lowest and highest samples."""
    found: dict[Stratum, Interval] = {}
    for one, (low, high) in zip(pool.measurements, spreads, strict=True):
        ratio = one.measured_s / one.predicted_s
        least, most = found.get(one.stratum, (ratio * low, ratio * high))
        found[one.stratum] = min(least, ratio * low), max(most, ratio * high)
    return found


def figures_with(
    scenario: Scenario, times: Mapping[Role, StepTimes], corrections: Corrections
) -> list[Figures]:
    """Return every point's figures where predicted steps take some factors as long."""
    corrected = {
        role: replace(one, executor=CorrectedExecutor(one.executor, corrections[role]))
        for role, one in times.items()
    }
    points = api.simulate(scenario, times=corrected).to_dict()["points"]
    return [_values(point) for point in points]


def _values(point: Mapping[str, Any]) -> Figures:
    """Return the figures that predicted and executed runs are compared by."""
    return {name: pair["executed"] for name, pair in compared(point, point).items()}


def _centres(report: ExecutionReport) -> Iterable[tuple[Figures, Figures]]:
    both = (report.predicted.points, report.executed.points)
    return [
        (_values(one.figures), _values(other.figures)) for one, other in zip(*both, strict=True)
    ]


def _spanned(runs: Sequence[Figures]) -> dict[str, Interval]:
    """Return the least and the most of every figure that all runs have."""
    names = [name for name in runs[0] if all(name in one for one in runs)]
    return {
        name: (min(one[name] for one in runs), max(one[name] for one in runs)) for name in names
    }


def _corrections(
    pools: Mapping[Role, PoolExecution],
    factors: Mapping[Role, Mapping[Stratum, Interval]],
    end: int,
) -> dict[Role, Correction]:
    """Return the low or the high factors; strata without one take the mean of their phase."""
    found = {}
    for role, pool in pools.items():
        ends = {stratum: pair[end] for stratum, pair in factors[role].items()}
        found[role] = Correction(ends, _means(ends, pool.visited))
    return found


def _means(
    factors: Mapping[Stratum, float], visited: Mapping[Stratum, Visited]
) -> dict[Phase, float]:
    """Return the mean factor of a phase, weighted by the time of its strata."""
    sums: dict[Phase, tuple[float, float]] = {}
    for stratum, factor in factors.items():
        seconds = visited[stratum].seconds
        total, weighted = sums.get(stratum.phase, (0.0, 0.0))
        sums[stratum.phase] = total + seconds, weighted + seconds * factor
    return {phase: weighted / total for phase, (total, weighted) in sums.items()}


def without_drift(
    measurements: Iterable[Measurement], ratios: Mapping[Phase, float]
) -> list[Measurement]:
    """Return the measurements divided by the drift of their phase."""
    return [
        replace(one, measured_s=one.measured_s / ratios.get(one.stratum.phase, 1.0))
        for one in measurements
    ]
