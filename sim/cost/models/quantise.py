"""Seconds of quantising activations `[m, k]` from BF16 to FP8 with a given scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from tonnage.sim.cost.estimate import Estimate
from tonnage.sim.cost.models.grid import Grid, LogCurve, grid_from_columns, refined
from tonnage.sim.domain import FloatArray, GpuSpec

_MOVED_BYTES = 3.0  # per element: BF16 read, FP8 written
_MOST_ROWS = 2**21
_DATASHEET_INTERVAL = (1.0, 4.0)  # nothing was measured


class QuantiseModel:
    """Predict from ``t0 + m k / q`` times residuals over (m, k), never falling along m."""

    def __init__(self, residuals: Grid | None, fitted: Mapping[str, Any], rates: GpuSpec) -> None:
        self._residuals = residuals
        self._fitted = fitted
        self._rates = rates
        self._curves: dict[int, LogCurve] = {}

    @classmethod
    def from_tables(
        cls,
        tables: Mapping[str, Any],
        fitted: Mapping[str, Any],
        rates: GpuSpec,
    ) -> QuantiseModel:
        """Build from a profile's `quantise` table and header; without them, the datasheet."""
        parameters, rows = fitted.get("quantise") or {}, tables.get("quantise")
        if rows is None or not parameters:
            return cls(None, {}, rates)
        columns = {axis: np.asarray(rows[axis], dtype=np.float64) for axis in "mk"}
        formed = formed_s(parameters, **columns)
        residuals = np.log(np.asarray(rows["seconds"], dtype=np.float64) / formed)
        return cls(grid_from_columns(columns, ("m", "k"), residuals), parameters, rates)

    def seconds(self, m: float, k: int) -> Estimate:
        """Return the seconds of quantising `m` rows of width `k`."""
        bound_s = _MOVED_BYTES * m * k / self._rates.memory_bandwidth_bytes_per_s
        if self._residuals is None:
            return Estimate(bound_s, *_DATASHEET_INTERVAL, "datasheet", False, bound_s)
        if k not in self._curves:
            self._curves[k] = self._curve(self._residuals, k)
        low, high = self._fitted["interval"]
        inside = self._residuals.inside(max(m, 1.0), k)
        source = self._fitted.get("source", "imported")
        return Estimate(self._curves[k].at(m), low, high, source, inside, bound_s)

    def _curve(self, residuals: Grid, k: int) -> LogCurve:
        rows = refined(residuals.knots[0], _MOST_ROWS)
        logs = np.log(formed_s(self._fitted, rows, k)) + residuals.at(rows, k)
        return LogCurve.of(rows, np.maximum.accumulate(logs))


def formed_s(parameters: Mapping[str, Any], m: ArrayLike, k: ArrayLike) -> FloatArray:
    """Return the seconds of the physical form."""
    elements = np.asarray(m, dtype=np.float64) * np.asarray(k, dtype=np.float64)
    seconds: FloatArray = parameters["t0_s"] + elements / parameters["quantised_per_s"]
    return seconds
