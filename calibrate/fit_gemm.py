"""Dense GEMM of one GPU and engine: which rows stand for it, thinned, fitted, and how far off.

The knots are some of the measured m and widths; whole (n, k) pairs that are not on them are held
out and predicted from the table as it is shipped. Before thinning, each pair's times are made
non-decreasing in m, so that the rows between the knots count too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from tonnage.calibrate.fit_quantise import fit_quantise
from tonnage.calibrate.held_out import LEAST_POWER as _LEAST_POWER
from tonnage.calibrate.held_out import rounded, summary
from tonnage.calibrate.imports.gemm import COLUMNS, gemm_rows, int4_expert_bytes_per_s
from tonnage.calibrate.imports.wheel import GPU_FOLDERS
from tonnage.scenarios.catalogue import load_gpu
from tonnage.sim.cost.models.gemm import GemmForm, GemmModel, GemmTable, gemm_table
from tonnage.sim.cost.models.grid import monotone
from tonnage.sim.domain import FloatArray, GpuSpec
from tonnage.sim.model.formats import number_format

# Whose rows stand for an engine's format where its own do not. SGLang's bf16 is the same library
# call as vLLM's, measured with more noise. vLLM's fp8_block rows time the host's launches;
# TensorRT-LLM's take as long where those show the kernel (m of 8192 and more).
ROWS_FROM = {("sglang", "bf16"): "vllm", ("vllm", "fp8_block"): "trtllm"}

M_KNOTS = (
    *(1, 2, 4, 8, 16, 32, 48, 64, 65, 96, 128, 129, 192, 256, 257, 512, 513, 768, 1024, 1025),
    *(1536, 2048, 2049, 4096, 8192, 16384, 32768),
)
WIDTH_KNOTS = (
    *(32, 64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 5120, 6144, 7168, 8192, 12288),
    *(16384, 65536),
)
# For the error beyond the grid: a table of these widths predicts the pairs outside them.
INNER_WIDTHS = tuple(width for width in WIDTH_KNOTS if 256 <= width <= 7168)

# A row this much above the median of the next three is an outlier: more rows take longer.
_SPIKE = np.log(1.3)
_LIGHT = 0.1  # weight of an outlier, and of an m that engines avoid by padding
# Marlin's published 27 us for 1 x 8192 x 8192 on an H100 (humming, pull request 2) is up to twice
# what the decoded form says; no INT4 rows of dense products exist for these GPUs.
_DECODED_HIGH = 2.0


@dataclass(frozen=True, slots=True)
class GemmFit:
    """Tables for a profile, its `fitted`, and a row of errors per format and regime."""

    tables: dict[str, pd.DataFrame]
    fitted: dict[str, Any]
    errors: pd.DataFrame


def tables(gpu: str, engine: str) -> dict[str, pd.DataFrame]:
    """Return `gemm` (columns `COLUMNS`) and `quantise`, thinned, of a GPU folder and an engine."""
    return fit(gpu, engine).tables


def fitted(gpu: str, engine: str) -> dict[str, Any]:
    """Return `{"gemm": ..., "quantise": ...}` as the models read them: JSON values."""
    return fit(gpu, engine).fitted


def held_out_errors(gpu: str, engine: str) -> pd.DataFrame:
    """Return the errors of shapes held out whole: relative, `low` and `high` true / predicted."""
    return fit(gpu, engine).errors


@lru_cache(maxsize=1)
def fit(gpu: str, engine: str) -> GemmFit:
    """Fit a GPU folder (`h200_sxm`) under an engine; the last result is kept.

    Its tables, parameters and errors are asked for one after the other.
    """
    rows, quantise = engine_rows(gpu, engine), fit_quantise(gpu)
    fits = {str(name): fit_format(str(name), part) for name, part in rows.groupby("format")}
    parameters: dict[str, Any] = {
        "source": "imported",
        "formats": {name: parameters for name, (_, parameters, _) in fits.items()},
        "decoded_bytes_per_s": int4_expert_bytes_per_s(gpu),
    }
    knots = pd.concat([knots for knots, _, _ in fits.values()], ignore_index=True)
    found = {"gemm": parameters, "quantise": quantise.fitted}
    scaled = scaled_errors(knots, found, datasheet(gpu))
    if not scaled.empty:
        low, high = float(scaled["low"].min()), float(scaled["high"].max())
        parameters["scaled_interval"] = [low, high]
        parameters["decoded_interval"] = [low, max(high, _DECODED_HIGH)]
    own = pd.concat([errors for _, _, errors in fits.values()]).assign(operator="gemm")
    errors = pd.concat([own, scaled, quantise.errors], ignore_index=True)
    found_tables = {"gemm": knots, "quantise": quantise.table}
    return GemmFit(found_tables, found, errors.assign(gpu=gpu, engine=engine))


def engine_rows(gpu: str, engine: str) -> pd.DataFrame:
    """Return the rows that stand for an engine: its own, or those that `ROWS_FROM` names.

    Launch-bound rows are refused; a format that has no others is left out.
    """
    frameworks = {engine, *(one for (of, _), one in ROWS_FROM.items() if of == engine)}
    rows = pd.concat([gemm_rows(gpu, framework) for framework in sorted(frameworks)])
    rows = rows[~rows["launch_bound"]]
    parts = []
    for name, part in rows.groupby("format"):
        source = ROWS_FROM.get((engine, str(name)), engine)
        parts.append(part[part["source_framework"] == source])
    return pd.concat(parts, ignore_index=True)[list(COLUMNS)]


def datasheet(gpu: str) -> GpuSpec:
    """Return the shipped GPU of a folder of the package."""
    return load_gpu(next(name for name, folder in GPU_FOLDERS.items() if folder == gpu))


# --- one format ---------------------------------------------------------------------------------


def fit_format(name: str, rows: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, Any], pd.DataFrame]:
    """Return a format's thinned rows, its parameters, and its errors within and beyond the grid."""
    rows = rows.sort_values(["n", "k", "m"], ignore_index=True)
    repaired = rows.assign(seconds=repaired_seconds(rows))
    knots = thinned(repaired, WIDTH_KNOTS)
    form = fit_form(name, knots)
    on_knots = rows["n"].isin(WIDTH_KNOTS) & rows["k"].isin(WIDTH_KNOTS)
    inside = log_errors(_table(name, knots, form), rows[~on_knots])

    few = thinned(repaired, INNER_WIDTHS)
    first, last = INNER_WIDTHS[0], INNER_WIDTHS[-1]
    is_inner = rows["n"].between(first, last) & rows["k"].between(first, last)
    outside = log_errors(_table(name, few, fit_form(name, few)), rows[~is_inner])

    kept = {key: value for key, value in asdict(form).items() if value is not None}
    source = str(rows["source_framework"].iloc[0])
    errors = pd.DataFrame(
        [
            summary("interpolation", "(n, k) pairs between the knots", inside),
            summary("extrapolation", f"(n, k) pairs beyond {first}-{last}", outside),
        ]
    )
    parameters = {
        "form": kept,
        "source_framework": source,
        "interval": [float(errors["low"].iloc[0]), float(errors["high"].iloc[0])],
        "outside_interval": [float(errors["low"].iloc[1]), float(errors["high"].iloc[1])],
    }
    return knots, parameters, errors.assign(format=name, source_framework=source)


