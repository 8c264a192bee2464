"""What pages are made of: their head, what is under way, charts and tables with their downloads."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from tonnage.dashboard import state
from tonnage.dashboard.frames import describe
from tonnage.dashboard.reading import MOST_UPLOAD_BYTES, upload_text
from tonnage.dashboard.runs import Job
from tonnage.scenarios.catalogue import scenario_names
from tonnage.scenarios.schema import Scenario
from tonnage.sim.domain import BadInputError, TonnageError

_POLL_S = 0.4
_OWN = "(changed)"


def head(title: str, about: str) -> None:
    """Draw the title of a page and the choice of a scenario beside the pages."""
    state.begin()
    st.title(title, anchor=False)
    st.caption(about)
    with st.sidebar:
        _choose_scenario()
    notice = st.session_state.pop("notice", None)
    if notice:
        st.warning(notice)


def opened() -> Scenario:
    """Return the scenario; where its text says none, tell why and draw no more of the page."""
    found = state.scenario()
    if found is None:
        st.error(state.problem())
        st.info("Mend the YAML on the page Explore, choose a shipped scenario, or undo.")
        st.button("Undo the last change", on_click=state.undo, disabled=not _can_undo())
        st.stop()
    st.markdown(f"**{found.name}**: {describe(found)}")
    return found


def _can_undo() -> bool:
    return bool(st.session_state.get("undo"))


def _choose_scenario() -> None:
    now = state.shipped_name()
    options = [*scenario_names(), *([] if now else [_OWN])]
    st.session_state["shipped"] = now or _OWN
    st.selectbox("Scenario", options, key="shipped", on_change=_take_shipped)
    with st.popover("Open a file", width="stretch"):
        st.file_uploader(
            "A scenario in YAML",
            ["yaml", "yml"],
            key="scenario_file",
            max_upload_size=1,
            on_change=_take_file,
        )
    st.download_button(
        "Download YAML",
        state.text(),
        file_name="scenario.yaml",
        mime="application/yaml",
        on_click="ignore",
        width="stretch",
    )
    st.button("Undo", on_click=state.undo, disabled=not _can_undo(), width="stretch")
    st.caption("The address of this page holds the scenario: send it to share.")


def _take_shipped() -> None:
    name = st.session_state["shipped"]
    if name != _OWN:
        state.set_text(state.shipped_text(name))


def _take_file() -> None:
    file = st.session_state["scenario_file"]
    if file is None:
        return
    try:
        state.set_text(upload_text(file.name, file.getvalue()))
    except BadInputError as error:
        st.session_state["notice"] = str(error)


def uploaded(label: str, kinds: list[str], key: str) -> str | None:
    """Return the text of a file that somebody uploads; None until then, or where it is refused."""
    most = MOST_UPLOAD_BYTES // 10**6
    file = st.file_uploader(label, kinds, key=key, max_upload_size=most)
    if file is None:
        return None
    try:
        return upload_text(file.name, file.getvalue())
    except BadInputError as error:
        st.error(str(error))
        return None


# --- work ---------------------------------------------------------------------------------------


def result_of(
    name: str,
    key: str,
    submit: Callable[[], Job],
    *,
    empty: str,
    before: str | None = None,
) -> Any:
    """Return what the worker made of `key`; until then draw the button, the progress or the error.

    `name`: of the button; `empty`: what to say where nothing was asked for. None: not there yet.
    """
    job = state.runs().get(key)
    asked = st.button(
        name,
        type="primary",
        key=f"ask {name}",
        disabled=job is not None and job.state in ("waiting", "running", "done"),
        help="It is done: change the scenario to run another." if _done(job) else before,
    )
    if asked:
        try:
            submit()
        except TonnageError as error:
            st.error(str(error))
            return None
        st.rerun()  # so that the button is no longer one to press
    if job is None:
        st.info(empty)
        return None
    if not job.ended:
        _watch(job)
        return None
    if job.state == "failed":
        st.error(str(job.error))
        return None
    if job.state == "cancelled":
        st.info(f"Cancelled. {empty}")
        return None
    return job.result


def _done(job: Job | None) -> bool:
    return job is not None and job.state == "done"


@st.fragment(run_every=_POLL_S)
def _watch(job: Job) -> None:
    """Show how far a job is until it ends, with a way to stop it."""
    if job.ended:
        st.rerun()
    if job.state == "waiting":
        ahead = state.runs().ahead(job)
        text = f"Waiting: {ahead} before this one" if ahead else "Waiting: the worker is starting"
        st.progress(0.0, text)
    else:
        st.progress(min(max(job.share, 0.0), 1.0), job.text or "Starting")
    if st.button("Cancel", key=f"cancel {job.key}"):
        state.runs().cancel(state.session(), job)
        st.rerun()


# --- charts and tables --------------------------------------------------------------------------


def chart(figure: go.Figure, name: str, alt: str, frame: pd.DataFrame | None = None) -> None:
    """Draw a figure in the theme of the reader, with its downloads."""
    figure.layout.template = "streamlit"
    st.plotly_chart(figure, key=f"chart {name}", alt=alt, config={"displaylogo": False})
    downloads(name, frame, figure)


def table(frame: pd.DataFrame, name: str, alt: str, **options: Any) -> None:
    """Draw a table with its downloads."""
    numbers = frame.select_dtypes("number").columns
    columns = {one: st.column_config.NumberColumn(format="localized") for one in numbers}
    st.dataframe(
        frame,
        hide_index=True,
        alt=alt,
        key=f"table {name}",
        column_config=columns,
        placeholder="",
        **options,
    )
    downloads(f"{name}-table", frame)


def downloads(
    name: str,
    frame: pd.DataFrame | None,
    figure: go.Figure | None = None,
    label: str = "Download",
) -> None:
    """Offer a table as CSV and JSON, a chart as a page and as JSON."""
    with st.popover(label, icon=":material/download:", type="tertiary", key=f"get {name}"):
        if frame is not None:
            _button(name, "CSV", lambda: frame.to_csv(index=False), "csv", "text/csv")
            _button(name, "JSON", lambda: _rows(frame), "json", "application/json")
        if figure is not None:
            _button(name, "HTML", lambda: _page(figure), "html", "text/html")
            kind = "application/json"
            _button(name, "Chart as JSON", lambda: str(figure.to_json()), "chart.json", kind)


def _button(name: str, label: str, make: Callable[[], str], suffix: str, mime: str) -> None:
    st.download_button(
        label,
        make,
        file_name=f"{name}.{suffix}",
        mime=mime,
        key=f"{name} {suffix}",
        on_click="ignore",
    )


def _rows(frame: pd.DataFrame) -> str:
    return json.dumps(json.loads(frame.to_json(orient="records")), indent=2)


def _page(figure: go.Figure) -> str:
    figure.layout.template = "plotly_white"
    return str(figure.to_html(include_plotlyjs=True, full_html=True))
