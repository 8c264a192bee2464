"""Plan: the cheapest fleet that meets the objectives, the front around it, and what starts it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from tonnage.dashboard import charts, parts, state
from tonnage.dashboard.plan_frames import front_frame, margins_figure, margins_frame, pools_frame
from tonnage.dashboard.work import planned
from tonnage.sim.domain import BadInputError, TonnageError
from tonnage.sim.export.formats import FORMATS

if TYPE_CHECKING:
    from tonnage.planner import PlanReport


def page() -> None:
    """Draw the page."""
    parts.head("Plan", "Search the cheapest fleet that meets the objectives of the scenario.")
    scenario = parts.opened()
    if not scenario.slo:
        st.info(
            "A plan needs objectives: set TTFT or TPOT on Explore, or write "
            "`slo: {ttft_p95: 5s, tpot_p95: 50ms}` into the YAML."
        )
        return
    asked = ", ".join(f"{name} {limit_s:g} s" for name, limit_s in scenario.slo.items())
    st.markdown(f"Objectives: {asked}. The section `plan` of the YAML says what may be tried.")
    compare = st.toggle(
        "Simulate other formats too",
        key="compare formats",
        help="For their margins; it takes longer.",
    )
    key = state.key_of("plan", scenario, compare)
    report = parts.result_of(
        "Search",
        key,
        lambda: state.runs().submit(
            state.session(), key, planned, state.text(), state.folder(), compare
        ),
        empty="Press Search: thousands of fleets are screened, the cheapest are simulated; it "
        "takes half a minute or more.",
    )
    if report is not None:
        _report(report)


def _report(report: PlanReport) -> None:
    plans = {"best": report.best, "launchable": report.launchable}
    known = {name: one for name, one in plans.items() if one is not None}
    which = str(
        st.segmented_control("Fleet", list(known), default="best", required=True, key="which plan")
    )
    plan = known.get(which, report.best)
    if report.launchable is None:
        st.warning("No fleet that stock engines start meets the objectives; the best needs more.")
    figures = plan.figures
    columns = st.columns(4)
    columns[0].metric("USD per hour", f"{figures.usd_per_hour:,.2f}")
    columns[1].metric("GPUs", sum(pool.gpus for pool in plan.pools))
    columns[2].metric("output tokens/s", f"{figures.output_tokens_per_s.value:,.0f}")
    cost = figures.usd_per_million_output_tokens.value
    columns[3].metric("USD per M output tokens", f"{cost:,.2f}")
    st.markdown(f"Load: {report.load}. {report.candidates:,} fleets were compared.")
    parts.table(pools_frame(plan), f"plan-{which}", "Pools of the plan")
    objectives = pd.DataFrame(
        [
            {"objective": one.name, "limit, s": one.limit_s, "reached, s": one.reached.value}
            | {"bound of the interval, s": one.reached.upper, "met": one.met}
            for one in figures.objectives
        ]
    )
    parts.table(objectives, "objectives", "Objectives and what was reached")
    _exports(report, which)
    _front(report)
    margins = margins_frame(report)
    if not margins.empty:
        st.subheader("What another format would cost", anchor=False)
        if margins["USD per hour more"].fillna(0.0).any():
            figure = margins_figure(margins)
            parts.chart(figure, "margins", "Cost of other formats", margins)
        parts.table(margins, "margins", "Cost of other formats")
    with st.expander(f"Why others lost ({len(report.rejected)})"):
        rejected = pd.DataFrame([asdict(one) for one in report.rejected])
        parts.table(rejected, "rejected", "Fleets that lost, and why")


def _front(report: PlanReport) -> None:
    from tonnage.plan_chart import front_figure

    st.subheader("Front", anchor=False)
    figure = go.Figure(front_figure(report))
    legend = {"orientation": "h", "y": -0.25}
    figure.update_layout(title=None, height=400, legend=legend, margin={"t": 40, "b": 40})
    shades = (charts.COLOURS[0], charts.COLOURS[0], charts.GREY, charts.GREY)
    for trace, shade in zip(
        figure.data, (*shades, charts.COLOURS[3], charts.COLOURS[3]), strict=False
    ):
        trace.marker.color = shade
    parts.chart(figure, "front", "Pareto front of the fleets", front_frame(report))


def _exports(report: PlanReport, which: str) -> None:
    """Offer the plan as JSON and in every format that an engine or a reader takes."""
    import json

    from tonnage.output import plain
    from tonnage.plan_export import export

    st.subheader("Take it away", anchor=False)
    columns = st.columns(4)
    text = json.dumps(plain(report.to_dict()), indent=2)
    columns[0].download_button(
        "plan.json", text, file_name="plan.json", key="plan json", on_click="ignore"
    )
    notes = []
    for index, name in enumerate(FORMATS, start=1):
        place = columns[index % 4]
        try:
            made = export(report, name, which="best" if which == "best" else "launchable")
        except (BadInputError, TonnageError) as error:
            place.button(name, disabled=True, key=f"export {name}", help=str(error))
            notes.append(f"{name}: {error}")
            continue
        place.download_button(
            name,
            made.text,
            file_name=made.file_name,
            key=f"export {name}",
            help="; ".join(made.remarks) or None,
            on_click="ignore",
        )
    if notes:
        st.caption("Not to be had: " + "; ".join(notes))