def repaired_seconds(rows: pd.DataFrame) -> FloatArray:
    """Return the seconds of rows sorted by (n, k, m), made non-decreasing along m by pair.

    Outliers, and odd m, which engines avoid by padding a batch to its captured size, count a tenth
    of the others: where a kernel is slow at 65 rows and fast at 128, 128 holds.
    """
    result = np.empty(len(rows))
    for positions in rows.groupby(["n", "k"]).indices.values():
        part = rows.iloc[positions]
        logs = np.log(part["seconds"].to_numpy())
        m = part["m"].to_numpy()
        light = ((m > 16) & (m % 16 != 0)) | _is_spike(logs)
        result[positions] = np.exp(monotone(logs, weights=np.where(light, _LIGHT, 1.0)))
    return result


def _is_spike(logs: FloatArray) -> FloatArray:
    ahead = np.lib.stride_tricks.sliding_window_view(np.append(logs, [logs[-1]] * 3), 4)[:, 1:]
    spikes: FloatArray = logs - np.median(ahead, axis=1) > _SPIKE
    return spikes


def thinned(rows: pd.DataFrame, widths: Sequence[int]) -> pd.DataFrame:
    """Return the rows at the knots, their seconds to four digits."""
    on_knots = rows["m"].isin(M_KNOTS) & rows["n"].isin(widths) & rows["k"].isin(widths)
    kept = rows[on_knots]
    return kept.assign(seconds=rounded(kept["seconds"])).reset_index(drop=True)


