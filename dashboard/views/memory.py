"""Memory: what lies on a GPU, how many tokens fit, and what other formats would hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
import streamlit as st

from tonnage.dashboard import charts, fields, frames, parts, state
from tonnage.dashboard.what_if import what_if_rows
from tonnage.scenarios.schema import Scenario
from tonnage.sim.domain import TonnageError


def page() -> None:
    """Draw the page."""
    from tonnage import api

    parts.head("Memory", "What lies on every GPU, and what would fit. Nothing is simulated here.")
    scenario = parts.opened()
    refused = st.session_state.pop("refused", None)
    if refused:
        st.error(refused)
    fields.pool_fields(scenario)
    try:
        pools = api.memory(scenario).pools
    except TonnageError as error:
        st.error(str(error))
        st.info("Choose a smaller format or more GPUs above; the table below says what fits.")
    else:
        _fits({str(role): pool for role, pool in pools.items()})
    st.subheader("What if", anchor=False)
    roles = list(scenario.pools.named())
    role = st.segmented_control("Pool", roles, default=roles[-1], required=True, key="what if pool")
    rows = _rows(state.key_of("what if", scenario), str(role), scenario)
    figure = charts.what_if_figure(rows)
    parts.chart(figure, "what-if", "KV tokens under other formats and layouts", rows)
    parts.table(rows.drop(columns=["now"]), "what-if-rows", "What every change would hold")


@st.cache_resource(show_spinner=False, max_entries=128)
def _rows(key: str, role: str, _scenario: Scenario) -> pd.DataFrame:
    return what_if_rows(_scenario, role)


def _fits(pools: Mapping[str, Mapping[str, Any]]) -> None:
    columns = st.columns(2 * len(pools))
    for index, (role, pool) in enumerate(pools.items()):
        columns[2 * index].metric(f"{role}: KV tokens", f"{pool['kv_tokens']:,}")
        columns[2 * index + 1].metric(
            f"{role}: requests at once",
            f"{pool['max_concurrency']:,}",
            help=f"of {pool['tokens_per_request']:,} tokens, in one instance",
        )
    frame = frames.memory_frame(pools)
    left, right = st.columns([3, 2], gap="medium")
    with left:
        alt = "Memory of one GPU of every pool"
        parts.chart(charts.memory_figure(pools), "memory", alt, frame)
    with right:
        parts.table(frame, "memory", "What fits, by pool")
