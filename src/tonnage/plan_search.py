"""The two halves of a plan: thousands of fleets by closed forms, the best few by simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from typing import cast

from tonnage.plan_fleets import (
    Fleet,
    fleet_scenario,
    objectives_reached,
    stock_lacks,
)
from tonnage.plan_runs import PlannedLoad, RunFigures, simulate_fleet
from tonnage.plan_space import (
    PoolConfig,
    Setting,
    Space,
    configs_of,
    routers_of,
    settings_of,
)
from tonnage.scenarios.load import changed
from tonnage.scenarios.schema import Scenario
from tonnage.scenarios.schema_pools import Role
from tonnage.sim.domain import Objective
from tonnage.sim.planning.candidates import (
    NO_POOL,
    PoolOption,
    RouterOption,
    colocated,
    disaggregated,
)
from tonnage.sim.planning.fleet_plan import PlannedObjective
from tonnage.sim.planning.screen import Offer, Screened, screen
from tonnage.sim.planning.search import counts, looked_at, lowest_rate, price_order

Told = Callable[[str, float], None]
Key = tuple[int, int]  # (table, row) of a screened fleet

_ROWS = 16_000  # fleets that one table screens
_TOLERANCE = (
    1.2  # how far beyond an objective the screening may put a fleet that is still simulated
)
_PER_PRICE = 3  # fleets of one price that are simulated before the next dearer one
_SIDE_BY_SIDE = 2
_WORTH_MORE_RUNS = 0.9  # of a limit: a mean below it may pass by further runs
_LEARNT_AFTER = 4  # failures, before the screening is corrected by what was simulated


def config_of(option: PoolOption) -> PoolConfig:
    """Return what an option stands for; the screening knows it as a name and no more."""
    return cast(PoolConfig, option.config)


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Screened fleets of one shape and setting."""

    setting: Setting
    firsts: Sequence[PoolOption]
    seconds: Sequence[PoolOption]
    routers: Sequence[RouterOption]
    screened: Screened
    offer: Offer

    def fleet(self, row: int) -> Fleet:
        """Return one of them."""
        fleets = self.screened.fleets
        pools = [(self.firsts[int(fleets.first[row])], int(fleets.first_instances[row]))]
        if fleets.second[row] != NO_POOL:
            second = self.seconds[int(fleets.second[row])]
            pools.append((second, int(fleets.second_instances[row])))
        named = tuple((config_of(option), count) for option, count in pools)
        return Fleet(named, self.routers[int(fleets.router[row])].name, self.setting)

    def usd_per_hour(self, row: int) -> float:
        """Return the price of one of them."""
        return float(self.screened.fleets.usd_per_hour[row])


def screened_tables(space: Space, scenario: Scenario, told: Told) -> list[Table]:
    """Build every pool configuration and screen every fleet of them."""
    plan, objectives = scenario.plan, scenario.objectives()
    tables = []
    for setting in settings_of(scenario):
        every: tuple[Role, ...] = ("prefill", "decode", "serve")
        roles = [
            role
            for role in every
            if ("colocated" if role == "serve" else "disaggregated") in plan.shapes
        ]
        for index, role in enumerate(roles):
            told(f"configurations of {role}", index / len(roles))
            for config in configs_of(scenario, role):
                space.add(setting, config)
        told("screening", 0.0)
        for shape in plan.shapes:
            tables += _table(space, scenario, setting, shape, objectives)
    return tables


def _table(
    space: Space,
    scenario: Scenario,
    setting: Setting,
    shape: str,
    objectives: Sequence[Objective],
) -> list[Table]:
    routers = routers_of(scenario)
    plan, workload = scenario.plan, space.workload
    rate = lowest_rate(workload, objectives)

    def numbers(options: Sequence[PoolOption]) -> list[tuple[int, ...]]:
        return [counts(option, workload, rate, plan.max_gpus) for option in options]

    if shape == "colocated":
        firsts, seconds = space.options.get((setting, "serve"), []), []
        fleets = colocated(firsts, numbers(firsts), len(routers), plan.max_gpus)
    else:
        firsts = space.options.get((setting, "prefill"), [])
        seconds = space.options.get((setting, "decode"), [])
        if not firsts or not seconds:
            return []
        fleets = disaggregated(
            firsts, numbers(firsts), seconds, numbers(seconds), len(routers), plan.max_gpus
        )
    fleets = fleets.take(looked_at(fleets.usd_per_hour, _ROWS))
    if not len(fleets):
        return []
    transfers = [
        [space.transfer(setting, config_of(one), config_of(other)) for other in seconds]
        for one in firsts
    ]
    offer = Offer(workload, firsts, seconds, routers, transfers)
    return [Table(setting, firsts, seconds, routers, screen(offer, fleets, objectives), offer)]