def fit_form(name: str, rows: pd.DataFrame, slower: float = 1.0) -> GemmForm:
    """Fit the physical form to the log seconds of rows (soft-L1, so that outliers pull little).

    `slower`: than a GPU of 2 TB/s the device is (`held_out.slowdown`).
    """
    m, n, k = (rows[axis].to_numpy(dtype=np.float64) for axis in "mnk")
    matrix_bytes = number_format(name).matrix_bytes
    weight_bytes = np.array([matrix_bytes(int(a), int(b)) for a, b in zip(n, k, strict=True)])
    target = np.log(rows["seconds"].to_numpy())
    is_quantised = name not in ("bf16", "fp16")
    rate, least_rate = np.log(slower), _LEAST_POWER * np.log(slower)
    start = [np.log(3e-6), np.log(3e12) - rate, np.log(1e15) - rate, np.log(4.0)]
    lowest = [np.log(1e-7), np.log(1e10) - least_rate, np.log(1e12) - least_rate, np.log(1.0)]
    highest = [np.log(1e-3), np.log(1e14), np.log(1e17), np.log(8.0)]
    if is_quantised:
        start.append(np.log(1e12) - rate)
        lowest.append(np.log(1e9) - least_rate)
        highest.append(np.log(1e16))

    def residuals(logs: FloatArray) -> FloatArray:
        form = GemmForm(*(float(value) for value in np.exp(logs)))
        difference: FloatArray = np.log(form.seconds(weight_bytes, m, n, k)) - target
        return difference

    found = least_squares(residuals, start, bounds=(lowest, highest), loss="soft_l1", f_scale=0.1)
    return GemmForm(*(float(f"{value:.6g}") for value in np.exp(found.x)))


def log_errors(table: GemmTable, rows: pd.DataFrame) -> FloatArray:
    """Return the log of measured over predicted seconds of rows, in their order by pair."""
    errors = []
    for n, k, part in _pairs(rows):
        curve_rows, log_seconds = table.curve(n, k)
        logs = np.interp(np.log(part["m"]), np.log(curve_rows), log_seconds)
        errors.append(np.log(part["seconds"].to_numpy()) - logs)
    return np.concatenate(errors)


# --- formats without rows -----------------------------------------------------------------------


def scaled_errors(knots: pd.DataFrame, fitted: dict[str, Any], gpu: GpuSpec) -> pd.DataFrame:
    """Return the error of each format when it is scaled from bf16, as if it had no rows."""
    bf16 = {"formats": {"bf16": fitted["gemm"]["formats"]["bf16"]}}
    fitted = {**fitted, "gemm": {**fitted["gemm"], **bf16}}
    model = GemmModel.from_tables({"gemm": _columns(knots)}, fitted, gpu)
    found = []
    for name, rows in knots.groupby("format"):
        if name != "bf16":
            errors = np.concatenate(list(_model_errors(model, str(name), rows)))
            figures = summary("extrapolation", "the format: scaled from bf16", errors)
            found.append({**figures, "operator": "gemm_scaled", "format": name})
    return pd.DataFrame(found)


def _model_errors(model: GemmModel, name: str, rows: pd.DataFrame) -> Iterator[FloatArray]:
    for n, k, part in _pairs(rows):
        predicted = model.seconds(name, part["m"].to_numpy(dtype=np.float64), n, k)
        yield np.log(part["seconds"].to_numpy() / predicted.seconds)


def _pairs(rows: pd.DataFrame) -> Iterator[tuple[int, int, pd.DataFrame]]:
    for _, part in rows.groupby(["n", "k"]):
        yield int(part["n"].iloc[0]), int(part["k"].iloc[0]), part


def _table(name: str, rows: pd.DataFrame, form: GemmForm) -> GemmTable:
    return gemm_table(name, _columns(rows), form)


def _columns(rows: pd.DataFrame) -> dict[str, Any]:
    return {str(column): rows[column].to_numpy() for column in rows.columns}
