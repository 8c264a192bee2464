"""Arrival times of an open load: Poisson, or gamma gaps for traffic that comes in bursts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tonnage.sim.domain import BadInputError, FloatArray

BLOCK = 4096  # draws held in memory at once, whatever the number of requests


@dataclass(frozen=True, slots=True)
class GammaArrivals:
    """Independent gaps with mean `1 / rate_per_s` and the given coefficient of variation.

    A coefficient of 1 is a Poisson process, above 1 comes in bursts, below 1 is more even.
    """

    rate_per_s: float
    coefficient_of_variation: float = 1.0

    def __post_init__(self) -> None:
        if self.rate_per_s <= 0.0:
            raise BadInputError(f"rate_per_s must be above 0, not {self.rate_per_s:g}")
        if self.coefficient_of_variation <= 0.0:
            raise BadInputError(
                f"coefficient_of_variation must be above 0, not {self.coefficient_of_variation:g}"
            )

    def times_s(self, rng: np.random.Generator, count: int) -> Iterator[FloatArray]:
        """Yield `count` rising arrival times in blocks `[<= BLOCK]`."""
        last_s = 0.0
        for drawn in range(0, count, BLOCK):
            gaps_s = self._gaps_s(rng, min(BLOCK, count - drawn))
            times_s = last_s + np.cumsum(gaps_s)
            last_s = float(times_s[-1])
            yield times_s

    def _gaps_s(self, rng: np.random.Generator, count: int) -> FloatArray:
        if self.coefficient_of_variation == 1.0:
            return rng.exponential(1.0 / self.rate_per_s, size=count)
        squared = self.coefficient_of_variation**2
        return rng.gamma(1.0 / squared, squared / self.rate_per_s, size=count)
