"""The tables of the pages, from the figures of reports; a column says its unit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

import pandas as pd
import yaml

from tonnage.scenarios.schema import Scenario
from tonnage.sim.domain import BadInputError

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Curve:
    """One series over the load; `low` and `high` are its interval."""

    name: str
    x: list[float]
    y: list[float]
    low: list[float] | None = None
    high: list[float] | None = None
    points_only: bool = False
    dash: str = "solid"
    colour: str | None = None


def load_of(point: Json) -> float | str:
    """Return what a point of the load is called: its users, its rate, or the trace."""
    for name in ("concurrency", "rate_per_s"):
        if point.get(name) is not None:
            value: float = point[name]
            return value
    return "trace"


def load_title(value: object, points: Sequence[Json] = ()) -> str:
    """Return the title of the axis of loads."""
    if points and points[0].get("rate_per_s") is not None and points[0]["concurrency"] is None:
        return "requests per second"
    return "trace" if value == "trace" else "concurrent requests"


def dig(data: Json, path: str) -> Any:
    """Return the value at a dotted path, None where there is none."""
    place: Any = data
    for key in path.split("."):
        if not isinstance(place, Mapping) or key not in place:
            return None
        place = place[key]
    return place


_POINT_COLUMNS = (
    ("output tokens/s", "throughput.output_tokens_per_s", 1.0),
    ("per GPU", "throughput.output_tokens_per_s_per_gpu", 1.0),
    ("TTFT p50, s", "latency.ttft_s.p50", 1.0),
    ("TTFT p95, s", "latency.ttft_s.p95", 1.0),
    ("TPOT p50, ms", "latency.tpot_s.p50", 1e3),
    ("TPOT p95, ms", "latency.tpot_s.p95", 1e3),
    ("e2e p95, s", "latency.e2e_s.p95", 1.0),
    ("objectives met, %", "slo.attainment", 100.0),
    ("goodput, tokens/s", "slo.goodput_output_tokens_per_s", 1.0),
    ("prefix hits, %", "cache.input_token_hit_rate", 100.0),
    ("USD per M output tokens", "cost.usd_per_million_output_tokens", 1.0),
    ("completed", "requests.completed", 1.0),
    ("timed out", "requests.timed_out", 1.0),
    ("aborted", "requests.aborted", 1.0),
)


def points_frame(points: Sequence[Json]) -> pd.DataFrame:
    """Return a row per point; columns that no point has are left out."""
    rows = [
        {
            "load": load_of(point),
            **{
                title: None if (value := dig(point, path)) is None else value * factor
                for title, path, factor in _POINT_COLUMNS
            },
        }
        for point in points
    ]
    return pd.DataFrame(rows).dropna(axis="columns", how="all")


def curve_of(points: Sequence[Json], path: str, name: str, factor: float = 1.0) -> Curve | None:
    """Return a figure over the load with its interval; None where no point has it."""
    told = [(load_of(one), dig(one, path), one) for one in points]
    known = [
        (float(load), float(y), one)
        for load, y, one in told
        if isinstance(y, int | float) and isinstance(load, int | float)
    ]
    if not known:
        return None
    intervals = [one.get("intervals", {}).get(path) for _, _, one in known]
    low = high = None
    if all(intervals):
        low = [one[0] * factor for one in intervals]
        high = [one[1] * factor for one in intervals]
    x, y = [load for load, _, _ in known], [value * factor for _, value, _ in known]
    return Curve(name, x, y, low, high)


@cache
def _published() -> dict[str, dict[str, dict[int, float]]]:
    text = resources.files("tonnage.dashboard").joinpath("published.yaml").read_text("utf-8")
    data: dict[str, dict[str, dict[int, float]]] = yaml.safe_load(text)
    return data


def published_curve(scenario_name: str) -> Curve | None:
    """Return the published output rates of a shipped scenario by concurrent requests."""
    found = _published().get(scenario_name)
    if found is None:
        return None
    rates = found["output_tokens_per_s"]
    x, y = [float(one) for one in rates], [float(one) for one in rates.values()]
    return Curve("published", x, y, points_only=True, colour="#D55E00")


def executed_points(text: str) -> list[dict[str, Any]]:
    """Return the executed points of a report of `tonnage execute`; BadInputError for another."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise BadInputError("report: not JSON; write it with tonnage execute --json") from error
    points = data.get("executed") if isinstance(data, dict) else None
    if not isinstance(points, list) or not all(isinstance(one, dict) for one in points):
        raise BadInputError(
            "report: holds no executed points; write it with tonnage execute --json, of a scenario "
            "without variants"
        )
    return [one for one in points if "concurrency" in one or "rate_per_s" in one]


