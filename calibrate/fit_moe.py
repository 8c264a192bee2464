"""Routed experts of one GPU and engine: the rows that ship, the forms fitted to them, their errors.

Part of `calibrate/build.py`. Rows: `calibrate/moe_rows.py`; errors: `calibrate/moe_errors.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import pandas as pd

from tonnage.calibrate import moe_errors
from tonnage.calibrate.imports.wheel import GPU_FOLDERS
from tonnage.calibrate.moe_form_fit import fit_forms, without_untuned
from tonnage.calibrate.moe_rows import COLUMNS, engine_rows, lent_rows, thinned
from tonnage.scenarios.catalogue import load_gpu
from tonnage.sim.cost.models.moe_form import weight_bits
from tonnage.sim.domain import GpuSpec

NAME = "moe"


@dataclass(frozen=True, slots=True)
class MoeFit:
    """Tables for a profile, its `fitted["moe"]`, and a row of errors per format and regime."""

    tables: dict[str, pd.DataFrame]
    fitted: dict[str, Any]
    errors: pd.DataFrame


def tables(gpu: str, engine: str) -> dict[str, pd.DataFrame]:
    """Return `moe`, thinned, of a GPU folder and an engine; columns `moe_rows.COLUMNS`."""
    return fit(gpu, engine).tables


def fitted(gpu: str, engine: str) -> dict[str, Any]:
    """Return `{"moe": ...}` as `MoeModel.from_tables` reads it: JSON values."""
    return {NAME: fit(gpu, engine).fitted}


def held_out_errors(gpu: str, engine: str) -> pd.DataFrame:
    """Return the errors of the shipped form: relative, `low` and `high` true / predicted.

    Operators: `moe` (experts held out whole), `moe_other_kernel` (the same, where they ran another
    kernel than unmeasured ones are taken to run), `moe_between_knots` (shipped experts at tokens
    that do not ship), `moe_lent` (rows scaled from another version or engine) and `moe_stand_in`
    (formats predicted from another's rows).
    """
    return fit(gpu, engine).errors


@lru_cache(maxsize=1)
def fit(gpu: str, engine: str) -> MoeFit:
    """Fit a GPU folder (`h200_sxm`) under an engine; the last result is kept.

    Its tables, parameters and errors are asked for one after the other.
    """
    own = engine_rows(gpu, engine)
    if own.empty:
        return MoeFit({NAME: pd.DataFrame(columns=COLUMNS)}, {}, moe_errors.no_errors())
    own = without_untuned(own)
    lent = without_untuned(lent_rows(own, gpu, engine))
    rows = pd.concat([own, lent], ignore_index=True) if len(lent) else own
    knots = thinned(rows)
    forms = fit_forms(knots)
    parameters: dict[str, Any] = {
        "source": "imported",
        "pools": [
            {"format": name, "kernel": kernel, "form": asdict(form)}
            for (name, kernel), form in forms.items()
        ],
    }
    errors = moe_errors.all_errors(rows, knots, forms, gpu, engine, datasheet(gpu))
    names = [str(name) for name in knots["format"].unique()]
    parameters["formats"] = {name: intervals(errors, name) for name in names}
    parameters["stand_in_intervals"] = stand_in_intervals(errors)
    return MoeFit({NAME: knots}, parameters, errors.assign(gpu=gpu, engine=engine))


def datasheet(gpu: str) -> GpuSpec:
    """Return the shipped GPU of a folder of the package."""
    return load_gpu(next(name for name, folder in GPU_FOLDERS.items() if folder == gpu))


def intervals(errors: pd.DataFrame, weight_format: str) -> dict[str, list[float]]:
    """Return true / predicted at 5 and 95 % by how near measured experts are.

    What was not tried takes the widest of what was, and nothing is narrower than what is nearer.
    Experts that were not measured may run another kernel, so its errors are within theirs.
    """
    of_format = errors[errors["format"] == weight_format]

    def of(operator: str, regime: str) -> pd.DataFrame:
        return of_format[(of_format["operator"] == operator) & (of_format["regime"] == regime)]

    between = of("moe_between_knots", "interpolation")
    inner, outer = of("moe", "interpolation"), of("moe", "extrapolation")
    lent = errors[errors["operator"] == "moe_lent"]
    other_kernel = of("moe_other_kernel", "extrapolation")
    inside = pd.concat([between, outer if inner.empty else inner, other_kernel])
    by_nearness: Mapping[str, pd.DataFrame] = {
        "measured": inside if between.empty else between,
        "inside": inside,
        "outside": pd.concat([inside, outer]),
        "scaled": pd.concat([inside, lent]),
    }
    return {f"{name}_interval": _widest(part) for name, part in by_nearness.items()}


def stand_in_intervals(errors: pd.DataFrame) -> dict[str, list[float]]:
    """Return the widest errors of formats predicted from another's rows, by bits of a weight."""
    tried = errors[errors["operator"] == "moe_stand_in"]
    return {bits: _widest(part) for bits, part in tried.groupby(tried["format"].map(weight_bits))}


def _widest(errors: pd.DataFrame) -> list[float]:
    low, high = float(errors["low"].min()), float(errors["high"].max())
    return [float(f"{min(low, 1.0):.3g}"), float(f"{max(high, 1.0):.3g}")]
