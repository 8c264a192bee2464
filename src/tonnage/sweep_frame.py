"""The results of a sweep as one frame, and as the JSON object of the `sweep` verb."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import pandas as pd

from tonnage.output import flattened
from tonnage.sim.planning.sweep import Axis
from tonnage.sweep_plan import PointResult, SweepPlan, value_text

_PROVENANCE = ("profile", "source")
_MEMORY_FIGURES = ("kv_tokens", "max_concurrency")


def frame_of(plan: SweepPlan, results: Sequence[PointResult]) -> pd.DataFrame:
    """Return one row per point and load, in the order of the grid, figures under dotted names.

    First the variant, the axes, `seed`, `status` and `message`; then the figures of the load
    point, the ceilings, and what each pool's memory holds. A point without a result is one row.
    """
    spelled = {axis.name: _spelled(axis) for axis in plan.axes}
    rows = []
    for result in results:
        head: dict[str, Any] = {"variant": result.point.variant} if plan.variants else {}
        head |= {name: spell(result.point.over[name]) for name, spell in spelled.items()}
        head |= {"seed": result.point.seed, "status": str(result.status), "message": result.message}
        for figures in _figures(result.report):
            # An axis may have the name of a figure, such as slo.ttft_p95: both are kept.
            rows.append(
                head
                | {
                    f"result.{name}" if name in head else name: value
                    for name, value in figures.items()
                }
            )
    columns = dict.fromkeys(name for row in rows for name in row)
    return pd.DataFrame({name: _column([row.get(name) for row in rows]) for name in columns})


def report_of(
    plan: SweepPlan, results: Sequence[PointResult], frame: pd.DataFrame
) -> dict[str, Any]:
    """Return the JSON object of the `sweep` verb; `rows` are those of the frame, nulls left out."""
    sources = [result.report["provenance"] for result in results if result.report]
    seeds = list(dict.fromkeys(point.seed for point in plan.points))
    assumptions = [text for source in sources for text in source["assumptions"]]
    return {
        "scenario": plan.base.resolved(),
        "provenance": {
            **{name: _joined(source[name] for source in sources) for name in _PROVENANCE},
            "version": version("tonnage"),
            "seed": seeds[0],
            "assumptions": list(dict.fromkeys(assumptions)),
        },
        "over": {axis.name: list(axis.values) for axis in plan.axes},
        "variants": list(plan.variants),
        "seeds": seeds,
        "rows": [
            {name: value for name, value in row.items() if value is not None and value == value}
            for row in frame.astype(object).where(frame.notna(), None).to_dict("records")
        ],
    }


def _joined(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(texts))


def _spelled(axis: Axis) -> Callable[[Any], Any]:
    """Keep numbers, texts or truth values as they are; a column that mixes them is all text."""
    kinds = {"number" if type(v) in (int, float) else type(v).__name__ for v in axis.values}
    return (lambda value: value) if kinds in ({"number"}, {"str"}, {"bool"}) else value_text


def _figures(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the figures of every load point; a report without one gives one empty row."""
    memory = {
        role: {name: pool[name] for name in _MEMORY_FIGURES if name in pool}
        for role, pool in report.get("memory", {}).items()
    }
    common = flattened({"ceilings": report.get("ceilings", {}), "memory": memory})
    rows = [flattened(point) | common for point in report.get("points", [])]
    return [_without_pairs(row) for row in rows] or [{}]


def _without_pairs(row: Mapping[str, Any]) -> dict[str, Any]:
    """Replace an interval by its two ends, and any other list by its text."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if not isinstance(value, list):
            flat[name] = value
        elif name.startswith("intervals.") and len(value) == 2:
            flat[f"{name}.low"], flat[f"{name}.high"] = value
        else:
            flat[name] = json.dumps(value)
    return flat


def _column(values: list[Any]) -> pd.Series[Any]:
    """Return a column whose type follows from its values alone; whole numbers stay whole."""
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int}:
        return pd.Series(values, dtype="Int64" if None in values else "int64")
    if kinds <= {int, float}:  # or nothing: a figure that no row has
        return pd.Series(values, dtype="float64")
    if kinds == {bool}:
        return pd.Series(values, dtype="boolean" if None in values else "bool")
    return pd.Series([None if value is None else str(value) for value in values], dtype="str")
