"""Seconds of a sparse-attention (DSA) module in prefill, from the measured modules of a profile.

The time is that of the whole module: projections, norms, indexer, top-k and attention. Two
regimes: sequences of more than 2048 tokens, past ones included, go through the indexer and the
sparse kernel, which takes the same time for each token whatever is selected; shorter ones through
dense attention (SGLang's `dense_mha`), whose measured rows the host bounds at all but the largest
calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tonnage.sim.cost.models.attention import (
    LATENT_DIM,
    ROPE_DIM,
    SPARSE_TOP_K,
    AttentionShape,
    monotone_surface,
)
from tonnage.sim.cost.models.attention_table import Columns, form_key, shapes_of
from tonnage.sim.cost.models.grid import Grid
from tonnage.sim.cost.models.neighbours import Regime, StandIns, stand_ins
from tonnage.sim.domain import FloatArray

if TYPE_CHECKING:
    import pandas as pd

_PAST_SHIFT = 64.0  # a past of no tokens has its place on the log axis
_INDEX_DIM = 128
_STEPS_PER_KNOT = 4
_MOST_TOKENS = 2.0**18
_MOST_PAST = 2.0**21


@dataclass(frozen=True, slots=True)
class ModuleGeometry:
    """Sizes of a sparse module that its rows do not name."""

    q_lora_rank: int
    nope_dim: int
    value_dim: int
    index_heads: int


# By hidden size; config.json of GLM-5 and GLM-5.2, and of DeepSeek-V3.2.
GEOMETRIES = {
    6144: ModuleGeometry(2048, 192, 256, 32),
    7168: ModuleGeometry(1536, 128, 128, 64),
}


def geometry_of(hidden_size: int | None) -> ModuleGeometry:
    """Return the sizes of the model whose hidden size is nearest."""
    known = min(GEOMETRIES, key=lambda one: abs(one - (hidden_size or 6144)))
    return GEOMETRIES[known]


def projection_flops(shape: AttentionShape) -> float:
    """Return the FLOP of all projections of one rank per token, without the indexer's queries."""
    sizes = geometry_of(shape.hidden_size)
    hidden = shape.hidden_size or 6144
    weights = hidden * (sizes.q_lora_rank + LATENT_DIM + ROPE_DIM)
    weights += shape.heads * sizes.q_lora_rank * (sizes.nope_dim + ROPE_DIM)
    weights += shape.heads * LATENT_DIM * (sizes.nope_dim + sizes.value_dim)
    return 2.0 * (weights + shape.heads * sizes.value_dim * hidden)


@dataclass(frozen=True, slots=True)
class SparsePrefillForm:
    """``launch + tokens (token + head_token h) + pairs index_pair + held index_held``.

    `tokens` are all new ones of a call, `pairs` ``tokens (past + tokens / 2)``, `held` what its
    sequences hold: the indexer first copies its keys of all of them together.
    """

    launch_s: float
    token_s: float
    head_token_s: float
    index_pair_s: float
    index_held_s: float

    def seconds(
        self, shape: AttentionShape, tokens: ArrayLike, past_tokens: ArrayLike
    ) -> FloatArray:
        """Return the seconds of one chunk each."""
        new = np.asarray(tokens, dtype=np.float64)
        past = np.asarray(past_tokens, dtype=np.float64)
        per_token = self.token_s + self.head_token_s * shape.heads
        indexing = new * (past + new / 2.0) * self.index_pair_s + (new + past) * self.index_held_s
        is_indexed = 1.0 if shape.kind == "dsa_full" else 0.0
        return np.asarray(self.launch_s + new * per_token + is_indexed * indexing)

    def correction_s(
        self, shape: AttentionShape, more_pairs: FloatArray, more_held: FloatArray
    ) -> FloatArray:
        """Return what a call takes beyond one of a single sequence, or less if negative."""
        is_indexed = 1.0 if shape.kind == "dsa_full" else 0.0
        indexing = more_pairs * self.index_pair_s + more_held * self.index_held_s
        return np.asarray(is_indexed * indexing)

    def to_json(self) -> dict[str, float]:
        """Return the parameters as a profile's header keeps them."""
        return asdict(self)


