"""Benchmark runs replayed: a few waves for the whole run, a part of a fleet for all of it."""

from __future__ import annotations

from functools import cache

import pytest

from tonnage.cells import cell_of, repeated
from tonnage.closed_replay import ClosedRun, replay, waves_of
from tonnage.pools import built_pools, deployment_of, times_of
from tonnage.scenarios.load import parse_scenario
from tonnage.sim.domain import PromptChunk, Step
from tonnage.sim.engine.fleet import Deployment
from tonnage.sim.engine.simulate import simulate
from tonnage.sim.traffic.build import build_load
from tonnage.sim.traffic.lengths import Constant, Uniform
from tonnage.sim.traffic.spec import LoadPoint, TrafficSpec

_LENGTHS = Uniform(400, 500), Uniform(80, 100)


@cache
def _deployment(instances: int = 1, attention_dp: int = 1) -> Deployment:
    pool = {"instances": instances, "tp": 8, "attention_dp": attention_dp, "ep": attention_dp}
    data = {
        "name": "replayed",
        "model": "deepseek-v3" if attention_dp > 1 else "llama-3.1-8b",
        "gpu": "h200-sxm",
        "profile": "h200-sxm-sglang",
        "pools": {"serve": {**pool, "tp": 8 if attention_dp > 1 else 1}},
    }
    scenario = parse_scenario(data, "replayed")
    pools = built_pools(scenario)
    return deployment_of(scenario, pools, times_of(scenario, pools))


@pytest.mark.parametrize("users", [8, 40])
def test_a_few_waves_have_the_means_of_the_whole_run(users: int) -> None:
    deployment, run = _deployment(), ClosedRun(users, *_LENGTHS)
    traffic = TrafficSpec(
        kind="closed",
        concurrency=(users,),
        input_tokens=run.input_tokens,
        output_tokens=run.output_tokens,
        requests=10 * users,
    )
    whole = simulate(deployment, build_load(traffic, LoadPoint(concurrency=users), 0)).records
    means = replay(deployment, run)
    assert means.simulated < len(whole) or waves_of(run) == 10
    assert means.tpot_s == pytest.approx(whole.tpot_s().mean(), rel=0.05)
    assert means.ttft_s == pytest.approx(whole.ttft_s().mean(), rel=0.15)


def test_few_users_send_more_waves() -> None:
    assert [waves_of(ClosedRun(users, *_LENGTHS)) for users in (1, 8, 100)] == [10, 6, 3]


def test_what_nobody_can_hold_is_counted() -> None:
    means = replay(_deployment(), ClosedRun(2, Constant(10_000_000), Constant(10)))
    assert means.unserved == means.simulated > 0


@pytest.mark.parametrize(("instances", "attention_dp"), [(4, 1), (1, 8)])
def test_a_part_of_a_fleet_stands_for_all_of_it(instances: int, attention_dp: int) -> None:
    deployment = _deployment(instances, attention_dp)
    part, users = cell_of(deployment, 1024)
    assert users == {1: 256, 8: 128}[attention_dp]
    whole = ClosedRun(1024, *_LENGTHS)
    load = TrafficSpec(
        kind="closed",
        concurrency=(1024,),
        input_tokens=whole.input_tokens,
        output_tokens=whole.output_tokens,
        requests=3072,
    )
    records = simulate(deployment, build_load(load, LoadPoint(concurrency=1024), 0)).records
    small = TrafficSpec(
        kind="closed",
        concurrency=(users,),
        input_tokens=whole.input_tokens,
        output_tokens=whole.output_tokens,
        requests=3 * users,
    )
    of_part = simulate(part, build_load(small, LoadPoint(concurrency=users), 0)).records
    assert of_part.tpot_s().mean() == pytest.approx(records.tpot_s().mean(), rel=0.08)
    assert of_part.ttft_s().mean() == pytest.approx(records.ttft_s().mean(), rel=0.15)


def test_small_loads_and_odd_fleets_are_left_whole() -> None:
    deployment = _deployment(4)
    assert cell_of(deployment, 200) == (deployment, 200)
    assert cell_of(_deployment(1), 4096) == (_deployment(1), 4096)


def test_a_step_repeated_is_that_of_so_many_ranks() -> None:
    import numpy as np

    step = Step(np.array([5, 7]), 12.0, (PromptChunk(3, 0),), 2.0)
    whole = repeated(step, 3)
    assert whole.decode_context_tokens.tolist() == [5, 7] * 3
    assert (whole.decode_context_sum, whole.decode_context_growth) == (36.0, 6.0)
    assert len(whole.prefill_chunks) == len(whole.ranks) == 3
