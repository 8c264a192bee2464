"""Distributions of token counts: a number, a range, a long tail, or a user's own sample."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tonnage.sim.domain import BadInputError, IntArray

_NORMAL_P95 = 1.6448536269514722  # 95 % quantile of the standard normal distribution


class LengthDistribution(Protocol):
    """A source of token counts, each at least 1."""

    def sample(self, rng: np.random.Generator, count: int) -> IntArray:
        """Draw `count` token counts `[count]`."""
        ...

    def mean(self) -> float:
        """Return the expected number of tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    """The same number of tokens for every request."""

    tokens: int

    def __post_init__(self) -> None:
        _at_least_one("a token count", self.tokens)

    def sample(self, rng: np.random.Generator, count: int) -> IntArray:
        """Repeat the number; the generator is not advanced."""
        return np.full(count, self.tokens, dtype=np.int64)

    def mean(self) -> float:
        """Return the number itself."""
        return float(self.tokens)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Whole numbers from `low` to `high`, both included, equally likely."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _at_least_one("low", self.low)
        if self.high < self.low:
            raise BadInputError(f"high {self.high} is below low {self.low}; swap them")

    def sample(self, rng: np.random.Generator, count: int) -> IntArray:
        """Draw from the closed range."""
        return rng.integers(self.low, self.high, size=count, endpoint=True, dtype=np.int64)

    def mean(self) -> float:
        """Return the middle of the range."""
        return (self.low + self.high) / 2.0


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A long tail: the logarithm is normal with mean `mu` and deviation `sigma`.

    Draws are rounded to whole tokens, raised to 1 and cut at `limit`; `mean()` counts the cut and
    ignores the rounding, which matters below some ten tokens only.
    """

    mu: float
    sigma: float
    limit: int | None = None

    @classmethod
    def from_mean_and_p95(cls, mean: float, p95: float, limit: int | None = None) -> LogNormal:
        """Solve `mean = exp(mu + sigma^2 / 2)` and `p95 = exp(mu + 1.645 sigma)` for the tail.

        Both equations hold for two tails at most; the lighter one is meant.
        """
        _at_least_one("mean", mean)
        if p95 <= mean:
            raise BadInputError(f"p95 {p95:g} must be above the mean {mean:g}")
        excess = _NORMAL_P95**2 - 2.0 * math.log(p95 / mean)
        if excess < 0.0:
            largest = mean * math.exp(_NORMAL_P95**2 / 2.0)
            raise BadInputError(
                f"no lognormal has mean {mean:g} and p95 {p95:g}; with this mean p95 is at most "
                f"{largest:,.0f}; give median and p95 instead"
            )
        sigma = _NORMAL_P95 - math.sqrt(excess)
        return cls(math.log(mean) - sigma**2 / 2.0, sigma, limit)

    @classmethod
    def from_median_and_p95(cls, median: float, p95: float, limit: int | None = None) -> LogNormal:
        """Solve `median = exp(mu)` and `p95 = exp(mu + 1.645 sigma)` for the tail."""
        _at_least_one("median", median)
        if p95 <= median:
            raise BadInputError(f"p95 {p95:g} must be above the median {median:g}")
        return cls(math.log(median), math.log(p95 / median) / _NORMAL_P95, limit)

    def sample(self, rng: np.random.Generator, count: int) -> IntArray:
        """Draw, round, and keep within 1 and the limit."""
        draws = rng.lognormal(self.mu, self.sigma, size=count)
        return np.clip(np.rint(draws), 1.0, self.limit).astype(np.int64)

    def mean(self) -> float:
        """Return `E[min(X, limit)]`."""
        uncut = math.exp(self.mu + self.sigma**2 / 2.0)
        if self.limit is None:
            return uncut
        score = (math.log(self.limit) - self.mu) / self.sigma
        return uncut * _normal_cdf(score - self.sigma) + self.limit * _normal_cdf(-score)


@dataclass(frozen=True, slots=True, eq=False)
class Empirical:
    """Token counts drawn, with replacement, from a sample `[values]`."""

    values: IntArray

    def __post_init__(self) -> None:
        if len(self.values) == 0:
            raise BadInputError("an empirical distribution needs at least one value")
        _at_least_one("the smallest value", int(self.values.min()))

    def sample(self, rng: np.random.Generator, count: int) -> IntArray:
        """Draw with replacement."""
        return self.values[rng.integers(0, len(self.values), size=count)]

    def mean(self) -> float:
        """Return the mean of the sample."""
        return float(self.values.mean())


def _normal_cdf(score: float) -> float:
    return 0.5 * math.erfc(-score / math.sqrt(2.0))


def _at_least_one(what: str, value: float) -> None:
    if value < 1:
        raise BadInputError(f"{what} must be at least 1 token, not {value:g}")
