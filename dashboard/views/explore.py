"""Explore: a scenario as widgets and as YAML, run and read on one page."""

from __future__ import annotations

import streamlit as st

from tonnage.dashboard import charts, fields, frames, parts, state
from tonnage.dashboard.work import RunView
from tonnage.scenarios.schema import Scenario
from tonnage.sim.domain import TonnageError


def page() -> None:
    """Draw the page."""
    parts.head("Explore", "Change the scenario on either side; run it; read what it would do.")
    left, right = st.columns([5, 4], gap="large")
    with right:
        _text()
    scenario = state.scenario()
    with left:
        refused = st.session_state.pop("refused", None)
        if refused:
            st.error(refused)
        if scenario is None:
            st.info("The widgets are here again when the YAML is mended.")
        else:
            _widgets(scenario)
    st.divider()
    if scenario is not None:
        _results(scenario)


def _text() -> None:
    st.session_state["editor"] = state.text()
    st.text_area("Scenario, YAML", key="editor", height=560, on_change=_typed)
    if state.problem():
        st.error(state.problem())
        st.button("Undo the last change", on_click=state.undo, key="undo here")


def _typed() -> None:
    state.set_text(st.session_state["editor"])


def _widgets(scenario: Scenario) -> None:
    deployment, traffic, pools = st.tabs(["Deployment", "Load", "Pools"])
    with deployment:
        fields.deployment_fields(scenario)
    with traffic:
        fields.traffic_fields(scenario)
    with pools:
        fields.pool_fields(scenario)
    _fits(scenario)


def _fits(scenario: Scenario) -> None:
    """Tell at once what fits, or what does not and would."""
    from tonnage import api

    try:
        report = api.memory(scenario)
    except TonnageError as error:
        st.error(str(error))
        return
    for role, pool in report.pools.items():
        first, second, third = st.columns(3)
        first.metric(
            f"{role}: KV tokens",
            frames.short(pool["kv_tokens"]),
            help=f"{pool['kv_tokens']:,} of one instance",
        )
        second.metric(
            f"{role}: requests",
            f"{pool['max_concurrency']:,}",
            help=f"of {pool['tokens_per_request']:,} tokens, at once in one instance",
        )
        weights_gib = pool["weights_bytes_per_gpu"] / 2**30
        third.metric(f"{role}: weights, GiB", f"{weights_gib:.1f}", help="on each GPU")


def _results(scenario: Scenario) -> None:
    view = parts.result_of(
        "Run",
        state.run_key(scenario),
        lambda: state.ask_run(scenario, state.text()),
        empty="Press Run to simulate every point of the load.",
    )
    if isinstance(view, RunView):
        state.finished_run(scenario)
        _report(view)


def _report(view: RunView) -> None:
    report = view.report
    points, ceilings = report["points"], report["ceilings"]
    best = max(points, key=lambda one: one["throughput"]["output_tokens_per_s"])
    columns = st.columns(4)
    columns[0].metric("Most output tokens/s", f"{best['throughput']['output_tokens_per_s']:,.0f}")
    columns[1].metric("GPUs", best["gpus"])
    cost = frames.dig(best, "cost.usd_per_million_output_tokens")
    columns[2].metric("USD per M output tokens", "-" if cost is None else f"{cost:,.2f}")
    columns[3].metric("Bound by", ceilings["binds"], help="What ends the load that it can carry.")
    frame = frames.points_frame(points)
    parts.table(frame, "points", "Figures of every point of the load")
    title = frames.load_title(frames.load_of(points[0]), points)
    left, right = st.columns(2)
    rate = frames.curve_of(points, "throughput.output_tokens_per_s", "output")
    if rate is not None:
        with left:
            figure = charts.curve_figure([rate], "output tokens/s", title)
            parts.chart(figure, "rate", "Output rate over the load", frame)
    tails = [
        frames.curve_of(points, f"latency.{name}_s.p95", f"{name.upper()} p95", 1e3)
        for name in ("ttft", "tpot")
    ]
    known = [one for one in tails if one is not None]
    if known:
        with right:
            figure = charts.curve_figure(known, "milliseconds", title, log_y=len(known) > 1)
            parts.chart(figure, "latency", "Latency over the load", frame)
    told = report["provenance"]
    with st.expander("What this rests on"):
        st.markdown(f"Profile **{told['profile']}** ({told['source']}), seed {told['seed']}.")
        st.markdown("\n".join(f"- {line}" for line in told["assumptions"]))
    if any(len(point.records) for point in view.points):
        load = frames.load_of(points[-1])
        records = view.points[-1].records
        parts.downloads("requests", records, label=f"Download every request at load {load}")
