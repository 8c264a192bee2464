"""Distributions of durations: a number, a memoryless one, a long tail, or a user's own sample."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tonnage.sim.domain import BadInputError, FloatArray

_NORMAL_P95 = 1.6448536269514722  # 95 % quantile of the standard normal distribution


class DurationDistribution(Protocol):
    """A source of durations, each at least 0 s."""

    def sample(self, rng: np.random.Generator, count: int) -> FloatArray:
        """Draw `count` durations `[count]` in seconds."""
        ...


@dataclass(frozen=True, slots=True)
class ConstantDuration:
    """The same duration every time."""

    duration_s: float

    def sample(self, rng: np.random.Generator, count: int) -> FloatArray:
        """Repeat the duration; the generator is not advanced."""
        return np.full(count, self.duration_s)


@dataclass(frozen=True, slots=True)
class ExponentialDuration:
    """A memoryless duration of the given mean."""

    mean_s: float

    def sample(self, rng: np.random.Generator, count: int) -> FloatArray:
        """Draw."""
        return rng.exponential(self.mean_s, size=count)


@dataclass(frozen=True, slots=True)
class LogNormalDuration:
    """A long tail by its median and 95 % quantile, cut at `max_s`.

    `median = exp(mu)` and `p95 = exp(mu + 1.645 sigma)`.
    """

    median_s: float
    p95_s: float
    max_s: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.median_s < self.p95_s:
            raise BadInputError(
                f"p95 {self.p95_s:g} s must be above the median {self.median_s:g} s, above 0"
            )

    def sample(self, rng: np.random.Generator, count: int) -> FloatArray:
        """Draw and cut."""
        sigma = math.log(self.p95_s / self.median_s) / _NORMAL_P95
        return np.minimum(
            rng.lognormal(math.log(self.median_s), sigma, size=count),
            math.inf if self.max_s is None else self.max_s,
        )


@dataclass(frozen=True, slots=True, eq=False)
class EmpiricalDuration:
    """Durations drawn, with replacement, from a sample `[values]` in seconds."""

    values_s: FloatArray

    def sample(self, rng: np.random.Generator, count: int) -> FloatArray:
        """Draw with replacement."""
        return self.values_s[rng.integers(0, len(self.values_s), size=count)]
