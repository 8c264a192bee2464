"""The physical form of routed experts, fitted per weight format and kernel; curves off any form."""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from tonnage.calibrate.held_out import LEAST_POWER
from tonnage.calibrate.moe_rows import CURVE, FAMILY, catalogue_families
from tonnage.sim.cost.models.moe_form import BALANCED, MoeForm, MoeShape
from tonnage.sim.cost.models.moe_table import SHAPE_COLUMNS
from tonnage.sim.domain import FloatArray

# Bounds of t0, bytes/s, FLOP/s, sharpness, row bytes/s and seconds per local expert.
_START = np.log([2e-5, 3e12, 5e14, 3.0, 1e12, 1e-9])
_LOWEST = np.log([1e-6, 2e11, 2e13, 1.0, 5e10, 1e-12])
_HIGHEST = np.log([3e-4, 1.2e13, 1e16, 12.0, 1e14, 5e-7])
_IS_RATE = np.array([0, 1, 1, 0, 1, 0])
_MOST_ROWS = 3000  # of one fit: more do not change six parameters

# TensorRT-LLM's BF16 and FP8 tables on Hopper hold whole curves 3 to 6 times as slow as those of
# the layouts around them, a tenth of all; other tables hold next to none. Tuning must have failed.
_UNTUNED = np.log(2.5)
_FEWEST_LAYOUTS = 5


def fit_forms(rows: pd.DataFrame) -> dict[tuple[str, str], MoeForm]:
    """Return the form of each (format, kernel), fitted to the log seconds of balanced rows.

    Soft-L1, so that kernels which change their tiles pull little. The power laws share it. The
    kernels of a format come in the order in which unmeasured experts are taken to run them: first
    those that ran most experts of catalogue models, then most experts.
    """
    balanced = rows[rows["routing"] == BALANCED]
    forms, orders = {}, {}
    for (name, kernel), part in balanced.groupby(["format", "kernel"]):
        key = (str(name), str(kernel))
        families = set(part[FAMILY].drop_duplicates().itertuples(index=False, name=None))
        forms[key] = fit_form(key[0], part)
        orders[key] = (key[0], -len(families & catalogue_families()), -len(families), key[1])
    return {key: forms[key] for key in sorted(forms, key=orders.__getitem__)}


def fit_form(weight_format: str, rows: pd.DataFrame, slower: float = 1.0) -> MoeForm:
    """Fit one form to balanced rows: columns `SHAPE_COLUMNS`, tokens and seconds.

    `slower`: than a GPU the device is (`held_out.slowdown`).
    """
    if len(rows) > _MOST_ROWS:
        rows = rows.iloc[np.linspace(0, len(rows) - 1, _MOST_ROWS).astype(int)]
    sizes = _sizes(weight_format, rows)
    target = np.log(rows["seconds"].to_numpy())

    def residuals(logs: FloatArray) -> FloatArray:
        form = MoeForm(*(float(value) for value in np.exp(logs)))
        difference: FloatArray = np.log(form.of_sizes(*sizes)) - target
        return difference

    rate = np.log(slower) * _IS_RATE
    bounds = (_LOWEST - LEAST_POWER * rate, _HIGHEST)
    found = least_squares(residuals, _START - rate, bounds=bounds, loss="soft_l1", f_scale=0.1)
    return MoeForm(*(float(f"{value:.6g}") for value in np.exp(found.x)))


def without_untuned(rows: pd.DataFrame) -> pd.DataFrame:
    """Return sorted rows without curves that were measured on an untuned kernel.

    A curve is one if its median residual lies 2.5 times above that of its experts' other layouts.
    """
    if rows.empty:
        return rows
    forms = fit_forms(rows)
    residuals = pd.Series(np.nan, index=rows.index)
    for key, part in rows.groupby(["format", "kernel"]):
        form = forms.get((str(key[0]), str(key[1])))
        if form is not None:
            formed = form.of_sizes(*_sizes(str(key[0]), part))
            residuals[part.index] = np.log(part["seconds"].to_numpy() / formed)
    curves = residuals.groupby([rows[name] for name in CURVE]).median().rename("off").reset_index()
    alike = curves.groupby(["format", "kernel", *FAMILY, "routing"])["off"]
    above = curves["off"] - alike.transform("median")
    is_untuned = (above > _UNTUNED) & (alike.transform("size") >= _FEWEST_LAYOUTS)
    untuned = set(curves.loc[is_untuned, CURVE].itertuples(index=False, name=None))
    is_kept = [one not in untuned for one in rows[CURVE].itertuples(index=False, name=None)]
    return rows[is_kept].reset_index(drop=True)


def _sizes(weight_format: str, rows: pd.DataFrame) -> tuple[FloatArray, ...]:
    """Return what `MoeForm.of_sizes` takes, an entry per row, as if routing were balanced."""
    places = rows.groupby(list(SHAPE_COLUMNS), sort=False).indices
    columns = np.empty((6, len(rows)))
    tokens = rows["tokens"].to_numpy(dtype=np.float64)
    for key, positions in places.items():
        shape = MoeShape(*(int(size) for size in np.asarray(key)))
        columns[0, positions] = shape.experts_touched(tokens[positions], BALANCED)
        columns[1, positions] = shape.rows(tokens[positions])
        columns[2:, positions] = np.array(
            [
                shape.expert_bytes(weight_format),
                shape.row_flop,
                shape.row_bytes,
                shape.experts / shape.ep,
            ]
        )[:, None]
    return tuple(columns)
