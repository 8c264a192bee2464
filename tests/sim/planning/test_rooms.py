"""The queue for KV memory against theory, brute force and what must be so."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from tonnage.sim.planning.rooms import Room, room, usable
from tonnage.sim.planning.workload import Workload

STEP_S = 0.01


def load(tokens: list[float], outputs: list[float], rate: float = 1.0) -> Workload:
    inputs = np.array(tokens) - np.array(outputs)
    size = len(tokens)
    return Workload(inputs, np.zeros(size), np.array(outputs), np.full(size, np.inf), rate)


def of_one_pool(workload: Workload, capacity: float, users: float | None = None) -> Room:
    assert workload.rate_per_s is not None
    one = np.array([1.0])
    return room(
        workload,
        usable(workload, np.array([capacity])),
        one * workload.rate_per_s,
        0.0 * one,
        STEP_S * one,
        None if users is None else users * one,
    )


def test_a_pool_for_one_request_is_a_single_server() -> None:
    """M/D/1: requests of a second, at half of what it does, wait for half a second."""
    found = of_one_pool(load([1000.0], [101.0], rate=0.5), 1999.0)
    assert found.wait_s[0] == pytest.approx(0.5 * 1.0 / (2 * (1 - 0.5)), rel=1e-9)
    assert found.waits[0] == pytest.approx(0.5)
    assert not found.full[0]


def test_alike_requests_fill_what_whole_ones_do() -> None:
    alike = load([1000.0], [100.0])
    capacities = np.array([1000.0, 1999.0, 5500.0])
    assert usable(alike, capacities).tolist() == [1000.0, 1000.0, 5000.0]


@pytest.mark.parametrize("capacity", [3000.0, 6000.0, 12_000.0])
def test_rows_of_requests_fill_it_as_brute_force_says(capacity: float) -> None:
    mixed = load([200.0, 500.0, 2500.0], [100.0, 100.0, 100.0])
    rng = np.random.default_rng(1)
    filled = []
    for _ in range(2000):
        total = 0.0
        while True:
            following = total + rng.choice([200.0, 500.0, 2500.0])
            if following > capacity:
                break
            total = following
        filled.append(total)
    assert usable(mixed, np.array([capacity]))[0] == pytest.approx(np.mean(filled), rel=0.05)


def test_very_large_pools_lose_the_mean_age() -> None:
    mixed = load([200.0, 500.0, 2500.0], [100.0, 100.0, 100.0])
    tokens = np.array([200.0, 500.0, 2500.0])
    left = (tokens**2).mean() / tokens.mean() / 2
    assert usable(mixed, np.array([1e6]))[0] == pytest.approx(1e6 - left)


def simulated_wait_s(workload: Workload, capacity: float, count: int = 30_000) -> float:
    """Requests in order of arrival take their tokens for as long as their answers take."""
    rng = np.random.default_rng(0)
    assert workload.rate_per_s is not None
    arrivals = np.cumsum(rng.exponential(1 / workload.rate_per_s, count)).tolist()
    chosen = rng.integers(0, len(workload.input_tokens), count)
    tokens = (workload.input_tokens + workload.output_tokens)[chosen].tolist()
    holds = ((workload.output_tokens - 1) * STEP_S)[chosen].tolist()
    free, now, waited = capacity, 0.0, 0.0
    ends: list[tuple[float, float]] = []
    for arrival, held, hold_s in zip(arrivals, tokens, holds, strict=True):
        now = max(now, arrival)
        while ends and ends[0][0] <= now:
            free += heapq.heappop(ends)[1]
        while free < held:
            now, back = heapq.heappop(ends)
            free += back
        free -= held
        heapq.heappush(ends, (now + hold_s, held))
        waited += now - arrival
    return waited / count


@pytest.mark.parametrize("rate", [1.0, 1.6, 2.0])
def test_the_wait_is_near_that_of_a_simulated_pool(rate: float) -> None:
    """Sizes by a factor of ten and answers by thirty; the wait grows by a factor of twenty."""
    rng = np.random.default_rng(3)
    outputs = np.round(np.exp(rng.normal(5.0, 1.0, 400)))
    tokens = outputs + np.round(rng.uniform(1000, 10_000, 400))
    mixed = load(tokens.tolist(), outputs.tolist(), rate)
    found = of_one_pool(mixed, 40_000.0)
    expected = simulated_wait_s(mixed, 40_000.0)
    assert 0.5 < float(found.wait_s[0]) / expected < 2.0


def test_more_room_is_never_more_wait() -> None:
    mixed = load([500.0, 3000.0], [50.0, 300.0], rate=1.5)
    waits = [float(of_one_pool(mixed, one).wait_s[0]) for one in (8e3, 1.2e4, 2e4, 4e4, 1e6)]
    assert waits == sorted(waits, reverse=True)
    assert waits[0] > 10 * waits[-2]


def test_users_that_all_fit_never_wait() -> None:
    alike = load([1000.0], [101.0], rate=7.9)
    assert of_one_pool(alike, 8000.0, users=8.0).wait_s[0] == 0.0
    assert not of_one_pool(alike, 8000.0, users=8.0).full[0]
    assert of_one_pool(alike, 8000.0, users=9.0).full[0]
    assert of_one_pool(alike, 8000.0, users=9.0).wait_s[0] <= 1 / 7.9  # one waits at most
