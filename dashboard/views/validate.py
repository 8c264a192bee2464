"""Validate: upload what was measured, and see how far predictions are from it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import pandas as pd
import streamlit as st

from tonnage.dashboard import charts, frames, parts, state
from tonnage.dashboard.work import validated

_KINDS = {
    "latency": "Latency: a CSV with the columns of serving_latency.csv",
    "kv": "KV capacity: a CSV with the columns of kv_capacity.csv",
}
_FIGURES = {
    "latency": (("tpot", ", s"), ("ttft", ", s"), ("throughput", ", tokens/s")),
    "kv": (("kv", " (tokens, bytes or requests)"),),
}
_GROUPS = {"latency": "model", "kv": "attention"}


def page() -> None:
    """Draw the page."""
    parts.head("Validate", "Measured results beside what is predicted for the same deployments.")
    kind = str(
        st.segmented_control(
            "What was measured", list(_KINDS), default="latency", required=True, key="kind"
        )
    )
    content = parts.uploaded(_KINDS[kind], ["csv"], f"upload {kind}")
    if content is None:
        st.info("Upload a file: docs/validation.md says which columns it has.")
        return
    digest = hashlib.sha256(content.encode()).hexdigest()
    key = f"validate {kind} {digest}"
    found = parts.result_of(
        "Predict",
        key,
        lambda: state.runs().submit(state.session(), key, validated, kind, content),
        empty="Press Predict: every row is predicted from its own deployment.",
    )
    if found is not None:
        _report(kind, found)


def _report(kind: str, found: Mapping[str, Any]) -> None:
    summary, rows = found["summary"], found["rows"]
    columns = st.columns(3)
    columns[0].metric("Rows", summary["rows"])
    columns[1].metric("Predicted", summary["predicted"])
    columns[2].metric("Refused", summary["refused"])
    for name, unit in _FIGURES[kind]:
        frame = frames.validated_frame(rows, name, _GROUPS[kind])
        if frame.empty:
            continue
        median = summary.get(f"{name}_median_abs_error")
        told = "" if median is None else f": median error {median:.1%}"
        st.subheader(f"{name}{told}", anchor=False)
        figure = charts.agreement_figure(frame, name, unit)
        parts.chart(figure, f"validate-{name}", f"Predicted against measured {name}", frame)
    refused = pd.DataFrame([one for one in rows if one.get("refused")])
    if not refused.empty:
        with st.expander(f"Refused rows ({len(refused)})"):
            parts.table(refused, "refused", "Rows that are not predicted, and why")
