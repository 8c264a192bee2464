"""Why fleets lost, what binds, and the front: what a plan says beside its answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tonnage.plan_search import Search, Table, Trial
from tonnage.sim.domain import FloatArray, IntArray, Objective
from tonnage.sim.planning.front import pareto_front, thinned
from tonnage.sim.planning.screen import SATURATED, Screened
from tonnage.sim.planning.search import price_order
from tonnage.sim.results.summary import objective_name

_FRONT = 24
_REJECTED = 8  # of each kind


@dataclass(frozen=True, slots=True)
class Rejected:
    """A fleet, or a pool configuration, that was not taken, and why."""

    fleet: str
    usd_per_hour: float | None
    reason: str
    simulated: bool


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """A fleet that no other beats in all three figures; by closed form, at the load of the plan."""

    fleet: str
    gpus: int
    usd_per_hour: float
    output_tokens_per_s_per_user: float
    output_tokens_per_s_per_gpu: float
    usd_per_million_output_tokens: float
    meets_objectives: bool


def what_binds(search: Search, usd_per_hour: float) -> str:
    """Return what the fleets miss that are cheaper, the dearest of them and the nearest to it.

    The objective's name, or prefill, decode or memory where they are not up to the load; weights
    where no cheaper fleet holds the model.
    """
    failed = [one for one in search.trials if one.usd_per_hour < usd_per_hour and not one.passes]
    if failed:
        return max(failed, key=lambda one: (one.usd_per_hour, -one.worst)).binds.name
    best: tuple[float, float, str] | None = None
    for table in search.tables:
        found = table.screened
        cheaper = np.flatnonzero(found.fleets.usd_per_hour < usd_per_hour - 1e-9)
        if not len(cheaper):
            continue
        usd = found.fleets.usd_per_hour[cheaper]
        worst = np.where(np.isfinite(found.worst[cheaper]), found.worst[cheaper], 1e9)
        row = int(cheaper[np.lexsort((worst, -usd))[0]])
        name = constraint(found, row, search.scenario.objectives())
        key = (-float(found.fleets.usd_per_hour[row]), float(worst.min()), name)
        best = key if best is None else min(best, key)
    return "weights" if best is None else best[2]


def constraint(found: Screened, row: int, objectives: Sequence[Objective]) -> str:
    """Return what a fleet has least of: what is saturated, or the objective it is nearest to."""
    code = int(found.saturated[row])
    if code:
        return SATURATED[code]
    return objective_name(objectives[int(np.argmax(found.ratios[row]))])


def rejected(search: Search) -> Iterator[Rejected]:
    """Yield what was simulated and lost, what the screening put out, what does not fit."""
    assert search.best is not None
    for trial in search.trials:
        if trial is not search.best and trial is not search.launchable:
            yield Rejected(trial.fleet.text, trial.usd_per_hour, _lost(search, trial), True)
    yield from _screened_out(search)
    for config, reason in list(search.space.refused.items())[:_REJECTED]:
        why = reason if "quality_budget" in reason else f"does not fit: {reason}"
        yield Rejected(config, None, why, False)


def _lost(search: Search, trial: Trial) -> str:
    assert search.best is not None
    one, found = trial.binds, search.best
    if trial.mean_worst > 1.0:
        return f"{one.name} {one.reached.value:.3g} s, limit {one.limit_s:g} s"
    if trial.complete and not trial.passes:
        return (
            f"{one.name} {one.reached.value:.3g} s, but up to {one.reached.upper:.3g} s by chance; "
            f"limit {one.limit_s:g} s"
        )
    dearer = trial.usd_per_hour - found.usd_per_hour
    if dearer > 1e-9:
        return f"dearer by {dearer:.2f} USD an hour"
    return "same price; behind in what tokens cost, or in its margin, by the screening"


def _screened_out(search: Search) -> Iterator[Rejected]:
    """Yield the cheapest fleets that the screening put out, and the next dearer ones that do."""
    assert search.best is not None
    scenario, usd = search.scenario, search.best.usd_per_hour
    rows = [
        (table.usd_per_hour(int(row)), index, int(row))
        for index, table in enumerate(search.tables)
        for row in _out(table, usd)[:_REJECTED]
    ]
    for price, index, row in sorted(rows)[:_REJECTED]:
        table = search.tables[index]
        reason = reason_of(table.screened, row, scenario.objectives())
        yield Rejected(table.fleet(row).text, price, reason, False)
    shown = 0
    for index, row in price_order([table.screened for table in search.tables]):
        table = search.tables[index]
        dearer = table.usd_per_hour(row) - usd
        if dearer > 1e-9 and float(table.screened.worst[row]) <= 1.0:
            reason = f"dearer by {dearer:.2f} USD an hour"
            yield Rejected(table.fleet(row).text, table.usd_per_hour(row), reason, False)
            shown += 1
        if shown == _REJECTED:
            return


def _out(table: Table, usd: float) -> IntArray:
    """Return the rows of fleets as cheap as the best that miss something, the nearest first."""
    found = table.screened
    rows = np.flatnonzero((found.worst > 1.0) & (found.fleets.usd_per_hour <= usd + 1e-9))
    return np.asarray(rows[np.argsort(np.minimum(found.worst[rows], 1e9), kind="stable")])


def front_points(tables: Sequence[Table]) -> Iterator[FrontPoint]:
    """Yield the front over all screened fleets that do the load, the fastest for a user first."""
    parts, keys = [], []
    for index, table in enumerate(tables):
        rows = np.flatnonzero(table.screened.saturated == 0)
        found = table.screened.take(rows)
        per_gpu = found.output_tokens_per_s / found.fleets.gpus
        parts.append(np.stack([1 / found.tpot_s, per_gpu, found.usd_per_million_output_tokens], 1))
        keys += [(index, row) for row in rows.tolist()]
    figures = np.concatenate(parts) if parts else np.zeros((0, 3))
    for position in thinned(pareto_front(figures * np.array([1.0, 1.0, -1.0])), _FRONT).tolist():
        index, row = keys[position]
        table = tables[index]
        per_user, each, usd = figures[position].tolist()
        yield FrontPoint(
            fleet=table.fleet(row).text,
            gpus=int(table.screened.fleets.gpus[row]),
            usd_per_hour=table.usd_per_hour(row),
            output_tokens_per_s_per_user=per_user,
            output_tokens_per_s_per_gpu=each,
            usd_per_million_output_tokens=usd,
            meets_objectives=bool(table.screened.worst[row] <= 1.0),
        )


def reason_of(table: Screened, row: int, objectives: Sequence[Objective]) -> str:
    """Say why the screening puts a fleet out: what is saturated, or the objective it misses."""
    code = int(table.saturated[row])
    if code:
        full = {
            "prefill": "prompts come faster than they are computed",
            "decode": "tokens are asked for faster than they are made",
            "memory": "KV memory is full",
        }
        return full[SATURATED[code]]
    ratios: FloatArray = table.ratios[row]
    index = int(np.argmax(ratios))
    one = objectives[index]
    return f"{objective_name(one)} {ratios[index] * one.limit_s:.3g} s, limit {one.limit_s:g} s"
