"""A mergeable quantile sketch with a bounded relative error."""

from __future__ import annotations

import math
from bisect import bisect_right

import numpy as np

from tonnage.sim.domain import FloatArray

_LOWEST = 1e-7  # seconds; smaller values count as this
_HIGHEST = 1e6
_RELATIVE_ERROR = 0.005
_GROWTH = (1 + _RELATIVE_ERROR) / (1 - _RELATIVE_ERROR)
_BUCKETS = math.ceil(math.log(_HIGHEST / _LOWEST) / math.log(_GROWTH)) + 1
_EDGES = _LOWEST * _GROWTH ** np.arange(_BUCKETS)  # lower edge of each bucket
_EDGE_LIST = _EDGES.tolist()


class QuantileSketch:
    """Counts in logarithmic buckets (the DDSketch of Masson, Rim and Lee, VLDB 2019).

    Quantiles of positive values are within 0.5 % of an exact one; two sketches merge by addition,
    and the size does not grow with the number of values.
    """

    def __init__(self, unit: float = 1.0) -> None:
        """Make an empty sketch of values that are added as multiples of `unit`."""
        self._unit = unit
        self._counts = np.zeros(_BUCKETS, dtype=np.int64)
        self._sum = 0.0

    def add(self, values: FloatArray, weight: int = 1) -> None:
        """Add values `[n]`, each `weight` times."""
        first = self._bucket(float(np.minimum.reduce(values)))
        last = self._bucket(float(np.maximum.reduce(values)))
        if last - first <= 1:  # the usual case: steps of one segment are nearly equal
            above = 0
            if last > first:
                above = int(np.count_nonzero(values * self._unit >= _EDGES[last]))
                self._counts[last] += above * weight
            self._counts[first] += (len(values) - above) * weight
        else:
            buckets = np.searchsorted(_EDGES, values * self._unit, side="right") - 1
            np.add.at(self._counts, np.maximum(buckets, 0), weight)
        self._sum += weight * float(np.add.reduce(values)) * self._unit

    def add_one(self, value: float, weight: int = 1) -> None:
        """Add one value `weight` times."""
        self._counts[self._bucket(value)] += weight
        self._sum += weight * value * self._unit

    def _bucket(self, value: float) -> int:
        return max(bisect_right(_EDGE_LIST, value * self._unit) - 1, 0)

    def merge(self, other: QuantileSketch) -> None:
        """Add all values of another sketch, whatever its unit."""
        self._counts += other._counts
        self._sum += other._sum

    @property
    def count(self) -> int:
        """Number of values, weights included."""
        return int(self._counts.sum())

    def mean(self) -> float:
        """Return the exact mean of the values; NaN when there are none."""
        count = self.count
        return self._sum / count if count else float("nan")

    def quantile(self, share: float) -> float:
        """Return a value that about `share` of the values do not exceed; NaN without values."""
        count = self.count
        if not count:
            return float("nan")
        rank = share * (count - 1)
        bucket = int(np.searchsorted(np.cumsum(self._counts), rank, side="right"))
        return float(_EDGES[bucket] * 2 * _GROWTH / (1 + _GROWTH))

    def share_at_most(self, limit: float) -> float:
        """Return the share of values that do not exceed a limit, to the width of a bucket."""
        count = self.count
        bucket = max(bisect_right(_EDGE_LIST, limit) - 1, 0)
        return float(self._counts[: bucket + 1].sum()) / count if count else float("nan")
