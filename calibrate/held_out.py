"""Figures of held-out rows, and numbers fit for a table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from tonnage.sim.domain import FloatArray

_SIGNIFICANT_DIGITS = 4
_GPU_BYTES_PER_S, _SLOWEST_GPU_BYTES_PER_S = 2e12, 2e11
LEAST_POWER = 1.5  # of the slowdown, by which the least rates of a fit are lowered


def slowdown(bytes_per_s: float) -> float:
    """Return how much slower than GPUs a device's memory is: where a fit of its rates starts.

    One for every GPU, a hundred for a CPU: what a fit tries for a GPU has no rates of a CPU.
    """
    return 1.0 if bytes_per_s > _SLOWEST_GPU_BYTES_PER_S else _GPU_BYTES_PER_S / bytes_per_s


def summary(regime: str, held_out: str, errors: FloatArray) -> dict[str, Any]:
    """Return the quantiles of errors, each the log of measured over predicted seconds.

    `median` and `p90` are relative to the measured seconds; `low` and `high` are the factors
    true / predicted at 5 % and 95 %. `n` counts rows.
    """
    relative = np.abs(np.expm1(-errors))
    low, high = np.exp(np.quantile(errors, [0.05, 0.95]))
    return {
        "regime": regime,
        "held_out": held_out,
        "n": len(errors),
        "median": float(np.median(relative)),
        "p90": float(np.quantile(relative, 0.9)),
        "low": float(low),
        "high": float(high),
    }


def rounded(seconds: Iterable[float]) -> list[float]:
    """Return numbers to four significant digits: tables compress, and no row is that exact."""
    return [float(f"{value:.{_SIGNIFICANT_DIGITS}g}") for value in seconds]
