"""Runs a scenario with step times that were measured on a device, beside the predicted ones.

One engine, two sources of time: a first pass finds which steps the scenario visits; of these a
sample is measured, those with the most time first; a second pass runs with what the sample says of
every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, Protocol

from tonnage import api
from tonnage.point_runs import Progress
from tonnage.pools import BuiltPool, built_pools, deployment_of, times_of
from tonnage.scenarios.schema import Scenario
from tonnage.scenarios.schema_pools import Role
from tonnage.sim.cost.step_time import StepPredictor
from tonnage.sim.cost.strata import (
    CorrectedExecutor,
    Measurement,
    Stratum,
    Visited,
    VisitingExecutor,
    correction,
    measuring_order,
    phases_of,
    share_measured,
)
from tonnage.sim.domain import BadInputError, Step
from tonnage.sim.engine.fleet import Deployment
from tonnage.sim.engine.simulate import simulate
from tonnage.sim.traffic.build import build_load
from tonnage.step_times import StepTimes

# What one device cannot run of a rank of several, and the prediction keeps; the last is the name
# of the datasheet's.
BETWEEN_RANKS = ("all_reduce", "pipeline_and_context_links", "collectives")
# Of watching the KV: the device runs the check and its mask, and nothing of a canary.
_CHECKED_HERE = ("integrity.tag_check", "integrity.launch")
_COMPARED = (
    ("throughput", "output_tokens_per_s"),
    *(("latency", metric) for metric in ("ttft_s", "tpot_s", "itl_s", "e2e_s")),
)
_QUANTILES = ("mean", "p50", "p95")


class StepDevice(Protocol):
    """Runs steps of one pool's rank for real."""

    def measure(self, step: Step) -> float:
        """Return the seconds of a step, the median of some repetitions."""

    def facts(self) -> dict[str, Any]:
        """Return what it runs on and with."""


class DeviceMaker(Protocol):
    """Opens a device for one pool, with room for the largest of the steps that may be asked."""

    def __call__(
        self, role: Role, pool: BuiltPool, steps: Sequence[Step], /
    ) -> AbstractContextManager[StepDevice]:
        """Return the device; it is closed before that of the next pool is opened."""


@dataclass(frozen=True, slots=True)
class PoolExecution:
    """What was measured of one pool's steps."""

    visited: Mapping[Stratum, Visited]
    measurements: tuple[Measurement, ...]
    device: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of one pool."""
        found = correction(self.measurements, self.visited)
        steps = sum(one.steps for one in self.visited.values())
        return {
            "device": self.device,
            "steps_visited": steps,
            "strata_visited": len(self.visited),
            "strata_measured": len({one.stratum for one in self.measurements}),
            "steps_measured": len(self.measurements),
            "share_of_time_measured": share_measured(self.measurements, self.visited),
            "measured_over_predicted": dict(found.by_phase),
        }


@dataclass(frozen=True, slots=True)
class ExecutionReport:
    """The same scenario with predicted and with measured step times."""

    predicted: api.SimulationReport
    executed: api.SimulationReport
    pools: dict[Role, PoolExecution]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of the `execute` verb."""
        predicted, executed = self.predicted.to_dict(), self.executed.to_dict()
        pairs = zip(predicted["points"], executed["points"], strict=True)
        return {
            "scenario": predicted["scenario"],
            "provenance": predicted["provenance"],
            "pools": {role: pool.to_dict() for role, pool in self.pools.items()},
            "points": [
                {
                    "concurrency": one["concurrency"],
                    "rate_per_s": one["rate_per_s"],
                    "figures": compared(one, other),
                }
                for one, other in pairs
            ],
            "predicted": predicted["points"],
            "executed": executed["points"],
        }


def compared(predicted: Mapping[str, Any], executed: Mapping[str, Any]) -> dict[str, Any]:
    """Return predicted, executed and relative error of the figures of one point."""
    found = {}
    for section, metric in _COMPARED:
        one, other = predicted[section].get(metric), executed[section].get(metric)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            for quantile in _QUANTILES:
                found[f"{metric}.{quantile}"] = _pair(one[quantile], other[quantile])
        elif one is not None and other is not None:
            found[metric] = _pair(one, other)
    return found


def _pair(predicted: float, executed: float) -> dict[str, float | None]:
    error = predicted / executed - 1.0 if executed else None
    return {"predicted": predicted, "executed": executed, "error": error}


