"""Instances that die, links that stop, aborts that get lost: schedules by hand.

Every step takes 10 ms and one prompt token of KV 1 ms on its way, after 0.1 ms. Times in the
docstrings are in ms; a page holds one token.
"""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest

from tests.sim.engine.harness import AffineTimes, colocated, disaggregated
from tonnage.sim.domain import BadInputError, Request
from tonnage.sim.engine.fleet import Deployment
from tonnage.sim.engine.simulate import simulate
from tonnage.sim.results.run import RunResult
from tonnage.sim.results.summary import request_counts, wasted_tokens
from tonnage.sim.serving.breaker import BreakerSpec
from tonnage.sim.serving.outages import InstanceCrash, LinkFault, Lost, Outages
from tonnage.sim.serving.policy import PLAIN, SGLANG, VLLM, Policy
from tonnage.sim.serving.retries import BackOff, ClientSpec
from tonnage.sim.traffic.loads import Lengths, OpenLoad, ResidentLoad

TEN_MS = AffineTimes(0.01, 0.0, 0.0, 0.0)
TWICE = ClientSpec(2, back_off=BackOff(0.005, 1.0, 1.0, 0.0))  # again after 5 ms
EAGER = replace(SGLANG, reserved_decode_tokens=1)


def asks(*triples: tuple[float, int, int]) -> list[Request]:
    """Return requests by (arrival in ms, input, output)."""
    return [
        Request(number, arrival_ms / 1000, inputs, outputs)
        for number, (arrival_ms, inputs, outputs) in enumerate(triples)
    ]


def split(
    prefills: int = 1,
    decodes: int = 1,
    *,
    policy: Policy = PLAIN,
    chunk: int = 8192,
    pages: int = 1000,
    at_once: bool = False,
) -> Deployment:
    """`at_once`: KV takes 0.1 ms whatever its size."""
    deployment = disaggregated(
        prefills,
        decodes,
        times=TEN_MS,
        kv_tokens=pages,
        chunk_tokens=chunk,
        policy=policy,
        bandwidth_bytes_per_s=70_272e3,
    )
    assert deployment.handoff is not None
    if at_once:
        handoff = replace(deployment.handoff, wire_bytes=lambda tokens: 0.0)
        return replace(deployment, handoff=handoff)
    return deployment


def run_with(
    deployment: Deployment,
    requests: list[Request],
    *crashes: InstanceCrash,
    clients: ClientSpec | None = None,
    links: tuple[LinkFault, ...] = (),
    lost_abort: float = 0.0,
    timeout_s: float | None = None,
) -> RunResult:
    """Run, in segments and step by step; both must agree, and free everything."""
    outages = Outages(crashes, links, lost_abort)
    disturbed = replace(deployment, clients=clients, outages=outages)
    run = simulate(disturbed, OpenLoad(requests, timeout_s))
    exact = simulate(disturbed, OpenLoad(requests, timeout_s), exact=True)
    assert run.records.frame().equals(exact.records.frame())
    assert run.pages_left == exact.pages_left == 0
    return run


def only_row(run: RunResult) -> pd.Series:
    frame = run.records.frame()
    assert len(frame) == 1
    return frame.iloc[0]


def crash(role: str, at_ms: float, lost: Lost = "retry", **more: object) -> InstanceCrash:
    """Return a crash of instance 0, which is away for a second."""
    fields = {"restart_s": 1.0, **more}
    return InstanceCrash(role, 0, at_ms / 1000, lost=lost, **fields)  # type: ignore[arg-type]


# --- a decode instance --------------------------------------------------------------------------

ONE = asks((0, 10, 10))  # prompt until 10, first token at 10.1, then 20.1, 30.1, 40.1 ...


def test_its_requests_fail() -> None:
    """At 45 it has four tokens; the step under way gives none."""
    run = run_with(split(1, 2, at_once=True), ONE, crash("decode", 45, "fail"), clients=TWICE)
    row = only_row(run)
    assert (row["status"], row["reason"]) == ("aborted", "its instance crashed")
    assert (row["attempts"], row["generated_tokens"], row["computed_tokens"]) == (1, 4, 10)
    assert pd.isna(row["finish_s"])
    assert wasted_tokens(run.records) == {"prompt_tokens": 10, "output_tokens": 4}


