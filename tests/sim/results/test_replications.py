"""Means and intervals over runs that differ by their seed, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from tonnage.sim.results.replications import figure_intervals, mean_figures


def point(per_s: float, completed: int, steady: float | None = 1.0) -> dict[str, Any]:
    throughput = {"output_tokens_per_s": per_s}
    if steady is not None:
        throughput["decode_output_tokens_per_s"] = steady
    return {
        "concurrency": 8,
        "rate_per_s": None,
        "throughput": throughput,
        "requests": {"completed": completed},
        "slo": {"attainment": per_s / 10, "holds": {"ttft_p95": True}},
    }


def test_figures_are_means_and_what_is_the_same_stays() -> None:
    figures = mean_figures([point(1.0, 40), point(2.0, 40), point(3.0, 39)])
    assert figures["concurrency"] == 8
    assert figures["rate_per_s"] is None
    assert figures["throughput"]["output_tokens_per_s"] == pytest.approx(2.0)
    assert figures["requests"]["completed"] == pytest.approx(119 / 3)
    assert figures["slo"] == {"attainment": pytest.approx(0.2), "holds": {"ttft_p95": True}}
    assert mean_figures([point(1.0, 40), point(2.0, 40)])["requests"] == {"completed": 40}


def test_intervals_are_students() -> None:
    """Mean 2, standard deviation 1, 4.3027 at two degrees of freedom; a constant has no width."""
    found = figure_intervals([point(1.0, 40), point(2.0, 40), point(3.0, 39)])
    assert found["throughput.output_tokens_per_s"] == pytest.approx((-0.4841, 4.4841), abs=1e-4)
    assert found["throughput.decode_output_tokens_per_s"] == (1.0, 1.0)
    assert set(found) == {
        "throughput.output_tokens_per_s",
        "throughput.decode_output_tokens_per_s",
        "slo.attainment",
    }


def test_a_figure_that_one_run_lacks_is_left_out() -> None:
    runs = [point(1.0, 40), point(2.0, 40, steady=None)]
    for some in (runs, runs[::-1]):
        assert "decode_output_tokens_per_s" not in mean_figures(some)["throughput"]
        assert "throughput.decode_output_tokens_per_s" not in figure_intervals(some)
