"""Fit the physical forms of the attention models to normalised rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pandas as pd

from tonnage.calibrate.held_out import LEAST_POWER
from tonnage.calibrate.imports.sparse_attention import is_dense
from tonnage.sim.cost.models.attention import (
    DSA_KINDS,
    AttentionForm,
    AttentionShape,
    Work,
    smooth_max,
)
from tonnage.sim.cost.models.attention_table import Columns, form_key, shapes_of
from tonnage.sim.cost.models.sparse_attention import SparsePrefillForm, dense_flops
from tonnage.sim.domain import FloatArray

WorkOf = Callable[..., Work]
Forms = dict[str, dict[str, float]]

_SHARPNESS = (1.5, 3.0, 8.0)
# launch, per head, per stream, per token, bytes/s, FLOP/s, index bytes/s: start, least, most.
_START = (1e-5, 1e-9, 1e-8, 1e-9, 2e12, 3e14, 2e12)
_LEAST = (1e-7, 1e-13, 1e-13, 1e-15, 1e10, 1e12, 1e10)
_MOST = (1e-3, 1e-4, 1e-5, 1e-4, 4e13, 1e17, 4e13)
_IS_RATE = np.array([0, 0, 0, 0, 1, 1, 1])
_OUTLIER = 0.1  # relative residuals beyond this count less (soft L1)
_MOST_ROWS, _QUICK_ROWS = 4000, 600
_LARGE_CALL_TOKENS = 8192
_OFF_BOUND = 1e-3  # of a log: a start on a bound would stay there


def fit_forms(
    table: pd.DataFrame,
    work_of: WorkOf,
    tokens: str,
    start: Forms | None = None,
    slower: float = 1.0,
) -> Forms:
    """Return the fitted form of every family of shapes in a table, by `form_key`.

    `start`: forms to start from, whose sharpness is kept; with them fewer rows are enough.
    `slower`: than a GPU the device is (`held_out.slowdown`).
    """
    families: defaultdict[str, list[tuple[AttentionShape, Columns]]] = defaultdict(list)
    for shape, rows in shapes_of(table):
        families[form_key(shape)].append((shape, rows))
    found = {}
    for key, members in families.items():
        first = None if start is None else start.get(key)
        most_rows = _MOST_ROWS if first is None else _QUICK_ROWS
        features, seconds = _features(members, work_of, tokens, most_rows)
        usual = tuple(np.array(_START) / slower**_IS_RATE)
        starts = [usual] * len(_SHARPNESS) if first is None else [tuple(first.values())[:-1]]
        sharpnesses = _SHARPNESS if first is None else (first["sharpness"],)
        pairs = zip(starts, sharpnesses, strict=True)
        least = np.log(_LEAST) - LEAST_POWER * np.log(slower) * _IS_RATE
        fits = [_fit(features, seconds, one, sharpness, least) for one, sharpness in pairs]
        found[key] = min(fits, key=lambda fit: fit[0])[1].to_json()
    return found


def _fit(
    features: FloatArray,
    seconds: FloatArray,
    start: Sequence[float],
    sharpness: float,
    least: FloatArray,
) -> tuple[float, AttentionForm]:
    """Return the cost (soft L1 of residuals in logs) and the form of the least."""
    from scipy.optimize import least_squares

    most = np.log(_MOST)
    fit = least_squares(
        lambda logs: np.log(_form_seconds(np.exp(logs), features, sharpness) / seconds),
        np.clip(np.log(start), least + _OFF_BOUND, most - _OFF_BOUND),
        loss="soft_l1",
        f_scale=_OUTLIER,
        bounds=(least, most),
        ftol=1e-5,
    )
    names = AttentionForm.__slots__[:-1]
    values = {name: _rounded(one) for name, one in zip(names, np.exp(fit.x), strict=True)}
    return float(fit.cost), AttentionForm(**values, sharpness=sharpness)


def _features(
    members: Iterable[tuple[AttentionShape, Columns]],
    work_of: WorkOf,
    tokens: str,
    most_rows: int,
) -> tuple[FloatArray, FloatArray]:
    features, seconds = [], []
    for shape, rows in members:
        work = work_of(shape, rows["batch"], rows[tokens])
        columns = (work.heads, work.streams, work.tokens, work.read_bytes, work.flops)
        one = np.broadcast_arrays(*columns, work.index_bytes, np.zeros(len(rows["seconds"])))
        features.append(np.stack(one[:6]))
        seconds.append(rows["seconds"])
    every = max(1, sum(map(len, seconds)) // most_rows)
    return np.concatenate(features, axis=1)[:, ::every], np.concatenate(seconds)[::every]


def _form_seconds(values: FloatArray, work: FloatArray, sharpness: float) -> FloatArray:
    fixed = values[0] + values[1] * work[0] + values[2] * work[1] + values[3] * work[2]
    both = smooth_max(work[3] / values[4], work[4] / values[5], sharpness)
    return np.asarray(fixed + work[5] / values[6] + both)


def fit_sparse_forms(table: pd.DataFrame) -> dict[str, dict[str, float]]:
    """Return the form of the sparse path of every family of modules (non-negative, relative)."""
    families: defaultdict[str, list[tuple[AttentionShape, Columns]]] = defaultdict(list)
    for shape, rows in shapes_of(table[table["kind"].isin(DSA_KINDS)]):
        families[form_key(shape)].append((shape, rows))
    return {key: _fit_sparse(members).to_json() for key, members in families.items()}


def _fit_sparse(members: Iterable[tuple[AttentionShape, Columns]]) -> SparsePrefillForm:
    from scipy.optimize import nnls

    features, seconds = [], []
    for shape, rows in members:
        tokens = rows["batch"] * rows["new_tokens"]
        past = rows["past_tokens"]
        is_indexed = float(shape.kind == "dsa_full")
        pairs = is_indexed * tokens * (past + rows["new_tokens"] / 2.0)
        held = is_indexed * (tokens + rows["batch"] * past)
        fixed = (np.ones(len(tokens)), tokens, tokens * shape.heads)
        features.append(np.stack([*fixed, pairs, held]))
        seconds.append(rows["seconds"])
    times = np.concatenate(seconds)
    matrix = (np.concatenate(features, axis=1) / times).T
    scale = matrix.max(axis=0)
    scale[scale == 0] = 1.0
    solution = nnls(matrix / scale, np.ones(len(times)))[0] / scale
    return SparsePrefillForm(*(_rounded(one) for one in solution))


def dense_rates(rows: pd.DataFrame) -> dict[str, float]:
    """Return the FLOP/s of the dense path's largest calls, by projection format.

    `rows`: unthinned; those that the host bounds are gone already.
    """
    large = rows[
        is_dense(rows)
        & (rows["past_tokens"] == 0)
        & (rows["batch"] * rows["new_tokens"] >= _LARGE_CALL_TOKENS)
    ]
    found: defaultdict[str, list[FloatArray]] = defaultdict(list)
    for shape, part in shapes_of(large):
        tokens = part["batch"] * part["new_tokens"]
        flops = dense_flops(shape, tokens, tokens * part["new_tokens"] / 2.0)
        found[shape.projection_format].append(flops / part["seconds"])
    return {name: _rounded(float(np.median(np.concatenate(one)))) for name, one in found.items()}


def _rounded(value: float) -> float:
    """Return four significant digits: what a fit is good for, and the same text everywhere."""
    return float(f"{value:.4g}")
