"""Integrity: what each check catches, what it costs, and what clients that try again do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
import streamlit as st

from tonnage.dashboard import charts, frames, parts, state
from tonnage.dashboard.work import RunView, injected
from tonnage.scenarios.schema import Scenario

_FAULTS = 100


def page() -> None:
    """Draw the page."""
    parts.head("Integrity", "Faults injected into KV pages, what catches them, and at what cost.")
    scenario = parts.opened()
    study, storm = st.tabs(["Checks", "Retry storm"])
    with study:
        _study(scenario)
    with storm:
        _storm(scenario)


def _study(scenario: Scenario) -> None:
    st.markdown(
        "Faults act on the pages of a small copy of these pools, under random traffic of the "
        "scenario's lengths. Shares are of the faults that led to something: caught, or read "
        "wrongly."
    )
    options = [25, 50, 100, 200, 500]
    count = int(st.select_slider("Faults of each class", options, _FAULTS, key="faults"))
    key = state.key_of("inject", scenario, count)
    report = parts.result_of(
        "Inject",
        key,
        lambda: state.runs().submit(
            state.session(), key, injected, state.text(), state.folder(), count
        ),
        empty="Press Inject to see what each check catches, costs, and saves in a year.",
    )
    if report is not None:
        _report(report)


def _report(report: Mapping[str, Any]) -> None:
    from tonnage.integrity_page import heat_map
    from tonnage.integrity_table import YEAR_HEADS, consequence_text, year_cells, year_title

    st.subheader("Coverage", anchor=False)
    frame = frames.matrix_frame(report)
    figure = charts.coverage_figure(heat_map(report))
    parts.chart(figure, "coverage", "Share of faults caught, by class and check", frame)
    if report["impossible"]:
        st.caption(f"Cannot happen in these pools: {', '.join(report['impossible'])}.")
    st.subheader("Overhead", anchor=False)
    costs = frames.overhead_frame(report["costs"])
    parts.chart(charts.overhead_figure(costs), "overhead", "Cost of every check", costs)
    parts.table(costs, "overhead", "Cost of every check")
    st.subheader("A year", anchor=False)
    st.markdown(year_title(report["year"]))
    rows = [year_cells(row) for row in report["year"]["rows"]]
    parts.table(pd.DataFrame(rows, columns=list(YEAR_HEADS)), "year", "A year of the fleet")
    st.caption(consequence_text(report))


def _storm(scenario: Scenario) -> None:
    from tonnage.retry_plots import retries_figure

    if not scenario.outages and not scenario.clients.attempts > 1:
        st.info(
            "Clients of this scenario try once and nothing fails. The shipped scenario "
            "**retry-storm** has both: take it, then press Run."
        )
        st.button("Take retry-storm", on_click=state.set_text, args=(_storm_text(),))
        return
    view = parts.result_of(
        "Run",
        state.run_key(scenario),
        lambda: state.ask_run(scenario, state.text()),
        empty="Press Run to see attempts and answers over time.",
    )
    if not isinstance(view, RunView):
        return
    state.finished_run(scenario)
    for number, point in enumerate(view.points):
        if point.retries is None or point.outages is None:
            continue
        figure = retries_figure(point.retries, point.outages)
        figure = charts.recoloured(figure, (charts.COLOURS[3], charts.GREY, charts.COLOURS[0]))
        frame = pd.DataFrame(
            {
                "until_s": point.retries.time_s,
                "sent_per_s": point.retries.sent_per_s,
                "asked_per_s": point.retries.asked_per_s,
                "served_per_s": point.retries.served_per_s,
            }
        )
        alt = "Attempts, requests and answers per second"
        parts.chart(figure, f"retries-{number}", alt, frame)


def _storm_text() -> str:
    return state.shipped_text("retry-storm")
