"""A fleet's year of rare faults: the Poisson law by brute force, and what adds up."""

from __future__ import annotations

from math import exp, lgamma, log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.sim.domain import BadInputError
from tonnage.sim.planning.integrity_risk import (
    DAYS_PER_YEAR,
    FaultRate,
    fleet_risk,
)


def probability(count: int, mean: float) -> float:
    return exp(count * log(mean) - mean - lgamma(count + 1))


def tails(mean: float, confidence: float) -> tuple[int, int]:
    """Return the counts at both tails by adding probabilities up."""
    tail, below, low = (1 - confidence) / 2, 0.0, 0
    while below + probability(low, mean) < tail:
        below += probability(low, mean)
        low += 1
    at_most, high = probability(0, mean), 0
    while 1 - at_most > tail:
        high += 1
        at_most += probability(high, mean)
    return low, high


def test_the_published_illustration() -> None:
    """10 M requests a day at 1e-9: 3.65 wrong reads a year, and most years have one."""
    risk = fleet_risk(10e6, FaultRate.assumed(1e-9), coverage=1.0)
    assert risk.wrong_reads_without.expected == pytest.approx(3.6525)
    assert (risk.wrong_reads_without.low, risk.wrong_reads_without.high) == (0, 8)
    assert risk.wrong_reads_without.any_probability == pytest.approx(1 - exp(-3.6525))
    assert risk.wrong_reads_with.expected == 0
    assert (risk.wrong_reads_with.low, risk.wrong_reads_with.high) == (0, 0)
    assert risk.aborts_with == risk.wrong_reads_without


@pytest.mark.parametrize("mean", [0.01, 0.7, 3.65, 40.0, 365.25])
@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95])
def test_intervals_are_those_of_adding_probabilities_up(mean: float, confidence: float) -> None:
    requests = mean / 1e-9 / DAYS_PER_YEAR
    found = fleet_risk(requests, FaultRate.assumed(1e-9), 0.0, confidence=confidence).faults
    assert (found.low, found.high) == tails(mean, confidence)


@settings(max_examples=50, deadline=None)
@given(
    requests=st.floats(0, 1e10),
    rate=st.floats(0, 1e-6),
    coverage=st.floats(0, 1),
)
def test_every_fault_is_a_wrong_read_or_an_abort(
    requests: float, rate: float, coverage: float
) -> None:
    risk = fleet_risk(requests, FaultRate.assumed(rate), coverage)
    both = risk.wrong_reads_with.expected + risk.aborts_with.expected
    assert both == pytest.approx(risk.faults.expected)
    assert risk.wrong_reads_with.high <= risk.wrong_reads_without.high
    for one in (risk.faults, risk.wrong_reads_with, risk.aborts_with):
        assert one.low <= one.expected <= one.high or one.high == 0 or one.low > 0


def test_years_drawn_at_random_lie_within_the_interval_as_often_as_it_says() -> None:
    """Faults drawn, each caught or not: both counts are Poisson (20,000 years, seed 0)."""
    draw = np.random.default_rng(0)
    faults = draw.poisson(36.525, 20_000)
    caught = draw.binomial(faults, 0.9)
    risk = fleet_risk(1e8, FaultRate.assumed(1e-9), 0.9)
    for counts, told in ((caught, risk.aborts_with), (faults - caught, risk.wrong_reads_with)):
        assert counts.mean() == pytest.approx(told.expected, rel=0.02)
        within = np.mean((counts >= told.low) & (counts <= told.high))
        expected = sum(probability(one, told.expected) for one in range(told.low, told.high + 1))
        assert expected >= 0.95
        assert within == pytest.approx(expected, abs=0.005)
        assert np.mean(counts > 0) == pytest.approx(told.any_probability, abs=0.01)


def test_faults_per_page_count_pages() -> None:
    per_request = fleet_risk(1e6, FaultRate.assumed(1e-9), 1.0).faults.expected
    per_page = fleet_risk(
        1e6, FaultRate.assumed(1e-9, "allocation"), 1.0, allocations_per_request=144
    )
    assert per_page.faults.expected == pytest.approx(144 * per_request)


@pytest.mark.parametrize("faults", [0, 1, 3, 20])
def test_the_interval_of_an_observed_rate_is_exact(faults: int) -> None:
    """At its ends as many faults or more, or as few or fewer, have a probability of 2.5 %."""
    rate = FaultRate.observed(faults, 10_000)

    def at_most(mean: float, count: int) -> float:
        return sum(probability(one, mean) for one in range(count + 1))

    assert at_most(rate.high * 10_000, faults) == pytest.approx(0.025)
    if faults:
        assert 1 - at_most(rate.low * 10_000, faults - 1) == pytest.approx(0.025)
    else:
        assert rate.low == 0


def test_a_rate_that_is_not_sure_widens_the_year() -> None:
    sure = fleet_risk(1e6, FaultRate.assumed(2e-4), 0.5).wrong_reads_with
    observed = fleet_risk(1e6, FaultRate.observed(2, 10_000), 0.5).wrong_reads_with
    assert observed.expected == pytest.approx(sure.expected)
    assert observed.low < sure.low
    assert observed.high > sure.high


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda: FaultRate("request", 0.1, 0.2, 0.3), "fault rate"),
        (lambda: FaultRate.assumed(1.5), "fault rate"),
        (lambda: FaultRate.observed(1, 0), "trial"),
        (lambda: FaultRate.observed(1, 9, confidence=1.0), "confidence"),
        (lambda: fleet_risk(-1, FaultRate.assumed(0), 1), "negative"),
        (lambda: fleet_risk(1, FaultRate.assumed(0), 1.1), "coverage"),
        (lambda: fleet_risk(1, FaultRate.assumed(0), 1, confidence=0), "confidence"),
    ],
)
def test_what_cannot_be_is_refused(wrong: object, told: str) -> None:
    assert callable(wrong)
    with pytest.raises(BadInputError, match=told):
        wrong()
