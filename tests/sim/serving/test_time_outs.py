"""Clients that give up, at every stage of a request: everything is freed, the record says so.

Every step takes 10 ms. A request is dropped at the end of the step during which its client goes.
Times in the docstrings are in ms; a page holds one token.
"""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest

from tests.sim.engine.harness import AffineTimes, colocated, disaggregated
from tonnage.sim.domain import Request
from tonnage.sim.engine.fleet import Deployment
from tonnage.sim.engine.simulate import simulate
from tonnage.sim.results.run import RunResult
from tonnage.sim.results.summary import wasted_tokens
from tonnage.sim.serving.policy import PLAIN, SGLANG, VLLM, Policy
from tonnage.sim.traffic.loads import OpenLoad

TEN_MS = AffineTimes(0.01, 0.0, 0.0, 0.0)
RECKLESS = replace(SGLANG, output_charge_most=2)


def asks(*triples: tuple[float, int, int]) -> list[Request]:
    """Return requests by (arrival in ms, input, output)."""
    return [
        Request(number, arrival_ms / 1000, inputs, outputs)
        for number, (arrival_ms, inputs, outputs) in enumerate(triples)
    ]


def one_instance(pages: int, policy: Policy = PLAIN, chunk: int = 8192) -> Deployment:
    return colocated(times=TEN_MS, kv_tokens=pages, policy=policy, chunk_tokens=chunk)


def split(prefill: int, decode: int, policy: Policy, restore_s: float = 0.0) -> Deployment:
    """KV travels 0.1 ms and 1 ms per token."""
    deployment = disaggregated(
        times=TEN_MS,
        kv_tokens=prefill,
        bandwidth_bytes_per_s=70_272e3,
        policy=policy,
        restore_s_per_token=restore_s,
    )
    plan = deployment.pools["decode"]
    smaller = replace(plan, scheduling=replace(plan.scheduling, kv_tokens=decode))
    return replace(deployment, pools={**deployment.pools, "decode": smaller})


def frame_of(run: RunResult) -> pd.DataFrame:
    """Return the records of a run that has freed everything."""
    assert run.pages_left == 0
    frame = run.records.frame()
    gone = frame["status"] == "timed_out"
    assert frame.loc[gone, "finish_s"].isna().all()
    assert frame["generated_tokens"].between(0, frame["output_tokens"]).all()
    return frame


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("policy", [PLAIN, SGLANG, VLLM], ids=lambda policy: policy.name)
def test_while_decoding_and_while_waiting(policy: Policy, exact: bool) -> None:
    """A has 20 of 30 pages and goes at 35, during its third decode step; B, which waits, at 36.

    C, with all of the pages, comes at 37 and starts at 40.
    """
    load = OpenLoad(asks((0, 20, 10), (1, 20, 2), (37, 30, 1)), 0.035)
    run = simulate(one_instance(30, policy), load, exact=exact)
    frame = frame_of(run)
    assert frame["status"].tolist() == ["timed_out", "timed_out", "completed"]
    assert frame["generated_tokens"].tolist() == [4, 0, 1]
    assert frame["computed_tokens"].tolist() == [20, 0, 30]
    assert frame["prefill_start_s"].isna().tolist() == [False, True, False]
    assert frame["finish_s"][2] == pytest.approx(0.05, abs=1e-9)
    assert wasted_tokens(run.records) == {"prompt_tokens": 20, "output_tokens": 4}


@pytest.mark.parametrize("policy", [PLAIN, SGLANG, VLLM], ids=lambda policy: policy.name)
def test_in_the_middle_of_a_prompt(policy: Policy) -> None:
    """A goes at 65, during its seventh chunk of 20 tokens: 140 are computed in vain.

    B needs 70 of the 200 pages, of which A has 140; its four chunks end at 110.
    """
    load = OpenLoad(asks((0, 200, 1), (66, 70, 1)), 0.065)
    run = simulate(one_instance(200, policy, chunk=20), load)
    frame = frame_of(run)
    assert frame["status"].tolist() == ["timed_out", "completed"]
    assert frame["computed_tokens"].tolist() == [140, 70]
    assert frame["first_token_s"].isna().tolist() == [True, False]
    assert frame["finish_s"][1] == pytest.approx(0.11, abs=1e-9)
    assert wasted_tokens(run.records) == {"prompt_tokens": 140, "output_tokens": 0}


def test_during_the_last_chunk_of_a_prompt() -> None:
    """Its first token is computed, at 10, and nobody waits for it any more."""
    run = simulate(one_instance(100), OpenLoad(asks((0, 20, 5)), 0.005))
    frame = frame_of(run)
    assert frame["status"].tolist() == ["timed_out"]
    assert frame["first_token_s"].isna().all()
    assert wasted_tokens(run.records) == {"prompt_tokens": 20, "output_tokens": 1}


