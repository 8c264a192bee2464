"""A benchmark run replayed: users in a closed loop, and the mean latencies of its report.

Such runs send `REQUESTS_PER_USER` requests per user, all users at once to begin with (InferenceX,
and the `bench` clients of SGLang and vLLM with a limit on concurrency). The burst at the start is a
tenth of the requests and waits in a queue; the others meet a steady state. So a few waves of
requests are simulated, the first weighs what the burst weighs in the whole run, and the last, in
which users stop, is left out: the same means for a third of the events.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from tonnage.cells import cell_of
from tonnage.sim.domain import FloatArray
from tonnage.sim.engine.fleet import Deployment
from tonnage.sim.engine.simulate import simulate
from tonnage.sim.results.records import Records
from tonnage.sim.traffic.build import build_load
from tonnage.sim.traffic.lengths import LengthDistribution
from tonnage.sim.traffic.spec import LoadPoint, TrafficSpec

REQUESTS_PER_USER = 10
_WAVES_LEAST = 3
_REQUESTS_LEAST = 48  # of which the mean of a few users is made


@dataclass(frozen=True, slots=True)
class ClosedRun:
    """A benchmark: so many users, the lengths they draw, and how much of each run they make."""

    concurrency: int
    input_tokens: LengthDistribution
    output_tokens: LengthDistribution
    requests_per_user: int = REQUESTS_PER_USER


@dataclass(frozen=True, slots=True)
class RunMeans:
    """Mean latencies over the requests of a run, and how many were simulated and not served."""

    ttft_s: float
    tpot_s: float
    simulated: int
    unserved: int


def replay(deployment: Deployment, run: ClosedRun, seed: int = 0) -> RunMeans:
    """Simulate a run on a deployment, or on a part of it that stands for the whole (`cells`).

    The same seed gives the same means.
    """
    deployment, users = cell_of(deployment, run.concurrency)
    run = replace(run, concurrency=users)
    waves = waves_of(run)
    traffic = TrafficSpec(
        kind="closed",
        concurrency=(users,),
        input_tokens=run.input_tokens,
        output_tokens=run.output_tokens,
        requests=users * waves,
    )
    load = build_load(traffic, LoadPoint(concurrency=users), seed)
    records = simulate(deployment, load, seed=seed).records
    served = records.served()
    if not served.any():
        return RunMeans(float("nan"), float("nan"), len(records), len(records))
    weights = _weights(records, run, waves) * served
    weights /= weights.sum()
    return RunMeans(
        _mean(records.ttft_s(), weights),
        _mean(records.tpot_s(), weights),
        len(records),
        int((~served).sum()),
    )


def waves_of(run: ClosedRun) -> int:
    """Return how many requests per user are simulated."""
    enough = max(_WAVES_LEAST, ceil(_REQUESTS_LEAST / run.concurrency))
    return min(run.requests_per_user, enough)


def _weights(records: Records, run: ClosedRun, waves: int) -> FloatArray:
    """Return what each request counts for in the whole run `[requests]`, whatever their sum."""
    if waves == run.requests_per_user:
        return np.ones(len(records))
    order = records.integers("id")
    burst, last = order < run.concurrency, order >= run.concurrency * (waves - 1)
    steady = ~burst & ~last
    weights = np.zeros(len(order))
    weights[burst] = 1.0 / burst.sum()
    weights[steady] = (run.requests_per_user - 1) / steady.sum()
    return weights


def _mean(values: FloatArray, weights: FloatArray) -> float:
    known = np.isfinite(values) & (weights > 0)
    return float(np.average(values[known], weights=weights[known])) if known.any() else float("nan")
