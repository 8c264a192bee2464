"""The engine with constant step times against queueing theory."""

from __future__ import annotations

import numpy as np
import pytest
from tests.sim.engine.harness import AffineTimes, colocated, poisson_requests

from tonnage.sim.engine.simulate import simulate
from tonnage.sim.traffic.loads import ClosedLoad, Lengths, OpenLoad

SERVICE_S = 0.05
# One prompt per step, one token per request: an instance is a server with constant service time.
SERVER = AffineTimes(SERVICE_S, 0.0, 0.0, 0.0)


def waiting_times_s(instances: int, rate_per_s: float, seed: int) -> np.ndarray:
    requests = poisson_requests(20_000, rate_per_s, 10, 1, seed)
    deployment = colocated(
        instances, times=SERVER, chunk_tokens=10, running=1, router="least_requests"
    )
    records = simulate(deployment, OpenLoad(requests)).records
    return np.asarray(records.times("prefill_start_s") - records.times("arrival_s"))


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_one_instance_is_an_m_d_1_queue(load: float) -> None:
    """Pollaczek and Khinchine: mean wait = load x service / (2 (1 - load))."""
    theory_s = load * SERVICE_S / (2 * (1 - load))
    means_s = [waiting_times_s(1, load / SERVICE_S, seed).mean() for seed in range(8)]
    half_width_s = 2.365 * np.std(means_s, ddof=1) / np.sqrt(len(means_s))  # t, 7 degrees, 95 %
    assert abs(np.mean(means_s) - theory_s) <= max(half_width_s, 0.01 * theory_s)


def test_littles_law_holds_in_a_closed_load() -> None:
    """users = throughput x mean time in the system, when everyone is always in it."""
    users = 12
    load = ClosedLoad(users, [Lengths(100, 20)] * 6000)
    run = simulate(colocated(2), load)
    through_per_s = len(run.records) / run.makespan_s
    assert through_per_s * run.records.e2e_s().mean() == pytest.approx(users, rel=0.01)