def execute(
    scenario: Scenario,
    make_device: DeviceMaker,
    *,
    budget_s: float = 90.0,
    progress: Progress | None = None,
) -> ExecutionReport:
    """Simulate a scenario twice: with its profile's times, and with those of measured steps.

    `budget_s` of measuring is shared between the pools by the time that they spend in steps; the
    strata that it does not reach are corrected as the measured ones of their phase. Raises as
    `api.simulate` does, and BadInputError for a step that no device can run.
    """
    if budget_s <= 0.0:
        raise BadInputError(f"budget: {budget_s:g} s leaves nothing to measure; give more")
    pools = built_pools(scenario)
    times = times_of(scenario, pools)
    visited = _visited(scenario, deployment_of(scenario, pools, times), times)
    total_s = sum(_seconds(one) for one in visited.values())
    measured: dict[Role, PoolExecution] = {}
    for role, pool in pools.items():
        share = _seconds(visited[role]) / total_s if total_s else 0.0
        order = list(measuring_order(visited[role]))
        with make_device(role, pool, [step for _, step in order]) as device:
            told = None if progress is None else _told(progress, role)
            predictor = times[role].executor
            found = _measured(order, predictor, device, budget_s * share, told)
            steps = [step for _, step in order[: len(found)]]
            facts = device.facts() | _predicted_check(predictor, steps)
            measured[role] = PoolExecution(visited[role], found, facts)
    return ExecutionReport(
        api.simulate(scenario, progress=progress),
        api.simulate(scenario, times=_corrected(times, measured), progress=progress),
        measured,
    )


def _visited(
    scenario: Scenario, deployment: Deployment, times: Mapping[Role, StepTimes]
) -> dict[Role, dict[Stratum, Visited]]:
    """Run every point step by step, and return the steps of each pool."""
    visiting = {role: VisitingExecutor(one.executor, scenario.seed) for role, one in times.items()}
    watched = {
        str(role): replace(deployment.pools[role], executor=one) for role, one in visiting.items()
    }
    traffic = scenario.traffic_spec()
    for point in traffic.points():
        load = build_load(traffic, point, scenario.seed)
        simulate(replace(deployment, pools=watched), load, seed=scenario.seed, exact=True)
    return {role: one.visited for role, one in visiting.items()}


def _seconds(visited: Mapping[Stratum, Visited]) -> float:
    return sum(one.seconds for one in visited.values())


def _told(progress: Progress, role: Role) -> Callable[[float], None]:
    return lambda share: progress(f"measuring {role} steps", share)


def _measured(
    order: Sequence[tuple[Stratum, Step]],
    predictor: StepPredictor,
    device: StepDevice,
    budget_s: float,
    told: Callable[[float], None] | None,
) -> tuple[Measurement, ...]:
    """Measure steps until the budget is spent, one of each phase at least."""
    begun_s = monotonic()
    least = phases_of(stratum for stratum, _ in order)
    found: list[Measurement] = []
    for stratum, step in order:
        spent = (monotonic() - begun_s) / budget_s if budget_s else 1.0
        if len(found) >= least and spent >= 1.0:
            break
        if told is not None:
            told(min(spent, 1.0))
        elsewhere_s = _between_ranks_s(predictor, step)
        predicted_s = float(predictor.run(step, 1)[0])
        found.append(Measurement(stratum, device.measure(step) + elsewhere_s, predicted_s))
    return tuple(found)


def _between_ranks_s(predictor: StepPredictor, step: Step) -> float:
    """Return the predicted time of what goes between ranks, and of the host's part in checks."""
    return sum(
        one.seconds
        for one in predictor.times(step)
        if one.name in BETWEEN_RANKS
        or (one.name.startswith("integrity.") and one.name not in _CHECKED_HERE)
    )


def _predicted_check(predictor: StepPredictor, steps: Sequence[Step]) -> dict[str, float | None]:
    """Return the predicted seconds per step of what the device runs of a check, None without."""
    seconds = sum(
        one.seconds for step in steps for one in predictor.times(step) if one.name in _CHECKED_HERE
    )
    return {"tag_check_predicted_s": seconds / len(steps) if seconds else None}


def _corrected(
    times: Mapping[Role, StepTimes], measured: Mapping[Role, PoolExecution]
) -> dict[Role, StepTimes]:
    return {
        role: replace(
            one,
            executor=CorrectedExecutor(
                one.executor, correction(measured[role].measurements, measured[role].visited)
            ),
        )
        for role, one in times.items()
    }
