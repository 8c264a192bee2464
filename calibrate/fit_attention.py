"""Attention of one GPU and engine: which rows stand for it, thinned, fitted, and how far off.

Tables `attention_decode`, `attention_prefill`, `linear_attention` and `mla_bmm`; whose rows they
are says calibrate/imports/attention.py. Forms are fitted to the thinned rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pandas as pd

from tonnage.calibrate import attention_folds as folds
from tonnage.calibrate.attention_errors import intervals, judged, summarised
from tonnage.calibrate.attention_forms import dense_rates, fit_forms, fit_sparse_forms
from tonnage.calibrate.fit_mla_bmm import bmm_errors
from tonnage.calibrate.held_out import rounded
from tonnage.calibrate.imports import attention, linear_attention, sparse_attention
from tonnage.calibrate.imports.attention_rows import DECODE_COLUMNS, PREFILL_COLUMNS, joined
from tonnage.calibrate.imports.wheel import GPU_FOLDERS
from tonnage.scenarios.catalogue import load_gpu
from tonnage.sim.cost.models.attention import DSA_KINDS, decode_work
from tonnage.sim.cost.models.linear_attention import linear_work
from tonnage.sim.cost.models.prefill_attention import prefill_work
from tonnage.sim.domain import GpuSpec

_POWERS = tuple(2**power for power in range(21))
BATCH_KNOTS = tuple(batch for batch in _POWERS if batch <= 512)
# The shortest context of each source stands for an empty one: 1 (modules) or 2 (kernels).
CONTEXT_KNOTS = (1, 2, *(tokens for tokens in _POWERS if tokens >= 128), 1_048_575)
PREFILL_BATCH_KNOTS = (1, 4, 16, 64)
NEW_KNOTS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
NEW_KNOTS_OF_BATCHES = (16, 64, 256, 1024, 4096)
PAST_KNOTS = (0, 1, 256, 2048, 8192, 32768, 131072)
LINEAR_BATCH_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
BMM_TOKEN_KNOTS = tuple(tokens for tokens in _POWERS if tokens <= 16384)

_INTEGERS = ("heads", "kv_heads", "head_dim", "batch", "new_tokens", "past_tokens")


@dataclass(frozen=True, slots=True)
class AttentionFit:
    """Tables for a profile, its `fitted`, and a row of errors per format and regime."""

    tables: dict[str, pd.DataFrame]
    fitted: dict[str, Any]
    errors: pd.DataFrame


def tables(gpu: str, engine: str) -> dict[str, pd.DataFrame]:
    """Return the thinned tables of a GPU folder (`h200_sxm`) and an engine."""
    return fit(gpu, engine).tables


def fitted(gpu: str, engine: str) -> dict[str, Any]:
    """Return forms and intervals by operator, as the models read them: JSON values."""
    return fit(gpu, engine).fitted


def held_out_errors(gpu: str, engine: str) -> pd.DataFrame:
    """Return the errors of what was held out: relative, `low` and `high` true / predicted."""
    return fit(gpu, engine).errors


@lru_cache(maxsize=1)
def fit(gpu: str, engine: str) -> AttentionFit:
    """Fit a GPU folder under an engine; the last result is kept."""
    rates = datasheet(gpu)
    parts = [
        fit_decode(gpu, engine, rates),
        fit_prefill(gpu, engine, rates),
        fit_linear(gpu, engine, rates),
        fit_bmm(gpu, engine, rates),
    ]
    errors = pd.concat([part.errors for part in parts], ignore_index=True)
    return AttentionFit(
        {name: table for part in parts for name, table in part.tables.items()},
        {name: values for part in parts for name, values in part.fitted.items()},
        errors.assign(gpu=gpu, engine=engine),
    )


def datasheet(gpu: str) -> GpuSpec:
    """Return the shipped GPU of a folder of the package."""
    return load_gpu(next(name for name, folder in GPU_FOLDERS.items() if folder == gpu))


# --- one operator -------------------------------------------------------------------------------


def fit_decode(gpu: str, engine: str, rates: GpuSpec) -> AttentionFit:
    """Fit decode attention: GQA, MLA and sparse modules."""
    parts = [attention.decode_rows(gpu, engine), sparse_attention.decode_rows(gpu)]
    rows = joined(parts, DECODE_COLUMNS)
    rows = rows[rows["batch"] <= BATCH_KNOTS[-1]]
    on_knots = rows["batch"].isin(BATCH_KNOTS) & rows["context_tokens"].isin(CONTEXT_KNOTS)
    table = as_shipped(rows[on_knots])
    forms = fit_forms(table, decode_work, "context_tokens")
    trainer = partial(folds.decode_trainer, rates=rates, start=forms)
    lines = judged(folds.decode_folds(table, rows), trainer)
    values = {"forms": forms, "intervals": intervals(lines)}
    return _operator("attention_decode", table, values, lines)


def fit_prefill(gpu: str, engine: str, rates: GpuSpec) -> AttentionFit:
    """Fit prefill attention: GQA, MLA and sparse modules."""
    parts = [attention.prefill_rows(gpu, engine), sparse_attention.prefill_rows(gpu)]
    rows = joined(parts, PREFILL_COLUMNS)
    table = as_shipped(rows[_is_prefill_knot(rows)])
    is_sparse = table["kind"].isin(DSA_KINDS)
    forms = fit_forms(table[~is_sparse], prefill_work, "new_tokens")
    trainer = partial(folds.prefill_trainer, rates=rates, start=forms)
    lines = judged(folds.prefill_folds(table, rows), trainer)
    values = {
        "forms": forms,
        "sparse_forms": fit_sparse_forms(table),
        "dense_flops_per_s": dense_rates(rows[rows["kind"].isin(DSA_KINDS)]),
        "intervals": intervals(lines),
    }
    return _operator("attention_prefill", table, values, lines)


def _is_prefill_knot(rows: pd.DataFrame) -> pd.Series[bool]:
    is_sparse = rows["kind"].isin(DSA_KINDS)
    one, new = rows["batch"] == 1, rows["new_tokens"]
    on_batches = rows["batch"].isin(PREFILL_BATCH_KNOTS) & new.isin(NEW_KNOTS_OF_BATCHES)
    plain = ~is_sparse & (rows["past_tokens"] == 0) & (one & new.isin(NEW_KNOTS) | on_batches)
    behind = rows["past_tokens"].isin(PAST_KNOTS) & ~sparse_attention.is_dense(rows)
    # Of several sequences a few calls: the form learns from them what their pasts cost.
    several = rows["batch"].isin(PREFILL_BATCH_KNOTS) & new.isin(NEW_KNOTS_OF_BATCHES)
    return plain | is_sparse & behind & (one & new.isin(NEW_KNOTS) | several)


def fit_linear(gpu: str, engine: str, rates: GpuSpec) -> AttentionFit:
    """Fit linear attention."""
    rows = linear_attention.rows_of(gpu, engine)
    if rows.empty:
        return AttentionFit({}, {}, pd.DataFrame())
    on_knots = rows["batch"].isin(LINEAR_BATCH_KNOTS) & rows["new_tokens"].isin(_POWERS[::2])
    table = as_shipped(rows[on_knots])
    forms = fit_forms(table, linear_work, "new_tokens")
    trainer = partial(folds.linear_trainer, rates=rates, start=forms)
    lines = judged(folds.linear_folds(table, rows), trainer)
    values = {"forms": forms, "intervals": intervals(lines)}
    return _operator("linear_attention", table, values, lines)


def fit_bmm(gpu: str, engine: str, rates: GpuSpec) -> AttentionFit:
    """Fit the two products around MLA decode: a table of residuals over the roofline."""
    rows = linear_attention.bmm_of(gpu, engine)
    if rows.empty:
        return AttentionFit({}, {}, pd.DataFrame())
    table = as_shipped(rows[rows["tokens"].isin(BMM_TOKEN_KNOTS)])
    values, errors = bmm_errors(table, rows, rates)
    return AttentionFit({"mla_bmm": table}, {"mla_bmm": values}, errors)


def _operator(
    name: str, table: pd.DataFrame, values: dict[str, Any], lines: pd.DataFrame
) -> AttentionFit:
    return AttentionFit({name: table}, {name: values}, summarised(lines, name))


def as_shipped(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows as a profile keeps them: four digits, small integers, one order."""
    table = rows.sort_values([name for name in rows.columns if name != "seconds"]).reset_index(
        drop=True
    )
    for name in (*_INTEGERS, "context_tokens", "tokens"):
        if name in table.columns:
            table[name] = table[name].astype(np.int32)
    table["seconds"] = rounded(table["seconds"])
    return table
