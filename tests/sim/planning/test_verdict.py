"""What a run is found to fail, on small fleets whose bottleneck is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.sim.engine.harness import AffineTimes, colocated, disaggregated, poisson_requests

from tonnage.sim.domain import Objective
from tonnage.sim.engine.fleet import Deployment
from tonnage.sim.engine.simulate import simulate
from tonnage.sim.planning.verdict import Capacity, judge
from tonnage.sim.traffic.loads import ClosedLoad, Lengths, Load, OpenLoad, ResidentLoad

# A prompt of 100 tokens takes 10 ms of prefill, a decode step 10 ms: 50 tokens take 0.49 s.
TIMES = AffineTimes(0.0, 1e-5, 0.0, 1e-4)
DECODE_TIMES = AffineTimes(0.01, 1e-5, 0.0, 1e-4)
EASY = (Objective("ttft", 0.95, 1000.0), Objective("tpot", 0.95, 1.0))
AMPLE = Capacity(1000, "memory")


def arriving(rate_per_s: float, count: int = 1000) -> OpenLoad:
    return OpenLoad(poisson_requests(count, rate_per_s, 100, 50))


def failed(
    deployment: Deployment,
    load: Load,
    *objectives: Objective,
    capacity: Capacity = AMPLE,
) -> tuple[str, ...]:
    run = simulate(deployment, load)
    return judge([run], objectives, capacity, arrivals=isinstance(load, OpenLoad)).failed


def fleet(kv_tokens: int = 1_000_000) -> Deployment:
    """Return a prefill instance good for 50 requests a second with 10 ms a chunk."""
    times = AffineTimes(0.01, 0.0, 0.0, 1e-4)
    return disaggregated(times=times, kv_tokens=kv_tokens, chunk_tokens=100)


def test_a_load_that_is_carried_fails_nothing() -> None:
    assert failed(fleet(), arriving(20.0), *EASY) == ()
    assert failed(colocated(), arriving(5.0), *EASY) == ()
    assert failed(fleet(), arriving(20.0)) == ()


def test_a_queue_that_grows_fails_whatever_the_objectives() -> None:
    """50 a second are done of 60 that arrive; a short run ends before anyone waits for long."""
    assert failed(fleet(), arriving(60.0), *EASY) == ("prefill",)
    assert failed(fleet(), arriving(60.0)) == ("prefill",)
    assert failed(colocated(chunk_tokens=100), arriving(120.0)) == ("prefill",)


@pytest.mark.parametrize("limited_by", ["memory", "max_running_requests"])
def test_a_full_decode_pool_is_the_cause_of_late_first_tokens(limited_by: str) -> None:
    """Five requests of 149 tokens fit, so ten a second leave; prefill has nothing to do."""
    small, capacity = fleet(kv_tokens=760), Capacity(5, limited_by)
    assert failed(small, arriving(14.0), capacity=capacity) == (limited_by,)
    late = Objective("ttft", 0.95, 0.5)
    assert failed(small, ClosedLoad(12, [Lengths(100, 50)] * 300), late, capacity=capacity) == (
        limited_by,
    )


def test_a_busy_prefill_pool_is_the_cause_of_late_first_tokens() -> None:
    load = ClosedLoad(100, [Lengths(100, 50)] * 1000)
    assert failed(fleet(), load, Objective("ttft", 0.95, 0.5)) == ("prefill",)
    assert failed(fleet(), load, Objective("e2e", 0.95, 0.5)) == ("prefill",)


def test_an_objective_that_an_idle_fleet_misses_is_its_own_cause() -> None:
    load = arriving(1.0, 200)
    assert failed(fleet(), load, Objective("ttft", 0.95, 0.015)) == ("ttft",)
    assert failed(fleet(), load, Objective("e2e", 0.95, 0.1)) == ("e2e",)
    assert failed(fleet(), load, Objective("tpot", 0.95, 0.009)) == ("tpot",)
    assert failed(fleet(), load, Objective("itl", 0.95, 0.009)) == ("itl",)


def test_the_objective_missed_by_most_comes_first() -> None:
    """Every token is late; two thirds of the first ones are in time."""
    load = ClosedLoad(3, [Lengths(100, 2)] * 300)
    tokens = Objective("tpot", 0.95, 0.001)
    prompts = Objective("ttft", 0.99, 0.030)
    assert failed(colocated(chunk_tokens=100), load, prompts, tokens)[0] == "tpot"


def test_resident_requests_are_held_to_their_token_times() -> None:
    load = ResidentLoad(10, [Lengths(100, 50)] * 300)
    assert failed(fleet(), load, Objective("tpot", 0.95, 0.02)) == ()
    assert failed(fleet(), load, Objective("tpot", 0.95, 0.009)) == ("tpot",)


def test_a_load_of_which_nothing_is_served_fails_its_objectives() -> None:
    load = ClosedLoad(2, [Lengths(5000, 10)] * 100)
    assert failed(colocated(kv_tokens=1000), load, Objective("ttft", 0.95, 1.0)) == ("ttft",)


def test_replications_are_judged_by_their_mean() -> None:
    """Nearly all first tokens are late in one run of two, so half of them are in time."""
    late = simulate(fleet(), ClosedLoad(2, [Lengths(100, 1)] * 100))
    early = simulate(fleet(), ClosedLoad(1, [Lengths(100, 1)] * 100))
    prompts = Objective("ttft", 0.4, 0.025)
    assert judge([late], [prompts], AMPLE, arrivals=False).failed == ("prefill",)
    assert judge([early], [prompts], AMPLE, arrivals=False).failed == ()
    assert judge([late, early], [prompts], AMPLE, arrivals=False).failed == ()
    strict = replace(prompts, quantile=0.6)
    assert judge([late, early], [strict], AMPLE, arrivals=False).failed == ("prefill",)
