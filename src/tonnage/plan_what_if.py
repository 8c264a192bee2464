"""What-ifs of a plan: instances down, a region down, growth, and what its cost hangs on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np

from tonnage.plan_fleets import objectives_reached
from tonnage.plan_reasons import constraint
from tonnage.plan_runs import RunFigures, grown
from tonnage.plan_search import Search, Trial
from tonnage.plan_tornado import Swing, tornado
from tonnage.sim.planning.fleet_plan import PlannedObjective
from tonnage.sim.planning.screen import Screened, screen

_DOWN = (1, 2)  # instances of a pool: N+1 and N+2
_REGIONS = (2, 3, 4)
_MOST_MONTHS = 120
_FACTOR_MOST, _BISECTIONS = 64.0, 30


@dataclass(frozen=True, slots=True)
class InstancesDown:
    """The plan with instances of one pool down all the time, simulated with every seed.

    `holds`: every bound is within its limit. No objectives where nothing is left to run.
    """

    role: str
    down: int
    left: int
    holds: bool
    objectives: tuple[PlannedObjective, ...]


@dataclass(frozen=True, slots=True)
class RegionDown:
    """One of so many equal regions is down, and the others carry its load; by closed form."""

    regions: int
    load_factor: float
    holds: bool


@dataclass(frozen=True, slots=True)
class Growth:
    """How far a load that grows every month can grow: by closed form, from what was simulated.

    `months`: after so many the objectives still hold, None for more than ten years. In the month
    after that `binds` is missed. `objectives`: of one simulation at the load of the last month,
    None where no month passes.
    """

    per_month: float
    load_factor: float
    months: int | None
    binds: str | None
    objectives: tuple[PlannedObjective, ...] | None


@dataclass(frozen=True, slots=True)
class WhatIf:
    """All what-ifs of the best plan."""

    instances_down: tuple[InstancesDown, ...]
    region_down: tuple[RegionDown, ...]
    growth: Growth
    tornado: tuple[Swing, ...]


def what_if(search: Search) -> WhatIf:
    """Work out every what-if of the best plan; the runs go on beside the closed forms."""
    best = search.best
    assert best is not None
    search.told("what-ifs: instances down", 0.0)
    started = list(_started(search, best))
    grower = _Grower(search, best)
    factor = grower.most()
    months = _months(search, factor)
    edge = _edge(search, best, months)
    search.told("what-ifs: what the cost hangs on", 0.5)
    swings = tuple(tornado(search))
    search.told("what-ifs: simulating", 0.8)
    return WhatIf(
        tuple(_ended(search, *one) for one in started),
        tuple(_regions(factor)),
        _growth(grower, factor, months, edge),
        swings,
    )


# --- instances ----------------------------------------------------------------------------------

_Started = tuple[str, int, int, list[Future[RunFigures]]]


def _started(search: Search, best: Trial) -> Iterator[_Started]:
    """Begin to run the plan with one and two instances of every pool down."""
    for config, count in best.fleet.pools:
        for down in _DOWN:
            left = max(count - down, 0)
            futures: list[Future[RunFigures]] = []
            if left:
                gone = f"router.down.{config.role}={list(range(down))}"
                futures = search.started(best.key, search.load, search.seeds, [gone])
            yield str(config.role), down, left, futures
            if not left:
                break  # two of one are no more than one of one


def _ended(
    search: Search, role: str, down: int, left: int, futures: list[Future[RunFigures]]
) -> InstancesDown:
    if not futures:
        return InstancesDown(role, down, left, holds=False, objectives=())
    reached = objectives_reached(search.scenario, [future.result() for future in futures])
    return InstancesDown(role, down, left, all(one.met for one in reached), reached)


# --- load ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Grower:
    """The best plan under other loads, by closed form: right by scale at the load of the plan."""

    search: Search
    best: Trial

    def worst(self, factor: float) -> tuple[float, str]:
        """Return the largest share of a limit under so many times the load, and of which one.

        What the simulation reached, bounds included, grows as the closed form says.
        """
        now, then = self._screened(1.0), self._screened(factor)
        objectives = self.search.scenario.objectives()
        if int(then.saturated[0]):
            return math.inf, constraint(then, 0, objectives)
        reached = [one.reached.upper / one.limit_s for one in self.best.objectives]
        shares = np.array(reached) * then.ratios[0] / now.ratios[0]
        return float(shares.max()), self.best.objectives[int(shares.argmax())].name

    def _screened(self, factor: float) -> Screened:
        table = self.search.tables[self.best.key[0]]
        fleets = table.screened.fleets.take(np.array([self.best.key[1]]))
        offer = replace(table.offer, workload=table.offer.workload.scaled(factor))
        return screen(offer, fleets, self.search.scenario.objectives())

    def most(self) -> float:
        """Return the largest multiple of the load at which all objectives are met."""
        low, high = 1.0, _FACTOR_MOST
        if self.worst(high)[0] <= 1.0:
            return high
        for _ in range(_BISECTIONS):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self.worst(middle)[0] <= 1.0 else (low, middle)
        return low


def _months(search: Search, factor: float) -> int | None:
    months = math.floor(math.log(factor) / math.log1p(search.scenario.plan.growth_per_month))
    return months if factor < _FACTOR_MOST and months <= _MOST_MONTHS else None


def _edge(search: Search, best: Trial, months: int | None) -> list[Future[RunFigures]]:
    """Begin one run at the load of the last month in which the closed form finds all well."""
    if not months:
        return []
    factor = (1 + search.scenario.plan.growth_per_month) ** months
    return search.started(best.key, grown(search.load, factor), search.seeds[:1])


def _growth(
    grower: _Grower, factor: float, months: int | None, edge: list[Future[RunFigures]]
) -> Growth:
    scenario = grower.search.scenario
    per_month = scenario.plan.growth_per_month
    binds = reached = None
    if months is not None:
        _, binds = grower.worst((1 + per_month) ** (months + 1))
    if edge:
        reached = objectives_reached(scenario, [future.result() for future in edge])
    return Growth(per_month, factor, months, binds, reached)


def _regions(factor: float) -> Iterator[RegionDown]:
    for regions in _REGIONS:
        carried = regions / (regions - 1)
        yield RegionDown(regions, carried, carried <= factor)
