"""Compare: two to six runs of this session, or the variants of a scenario, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import streamlit as st

from tonnage.dashboard import charts, frames, parts, state
from tonnage.dashboard.reading import read_variants
from tonnage.dashboard.work import RunView, simulated
from tonnage.scenarios.schema import Scenario
from tonnage.sim.domain import TonnageError

_MOST = 6


def page() -> None:
    """Draw the page."""
    parts.head("Compare", "Runs side by side, and what differs between their scenarios.")
    scenario = parts.opened()
    runs: dict[str, RunView] = dict(state.session_runs())
    if scenario.variants:
        runs |= _variants(scenario)
    if len(runs) < 2:
        st.info(
            "Nothing to compare yet: run two scenarios on Explore, or open one with `variants`, "
            "such as **colocated-vs-disaggregated**."
        )
        return
    names = list(runs)
    chosen = st.multiselect(
        "Two to six runs; the first is the base",
        names,
        default=names[:_MOST],
        max_selections=_MOST,
        key=f"runs {len(names)}",
    )
    if len(chosen) < 2:
        st.info("Choose at least two runs.")
        return
    _compared({name: runs[name] for name in chosen})


def _variants(scenario: Scenario) -> dict[str, RunView]:
    """Return the finished runs of the variants; the others can be asked for."""
    try:
        variants = read_variants(state.text(), state.folder())
    except TonnageError as error:
        st.error(str(error))
        return {}
    found: dict[str, RunView] = {}
    for name, one in list(variants.items())[:_MOST]:
        key = state.key_of("variant", one, name)
        job = state.runs().get(key)
        if job is not None and job.state == "done":
            found[name] = job.result
            continue
        view = parts.result_of(
            f"Run variant: {name}",
            key,
            partial(
                state.runs().submit,
                *(state.session(), key, simulated, variant_text(one), state.folder()),
            ),
            empty=f"Variant {name} has not run yet.",
        )
        if isinstance(view, RunView):
            found[name] = view
    return found


def variant_text(scenario: Scenario) -> str:
    """Return a variant as a text of its own."""
    import yaml

    data = scenario.model_dump(mode="json", exclude_unset=True)
    return yaml.safe_dump(data, sort_keys=False)


def _compared(views: Mapping[str, RunView]) -> None:
    reports = {name: view.report for name, view in views.items()}
    fields = frames.differences_frame({name: one["scenario"] for name, one in reports.items()})
    st.subheader("What differs", anchor=False)
    if fields.empty:
        st.info("The scenarios are the same.")
    else:
        parts.table(fields, "fields", "Fields in which the scenarios differ")
    compared = frames.compared_frame(reports)
    st.subheader("Figures", anchor=False)
    columns = [name for name in compared.columns if name not in ("run", "load")]
    column = str(st.selectbox("Figure", columns, key="figure"))
    points = next(iter(reports.values()))["points"]
    title = frames.load_title(frames.load_of(points[0]), points)
    figure = charts.bars_figure(compared, column, title)
    parts.chart(figure, "compare", f"{column} of every run", compared)
    parts.table(compared, "compare", "Figures of every run")
    changes = frames.changes_frame(compared)
    if not changes.empty:
        base = next(iter(reports))
        st.subheader(f"Change from {base}, %", anchor=False)
        parts.table(changes.round(1), "changes", "Changes from the first run in percent")
