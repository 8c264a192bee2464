"""Fit the tables measured on this machine, and say how far off shapes are that were left out.

The forms are those of imported profiles. What is left out: whole weights, experts, head counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from tonnage.calibrate import attention_folds as folds
from tonnage.calibrate import fit_gemm, fit_quantise
from tonnage.calibrate.attention_errors import Fold, intervals, judged, summarised, whole_values
from tonnage.calibrate.attention_forms import fit_forms
from tonnage.calibrate.between_ranks import fit_exchanges
from tonnage.calibrate.held_out import slowdown, summary
from tonnage.calibrate.moe_form_fit import fit_form as fit_moe_form
from tonnage.sim.cost.models.attention import decode_work
from tonnage.sim.cost.models.gemm import gemm_table
from tonnage.sim.cost.models.mla_bmm import MlaBmmModel
from tonnage.sim.cost.models.moe import MoeModel
from tonnage.sim.cost.models.prefill_attention import prefill_work
from tonnage.sim.domain import FloatArray, GpuSpec

Tables = Mapping[str, pd.DataFrame]
Fitted = dict[str, Any]

MEASURED = "measured"
_FOLDS = 6  # of weights left out in turn
_UNKNOWN = (0.5, 2.0)  # where nothing was left out
_JUDGED_CONTEXT = 128
_EXPERT_SIZES = ["hidden", "inter", "experts", "top_k", "tp", "ep"]
_NO_ERRORS = ["operator", "format", "regime", "held_out", "n", "median", "p90", "low", "high"]


@dataclass(slots=True)
class Fits:
    """A profile's `fitted` by operator, and rows of errors."""

    fitted: Fitted = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)

    def frame(self) -> pd.DataFrame:
        """Return the errors as `build.errors_by_operator` reads them."""
        return pd.DataFrame(self.errors, columns=_NO_ERRORS)


def fits_of(tables: Tables, random_experts: pd.DataFrame, gpu: GpuSpec) -> Fits:
    """Fit every table that a model reads. `random_experts`: tested, but in no table."""
    found = Fits()
    slower = slowdown(gpu.memory_bandwidth_bytes_per_s)
    if "gemm" in tables:
        _fit_gemm(found, tables["gemm"], slower)
    if "quantise" in tables:
        _fit_quantise(found, tables["quantise"])
    if "moe" in tables:
        _fit_moe(found, tables["moe"], random_experts, gpu, slower)
    if "attention_decode" in tables:
        _fit_decode(found, tables["attention_decode"], gpu, slower)
    if "attention_prefill" in tables:
        _fit_prefill(found, tables["attention_prefill"], gpu, slower)
    if "mla_bmm" in tables:
        _fit_latent_products(found, tables["mla_bmm"], gpu)
    comm, errors = fit_exchanges(tables, gpu)
    if comm["operations"]:
        found.fitted["comm"] = comm
        found.errors.extend(errors)
    return found


# --- products -----------------------------------------------------------------------------------


def _fit_gemm(found: Fits, table: pd.DataFrame, slower: float) -> None:
    formats = {}
    for name, rows in table.groupby("format"):
        ordered = rows.sort_values(["n", "k", "m"], ignore_index=True)
        repaired = ordered.assign(seconds=fit_gemm.repaired_seconds(ordered))
        form = fit_gemm.fit_form(str(name), repaired, slower)
        errors = {
            regime: np.concatenate(list(_left_out_products(str(name), repaired, regime, slower)))
            for regime in ("interpolation", "extrapolation")
            if len(_weights(repaired, regime)) > 1
        }
        spread = {regime: _interval(one) for regime, one in errors.items()}
        kept = {key: value for key, value in asdict(form).items() if value is not None}
        formats[str(name)] = {
            "form": kept,
            "interval": spread.get("interpolation", list(_UNKNOWN)),
            "outside_interval": spread.get("extrapolation", list(_UNKNOWN)),
        }
        for regime, one in errors.items():
            figures = summary(regime, "whole weights (n, k)", one)
            found.errors.append({"operator": "gemm", "format": str(name), **figures})
    found.fitted["gemm"] = {"source": MEASURED, "formats": formats}


