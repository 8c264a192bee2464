"""Measured times of routed experts, and what they say of experts that nobody measured.

A table holds the rows of one weight format and one kernel: a curve of log residuals over tokens
(log of measured seconds over the form's) for each shape, layout and routing. Between curves it is
kriged: a Gaussian process over the logs of a rank's sizes, with a trend, passes near the measured
curves and falls back to the form's own efficiency far from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tonnage.sim.cost.models.moe_form import MoeForm, MoeShape
from tonnage.sim.domain import FloatArray

# How near a curve is: measured; between measured shapes (or another layout of one); beyond them.
Nearness = Literal["measured", "inside", "outside"]

SHAPE_COLUMNS = ("hidden", "inter", "experts", "top_k", "tp", "ep")

# Kriging: lengths in doublings of hidden, width, local experts, top_k and ep; a Matern 3/2
# correlation of unit variance, a linear trend and a constant beside it, and the variance of noise.
# Chosen once for all formats, by the error of held-out shapes under balanced routing in 17 tables
# (three engines, H200 and B200).
_LENGTHS = np.array([3.0, 2.0, 2.0, 3.0, 2.0])
_TREND, _CONSTANT, _NOISE = 0.15, 0.6, 0.05

Curve = tuple[MoeShape, str]  # shape and routing


class MoeTable:
    """Curves of one format and kernel at common numbers of tokens."""

    def __init__(
        self,
        weight_format: str,
        kernel: str,
        form: MoeForm,
        knots: FloatArray,
        log_seconds: Mapping[Curve, FloatArray],
        scaled: frozenset[MoeShape] = frozenset(),
    ) -> None:
        """Keep log seconds `[knots]` by curve, NaN where there is no row.

        Shapes in `scaled` come from another table.
        """
        self.weight_format, self.kernel, self.form = weight_format, kernel, form
        self.knots, self.scaled = knots, scaled
        self._log_seconds = dict(log_seconds)
        self._krigings: dict[str, _Kriging] = {}
        self.shapes = frozenset(shape for shape, _ in self._log_seconds)
        self.families = frozenset(shape.family for shape in self.shapes)
        self._spread_families = frozenset(one.family for one in self.shapes if one.ep > 1)
        self._whole_families = frozenset(one.family for one in self.shapes if one.ep == 1)

    def families_at(self, ep: int) -> frozenset[tuple[int, int, int, int]]:
        """Return the experts measured with expert parallelism, or without it where ep is 1."""
        return self._spread_families if ep > 1 else self._whole_families

    def residual(self, shape: MoeShape, routing: str) -> tuple[FloatArray, Nearness]:
        """Return the log residuals `[knots]` of experts, and how near measured ones are."""
        if (shape, routing) in self._log_seconds:
            return self._measured_residual(shape, routing), "measured"
        if routing not in self._krigings:
            shapes = [shape for shape, kind in self._log_seconds if kind == routing]
            curves = [(shape, self._measured_residual(shape, routing)) for shape in shapes]
            self._krigings[routing] = _Kriging(curves, len(self.knots))
        return self._krigings[routing].at(shape), self._nearness(shape)

    def _measured_residual(self, shape: MoeShape, routing: str) -> FloatArray:
        """Return the residuals of a measured curve, those between its rows interpolated."""
        logs = self._log_seconds[shape, routing]
        known = ~np.isnan(logs)
        expert_bytes = shape.expert_bytes(self.weight_format)
        formed = self.form.seconds(shape, expert_bytes, self.knots[known], routing)
        residuals: FloatArray = np.interp(
            np.log(self.knots), np.log(self.knots[known]), logs[known] - np.log(formed)
        )
        return residuals

    def _nearness(self, shape: MoeShape) -> Nearness:
        if shape.family in self.families:
            return "inside"
        sizes = np.array(sorted(self.families))
        wanted = np.array(shape.family)
        within = (sizes.min(axis=0) <= wanted).all() and (wanted <= sizes.max(axis=0)).all()
        return "inside" if within else "outside"

    def log_seconds(
        self,
        shape: MoeShape,
        tokens: FloatArray,
        routing: str,
        form: MoeForm | None = None,
        expert_bytes: float | None = None,
    ) -> tuple[FloatArray, Nearness]:
        """Return log seconds at rising tokens, never falling, and how near measured curves are.

        Beyond the outermost knots their residual holds. `form` and `expert_bytes` replace the
        table's own, for a format that has no table.
        """
        residuals, nearness = self.residual(shape, routing)
        moved = expert_bytes or shape.expert_bytes(self.weight_format)
        formed = (form or self.form).seconds(shape, moved, tokens, routing)
        logs = np.log(formed) + np.interp(np.log(tokens), np.log(self.knots), residuals)
        return np.maximum.accumulate(logs), nearness


class _Kriging:
    """Residuals of unmeasured shapes under one routing."""

    def __init__(self, curves: Sequence[tuple[MoeShape, FloatArray]], knots: int) -> None:
        features = np.array([shape.features for shape, _ in curves]).reshape(-1, len(_LENGTHS))
        self._middle = features.mean(axis=0) if curves else np.zeros(len(_LENGTHS))
        self._features = features - self._middle
        self._weights = np.zeros((len(curves), knots))
        if curves:
            covariance = _covariance(self._features, self._features)
            covariance += _NOISE * np.eye(len(curves))
            self._weights = np.linalg.solve(covariance, np.array([one for _, one in curves]))

    def at(self, shape: MoeShape) -> FloatArray:
        wanted = (shape.features - self._middle)[None, :]
        found: FloatArray = (_covariance(wanted, self._features) @ self._weights)[0]
        return found


def _covariance(rows: FloatArray, columns: FloatArray) -> FloatArray:
    left, right = rows / _LENGTHS, columns / _LENGTHS
    distance = np.sqrt(3.0 * ((left[:, None, :] - right[None, :, :]) ** 2).sum(axis=2))
    matern = (1.0 + distance) * np.exp(-distance)
    total: FloatArray = matern + _TREND * (left @ right.T) + _CONSTANT
    return total


def moe_tables(
    columns: Mapping[str, ArrayLike], weight_format: str, forms: Mapping[str, MoeForm]
) -> Iterator[MoeTable]:
    """Yield a table per kernel of `forms`, in their order, from a profile's rows of one format.

    Columns: format, kernel, routing, source (imported, measured or scaled), `SHAPE_COLUMNS`,
    tokens and seconds; one row per combination.
    """
    is_format = np.asarray(columns["format"]) == weight_format
    for kernel, form in forms.items():
        chosen = np.flatnonzero(is_format & (np.asarray(columns["kernel"]) == kernel))
        if len(chosen):
            yield _table(weight_format, kernel, form, columns, chosen)


def _table(
    weight_format: str,
    kernel: str,
    form: MoeForm,
    columns: Mapping[str, ArrayLike],
    chosen: NDArray[np.intp],
) -> MoeTable:
    sizes = [np.asarray(columns[name])[chosen].astype(np.int64) for name in SHAPE_COLUMNS]
    routings = np.asarray(columns["routing"])[chosen].astype(str)
    tokens = np.asarray(columns["tokens"])[chosen].astype(np.float64)
    knots, at = np.unique(tokens, return_inverse=True)
    # A curve's number: its place on the grid of all sizes and routings that occur.
    places = [np.unique(one, return_inverse=True)[1].ravel() for one in (*sizes, routings)]
    grid = tuple(int(place.max()) + 1 for place in places)
    numbers = np.ravel_multi_index(tuple(places), grid)
    _, first, curve_of = np.unique(numbers, return_index=True, return_inverse=True)
    logs = np.full((len(first), len(knots)), np.nan)
    seconds = np.asarray(columns["seconds"])[chosen].astype(np.float64)
    logs[curve_of.ravel(), at] = np.log(seconds)
    shapes = [MoeShape(*(int(size[row]) for size in sizes)) for row in first]
    curves = {
        (shape, str(routings[row])): log
        for shape, row, log in zip(shapes, first, logs, strict=True)
    }
    is_scaled = np.asarray(columns["source"])[chosen] == "scaled"
    scaled = frozenset(shapes[curve] for curve in np.unique(curve_of.ravel()[is_scaled]))
    return MoeTable(weight_format, kernel, form, knots, curves, scaled)
