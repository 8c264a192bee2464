"""Seconds of prefill attention over new and past tokens, from the measured kernels of a profile.

Measured are prompts without a cached past. A chunk behind a past is read where as many query-key
pairs were measured, per sequence; it never takes less than reading the KV of its whole context.
Sparse layers are a module of their own (sparse_attention.py).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from tonnage.sim.cost.estimate import Estimate, Source
from tonnage.sim.cost.models.attention import (
    DSA_KINDS,
    AttentionForm,
    AttentionShape,
    Content,
    Rates,
    Work,
    datasheet_form,
    flops_per_pair,
    kv_bytes_per_token,
    monotone_surface,
)
from tonnage.sim.cost.models.attention_table import Grids, MeasuredGrid, form_key, intervals_of
from tonnage.sim.cost.models.grid import LogCurve
from tonnage.sim.cost.models.neighbours import Regime, StandIns, stand_ins
from tonnage.sim.cost.models.sparse_attention import SparseCall, SparsePrefill
from tonnage.sim.domain import FloatArray

if TYPE_CHECKING:
    import pandas as pd

_ACTIVATION_BYTES = 2
_MOST_TOKENS = 2.0**21
_MOST_BATCH = 1024.0
_BATCHES: FloatArray = np.exp2(np.arange(0.0, 11.0))
Chunks = tuple[tuple[int, int], ...]  # (new, past) tokens

_STEPS_PER_KNOT = 4  # between two knots the form bends; so many points follow it


def pairs_per_sequence(
    new_tokens: ArrayLike, past_tokens: ArrayLike, limit: int | None
) -> FloatArray:
    """Return the query-key pairs of one chunk, each query seeing at most `limit` keys."""
    new = np.asarray(new_tokens, dtype=np.float64)
    past = np.asarray(past_tokens, dtype=np.float64)
    if limit is None:
        return np.asarray(new * past + new * (new + 1) / 2)
    growing = np.clip(limit - past, 0.0, new)  # queries that see fewer keys than the limit
    return np.asarray(growing * past + growing * (growing + 1) / 2 + (new - growing) * limit)


def tokens_of_pairs(pairs: ArrayLike, limit: int | None) -> FloatArray:
    """Return how many tokens without a past have so many pairs: `pairs_per_sequence` inverted."""
    count = np.asarray(pairs, dtype=np.float64)
    tokens = (np.sqrt(1.0 + 8.0 * count) - 1.0) / 2.0
    if limit is None:
        return np.asarray(tokens)
    full = limit * (limit + 1) / 2.0
    return np.asarray(np.where(count <= full, tokens, limit + (count - full) / limit))


def prefill_work(
    shape: AttentionShape, batch: ArrayLike, new_tokens: ArrayLike, past_tokens: ArrayLike = 0.0
) -> Work:
    """Return the work of `batch` equal chunks: KV read, queries and results moved, FLOP."""
    sequences = np.asarray(batch, dtype=np.float64)
    new = np.asarray(new_tokens, dtype=np.float64)
    past = np.asarray(past_tokens, dtype=np.float64)
    limit = shape.limit_tokens
    held = new + past if limit is None else new + np.minimum(past, limit)
    rows = sequences * new * shape.heads
    moved = 2.0 * rows * shape.head_dim * _ACTIVATION_BYTES
    pairs = sequences * pairs_per_sequence(new, past, limit)
    return Work(
        shape.heads,
        sequences,
        rows,
        sequences * held * kv_bytes_per_token(shape) + moved,
        pairs * flops_per_pair(shape, prefill=True),
        np.zeros(1),
    )


def equal_chunk(chunks: Chunks, limit: int | None) -> tuple[float, float]:
    """Return (new, past) tokens of equal chunks that have as many pairs as unequal ones.

    Behind the mean past, ``new past + new (new + 1) / 2`` is the mean of the pairs; with a limit
    they are taken without a past. Plain numbers, as it is asked of every prefill step.
    """
    number = len(chunks)
    if limit is not None:
        new, past = np.asarray(chunks, dtype=np.float64).T
        return float(tokens_of_pairs(pairs_per_sequence(new, past, limit).mean(), limit)), 0.0
    if number == 1:
        return float(chunks[0][0]), float(chunks[0][1])
    pairs = sum(new * past + new * (new + 1) / 2 for new, past in chunks) / number
    mean_past = sum(past for _, past in chunks) / number
    half = mean_past + 0.5
    return sqrt(half * half + 2.0 * pairs) - half, mean_past


@dataclass(frozen=True, slots=True, eq=False)
class _Surface:
    """Seconds of one shape `[batches, tokens]` without a past, rising along both."""

    batches: FloatArray
    tokens: FloatArray
    seconds: FloatArray
    reach: FloatArray  # [batches]: most tokens that were measured
    form: AttentionForm
    regime: Regime | None
    content: Content


class PrefillAttentionModel:
    """Predict prefill attention from the table `attention_prefill` and the fitted forms."""

    def __init__(self, table: pd.DataFrame, fitted: Mapping[str, Any], rates: Rates) -> None:
        is_sparse = table["kind"].isin(DSA_KINDS)
        dense = table[~is_sparse & (table["past_tokens"] == 0)]
        self._grids = Grids(dense, "new_tokens")
        self._sparse = SparsePrefill(table[is_sparse], fitted)
        self._forms = {
            key: AttentionForm.from_json(form) for key, form in fitted.get("forms", {}).items()
        }
        self._intervals = fitted.get("intervals", {})
        self._source: Source = fitted.get("source", "imported")
        self._roofline = datasheet_form(rates)
        self._surface = lru_cache(maxsize=512)(self._make_surface)
        self._curves = lru_cache(maxsize=512)(self._make_curves)

    def content(self, shape: AttentionShape) -> Content:
        """Return what the rows behind a shape cover: the kernel alone, or the whole module."""
        return "module" if self._is_sparse(shape) else self._surface(shape).content

    def regime(self, shape: AttentionShape) -> str:
        """Return how near the measured shapes are, `datasheet` where there is none."""
        found = (
            self._sparse.regime(shape) if self._is_sparse(shape) else self._surface(shape).regime
        )
        return found or "datasheet"

    def seconds(
        self,
        shape: AttentionShape,
        new_tokens: ArrayLike,
        past_tokens: ArrayLike = 0.0,
        batch: float = 1.0,
    ) -> Estimate:
        """Return the estimate of one layer for `batch` equal chunks in one call.

        `new_tokens` and `past_tokens` are per sequence, and arrays of several calls if wished.
        """
        new = np.asarray(new_tokens, dtype=np.float64)
        past = np.asarray(past_tokens, dtype=np.float64)
        if self._is_sparse(shape):
            call = SparseCall.equal(batch, new, past)
            return self._sparse_estimate(shape, call, prefill_work(shape, batch, new, past))
        surface = self._surface(shape)
        limit = shape.limit_tokens
        tokens = tokens_of_pairs(pairs_per_sequence(new, past, limit), limit)
        seconds = np.maximum(
            _read(surface, batch, tokens), self._reading_s(shape, surface.form, batch, new + past)
        )
        is_measured = surface.regime is not None and bool(
            np.all(past == 0) and np.all(new <= np.interp(batch, surface.batches, surface.reach))
        )
        low, high, source = self._provenance(shape, surface.regime, is_measured)
        roofline = self._roofline.seconds(prefill_work(shape, batch, new, past))
        return Estimate(seconds, low, high, source, is_measured, roofline)

    def chunks(self, shape: AttentionShape, chunks: Chunks) -> Estimate:
        """Return the estimate of one call over chunks of (new, past) tokens.

        Unequal chunks are taken as equal ones with as many pairs in all.
        """
        if self._is_sparse(shape):
            new, past = np.asarray(chunks, dtype=np.float64).T
            work = prefill_work(shape, len(chunks), new.mean(), past.mean())
            return self._sparse_estimate(shape, SparseCall.of(new, past), work)
        equal_new, equal_past = equal_chunk(chunks, shape.limit_tokens)
        return self.seconds(shape, equal_new, equal_past, len(chunks))

    def chunks_s(self, shape: AttentionShape, chunks: Chunks) -> float:
        """Return the seconds of `chunks`, and nothing else: this is asked at every step."""
        if self._is_sparse(shape):
            new, past = np.asarray(chunks, dtype=np.float64).T
            found = self._sparse.seconds(shape, SparseCall.of(new, past))[0]
            return float(np.asarray(found).ravel()[0])
        new_tokens, past_tokens = equal_chunk(chunks, shape.limit_tokens)
        return self._curves(shape).seconds(len(chunks), new_tokens, past_tokens)

    def _make_curves(self, shape: AttentionShape) -> _Curves:
        surface = self._surface(shape)
        limit, form = shape.limit_tokens, surface.form
        return _Curves(
            surface.batches.tolist(),
            [LogCurve.of(surface.tokens, np.log(seconds)) for seconds in surface.seconds],
            limit,
            form.launch_s,
            0.0 if limit is not None else kv_bytes_per_token(shape) / form.bytes_per_s,
        )

    # --- sparse modules -------------------------------------------------------------------------

    def _is_sparse(self, shape: AttentionShape) -> bool:
        return shape.kind in DSA_KINDS and self._sparse.has(shape)

    def _sparse_estimate(self, shape: AttentionShape, call: SparseCall, work: Work) -> Estimate:
        seconds, is_inside, regime = self._sparse.seconds(shape, call)
        low, high, source = self._provenance(shape, regime, is_inside)
        return Estimate(seconds, low, high, source, is_inside, self._roofline.seconds(work))

    # --- dense attention ------------------------------------------------------------------------

    def _reading_s(
        self, shape: AttentionShape, form: AttentionForm, batch: float, held: FloatArray
    ) -> FloatArray:
        """Return the time of one read of the KV of all that is held."""
        limit = shape.limit_tokens
        if limit is not None:
            return np.full_like(held, form.launch_s)
        return form.launch_s + batch * held * kv_bytes_per_token(shape) / form.bytes_per_s

    def _provenance(
        self, shape: AttentionShape, regime: Regime | None, is_measured: bool
    ) -> tuple[float, float, Source]:
        if regime is None:
            return (*intervals_of({}, shape, "outside"), "datasheet")
        if regime == "scaled":
            return (*intervals_of(self._intervals, shape, "scaled"), "scaled")
        factors = intervals_of(self._intervals, shape, regime if is_measured else "outside")
        return (*factors, self._source)

    # --- surfaces -------------------------------------------------------------------------------

    def _make_surface(self, shape: AttentionShape) -> _Surface:
        found = stand_ins(
            shape, self._grids.kernels, lambda one: one.heads, lambda one: one.kv_heads
        )
        if found is None:
            tokens: FloatArray = np.exp2(np.arange(0.0, 22.0, 1.0 / _STEPS_PER_KNOT))
            seconds = self._roofline.seconds(prefill_work(shape, _BATCHES[:, None], tokens))
            reach = np.zeros(len(_BATCHES))
            return _Surface(_BATCHES, tokens, seconds, reach, self._roofline, None, "kernel")
        return self._from_stand_ins(shape, found)

    def _from_stand_ins(self, shape: AttentionShape, found: StandIns) -> _Surface:
        grids = [self._grids[one] for one, _ in found.shapes]
        tokens = _refined(np.unique(np.concatenate([grid.tokens for grid in grids])))
        logs = np.zeros((len(_BATCHES), len(tokens)))
        reach = np.full(len(_BATCHES), np.inf)
        for (one, weight), grid in zip(found.shapes, grids, strict=True):
            logs += weight * np.log(self._seconds_by(one, grid, shape, tokens))
            reach = np.minimum(reach, np.interp(_BATCHES, grid.batches, grid.reach, right=0.0))
        form = self._form(found.shapes[0][0])
        seconds = monotone_surface(np.exp(logs))
        return _Surface(_BATCHES, tokens, seconds, reach, form, found.regime, grids[0].content)

    def _form(self, measured: AttentionShape) -> AttentionForm:
        return self._forms.get(form_key(measured), self._roofline)

    def _seconds_by(
        self,
        measured: AttentionShape,
        grid: MeasuredGrid,
        shape: AttentionShape,
        tokens: FloatArray,
    ) -> FloatArray:
        """Return form times the residual of a measured shape `[batches, tokens]`."""
        form = self._form(measured)
        residual = grid.residuals(form, prefill_work).at(_BATCHES[:, None], tokens)
        work = prefill_work(shape, _BATCHES[:, None], tokens)
        return np.asarray(form.seconds(work) * np.exp(residual))


@dataclass(frozen=True, slots=True, eq=False)
class _Curves:
    """A surface as curves, one per batch, for one call at a time."""

    batches: list[float]
    by_batch: list[LogCurve]
    limit: int | None
    launch_s: float
    token_read_s: float

    def seconds(self, batch: int, new_tokens: float, past_tokens: float) -> float:
        """Return what `PrefillAttentionModel.seconds` does."""
        tokens = new_tokens
        if past_tokens and self.limit is None:
            pairs = new_tokens * past_tokens + new_tokens * (new_tokens + 1.0) / 2.0
            tokens = (sqrt(1.0 + 8.0 * pairs) - 1.0) / 2.0
        elif past_tokens:
            pairs_seen = pairs_per_sequence(new_tokens, past_tokens, self.limit)
            tokens = float(tokens_of_pairs(pairs_seen, self.limit))
        knots = self.batches
        index = min(max(bisect_right(knots, batch) - 1, 0), len(knots) - 2)
        share = min(max((batch - knots[index]) / (knots[index + 1] - knots[index]), 0.0), 1.0)
        seconds = self.by_batch[index].at(tokens)
        if share:
            seconds += share * (self.by_batch[index + 1].at(tokens) - seconds)
        seconds *= max(1.0, batch / knots[-1])
        reading_s = self.launch_s + batch * (new_tokens + past_tokens) * self.token_read_s
        return max(seconds, reading_s)


def _refined(knots: FloatArray) -> FloatArray:
    """Return the knots with points between them, going on by doublings."""
    ends = list(knots)
    while ends[-1] < _MOST_TOKENS:
        ends.append(ends[-1] * 2.0)
    logs = np.log2(ends)
    fine = np.interp(
        np.arange(0, len(logs) - 1 + 1e-9, 1.0 / _STEPS_PER_KNOT), np.arange(len(logs)), logs
    )
    return np.asarray(2.0**fine)


def _read(surface: _Surface, batch: float, tokens: FloatArray) -> FloatArray:
    """Return the seconds at one batch: linear in the batch, log-linear in the tokens."""
    knots = surface.batches
    index = int(np.clip(np.searchsorted(knots, batch, side="right") - 1, 0, len(knots) - 2))
    share = float(np.clip((batch - knots[index]) / (knots[index + 1] - knots[index]), 0.0, 1.0))
    where, logs = np.log(np.maximum(tokens, surface.tokens[0])), np.log(surface.tokens)
    low = np.exp(np.interp(where, logs, np.log(surface.seconds[index])))
    high = np.exp(np.interp(where, logs, np.log(surface.seconds[index + 1])))
    seconds = low + share * (high - low)
    return np.asarray(seconds * max(1.0, batch / knots[-1]))
