"""Simulates the points of a load, and further ones in search of a ceiling, on one deployment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tonnage.sim.domain import Objective
from tonnage.sim.engine.fleet import Deployment
from tonnage.sim.engine.simulate import simulate
from tonnage.sim.planning.ceiling import Verdict
from tonnage.sim.planning.load_search import (
    LoadAxis,
    ceiling_figures,
    find_ceiling,
    known_probes,
)
from tonnage.sim.planning.verdict import judge
from tonnage.sim.results import summary
from tonnage.sim.results.replications import figure_intervals, mean_figures
from tonnage.sim.results.run import RunResult
from tonnage.sim.results.timeline import Timeline
from tonnage.sim.traffic.build import build_load
from tonnage.sim.traffic.spec import LoadPoint, TrafficSpec

Progress = Callable[[str, float], None]  # (what is under way, share done)


@dataclass(frozen=True, slots=True)
class Bench:
    """One deployment and how loads are tried on it; `requests`: how many a load offers."""

    deployment: Deployment
    axis: LoadAxis
    objectives: tuple[Objective, ...]
    requests: int
    seeds: range
    exact: bool = False
    progress: Progress | None = None

    @property
    def _judged_objectives(self) -> tuple[Objective, ...]:
        """The objectives that the kind of load can meet: resident requests never arrive."""
        if self.axis.traffic.kind != "resident":
            return self.objectives
        return tuple(one for one in self.objectives if one.metric in ("tpot", "itl"))

    def runs(self, point: LoadPoint, timeline: Timeline | None = None) -> list[RunResult]:
        """Run a point once per seed; the first run fills the timeline."""
        return self._runs(self.axis.traffic, point, _label(self.axis.traffic, point), timeline)

    def verdict(self, runs: Sequence[RunResult]) -> Verdict:
        """Judge the runs of one load."""
        arrivals = not self.axis.counts_users
        return judge(runs, self._judged_objectives, self.axis.capacity, arrivals=arrivals)

    def ceilings(
        self, points: Sequence[LoadPoint], verdicts: Sequence[Verdict], *, search: bool
    ) -> dict[str, Any]:
        """Return the JSON object of `ceilings` from the points, or from a search around them."""
        known = known_probes(self.axis, points, verdicts)
        if not self._judged_objectives or not known:
            return ceiling_figures(self.axis, None, searched=False)
        found = find_ceiling(self.axis, known, self._probe if search else None)
        return ceiling_figures(self.axis, found, searched=search)

    def _probe(self, traffic: TrafficSpec, point: LoadPoint) -> Verdict:
        label = f"ceiling, {_label(traffic, point)}"
        return self.verdict(self._runs(traffic, point, label, None))

    def _runs(
        self, traffic: TrafficSpec, point: LoadPoint, label: str, timeline: Timeline | None
    ) -> list[RunResult]:
        runs = []
        for seed in self.seeds:
            run_label = label if len(self.seeds) == 1 else f"{label}, seed {seed}"
            run = simulate(
                self.deployment,
                build_load(traffic, point, seed),
                seed=seed,
                exact=self.exact,
                progress=self._told(run_label),
                timeline=timeline if seed == self.seeds[0] else None,
            )
            runs.append(run)
        return runs

    def _told(self, label: str) -> Callable[[int], None] | None:
        progress, requests = self.progress, self.requests
        if progress is None:
            return None
        progress(label, 0.0)
        return lambda ended: progress(label, ended / requests)

    def combined(
        self, figures: Sequence[dict[str, Any]], runs: Sequence[RunResult]
    ) -> dict[str, Any]:
        """Return the figures of a point with their intervals.

        From one run, by batch means; from several, the means of their figures and Student's
        interval of each.
        """
        if len(runs) == 1:
            resident = self.axis.traffic.kind == "resident"
            return figures[0] | summary.intervals(runs[0], resident=resident)
        means = mean_figures(figures)
        if "slo" in means:
            shares = [summary.objective_shares(run, self.objectives) for run in runs]
            means["slo"]["holds"] = summary.objectives_hold(self.objectives, shares)
        intervals = {name: list(found) for name, found in figure_intervals(figures).items()}
        return means | {"intervals": intervals, "replications": len(runs)}


def _label(traffic: TrafficSpec, point: LoadPoint) -> str:
    if point.concurrency is not None:
        return f"concurrency {point.concurrency}"
    if point.rate_per_s is not None:
        return f"rate {point.rate_per_s:g}/s"
    scale = 1.0 if traffic.trace is None else traffic.trace.rate_scale
    return traffic.kind if scale == 1.0 else f"{traffic.kind} x {scale:g}"
