"""The quantile sketch against exact quantiles."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.sim.results.sketch import QuantileSketch

VALUES = st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=200)


@given(VALUES, st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_is_within_one_percent_of_the_exact_one(
    values: list[float], share: float
) -> None:
    sketch = QuantileSketch()
    for value in values:
        sketch.add_one(value)
    ranked = sorted(values)
    exact = ranked[math.floor(share * (len(values) - 1))]
    assert sketch.quantile(share) == pytest.approx(exact, rel=0.0101)
    assert sketch.mean() == pytest.approx(np.mean(values))


@given(VALUES, VALUES, st.integers(1, 5))
def test_merging_is_adding(one: list[float], two: list[float], weight: int) -> None:
    merged, together = QuantileSketch(), QuantileSketch()
    merged.add(np.array(one), weight)
    other = QuantileSketch(unit=2.0)
    other.add(np.array(two) / 2.0)
    merged.merge(other)
    together.add(np.array(one * weight))
    together.add(np.array(two))
    assert merged.count == together.count
    assert merged.quantile(0.5) == pytest.approx(together.quantile(0.5), rel=0.0101)


def test_an_empty_sketch_knows_nothing() -> None:
    assert QuantileSketch().count == 0
    assert math.isnan(QuantileSketch().quantile(0.5))
    assert math.isnan(QuantileSketch().mean())


def test_share_within_a_limit() -> None:
    sketch = QuantileSketch()
    sketch.add(np.linspace(0.001, 0.1, 1000))
    assert sketch.share_at_most(0.05) == pytest.approx(0.5, abs=0.01)
