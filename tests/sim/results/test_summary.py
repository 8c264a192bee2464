"""Figures of a point from its records, where a wrong rule would flatter the result."""

from __future__ import annotations

import numpy as np
import pytest
from tests.sim.engine.harness import AffineTimes, colocated, disaggregated

from tonnage.sim.domain import Objective, Request
from tonnage.sim.engine.simulate import simulate
from tonnage.sim.results.run import RunResult
from tonnage.sim.results.summary import (
    intervals,
    objectives_hold,
    objectives_met,
    throughput,
)
from tonnage.sim.traffic.loads import ClosedLoad, Lengths, OpenLoad, ResidentLoad


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


def test_objectives_hold_on_the_mean_share_of_replications() -> None:
    objectives = [Objective("ttft", 0.9, 1.0), Objective("itl", 0.99, 0.05)]
    shares = [{"ttft_p90": 0.85, "itl_p99": 1.0}, {"ttft_p90": 0.97, "itl_p99": 0.97}]
    assert objectives_hold(objectives, shares) == {"ttft_p90": True, "itl_p99": False}


# --- intervals ----------------------------------------------------------------------------------


def a_closed_run(users: int, requests: int) -> RunResult:
    """Return a run whose users all start at once, so that the first prompts queue."""
    rng = np.random.default_rng(0)
    outputs = rng.geometric(1 / 20, requests).tolist()
    load = ClosedLoad(users, [Lengths(100, tokens) for tokens in outputs])
    return simulate(colocated(chunk_tokens=100), load)


def test_intervals_are_of_the_steady_state_and_figures_of_the_whole_run() -> None:
    run = a_closed_run(40, 1200)
    found = intervals(run, resident=False)
    assert 30 <= found["warm_up_requests"]["latency.ttft_s"] <= 300
    low_s, high_s = found["intervals"]["latency.ttft_s.mean"]
    ttft_s = run.records.frame()["ttft_s"]
    assert high_s < ttft_s.mean()  # the start of everybody at once is in this one
    assert low_s < ttft_s.iloc[300:].mean() < high_s


def test_the_interval_of_the_output_rate_is_around_the_figure() -> None:
    run = a_closed_run(40, 1200)
    low, high = intervals(run, resident=False)["intervals"]["throughput.output_tokens_per_s"]
    per_s = throughput(run, 1, resident=False)["output_tokens_per_s"]
    assert per_s is not None
    assert (low + high) / 2 == pytest.approx(per_s)
    assert 0 < high - low < 0.3 * per_s


@pytest.mark.parametrize(("requests", "there"), [(90, False), (1200, True)])
def test_an_interval_is_left_out_where_requests_are_too_few(requests: int, there: bool) -> None:
    found = intervals(a_closed_run(4, requests), resident=False)["intervals"]
    assert ("latency.e2e_s.mean" in found) == there
    assert ("latency.tpot_s.p95" in found) == there
    assert "latency.ttft_s.p99" not in found  # needs 2,000 requests
    assert not [name for name in found if name.startswith("latency.itl_s")]


def test_a_resident_run_has_intervals_of_its_token_times_alone() -> None:
    load = ResidentLoad(10, [Lengths(100, 20 + number % 30) for number in range(800)])
    found = intervals(simulate(disaggregated(), load), resident=True)
    assert set(found["warm_up_requests"]) == {"latency.tpot_s"}
    assert "latency.tpot_s.mean" in found["intervals"]
    assert all(name.startswith("latency.tpot_s") for name in found["intervals"])


def test_the_intervals_of_an_empty_run_are_none() -> None:
    run = simulate(colocated(), OpenLoad([]))
    assert intervals(run, resident=False)["intervals"] == {}
