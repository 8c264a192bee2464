"""Interpolation on a regular grid of logs, its edges, and the monotone repair."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.sim.cost.models.grid import (
    Grid,
    LogCurve,
    filled,
    grid_from_columns,
    monotone,
    refined,
)
from tonnage.sim.domain import BadInputError

KNOTS = ([1.0, 8.0, 64.0], [16.0, 256.0])


def power_law(m: np.ndarray, n: np.ndarray) -> np.ndarray:
    """Return the log of ``3 m^0.5 n^2``, which is linear in the logs."""
    return np.log(3.0) + 0.5 * np.log(m) + 2.0 * np.log(n)


def grid_of_power_law() -> Grid:
    m, n = np.meshgrid(*KNOTS, indexing="ij")
    return Grid(KNOTS, power_law(m, n))


def test_a_power_law_is_exact_between_the_knots() -> None:
    m, n = np.array([1.0, 3.0, 20.0, 64.0]), np.array([16.0, 17.0, 100.0, 256.0])
    assert grid_of_power_law().at(m, n) == pytest.approx(power_law(m, n))


def test_points_broadcast_against_each_other() -> None:
    values = grid_of_power_law().at(np.array([[1.0], [8.0]]), np.array([16.0, 64.0, 256.0]))
    assert values.shape == (2, 3)


def test_the_edge_holds_beyond_the_knots() -> None:
    grid = grid_of_power_law()
    assert grid.at(0.0, 1e9) == pytest.approx(grid.at(1.0, 256.0))


def test_inside_means_every_point_of_every_axis() -> None:
    grid = grid_of_power_law()
    assert grid.inside(np.array([1.0, 64.0]), 16.0)
    assert not grid.inside(np.array([1.0, 65.0]), 16.0)
    assert not grid.inside(2.0, 15.0)


def test_a_line_holds_the_other_axes() -> None:
    grid = grid_of_power_law()
    assert grid.line(0, 100.0) == pytest.approx(power_law(np.array(KNOTS[0]), np.array(100.0)))
    assert grid.line(1, 3.0) == pytest.approx(power_law(np.array(3.0), np.array(KNOTS[1])))


def test_an_axis_may_hold_zero_when_it_is_shifted() -> None:
    grid = Grid([[0.0, 1.0, 3.0]], [0.0, 1.0, 2.0], shifts=[1.0])
    assert grid.at([0.0, 1.0, 3.0]) == pytest.approx([0.0, 1.0, 2.0])


def test_an_axis_of_one_knot_is_flat() -> None:
    grid = Grid([[4.0], [1.0, 2.0]], [[5.0, 7.0]])
    assert grid.at([1.0, 9.0], 2.0) == pytest.approx([7.0, 7.0])


def test_rows_in_any_order_make_the_grid() -> None:
    frame = pd.DataFrame({"m": [8, 1, 8, 1], "n": [2, 2, 1, 1], "value": [4.0, 2.0, 3.0, 1.0]})
    grid = grid_from_columns(frame, ("m", "n"), frame["value"])
    assert grid.at([1, 1, 8, 8], [1, 2, 1, 2]) == pytest.approx([1.0, 2.0, 3.0, 4.0])


def test_two_rows_for_one_point_are_refused() -> None:
    with pytest.raises(BadInputError, match="two rows for the same m, n"):
        grid_from_columns({"m": [1, 1], "n": [2, 2]}, ("m", "n"), [1.0, 2.0])


def test_a_hole_takes_the_nearest_value() -> None:
    holed = np.array([[1.0, np.nan, np.nan], [4.0, 5.0, 6.0]])
    assert filled(holed).tolist() == [[1.0, 1.0, 6.0], [4.0, 5.0, 6.0]]


def test_an_empty_table_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        filled(np.array([np.nan]))


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=30))
def test_the_repair_never_falls_and_keeps_the_mean(values: list[float]) -> None:
    repaired = monotone(values)
    assert (np.diff(repaired) >= 0).all()
    assert repaired.mean() == pytest.approx(np.mean(values), abs=1e-9)


def test_the_repair_leaves_rising_values_alone() -> None:
    assert monotone([1.0, 2.0, 2.0, 5.0]).tolist() == [1.0, 2.0, 2.0, 5.0]


def test_the_repair_runs_along_its_axis_and_past_nan() -> None:
    values = np.array([[3.0, 1.0], [1.0, np.nan], [5.0, 2.0]])
    repaired = monotone(values, axis=0)
    assert repaired[:, 0].tolist() == [2.0, 2.0, 5.0]
    assert repaired[[0, 2], 1].tolist() == [1.0, 2.0]
    assert np.isnan(repaired[1, 1])


def test_a_light_row_yields_to_a_heavy_one() -> None:
    assert monotone([2.0, 1.0], weights=[1.0, 9.0]).tolist() == pytest.approx([1.1, 1.1])


def test_refined_points_hold_the_knots_and_go_on_beyond_them() -> None:
    points = refined(np.array([1.0, 16.0, 100.0]), 1000.0)
    assert {1.0, 16.0, 100.0, 200.0} <= set(points.tolist())
    assert (np.diff(points) > 0).all()
    assert points[-1] >= 1000.0


def test_a_curve_is_a_power_law_between_and_above_its_points_and_flat_below() -> None:
    curve = LogCurve.of(np.array([2.0, 8.0]), np.log([4.0, 64.0]))
    assert curve.at(4.0) == pytest.approx(16.0)
    assert curve.at(1.0) == pytest.approx(4.0)
    assert curve.at(0.0) == pytest.approx(4.0)
    assert curve.at(16.0) == pytest.approx(256.0)
    assert curve.at_each(np.array([[2.0], [16.0]])) == pytest.approx(np.array([[4.0], [256.0]]))
