"""Figures of a point from its records, where a wrong rule would flatter the result."""

from __future__ import annotations

import pytest
from tests.sim.engine.harness import AffineTimes, colocated

from tonnage.sim.domain import Objective, Request
from tonnage.sim.engine.simulate import simulate
from tonnage.sim.results.summary import objectives_met
from tonnage.sim.traffic.loads import OpenLoad


@pytest.mark.parametrize("metric", ["ttft", "tpot", "e2e"])
def test_a_rejected_request_meets_no_objective(metric: str) -> None:
    requests = [Request(0, 0.0, 50, 10), Request(1, 1.0, 5000, 10)]
    run = simulate(colocated(kv_tokens=1000), OpenLoad(requests))
    met = objectives_met(run, [Objective(metric, 0.95, 100.0)])
    assert met["attainment"] == 0.5
    assert met["holds"] == {f"{metric}_p95": False}


def test_goodput_counts_the_tokens_of_requests_that_met_every_objective() -> None:
    """Two prompts at once: 0.011 s to the first token of one, 0.022 s for the other."""
    times = AffineTimes(0.01, 1e-4, 0.0, 1e-5)
    run = simulate(
        colocated(times=times, chunk_tokens=100),
        OpenLoad([Request(0, 0.0, 100, 3), Request(1, 0.0, 100, 3)]),
    )
    met = objectives_met(run, [Objective("ttft", 0.5, 0.015), Objective("e2e", 0.5, 1.0)])
    assert met["attainment"] == 0.5
    assert met["goodput_output_tokens_per_s"] == pytest.approx(3 / run.makespan_s)
    assert met["holds"] == {"ttft_p50": True, "e2e_p50": True}
