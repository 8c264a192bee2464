"""Prompts on their way from prefill to decode: whole, chunk by chunk, converted, abandoned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sim.engine.harness import AffineTimes, disaggregated
from tests.sim.engine.test_simulate import assert_same, deployments, loads
from tonnage.sim.domain import LinkSpec, Request
from tonnage.sim.engine.fleet import Deployment
from tonnage.sim.engine.handoff import Handoff
from tonnage.sim.engine.simulate import simulate
from tonnage.sim.serving.policy import SGLANG, VLLM, Policy
from tonnage.sim.serving.prefix_cache import CacheSpec
from tonnage.sim.traffic.loads import Load, OpenLoad

TEN_MS = AffineTimes(0.01, 0.0, 0.0, 0.0)  # every step, whatever is in it
FP8_BYTES = 35_136.0


def split(
    tokens_per_ms: float,
    policy: Policy = SGLANG,
    *,
    chunk: int = 100,
    kv_tokens: int = 400,
    **handoff: Any,
) -> Deployment:
    """Return one prefill and one decode instance; a part of KV waits 0.1 ms before it travels."""
    deployment = disaggregated(
        times=TEN_MS,
        policy=replace(policy, reserved_decode_tokens=1, charges_outputs=False),
        chunk_tokens=chunk,
        kv_tokens=kv_tokens,
        bandwidth_bytes_per_s=70_272e3 * tokens_per_ms,
    )
    assert deployment.handoff is not None
    return replace(deployment, handoff=replace(deployment.handoff, **handoff))


def first_token_ms(deployment: Deployment, *prompts: int) -> list[float]:
    load = OpenLoad([Request(number, 0.0, tokens, 1) for number, tokens in enumerate(prompts)])
    return (1e3 * simulate(deployment, load).records.frame()["first_token_s"]).tolist()


@pytest.mark.parametrize(
    ("tokens_per_ms", "at_once", "by_chunk"),
    [
        (20.0, 30 + 0.1 + 15, 30 + 0.1 + 5),  # the last chunk alone is left
        (5.0, 30 + 0.1 + 60, 10 + 0.1 + 60),  # the wire is busy since the first chunk
    ],
)
def test_chunks_leave_while_the_next_ones_are_computed(
    tokens_per_ms: float, at_once: float, by_chunk: float
) -> None:
    """300 tokens in three chunks, which are there at 10, 20 and 30 ms."""
    assert first_token_ms(split(tokens_per_ms), 300) == pytest.approx([at_once])
    early = split(tokens_per_ms, overlap=True)
    assert first_token_ms(early, 300) == pytest.approx([by_chunk])


def test_nothing_leaves_before_there_are_decode_pages() -> None:
    """Those come after the prompt in vLLM."""
    assert first_token_ms(split(20.0, VLLM, overlap=True), 300) == pytest.approx([45.1])


def test_what_is_not_final_before_the_prompt_is_complete_leaves_last() -> None:
    """Of every token 1/4 is kept for the end: chunks of 75 at 10 and 20, then 100 + 50."""
    early = split(10.0, overlap=True, early_bytes=lambda tokens: 0.75 * 70_272.0 * tokens)
    assert first_token_ms(early, 300) == pytest.approx([30 + 0.1 + 15])


def test_transfer_times_are_those_of_the_first_and_the_last_byte() -> None:
    run = simulate(split(20.0, overlap=True), OpenLoad([Request(0, 0.0, 300, 1)]))
    row = run.records.frame().iloc[0]
    assert row["transfer_start_s"] == pytest.approx(0.010)
    assert row["prefill_end_s"] == pytest.approx(0.030)
    assert row["transfer_end_s"] == pytest.approx(0.0351)


@pytest.mark.parametrize(
    ("overlap", "first_token_ms"), [(True, 60 + 0.1 + 2.5), (False, 60 + 0.1 + 7.5)]
)
def test_a_cached_prefix_leaves_when_its_prompt_starts(
    overlap: bool, first_token_ms: float
) -> None:
    """200 of B's 300 tokens are cached: 5 ms on the wire while the rest is computed, until 60."""
    deployment = split(40.0, kv_tokens=1000, overlap=overlap)
    prefill = deployment.pools["prefill"]
    cached = replace(prefill, scheduling=replace(prefill.scheduling, cache=CacheSpec()))
    deployment = replace(deployment, pools={**deployment.pools, "prefill": cached})
    blocks = [(1, 2), (1, 2, 3)]
    requests = [
        Request(number, 0.05 * number, 100 * len(ids), 1, None, None, ids, 100)
        for number, ids in enumerate(blocks)
    ]
    frame = simulate(deployment, OpenLoad(requests)).records.frame()
    assert frame["prefill_start_s"][1] == pytest.approx(0.05)
    assert 1e3 * frame["first_token_s"][1] == pytest.approx(first_token_ms)


