"""Whether a simulated run carried its load, and which constraint it met first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tonnage.sim.domain import FloatArray, Objective
from tonnage.sim.planning.ceiling import Verdict
from tonnage.sim.results.run import RunResult
from tonnage.sim.results.summary import objective_name, objective_shares, objectives_hold

_FULL = 0.9  # share of the concurrency that memory allows, on average over time
_BUSY = 0.95  # share of the time that a prefill instance works
_GROWTH = 0.05  # seconds of time to first token per second that passes
_FEWEST_TO_SEE_GROWTH = 50


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many requests a pool holds while they generate, and what stops it there."""

    concurrency: int
    limited_by: str  # memory | max_running_requests


def judge(
    runs: Sequence[RunResult],
    objectives: Sequence[Objective],
    capacity: Capacity,
    *,
    arrivals: bool,
) -> Verdict:
    """Return the constraints that a load failed, the one that binds first.

    `runs` are replications of one load, judged by their means. An objective fails when too few
    requests are within it. A late first token, or a late end, is put down to its cause: a decode
    pool that is full on average (memory, or the engine's limit of running requests), a prefill pool
    that hardly ever rests; else to the objective itself. Loads with their own `arrivals` also fail
    where the time to first token grows as long as they last: more is asked then than is done,
    however short the run. The objective missed by most comes first.
    """
    growing = arrivals and _mean(_growth, runs) > _GROWTH
    full = _mean(_held, runs) >= _FULL * capacity.concurrency
    busy = _mean(_prefill_busy, runs) >= _BUSY
    causes = []
    if growing:
        causes.append(capacity.limited_by if full else "prefill")
    for metric in _late(runs, objectives):
        if metric not in ("ttft", "e2e"):
            causes.append(metric)
        elif full:
            causes.append(capacity.limited_by)
        else:
            causes.append("prefill" if busy else metric)
    return Verdict(tuple(dict.fromkeys(causes)))


def _mean(figure: Callable[[RunResult], float], runs: Sequence[RunResult]) -> float:
    return float(np.mean([figure(run) for run in runs]))


def _late(runs: Sequence[RunResult], objectives: Sequence[Objective]) -> list[str]:
    """Return the metrics whose objectives fail, the one furthest from its share first."""
    shares = [objective_shares(run, objectives) for run in runs]
    holds = objectives_hold(objectives, shares)
    missed = [one for one in objectives if not holds[objective_name(one)]]

    def attained(objective: Objective) -> float:
        found = np.mean([share[objective_name(objective)] for share in shares])
        return float(found) / objective.quantile

    return [one.metric for one in sorted(missed, key=attained)]


def _prefill_busy(run: RunResult) -> float:
    """Return the share of the time that prefill instances worked, until the last prompt's end.

    0 in a pool that does both phases: its decode steps keep it busy at any load.
    """
    ends_s = run.records.times("prefill_end_s")
    if "prefill" not in run.busy_s or not np.any(np.isfinite(ends_s)):
        return 0.0
    return float(np.mean(run.busy_s["prefill"])) / float(np.nanmax(ends_s))


def _held(run: RunResult) -> float:
    """Return how many requests were held for generation, on average while requests arrived.

    From the first token to the end. By Little's law that is the time they were held in the span,
    over the span.
    """
    records, served = run.records, run.records.served()
    arrival_s, end_s = records.times("arrival_s")[served], records.times("finish_s")[served]
    if not len(arrival_s):
        return 0.0
    start_s = records.times("first_token_s")[served]
    start_s = np.where(np.isnan(start_s), 0.0, start_s)  # resident: held from the beginning
    from_s, to_s = float(start_s.min()), float(arrival_s.max())
    if to_s <= from_s:
        return 0.0
    held_s = np.clip(end_s, from_s, to_s) - np.clip(start_s, from_s, to_s)
    return float(held_s.sum()) / (to_s - from_s)


def _growth(run: RunResult) -> float:
    """Return by how many seconds the time to first token grows in a second of arrivals.

    Between the second fifth of the requests, when the system has filled, and the last one. Above
    capacity it goes to the share of the work that is left undone.
    """
    records, served = run.records, run.records.served()
    if int(served.sum()) < _FEWEST_TO_SEE_GROWTH:
        return 0.0
    order = np.argsort(records.integers("id")[served])
    fifths_s: list[FloatArray] = np.array_split(records.ttft_s()[served][order], 5)
    arrivals_s: list[FloatArray] = np.array_split(records.times("arrival_s")[served][order], 5)
    passed_s = float(arrivals_s[4].mean() - arrivals_s[1].mean())
    grown_s = float(fifths_s[4].mean() - fifths_s[1].mean())
    return grown_s / passed_s if passed_s > 0 else 0.0
