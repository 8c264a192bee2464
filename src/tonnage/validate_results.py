"""`tonnage validate run FILE --scenario S`: what a benchmark client measured, against a scenario.

The scenario says what was served; its load is that of the file: every measured point is simulated
at its own concurrency, or rate, and the figures that both have are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tonnage import api
from tonnage.output import flattened
from tonnage.scenarios.load import load_scenario
from tonnage.scenarios.schema import Scenario
from tonnage.sim.domain import BadInputError
from tonnage.sim.results.other_tools.measured import MeasuredPoint
from tonnage.validation_summary import Figure, ValidatedRow, by_group, summary

# Short names of the figures that are compared, by their place in a point of `simulate`.
_LATENCIES = ("ttft", "tpot", "itl", "e2e")
FIGURES = {
    "throughput": "throughput.output_tokens_per_s",
    **{name: f"latency.{name}_s.mean" for name in _LATENCIES},
    **{
        f"{name}_{statistic}": f"latency.{name}_s.{statistic}"
        for name in _LATENCIES
        for statistic in ("p50", "p90", "p95", "p99")
    },
}
_LENGTHS_AGREE = 0.05


@dataclass(frozen=True, slots=True)
class ResultsValidation:
    """Measured points with their figures in SI, and where the predictions come from."""

    rows: tuple[ValidatedRow, ...]
    provenance: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of `validate run` on a file of results."""
        names = [name for name in FIGURES if any(name in row.figures for row in self.rows)]
        told = summary(self.rows, names)
        told |= {f"by_{key}": by_group(self.rows, names, key) for key in ("model", "gpu", "engine")}
        return {
            "rows": [row.to_dict() for row in self.rows],
            "summary": told,
            "provenance": self.provenance,
        }


def validate_results(
    points: Sequence[MeasuredPoint],
    scenario: str,
    overrides: Sequence[str] = (),
    *,
    progress: api.Progress | None = None,
) -> ResultsValidation:
    """Simulate the scenario at every point's load, and compare; BadInputError for its mistakes."""
    base = load_scenario(scenario, list(overrides))
    kind = base.traffic.kind
    if kind not in ("closed", "poisson", "gamma"):
        problem = f"traffic.kind: {kind} has no load that a client's file could be matched with"
        raise BadInputError(f"{scenario}: {problem}; use closed, poisson or gamma")
    loads = [_load_of(point, closed=kind == "closed") for point in points]
    wanted = list(dict.fromkeys(load for load in loads if isinstance(load, int | float)))
    found, provenance = _predicted(scenario, overrides, wanted, kind == "closed", progress)
    groups = _groups(base)
    rows = tuple(
        _row(number, point, load, found, groups, _lengths_note(base, point))
        for number, (point, load) in enumerate(zip(points, loads, strict=True), start=1)
    )
    return ResultsValidation(rows, provenance)


def _load_of(point: MeasuredPoint, *, closed: bool) -> float | str:
    """Return the load of a point in the scenario's terms, or why it has none."""
    load = point.concurrency if closed else point.rate_per_s
    if load is not None:
        return load
    wanted = "concurrency" if closed else "rate"
    return f"the file states no {wanted} for it, and the scenario's load is one"


def _predicted(
    scenario: str,
    overrides: Sequence[str],
    loads: list[float],
    closed: bool,
    progress: api.Progress | None,
) -> tuple[dict[float, dict[str, Any]], dict[str, Any]]:
    """Return the figures of the scenario at each load, flat, with their intervals."""
    if not loads:
        return {}, {}
    field = "traffic.concurrency" if closed else "traffic.rate_per_s"
    ordered = sorted(loads)
    text = f"{field}=[{', '.join(f'{load:g}' for load in ordered)}]"
    report = api.simulate(load_scenario(scenario, [*overrides, text]), progress=progress)
    found = {}
    for load, point in zip(ordered, report.points, strict=True):
        figures = dict(point.figures)
        intervals = figures.pop("intervals", {})
        found[load] = {"intervals": intervals, **flattened(figures)}
    return found, report.provenance


def _groups(scenario: Scenario) -> dict[str, str]:
    engine = scenario.engine_spec()
    return {
        "model": scenario.model,
        "gpu": scenario.gpu,
        "engine": f"{engine.name} {engine.version}",
    }


def _row(
    number: int,
    point: MeasuredPoint,
    load: float | str,
    found: dict[float, dict[str, Any]],
    groups: dict[str, str],
    note: str | None,
) -> ValidatedRow:
    name = f"{number}: {point.label}"
    groups = {"tool": point.tool, **groups}
    if isinstance(load, str):
        return ValidatedRow(name, groups, refused=load)
    predicted = found[load]
    figures = {}
    for short, place in FIGURES.items():
        measured, value = point.figures.get(place), predicted.get(place)
        if not measured or value is None:
            continue
        low, high = predicted["intervals"].get(place) or (None, None)
        figures[short] = Figure(measured, float(value), low, high)
    notes = [*point.notes, *([note] if note else [])]
    if point.failed:
        notes.append(f"{point.failed} requests failed and are not in the figures")
    return ValidatedRow(name, groups, figures, notes=tuple(notes))


def _lengths_note(scenario: Scenario, point: MeasuredPoint) -> str | None:
    """Return a warning where the file's requests are not those of the scenario."""
    traffic = scenario.traffic_spec()
    pairs = (
        ("prompts", point.input_tokens, traffic.input_tokens.mean()),
        ("answers", point.output_tokens, traffic.output_tokens.mean()),
    )
    off = [
        f"{what} of {measured:,.0f} tokens, the scenario's have {asked:,.0f}"
        for what, measured, asked in pairs
        if measured is not None and abs(measured / asked - 1) > _LENGTHS_AGREE
    ]
    return f"measured with {' and '.join(off)}" if off else None
