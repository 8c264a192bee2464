"""How far a simulated figure may be off by chance: warm-up, batch means, replications."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from tonnage.sim.domain import BadInputError, FloatArray

Interval = tuple[float, float]

_MSER_BATCH = 5
_BATCHES = 20
_FEWEST_BATCHES = 10
_SMALLEST_BATCH = 10  # observations
_TAIL_OF_BATCH = 2  # observations of a batch beyond its quantile, on the thinner side
_SIGNIFICANT = 1.645  # standard errors: the one-sided 5 % point of the normal distribution
_CORRELATION_MAX = 0.9  # beyond, ten batch means tell too little of the correlation to correct it
_ROUNDING = 1e-12  # relative
_DIFFERENT = 3.0  # standard errors between the warm-up and the rest


def warm_up_cut(values: FloatArray) -> int:
    """Return how many of the first observations `[n]`, in order of arrival, are the warm-up.

    MSER-5: of means of five, cut where the standard error of the mean of the rest is least, at most
    half of the run (White, Simulation 69(6), 1997; Franklin and White, Winter Simulation
    Conference 2008).
    """
    batches = len(values) // _MSER_BATCH
    if batches < 2:
        return 0
    means = values[: batches * _MSER_BATCH].reshape(batches, _MSER_BATCH).mean(axis=1)
    means = means - means.mean()  # sums of squares then lose no digits
    left = np.arange(batches, 0, -1)
    sums = np.cumsum(means[::-1])[::-1]
    squares = np.cumsum(means[::-1] ** 2)[::-1]
    errors = (squares - sums**2 / left) / left**2
    candidates = errors[: batches // 2 + 1]
    # Behind the warm-up of a constant run the least error comes many times, but for rounding.
    least = candidates.min() + _ROUNDING * errors.max()
    return int(np.argmax(candidates <= least)) * _MSER_BATCH


def steady_part(values: FloatArray) -> FloatArray:
    """Return a run `[n]` without its warm-up, where it has one.

    A run without a warm-up has its least standard error somewhere too, mostly behind a burst, whose
    loss would flatter the mean. So MSER-5's cut is made only where the mean before it is more than
    3 standard errors of their difference away from the mean behind it, or where too little is left
    to tell.
    """
    cut = warm_up_cut(values)
    before, after = values[:cut], values[cut:]
    if not cut:
        return values
    spread = _spread(after, _SMALLEST_BATCH, _FEWEST_BATCHES, _mean)
    if spread is None:
        return after
    # The standard error of a mean goes with the root of the number of observations.
    error = spread.error * math.sqrt(1 + len(after) / len(before))
    return after if abs(before.mean() - after.mean()) > _DIFFERENT * error else values


def batch_means_interval(
    values: FloatArray,
    confidence: float = 0.95,
    batches: int | None = None,
    *,
    quantile: float | None = None,
) -> Interval | None:
    """Return the interval of the mean, or of a quantile, of one run `[n]` without its warm-up.

    Batch means for the mean, from 20 batches (Law, Simulation Modeling and Analysis, 5th ed.,
    section 9.5.3). Sectioning for a quantile, from 10: batches give the spread and the whole run
    the centre, whose bias is less than theirs (Asmussen and Glynn, Stochastic Simulation, 2007,
    section III.5; Nakayama, ACM TOMACS 24(4), 2014). None where ten batches would be too short:
    fewer than 10 observations each, or fewer than 2 beyond the quantile (100 observations for the
    mean, 200 for p90, 400 for p95, 2,000 for p99).
    """
    if quantile is None:
        return _interval(values, _SMALLEST_BATCH, batches or _BATCHES, _mean, confidence)
    if not 0.0 < quantile < 1.0:
        raise BadInputError(f"quantile {quantile:g} is not between 0 and 1")
    tail = min(quantile, 1.0 - quantile)
    smallest = max(_SMALLEST_BATCH, math.ceil(_TAIL_OF_BATCH / tail - 1e-9))

    def quantiles(parts: FloatArray) -> FloatArray:
        return np.asarray(np.quantile(parts, quantile, axis=1))

    return _interval(values, smallest, batches or _FEWEST_BATCHES, quantiles, confidence)


def ratio_interval(
    numerators: FloatArray, denominators: FloatArray, confidence: float = 0.95
) -> Interval | None:
    """Return the interval of `sum(numerators) / sum(denominators)`, both `[n]` in order of time.

    Batch means of `numerator - ratio * denominator`, whose mean is zero (Law, section 9.5.3, of
    ratios over regenerative cycles): tokens over the time between the ends of requests give a
    rate. None below 100 observations.
    """
    total = float(denominators.sum())
    if not total > 0.0:
        return None
    ratio = float(numerators.sum()) / total
    residuals = (numerators - ratio * denominators) / float(denominators.mean())
    around_zero = _interval(residuals, _SMALLEST_BATCH, _BATCHES, _mean, confidence)
    return None if around_zero is None else (ratio + around_zero[0], ratio + around_zero[1])


def replication_interval(means: Sequence[float], confidence: float = 0.95) -> Interval | None:
    """Return Student's interval of the mean over runs that differ by their seed alone.

    The replication method (Law, section 9.5.2); None with fewer than two runs.
    """
    runs = np.asarray(means, dtype=np.float64)
    if len(runs) < 2:
        return None
    error = float(runs.std(ddof=1)) / math.sqrt(len(runs))
    return _around(float(runs.mean()), _Spread(error, len(runs)), confidence)


@dataclass(frozen=True, slots=True)
class _Spread:
    """The standard error of a figure and the number of batches it was estimated from."""

    error: float
    batches: int


_Figures = Callable[[FloatArray], FloatArray]  # `[batches, observations]` to `[batches]`


def _mean(parts: FloatArray) -> FloatArray:
    return np.asarray(parts.mean(axis=1))


def _interval(
    values: FloatArray, smallest: int, batches: int, figures: _Figures, confidence: float
) -> Interval | None:
    spread = _spread(values, smallest, batches, figures)
    if spread is None:
        return None
    return _around(float(figures(values[np.newaxis])[0]), spread, confidence)


def _spread(values: FloatArray, smallest: int, batches: int, figures: _Figures) -> _Spread | None:
    """Return the spread of the figures of batches around that of the whole run.

    Neighbours that are significantly correlated are merged, by halving the number of batches, down
    to ten; what correlation is left widens the variance by (1 + r) / (1 - r), as for a first-order
    autoregression (Tafazzoli, Wilson, Lada and Steiger, Skart, INFORMS J. Computing 23(2), 2011).
    """
    batches = min(batches, len(values) // smallest)
    if batches < _FEWEST_BATCHES:
        return None
    found = figures(_parts(values, batches))
    while batches > _FEWEST_BATCHES and _lag_one(found) > _SIGNIFICANT / math.sqrt(batches):
        batches = max(batches // 2, _FEWEST_BATCHES)
        found = figures(_parts(values, batches))
    correlation = min(max(_lag_one(found), 0.0), _CORRELATION_MAX)
    squares = float(((found - figures(values[np.newaxis])[0]) ** 2).sum())
    inflation = (1 + correlation) / (1 - correlation)
    return _Spread(math.sqrt(inflation * squares / (batches * (batches - 1))), batches)


def _parts(values: FloatArray, count: int) -> FloatArray:
    """Return `[count, observations]`; what does not divide is left out at the beginning."""
    size = len(values) // count
    return values[len(values) - count * size :].reshape(count, size)


def _lag_one(figures: FloatArray) -> float:
    """Return the correlation of neighbours, freed of its bias of about -1/n."""
    deviations = figures - figures.mean()
    squares = float((deviations**2).sum())
    if squares == 0.0:
        return 0.0
    return float((deviations[1:] * deviations[:-1]).sum()) / squares + 1 / len(figures)


def _around(centre: float, spread: _Spread, confidence: float) -> Interval:
    if not 0.0 < confidence < 1.0:
        raise BadInputError(f"confidence {confidence:g} is not between 0 and 1, such as 0.95")
    half_width = float(stdtrit(spread.batches - 1, 0.5 + confidence / 2)) * spread.error
    return centre - half_width, centre + half_width
