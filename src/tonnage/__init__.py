"""Capacity planner for serving large language models: what fits, how fast, at what cost."""

from __future__ import annotations

from typing import Any

__all__ = [
    "export",
    "fit_memory",
    "integrity",
    "load_scenario",
    "memory",
    "plan",
    "quality",
    "simulate",
    "sweep",
]


def __getattr__(name: str) -> Any:
    """Import a verb when it is first used, so that `tonnage --help` stays quick."""
    if name in ("memory", "plan", "simulate"):
        from tonnage import api

        return getattr(api, name)
    if name == "sweep":
        from tonnage.sweep_run import sweep

        return sweep
    if name == "export":
        from tonnage.plan_export import export

        return export
    if name == "fit_memory":
        from tonnage.memory_fit import fit_memory

        return fit_memory
    if name == "integrity":
        from tonnage.integrity_report import integrity

        return integrity
    if name == "quality":
        from tonnage.quality_report import quality

        return quality
    if name == "load_scenario":
        from tonnage.scenarios.load import load_scenario

        return load_scenario
    raise AttributeError(f"module 'tonnage' has no attribute {name!r}")
