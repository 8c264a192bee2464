"""How well the screening orders fleets: the best of them, simulated for the comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tonnage.plan_search import Key, Search, Trial
from tonnage.scenarios.schema import Scenario
from tonnage.sim.planning.search import price_order
from tonnage.sim.results.summary import objective_name


@dataclass(frozen=True, slots=True)
class Ranks:
    """How well the screening orders fleets: Spearman's correlation with the simulation, by figure.

    None where all are alike.
    """

    fleets: tuple[str, ...]
    screened: dict[str, list[float]]
    simulated: dict[str, list[float]]
    spearman: dict[str, float | None]


def ranks(search: Search, count: int) -> Ranks:
    """Simulate the best `count` screened fleets that differ in their pools, with all seeds."""
    from scipy.stats import spearmanr  # heavy, and asked for seldom

    keys: list[Key] = []
    seen: set[object] = set()
    for key in price_order([table.screened for table in search.tables]):
        table = search.tables[key[0]]
        if float(table.screened.worst[key[1]]) > 1.0:
            continue
        fleet = table.fleet(key[1])
        same = tuple((replace(config, chunk_tokens=None), count) for config, count in fleet.pools)
        if same in seen:
            continue
        seen.add(same)
        keys.append(key)
        if len(keys) == count:
            break
    search.told(f"simulating the best {len(keys)} for their order", 0.0)
    trials = search.simulated(keys, search.seeds)
    screened = _screened_figures(search, trials)
    simulated = _simulated_figures(search.scenario, trials)
    found: dict[str, float | None] = {}
    for name, values in screened.items():
        pairs = np.array([values, simulated[name]])
        varied = len(trials) > 2 and all(len(set(row)) > 1 for row in pairs.tolist())
        found[name] = float(spearmanr(*pairs).statistic) if varied else None
    return Ranks(tuple(trial.fleet.text for trial in trials), screened, simulated, found)


def _screened_figures(search: Search, trials: Sequence[Trial]) -> dict[str, list[float]]:
    names = [objective_name(one) for one in search.scenario.objectives()]
    limits = [one.limit_s for one in search.scenario.objectives()]
    found: dict[str, list[float]] = {
        name: [] for name in (*names, "worst_share_of_a_limit", "usd_per_million_output_tokens")
    }
    for trial in trials:
        table = search.tables[trial.key[0]].screened
        row = trial.key[1]
        for index, name in enumerate(names):
            found[name].append(float(table.ratios[row, index]) * limits[index])
        found["worst_share_of_a_limit"].append(trial.screened_worst)
        found["usd_per_million_output_tokens"].append(
            float(table.usd_per_million_output_tokens[row])
        )
    return found


def _simulated_figures(scenario: Scenario, trials: Sequence[Trial]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for trial in trials:
        for one in trial.objectives:
            found.setdefault(one.name, []).append(one.reached.value)
        found.setdefault("worst_share_of_a_limit", []).append(trial.mean_worst)
        rate = float(np.mean([run.output_tokens_per_s for run in trial.runs]))
        usd = trial.usd_per_hour / 3600 / rate * 1e6 if rate else float("inf")
        found.setdefault("usd_per_million_output_tokens", []).append(usd)
    return found