# --- simulation ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trial:
    """A fleet that was simulated, and how it did."""

    key: Key
    fleet: Fleet
    usd_per_hour: float
    screened_worst: float
    needs: tuple[str, ...]
    runs: tuple[RunFigures, ...]
    objectives: tuple[PlannedObjective, ...]
    complete: bool  # simulated with every seed

    @property
    def passes(self) -> bool:
        """Whether every bound is within its limit, over all seeds."""
        return self.complete and all(one.met for one in self.objectives)

    @property
    def worst(self) -> float:
        """The largest share of a limit that a bound reached."""
        return max(one.reached.upper / one.limit_s for one in self.objectives)

    @property
    def mean_worst(self) -> float:
        """The largest share of a limit that a mean reached."""
        return max(one.reached.value / one.limit_s for one in self.objectives)

    @property
    def binds(self) -> PlannedObjective:
        """The objective that is missed by most, or met by least."""
        return max(self.objectives, key=lambda one: one.reached.upper / one.limit_s)


@dataclass(slots=True)
class Search:
    """Simulates fleets in order of price until one passes, and one that stock engines can start."""

    scenario: Scenario
    space: Space
    tables: Sequence[Table]
    load: PlannedLoad
    executor: Executor
    told: Told
    trials: list[Trial] = field(default_factory=list)
    best: Trial | None = None
    launchable: Trial | None = None

    @property
    def seeds(self) -> range:
        """Seeds of the runs; a trace is the same whatever the seed, so it is run once."""
        count = 1 if self.load.traffic.trace is not None else self.scenario.plan.seeds
        return range(self.scenario.seed, self.scenario.seed + count)

    def run(self) -> None:
        """Simulate until both answers are found or enough was tried.

        The first fleet is the likeliest to be the answer, so all its runs begin at once.
        """
        batch: list[Key] = []
        for key in self._tried_in_order():
            if not self.trials and not batch:
                self._try([key], self.seeds)
                if self._over():
                    return
                continue
            batch.append(key)
            if len(batch) == _SIDE_BY_SIDE:
                self._try(batch, self.seeds[:1])
                batch = []
            if self._over():
                return
        if batch:
            self._try(batch, self.seeds[:1])

    def _over(self) -> bool:
        if self.best is not None and self.launchable is not None:
            return True
        most = self.scenario.plan.verify * (1 if self.best is None else 2)
        return len(self.trials) >= most

    def _tried_in_order(self) -> Iterator[Key]:
        """Yield fleets by price, a few of each, but for those that are plainly too slow.

        After some failures the screening's margin is corrected by the least that it was off.
        """
        seen_price, of_price = -1.0, 0
        for key in price_order([table.screened for table in self.tables]):
            table, row = self.tables[key[0]], key[1]
            usd = round(table.usd_per_hour(row), 6)
            if usd != seen_price:
                seen_price, of_price = usd, 0
            worst = float(table.screened.worst[row])
            wanted = self.best is None or not self._needs(key)
            if worst > self._limit() or of_price >= _PER_PRICE or not wanted:
                continue
            of_price += 1
            yield key

    def _limit(self) -> float:
        failed = [one for one in self.trials if not one.passes]
        if len(failed) < _LEARNT_AFTER:
            return _TOLERANCE
        off = min(one.mean_worst / one.screened_worst for one in failed)
        return min(_TOLERANCE, _TOLERANCE / max(off, 1e-9))

    def _needs(self, key: Key) -> tuple[str, ...]:
        table = self.tables[key[0]]
        fleet = table.fleet(key[1])
        built = [self.space.built(table.setting, config) for config, _ in fleet.pools]
        return stock_lacks(self.scenario, fleet, built)

    def _try(self, keys: Sequence[Key], seeds: range) -> None:
        """Run each with some seeds; those that may pass with the others too."""
        share = len(self.trials) / max(self.scenario.plan.verify, 1)
        first, last = len(self.trials) + 1, len(self.trials) + len(keys)
        numbers = f"fleet {first}" if first == last else f"fleets {first} to {last}"
        self.told(f"simulating {numbers}", min(share, 1.0))
        firsts = self.simulated(keys, seeds)
        for trial in firsts:
            answered = self.best is not None and (self.launchable is not None or trial.needs)
            promising = trial.mean_worst <= 1.0
            if promising and not answered and len(self.seeds) > 1:
                trial = self.completed(trial)
            elif len(trial.runs) == len(self.seeds):
                trial = replace(trial, complete=True)
            self.trials.append(trial)
            if trial.passes and self.best is None:
                self.best = trial
            if trial.passes and self.launchable is None and not trial.needs:
                self.launchable = trial

    def completed(self, trial: Trial) -> Trial:
        """Return a trial of the first seeds with the runs of all others."""
        left = self.seeds[len(trial.runs) :]
        found = self._with(trial, left) if left else replace(trial, complete=True)
        if not found.passes and found.mean_worst <= _WORTH_MORE_RUNS:
            # Its means do, its bounds do not: as many runs again narrow them.
            found = self._with(found, range(self.seeds.stop, self.seeds.stop + len(self.seeds)))
        return found

    def _with(self, trial: Trial, seeds: range) -> Trial:
        """Return a trial with the runs of further seeds."""
        (others,) = self.simulated([trial.key], seeds)
        runs = (*trial.runs, *others.runs)
        reached = objectives_reached(self.scenario, runs)
        return replace(trial, runs=runs, objectives=reached, complete=True)

    def started(
        self, key: Key, load: PlannedLoad, seeds: range, overrides: Sequence[str] = ()
    ) -> list[Future[RunFigures]]:
        """Begin the runs of a fleet under a load, its scenario changed by `overrides`."""
        load = replace(load, answer_s=self._answer_s(key), warm_up_s=self._warm_up_s(key))
        own = fleet_scenario(self.scenario, self.tables[key[0]].fleet(key[1]), load)
        if overrides:
            own = changed(own, overrides)
        objectives = self.scenario.objectives()
        return [self.executor.submit(simulate_fleet, own, load, objectives, seed) for seed in seeds]

    def simulated(self, keys: Sequence[Key], seeds: range) -> list[Trial]:
        """Run fleets with some seeds, all runs side by side."""
        started = []
        for key in keys:
            fleet = self.tables[key[0]].fleet(key[1])
            started.append((key, fleet, self.started(key, self.load, seeds)))
        trials = []
        for key, fleet, futures in started:
            runs = tuple(future.result() for future in futures)
            table = self.tables[key[0]]
            trials.append(
                Trial(
                    key,
                    fleet,
                    table.usd_per_hour(key[1]),
                    float(table.screened.worst[key[1]]),
                    self._needs(key),
                    runs,
                    objectives_reached(self.scenario, runs),
                    complete=False,
                )
            )
        return trials

    def _answer_s(self, key: Key) -> float:
        """Return about what an answer takes, by the screening."""
        found, row = self.tables[key[0]].screened, key[1]
        steps = self.space.workload.decode_steps
        return float(found.ttft_s[row] + steps * found.tpot_s[row])

    def _warm_up_s(self, key: Key) -> float:
        """Return how long contexts take to fill the caches: they cross the link, one by one."""
        table, row = self.tables[key[0]], key[1]
        users = self.load.point.concurrency or 1
        tokens = users * self.space.workload.mean_input_tokens
        fleets = table.screened.fleets
        if fleets.second[row] == NO_POOL or self.load.traffic.kind != "sessions":
            return 5.0
        pair = self.space.transfer(
            table.setting,
            config_of(table.firsts[int(fleets.first[row])]),
            config_of(table.seconds[int(fleets.second[row])]),
        )
        per_token_s = pair.bytes_per_token / pair.bandwidth_bytes_per_s + pair.convert_s_per_token
        senders = min(fleets.first_instances[row], fleets.second_instances[row])
        return 5.0 + tokens * per_token_s / float(senders)
