"""How far the shipped form of routed experts is off: experts held out whole, tokens between knots.

Errors are logs of measured over predicted seconds, of all measured layouts, routings and tokens of
what was held out, whether they ship or not. The eight constants of the kriging in
`sim/cost/models/moe_table.py`, the same for all tables, were chosen on some of the same rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, Literal

import numpy as np
import pandas as pd

from tonnage.calibrate.moe_form_fit import fit_forms, without_untuned
from tonnage.calibrate.moe_rows import (
    CURVE,
    FAMILY,
    LENT_FORMATS,
    TOKEN_KNOTS,
    catalogue_families,
    lender_rows,
    scaled_rows,
)
from tonnage.sim.cost.models.moe import MoeModel
from tonnage.sim.cost.models.moe_form import MoeForm, MoeShape
from tonnage.sim.domain import FloatArray, GpuSpec

_COLUMNS = ("operator", "format", "regime", "held_out", "n", "median", "p90", "low", "high")
_NO_INTERVAL = [1.0, 1.0]  # of models made for their errors
_PLACEHOLDER = {
    f"{one}_interval": _NO_INTERVAL for one in ("measured", "inside", "outside", "scaled")
}

_Kind = Literal["inside", "outside", "other_kernel"]
_HELD_OUT: dict[_Kind, tuple[str, str, str]] = {
    "inside": ("moe", "interpolation", "expert shapes within the others"),
    "outside": ("moe", "extrapolation", "expert shapes beyond the others"),
    "other_kernel": (
        "moe_other_kernel",
        "extrapolation",
        "expert shapes on another kernel than expected",
    ),
}

Forms = Mapping[tuple[str, str], MoeForm]
Family = tuple[int, int, int, int]


def no_errors() -> pd.DataFrame:
    """Return the frame of errors without rows."""
    return pd.DataFrame(columns=_COLUMNS)


def all_errors(
    rows: pd.DataFrame, knots: pd.DataFrame, forms: Forms, gpu: str, engine: str, rates: GpuSpec
) -> pd.DataFrame:
    """Return every kind of error of an engine: `rows` before, `knots` after thinning."""
    found = [
        held_out_experts(rows, knots, forms, rates),
        between_knots(rows, knots, forms, rates),
        lent_errors(rows, gpu, engine),
        stand_in_errors(knots, forms, rates),
    ]
    kept = [one for one in found if not one.empty]
    return pd.concat(kept, ignore_index=True) if kept else no_errors()


def moe_model(knots: pd.DataFrame, forms: Forms, rates: GpuSpec) -> MoeModel:
    """Return a model of thinned rows, its intervals left open."""
    pools = [
        {"format": name, "kernel": kernel, "form": asdict(form)}
        for (name, kernel), form in forms.items()
    ]
    formats = {str(name): _PLACEHOLDER for name in knots["format"].unique()}
    columns = {"moe": {str(name): knots[name].to_numpy() for name in knots.columns}}
    return MoeModel.from_tables(columns, {"moe": {"pools": pools, "formats": formats}}, rates)


def log_errors(model: MoeModel, rows: pd.DataFrame) -> FloatArray:
    """Return log errors of rows, in their order by curve."""
    errors = []
    for key, part in rows.groupby(CURVE):
        name, _, *sizes, routing = key
        tokens = part["tokens"].to_numpy(dtype=np.float64)
        shape = tuple(int(str(size)) for size in sizes)
        curve = model.curve(str(name), shape, str(routing))
        predicted = np.interp(np.log(tokens), curve.log_tokens, curve.log_seconds)
        errors.append(np.log(part["measured_s"].to_numpy()) - predicted)
    return np.concatenate(errors) if errors else np.empty(0)


# --- experts held out whole ---------------------------------------------------------------------


def held_out_experts(
    rows: pd.DataFrame, knots: pd.DataFrame, forms: Forms, rates: GpuSpec
) -> pd.DataFrame:
    """Return errors of each (hidden, inter, experts, top_k), predicted from the others.

    Interpolation: every size is within those of others on its kernel; extrapolation: not so. Apart
    from both, as `moe_other_kernel`, stand experts that ran another kernel than the model takes
    unmeasured ones to run. A format with one shape has the errors that the format with most shapes
    would have if only the like of that shape were known.
    """
    found = []
    for name, part in rows.groupby("format"):
        families = sorted(map(tuple, part[FAMILY].drop_duplicates().to_numpy(np.int64).tolist()))
        own = knots[knots["format"] == name]
        if len(families) < 2:
            found += _single_shape_errors(str(name), families[0], rows, knots, rates)
            continue
        parts: dict[_Kind, list[FloatArray]] = {kind: [] for kind in _HELD_OUT}
        for family in families:
            for kind, errors in _without(family, part, own, rates):
                parts[kind].append(errors)
        note = f", {len(families)} in all" + _lent_note(part)
        for kind, (operator, regime, text) in _HELD_OUT.items():
            found += _summaries(operator, str(name), regime, text + note, parts[kind])
    return pd.DataFrame(found, columns=list(_COLUMNS))


def _lent_note(rows: pd.DataFrame) -> str:
    lent = len(rows.loc[rows["source"] == "scaled", FAMILY].drop_duplicates())
    return f", {lent} of them lent" if lent else ""


def _without(
    family: Family, rows: pd.DataFrame, knots: pd.DataFrame, rates: GpuSpec
) -> Iterable[tuple[_Kind, FloatArray]]:
    """Yield (kind, log errors) of held-out experts, by kernel and by expert parallelism."""
    others = knots[~_is_family(knots, family)]
    model = moe_model(others, fit_forms(others), rates)
    held = rows[_is_family(rows, family)]
    for (kernel, is_spread), part in held.groupby([held["kernel"], held["ep"] > 1]):
        table = model.nearest_table(
            str(part["format"].iloc[0]), MoeShape(*family, ep=2 if is_spread else 1)
        )
        if table is None:
            continue
        sizes = np.array(sorted(table.families))
        within = bool(((sizes.min(axis=0) <= family) & (family <= sizes.max(axis=0))).all())
        is_expected = table.kernel == kernel
        kind: _Kind = ("inside" if within else "outside") if is_expected else "other_kernel"
        yield kind, log_errors(model, part)


def _is_family(rows: pd.DataFrame, family: Family) -> pd.Series:
    return (rows[FAMILY] == np.array(family)).all(axis=1)


def _single_shape_errors(
    weight_format: str, family: Family, rows: pd.DataFrame, knots: pd.DataFrame, rates: GpuSpec
) -> list[dict[str, Any]]:
    """Return the errors of another format predicted from one shape alone, for want of a second."""
    counts = knots.groupby("format")[FAMILY].apply(lambda part: len(part.drop_duplicates()))
    name = str(counts.idxmax())
    own, part = knots[knots["format"] == name], rows[rows["format"] == name]
    places = own[FAMILY].drop_duplicates().to_numpy(np.int64)
    nearest = places[np.abs(np.log(places / np.array(family))).sum(axis=1).argmin()]
    only = own[_is_family(own, tuple(nearest))]
    model = moe_model(only, fit_forms(only), rates)
    errors = log_errors(model, part[~_is_family(part, tuple(nearest))])
    text = f"no second shape: {name} predicted from one shape"
    return _summaries("moe", weight_format, "extrapolation", text, [errors])


# --- tokens between the knots -------------------------------------------------------------------


def between_knots(
    rows: pd.DataFrame, knots: pd.DataFrame, forms: Forms, rates: GpuSpec
) -> pd.DataFrame:
    """Return errors of catalogue experts at measured tokens that do not ship."""
    model = moe_model(knots, forms, rates)
    shipped = set(knots[CURVE].itertuples(index=False, name=None))
    is_between = ~rows["tokens"].isin(TOKEN_KNOTS)
    families = map(tuple, rows[FAMILY].to_numpy(np.int64).tolist())
    is_known = [one in catalogue_families() for one in families]
    chosen = rows[is_between & np.array(is_known, dtype=bool) & (rows["source"] == "imported")]
    chosen = chosen[[one in shipped for one in chosen[CURVE].itertuples(index=False, name=None)]]
    found = []
    for name, part in chosen.groupby("format"):
        errors = log_errors(model, part)
        text = "tokens between the knots, shipped experts"
        found += _summaries("moe_between_knots", str(name), "interpolation", text, [errors])
    return pd.DataFrame(found, columns=list(_COLUMNS))


# --- rows and formats lent ----------------------------------------------------------------------


def lent_errors(rows: pd.DataFrame, gpu: str, engine: str) -> pd.DataFrame:
    """Return errors of lent rows: of a format that both have, lent through one shape or none."""
    lent, own = rows[rows["source"] == "scaled"], rows[rows["source"] == "imported"]
    if lent.empty:
        return no_errors()
    lender = without_untuned(lender_rows(gpu, engine))
    name = _common_format(own, lender)
    if name is None:
        return no_errors()
    is_through_one = bool(own["format"].isin(LENT_FORMATS).any())
    mine, theirs = own[own["format"] == name], lender[lender["format"] == name]
    errors = list(_lent_format_errors(mine, theirs, is_through_one))
    framework, version = theirs[["source_framework", "source_version"]].iloc[0]
    through = "through one shape" if is_through_one else "without a common shape"
    text = f"{name} of {framework} {version}, lent {through}"
    found = [
        row
        for weight_format in lent["format"].unique()
        for row in _summaries("moe_lent", str(weight_format), "extrapolation", text, errors)
    ]
    return pd.DataFrame(found, columns=list(_COLUMNS))


def _common_format(own: pd.DataFrame, lender: pd.DataFrame) -> str | None:
    """Return the format of which both have most shapes, None without two common ones."""
    mine, theirs = (one[["format", *FAMILY]].drop_duplicates() for one in (own, lender))
    counts = mine.merge(theirs, on=["format", *FAMILY])["format"].value_counts()
    return str(counts.index[0]) if len(counts) and counts.iloc[0] > 1 else None


def _lent_format_errors(
    own: pd.DataFrame, lender: pd.DataFrame, is_through_one: bool
) -> Iterable[FloatArray]:
    keys = [*FAMILY, "tp", "ep", "routing", "tokens"]
    if not is_through_one:
        common = own.merge(lender, on=keys, suffixes=("", "_lent"))
        yield np.log((common["measured_s"] / common["seconds_lent"]).to_numpy())
        return
    for family in map(tuple, own[FAMILY].drop_duplicates().to_numpy(np.int64).tolist()):
        one = own[_is_family(own, family)]
        if _is_family(lender, family).any():
            lent = scaled_rows(one, lender)
            common = own.merge(lent, on=keys, suffixes=("", "_lent"))
            yield np.log((common["measured_s"] / common["seconds_lent"]).to_numpy())


def stand_in_errors(knots: pd.DataFrame, forms: Forms, rates: GpuSpec) -> pd.DataFrame:
    """Return errors of each format predicted from its stand-in, as if it had no rows."""
    found = []
    for name, part in knots.groupby("format"):
        others = {key: form for key, form in forms.items() if key[0] != name}
        if not others:
            continue
        model = moe_model(knots[knots["format"] != name], others, rates)
        errors = log_errors(model, part.assign(measured_s=part["seconds"]))
        text = "the format: predicted from another's rows"
        found += _summaries("moe_stand_in", str(name), "extrapolation", text, [errors])
    return pd.DataFrame(found, columns=list(_COLUMNS))


def _summaries(
    operator: str, weight_format: str, regime: str, held_out: str, parts: Iterable[FloatArray]
) -> list[dict[str, Any]]:
    """Return the quantiles of log errors: relative to the measured seconds, and as factors."""
    filled = [part for part in parts if len(part)]
    if not filled:
        return []
    errors = np.concatenate(filled)
    relative = np.abs(np.expm1(-errors))
    low, high = np.exp(np.quantile(errors, [0.05, 0.95]))
    return [
        {
            "operator": operator,
            "format": weight_format,
            "regime": regime,
            "held_out": held_out,
            "n": len(errors),
            "median": float(np.median(relative)),
            "p90": float(np.quantile(relative, 0.9)),
            "low": float(low),
            "high": float(high),
        }
    ]