def _weights(rows: pd.DataFrame, regime: str) -> list[tuple[int, int]]:
    """Return the weights that lie within the others' sizes, or those at their edge."""
    pairs = rows[["n", "k"]].drop_duplicates()
    inside = pd.Series(True, index=pairs.index)
    for name in ("n", "k"):
        inside &= (pairs[name] > pairs[name].min()) & (pairs[name] < pairs[name].max())
    chosen = pairs[inside if regime == "interpolation" else ~inside]
    return [(int(n), int(k)) for n, k in chosen.itertuples(index=False, name=None)]


def _left_out_products(
    name: str, rows: pd.DataFrame, regime: str, slower: float
) -> Iterator[FloatArray]:
    """Yield the errors of weights left out, a share of them at a time."""
    weights = _weights(rows, regime)
    number = min(_FOLDS, len(weights))
    keys = pd.MultiIndex.from_frame(rows[["n", "k"]])
    for turn in range(number):
        is_left_out = keys.isin(weights[turn::number])
        train = rows[~is_left_out]
        columns = {str(one): train[one].to_numpy() for one in ("m", "n", "k", "seconds")}
        table = gemm_table(name, columns, fit_gemm.fit_form(name, train, slower))
        yield fit_gemm.log_errors(table, rows[is_left_out])


def _fit_quantise(found: Fits, table: pd.DataFrame) -> None:
    form = fit_quantise.fit_form(table)
    found.fitted["quantise"] = {"source": MEASURED, **form, "interval": list(_UNKNOWN)}


def _interval(errors: FloatArray) -> list[float]:
    low, high = np.exp(np.quantile(errors, [0.05, 0.95]))
    return [_rounded(low), _rounded(high)]


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


# --- experts ------------------------------------------------------------------------------------


def _fit_moe(
    found: Fits, table: pd.DataFrame, random: pd.DataFrame, gpu: GpuSpec, slower: float
) -> None:
    pools, formats = [], {}
    for (name, kernel), rows in table.groupby(["format", "kernel"]):
        form = asdict(fit_moe_form(str(name), rows, slower))
        pools.append({"format": str(name), "kernel": str(kernel), "form": form})
    fitted: Fitted = {"source": MEASURED, "pools": pools, "formats": {}}
    for name, rows in table.groupby("format"):
        unseen = np.concatenate(list(_left_out_experts(rows, fitted, gpu)) or [np.zeros(0)])
        routed = _routed_errors(table, random, str(name), fitted, gpu)
        for operator, what, errors in (
            ("moe", "whole experts", unseen),
            ("moe_random", "tokens routed at random", routed),
        ):
            if errors.size:
                figures = summary("interpolation", what, errors)
                found.errors.append({"operator": operator, "format": str(name), **figures})
        near = _interval(routed) if routed.size else list(_UNKNOWN)
        far = _interval(unseen) if unseen.size else list(_UNKNOWN)
        formats[str(name)] = {
            "measured_interval": _around_one(near),
            "inside_interval": _around_one(far),
            "outside_interval": _around_one([min(far[0], _UNKNOWN[0]), max(far[1], _UNKNOWN[1])]),
            "scaled_interval": list(_UNKNOWN),
        }
    fitted["formats"] = formats
    found.fitted["moe"] = fitted


def _around_one(interval: list[float]) -> list[float]:
    return [min(interval[0], 1.0), max(interval[1], 1.0)]


_NEARNESS = ("measured", "inside", "outside", "scaled")
_NO_INTERVALS = {f"{name}_interval": list(_UNKNOWN) for name in _NEARNESS}


def _left_out_experts(rows: pd.DataFrame, fitted: Fitted, gpu: GpuSpec) -> Iterator[FloatArray]:
    shapes = pd.MultiIndex.from_frame(rows[_EXPERT_SIZES])
    distinct = shapes.unique()
    for shape in distinct if len(distinct) > 1 else ():
        is_shape = shapes == shape
        yield _moe_errors(rows[~is_shape], rows[is_shape], "balanced", fitted, gpu)


