"""Predicted against measured: errors of rows, and what they come to by group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tonnage.sim.domain import FloatArray


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure of a row, what was predicted for it, and the interval of that."""

    measured: float
    predicted: float
    low: float | None = None
    high: float | None = None

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1.0

    @property
    def inside(self) -> bool | None:
        """Whether the measured value lies in the interval; None where there is none."""
        if self.low is None or self.high is None:
            return None
        return self.low <= self.measured <= self.high

    def to_dict(self) -> dict[str, Any]:
        """Return the figure as JSON values."""
        told: dict[str, Any] = {
            "measured": self.measured,
            "predicted": self.predicted,
            "error": self.error,
        }
        if self.low is not None and self.high is not None:
            told |= {"interval": [self.low, self.high], "inside": self.inside}
        return told


@dataclass(frozen=True, slots=True)
class ValidatedRow:
    """A row of a file: what it is, its figures by name, or why it is not predicted."""

    id: str
    groups: dict[str, str]  # model, gpu, engine, mode ...
    figures: dict[str, Figure] = field(default_factory=dict)
    refused: str | None = None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON values."""
        told: dict[str, Any] = {"id": self.id, **self.groups}
        if self.refused is not None:
            return told | {"refused": self.refused}
        told |= {name: one.to_dict() for name, one in self.figures.items()}
        return told | ({"notes": list(self.notes)} if self.notes else {})


def summary(rows: Sequence[ValidatedRow], names: Iterable[str]) -> dict[str, Any]:
    """Return counts, and of each figure named `<name>_mape` and its like, as shares.

    MAPE is the mean of the absolute errors, each a share of what was measured.
    """
    predicted = [row for row in rows if row.refused is None]
    told: dict[str, Any] = {
        "rows": len(rows),
        "predicted": len(predicted),
        "refused": len(rows) - len(predicted),
        "reasons": dict(Counter(row.refused for row in rows if row.refused).most_common()),
    }
    for name in names:
        told |= {f"{name}_{key}": value for key, value in _errors(predicted, name).items()}
    inside = [
        one.inside for row in predicted for one in row.figures.values() if one.inside is not None
    ]
    told["interval_coverage"] = float(np.mean(inside)) if inside else None
    return told


def by_group(
    rows: Sequence[ValidatedRow], names: Sequence[str], group: str
) -> dict[str, dict[str, Any]]:
    """Return the summary of the rows of each model, or GPU, or whatever the group is."""
    grouped: dict[str, list[ValidatedRow]] = {}
    for row in rows:
        grouped.setdefault(row.groups[group], []).append(row)
    return {name: summary(grouped[name], names) for name in sorted(grouped)}


def _errors(rows: Sequence[ValidatedRow], name: str) -> dict[str, float | None]:
    """Return how far a figure is off over the rows that have it."""
    errors: FloatArray = np.array(
        [row.figures[name].error for row in rows if name in row.figures], dtype=np.float64
    )
    if not len(errors):
        return dict.fromkeys(("mape", "median_abs_error", "p90_abs_error", "bias"))
    sizes = np.abs(errors)
    return {
        "mape": float(sizes.mean()),
        "median_abs_error": float(np.median(sizes)),
        "p90_abs_error": float(np.quantile(sizes, 0.9)),
        "bias": float(np.median(errors)),
    }