def executed_curve(points: Sequence[Json], path: str, factor: float = 1.0) -> Curve | None:
    """Return a figure of executed points, to be drawn beside what is predicted."""
    found = curve_of([{**one, "intervals": {}} for one in points], path, "executed", factor)
    return None if found is None else replace(found, points_only=True, colour="#009E73")


def layout_text(scenario: Json) -> str:
    """Return the pools of a resolved scenario in one line: `decode 2 x tp 8, fp8_e4m3 KV`."""
    return "; ".join(_pool_text(role, pool) for role, pool in scenario["pools"].items() if pool)


def _pool_text(role: str, pool: Json) -> str:
    ways = [f"{name} {pool[name]}" for name in ("tp", "pp", "ep", "attention_dp", "dcp")]
    shown = [one for one in ways if one.startswith("tp") or not one.endswith(" 1")]
    return f"{role} {pool['instances']} x {' '.join(shown)}, {pool['weights']}, {pool['kv']} KV"


def pareto_rows(runs: Mapping[str, Json]) -> pd.DataFrame:
    """Return a row per point of runs that has both speeds, and whether any other beats it."""
    rows = []
    for name, report in runs.items():
        for point in report["points"]:
            tpot_s = dig(point, "latency.tpot_s.mean")
            per_gpu = dig(point, "throughput.output_tokens_per_s_per_gpu")
            if tpot_s and per_gpu:
                hover = f"{name}, load {load_of(point)}<br>{layout_text(report['scenario'])}"
                rows.append({"run": name, "per_user": 1 / tpot_s, "per_gpu": per_gpu})
                rows[-1]["hover"] = hover
    frame = pd.DataFrame(rows, columns=["run", "per_user", "per_gpu", "hover"])
    frame["on_front"] = [
        not bool(
            (
                (frame["per_user"] >= one.per_user)
                & (frame["per_gpu"] >= one.per_gpu)
                & ((frame["per_user"] > one.per_user) | (frame["per_gpu"] > one.per_gpu))
            ).any()
        )
        for one in frame.itertuples()
    ]
    return frame


_MEMORY_ROWS = (
    ("GPUs", "gpus", 1.0),
    ("weights per GPU, GiB", "weights_bytes_per_gpu", 2.0**-30),
    ("checkpoint / GPUs, GiB", "checkpoint_bytes_per_gpu", 2.0**-30),
    ("KV pool per GPU, GiB", "kv_bytes_per_gpu", 2.0**-30),
    ("KV bytes per token and GPU", "kv_bytes_per_token", 1.0),
    ("KV tokens of an instance", "kv_tokens", 1.0),
    ("longest request, tokens", "longest_request_tokens", 1.0),
    ("tokens of a request", "tokens_per_request", 1.0),
    ("requests at once", "max_concurrency", 1.0),
)


def memory_frame(pools: Mapping[str, Json]) -> pd.DataFrame:
    """Return a row per figure and a column per pool."""
    rows = [
        {
            "figure": title,
            **{role: _whole(pool[key] * factor) for role, pool in pools.items()},
        }
        for title, key, factor in _MEMORY_ROWS
    ]
    return pd.DataFrame(rows)


def _whole(value: float) -> float:
    return round(value) if abs(value) >= 1000 or float(value).is_integer() else round(value, 2)


