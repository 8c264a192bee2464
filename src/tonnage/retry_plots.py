"""What clients sent and what they were served with, over time: one page that needs nothing else."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from tonnage.output import point_stem, whole_file, write_text
from tonnage.sim.domain import FloatArray
from tonnage.sim.results.attempts import AttemptLog, OutageLog

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from tonnage.api import SimulationReport

_BINS = 75
_STEPS_S = (0.1, 0.2, 0.5, 1.0, 2.0, 4.0, 5.0, 10.0, 20.0, 60.0, 300.0, 600.0, 3600.0)


@dataclass(frozen=True, slots=True)
class RetrySeries:
    """Rates per second `[bins]` of one run, by the end of each bin in seconds.

    `sent`: attempts, those that a breaker refused left out; `asked`: requests, with their first
    attempt; `served`: requests, by their last token.
    """

    time_s: FloatArray
    sent_per_s: FloatArray
    asked_per_s: FloatArray
    served_per_s: FloatArray


def retry_series(attempts: AttemptLog, records: pd.DataFrame) -> RetrySeries:
    """Count attempts, requests and answers in bins of equal length, the last one left out if cut.

    `records`: of the same run.
    """
    starts_s, asked_s = attempts.start_s(), records["arrival_s"].to_numpy()
    served_s = records["finish_s"].dropna().to_numpy()
    span_s = max(float(part.max(initial=0.0)) for part in (starts_s, asked_s, served_s))
    step_s = next((step for step in _STEPS_S if span_s <= step * _BINS), span_s / _BINS)
    edges: FloatArray = np.arange(0.0, span_s + step_s, step_s)
    rates = [np.histogram(part, edges)[0] / step_s for part in (starts_s, asked_s, served_s)]
    return RetrySeries(edges[1:], *rates)


def write_retries(folder: Path, reports: Mapping[str, SimulationReport]) -> Path | None:
    """Write attempts*.parquet and retries.html, where clients try again or something goes wrong.

    Returns the page; None where there is nothing to show.
    """
    shown = list(_shown(reports))
    if not shown:
        return None
    for variant, point, attempts, _ in shown:
        stem = point_stem("attempts", variant, point.figures)
        with whole_file(folder / f"{stem}.parquet") as file:
            attempts.frame().to_parquet(file, index=False)
    page = folder / "retries.html"
    write_text(page, retries_page(reports))
    return page


def _shown(
    reports: Mapping[str, SimulationReport],
) -> Iterator[tuple[str, Any, AttemptLog, OutageLog]]:
    for variant, report in reports.items():
        for point in report.points:
            if point.attempts is not None and point.outages is not None:
                yield variant, point, point.attempts, point.outages


def retries_page(reports: Mapping[str, SimulationReport]) -> str:
    """Return the page: a plot for every variant and point."""
    scenario = next(iter(reports.values())).memory.scenario
    title = html.escape(f"{scenario.name}: attempts and goodput")
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
        "<style>body{font:16px system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}</style>",
        f"</head><body><h1>{title}</h1><p>{html.escape(scenario.description)}</p>",
    ]
    for number, (variant, point, attempts, outages) in enumerate(_shown(reports)):
        name = point_stem("", variant, point.figures).replace("_", " ") or scenario.name
        plot = retries_figure(retry_series(attempts, _first_run(point.records)), outages)
        parts.append(f"<h2>{html.escape(name)}</h2><p>{html.escape(_caption(point.figures))}</p>")
        parts.append(
            plot.to_html(full_html=False, include_plotlyjs=number == 0, div_id=f"plot-{number}")
        )
    return "\n".join([*parts, "</body></html>", ""])


def _first_run(records: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the first of several seeds, which is the one whose attempts are kept."""
    if "seed" not in records:
        return records
    first: pd.DataFrame = records[records["seed"] == records["seed"].iloc[0]]
    return first


def _caption(figures: Mapping[str, Any]) -> str:
    requests, attempts = figures["requests"], figures["attempts"]
    return (
        f"{requests['completed']:,.0f} requests served, "
        f"{requests['timed_out'] + requests['aborted'] + requests['rejected']:,.0f} not; "
        f"{attempts['made']:,.0f} attempts, of which a breaker refused {attempts['refused']:,.0f}."
    )


def retries_figure(series: RetrySeries, outages: OutageLog) -> go.Figure:
    """Return attempts, requests and answers per second; what went wrong is shaded."""
    import plotly.graph_objects as go

    figure = go.Figure()
    lines = (
        ("attempts sent", series.sent_per_s, "#d62728", "solid"),
        ("requests (first attempts)", series.asked_per_s, "#7f7f7f", "dot"),
        ("requests served", series.served_per_s, "#2ca02c", "solid"),
    )
    for name, rates, colour, dash in lines:
        line = {"color": colour, "dash": dash, "shape": "vh"}
        figure.add_scatter(x=series.time_s, y=rates, name=name, mode="lines", line=line)
    for begins_s, ends_s in _spans_s(outages, float(series.time_s[-1])):
        figure.add_vrect(x0=begins_s, x1=ends_s, fillcolor="#ff7f0e", opacity=0.15, line_width=0)
    figure.update_layout(
        template="plotly_white",
        margin={"l": 70, "r": 20, "t": 20, "b": 50},
        height=340,
        legend={"orientation": "h", "y": 1.1},
        xaxis_title="seconds",
        yaxis_title="per second",
        yaxis_rangemode="tozero",
    )
    return figure


def _spans_s(outages: OutageLog, end_s: float) -> Iterator[tuple[float, float]]:
    for crash in outages.crashes:
        yield crash.time_s, end_s if crash.back_s is None else min(crash.back_s, end_s)
    yield from outages.slow_links_s
