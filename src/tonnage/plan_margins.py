"""What another format in one of the pools would cost: the margins of a plan, ties called ties."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tonnage.plan_search import Key, Search, Trial
from tonnage.sim.domain import FloatArray
from tonnage.sim.planning.fleet_plan import Estimate
from tonnage.sim.planning.search import price_order
from tonnage.sim.results.intervals import replication_interval

_S_PER_HOUR, _MILLION = 3600, 1e6
_TRIES = 4  # fleets with another format that are simulated until one passes


@dataclass(frozen=True, slots=True)
class Margin:
    """The cheapest fleet of the same shape with another format in one pool, beside the best.

    `usd_per_hour` and `usd_per_million_output_tokens` are what it costs more: of two fleets that
    the screening finds good, or of two that pass, from runs with the same seeds. `tie`: the prices
    are the same, and so is, within the interval, what tokens cost; None where nothing was
    simulated. No price: no fleet with that format does.
    """

    role: str
    what: Literal["weights", "kv"]
    chosen: str
    alternative: str
    fleet: str | None
    usd_per_hour: float | None
    usd_per_million_output_tokens: Estimate | None
    tie: bool | None


def margins(search: Search, *, simulate: bool) -> Iterator[Margin]:
    """Yield the margins of the best plan over every other format of every pool."""
    best = search.best
    assert best is not None
    for index, (config, _) in enumerate(best.fleet.pools):
        for what in _WHATS:
            place = _Place(search, best, index, what)
            for other in place.others():
                fleet, usd, tokens, tie = (
                    place.simulated(other) if simulate else place.screened(other)
                )
                chosen = place.chosen
                yield Margin(str(config.role), what, chosen, other, fleet, usd, tokens, tie)


_WHATS: tuple[Literal["weights", "kv"], ...] = ("weights", "kv")
_Found = tuple[str | None, float | None, Estimate | None, bool | None]
_NOTHING: _Found = (None, None, None, None)


@dataclass(frozen=True, slots=True)
class _Place:
    """One format of one pool of the best fleet."""

    search: Search
    best: Trial
    index: int
    what: Literal["weights", "kv"]

    @property
    def chosen(self) -> str:
        return str(getattr(self.best.fleet.pools[self.index][0], self.what))

    def others(self) -> list[str]:
        """Return the formats that the pool could have instead."""
        table = self.search.tables[self.best.key[0]]
        options = table.firsts if self.index == 0 else table.seconds
        return sorted({str(getattr(one.config, self.what)) for one in options} - {self.chosen})

    def screened(self, other: str) -> _Found:
        """Compare the cheapest fleets that the screening finds good, with either format."""
        mine, its = next(self._keys(self.chosen), None), next(self._keys(other), None)
        if its is None or mine is None:
            return _NOTHING
        table = self.search.tables[its[0]]
        token_usd = table.screened.usd_per_million_output_tokens
        more = Estimate(float(token_usd[its[1]] - token_usd[mine[1]]))
        usd = table.usd_per_hour(its[1]) - table.usd_per_hour(mine[1])
        return table.fleet(its[1]).text, usd, more, None

    def simulated(self, other: str) -> _Found:
        """Compare with the cheapest of the first few that passes, by runs with the same seeds."""
        seeds, price = self.search.seeds, -1.0
        tried = 0
        for key in self._keys(other):
            table = self.search.tables[key[0]]
            if table.usd_per_hour(key[1]) == price:
                continue  # one of each price
            price, tried = table.usd_per_hour(key[1]), tried + 1
            self.search.told(f"simulating {other} {self.what}, fleet {tried}", 0.0)
            (trial,) = self.search.simulated([key], seeds)
            if all(one.met for one in trial.objectives):
                return self._compared(trial)
            if tried == _TRIES:
                break
        return _NOTHING

    def _compared(self, trial: Trial) -> _Found:
        more_usd = trial.usd_per_hour - self.best.usd_per_hour
        differences = _token_usd(trial) - _token_usd(self.best)[: len(trial.runs)]
        mean, interval = float(differences.mean()), replication_interval(differences.tolist())
        if interval is None:
            return trial.fleet.text, more_usd, Estimate(mean), None
        same = interval[0] <= 0.0 <= interval[1]
        tie = abs(more_usd) < 1e-9 and same
        return trial.fleet.text, more_usd, Estimate(mean, *interval), tie

    def _keys(self, value: str) -> Iterator[Key]:
        """Yield the fleets of the same shape that have it and are good by the screening."""
        for key in price_order([table.screened for table in self.search.tables]):
            table = self.search.tables[key[0]]
            if key[0] != self.best.key[0] or float(table.screened.worst[key[1]]) > 1.0:
                continue
            if getattr(table.fleet(key[1]).pools[self.index][0], self.what) == value:
                yield key


def _token_usd(trial: Trial) -> FloatArray:
    """Return what a million output tokens cost in every run."""
    rates = np.array([max(run.output_tokens_per_s, 1e-9) for run in trial.runs])
    return np.asarray(trial.usd_per_hour / _S_PER_HOUR / rates * _MILLION)
