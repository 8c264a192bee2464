"""Capacity planner for serving large language models: what fits, how fast, at what cost."""

from __future__ import annotations

from typing import Any

__all__ = ["load_scenario", "memory", "simulate", "sweep"]


def __getattr__(name: str) -> Any:
    """Import a verb when it is first used, so that `tonnage --help` stays quick."""
    if name in ("memory", "simulate"):
        from tonnage import api

        return getattr(api, name)
    if name == "sweep":
        from tonnage.sweep_run import sweep

        return sweep
    if name == "load_scenario":
        from tonnage.scenarios.load import load_scenario

        return load_scenario
    raise AttributeError(f"module 'tonnage' has no attribute {name!r}")