def dense_flops(shape: AttentionShape, tokens: ArrayLike, pairs: ArrayLike) -> FloatArray:
    """Return the FLOP of the dense path: projections and multi-head attention, no indexer."""
    sizes = geometry_of(shape.hidden_size)
    width = sizes.nope_dim + ROPE_DIM + sizes.value_dim
    projecting = np.asarray(tokens, dtype=np.float64) * projection_flops(shape)
    return np.asarray(projecting + np.asarray(pairs) * 2.0 * shape.heads * width)


@dataclass(frozen=True, slots=True, eq=False)
class SparseCall:
    """One call over several sequences, or several calls: sums over the sequences of each.

    `tokens` new ones; `pairs` ``new (past + new / 2)``; `held` new and past; `is_dense`: no
    sequence holds more than 2048 tokens.
    """

    tokens: FloatArray
    pairs: FloatArray
    held: FloatArray
    is_dense: NDArray[np.bool_]

    @classmethod
    def equal(cls, batch: float, new_tokens: FloatArray, past_tokens: FloatArray) -> SparseCall:
        """Return calls over `batch` equal chunks each."""
        held = new_tokens + past_tokens
        pairs = new_tokens * (past_tokens + new_tokens / 2.0)
        return cls(batch * new_tokens, batch * pairs, batch * held, held <= SPARSE_TOP_K)

    @classmethod
    def of(cls, new_tokens: FloatArray, past_tokens: FloatArray) -> SparseCall:
        """Return one call over these chunks; one long sequence sends all the sparse way."""
        held = new_tokens + past_tokens
        pairs = new_tokens * (past_tokens + new_tokens / 2.0)
        tokens, pairs_of_all, held_of_all = (
            np.asarray(one.sum()) for one in (new_tokens, pairs, held)
        )
        return cls(tokens, pairs_of_all, held_of_all, np.asarray(np.all(held <= SPARSE_TOP_K)))


@dataclass(frozen=True, slots=True, eq=False)
class _Surface:
    """Log seconds over (tokens, past) of the sparse path, and how far it was measured."""

    logs: Grid
    most_tokens: float
    least_tokens: float
    most_past: float
    regime: Regime


