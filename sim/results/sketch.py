"""A mergeable quantile sketch with a bounded relative error."""

from __future__ import annotations

import numpy as np

from tonnage.sim.domain import FloatArray

_LOWEST = 1e-7  # seconds; smaller values count as this
_HIGHEST = 1e6
_RELATIVE_ERROR = 0.005
_GROWTH = (1 + _RELATIVE_ERROR) / (1 - _RELATIVE_ERROR)
_LOG_GROWTH = float(np.log(_GROWTH))
_BUCKETS = int(np.ceil(np.log(_HIGHEST / _LOWEST) / _LOG_GROWTH)) + 1
_PENDING = 512  # values are sorted into buckets that many pieces at a time


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
        self._pieces: list[FloatArray] = []
        self._piece_weights: list[int] = []
        self._single_values: list[float] = []
        self._single_weights: list[int] = []

    def add(self, values: FloatArray, weight: int = 1) -> None:
        """Add values `[n]`, each `weight` times."""
        self._pieces.append(values)
        self._piece_weights.append(weight)
        if len(self._pieces) >= _PENDING:
            self._settle()

    def add_one(self, value: float, weight: int = 1) -> None:
        """Add one value `weight` times."""
        self._single_values.append(value)
        self._single_weights.append(weight)
        if len(self._single_values) >= _PENDING:
            self._settle()

    def merge(self, other: QuantileSketch) -> None:
        """Add all values of another sketch, whatever its unit."""
        other._settle()
        self._counts += other._counts
        self._sum += other._sum

    def _settle(self) -> None:
        """Sort the pending values into their buckets."""
        if not self._pieces and not self._single_values:
            return
        repeats = [len(piece) for piece in self._pieces] + [1] * len(self._single_values)
        weights = np.repeat(self._piece_weights + self._single_weights, repeats)
        values = np.concatenate([*self._pieces, self._single_values]) * self._unit
        self._pieces, self._piece_weights = [], []
        self._single_values, self._single_weights = [], []
        self._sum += float(values @ weights)
        buckets = (np.log(np.maximum(values, _LOWEST) / _LOWEST) / _LOG_GROWTH).astype(np.int64)
        np.add.at(self._counts, np.minimum(buckets, _BUCKETS - 1), weights)

    @property
    def count(self) -> int:
        """Number of values, weights included."""
        self._settle()
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
        return float(_LOWEST * _GROWTH**bucket * 2 * _GROWTH / (1 + _GROWTH))

    def share_at_most(self, limit: float) -> float:
        """Return the share of values that do not exceed a limit, to the width of a bucket."""
        count = self.count
        bucket = int(np.log(max(limit, _LOWEST) / _LOWEST) / _LOG_GROWTH)
        return float(self._counts[: bucket + 1].sum()) / count if count else float("nan")
