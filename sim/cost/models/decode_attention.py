"""Seconds of decode attention over batch and context, from the measured kernels of a profile.

Measured batches are uniform: every sequence has the same context. A shape that was measured is
read from its own grid; another one takes the residuals of its neighbours over the physical form.
What a grid of thread blocks sees is sequences times KV heads, so a neighbour with other KV heads is
read at the batch that gives as many.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from tonnage.sim.cost.estimate import Estimate, Source
from tonnage.sim.cost.models.attention import (
    AttentionForm,
    AttentionShape,
    Content,
    Rates,
    datasheet_form,
    decode_work,
    monotone_surface,
)
from tonnage.sim.cost.models.attention_table import Grids, MeasuredGrid, form_key, intervals_of
from tonnage.sim.cost.models.neighbours import Regime, StandIns, stand_ins
from tonnage.sim.domain import FloatArray

if TYPE_CHECKING:
    import pandas as pd

_MOST_BATCH = 4096.0
_MOST_CONTEXT = 2.0**21
_BATCHES: FloatArray = np.exp2(np.arange(0.0, 13.0))
_CONTEXTS: FloatArray = np.exp2(np.arange(1.0, 22.0))


@dataclass(frozen=True, slots=True, eq=False)
class DecodeCurve:
    """Seconds of one layer `[knots]` at one batch; between knots they are linear in the context.

    `measured_tokens`: up to there the measured grid reaches at this batch. `content`: module rows
    hold projections, norms, rope and the KV write too. `framework`: who ran the kernel.
    """

    context_tokens: FloatArray
    seconds: FloatArray
    roofline_s: FloatArray
    measured_tokens: float
    inside_interval: tuple[float, float]
    outside_interval: tuple[float, float]
    source: Source
    content: Content
    framework: str

    def seconds_at(self, context_tokens: FloatArray) -> FloatArray:
        """Return the seconds at some contexts, and nothing else: this is asked at every step."""
        return np.interp(context_tokens, self.context_tokens, self.seconds)

    def at(self, context_tokens: ArrayLike) -> Estimate:
        """Return the estimate at one or several contexts."""
        context = np.asarray(context_tokens, dtype=np.float64)
        inside = bool(np.all(context <= self.measured_tokens))
        low, high = self.inside_interval if inside else self.outside_interval
        seconds = self.seconds_at(context)
        roofline = np.interp(context, self.context_tokens, self.roofline_s)
        return Estimate(seconds, low, high, self.source, inside, roofline)


@dataclass(frozen=True, slots=True, eq=False)
class _Surface:
    """Seconds of one shape `[batches, contexts]`, rising along both, and what it rests on."""

    batches: FloatArray
    contexts: FloatArray
    seconds: FloatArray
    reach: FloatArray  # [batches]: largest measured context; 0 where nothing was
    regime: Regime | None
    content: Content
    framework: str


class DecodeAttentionModel:
    """Predict decode attention from the table `attention_decode` and the fitted forms.

    `fitted` is the header's entry for the operator: ``forms`` by family, ``intervals`` by kind, KV
    format and regime. Without any row of a kind the datasheet's roofline answers, and says so.
    """

    def __init__(self, table: pd.DataFrame, fitted: Mapping[str, Any], rates: Rates) -> None:
        self._grids = Grids(table, "context_tokens")
        self._forms = {
            key: AttentionForm.from_json(form) for key, form in fitted.get("forms", {}).items()
        }
        self._intervals = fitted.get("intervals", {})
        self._source: Source = fitted.get("source", "imported")
        self._roofline = datasheet_form(rates)
        self._surface = lru_cache(maxsize=512)(self._make_surface)
        self.curve = lru_cache(maxsize=16384)(self._make_curve)

    def content(self, shape: AttentionShape) -> Content:
        """Return what the rows behind a shape cover: the kernel alone, or the whole module."""
        return self._surface(shape).content

    def regime(self, shape: AttentionShape) -> str:
        """Return how near the measured shapes are, `datasheet` where there is none."""
        return self._surface(shape).regime or "datasheet"

    def seconds(self, shape: AttentionShape, batch: float, context_tokens: ArrayLike) -> Estimate:
        """Return the estimate of one layer for `batch` sequences of each of the contexts."""
        return self.curve(shape, batch).at(context_tokens)

    def _make_curve(self, shape: AttentionShape, batch: float) -> DecodeCurve:
        """Return the curve over contexts at one batch, which may be a mean and thus a fraction."""
        surface = self._surface(shape)
        index, share = _between(surface.batches, batch)
        low, high = surface.seconds[index], surface.seconds[index + 1]
        seconds = low + share * (high - low)
        if batch > surface.batches[-1]:
            seconds = seconds * (batch / surface.batches[-1])
        reach = min(surface.reach[index], surface.reach[index + 1 if share > 0 else index])
        source, inside, outside = self._provenance(shape, surface.regime)
        roofline = self._roofline.seconds(decode_work(shape, batch, surface.contexts))
        return DecodeCurve(
            surface.contexts,
            seconds,
            roofline,
            float(reach),
            inside,
            outside,
            source,
            surface.content,
            surface.framework,
        )

    def _provenance(
        self, shape: AttentionShape, regime: Regime | None
    ) -> tuple[Source, tuple[float, float], tuple[float, float]]:
        if regime is None:
            unknown = intervals_of({}, shape, "outside")
            return "datasheet", unknown, unknown
        outside_regime = "scaled" if regime == "scaled" else "outside"
        source: Source = "scaled" if regime == "scaled" else self._source
        inside = intervals_of(self._intervals, shape, regime)
        return source, inside, intervals_of(self._intervals, shape, outside_regime)

    # --- surfaces -------------------------------------------------------------------------------

    def _make_surface(self, shape: AttentionShape) -> _Surface:
        found = stand_ins(
            shape, self._grids.kernels, lambda one: one.group, lambda one: one.kv_heads
        )
        if found is None:
            form = self._roofline.seconds(decode_work(shape, _BATCHES[:, None], _CONTEXTS))
            return _Surface(
                _BATCHES, _CONTEXTS, form, np.zeros(len(_BATCHES)), None, "kernel", "datasheet"
            )
        if found.regime == "measured":
            return self._measured_surface(shape, self._grids[shape])
        return self._blended_surface(shape, found)

    def _measured_surface(self, shape: AttentionShape, grid: MeasuredGrid) -> _Surface:
        batches = _continued(grid.batches, _MOST_BATCH)
        contexts = _continued(grid.tokens, _MOST_CONTEXT)
        known = np.full((len(batches), len(contexts)), np.nan)
        known[: len(grid.batches), : len(grid.tokens)] = monotone_surface(grid.seconds)
        seconds = self._continued_seconds(shape, grid, batches, contexts)
        # What was not measured never pulls at what was: it only may not lie below it.
        seconds = np.where(np.isnan(known), seconds, known)
        rising = np.maximum.accumulate(np.maximum.accumulate(seconds, axis=0), axis=1)
        reach = np.zeros(len(batches))
        reach[: len(grid.batches)] = grid.reach
        return _Surface(batches, contexts, rising, reach, "measured", grid.content, grid.framework)

    def _blended_surface(self, shape: AttentionShape, found: StandIns) -> _Surface:
        grids = [self._grids[one] for one, _ in found.shapes]
        contexts = _continued(np.unique(np.concatenate([g.tokens for g in grids])), _MOST_CONTEXT)
        logs = np.zeros((len(_BATCHES), len(contexts)))
        reach = np.full(len(_BATCHES), np.inf)
        for (one, weight), grid in zip(found.shapes, grids, strict=True):
            scaled = _BATCHES * (shape.kv_heads / one.kv_heads)
            logs += weight * np.log(self._continued_seconds(one, grid, scaled, contexts, shape))
            reach = np.minimum(reach, np.interp(scaled, grid.batches, grid.reach, right=0.0))
        framework = "+".join(sorted({grid.framework for grid in grids}))
        seconds = monotone_surface(np.exp(logs))
        content = grids[0].content
        return _Surface(_BATCHES, contexts, seconds, reach, found.regime, content, framework)

    def _continued_seconds(
        self,
        measured: AttentionShape,
        grid: MeasuredGrid,
        batches: FloatArray,
        contexts: FloatArray,
        shape: AttentionShape | None = None,
    ) -> FloatArray:
        """Return form times residual `[batches, contexts]` for `shape`, or for the measured one.

        `batches` count the measured shape's sequences; those of `shape` have as many streams.
        """
        form = self._forms.get(form_key(measured), self._roofline)
        wanted = shape or measured
        sequences = batches * (measured.kv_heads / wanted.kv_heads)
        limit = wanted.window_tokens if measured.window_tokens is None else None
        residual = grid.residuals(form, decode_work).at(
            batches[:, None], contexts if limit is None else np.minimum(contexts, limit)
        )
        seconds = form.seconds(decode_work(wanted, sequences[:, None], contexts))
        return np.asarray(seconds * np.exp(residual))


def _continued(knots: FloatArray, most: float) -> FloatArray:
    """Return the knots, going on by doublings up to `most`."""
    further: list[float] = []
    while knots[-1] * 2.0 ** len(further) < most:
        further.append(knots[-1] * 2.0 ** (len(further) + 1))
    return np.concatenate([knots, further])


def _between(knots: FloatArray, value: float) -> tuple[int, float]:
    """Return the knot below a value and the share of the way to the next, clamped to the knots."""
    index = int(np.clip(np.searchsorted(knots, value, side="right") - 1, 0, len(knots) - 2))
    share = (value - knots[index]) / (knots[index + 1] - knots[index])
    return index, float(np.clip(share, 0.0, 1.0))
