"""The dashboard: the file that Streamlit runs. `tonnage dashboard` starts it."""

from __future__ import annotations

import streamlit as st

from tonnage.dashboard import state
from tonnage.dashboard.views import (
    calibration,
    compare,
    explore,
    integrity,
    memory,
    plan,
    throughput,
    timeline,
    validate,
)

_PAGES = {
    "Scenario": (
        (explore.page, "Explore", "tune"),
        (memory.page, "Memory", "memory"),
        (throughput.page, "Throughput", "speed"),
        (timeline.page, "Timeline", "timeline"),
        (compare.page, "Compare", "compare_arrows"),
    ),
    "Decide": (
        (plan.page, "Plan", "savings"),
        (integrity.page, "Integrity", "verified_user"),
    ),
    "Trust": (
        (calibration.page, "Calibration", "straighten"),
        (validate.page, "Validate", "fact_check"),
    ),
}

# Less air above, and a scenario in letters of one width whose lines are not folded.
_STYLE = """
.stMainBlockContainer { padding: 3rem 2.5rem 3rem 2.5rem; }
.stTextArea textarea { font-family: monospace; font-size: 0.85rem; white-space: pre; }
"""


def main() -> None:
    """Draw the page that was asked for."""
    st.set_page_config(page_title="Tonnage", page_icon=":material/weight:", layout="wide")
    st.html(f"<style>{_STYLE}</style>")
    state.runs()  # the worker starts before somebody waits for it
    pages = {
        section: [
            st.Page(draw, title=title, icon=f":material/{icon}:", url_path=title.lower())
            for draw, title, icon in entries
        ]
        for section, entries in _PAGES.items()
    }
    st.navigation(pages, expanded=True).run()


if __name__ == "__main__":
    main()