def test_its_clients_try_again() -> None:
    """Again at 50: the prompt until 60, its KV at 60.1, nine more tokens until 150.1."""
    run = run_with(split(1, 2, at_once=True), ONE, crash("decode", 45), clients=TWICE)
    row = only_row(run)
    assert (row["status"], row["attempts"], row["decode_instance"]) == ("completed", 2, 1)
    assert row["first_token_s"] == pytest.approx(0.0601, abs=1e-8)
    assert row["e2e_s"] == pytest.approx(0.1501, abs=1e-8)  # from the first attempt on
    assert (row["lost_prompt_tokens"], row["lost_output_tokens"]) == (10, 4)
    assert wasted_tokens(run.records) == {"prompt_tokens": 10, "output_tokens": 4}
    assert run.attempts is not None
    attempts = run.attempts.frame()
    assert attempts["outcome"].tolist() == ["aborted", "served"]
    assert attempts["end_s"].tolist() == pytest.approx([0.045, 0.1501], abs=1e-8)
    assert request_counts(run.records)["retried"] == 1


def test_its_requests_go_on_elsewhere() -> None:
    """Prompt and four tokens are computed from 45 to 55; tokens at 55.1, 65.1 ... 105.1.

    The client sees a pause of 15 between its fourth and fifth token.
    """
    run = run_with(split(1, 2, at_once=True), ONE, crash("decode", 45, "recompute"))
    row = only_row(run)
    assert (row["status"], row["attempts"], row["decode_instance"]) == ("completed", 1, 1)
    assert (row["input_tokens"], row["output_tokens"]) == (10, 10)
    assert row["first_token_s"] == pytest.approx(0.0101, abs=1e-8)
    assert row["finish_s"] == pytest.approx(0.1051, abs=1e-8)
    assert (row["computed_tokens"], row["generated_tokens"]) == (10 + 14, 10)
    assert wasted_tokens(run.records) == {"prompt_tokens": 14, "output_tokens": 0}
    assert run.gaps.count == 9
    assert run.gaps.mean() * 9 == pytest.approx(0.095, abs=1e-8)
    assert run.gaps.quantile(1.0) == pytest.approx(0.015, rel=0.01)


def test_a_request_can_move_twice() -> None:
    """Again at 70, with six tokens, to the one that is back: 16 are computed until 80."""
    crashes = (
        crash("decode", 45, "recompute", restart_s=0.01),
        InstanceCrash("decode", 1, 0.07, lost="recompute"),
    )
    run = run_with(split(1, 2, at_once=True), ONE, *crashes)
    row = only_row(run)
    assert row["finish_s"] == pytest.approx(0.0801 + 0.03, abs=1e-8)
    assert (row["computed_tokens"], row["generated_tokens"]) == (10 + 14 + 16, 10)
    assert run.gaps.count == 9


@pytest.mark.parametrize("policy", [EAGER, VLLM], ids=lambda policy: policy.name)
def test_kv_on_its_way_to_it_is_dropped_and_the_sender_is_free(policy: Policy) -> None:
    """A's KV travels from 10.1 on; at 60 its receiver dies. B, which needs A's pages, starts.

    Both pools have room for one of them.
    """
    requests = asks((0, 100, 2), (30, 100, 1))
    deployment = split(1, 2, policy=policy, pages=120)
    frame = run_with(deployment, requests, crash("decode", 60)).records.frame()
    assert frame["status"].tolist() == ["aborted", "completed"]
    assert frame["prefill_start_s"][1] == pytest.approx(0.06, abs=1e-8)
    assert frame["transfer_end_s"].isna().tolist() == [True, False]


def test_prompts_that_wait_for_its_pages_leave_the_prefill_instance() -> None:
    """SGLang gives decode pages first: A's prompt, half computed, is dropped at a boundary."""
    deployment = split(1, 1, policy=EAGER, chunk=20)
    row = only_row(run_with(deployment, asks((0, 200, 2)), crash("decode", 45)))
    assert (row["status"], row["computed_tokens"]) == ("aborted", 100)
    assert pd.isna(row["prefill_end_s"])