def test_after_a_retraction() -> None:
    """As in `test_sglang_schedule.py`: B is retracted at 60 with 6 tokens; A ends at 80.

    B goes at 85, at the front of the queue, its prompt's pages still there. C takes all pages.
    """
    load = OpenLoad(asks((0, 4, 8), (0, 5, 8), (86, 20, 1)), 0.085)
    run = simulate(one_instance(20, RECKLESS, chunk=32), load)
    frame = frame_of(run)
    assert frame["status"].tolist() == ["completed", "timed_out", "completed"]
    assert frame["retractions"].tolist() == [0, 1, 0]
    assert frame["generated_tokens"].tolist() == [8, 6, 1]
    assert frame["finish_s"][2] == pytest.approx(0.10, abs=1e-9)
    assert wasted_tokens(run.records) == {"prompt_tokens": 5, "output_tokens": 6}


def test_computed_again_after_a_retraction_and_served() -> None:
    """B computes 6 of 11 tokens again: wasted, though its client stays."""
    run = simulate(one_instance(20, RECKLESS), OpenLoad(asks((0, 4, 8), (0, 5, 8))))
    frame = frame_of(run)
    assert frame["status"].tolist() == ["completed", "completed"]
    assert frame["computed_tokens"].tolist() == [4, 5 + 6]
    assert wasted_tokens(run.records) == {"prompt_tokens": 6, "output_tokens": 0}


@pytest.mark.parametrize(
    "policy", [replace(SGLANG, reserved_decode_tokens=1), VLLM], ids=lambda policy: policy.name
)
def test_while_its_kv_travels(policy: Policy) -> None:
    """A's KV travels from 10 to 110.1; A goes at 60, its pages at both ends when it has arrived.

    B, there since 90, is computed from then on: until 120.1, and its KV takes 5.1.
    """
    run = simulate(split(102, 102, policy), OpenLoad(asks((0, 100, 2), (90, 5, 1)), 0.06))
    frame = frame_of(run)
    assert frame["status"].tolist() == ["timed_out", "completed"]
    assert frame["transfer_end_s"][0] == pytest.approx(0.1101, abs=1e-8)
    assert frame["first_token_s"].isna().tolist() == [True, False]
    assert frame["finish_s"][1] == pytest.approx(0.1252, abs=1e-8)
    assert wasted_tokens(run.records) == {"prompt_tokens": 100, "output_tokens": 1}


def test_while_it_waits_for_decode_pages_before_its_prompt() -> None:
    """A decodes from 20.1 on and goes at 35; B, without pages so far, at 36. Both are out at 40.1.

    C gets pages then, and is computed until 50.1.
    """
    policy = replace(SGLANG, reserved_decode_tokens=1)
    load = OpenLoad(asks((0, 10, 9), (1, 10, 9), (32, 10, 1)), 0.035)
    run = simulate(split(100, 20, policy), load)
    frame = frame_of(run)
    assert frame["status"].tolist() == ["timed_out", "timed_out", "completed"]
    assert frame["prefill_start_s"].isna().tolist() == [False, True, False]
    assert frame["generated_tokens"].tolist() == [3, 0, 1]
    assert frame["prefill_end_s"][2] == pytest.approx(0.0501, abs=1e-8)
    assert wasted_tokens(run.records) == {"prompt_tokens": 10, "output_tokens": 3}


def test_while_it_waits_for_decode_pages_after_its_prompt() -> None:
    """B's prompt is computed until 20; it waits for pages, goes at 36 and is out at 40.1.

    Its 10 prompt pages go too: C, which needs 11 of 20, starts when they have.
    """
    load = OpenLoad(asks((0, 10, 9), (1, 10, 9), (32, 11, 1)), 0.035)
    run = simulate(split(20, 19, VLLM), load)
    frame = frame_of(run)
    assert frame["status"].tolist() == ["timed_out", "timed_out", "completed"]
    assert frame["prefill_end_s"].tolist() == pytest.approx([0.01, 0.02, 0.0501], abs=1e-8)
    assert frame["transfer_start_s"].isna().tolist() == [False, True, False]
    assert wasted_tokens(run.records) == {"prompt_tokens": 20, "output_tokens": 3 + 1}


@pytest.mark.parametrize("gone_ms", [95, 105])
def test_while_its_kv_is_on_the_host_or_on_its_way_back(gone_ms: int) -> None:
    """As in `test_decode_pool.py`: B, with 6 tokens, is backed up at 60.1; its pages come back at
    100.1, its KV 10 ms later. A is served by 90.1.
    """
    policy = replace(SGLANG, reserved_decode_tokens=1)
    deployment = split(100, 20, policy, restore_s=1e-3)
    assert deployment.handoff is not None
    at_once = replace(deployment.handoff, wire_bytes=lambda tokens: 0.0)
    fast = replace(deployment, handoff=at_once)
    run = simulate(fast, OpenLoad(asks((0, 5, 9), (0, 5, 9)), gone_ms / 1000))
    frame = frame_of(run)
    assert frame["status"].tolist() == ["completed", "timed_out"]
    assert frame["retractions"].tolist() == [0, 1]
    assert frame["generated_tokens"].tolist() == [9, 6]
    assert wasted_tokens(run.records) == {"prompt_tokens": 5, "output_tokens": 6}
