"""`plan`: the cheapest fleet that meets the objectives of a scenario.

The space is built and screened (plan_space, sim/planning), the cheapest that may do are simulated
(plan_search), and what is found is told: two answers, the front, and why others lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from tonnage.plan_fleets import check_plannable, fleet_data, fleet_plan, load_text
from tonnage.plan_margins import Margin, margins
from tonnage.plan_ranks import Ranks, ranks
from tonnage.plan_reasons import (
    FrontPoint,
    Rejected,
    front_points,
    reason_of,
    rejected,
    what_binds,
)
from tonnage.plan_runs import planned_load, session_users
from tonnage.plan_search import Search, Told, Trial, screened_tables
from tonnage.plan_space import Space, plan_gpus
from tonnage.plan_what_if import WhatIf, what_if
from tonnage.scenarios.prices import gpu_hour_usd
from tonnage.scenarios.schema import Scenario
from tonnage.sim.domain import InfeasibleError
from tonnage.sim.planning.fleet_plan import FleetPlan
from tonnage.sim.planning.search import fewest, lowest_rate
from tonnage.sim.planning.workers import ProcessWorkers, ThisProcess, Workers, cpu_count
from tonnage.sim.planning.workload import workload_of

_SAMPLE = 96  # requests that the screening works with
_WORKERS = 2  # more would wait: two fleets are simulated side by side


class NoFleetError(InfeasibleError):
    """No fleet meets the objectives; `nearest` is the one that comes closest."""

    def __init__(self, message: str, nearest: FleetPlan | None) -> None:
        super().__init__(message)
        self.nearest = nearest


@dataclass(frozen=True, slots=True)
class PlanReport:
    """What `plan` found. `launchable` is None where no fleet that stock engines start passed."""

    scenario: Scenario
    load: str
    best: FleetPlan
    launchable: FleetPlan | None
    front: tuple[FrontPoint, ...]
    rejected: tuple[Rejected, ...]
    candidates: int
    configurations: int
    files: dict[str, dict[str, Any]]  # scenario data of the answers, as `simulate` reads it
    margins: tuple[Margin, ...] = ()
    ranks: Ranks | None = None
    what_if: WhatIf | None = None

    @property
    def price_gap_usd_per_hour(self) -> float | None:
        """What it costs more to do with stock engines."""
        if self.launchable is None:
            return None
        return self.launchable.figures.usd_per_hour - self.best.figures.usd_per_hour

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of the `plan` verb."""
        found = {
            "scenario": self.scenario.resolved(),
            "provenance": self.best.to_dict()["provenance"],
            "load": self.load,
            "best": self.best.to_dict(),
            "launchable": None if self.launchable is None else self.launchable.to_dict(),
            "price_gap_usd_per_hour": self.price_gap_usd_per_hour,
            "front": [asdict(one) for one in self.front],
            "rejected": [asdict(one) for one in self.rejected],
            "margins": [asdict(one) for one in self.margins],
            "candidates": self.candidates,
            "configurations": self.configurations,
        }
        asked = {"ranks": self.ranks, "what_if": self.what_if}
        return found | {name: asdict(one) for name, one in asked.items() if one is not None}


def plan(
    scenario: Scenario,
    *,
    workers: int | None = None,
    rank: int = 0,
    compare: bool = False,
    what_ifs: bool = False,
    progress: Told | None = None,
) -> PlanReport:
    """Return the cheapest fleet that meets the objectives; the same seed gives the same plan.

    `workers`: processes that simulate, by default two; 1 is this one. `rank`: so many of the best
    screened fleets are simulated to see how well the screening orders them. `compare`: so are the
    cheapest fleets with another format in one pool, for the margins. `what_ifs`: instances and
    regions down, growth, and what the cost hangs on. Raises BadInputError without objectives or
    prices, NoFleetError where nothing within the limits meets them.
    """
    told: Told = progress or (lambda _text, _share: None)
    check_plannable(scenario)
    for gpu in plan_gpus(scenario):
        gpu_hour_usd(scenario, gpu)  # a GPU without a price is told before the work
    load = planned_load(scenario, scenario.plan.requests)
    workload = workload_of(load.traffic, load.point, scenario.seed)
    if load.traffic.kind == "sessions":
        users = session_users(load)
        load = replace(
            load,
            point=replace(load.point, concurrency=users, rate_per_s=None),
            think_s=workload.think_s,
            session_rate_per_s=load.point.rate_per_s,
        )
        workload = replace(workload, users=users)
    space = Space(scenario, workload.sampled(_SAMPLE, scenario.seed))
    with _executor(workers) as pool:
        tables = screened_tables(space, scenario, told)
        search = Search(scenario, space, tables, load, pool, told)
        search.run()
        if search.best is None:
            raise _infeasible(search)
        ranked = ranks(search, rank) if rank else None
        found = tuple(margins(search, simulate=compare))
        asked = what_if(search) if what_ifs else None
    return replace(_report(search, found, ranked), what_if=asked)


