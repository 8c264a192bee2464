"""The dashboard: pages of Streamlit over functions that are tested without it."""

from __future__ import annotations

from pathlib import Path


def app_path() -> Path:
    """Return the file that Streamlit runs."""
    return Path(__file__).resolve().parent / "app.py"
