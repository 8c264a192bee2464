"""The Pareto front: fleets that no other beats in every figure."""

from __future__ import annotations

import numpy as np

from tonnage.sim.domain import FloatArray, IntArray


def pareto_front(figures: FloatArray) -> IntArray:
    """Return the rows of `figures` `[fleets, figures]`, more is better, that none dominates.

    One dominates another that is nowhere better and somewhere worse; of equals the first stays.
    """
    order = np.lexsort(-figures.T[::-1])  # best first column first: nothing later dominates it
    left = order
    kept: list[int] = []
    while len(left):
        row = figures[left[0]]
        kept.append(int(left[0]))
        better_somewhere = (figures[left] > row).any(axis=1)
        left = left[better_somewhere]
    return np.asarray(kept, dtype=np.int64)


def thinned(rows: IntArray, most: int) -> IntArray:
    """Return at most so many of the rows, evenly, first and last among them."""
    if len(rows) <= most:
        return rows
    return rows[np.unique(np.linspace(0, len(rows) - 1, most).astype(np.int64))]
