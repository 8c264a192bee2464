"""Seconds of a dense matrix product, from measured rows by number format.

A product of activations `[m, k]` with weights `[n, k]` is predicted by a physical form times a
table of residuals over (m, n, k), read in logs; `calibrate/fit_gemm.py` makes both. Along m the
prediction never falls. A format without rows is scaled from one that has them, by the bytes of
its weights and the rate of its arithmetic; without any, the datasheet's roofline answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from tonnage.sim.cost.estimate import Estimate, OperatorCurve, Source
from tonnage.sim.cost.models.grid import Grid, LogCurve, grid_from_columns, refined
from tonnage.sim.domain import FloatArray, GpuSpec
from tonnage.sim.model.formats import compute_format, number_format

_ACTIVATION_BYTES = 2  # BF16 in and out
_MOST_ROWS = 2**21  # curves end here; beyond, the last slope carries on
# The formats whose rows stand in for a precision that has none, the nearest first.
_STAND_INS = {
    "fp4": ("nvfp4", "fp8_block", "fp8", "bf16"),
    "fp8": ("fp8", "fp8_block", "bf16"),
    "int8": ("int8", "fp8", "bf16"),
}
_SAME_KERNELS = {"fp16": "bf16", "fp8_channel": "fp8"}
# Nothing was measured: small products are far above their roofline.
_DATASHEET_INTERVAL = (1.0, 4.0)

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class GemmForm:
    """``t0 + ((bytes / B)^p + (FLOP / P)^p)^(1/p) + m k / q``; p near 4 is almost a maximum.

    `weight_bytes_per_s`: the rate of the weights where it differs from that of the activations
    (formats decoded on the way); `quantised_per_s` is q, the activations quantised per second.
    """

    t0_s: float
    bytes_per_s: float
    flops_per_s: float
    sharpness: float
    quantised_per_s: float | None = None
    weight_bytes_per_s: float | None = None

    def seconds(
        self, weight_bytes: ArrayLike, m: ArrayLike, n: ArrayLike, k: ArrayLike
    ) -> FloatArray:
        """Return the seconds of products; the arguments broadcast against each other."""
        rows, width, depth = (np.asarray(value, dtype=np.float64) for value in (m, n, k))
        moved_s = _ACTIVATION_BYTES * rows * (width + depth) / self.bytes_per_s
        moved_s = moved_s + np.asarray(weight_bytes) / (self.weight_bytes_per_s or self.bytes_per_s)
        multiplied_s = 2.0 * rows * width * depth / self.flops_per_s
        power = self.sharpness
        seconds: FloatArray = self.t0_s + (moved_s**power + multiplied_s**power) ** (1.0 / power)
        if self.quantised_per_s is not None:
            seconds = seconds + rows * depth / self.quantised_per_s
        return seconds


@dataclass(frozen=True, slots=True)
class GemmTable:
    """The form of one number format and the log residuals `[m, n, k]` of its measured rows."""

    number_format: str
    form: GemmForm
    residuals: Grid

    @property
    def most_rows(self) -> float:
        """Largest m that was measured."""
        return float(self.residuals.knots[0][-1])

    def curve(self, n: int, k: int) -> tuple[FloatArray, FloatArray]:
        """Return values of m and the log seconds there, never falling, for weights `[n, k]`.

        Beyond the measured rows and shapes the edge's residual holds, which is its efficiency.
        """
        rows = refined(self.residuals.knots[0], _MOST_ROWS)
        weight_bytes = number_format(self.number_format).matrix_bytes(n, k)
        logs = np.log(self.form.seconds(weight_bytes, rows, n, k)) + self.residuals.at(rows, n, k)
        return rows, np.maximum.accumulate(logs)


def gemm_table(name: str, columns: Mapping[str, ArrayLike], form: GemmForm) -> GemmTable:
    """Return the table of one format from its rows: columns m, n, k and seconds."""
    m, n, k = (np.asarray(columns[axis], dtype=np.float64) for axis in "mnk")
    shapes, which = np.unique(np.stack([n, k]), axis=1, return_inverse=True)
    matrix_bytes = number_format(name).matrix_bytes
    weight_bytes = np.array([matrix_bytes(int(wide), int(deep)) for wide, deep in shapes.T])
    formed = form.seconds(weight_bytes[which.ravel()], m, n, k)
    residuals = np.log(np.asarray(columns["seconds"], dtype=np.float64) / formed)
    return GemmTable(name, form, grid_from_columns(columns, ("m", "n", "k"), residuals))


@dataclass(frozen=True, slots=True)
class _Curve:
    """What one weight matrix takes at any m: log seconds at rising rows, and their provenance."""

    seconds: LogCurve
    most_rows: float
    inside_interval: Interval
    outside_interval: Interval
    source: Source
    is_shape_inside: bool
    roofline: tuple[float, float, float]  # seconds of the weights, of a row's bytes, of its FLOP

    def at(self, m: float) -> float:
        return self.seconds.at(m)

    def estimate(self, m: float) -> Estimate:
        inside = self.is_shape_inside and m <= self.most_rows
        low, high = self.inside_interval if inside else self.outside_interval
        weights_s, row_s, row_flop_s = self.roofline
        roofline_s = max(weights_s + m * row_s, m * row_flop_s)
        return Estimate(self.seconds.at(m), low, high, self.source, inside, roofline_s)

    def estimates(self, m: FloatArray) -> Estimate:
        inside = self.is_shape_inside and bool((m <= self.most_rows).all())
        low, high = self.inside_interval if inside else self.outside_interval
        weights_s, row_s, row_flop_s = self.roofline
        roofline_s = np.maximum(weights_s + m * row_s, m * row_flop_s)
        return Estimate(self.seconds.at_each(m), low, high, self.source, inside, roofline_s)


@dataclass(frozen=True, slots=True)
class _Bound:
    """The datasheet's roofline of one weight matrix, of whose format nothing was measured."""

    roofline: tuple[float, float, float]

    def at(self, m: float) -> float:
        weights_s, row_s, row_flop_s = self.roofline
        return max(weights_s + m * row_s, m * row_flop_s)

    def estimate(self, m: float) -> Estimate:
        bound_s = self.at(m)
        return Estimate(bound_s, *_DATASHEET_INTERVAL, "datasheet", False, bound_s)

    def estimates(self, m: FloatArray) -> Estimate:
        weights_s, row_s, row_flop_s = self.roofline
        bound_s = np.maximum(weights_s + m * row_s, m * row_flop_s)
        return Estimate(bound_s, *_DATASHEET_INTERVAL, "datasheet", False, bound_s)