@contextmanager
def _executor(count: int | None) -> Iterator[Any]:
    """Give an executor that has begun to import what runs need."""
    wanted = min(_WORKERS, cpu_count()) if count is None else count
    if wanted <= 1:
        yield ThisProcess()
        return
    workers: Workers = ProcessWorkers(wanted)
    try:
        pool = workers.executor()
        for _ in range(wanted):
            pool.submit(_import_all)
        yield pool
    except BaseException:
        workers.stop()
        raise
    workers.close()


def _import_all() -> None:
    """Load in a worker what it will need, while the parent screens."""
    import tonnage.plan_runs  # noqa: F401 - to be there, not to be used


def _report(search: Search, found: tuple[Margin, ...], ranked: Ranks | None) -> PlanReport:
    assert search.best is not None
    tables, scenario = search.tables, search.scenario
    answers = {"best": search.best, "launchable": search.launchable}
    plans = {name: _plan_of(search, one) for name, one in answers.items() if one is not None}
    return PlanReport(
        scenario=scenario,
        load=load_text(search.load),
        best=plans["best"],
        launchable=plans.get("launchable"),
        front=tuple(front_points(tables)),
        rejected=tuple(rejected(search)),
        candidates=sum(len(table.screened.fleets) for table in tables),
        configurations=sum(len(found) for found in search.space.options.values()),
        files={
            name: fleet_data(scenario, one.fleet, search.load)
            for name, one in answers.items()
            if one is not None
        },
        margins=found,
        ranks=ranked,
    )


def _plan_of(search: Search, trial: Trial) -> FleetPlan:
    binds = what_binds(search, trial.usd_per_hour)
    return fleet_plan(search.scenario, trial.fleet, search.load, trial.runs, binds)


# --- nothing does -------------------------------------------------------------------------------


def _infeasible(search: Search) -> InfeasibleError:
    """Return the error that names the nearest fleet and what it misses."""
    scenario, source = search.scenario, search.scenario.origin()[0]
    limit = f"within {scenario.plan.max_gpus} GPUs"
    usable = [table for table in search.tables if len(table.screened.fleets)]
    if not usable and search.space.options:
        return NoFleetError(
            f"{source}: no fleet {limit} does the load, which asks for {_gpus_asked(search)} or "
            "more; raise plan.max_gpus or lower the load",
            None,
        )
    if not usable:
        reasons = list(search.space.refused.values())
        first = f"; {reasons[-1]}" if reasons else ""
        return NoFleetError(f"{source}: no pool of the plan fits {limit}{first}", None)
    trials = search.trials or _nearest_screened(search)
    if not trials:
        table = max(usable, key=lambda one: float(one.screened.fleets.usd_per_hour.max()))
        row = int(np.argmax(table.screened.fleets.usd_per_hour))
        reason = reason_of(table.screened, row, scenario.objectives())
        return NoFleetError(
            f"{source}: no fleet {limit} does the load; the largest, {table.fleet(row).text}: "
            f"{reason}; raise plan.max_gpus or lower the load",
            None,
        )
    nearest = min(trials, key=lambda one: one.worst)
    one = nearest.binds
    reached = f"{one.name} {one.reached.upper:.3g} s"
    if one.reached.upper > one.reached.value:
        reached = f"{one.name} {one.reached.value:.3g} s (up to {one.reached.upper:.3g} s)"
    message = (
        f"{source}: no fleet {limit} meets the objectives; the nearest, {nearest.fleet.text} at "
        f"{nearest.usd_per_hour:.2f} USD an hour, reaches {reached} where the limit is "
        f"{one.limit_s:g} s: {one.name} binds; loosen slo.{one.name} or raise plan.max_gpus"
    )
    plan = fleet_plan(scenario, nearest.fleet, search.load, nearest.runs, one.name)
    return NoFleetError(message, plan)


def _gpus_asked(search: Search) -> int:
    """Return the fewest GPUs of any shape that could do the load, were every prefix found."""
    workload = search.space.workload
    rate = lowest_rate(workload, search.scenario.objectives())
    least: dict[str, int] = {}
    for (_, role), options in search.space.options.items():
        for option in options:
            gpus = option.gpus * fewest(option, workload, rate)
            least[role] = min(gpus, least.get(role, gpus))
    found = [least["serve"]] if "serve" in least else []
    if "prefill" in least and "decode" in least:
        found.append(least["prefill"] + least["decode"])
    return min(found, default=0)


def _nearest_screened(search: Search) -> list[Trial]:
    """Simulate the fleets that the screening finds nearest to the objectives."""
    keys = [
        (index, int(row))
        for index, table in enumerate(search.tables)
        for row in np.argsort(table.screened.worst, kind="stable")[:2]
        if np.isfinite(table.screened.worst[row])
    ]
    return search.simulated(keys, search.seeds[:1])
