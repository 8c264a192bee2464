"""Collectives of one GPU and engine: tables, physical forms, and how far off they are.

The tables are small and shipped whole, so their errors are those of poorer ones: every second
message size predicted from the others (interpolation), and each number of GPUs but the smallest
predicted from the other numbers (extrapolation). Of dispatch and combine, each shape is predicted
from the other shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from tonnage.calibrate.held_out import rounded, summary
from tonnage.calibrate.imports import wheel
from tonnage.calibrate.imports.comm import all_reduce_rows, nccl_rows
from tonnage.calibrate.imports.expert_comm import expert_rows
from tonnage.sim.cost.models.comm import OPERATIONS, CollectiveTable, RingForm, collective_table
from tonnage.sim.cost.models.expert_comm import ExpertForm, ExpertShape, ExpertTable, expert_table
from tonnage.sim.domain import FloatArray

_SHAPE = ["gpus", "hidden", "top_k", "experts"]


@dataclass(frozen=True, slots=True)
class CommFit:
    """Tables for a profile, its `fitted` of `comm` and `expert_comm`, and rows of errors."""

    tables: dict[str, pd.DataFrame]
    fitted: dict[str, Any]
    errors: pd.DataFrame


def tables(gpu: str, engine: str) -> dict[str, pd.DataFrame]:
    """Return `all_reduce`, `all_gather` (with reduce-scatter), `all_to_all` and `expert_comm`."""
    return fit(gpu, engine).tables


def fitted(gpu: str, engine: str) -> dict[str, Any]:
    """Return `{"comm": ..., "expert_comm": ...}` as the models read them: JSON values."""
    return fit(gpu, engine).fitted


def held_out_errors(gpu: str, engine: str) -> pd.DataFrame:
    """Return the errors of what was held out: relative, `low` and `high` true / predicted."""
    return fit(gpu, engine).errors


@lru_cache(maxsize=1)
def fit(gpu: str, engine: str, version: str | None = None) -> CommFit:
    """Fit a GPU folder (`h200_sxm`) under an engine; the last result is kept.

    `version`: of the engine whose all-reduce was timed; default the current one.
    """
    own, nccl, experts = all_reduce_rows(gpu, engine, version), nccl_rows(gpu), expert_rows(gpu)
    if len(own):
        nccl = nccl[nccl["op"] != "all_reduce"]  # else NCCL's stands for the engine's own
    # An empty frame has no types, and would take those of the other away.
    collectives = pd.concat([own, nccl]) if len(own) and len(nccl) else own if len(own) else nccl
    found = {
        table: _ordered(collectives[collectives["op"].map(OPERATIONS) == table])
        for table in dict.fromkeys(OPERATIONS.values())
    }
    found["expert_comm"] = experts.assign(seconds=rounded(experts["seconds"]))
    node = wheel.gpu_description(gpu)["node"]
    shared = {
        "source": "imported",
        "nvlink_gpus": int(node.get("num_gpus_per_rack", node["num_gpus_per_node"])),
    }
    operations, errors = {}, []
    for (op, in_graph), rows in collectives.groupby(["op", "in_graph"]):
        launch = "graph" if in_graph else "eager"
        operations[f"{op}/{launch}"], table = fit_collective(str(op), rows)
        errors.append(table.assign(operator=str(op), format=launch))
    phases = {}
    for (op, mode), rows in experts.groupby(["op", "mode"]):
        phases[f"{op}/{mode}"], table = _fit_phase(str(mode), rows)
        errors.append(table.assign(operator=f"expert_{op}", format=str(mode)))
    parameters = {
        "comm": {**shared, "operations": operations},
        "expert_comm": {**shared, "phases": phases},
    }
    every = pd.concat(errors, ignore_index=True) if errors else pd.DataFrame()
    return CommFit(found, parameters, every.assign(gpu=gpu, engine=engine))


def _ordered(rows: pd.DataFrame) -> pd.DataFrame:
    key = ["op", "in_graph", "gpus", "message_bytes"]
    return rows.sort_values(key, ignore_index=True).assign(
        seconds=lambda frame: rounded(frame["seconds"])
    )


# --- collectives --------------------------------------------------------------------------------


def fit_collective(op: str, rows: pd.DataFrame) -> tuple[dict[str, Any], pd.DataFrame]:
    """Return form and intervals of one collective, and its errors: rows need three sizes."""
    sizes = np.sort(rows["message_bytes"].unique())
    is_kept = rows["message_bytes"].isin([*sizes[::2], sizes[-1]])
    between = collective_errors(op, rows[is_kept], rows[~is_kept])
    others = []
    for gpus in np.sort(rows["gpus"].unique())[1:]:
        is_held = rows["gpus"] == gpus
        others.append(collective_errors(op, rows[~is_held], rows[is_held]))
    errors = [summary("interpolation", "every second message size", between)]
    if others:
        held_out = "each number of GPUs but the smallest"
        errors.append(summary("extrapolation", held_out, np.concatenate(others)))
    inside, outside = errors[0], errors[-1]
    parameters = {
        "form": asdict(fit_ring(op, rows)),
        "interval": [inside["low"], inside["high"]],
        "outside_interval": [outside["low"], outside["high"]],
    }
    return parameters, pd.DataFrame(errors)


def collective_errors(op: str, known: pd.DataFrame, held: pd.DataFrame) -> FloatArray:
    """Return the log of measured over predicted seconds of rows, predicted from other rows."""
    table = _collective_table(op, known)
    errors = []
    for _, part in held.groupby("gpus"):
        points, logs = table.curve(int(part["gpus"].iloc[0]))
        predicted = np.interp(np.log(part["message_bytes"]), np.log(points), logs)
        errors.append(np.log(part["seconds"].to_numpy()) - predicted)
    return np.concatenate(errors)


def _collective_table(op: str, rows: pd.DataFrame) -> CollectiveTable:
    columns = {name: rows[name].to_numpy() for name in ("gpus", "message_bytes", "seconds")}
    return collective_table(op, columns, fit_ring(op, rows))


def fit_ring(op: str, rows: pd.DataFrame) -> RingForm:
    """Fit launch, latency per hop and bandwidth to the log seconds of rows."""
    gpus, message_bytes = rows["gpus"].to_numpy(), rows["message_bytes"].to_numpy()
    form = _fitted(
        lambda values: RingForm(*values).seconds(op, gpus, message_bytes),
        rows["seconds"],
        start=(5e-6, 1e-6, 3e11),
        lowest=(1e-7, 1e-9, 1e9),
        highest=(1e-3, 1e-4, 1e13),
    )
    return RingForm(*form)


# --- dispatch and combine -----------------------------------------------------------------------


def _fit_phase(mode: str, rows: pd.DataFrame) -> tuple[dict[str, Any], pd.DataFrame]:
    errors: dict[str, list[FloatArray]] = {"interpolation": [], "extrapolation": []}
    for _, held in rows.groupby(_SHAPE):
        shape = _shape(held)
        table = _expert_table(mode, rows.drop(held.index))
        points, logs = table.curve(shape, table.payload)
        predicted = np.interp(np.log(held["tokens"]), np.log(points), logs)
        regime = "interpolation" if table.spans(shape) else "extrapolation"
        errors[regime].append(np.log(held["seconds"].to_numpy()) - predicted)
    figures = [
        summary(regime, "each shape (hidden, top-k, experts)", np.concatenate(found))
        for regime, found in errors.items()
        if found
    ]
    inside, outside = figures[0], figures[-1]
    parameters = {
        "form": asdict(_expert_table(mode, rows).form),
        "payload": str(rows["payload"].iloc[0]),
        "interval": [inside["low"], inside["high"]],
        "outside_interval": [outside["low"], outside["high"]],
    }
    return parameters, pd.DataFrame(figures)


def _expert_table(mode: str, rows: pd.DataFrame) -> ExpertTable:
    payload = str(rows["payload"].iloc[0])
    columns = {name: rows[name].to_numpy() for name in (*_SHAPE, "tokens", "seconds")}
    return expert_table(mode, payload, columns, fit_expert_form(mode, payload, rows))


def fit_expert_form(mode: str, payload: str, rows: pd.DataFrame) -> ExpertForm:
    """Fit launch, seconds per expert, bandwidth and local copies to the log seconds of rows."""
    groups = [(_shape(part), part["tokens"].to_numpy()) for _, part in rows.groupby(_SHAPE)]
    seconds = pd.concat([part["seconds"] for _, part in rows.groupby(_SHAPE)])

    def predicted(values: Sequence[float]) -> FloatArray:
        form = ExpertForm(*values)
        return np.concatenate([form.seconds(mode, shape, payload, one) for shape, one in groups])

    form = _fitted(
        predicted,
        seconds,
        start=(1e-5, 1e-8, 3e11, 0.5),
        lowest=(1e-7, 1e-12, 1e9, 1e-3),
        highest=(1e-3, 1e-6, 1e13, 10.0),
    )
    return ExpertForm(*form)


def _shape(rows: pd.DataFrame) -> ExpertShape:
    return ExpertShape(*(int(rows[name].iloc[0]) for name in _SHAPE))


def _fitted(
    predict: Callable[[Sequence[float]], FloatArray],
    seconds: pd.Series[float],
    *,
    start: Sequence[float],
    lowest: Sequence[float],
    highest: Sequence[float],
) -> list[float]:
    """Return the positive parameters whose log seconds are nearest (soft-L1 of log ratios)."""
    target = np.log(seconds.to_numpy())

    def residuals(logs: FloatArray) -> FloatArray:
        difference: FloatArray = np.log(predict(np.exp(logs).tolist())) - target
        return difference

    bounds = (np.log(lowest), np.log(highest))
    found = least_squares(residuals, np.log(start), bounds=bounds, loss="soft_l1", f_scale=0.1)
    return [float(f"{value:.6g}") for value in np.exp(found.x)]
