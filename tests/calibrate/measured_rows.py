"""Rows as a calibration writes them, made up: seconds follow from what a call does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from tonnage.calibrate.points import Point
from tonnage.calibrate.sizes import CPU_QUICK, Sizes

ORIGIN: dict[str, Any] = {
    "device": "a processor",
    "driver": None,
    "torch": "2.13.0",
    "triton": None,
    "cuda": None,
    "threads": 1,
    "date": "2026-11-30T12:00:00+00:00",
    "commit": None,
}
STATE = {"driver": None, "sm_clock_hz": None, "memory_clock_hz": None, "power_w": None}

# Small enough to measure in seconds.
TINY: Sizes = replace(
    CPU_QUICK,
    rows=(1, 4, 17, 64),
    generic_rows=(1, 16, 64),
    generic_widths=(128, 256),
    tokens=(1, 4, 16),
    generic_experts=((4, 2, 128, 128), (8, 2, 256, 128)),
    batches=(1, 4),
    contexts=(1, 64, 128),
    generic_heads=((4, 2, 64), (8, 2, 64)),
    generic_latent_heads=(2,),
    prompts=((1, 16), (1, 64), (4, 16)),
    small_rows=(1, 16),
    small_widths=(64, 512),
    checked_pages=((1, 16), (4, 64)),
    moved_tokens=(1, 16),
    samples=3,
    sample_s=1e-4,
    budget_s=0.01,
    repeats=1,
)


def usual_seconds(point: Point) -> float:
    """Return a launch and twice the roofline."""
    return 1e-5 + 2.0 * point.estimate_s


def measured_row(point: Point, seconds: float, spread: float = 1.02, repeat: int = 0) -> Any:
    """Return a row of one point."""
    timing = {
        "seconds_p20": seconds,
        "seconds_median": seconds,
        "seconds_p80": seconds * spread,
        "samples": 5,
        "calls_per_sample": 3,
    }
    return {
        "kernel": point.kernel,
        "backend": "cpu",
        "axes": dict(point.axes),
        "timing": timing,
        "cold": point.cold,
        "graph": point.graph,
        "copies": 1,
        "provenance": ORIGIN,
        "state": STATE,
        "repeat": repeat,
    }


def measured_rows(
    points: Iterable[Point], seconds_of: Callable[[Point], float] = usual_seconds
) -> list[Any]:
    """Return a row of every point."""
    return [measured_row(point, seconds_of(point)) for point in points]
