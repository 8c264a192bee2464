"""Arrival processes: order, rate, burstiness, and draws in blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.sim.domain import BadInputError, FloatArray
from tonnage.sim.traffic.arrivals import BLOCK, GammaArrivals


def times(arrivals: GammaArrivals, seed: int, count: int) -> FloatArray:
    """Return all arrival times in one array."""
    return np.concatenate(list(arrivals.times_s(np.random.default_rng(seed), count)))


@given(st.floats(0.01, 1000), st.floats(0.2, 3), st.integers(0, 2**32))
def test_times_rise_from_zero_and_keep_the_rate(rate: float, variation: float, seed: int) -> None:
    count = 2 * BLOCK + 7
    arrivals_s = times(GammaArrivals(rate, variation), seed, count)
    assert len(arrivals_s) == count
    assert arrivals_s[0] >= 0
    assert (np.diff(arrivals_s) >= 0).all()
    # The mean gap has the standard error variation / sqrt(count), relative to its mean.
    assert arrivals_s[-1] / count * rate == pytest.approx(1, abs=6 * variation / count**0.5)


@pytest.mark.parametrize("variation", [0.5, 1.0, 2.0])
def test_gaps_have_the_stated_coefficient_of_variation(variation: float) -> None:
    gaps_s = np.diff(times(GammaArrivals(5.0, variation), 1, 200_000))
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(variation, rel=0.03)


@given(st.integers(0, 2**32), st.integers(1, 3 * BLOCK))
def test_a_longer_run_begins_like_a_shorter_one(seed: int, count: int) -> None:
    arrivals = GammaArrivals(3.0)
    assert (times(arrivals, seed, 3 * BLOCK)[:count] == times(arrivals, seed, count)).all()


def test_no_requests_no_times() -> None:
    assert list(GammaArrivals(1.0).times_s(np.random.default_rng(0), 0)) == []


def test_rates_must_be_positive() -> None:
    with pytest.raises(BadInputError, match="rate_per_s must be above 0"):
        GammaArrivals(0.0)
    with pytest.raises(BadInputError, match="coefficient_of_variation must be above 0"):
        GammaArrivals(1.0, 0.0)