# --- a prefill instance -------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [PLAIN, EAGER, VLLM], ids=lambda policy: policy.name)
def test_prompts_under_way_are_computed_again_elsewhere(policy: Policy) -> None:
    """Ten chunks of 20; at 45 four are done and lost; the other one takes from 50 to 150."""
    deployment = split(2, 1, policy=policy, chunk=20, at_once=True)
    run = run_with(deployment, asks((0, 200, 1)), crash("prefill", 45), clients=TWICE)
    row = only_row(run)
    assert (row["status"], row["prefill_instance"]) == ("completed", 1)
    assert row["prefill_end_s"] == pytest.approx(0.15, abs=1e-8)
    assert (row["computed_tokens"], row["lost_prompt_tokens"]) == (200, 80)


@pytest.mark.parametrize("policy", [PLAIN, EAGER, VLLM], ids=lambda policy: policy.name)
def test_who_decodes_already_hears_nothing(policy: Policy) -> None:
    """Its KV has left: the tokens come when they would."""
    quiet = run_with(split(at_once=True, policy=policy), ONE)
    run = run_with(split(at_once=True, policy=policy), ONE, crash("prefill", 45))
    assert only_row(run)["finish_s"] == only_row(quiet)["finish_s"]


# --- no instance --------------------------------------------------------------------------------


def test_without_an_instance_requests_are_rejected_or_wait() -> None:
    """The only instance is away from 5 to 105; the request comes at 20."""
    down = crash("serve", 5, restart_s=0.1)
    requests = asks((20, 10, 2))
    rejecting = colocated(times=TEN_MS)
    row = only_row(run_with(rejecting, requests, down))
    assert (row["status"], row["reason"]) == ("rejected", "no instance is up")
    waiting = replace(rejecting, routing=replace(rejecting.routing, waits=True))
    row = only_row(run_with(waiting, requests, down))
    assert row["prefill_start_s"] == pytest.approx(0.105, abs=1e-8)
    assert row["e2e_s"] == pytest.approx(0.105 + 0.02 - 0.02, abs=1e-8)


def test_who_waits_for_an_instance_can_give_up() -> None:
    deployment = colocated(times=TEN_MS)
    waiting = replace(deployment, routing=replace(deployment.routing, waits=True))
    run = run_with(waiting, asks((20, 10, 2)), crash("serve", 5), timeout_s=0.05)
    assert only_row(run)["status"] == "timed_out"


def test_what_a_router_sends_before_it_notices_fails_at_once() -> None:
    """Of two instances one is dead from 5 on; the router takes turns until 45."""
    requests = asks(*[(10.0 * n, 5, 1) for n in range(1, 9)])
    run = run_with(colocated(2, times=TEN_MS), requests, crash("serve", 5, noticed_s=0.04))
    frame = run.records.frame()
    assert frame["status"].tolist() == ["aborted", "completed"] * 2 + ["completed"] * 4
    assert set(frame["reason"].dropna()) == {"the instance that it was sent to is down"}


def test_a_breaker_per_instance_finds_out_before_the_router() -> None:
    """Two failures in a row at instance 0, at 10 and 30, and it is passed over until 530."""
    requests = asks(*[(10.0 * n, 5, 1) for n in range(1, 41)])
    clients = ClientSpec(breaker=BreakerSpec("instance", 2, 0.5, 1))
    down = crash("serve", 5, noticed_s=1.0)
    frame = run_with(colocated(2, times=TEN_MS), requests, down, clients=clients).records.frame()
    assert (frame["status"] == "aborted").sum() == 2
    blind = run_with(colocated(2, times=TEN_MS), requests, down).records.frame()
    assert (blind["status"] == "aborted").sum() == 20


def test_an_instance_that_is_back_is_empty_and_used_again() -> None:
    requests = asks((0, 10, 10), (200, 10, 1), (300, 10, 1))
    frame = run_with(colocated(2, times=TEN_MS), requests, crash("serve", 45, restart_s=0.1))
    assert frame.records.frame()["decode_instance"].tolist() == [0, 1, 0]


# --- links and aborts ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factor", "arrives_ms"), [(0.0, 140.1), (0.5, 125.1), (0.25, 132.6)], ids=str
)
@pytest.mark.parametrize("role", [None, "prefill", "decode"])
def test_a_slow_link_delays_what_is_on_its_way(
    factor: float, arrives_ms: float, role: str | None
) -> None:
    """100 ms of KV leave at 10.1; from 50 to 80 they travel at a part of their rate."""
    fault = LinkFault(0.05, 0.08, factor, role)
    row = only_row(run_with(split(), asks((0, 100, 2)), links=(fault,)))
    assert row["transfer_end_s"] * 1000 == pytest.approx(arrives_ms, abs=1e-4)


