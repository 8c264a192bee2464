"""The engine as a whole: segments against single steps, conservation, hand-worked schedules."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sim.engine.harness import (
    AffineTimes,
    colocated,
    disaggregated,
    poisson_requests,
    with_shared_prefixes,
)
from tonnage.sim.domain import BadInputError, Request, SpeculationSpec
from tonnage.sim.engine.fleet import Deployment
from tonnage.sim.engine.simulate import simulate
from tonnage.sim.results.run import RunResult
from tonnage.sim.serving.policy import PLAIN, SGLANG, VLLM, VLLM_SYNC
from tonnage.sim.serving.prefix_cache import CacheSpec
from tonnage.sim.serving.router import POLICIES as ROUTER_POLICIES
from tonnage.sim.traffic.loads import ClosedLoad, Lengths, Load, OpenLoad, ResidentLoad

LENGTHS = st.lists(st.builds(Lengths, st.integers(1, 300), st.integers(1, 60)), min_size=1)


POLICIES = (
    PLAIN,
    replace(PLAIN, mixed=True),
    SGLANG,
    replace(SGLANG, reserved_decode_tokens=20, backs_up=False),
    VLLM,
    VLLM_SYNC,
    replace(SGLANG, keeps="nothing", lag_steps=0, rank_choice="least_requests"),
)

CACHES = (
    None,
    CacheSpec("lru", "computed"),
    CacheSpec("lru", "scheduled"),
    CacheSpec("lfu", "computed"),
)
NO_GAIN = SpeculationSpec(0, (1.0,))
THREE_DRAFTS = SpeculationSpec(3, (0.4, 0.3, 0.1, 0.2))


@st.composite
def deployments(draw: st.DrawFn) -> Deployment:
    memory = {
        "kv_tokens": draw(st.integers(200, 3000)),
        "page_tokens": draw(st.sampled_from([1, 7, 16, 64])),
        "chunk_tokens": draw(st.sampled_from([32, 100, 512])),
        "running": draw(st.integers(1, 12)),
        "router": draw(st.sampled_from(ROUTER_POLICIES)),
        "times": AffineTimes(per_context_token_s=draw(st.sampled_from([0.0, 1e-7, 3.3e-6]))),
        "policy": draw(st.sampled_from(POLICIES)),
        "ranks": draw(st.sampled_from([1, 1, 2, 3])),
        "stages": draw(st.sampled_from([1, 1, 1, 2])),
        "speculation": draw(st.sampled_from([None, None, NO_GAIN, THREE_DRAFTS])),
        "cache": draw(st.sampled_from(CACHES)),
    }
    if draw(st.booleans()):
        return colocated(draw(st.integers(1, 3)), **memory)
    restore_s_per_token = draw(st.sampled_from([0.0, 1e-5]))
    instances = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return disaggregated(*instances, restore_s_per_token=restore_s_per_token, **memory)


@st.composite
def loads(draw: st.DrawFn) -> Load:
    lengths = draw(LENGTHS)
    timeout_s = draw(st.sampled_from([None, None, 0.05, 0.4]))
    if draw(st.booleans()):
        return ClosedLoad(draw(st.integers(1, 8)), lengths, timeout_s)
    gaps_s = draw(
        st.lists(st.floats(0, 0.5, allow_nan=False), min_size=len(lengths), max_size=len(lengths))
    )
    arrivals_s = np.cumsum(gaps_s).tolist()
    limit = draw(st.sampled_from([None, 90]))
    requests = [
        Request(number, time_s, pair.input_tokens, pair.output_tokens, limit)
        for number, (time_s, pair) in enumerate(zip(arrivals_s, lengths, strict=True))
    ]
    if draw(st.booleans()):
        requests = with_shared_prefixes(requests, draw(st.sampled_from([7, 16, 50])))
    return OpenLoad(requests, timeout_s)


def offered(load: Load) -> int:
    return len(list(load.requests if isinstance(load, OpenLoad) else load.lengths))


def assert_same(fast: RunResult, exact: RunResult) -> None:
    assert fast.records.frame().equals(exact.records.frame())  # to the bit
    assert fast.makespan_s == exact.makespan_s
    # Whole numbers of tokens unless requests speculate: then their sum has its rounding.
    assert (fast.steady_decode_tokens_per_s or 0.0) == pytest.approx(
        exact.steady_decode_tokens_per_s or 0.0, rel=1e-12
    )
    assert fast.gaps.count == exact.gaps.count
    if fast.gaps.count:
        assert fast.gaps.mean() == pytest.approx(exact.gaps.mean(), rel=1e-9)
        assert fast.gaps.quantile(0.9) == exact.gaps.quantile(0.9)


@settings(max_examples=150, deadline=None)
@given(deployments(), loads(), st.integers(0, 3))
def test_segments_and_single_steps_agree_to_the_bit(
    deployment: Deployment, load: Load, seed: int
) -> None:
    assert_same(
        simulate(deployment, load, seed=seed), simulate(deployment, load, seed=seed, exact=True)
    )


@settings(max_examples=100, deadline=None)
@given(deployments(), loads())
def test_every_request_is_accounted_for(deployment: Deployment, load: Load) -> None:
    run = simulate(deployment, load)
    frame = run.records.frame()
    assert frame["id"].tolist() == list(range(offered(load)))
    done = frame[frame["status"] == "completed"]
    assert (done["first_token_s"] >= done["arrival_s"]).all()
    assert (done["finish_s"] >= done["first_token_s"]).all()
    assert run.pages_left == 0
    if len(done) < len(frame):  # the gaps of those that end early are counted too
        return
    # One gap per token after the first.
    assert run.gaps.count == int((done["output_tokens"] - 1).sum())
    # Little's law in its discrete form: gaps add up to the time between first and last token.
    span_s = float((done["finish_s"] - done["first_token_s"]).sum())
    if run.gaps.count:
        assert run.gaps.mean() * run.gaps.count == pytest.approx(span_s, rel=1e-9, abs=1e-9)


def test_resident_segments_agree_with_single_steps() -> None:
    load = ResidentLoad(5, [Lengths(100, 20 + number % 7) for number in range(40)])
    deployment = disaggregated(kv_tokens=600)
    assert_same(simulate(deployment, load), simulate(deployment, load, exact=True))


def test_a_colocated_schedule_by_hand() -> None:
    """Two prompts of 100 tokens at 0 s and 0.005 s, three tokens each, prefill first.

    prefill A 0.000-0.011 | prefill B 0.011-0.022 | decode A,B 0.022-0.0322 | decode 0.0322-0.0424
    """
    times = AffineTimes(0.01, 1e-4, 0.0, 1e-5)
    requests = [Request(0, 0.0, 100, 3), Request(1, 0.005, 100, 3)]
    frame = simulate(colocated(times=times), OpenLoad(requests)).records.frame()
    assert frame["first_token_s"].tolist() == pytest.approx([0.011, 0.022], abs=1e-9)
    assert frame["finish_s"].tolist() == pytest.approx([0.0424, 0.0424], abs=1e-9)
    assert frame["tpot_s"].tolist() == pytest.approx([0.0157, 0.0102], abs=1e-9)


def test_a_mixed_schedule_by_hand() -> None:
    """The same two requests with prompt chunks and tokens in one step.

    A 0.000-0.011 | decode A with prompt B: 0.01 + 0.0001 + 0.001 -> 0.0221 | decode A,B -> 0.0323 |
    decode B alone 0.0101 -> 0.0424
    """
    times = AffineTimes(0.01, 1e-4, 0.0, 1e-5)
    requests = [Request(0, 0.0, 100, 3), Request(1, 0.005, 100, 3)]
    frame = simulate(colocated(times=times, mixed=True), OpenLoad(requests)).records.frame()
    assert frame["first_token_s"].tolist() == pytest.approx([0.011, 0.0221], abs=1e-9)
    assert frame["finish_s"].tolist() == pytest.approx([0.0323, 0.0424], abs=1e-9)


def test_a_disaggregated_schedule_by_hand() -> None:
    """Prefill 0.011 s; 100 tokens x 70,272 B at 50 GB/s and 0.1 ms; two decode steps of 10.1 ms."""
    times = AffineTimes(0.01, 1e-4, 0.0, 1e-5)
    run = simulate(disaggregated(times=times), OpenLoad([Request(0, 0.0, 100, 3)]))
    row = run.records.frame().iloc[0]
    assert row["prefill_end_s"] == pytest.approx(0.011, abs=1e-9)
    arrived_s = 0.011 + 1e-4 + 100 * 70_272 / 50e9
    assert row["first_token_s"] == pytest.approx(arrived_s, abs=1e-9)
    assert row["finish_s"] == pytest.approx(arrived_s + 2 * 0.0101, abs=1e-9)


def test_a_long_prompt_is_cut_into_chunks() -> None:
    times = AffineTimes(0.01, 0.0, 0.0, 1e-5)
    run = simulate(
        disaggregated(times=times, chunk_tokens=100), OpenLoad([Request(0, 0.0, 250, 1)])
    )
    assert run.records.frame()["prefill_end_s"][0] == pytest.approx(3 * 0.01 + 250e-5, abs=1e-9)


def test_prefill_keeps_its_pages_until_the_transfer_is_done() -> None:
    """The second prompt needs the pages of the first, which a slow link holds."""
    run = simulate(
        disaggregated(kv_tokens=150, bandwidth_bytes_per_s=70_272.0 * 100),  # one second
        OpenLoad([Request(0, 0.0, 100, 1), Request(1, 0.0, 100, 1)]),
    )
    frame = run.records.frame()
    assert frame["prefill_start_s"][1] == pytest.approx(frame["transfer_end_s"][0])


def test_a_request_that_no_instance_could_hold_is_rejected_with_its_reason() -> None:
    load = OpenLoad([Request(0, 0.0, 900, 200), Request(1, 0.1, 10, 10)])
    frame = simulate(colocated(kv_tokens=1000), load).records.frame()
    assert frame["status"].tolist() == ["rejected", "completed"]
    assert "1099 tokens of KV; a serve instance holds 1000 of one request" in frame["reason"][0]


def test_many_rejections_in_a_closed_load_end() -> None:
    load = ClosedLoad(2, [Lengths(5000, 10)] * 5000)
    run = simulate(colocated(kv_tokens=1000), load)
    assert run.records.with_status("rejected").sum() == 5000


def test_resident_requests_beyond_memory_wait() -> None:
    load = ResidentLoad(8, [Lengths(100, 50)] * 64)
    run = simulate(disaggregated(kv_tokens=149 * 5 + 20), load)
    assert run.peak_requests == 7


def test_resident_rate_is_the_batch_over_the_step() -> None:
    times = AffineTimes(0.01, 1e-4, 0.0, 0.0)
    run = simulate(disaggregated(times=times), ResidentLoad(10, [Lengths(100, 100)] * 400))
    assert run.steady_decode_tokens_per_s == pytest.approx(10 / 0.011, rel=1e-6)


def test_the_same_seed_gives_the_same_run() -> None:
    load = OpenLoad(poisson_requests(300, 20.0, 100, 20))
    deployment = disaggregated(3, 3, router="random")
    one, two = simulate(deployment, load, seed=5), simulate(deployment, load, seed=5)
    other = simulate(deployment, load, seed=6)
    assert one.records.frame().equals(two.records.frame())
    assert not one.records.frame().equals(other.records.frame())


def test_arrivals_out_of_order_are_refused() -> None:
    with pytest.raises(BadInputError, match="request 1 arrives before"):
        simulate(colocated(), OpenLoad([Request(0, 1.0, 10, 2), Request(1, 0.5, 10, 2)]))


def test_an_empty_load_ends_at_once() -> None:
    assert len(simulate(colocated(), OpenLoad([])).records) == 0


@settings(max_examples=50, deadline=None)
@given(deployments(), loads(), st.integers(0, 3))
def test_speculation_that_gains_nothing_changes_nothing(
    deployment: Deployment, load: Load, seed: int
) -> None:
    """One token per step and no draft: the batch that draws its steps is the one that counts."""
    runs = []
    for speculation in (None, NO_GAIN):
        pools = {
            role: replace(plan, scheduling=replace(plan.scheduling, speculation=speculation))
            for role, plan in deployment.pools.items()
        }
        runs.append(simulate(replace(deployment, pools=pools), load, seed=seed))
    assert_same(*runs)
    assert runs[0].gaps.mean() == runs[1].gaps.mean() or not runs[0].gaps.count


def test_speculation_commits_its_mean_accepted_length_per_step() -> None:
    """4 x 0.2 + 3 x 0.1 + 2 x 0.3 + 0.4 = 2.1 tokens per step of 10 ms."""
    times = AffineTimes(0.01, 0.0, 0.0, 0.0)
    deployment = disaggregated(times=times, speculation=THREE_DRAFTS)
    run = simulate(deployment, OpenLoad([Request(0, 0.0, 10, 20_001)]))
    tpot_s = run.records.tpot_s()[0]
    assert tpot_s == pytest.approx(0.01 / 2.1, rel=0.02)
    assert run.gaps.count == 20_000
    assert run.gaps.mean() == pytest.approx(tpot_s, rel=1e-3)
    assert run.gaps.quantile(0.4) < 1e-4  # came with another token
    assert run.gaps.quantile(0.6) == pytest.approx(0.01, rel=0.01)
