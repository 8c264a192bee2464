"""The formulas themselves, against each other and against a Markov chain."""

from __future__ import annotations

import numpy as np
import pytest
from tests.theory.queueing import (
    Observation,
    Station,
    agrees,
    erlang_c,
    erlang_c_wait_s,
    mean_value_analysis,
    pollaczek_khinchine_wait_s,
)


def test_one_server_of_m_m_c_is_m_m_1() -> None:
    assert erlang_c(1, 0.7) == pytest.approx(0.7)
    assert erlang_c_wait_s(1, 0.7, 2.0) == pytest.approx(pollaczek_khinchine_wait_s(0.7, 2.0, 1.0))


def test_erlang_c_of_the_tables() -> None:
    """Two servers: 2 load^2 / (1 + load)."""
    assert erlang_c(2, 0.75) == pytest.approx(2 * 0.75**2 / 1.75)


def chain_throughput_per_s(users: int, first_s: float, second_s: float, servers: int) -> float:
    """Return the throughput of two exponential stations from the balance of their chain."""
    weights = [1.0]  # of 0, 1 ... users at the second station
    for there in range(1, users + 1):
        weights.append(weights[-1] / first_s * second_s / min(there, servers))
    return float(1 - weights[-1] / np.sum(weights)) / first_s


@pytest.mark.parametrize("servers", [1, 2, 3, 8])
@pytest.mark.parametrize("users", [1, 4, 8])
def test_mean_value_analysis_is_the_solution_of_the_chain(users: int, servers: int) -> None:
    stations = [Station(0.4), Station(1.5, servers)]
    found = mean_value_analysis(stations, users)
    assert found.throughput_per_s == pytest.approx(chain_throughput_per_s(users, 0.4, 1.5, servers))
    assert found.throughput_per_s * sum(found.residence_s) == pytest.approx(users)


def test_a_delay_never_queues() -> None:
    found = mean_value_analysis([Station(0.4), Station(1.5, None)], 5)
    assert found.residence_s[1] == pytest.approx(1.5)
    assert found == mean_value_analysis([Station(0.4), Station(1.5, 5)], 5)


def test_agreement_is_a_matter_of_the_interval() -> None:
    """Found: 10, three times what was missed, and noise of 0.1; ten runs tell 10 from 10.3."""

    def run(seed: int) -> Observation:
        missed, noise = np.random.default_rng(seed).normal(0.0, 1.0, 2)
        return Observation(float(10.0 + 3.0 * missed + 0.1 * noise), float(missed))

    assert agrees(run, 10.0)
    assert not agrees(run, 10.3)
    assert not agrees(run, 9.7)