def test_two_prompts_computed_together_share_the_wire() -> None:
    """Both are there at 10 ms; 100 tokens take 10 ms alone, 20 together."""
    assert first_token_ms(split(10.0, chunk=8192), 100) == pytest.approx([20.1])
    assert first_token_ms(split(10.0, chunk=8192), 100, 100) == pytest.approx([30.1, 30.1])


def test_the_sender_converts_before_and_sends_half_the_bytes() -> None:
    """1 us per token to convert, 100 tokens of half the size in 5 ms."""
    converting = split(
        10.0,
        wire_bytes=lambda tokens: FP8_BYTES * tokens,
        sender_convert_s=lambda tokens: 1e-6 * tokens,
    )
    assert first_token_ms(converting, 100) == pytest.approx([10 + 0.1 + 0.1 + 5])
    early = replace(converting, handoff=replace(converting.handoff, overlap=True))
    assert first_token_ms(early, 300) == pytest.approx([30 + 0.1 + 0.1 + 5])


def test_the_receiver_converts_what_has_arrived() -> None:
    """The prefill pages are free when it has; the token comes after the conversion of 0.1 ms."""
    converting = split(10.0, receiver_convert_s=lambda tokens: 1e-6 * tokens)
    run = simulate(converting, OpenLoad([Request(0, 0.0, 100, 3)]))
    row = run.records.frame().iloc[0]
    assert row["transfer_end_s"] == pytest.approx(0.0201)
    assert row["first_token_s"] == pytest.approx(0.0202)
    assert row["finish_s"] == pytest.approx(0.0402)


@pytest.mark.parametrize("exact", [False, True])
def test_pages_that_are_written_to_are_not_given_to_others(exact: bool) -> None:
    """A's client goes at 85 ms, in its ninth chunk. The eight before it travel until 170.1 ms.

    B, there at 110, needs decode pages that A holds: it gets them at 170.1, not before.
    """
    deployment = split(5.0, kv_tokens=1010, overlap=True)
    load = OpenLoad([Request(0, 0.0, 1000, 1), Request(1, 0.11, 20, 1)], 0.085)
    run = simulate(deployment, load, exact=exact)
    frame = run.records.frame()
    assert frame["status"].tolist() == ["timed_out", "completed"]
    assert frame["transfer_start_s"][0] == pytest.approx(0.010)
    assert frame["transfer_end_s"].isna().tolist() == [True, False]
    assert frame["prefill_start_s"][1] == pytest.approx(0.1701)
    assert frame["first_token_s"][1] == pytest.approx(0.1701 + 0.01 + 0.0001 + 0.004)
    assert run.pages_left == 0


HANDOFFS = st.builds(
    Handoff,
    st.builds(
        LinkSpec,
        st.just("rdma"),
        st.sampled_from([70_272e3, 3e6, 1e10]),
        st.sampled_from([0.0, 1e-4]),
        st.sampled_from([None, 35e6]),
    ),
    st.just(lambda tokens: 70_272.0 * tokens),
    overlap=st.booleans(),
    sender_convert_s=st.sampled_from([lambda tokens: 0.0, lambda tokens: 1e-5 * tokens]),
    receiver_convert_s=st.sampled_from([lambda tokens: 0.0, lambda tokens: 3e-5 * tokens]),
    receiver_share=st.sampled_from([1.0, 0.5, 2.0]),
    sender_ranks=st.sampled_from([1, 2]),
    receiver_ranks=st.sampled_from([1, 3]),
)


@settings(max_examples=150, deadline=None)
@given(deployments(), loads(), HANDOFFS)
def test_segments_and_single_steps_agree_whatever_is_on_the_wire(
    deployment: Deployment, load: Load, handoff: Handoff
) -> None:
    if deployment.handoff is not None:
        deployment = replace(deployment, handoff=handoff)
    fast, exact = simulate(deployment, load), simulate(deployment, load, exact=True)
    assert_same(fast, exact)
    assert fast.pages_left == 0
