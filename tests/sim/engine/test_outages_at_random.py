"""Requests, tokens and pages are conserved when instances die, links stop and clients try again.

Whatever happens: every request ends once, every attempt ends for its client, no page stays held,
and segments agree with single steps to the bit.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.sim.engine.test_simulate import assert_same, deployments, loads, offered
from tonnage.sim.engine.fleet import Deployment
from tonnage.sim.engine.simulate import simulate
from tonnage.sim.results.run import RunResult
from tonnage.sim.results.summary import wasted_tokens
from tonnage.sim.serving.breaker import BreakerSpec
from tonnage.sim.serving.outages import InstanceCrash, LinkFault, Outages
from tonnage.sim.serving.retries import FAILURES, BackOff, ClientSpec
from tonnage.sim.traffic.loads import Load

CRASHES = st.builds(
    InstanceCrash,
    role=st.none(),
    at_s=st.sampled_from([0.0, 0.02, 0.05, 0.11, 0.3, 0.7]),
    rate_per_hour=st.sampled_from([None, None, 3600.0]),
    restart_s=st.sampled_from([0.0, 0.04, 0.3]),
    noticed_s=st.sampled_from([0.0, 0.0, 0.1]),
    lost=st.sampled_from(["retry", "fail", "recompute", "recompute"]),
)
LINKS = st.builds(
    lambda at_s, lasts_s, factor: LinkFault(at_s, at_s + lasts_s, factor),
    st.sampled_from([0.0, 0.02, 0.3]),
    st.sampled_from([0.05, 0.5]),
    st.sampled_from([0.0, 0.001, 0.5]),
)
CLIENTS = st.builds(
    ClientSpec,
    attempts=st.integers(1, 4),
    retry_on=st.sampled_from([frozenset(FAILURES), frozenset({"aborted"})]),
    back_off=st.sampled_from([BackOff(0.0), BackOff(0.03, 2.0, 0.1, 0.5)]),
    breaker=st.sampled_from(
        [None, BreakerSpec("pool", 2, 0.2, 1), BreakerSpec("instance", 2, 0.2, 1)]
    ),
    deadline_s=st.sampled_from([None, None, 0.6]),
)


@st.composite
def disturbed(draw: st.DrawFn) -> Deployment:
    deployment = draw(deployments())
    links = () if deployment.handoff is None else tuple(draw(st.lists(LINKS, max_size=2)))
    outages = Outages(
        tuple(draw(st.lists(CRASHES, max_size=3))), links, draw(st.sampled_from([0.0, 0.5]))
    )
    routing = replace(deployment.routing, waits=draw(st.booleans()))
    return replace(deployment, routing=routing, clients=draw(CLIENTS), outages=outages)


def check(run: RunResult, load: Load) -> None:
    """Everything ended once, and nothing is left."""
    frame = run.records.frame()
    assert frame["id"].tolist() == list(range(offered(load)))
    assert run.pages_left == 0
    assert run.attempts is not None
    attempts = run.attempts.frame()
    assert (attempts["outcome"] != "").all()
    assert (attempts["end_s"] >= attempts["start_s"]).all()
    made = attempts.groupby("id").size()
    assert made.tolist() == frame["attempts"].tolist()
    served = attempts[attempts["outcome"] == "served"]
    done = frame[frame["status"] == "completed"]
    assert served["id"].sort_values().tolist() == done["id"].tolist()  # none of them twice
    assert (done["generated_tokens"] == done["output_tokens"]).all()
    assert (done["finish_s"] >= done["first_token_s"]).all()
    assert (done["first_token_s"] >= done["arrival_s"]).all()
    assert frame.loc[frame["status"] != "completed", "finish_s"].isna().all()
    assert (frame["generated_tokens"] <= frame["output_tokens"]).all()
    # A prompt is computed in full, from a cache, or again after something was lost.
    covered = done["computed_tokens"] + done["cached_tokens"]
    assert (covered >= done["input_tokens"]).all()
    for name in ("lost_prompt_tokens", "lost_output_tokens"):
        assert (frame[name] >= 0).all()
        assert (frame.loc[(frame["attempts"] == 1) & (run_moved(run) == 0), name] == 0).all()
    assert min(wasted_tokens(run.records).values()) >= 0


def run_moved(run: RunResult) -> int:
    assert run.outages is not None
    return run.outages.moved


@settings(max_examples=40, deadline=None)
@given(disturbed(), loads(), st.integers(0, 3))
def test_all_is_conserved(deployment: Deployment, load: Load, seed: int) -> None:
    run = simulate(deployment, load, seed=seed)
    check(run, load)
    assert run.outages is not None
    event(f"crashes: {min(len(run.outages.crashes), 4)}, moved: {run.outages.moved > 0}")
    exact = simulate(deployment, load, seed=seed, exact=True)
    assert_same(run, exact)
    assert exact.attempts is not None
    assert run.attempts is not None
    assert run.attempts.frame().equals(exact.attempts.frame())
    assert run.outages == exact.outages


@settings(max_examples=20, deadline=None)
@given(deployments(), loads(), st.integers(0, 3))
def test_clients_that_try_once_change_nothing(
    deployment: Deployment, load: Load, seed: int
) -> None:
    plain = simulate(deployment, load, seed=seed)
    once = simulate(replace(deployment, clients=ClientSpec()), load, seed=seed)
    assert plain.makespan_s == once.makespan_s
    assert plain.busy_s == once.busy_s
    frame = once.records.frame()
    assert (frame["attempts"] == 1).all() or frame.empty
    assert frame[plain.records.frame().columns].equals(plain.records.frame())
