"""Time of day: an arrival process whose rate follows the hours, by a change of its clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tonnage.sim.domain import BadInputError, FloatArray
from tonnage.sim.traffic.arrivals import GammaArrivals

_DAY_S = 86_400.0
_STEP_S = 60.0  # within a minute the rate is constant

# An assumed day, not a measured one: least at 3 h, most at 15 h, three times as much; mean 1.
DIURNAL = tuple(
    (float(hour), float(1.0 - 0.5 * np.cos(2.0 * np.pi * (hour - 3) / 24.0))) for hour in range(24)
)


@dataclass(frozen=True, slots=True)
class DayShape:
    """What the rate is multiplied with over the day: `points` are (hour, factor), hours rising.

    Between points the factor is interpolated, around midnight too; the day repeats. The run begins
    at `start_hour`.
    """

    points: tuple[tuple[float, float], ...]
    start_hour: float = 0.0

    def __post_init__(self) -> None:
        hours = [hour for hour, _ in self.points]
        if not hours or hours != sorted(set(hours)) or hours[0] < 0 or hours[-1] >= 24:
            raise BadInputError("hours must rise, each once, from 0 to below 24")
        factors = [factor for _, factor in self.points]
        if min(factors) < 0 or max(factors) <= 0:
            raise BadInputError("factors must be 0 or more, and one of them above 0")

    def factor(self, hour: FloatArray) -> FloatArray:
        """Return the factor at hours of the day."""
        hours, factors = (np.array(column) for column in zip(*self.points, strict=True))
        found: FloatArray = np.interp(hour, hours, factors, period=24.0)
        return found

    def mean_over_peak(self) -> float:
        """Return the mean factor of the day over its largest."""
        hours = [hour for hour, _ in self.points]
        factors = [factor for _, factor in self.points]
        # Straight lines between the points, the last of them to the next day's first.
        area = np.trapezoid([*factors, factors[0]], [*hours, hours[0] + 24.0])
        return float(area / 24.0 / max(factors))

    def warp(self, times_s: FloatArray) -> FloatArray:
        """Return when arrivals of the constant rate 1 come that `factor` speeds up and slows down.

        The inverse of the integral of the factor, with the factor constant within a minute.
        """
        edges_s = np.arange(0.0, _DAY_S + _STEP_S, _STEP_S)
        middles_h = (self.start_hour + (edges_s[:-1] + _STEP_S / 2) / 3600.0) % 24.0
        passed = np.concatenate([[0.0], np.cumsum(self.factor(middles_h) * _STEP_S)])
        days, rest = np.divmod(times_s, passed[-1])
        minutes = np.searchsorted(passed, rest, side="right") - 1  # never one of factor 0
        minutes = np.minimum(minutes, len(edges_s) - 2)
        share = (rest - passed[minutes]) / (passed[minutes + 1] - passed[minutes])
        warped: FloatArray = days * _DAY_S + edges_s[minutes] + share * _STEP_S
        return warped


@dataclass(frozen=True, slots=True)
class ShapedArrivals:
    """Arrivals whose rate is `arrivals.rate_per_s` times the factor of the hour."""

    arrivals: GammaArrivals
    shape: DayShape

    def times_s(self, rng: np.random.Generator, count: int) -> Iterator[FloatArray]:
        """Yield `count` rising arrival times in blocks."""
        for block_s in self.arrivals.times_s(rng, count):
            yield self.shape.warp(block_s)


Arrivals = GammaArrivals | ShapedArrivals
