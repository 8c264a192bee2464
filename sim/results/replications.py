"""Several runs that differ by their seed: the mean of every figure, and how sure it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tonnage.sim.results.intervals import Interval, replication_interval

_ESTIMATED = ("throughput", "latency", "slo", "cost")  # groups whose figures get an interval


def mean_figures(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of a point as means over its runs, group by group.

    What is the same in all runs stays as it is; a figure that one of them lacks is left out.
    """
    first, *others = runs
    return {
        name: _mean([value, *(run[name] for run in others)])
        for name, value in first.items()
        if all(name in run for run in others)
    }


def figure_intervals(
    runs: Sequence[Mapping[str, Any]], confidence: float = 0.95
) -> dict[str, Interval]:
    """Return Student's interval of every mean of `mean_figures`, by dotted name."""
    flat = [dict(_numbers(run)) for run in runs]
    found = {
        name: replication_interval([run[name] for run in flat], confidence)
        for name in flat[0]
        if all(name in run for run in flat)
    }
    return {name: interval for name, interval in found.items() if interval is not None}


def _mean(values: Sequence[Any]) -> Any:
    if all(value == values[0] for value in values):
        return values[0]
    if isinstance(values[0], Mapping):
        return mean_figures(values)
    return None if None in values else float(np.mean(values))


def _numbers(figures: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in figures.items():
        if not prefix and name not in _ESTIMATED:
            continue
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + name, float(value)