def compared_frame(runs: Mapping[str, Json]) -> pd.DataFrame:
    """Return a row per run and load, with the change from the first run in percent."""
    frames = []
    for name, report in runs.items():
        frame = points_frame(report["points"])
        frame.insert(0, "run", name)
        frames.append(frame)
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def changes_frame(compared: pd.DataFrame) -> pd.DataFrame:
    """Return the change of every figure from the first run at the same load, in percent."""
    if compared.empty:
        return compared
    first = compared[compared["run"] == compared["run"].iloc[0]].set_index("load")
    figures = [name for name in compared.columns if name not in ("run", "load", "completed")]
    rows = []
    for one in compared.to_dict("records"):
        if one["run"] == compared["run"].iloc[0] or one["load"] not in first.index:
            continue
        base = first.loc[one["load"]]
        changes = {name: _change(base[name], one[name]) for name in figures}
        rows.append({"run": one["run"], "load": one["load"], **changes})
    return pd.DataFrame(rows).dropna(axis="columns", how="all")


def _change(base: float, value: float) -> float | None:
    return None if not base or pd.isna(base) or pd.isna(value) else 100.0 * (value / base - 1.0)


def differences_frame(scenarios: Mapping[str, Json]) -> pd.DataFrame:
    """Return the fields in which resolved scenarios differ, a column for each of them."""
    flat = {name: dict(_leaves(scenario)) for name, scenario in scenarios.items()}
    fields = dict.fromkeys(field for one in flat.values() for field in one)
    rows = []
    for field in fields:
        values = [one.get(field) for one in flat.values()]
        if field not in ("name", "description") and any(one != values[0] for one in values):
            shown = {name: str(one.get(field, "-")) for name, one in flat.items()}
            rows.append({"field": field, **shown})
    return pd.DataFrame(rows)


def _leaves(value: object, place: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{place}.{key}" if place else str(key))
    else:
        yield place, value


def matrix_frame(report: Json) -> pd.DataFrame:
    """Return what became of injected faults: a row per check and class, shares with intervals."""
    frame = pd.DataFrame(report["matrix"])
    ends = [one or [None, None] for one in frame.pop("before_interval")]
    frame["before_low"], frame["before_high"] = zip(*ends, strict=True)
    return frame


def overhead_frame(costs: Mapping[str, Json]) -> pd.DataFrame:
    """Return a row per way of watching and kind of step, and one per handoff."""
    rows = []
    for check, told in costs.items():
        places = dict(told["steps"]) | ({"handoff": told["handoff"]} if "handoff" in told else {})
        for place, one in places.items():
            row = {"check": check, "where": place, "added_us": one["seconds"] * 1e6}
            row |= {
                f"{end}_us": one["interval_s"][n] * 1e6 for n, end in enumerate(("low", "high"))
            }
            share = one.get("share")
            rows.append(row | {"share of the step, %": None if share is None else 100.0 * share})
    return pd.DataFrame(rows)


def validated_frame(rows: Sequence[Json], name: str, group: str) -> pd.DataFrame:
    """Return measured and predicted of one figure for the rows that were predicted."""
    known = [one for one in rows if isinstance(one.get(name), Mapping)]
    return pd.DataFrame(
        [
            {
                "id": one["id"],
                "group": one.get(group, ""),
                "measured": one[name]["measured"],
                "predicted": one[name]["predicted"],
                "error, %": one[name]["error"] * 100.0,
            }
            for one in known
        ],
        columns=["id", "group", "measured", "predicted", "error, %"],
    )


def describe(scenario: Scenario) -> str:
    """Return a scenario in one line: model, GPUs, pools."""
    data = scenario.resolved()
    return f"{data['model']} on {data['gpu']}: {layout_text(data)}"


def short(count: float) -> str:
    """Spell a count for a narrow place: 1.37 M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if count >= size:
            return f"{count / (1e3 if unit == 'k' else size):.3g} {unit}"
    return f"{count:,.0f}"
