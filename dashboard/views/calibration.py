"""Calibration: the profiles, what they were made from, and how far off they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
import streamlit as st

from tonnage import listing
from tonnage.dashboard import parts
from tonnage.profile_curves import models_of, series_of
from tonnage.profile_report import chosen, operator_figure
from tonnage.profile_tables import header_lines, held_out_text
from tonnage.scenarios.profiles import profile_paths
from tonnage.sim.cost.profile import Profile, load_profile


def page() -> None:
    """Draw the page."""
    parts.head("Calibration", "The kernel timings that predictions rest on, and how far off.")
    known = pd.DataFrame(_profiles())
    if known.empty:
        st.info("There is no profile: run `tonnage calibrate` on a machine with a GPU.")
        return
    names = list(known["name"])
    name = str(st.selectbox("Profile", names, index=_usual(names), key="profile"))
    profile = _profile(name)
    header = profile.header.model_dump(mode="json")
    for line in header_lines(header):
        st.markdown(line)
    with st.expander("Notes"):
        st.markdown("\n".join(f"- {note}" for note in header["notes"]) or "None.")
    errors = errors_frame(header["errors"])
    st.subheader("Error on shapes that were held out whole", anchor=False)
    parts.table(errors, f"errors-{name}", "Held-out errors by operator and format")
    st.subheader("Fit against data", anchor=False)
    by_table: dict[str, list[Any]] = {}
    for one in series_of(profile):
        by_table.setdefault(one.operator.table, []).append(one)
    table = str(st.selectbox("Operator", list(by_table), key=f"operator {name}"))
    residuals = profile.header.residuals.get(table, {})
    figure = operator_figure(chosen(by_table[table]), residuals, models_of(profile))
    figure.update_layout(legend={"orientation": "h", "y": -0.2, "yanchor": "top"}, height=620)
    parts.chart(figure, f"{name}-{table}", "Measured points and predicted lines")
    st.subheader("All profiles", anchor=False)
    parts.table(known, "profiles", "Profiles that have a name")


def errors_frame(errors: Mapping[str, Any]) -> pd.DataFrame:
    """Return a row per operator, format and way of holding out."""
    rows = []
    for operator, formats in errors.items():
        for name, error in formats.items():
            for one in (error, *([error["extrapolation"]] if "extrapolation" in error else [])):
                low, high = one["interval"]
                rows.append(
                    {
                        "operator": operator,
                        "format": name,
                        "held out": held_out_text(one),
                        "rows": one["n"],
                        "median error, %": one["median"] * 100.0,
                        "p90 error, %": one["p90"] * 100.0,
                        "true / predicted": f"{low:.2f} to {high:.2f}",
                    }
                )
    return pd.DataFrame(rows)


def _usual(names: list[str]) -> int:
    return names.index("h200-sxm-sglang") if "h200-sxm-sglang" in names else 0


@st.cache_data(show_spinner="Reading the headers of profiles", ttl=60)
def _profiles() -> list[dict[str, Any]]:
    rows = listing.profiles()
    return [row | {"place": "shipped" if row["place"] == "shipped" else "own"} for row in rows]


@st.cache_resource(show_spinner="Reading the profile", max_entries=4)
def _profile(name: str) -> Profile:
    return load_profile(profile_paths()[name])
