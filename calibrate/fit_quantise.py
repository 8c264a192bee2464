"""Quantising activations to FP8 on one GPU: the rows that stand for every engine, thinned, fitted.

vLLM's `static_scaled_fp8_quant` stands for all engines: SGLang's and TensorRT-LLM's tables time
torch operators that no engine runs there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from tonnage.calibrate.held_out import rounded, summary
from tonnage.calibrate.imports.gemm import quantise_rows
from tonnage.sim.cost.models.grid import Grid, grid_from_columns, monotone
from tonnage.sim.cost.models.quantise import formed_s
from tonnage.sim.domain import FloatArray

M_KNOTS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 32768)
WIDTH_KNOTS = (32, 128, 512, 1024, 2048, 4096, 7168, 16384, 65536)
_ROWS_FROM = "vllm"


@dataclass(frozen=True, slots=True)
class QuantiseFit:
    """A profile's `quantise` table, its `fitted["quantise"]` and the errors of held-out widths."""

    table: pd.DataFrame
    fitted: dict[str, Any]
    errors: pd.DataFrame


def fit_quantise(gpu: str) -> QuantiseFit:
    """Fit a GPU folder (`h200_sxm`); everything is empty where it has no rows."""
    rows = quantise_rows(gpu, _ROWS_FROM)
    rows = rows[rows["op"] == "quantise"].sort_values(["k", "m"], ignore_index=True)
    if rows.empty:
        return QuantiseFit(rows, {}, pd.DataFrame())
    rows = rows.assign(seconds=_repaired_seconds(rows))
    knots = rows[rows["m"].isin(M_KNOTS) & rows["k"].isin(WIDTH_KNOTS)]
    knots = knots.assign(seconds=rounded(knots["seconds"])).reset_index(drop=True)
    form = fit_form(knots)
    held = rows[~rows["k"].isin(WIDTH_KNOTS)]
    formed = formed_s(form, held["m"], held["k"])
    predicted = np.log(formed) + _grid(knots, form).at(held["m"], held["k"])
    figures = summary(
        "interpolation", "widths k between the knots", np.log(held["seconds"]) - predicted
    )
    fitted = {"source": "imported", **form, "interval": [figures["low"], figures["high"]]}
    return QuantiseFit(
        knots, fitted, pd.DataFrame([figures]).assign(operator="quantise", format="fp8")
    )


def fit_form(rows: pd.DataFrame) -> dict[str, float]:
    """Return launch seconds and activations per second, from the smallest and the largest rows."""
    elements = (rows["m"] * rows["k"]).to_numpy()
    seconds = rows["seconds"].to_numpy()
    t0_s = float(np.median(seconds[elements <= np.quantile(elements, 0.25)]))
    is_large = elements >= np.quantile(elements, 0.9)
    per_s = float(np.median(elements[is_large] / (seconds[is_large] - t0_s)))
    return {"t0_s": float(f"{t0_s:.4g}"), "quantised_per_s": float(f"{per_s:.4g}")}


def _grid(rows: pd.DataFrame, form: dict[str, float]) -> Grid:
    columns = {name: rows[name].to_numpy() for name in ("m", "k")}
    residuals = np.log(rows["seconds"].to_numpy() / formed_s(form, **columns))
    return grid_from_columns(columns, ("m", "k"), residuals)


def _repaired_seconds(rows: pd.DataFrame) -> FloatArray:
    parts = [part["seconds"].to_numpy() for _, part in rows.groupby("k")]
    return np.concatenate([np.exp(monotone(np.log(part))) for part in parts])