def test_slow_spans_multiply_and_other_instances_do_not_suffer() -> None:
    """At half of a half from 50 to 80 for instance 0 alone."""
    faults = (LinkFault(0.05, 0.08, 0.5, "prefill", 0), LinkFault(0.05, 0.08, 0.5, "decode", 0))
    run = run_with(split(2, 2), asks((0, 100, 2), (0, 100, 2)), links=faults)
    arrived_s = run.records.frame()["transfer_end_s"]
    assert (arrived_s * 1000).tolist() == pytest.approx([125.1, 110.1], abs=1e-4)
    both = (LinkFault(0.05, 0.08, 0.5, "prefill", 0), LinkFault(0.05, 0.08, 0.5, "prefill", 0))
    row = only_row(run_with(split(), asks((0, 100, 2)), links=both))
    assert row["transfer_end_s"] * 1000 == pytest.approx(132.6, abs=1e-4)


def test_a_colocated_pool_has_no_link() -> None:
    fault = LinkFault(0.0, 1.0, 0.5)
    deployment = replace(colocated(), outages=Outages(links=(fault,)))
    with pytest.raises(BadInputError, match="no link"):
        simulate(deployment, OpenLoad(ONE))


def test_an_abort_that_is_lost_lets_the_server_go_on() -> None:
    """A dead link holds A's KV until 40. Its client leaves at 35 and sends it again.

    The first attempt decodes until 50 for nobody. The second has its prompt at 45, and pages when
    that step ends; its KV is there at 50.1, its second token at 60.1.
    """
    link = (LinkFault(0.0, 0.04),)
    again = ClientSpec(2, back_off=BackOff(0.0))
    told = run_with(
        split(at_once=True), asks((0, 10, 2)), clients=again, links=link, timeout_s=0.035
    )
    lost = run_with(
        split(at_once=True),
        asks((0, 10, 2)),
        clients=again,
        links=link,
        timeout_s=0.035,
        lost_abort=1.0,
    )
    row = only_row(lost)
    assert (row["status"], row["attempts"]) == ("completed", 2)
    assert row["e2e_s"] == pytest.approx(0.0601, abs=1e-8)
    assert (row["lost_prompt_tokens"], row["lost_output_tokens"]) == (10, 2)
    assert only_row(told)["lost_output_tokens"] == 1  # with its prompt, which was not stopped
    assert only_row(told)["e2e_s"] < row["e2e_s"]


def test_a_client_that_left_is_not_served_though_its_request_is_completed() -> None:
    run = run_with(colocated(times=TEN_MS), asks((0, 10, 10)), lost_abort=1.0, timeout_s=0.035)
    row = only_row(run)
    assert (row["status"], row["generated_tokens"]) == ("timed_out", 10)
    assert pd.isna(row["finish_s"])
    assert row["first_token_s"] == pytest.approx(0.01, abs=1e-8)
    assert wasted_tokens(run.records) == {"prompt_tokens": 10, "output_tokens": 10}
    assert run.makespan_s == pytest.approx(0.1, abs=1e-8)


# --- by chance ----------------------------------------------------------------------------------


def test_crashes_come_at_their_rate() -> None:
    """Two instances at 360 an hour each: one in 10 s of being up, 1 s away: 36 in 200 s of both.

    The number is nearly Poisson; three standard deviations are 18.
    """
    crashes = InstanceCrash(rate_per_hour=360.0, restart_s=1.0)
    requests = asks(*[(100.0 * n, 5, 1) for n in range(2000)])
    run = run_with(colocated(2, times=TEN_MS), requests, crashes)
    assert run.outages is not None
    assert 36 - 18 <= len(run.outages.crashes) <= 36 + 18
    again = run_with(colocated(2, times=TEN_MS), requests, crashes)
    assert again.outages == run.outages


def test_resident_requests_have_no_outages() -> None:
    deployment = replace(disaggregated(), outages=Outages((crash("decode", 5),)))
    with pytest.raises(BadInputError, match="resident"):
        simulate(deployment, ResidentLoad(1, [Lengths(10, 10)]))
