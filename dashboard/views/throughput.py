"""Throughput: rates and latencies over the load, published points beside them, and the Pareto."""

from __future__ import annotations

from typing import Any

import pandas as pd
import streamlit as st

from tonnage.dashboard import charts, frames, parts, state
from tonnage.dashboard.work import RunView
from tonnage.sim.domain import BadInputError

_RATES = {
    "all output": "throughput.output_tokens_per_s",
    "per GPU": "throughput.output_tokens_per_s_per_gpu",
    "decode pool, steady": "throughput.decode_output_tokens_per_s",
    "prompts": "throughput.input_tokens_per_s",
}
_LATENCIES = {"TTFT": "ttft_s", "TPOT": "tpot_s", "ITL": "itl_s", "end to end": "e2e_s"}
_QUANTILES = ("mean", "p50", "p90", "p95", "p99")


def page() -> None:
    """Draw the page."""
    parts.head("Throughput", "Rate and latency over the load, with the intervals of predictions.")
    scenario = parts.opened()
    view = parts.result_of(
        "Run",
        state.run_key(scenario),
        lambda: state.ask_run(scenario, state.text()),
        empty="No run of this scenario yet: press Run, and the curves are drawn here.",
    )
    if isinstance(view, RunView):
        state.finished_run(scenario)
        executed = _executed()
        left, right = st.columns(2, gap="large")
        with left:
            _rates(view, executed)
        with right:
            _latencies(view, executed)
    _pareto()


def _executed() -> list[dict[str, Any]]:
    """Return the points of an uploaded report of `execute`, none without one."""
    with st.expander("Put executed points beside them"):
        label = "A report of `tonnage execute SCENARIO --json report.json`"
        text = parts.uploaded(label, ["json"], "executed")
        if text is None:
            return []
        try:
            return frames.executed_points(text)
        except BadInputError as error:
            st.error(str(error))
            return []


def _rates(view: RunView, executed: list[dict[str, Any]]) -> None:
    points = view.report["points"]
    known = [name for name, path in _RATES.items() if frames.dig(points[0], path) is not None]
    default = known[2] if view.report["scenario"]["traffic"]["kind"] == "resident" else known[0]
    which = str(st.selectbox("Rate", known, index=known.index(default)))
    curve = frames.curve_of(points, _RATES[which], "predicted")
    if curve is None:
        st.info("A trace has one point and no curve; the table on Explore has its figures.")
        return
    curves = [curve]
    published = frames.published_curve(view.name)
    if published is not None and which == "decode pool, steady":
        curves.append(published)
    measured = frames.executed_curve(executed, _RATES[which])
    curves += [] if measured is None else [measured]
    title = frames.load_title(frames.load_of(points[0]), points)
    figure = charts.curve_figure(curves, f"tokens/s, {which}", title)
    parts.chart(figure, "rate", "Rate over the load", frames.points_frame(points))
    if published is not None:
        st.caption("Published: engineering posts of Cloudflare, April and August 2026.")


def _latencies(view: RunView, executed: list[dict[str, Any]]) -> None:
    points = view.report["points"]
    has = [
        name
        for name, key in _LATENCIES.items()
        if frames.dig(points[0], f"latency.{key}.p50") is not None
    ]
    which = str(st.selectbox("Latency", has))
    curves = [
        frames.curve_of(points, f"latency.{_LATENCIES[which]}.{quantile}", quantile, 1e3)
        for quantile in _QUANTILES
    ]
    curves.append(frames.executed_curve(executed, f"latency.{_LATENCIES[which]}.p50", 1e3))
    known = [one for one in curves if one is not None]
    title = frames.load_title(frames.load_of(points[0]), points)
    if known:
        figure = charts.curve_figure(known, f"{which}, milliseconds", title)
        parts.chart(figure, "latency", "Latency over the load", frames.points_frame(points))


def _pareto() -> None:
    runs = {name: view.report for name, view in state.session_runs().items()}
    st.subheader("Speed for a user against rate per GPU", anchor=False)
    rows = frames.pareto_rows(runs) if runs else pd.DataFrame()
    if rows.empty:
        st.info(
            "Every run of this session is drawn here: run this scenario, change its layout on "
            "Explore or Memory, and run it again."
        )
        return
    st.caption("Every point of every run of this session; hover to see its layout.")
    parts.chart(charts.pareto_figure(runs), "pareto", "Pareto front of all runs", rows)
