"""Closed-form queues and the mean value analysis of closed networks, to hold the engine against.

Times are in seconds, rates per second. The formulas are those of Kleinrock, Queueing Systems I
(1975), and Lazowska and others, Quantitative System Performance (1984).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit
from scipy.stats import linregress

REPLICATIONS = 10


@dataclass(frozen=True)
class Observation:
    """One run: what it found, and by how much its random draws missed what they should average."""

    found: float
    missed: float


def agrees(run: Callable[[int], Observation], theory: float) -> bool:
    """Tell whether theory is inside the 95 % interval of what runs by seed find.

    What the draws of a run missed explains part of what it found: a control variate, taken out by
    regression (Law, Simulation Modeling and Analysis, section 11.4). The interval is that of the
    regression at draws that missed nothing.
    """
    runs = [run(seed) for seed in range(REPLICATIONS)]
    line = linregress([one.missed for one in runs], [one.found for one in runs])
    half_width = float(stdtrit(REPLICATIONS - 2, 0.975)) * line.intercept_stderr
    return bool(abs(line.intercept - theory) <= half_width)


def pollaczek_khinchine_wait_s(load: float, service_s: float, variation: float) -> float:
    """Return the mean wait of M/G/1; `variation` is the coefficient of variation of the service."""
    return load * service_s * (1 + variation**2) / (2 * (1 - load))


def erlang_c(servers: int, load: float) -> float:
    """Return the probability that an arrival waits in M/M/c; `load` is that of each server."""
    blocked = 1.0  # Erlang B by its recursion, numerically stable
    offered = servers * load
    for count in range(1, servers + 1):
        blocked = offered * blocked / (count + offered * blocked)
    return blocked / (1 - load * (1 - blocked))


def erlang_c_wait_s(servers: int, load: float, service_s: float) -> float:
    """Return the mean wait of M/M/c."""
    return erlang_c(servers, load) * service_s / (servers * (1 - load))


@dataclass(frozen=True)
class Station:
    """One station that every request visits once; `servers` None is a delay without a queue."""

    service_s: float
    servers: int | None = 1


@dataclass(frozen=True)
class NetworkFigures:
    """A closed network in its steady state."""

    throughput_per_s: float
    residence_s: tuple[float, ...]  # by station, queueing included


def mean_value_analysis(stations: Sequence[Station], users: int) -> NetworkFigures:
    """Return throughput and residence times by exact mean value analysis.

    Reiser and Lavenberg, J. ACM 27(2), 1980, with marginal probabilities for several servers.
    """
    # Of each station: the probability of 0, 1, 2 ... requests there.
    marginals = [np.zeros(users + 1) for _ in stations]
    for marginal in marginals:
        marginal[0] = 1.0
    rate_per_s, residence_s = 0.0, [0.0] * len(stations)
    for population in range(1, users + 1):
        residence_s = [
            _residence_s(station, marginal, population)
            for station, marginal in zip(stations, marginals, strict=True)
        ]
        rate_per_s = population / sum(residence_s)
        for station, marginal in zip(stations, marginals, strict=True):
            speeds = _speeds(station, population)
            marginal[1 : population + 1] = rate_per_s / speeds * marginal[:population]
            marginal[0] = 1.0 - marginal[1:].sum()
    return NetworkFigures(rate_per_s, tuple(residence_s))


def _residence_s(station: Station, marginal: np.ndarray, population: int) -> float:
    present = np.arange(1, population + 1)  # this request included
    return float((present / _speeds(station, population) * marginal[:population]).sum())


def _speeds(station: Station, population: int) -> np.ndarray:
    """Return requests per second out of a station that holds 1, 2 ... `population`."""
    present = np.arange(1, population + 1)
    busy = present if station.servers is None else np.minimum(present, station.servers)
    return busy / station.service_s
