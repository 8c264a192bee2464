"""Held-out errors of the products around MLA decode: whole head counts left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from tonnage.calibrate.held_out import summary
from tonnage.sim.cost.models.attention import Rates
from tonnage.sim.cost.models.mla_bmm import MlaBmmModel
from tonnage.sim.domain import FloatArray


def bmm_errors(
    table: pd.DataFrame, rows: pd.DataFrame, rates: Rates
) -> tuple[dict[str, Any], pd.DataFrame]:
    """Return `fitted` (the intervals) and a row of errors per format and regime."""
    launch_s = float(table["seconds"].min())
    figures, found = [], {"interpolation": [], "extrapolation": []}  # type: ignore[var-annotated]
    for name, thinned in table.groupby("format"):
        of_format = rows[rows["format"] == name]
        heads = sorted(set(thinned["heads"]))
        for regime, held in (("interpolation", heads[1:-1]), ("extrapolation", heads[::7])):
            errors = np.concatenate(
                [_log_errors(thinned, of_format, value, rates, launch_s) for value in held]
            )
            found[regime].append(errors)
            line = summary(regime, "whole head counts", errors)
            figures.append({"operator": "mla_bmm", "format": str(name), **line})
    values: dict[str, Any] = {
        key: [
            float(f"{one:.4g}") for one in np.exp(np.quantile(np.concatenate(errors), [0.05, 0.95]))
        ]
        for key, errors in (
            ("interval", found["interpolation"]),
            ("outside_interval", found["extrapolation"]),
        )
    }
    values["launch_s"] = launch_s
    return values, pd.DataFrame(figures)


def _log_errors(
    thinned: pd.DataFrame, rows: pd.DataFrame, heads: int, rates: Rates, launch_s: float
) -> FloatArray:
    model = MlaBmmModel(thinned[thinned["heads"] != heads], {"launch_s": launch_s}, rates)
    test = rows[rows["heads"] == heads]
    name = str(test["format"].iloc[0])
    predicted = model.seconds(heads, test["tokens"].to_numpy(float), name).seconds
    return np.asarray(np.log(test["seconds"].to_numpy(float) / predicted))
