"""Seconds of linear attention (gated delta net, KDA): the kernel and its short convolution.

A sequence's state is read and written once per step whatever its context, so decode depends on the
batch alone; a prompt is worked off in chunks, one after the other within a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from tonnage.sim.cost.estimate import Estimate, Source
from tonnage.sim.cost.models.attention import (
    AttentionForm,
    AttentionShape,
    Rates,
    Work,
    datasheet_form,
    monotone_surface,
)
from tonnage.sim.cost.models.attention_table import Grids, form_key, intervals_of
from tonnage.sim.cost.models.grid import Grid
from tonnage.sim.cost.models.neighbours import Regime, stand_ins
from tonnage.sim.domain import FloatArray

if TYPE_CHECKING:
    import pandas as pd

LINEAR_HEAD_DIM = 128  # keys and values, as Qwen3.5 and Kimi Linear have them
_STATE_BYTES = 4  # FP32
_FLOPS_PER_STATE_ELEMENT = 6.0  # decay, delta, read-out: a multiply and an add each
_BATCHES: FloatArray = np.exp2(np.arange(0.0, 13.0))
_TOKENS: FloatArray = np.exp2(np.arange(0.0, 19.0))


def linear_shape(kind: str, heads: int, phase: str) -> AttentionShape:
    """Return the shape of one rank's layer; `phase` is decode or prefill, `heads` value heads."""
    return AttentionShape(f"{kind}_{phase}", "bf16", heads, heads, LINEAR_HEAD_DIM)


def linear_work(shape: AttentionShape, batch: ArrayLike, new_tokens: ArrayLike) -> Work:
    """Return the work of `batch` sequences of so many new tokens: states moved, FLOP."""
    sequences = np.asarray(batch, dtype=np.float64)
    new = np.asarray(new_tokens, dtype=np.float64)
    states = sequences * shape.heads
    elements = states * shape.head_dim * shape.head_dim
    rows = states * new
    moved = 2.0 * elements * _STATE_BYTES + 4.0 * rows * shape.head_dim * 2.0
    flops = _FLOPS_PER_STATE_ELEMENT * elements * new
    # Chunks of one sequence follow each other: its length is a cost of its own.
    return Work(shape.heads, new, rows, moved, flops, np.zeros(1))


class LinearAttentionModel:
    """Predict linear attention from the table `linear_attention`, the roofline without rows."""

    def __init__(self, table: pd.DataFrame, fitted: Mapping[str, Any], rates: Rates) -> None:
        self._grids = Grids(table, "new_tokens")
        self._forms = {
            key: AttentionForm.from_json(form) for key, form in fitted.get("forms", {}).items()
        }
        self._intervals = fitted.get("intervals", {})
        self._roofline = datasheet_form(rates)
        self._surface = lru_cache(maxsize=128)(self._make_surface)

    def decode(self, kind: str, heads: int, batch: ArrayLike) -> Estimate:
        """Return the estimate of one layer and one token for each of `batch` sequences."""
        return self.of_shape(linear_shape(kind, heads, "decode"), batch, 1.0)

    def prefill(
        self, kind: str, heads: int, new_tokens: ArrayLike, batch: ArrayLike = 1.0
    ) -> Estimate:
        """Return the estimate of one layer for `batch` prompts of so many tokens."""
        return self.of_shape(linear_shape(kind, heads, "prefill"), batch, new_tokens)

    def regime(self, shape: AttentionShape) -> str:
        """Return how near the measured shapes are, `datasheet` where there is none."""
        return self._surface(shape)[2] or "datasheet"

    def of_shape(self, shape: AttentionShape, batch: ArrayLike, new_tokens: ArrayLike) -> Estimate:
        """Return the estimate of one layer for `batch` sequences of so many new tokens."""
        sequences = np.asarray(batch, dtype=np.float64)
        new = np.asarray(new_tokens, dtype=np.float64)
        surface, inside, regime = self._surface(shape)
        seconds = np.exp(surface.at(np.maximum(sequences, 1.0), new))
        is_inside = inside is not None and inside.inside(sequences, new)
        wanted: Regime = regime if regime and is_inside else "outside"
        intervals = {} if regime is None else self._intervals
        low, high = intervals_of(intervals, shape, "scaled" if regime == "scaled" else wanted)
        source: Source = "scaled" if regime == "scaled" else "imported" if regime else "datasheet"
        roofline = self._roofline.seconds(linear_work(shape, sequences, new))
        return Estimate(seconds, low, high, source, is_inside, roofline)

    def _make_surface(self, shape: AttentionShape) -> tuple[Grid, Grid | None, Regime | None]:
        """Return log seconds over (batch, tokens), the grid that was measured, and the regime."""
        found = stand_ins(shape, self._grids.kernels, lambda one: one.heads, lambda one: one.heads)
        batches, tokens = _BATCHES, _TOKENS
        work = linear_work(shape, batches[:, None], tokens)
        if found is None:
            logs = np.log(self._roofline.seconds(work))
            return Grid((batches, tokens), logs), None, None
        total: FloatArray = np.zeros((len(batches), len(tokens)))
        for one, weight in found.shapes:
            grid = self._grids[one]
            form = self._forms.get(form_key(one), self._roofline)
            residual = grid.residuals(form, linear_work).at(batches[:, None], tokens)
            total += weight * (np.log(form.seconds(work)) + residual)
        first = self._grids[found.shapes[0][0]].residuals(self._roofline, linear_work)
        rising = np.log(monotone_surface(np.exp(total)))
        return Grid((batches, tokens), rising), first, found.regime
