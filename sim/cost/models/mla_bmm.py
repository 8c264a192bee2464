"""Seconds of the two batched products around absorbed MLA decode: into the latent and out of it.

``q_nope x W_UK`` before the attention kernel and ``latent x W_UV`` after it, for the heads of one
rank. Prefill in the decompressed form has a dense product instead (kv_b_proj).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from tonnage.sim.cost.estimate import Estimate, OperatorCurve, Source
from tonnage.sim.cost.models.attention import LATENT_DIM, Rates
from tonnage.sim.cost.models.grid import Grid, monotone
from tonnage.sim.domain import FloatArray

if TYPE_CHECKING:
    import pandas as pd

_HEAD_DIM = 128  # nope and value width of DeepSeek-V3 and Kimi-K2
_UNKNOWN_INTERVAL = (0.5, 2.0)


class MlaBmmModel:
    """Predict the pair of products from the table `mla_bmm`: format, heads, tokens, seconds."""

    def __init__(self, table: pd.DataFrame, fitted: Mapping[str, Any], rates: Rates) -> None:
        self._rates = rates
        self._source: Source = fitted.get("source", "imported")
        self._launch_s = float(fitted.get("launch_s", 0.0))
        self._interval = tuple(fitted.get("interval", _UNKNOWN_INTERVAL))
        self._outside = tuple(fitted.get("outside_interval", _UNKNOWN_INTERVAL))
        self._grids = {
            str(name): self._residuals(str(name), rows) for name, rows in table.groupby("format")
        }

    def seconds(self, heads: int, tokens: ArrayLike, weight_format: str = "bf16") -> Estimate:
        """Return both products together, for so many rows of the heads of one rank."""
        rows = np.asarray(tokens, dtype=np.float64)
        roofline = self._roofline_s(weight_format, np.float64(heads), rows)
        known = weight_format if weight_format in self._grids else next(iter(self._grids), None)
        if known is None:
            return Estimate(roofline, *_UNKNOWN_INTERVAL, "datasheet", False, roofline)
        grid = self._grids[known]
        seconds = (self._launch_s + roofline) * np.exp(grid.at(heads, np.maximum(rows, 1.0)))
        is_inside = grid.inside(heads, rows)
        low, high = self._interval if is_inside else self._outside
        source = self._source if known == weight_format else "scaled"
        return Estimate(seconds, float(low), float(high), source, is_inside, roofline)

    def curve(self, heads: int, weight_format: str) -> OperatorCurve:
        """Return both products of one rank's heads over rows."""
        return _Curve(self, heads, weight_format)

    def _residuals(self, weight_format: str, rows: pd.DataFrame) -> Grid:
        heads, row_of = np.unique(rows["heads"].to_numpy(np.float64), return_inverse=True)
        tokens, column_of = np.unique(rows["tokens"].to_numpy(np.float64), return_inverse=True)
        logs = np.full((len(heads), len(tokens)), np.nan)
        logs[row_of, column_of] = np.log(rows["seconds"].to_numpy(np.float64))
        roofline = self._roofline_s(weight_format, heads[:, None], tokens)
        return Grid((heads, tokens), monotone(logs, axis=1) - np.log(self._launch_s + roofline))

    def _roofline_s(
        self, weight_format: str, heads: FloatArray | np.float64, tokens: FloatArray
    ) -> FloatArray:
        element_bytes = 2.0 if weight_format == "bf16" else 1.0
        weights = 2.0 * heads * _HEAD_DIM * LATENT_DIM
        moved = weights * element_bytes + 2.0 * heads * tokens * (_HEAD_DIM + LATENT_DIM) * 2.0
        peak = self._rates.dense_flops_per_s["bf16"]
        return np.asarray(
            np.maximum(
                moved / self._rates.memory_bandwidth_bytes_per_s, 2.0 * tokens * weights / peak
            )
        )


@dataclass(frozen=True, slots=True)
class _Curve:
    """Both products of so many heads; asked for few numbers of rows, those of captured passes."""

    model: MlaBmmModel
    heads: int
    weight_format: str

    def at(self, rows: float) -> float:
        return float(self.estimate(rows).seconds)

    def estimate(self, rows: float) -> Estimate:
        return self.model.seconds(self.heads, rows, self.weight_format)
