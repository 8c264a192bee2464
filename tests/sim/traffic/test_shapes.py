"""The time of day: arrivals follow the hours, the rest of the process stays as it was."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.sim.domain import BadInputError, FloatArray
from tonnage.sim.traffic.arrivals import GammaArrivals
from tonnage.sim.traffic.shapes import DIURNAL, DayShape, ShapedArrivals

DAY_S = 86_400.0


def arrivals_s(shape: DayShape, rate_per_s: float, days: int) -> FloatArray:
    """Draw arrivals of a shaped Poisson process in so many days; its factors are at most 1.5."""
    process = ShapedArrivals(GammaArrivals(rate_per_s), shape)
    count = int(1.6 * rate_per_s * days * DAY_S)
    times_s = np.concatenate(list(process.times_s(np.random.default_rng(1), count)))
    assert times_s[-1] > days * DAY_S
    return times_s[times_s < days * DAY_S]


def test_a_flat_shape_changes_nothing() -> None:
    times_s = np.linspace(0.0, 3.0 * DAY_S, 1000)
    assert DayShape(((7.0, 1.0),)).warp(times_s) == pytest.approx(times_s)
    assert DayShape(((7.0, 2.0),)).warp(times_s) == pytest.approx(times_s / 2.0)


def test_every_hour_gets_its_share() -> None:
    shape = DayShape(DIURNAL)
    hours = (arrivals_s(shape, 2.0, days=5) % DAY_S) // 3600
    counts = np.bincount(hours.astype(int), minlength=24)
    middles = np.arange(24) + 0.5
    expected = 5 * 2.0 * 3600.0 * shape.factor(middles)
    # Five standard deviations of a Poisson count, and the bend of the curve within an hour.
    assert np.all(np.abs(counts - expected) < 5.0 * np.sqrt(expected) + 0.003 * expected)
    assert counts[15] > 2.8 * counts[3]


def test_the_assumed_day_has_mean_one_and_a_factor_of_three() -> None:
    factors = [factor for _, factor in DIURNAL]
    assert np.mean(factors) == pytest.approx(1.0)
    assert max(factors) == pytest.approx(3.0 * min(factors))


def test_nothing_arrives_in_hours_of_factor_zero() -> None:
    closed = DayShape(((0.0, 0.0), (8.0, 0.0), (9.0, 1.0), (17.0, 1.0), (18.0, 0.0)))
    hours = arrivals_s(closed, 0.5, days=3) % DAY_S / 3600
    assert hours.min() >= 8.0
    assert hours.max() <= 18.0
    assert np.mean((hours >= 9.0) & (hours < 17.0)) == pytest.approx(8.0 / 9.0, abs=0.01)


def test_the_run_begins_at_the_start_hour() -> None:
    points = ((0.0, 1.0), (12.0, 1.0), (12.5, 3.0), (23.5, 3.0))
    early, late = (DayShape(points, start_hour=hour) for hour in (1.0, 14.0))
    times_s = np.array([3600.0])
    assert early.warp(times_s)[0] == pytest.approx(3600.0)
    assert late.warp(times_s)[0] == pytest.approx(1200.0)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 23), st.floats(0.01, 10.0)),
        min_size=1,
        max_size=8,
        unique_by=lambda point: point[0],
    ),
    st.floats(0.0, 23.9),
)
def test_order_is_kept_and_days_repeat(points: list[tuple[int, float]], start: float) -> None:
    shape = DayShape(tuple((float(h), f) for h, f in sorted(points)), start)
    passed = np.linspace(0.0, 10.0 * DAY_S, 400)
    warped = shape.warp(passed)
    assert np.all(np.diff(warped) >= 0.0)
    a_day = np.mean(shape.factor((start + (np.arange(1440) + 0.5) / 60.0) % 24.0)) * DAY_S
    assert shape.warp(passed + a_day) == pytest.approx(warped + DAY_S, rel=1e-6, abs=1e-3)


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ((), "hours must rise"),
        (((3.0, 1.0), (2.0, 1.0)), "hours must rise"),
        (((24.0, 1.0),), "below 24"),
        (((0.0, -1.0), (1.0, 1.0)), "0 or more"),
        (((0.0, 0.0),), "one of them above 0"),
    ],
)
def test_shapes_that_are_none(points: tuple[tuple[float, float], ...], expected: str) -> None:
    with pytest.raises(BadInputError, match=expected):
        DayShape(points)