class SparsePrefill:
    """Predict the prefill of sparse modules from the rows of `attention_prefill` of their kinds."""

    def __init__(self, table: pd.DataFrame, fitted: Mapping[str, Any]) -> None:
        self._forms = {
            key: SparsePrefillForm(**form) for key, form in fitted.get("sparse_forms", {}).items()
        }
        self._dense_flops_per_s = dict(fitted.get("dense_flops_per_s", {}))
        rows = ((shape, rows) for shape, rows in shapes_of(table) if form_key(shape) in self._forms)
        self._grids = {shape: _residuals(shape, rows, self._form(shape)) for shape, rows in rows}
        # Of one engine: a shape may have been timed through two kernels, by its past.
        self._kernels = dict.fromkeys(self._grids, "")
        self.surface = lru_cache(maxsize=256)(self._make_surface)

    def has(self, shape: AttentionShape) -> bool:
        """Return whether anything was measured that can stand for the shape."""
        return self.surface(shape) is not None

    def regime(self, shape: AttentionShape) -> Regime | None:
        """Return how near the measured shapes are, None where there is none."""
        surface = self.surface(shape)
        return None if surface is None else surface.regime

    def seconds(self, shape: AttentionShape, call: SparseCall) -> tuple[FloatArray, bool, Regime]:
        """Return seconds of calls, whether all are inside the grid, and the regime."""
        surface = self.surface(shape)
        assert surface is not None, "ask has() first"
        # One sequence of as many tokens and, behind a past, of as many pairs.
        past = np.maximum(call.pairs / call.tokens - call.tokens / 2.0, 0.0)
        single = np.exp(surface.logs.at(np.maximum(call.tokens, 1.0), past))
        more_pairs = call.pairs - call.tokens * (past + call.tokens / 2.0)
        more_held = call.held - call.tokens - past
        sparse = single + self._form(shape).correction_s(shape, more_pairs, more_held)
        seconds = np.where(call.is_dense, self._dense_s(shape, call, sparse), sparse)
        is_inside = not bool(np.any(call.is_dense)) and bool(
            np.all((call.tokens >= surface.least_tokens) & (call.tokens <= surface.most_tokens))
            and np.all(past <= surface.most_past)
        )
        return np.asarray(seconds), is_inside, surface.regime

    def _dense_s(self, shape: AttentionShape, call: SparseCall, sparse_s: FloatArray) -> FloatArray:
        """Return the dense path at the rate of its large calls, never above the sparse one."""
        rates = self._dense_flops_per_s
        rate = rates.get(shape.projection_format) or min(rates.values(), default=np.nan)
        computing = dense_flops(shape, call.tokens, call.pairs) / rate
        return np.fmin(sparse_s, self._form(shape).launch_s + computing)

    def _form(self, shape: AttentionShape) -> SparsePrefillForm:
        found = self._forms.get(form_key(shape))
        return found or next(iter(self._forms.values()))

    def _make_surface(self, shape: AttentionShape) -> _Surface | None:
        found = stand_ins(shape, self._kernels, lambda one: one.heads, lambda one: one.kv_heads)
        return None if found is None else self._from_stand_ins(shape, found)

    def _from_stand_ins(self, shape: AttentionShape, found: StandIns) -> _Surface:
        grids = [self._grids[one] for one, _ in found.shapes]
        tokens = _refined(np.unique(np.concatenate([g.knots[0] for g in grids])), 1.0, _MOST_TOKENS)
        past = _refined(
            np.unique(np.concatenate([g.knots[1] for g in grids])) + _PAST_SHIFT,
            _PAST_SHIFT,
            _MOST_PAST,
        )
        past -= _PAST_SHIFT
        logs = np.zeros((len(tokens), len(past)))
        for (one, weight), grid in zip(found.shapes, grids, strict=True):
            form = np.log(self._form(one).seconds(shape, tokens[:, None], past))
            logs += weight * (form + grid.at(tokens[:, None], past))
        rising = np.log(monotone_surface(np.exp(logs)))
        ends = [(grid.knots[0], grid.knots[1]) for grid in grids]
        return _Surface(
            Grid((tokens, past), rising, (0.0, _PAST_SHIFT)),
            min(float(one[-1]) for one, _ in ends),
            max(float(one[0]) for one, _ in ends),
            min(float(two[-1]) for _, two in ends),
            found.regime,
        )


def _residuals(shape: AttentionShape, rows: Columns, form: SparsePrefillForm) -> Grid:
    """Return log(measured / form) over (tokens, past) of the calls with one sequence."""
    is_one = rows["batch"] == 1
    tokens, row_of = np.unique(rows["new_tokens"][is_one], return_inverse=True)
    past, column_of = np.unique(rows["past_tokens"][is_one], return_inverse=True)
    logs = np.full((len(tokens), len(past)), np.nan)
    expected = form.seconds(shape, tokens[row_of], past[column_of])
    logs[row_of, column_of] = np.log(rows["seconds"][is_one] / expected)
    return Grid((tokens, past), logs, (0.0, _PAST_SHIFT))


def _refined(knots: FloatArray, least: float, most: float) -> FloatArray:
    """Return the knots with points between them, going on by doublings both ways."""
    ends = [float(knot) for knot in knots]
    while ends[0] > least:
        ends.insert(0, max(least, ends[0] / 2.0))
    while ends[-1] < most:
        ends.append(ends[-1] * 2.0)
    places = np.arange(0, len(ends) - 1 + 1e-9, 1.0 / _STEPS_PER_KNOT)
    return np.asarray(np.exp(np.interp(places, np.arange(len(ends)), np.log(ends))))
