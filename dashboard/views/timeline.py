"""Timeline: what every instance did when; crashes and slow links are marked."""

from __future__ import annotations

import streamlit as st

from tonnage.dashboard import charts, frames, parts, state
from tonnage.dashboard.work import PointView, RunView


def page() -> None:
    """Draw the page."""
    parts.head("Timeline", "KV occupancy, batch and queue of every instance during a run.")
    scenario = parts.opened()
    view = parts.result_of(
        "Run",
        state.run_key(scenario),
        lambda: state.ask_run(scenario, state.text()),
        empty="No run of this scenario yet: press Run, and what every instance did is drawn here.",
    )
    if not isinstance(view, RunView):
        return
    state.finished_run(scenario)
    loads = [str(frames.load_of(point.figures)) for point in view.points]
    chosen = loads[-1]
    if len(loads) > 1:
        control = st.segmented_control(
            "Load", loads, default=loads[-1], required=True, key=f"load {len(loads)}"
        )
        chosen = str(control)
    point = view.points[loads.index(chosen)] if chosen in loads else view.points[-1]
    _draw(point)


def _draw(point: PointView) -> None:
    if point.history.empty:
        st.info("Nothing ran at this load: every request was refused. Explore says why.")
        return
    labels = list(dict.fromkeys(point.history["label"]))
    shown = st.multiselect("Instances", labels, default=labels[:12], key=f"of {'|'.join(labels)}")
    if not shown:
        st.info("Choose an instance to draw.")
        return
    history = point.history[point.history["label"].isin(shown)]
    figure = charts.history_figure(history, outages_of(point))
    parts.chart(figure, "timeline", "KV, batch and queue of every instance", history)
    st.caption("Means over 240 equal parts of the run; `simulate --timeline` writes every step.")
    if point.outages is not None:
        told = point.outages.figures()
        if any(told.values()):
            columns = st.columns(len(told))
            for column, (name, count) in zip(columns, told.items(), strict=True):
                column.metric(name.replace("_", " "), f"{count:,}")


def outages_of(point: PointView) -> list[tuple[float, float, str]]:
    """Return the spans in which something was wrong, and what."""
    if point.outages is None:
        return []
    end_s = float(point.history["end_s"].max())
    crashes = [
        (
            crash.time_s,
            end_s if crash.back_s is None else crash.back_s,
            f"{crash.role} {crash.instance} away",
        )
        for crash in point.outages.crashes
    ]
    return crashes + [(one, two, "slow link") for one, two in point.outages.slow_links_s]
