"""What the worker process does for the pages: each function takes text and returns plain values."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from tonnage.dashboard.reading import read_scenario
from tonnage.sim.domain import BadInputError

if TYPE_CHECKING:
    from tonnage.api import PointReport, SimulationReport
    from tonnage.planner import PlanReport
    from tonnage.retry_plots import RetrySeries
    from tonnage.sim.results.attempts import OutageLog

Progress = Callable[[str, float], None]
_BINS = 240  # of a timeline: what a wide screen shows apart
_MOST_RECORDS = 50_000  # rows that are sent to the page for download


@dataclass(frozen=True, slots=True)
class PointView:
    """One point of a run, ready to draw; `history`: means per instance and bin of time."""

    figures: dict[str, Any]
    history: pd.DataFrame
    records: pd.DataFrame
    retries: RetrySeries | None
    outages: OutageLog | None


@dataclass(frozen=True, slots=True)
class RunView:
    """A simulated scenario as the pages show it; `report` is the object of `simulate --json`."""

    name: str
    text: str
    report: dict[str, Any]
    points: tuple[PointView, ...]


def simulated(text: str, folder: Path, told: Progress) -> RunView:
    """Simulate every point of a scenario, with what every instance did when."""
    from tonnage import api

    scenario = read_scenario(text, folder)
    report = api.simulate(scenario, progress=told, timeline=True)
    points = tuple(_point_view(report, point) for point in report.points)
    return RunView(scenario.name, text, report.to_dict(), points)


def _point_view(report: SimulationReport, point: PointReport) -> PointView:
    from tonnage.retry_plots import retry_series

    retries = None
    if point.attempts is not None and len(point.attempts):
        retries = retry_series(point.attempts, point.records)
    records = point.records.head(_MOST_RECORDS)
    return PointView(point.figures, _history(report, point), records, retries, point.outages)


def _history(report: SimulationReport, point: PointReport) -> pd.DataFrame:
    """Return the means of every instance in bins of equal length."""
    if point.timeline is None or not len(point.timeline):
        return pd.DataFrame()
    span_s = float(point.timeline.columns()["end_s"].max())
    means = point.timeline.averages(span_s / _BINS)
    pages = means["instance"].map(report.capacity_pages)
    means.insert(0, "label", means["instance"].map(report.labels))
    means["kv_share"] = means["used_pages"] / pages
    return means


def planned(text: str, folder: Path, compare: bool, told: Progress) -> PlanReport:
    """Search the cheapest fleet, in this process alone."""
    from tonnage import api

    return api.plan(read_scenario(text, folder), workers=1, compare=compare, progress=told)


def injected(text: str, folder: Path, count: int, told: Progress) -> dict[str, Any]:
    """Inject so many faults of every class: the object of `integrity --json`."""
    from tonnage.integrity_report import IntegritySettings, integrity

    settings = IntegritySettings(injections=count, workers=1)
    return integrity(read_scenario(text, folder), settings, progress=told).to_dict()


def validated(kind: str, content: str, told: Progress) -> dict[str, Any]:
    """Compare an uploaded table of measured results with what is predicted for them."""
    from tonnage.validate_kv import validate_kv
    from tonnage.validate_latency import validate_latency

    told("reading rows", 0.0)
    with tempfile.TemporaryDirectory(prefix="tonnage-") as folder:
        path = Path(folder) / "uploaded.csv"
        path.write_text(content, encoding="utf-8")
        try:
            if kind == "kv":
                return validate_kv(path).to_dict()
            return validate_latency(path, workers=1, progress=told).to_dict()
        except BadInputError as error:  # names the file as its owner knows it
            raise BadInputError(str(error).replace(f"{path}", path.name)) from error
