"""Tables on a regular grid of knots, read by multilinear interpolation between their logs.

The values are whatever a model keeps there, most often the log of measured seconds over the seconds
of a physical form. Beyond the outermost knots the edge's value holds, so that the form times the
edge's efficiency carries on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import exp, log

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tonnage.sim.domain import BadInputError, FloatArray

_IndexArray = NDArray[np.intp]


class Grid:
    """Values `[knots of axis 0, knots of axis 1, ...]` at rising knots.

    An axis is interpolated in ``log(x + shift)``; give a shift to axes that hold zero (a prefix of
    no tokens). NaN values are taken from the nearest knot, in steps along the axes, that has one.
    """

    def __init__(
        self,
        knots: Sequence[ArrayLike],
        values: ArrayLike,
        shifts: Sequence[float] | None = None,
    ) -> None:
        self.knots = tuple(np.asarray(axis, dtype=np.float64) for axis in knots)
        self.shifts = tuple(shifts or [0.0] * len(self.knots))
        self.values = filled(np.asarray(values, dtype=np.float64))
        shape = tuple(len(axis) for axis in self.knots)
        if self.values.shape != shape:
            raise ValueError(f"values have shape {self.values.shape}, the knots {shape}")
        if any((np.diff(axis) <= 0).any() for axis in self.knots):
            raise ValueError("knots must rise")
        self._logs = tuple(
            np.log(axis + shift) for axis, shift in zip(self.knots, self.shifts, strict=True)
        )

    def at(self, *points: ArrayLike) -> FloatArray:
        """Return the values at points, one array per axis, broadcast against each other."""
        corners = [self._corners(axis, point) for axis, point in enumerate(points)]
        total: FloatArray = np.zeros(np.broadcast_shapes(*(low.shape for low, _, _ in corners)))
        for choice in product((False, True), repeat=len(corners)):
            weight: FloatArray | float = 1.0
            index = []
            for (low, high, share), upper in zip(corners, choice, strict=True):
                weight = weight * (share if upper else 1.0 - share)
                index.append(high if upper else low)
            total = total + weight * self.values[tuple(index)]
        return total

    def line(self, axis: int, *points: float) -> FloatArray:
        """Return the values at all knots of one axis, the other axes at the given points."""
        others = list(points)
        others.insert(axis, 1.0)
        spread: list[ArrayLike] = list(others)
        spread[axis] = self.knots[axis]
        return self.at(*spread)

    def inside(self, *points: ArrayLike) -> bool:
        """Return whether every point lies between the outermost knots of its axis."""
        for axis, point in zip(self.knots, points, strict=True):
            array = np.asarray(point, dtype=np.float64)
            if array.size and (array.min() < axis[0] or array.max() > axis[-1]):
                return False
        return True

    def _corners(self, axis: int, point: ArrayLike) -> tuple[_IndexArray, _IndexArray, FloatArray]:
        """Return the knots below and above each point and its share of the way between them."""
        logs, knots = self._logs[axis], self.knots[axis]
        # Clamped before the log: a point below the first knot may be zero.
        inside = np.clip(np.asarray(point, dtype=np.float64), knots[0], knots[-1])
        where = np.log(inside + self.shifts[axis])
        if len(knots) == 1:
            first = np.zeros(where.shape, dtype=np.intp)
            return first, first, np.zeros(where.shape)
        high = np.clip(np.searchsorted(logs, where, side="right"), 1, len(knots) - 1)
        share = (where - logs[high - 1]) / (logs[high] - logs[high - 1])
        return high - 1, high, np.clip(share, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class LogCurve:
    """Seconds over one variable, linear in the logs of both; the first value holds below the first
    point, the last slope above the last. Reading one number takes about a microsecond.
    """

    points: list[float]
    log_points: list[float]
    log_seconds: list[float]

    @classmethod
    def of(cls, points: FloatArray, log_seconds: FloatArray) -> LogCurve:
        """Return the curve through rising points and the logs of their seconds."""
        return cls(points.tolist(), np.log(points).tolist(), log_seconds.tolist())

    def at(self, point: float) -> float:
        """Return the seconds at a point."""
        points, log_points, log_seconds = self.points, self.log_points, self.log_seconds
        if point <= points[0] or len(points) == 1:
            return exp(log_seconds[0])
        high = min(bisect_right(points, point), len(points) - 1)
        start, low = log_points[high - 1], log_seconds[high - 1]
        share = (log(point) - start) / (log_points[high] - start)
        return exp(low + share * (log_seconds[high] - low))

    def at_each(self, points: FloatArray) -> FloatArray:
        """Return the seconds at each point, in the shape of the points."""
        return np.array([self.at(point) for point in points.ravel().tolist()]).reshape(points.shape)


def grid_from_columns(
    columns: Mapping[str, ArrayLike],
    axes: Sequence[str],
    values: ArrayLike,
    shifts: Sequence[float] | None = None,
) -> Grid:
    """Return the grid that rows of a table span; a row per combination, absent ones are filled.

    `columns` is a data frame or a mapping of arrays, `values` one number per row. Two rows with the
    same combination raise `BadInputError`: which of them holds is the importer's to decide.
    """
    knots, positions = [], []
    for axis in axes:
        unique, inverse = np.unique(np.asarray(columns[axis], np.float64), return_inverse=True)
        knots.append(unique)
        positions.append(inverse)
    array = np.asarray(values, dtype=np.float64)
    flat = np.ravel_multi_index(tuple(positions), tuple(len(axis) for axis in knots))
    if len(np.unique(flat)) < len(flat):
        raise BadInputError(f"table: two rows for the same {', '.join(axes)}; keep one of them")
    table = np.full(tuple(len(axis) for axis in knots), np.nan)
    table.ravel()[flat] = array
    return Grid(knots, table, shifts)


def refined(knots: FloatArray, most: float) -> FloatArray:
    """Return the knots, seven points between each two, and doublings of the last up to `most`.

    Between such points a physical form is close to a straight line in the logs.
    """
    ratios = knots[1:] / knots[:-1]
    between = (knots[:-1, None] * ratios[:, None] ** (np.arange(8) / 8)).ravel()
    doublings = max(int(np.ceil(np.log2(most / knots[-1]))), 1)
    return np.concatenate([between, knots[-1] * 2.0 ** np.arange(doublings + 1)])


def filled(values: FloatArray) -> FloatArray:
    """Return the values with each NaN replaced by the nearest value, in steps along the axes."""
    missing = np.isnan(values)
    if not missing.any():
        return values
    if missing.all():
        raise ValueError("a table needs at least one value")
    present = np.argwhere(~missing)
    result = values.copy()
    for hole in np.argwhere(missing):
        nearest = present[np.abs(present - hole).sum(axis=1).argmin()]
        result[tuple(hole)] = values[tuple(nearest)]
    return result


def monotone(values: ArrayLike, axis: int = 0, weights: ArrayLike | None = None) -> FloatArray:
    """Return the nearest values (least squares) that never fall along an axis; NaN stays NaN.

    Isotonic regression by pooling adjacent violators (Barlow et al., 1972). `weights` have the
    shape of the values or of the axis; pass logs so that relative errors weigh alike.
    """
    array = np.moveaxis(np.asarray(values, dtype=np.float64), axis, -1)
    if weights is None:
        weighting = np.ones_like(array)
    else:
        given = np.asarray(weights, dtype=np.float64)
        weighting = np.moveaxis(given, axis, -1) if given.ndim == array.ndim else given
        weighting = np.broadcast_to(weighting, array.shape)
    result = array.copy()
    for index in np.ndindex(array.shape[:-1]):
        known = ~np.isnan(array[index])
        result[index][known] = _pooled(array[index][known], weighting[index][known])
    return np.moveaxis(result, -1, axis)


def _pooled(values: FloatArray, weights: FloatArray) -> FloatArray:
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        mean, total, length = value, weight, 1
        while blocks and blocks[-1][0] > mean:
            last_mean, last_total, last_length = blocks.pop()
            mean = (last_mean * last_total + mean * total) / (last_total + total)
            total, length = last_total + total, last_length + length
        blocks.append((mean, total, length))
    return np.repeat([block[0] for block in blocks], [block[2] for block in blocks])