def _routed_errors(
    table: pd.DataFrame, random: pd.DataFrame, name: str, fitted: Fitted, gpu: GpuSpec
) -> FloatArray:
    test = random[random["format"] == name] if len(random) else random
    if test.empty:
        return np.zeros(0)
    return _moe_errors(table, test, "uniform", fitted, gpu)


def _moe_errors(
    train: pd.DataFrame, test: pd.DataFrame, routing: str, fitted: Fitted, gpu: GpuSpec
) -> FloatArray:
    name = str(test["format"].iloc[0])
    judging = {**fitted, "formats": {name: _NO_INTERVALS}}
    model = MoeModel({str(one): train[one].to_numpy() for one in train.columns}, judging, gpu)
    errors = []
    for sizes, rows in test.groupby(_EXPERT_SIZES):
        tokens = rows["tokens"].to_numpy(np.float64)
        shape = tuple(int(size) for size in np.asarray(sizes))
        predicted = model.curve(name, shape, routing).estimates(tokens).seconds
        errors.append(np.log(rows["seconds"].to_numpy() / predicted))
    return np.concatenate(errors)


# --- attention ----------------------------------------------------------------------------------


def _fit_decode(found: Fits, table: pd.DataFrame, gpu: GpuSpec, slower: float) -> None:
    forms = fit_forms(table, decode_work, "context_tokens", None, slower)
    trainer = partial(folds.decode_trainer, rates=gpu, start=forms, slower=slower)
    test = table[table["context_tokens"] >= _JUDGED_CONTEXT]
    lines = judged(_attention_folds(table, test, "context_tokens"), trainer)
    _add_attention(found, "attention_decode", {"forms": forms}, lines)


def _fit_prefill(found: Fits, table: pd.DataFrame, gpu: GpuSpec, slower: float) -> None:
    forms = fit_forms(table, prefill_work, "new_tokens", None, slower)
    trainer = partial(folds.prefill_trainer, rates=gpu, start=forms, slower=slower)
    test = table[table["batch"] * table["new_tokens"] >= _JUDGED_CONTEXT]
    lines = judged(_attention_folds(table, test, "new_tokens"), trainer)
    _add_attention(found, "attention_prefill", {"forms": forms}, lines)


def _attention_folds(table: pd.DataFrame, test: pd.DataFrame, tokens: str) -> Iterator[Fold]:
    """Yield folds that leave out whole head counts, whole ratios of heads, and inner knots."""
    yield from whole_values(table, test, lambda one: one["heads"], "", "whole head counts")
    is_gqa, test_is_gqa = table["kind"] == "gqa", test["kind"] == "gqa"
    yield from whole_values(
        table[is_gqa],
        test[test_is_gqa],
        lambda one: one["heads"] / one["kv_heads"],
        "heads per kv head",
        "whole ratios of heads to KV heads",
    )
    knots = sorted(set(table[tokens]))[1:-1:2]
    between = table[tokens].isin(knots)
    yield Fold("knots", "every second length", table[~between], test[test[tokens].isin(knots)])


def _add_attention(found: Fits, operator: str, values: Fitted, lines: pd.DataFrame) -> None:
    found.fitted[operator] = {"source": MEASURED, **values, "intervals": intervals(lines)}
    for row in summarised(lines, operator).to_dict("records"):
        found.errors.append({str(name): value for name, value in row.items()})


def _fit_latent_products(found: Fits, table: pd.DataFrame, gpu: GpuSpec) -> None:
    launch_s = float(table["seconds"].min())
    heads = sorted(set(table["heads"]))
    errors = []
    for held in heads[1:-1]:
        train, test = table[table["heads"] != held], table[table["heads"] == held]
        model = MlaBmmModel(train, {"launch_s": launch_s}, gpu)
        predicted = model.seconds(held, test["tokens"].to_numpy(np.float64)).seconds
        errors.append(np.log(test["seconds"].to_numpy() / predicted))
    values: Fitted = {"source": MEASURED, "launch_s": launch_s}
    if errors:
        joined = np.concatenate(errors)
        figures = summary("interpolation", "whole head counts", joined)
        found.errors.append({"operator": "mla_bmm", "format": "bf16", **figures})
        values |= {"interval": _interval(joined), "outside_interval": list(_UNKNOWN)}
    found.fitted["mla_bmm"] = values