class GemmModel:
    """Predict dense products of one rank; a weight matrix's curve is kept, so asking is cheap.

    `source` is that of the profile's rows, the intervals are factors on the seconds: by format
    within and beyond its grid, and of what is scaled from another format.
    """

    def __init__(
        self, tables: Mapping[str, GemmTable], fitted: Mapping[str, Any], rates: GpuSpec
    ) -> None:
        self._tables = dict(tables)
        self._fitted = fitted
        self._rates = rates
        self._curves: dict[tuple[str, int, int], _Curve | _Bound] = {}

    @classmethod
    def from_tables(
        cls,
        tables: Mapping[str, Any],
        fitted: Mapping[str, Any],
        rates: GpuSpec,
    ) -> GemmModel:
        """Build from a profile's tables (`gemm`), its header's `fitted`, and the GPU's datasheet.

        A profile without either predicts every product from the datasheet.
        """
        parameters = {**fitted.get("gemm", {}), "quantise": fitted.get("quantise")}
        rows = tables.get("gemm")
        found = {}
        if rows is not None:
            formats = np.asarray(rows["format"], dtype=str)
            columns = {name: np.asarray(rows[name]) for name in ("m", "n", "k", "seconds")}
            for name, of_format in parameters.get("formats", {}).items():
                own = {column: values[formats == name] for column, values in columns.items()}
                found[name] = gemm_table(name, own, GemmForm(**of_format["form"]))
        return cls(found, parameters, rates)

    def seconds(self, weight_format: str, m: float | FloatArray, n: int, k: int) -> Estimate:
        """Return the seconds of `m` rows times weights `[n, k]`; m is a number or an array.

        Fewer rows than one cost as much as one: the kernel is launched all the same.
        """
        curve = self._curve(weight_format, n, k)
        return curve.estimates(m) if isinstance(m, np.ndarray) else curve.estimate(m)

    def curve(self, weight_format: str, n: int, k: int) -> OperatorCurve:
        """Return weights `[n, k]` over rows, of which there is at least one; made once."""
        return self._curve(weight_format, n, k)

    def _curve(self, weight_format: str, n: int, k: int) -> _Curve | _Bound:
        key = (weight_format, n, k)
        if key not in self._curves:
            own = self._tables.get(weight_format)
            table = own or self._scaled_table(weight_format)
            self._curves[key] = (
                _Bound(self._roofline(weight_format, n, k))
                if table is None
                else self._new_curve(table, n, k, is_scaled=own is None)
            )
        return self._curves[key]

    def _new_curve(self, table: GemmTable, n: int, k: int, *, is_scaled: bool) -> _Curve:
        name = table.number_format
        stand_in = _SAME_KERNELS.get(name, name)
        if is_scaled and stand_in not in self._tables:
            is_decoded = table.form.weight_bytes_per_s is not None
            name_of_interval = "decoded_interval" if is_decoded else "scaled_interval"
            inside = outside = self._fitted.get(name_of_interval, _DATASHEET_INTERVAL)
        else:
            intervals = self._fitted["formats"][stand_in]
            inside, outside = intervals["interval"], intervals["outside_interval"]
        rows, logs = table.curve(n, k)
        return _Curve(
            seconds=LogCurve.of(rows, logs),
            most_rows=table.most_rows,
            inside_interval=(inside[0], inside[1]),
            outside_interval=(outside[0], outside[1]),
            source="scaled" if is_scaled else self._fitted.get("source", "imported"),
            is_shape_inside=table.residuals.inside(1.0, n, k),
            roofline=self._roofline(name, n, k),
        )

    def _scaled_table(self, name: str) -> GemmTable | None:
        """Return a format's table with the residuals of the nearest format that has rows.

        The form keeps the reference's launch, bandwidth and efficiency; bytes are those of the
        format, FLOP are scaled by the datasheet's rates of the two precisions. Weights that are
        decoded to BF16 on the way stream at `decoded_bytes_per_s`, what INT4 experts reach; where
        the reference's activations are not quantised, a kernel that quantises them is added.
        """
        precision = compute_format(name, self._rates.dense_flops_per_s)
        candidates = _STAND_INS.get(precision, ("bf16",))
        reference = next((one for one in candidates if one in self._tables), None)
        if reference is None:
            return None
        table, rates = self._tables[reference], self._rates.dense_flops_per_s
        faster = rates[precision] / rates[compute_format(reference, rates)]
        form = replace(table.form, flops_per_s=table.form.flops_per_s * faster)
        quantise = self._fitted.get("quantise")
        if precision == "bf16" and number_format(name).bits < 16:
            form = replace(form, weight_bytes_per_s=self._fitted.get("decoded_bytes_per_s"))
        elif precision in _STAND_INS and reference == "bf16" and quantise:
            t0_s = form.t0_s + quantise["t0_s"]
            form = replace(form, t0_s=t0_s, quantised_per_s=quantise["quantised_per_s"])
        return GemmTable(name, form, table.residuals)

    def _roofline(self, name: str, n: int, k: int) -> tuple[float, float, float]:
        """Return the datasheet's seconds of the weights, of a row's bytes and of its FLOP."""
        rates = self._rates
        flops_per_s = rates.dense_flops_per_s[compute_format(name, rates.dense_flops_per_s)]
        bytes_per_s = rates.memory_bandwidth_bytes_per_s
        weights_s = number_format(name).matrix_bytes(n, k) / bytes_per_s
        return weights_s, _ACTIVATION_BYTES * (n + k) / bytes_per_s, 2.0 * n * k / flops_per_s
