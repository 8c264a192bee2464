"""The front: nothing on it is dominated, and everything off it is."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.sim.domain import FloatArray
from tonnage.sim.planning.front import pareto_front, thinned

POINTS = st.lists(st.tuples(*[st.integers(0, 6)] * 3), min_size=1, max_size=30)


def dominates(one: FloatArray, other: FloatArray) -> bool:
    return bool((one >= other).all() and (one > other).any())


@given(POINTS)
@settings(max_examples=60, deadline=None)
def test_the_front_is_what_nothing_dominates(points: list[tuple[int, int, int]]) -> None:
    figures = np.asarray(points, dtype=np.float64)
    front = pareto_front(figures).tolist()
    free = {
        tuple(one.tolist()) for one in figures if not any(dominates(two, one) for two in figures)
    }
    assert {tuple(figures[row].tolist()) for row in front} == free
    assert len(front) == len(free)  # equals are there once


def test_thinning_keeps_both_ends() -> None:
    rows = np.arange(100)
    kept = thinned(rows, 7)
    assert len(kept) == 7
    assert (kept[0], kept[-1]) == (0, 99)
    assert thinned(rows[:5], 7).tolist() == [0, 1, 2, 3, 4]
