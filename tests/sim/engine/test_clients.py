"""Clients that try again, in every kind of load: attempts by hand, users, sessions, Little's law.

Every step takes 10 ms. Times in the docstrings are in ms; a page holds one token.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.sim.engine.harness import AffineTimes, colocated, disaggregated, poisson_requests
from tonnage.sim.domain import Request
from tonnage.sim.engine import disaggregated as disaggregated_fleet
from tonnage.sim.engine import fleet
from tonnage.sim.engine.fleet import Deployment
from tonnage.sim.engine.simulate import simulate
from tonnage.sim.results.run import RunResult
from tonnage.sim.results.summary import request_counts
from tonnage.sim.serving.breaker import BreakerSpec
from tonnage.sim.serving.decode import DecodeScheduler
from tonnage.sim.serving.outages import InstanceCrash, Outages
from tonnage.sim.serving.plan import Plan
from tonnage.sim.serving.retries import BackOff, ClientSpec
from tonnage.sim.serving.scheduler import ServeScheduler
from tonnage.sim.traffic.loads import ClosedLoad, Lengths, OpenLoad, ResidentLoad
from tonnage.sim.traffic.sessions import Session, SessionLoad, SessionSource, Turn

TEN_MS = AffineTimes(0.01, 0.0, 0.0, 0.0)
INTEGRITY = "integrity: a page of another request"


def asking(spec: ClientSpec, deployment: Deployment | None = None) -> Deployment:
    return replace(deployment or colocated(times=TEN_MS), clients=spec)


def outcomes(run: RunResult) -> list[tuple[int, int, int, str]]:
    """Return (request, start, end, outcome) of every attempt, times in ms."""
    assert run.attempts is not None
    frame = run.attempts.frame()
    times = [(frame[name] * 1000).round(3).tolist() for name in ("start_s", "end_s")]
    return list(zip(frame["id"], *times, frame["outcome"], strict=True))


def test_time_outs_back_off_and_a_last_attempt() -> None:
    """A needs 100 and is left after 35, three times: at 35, 35 + 20 + 35, 90 + 40 + 35.

    Every attempt has its prompt and two tokens more by then, the step under way ends too.
    """
    clients = ClientSpec(3, back_off=BackOff(0.02, 2.0, 1.0, 0.0))
    run = simulate(asking(clients), OpenLoad([Request(0, 0.0, 10, 10)], 0.035))
    assert outcomes(run) == [
        (0, 0, 35, "timed_out"),
        (0, 55, 90, "timed_out"),
        (0, 130, 165, "timed_out"),
    ]
    row = run.records.frame().iloc[0]
    assert (row["status"], row["attempts"], row["generated_tokens"]) == ("timed_out", 3, 4)
    assert (row["lost_prompt_tokens"], row["lost_output_tokens"]) == (20, 8)
    assert row["arrival_s"] == 0.0


def test_a_deadline_ends_an_attempt_and_forbids_the_next() -> None:
    """Of 80 in all: the second attempt, from 55, is left at 80; no third one."""
    clients = ClientSpec(9, back_off=BackOff(0.02, 2.0, 1.0, 0.0), deadline_s=0.08)
    run = simulate(asking(clients), OpenLoad([Request(0, 0.0, 10, 10)], 0.035))
    assert outcomes(run) == [(0, 0, 35, "timed_out"), (0, 55, 80, "timed_out")]
    assert run.makespan_s == pytest.approx(0.085)


def test_what_nobody_could_ever_hold_is_not_sent_twice() -> None:
    deployment = asking(ClientSpec(5), colocated(times=TEN_MS, kv_tokens=15))
    run = simulate(deployment, OpenLoad([Request(0, 0.0, 10, 10)]))
    assert outcomes(run) == [(0, 0, 0, "rejected")]


def test_only_the_failures_that_are_named_are_tried_again() -> None:
    clients = ClientSpec(3, frozenset({"aborted"}), BackOff(0.0))
    run = simulate(asking(clients), OpenLoad([Request(0, 0.0, 10, 10)], 0.035))
    assert [one[3] for one in outcomes(run)] == ["timed_out"]


def test_an_open_breaker_refuses_before_anything_is_sent() -> None:
    """The first two time out at 35 and 36: it is open until 136, half open for C, closed for D."""
    clients = ClientSpec(breaker=BreakerSpec("pool", 2, 0.1, 1))
    requests = [
        Request(0, 0.0, 10, 10),
        Request(1, 0.001, 10, 10),
        Request(2, 0.1, 10, 1),
        Request(3, 0.14, 10, 1),
        Request(4, 0.141, 10, 1),
        Request(5, 0.2, 10, 1),
    ]
    run = simulate(asking(clients), OpenLoad(requests, 0.035))
    ended = ["timed_out", "timed_out", "refused", "served", "refused", "served"]
    assert [one[3] for one in outcomes(run)] == ended
    frame = run.records.frame()
    assert frame["reason"][2] == "a circuit breaker is open"
    assert request_counts(run.records)["rejected"] == 2


# --- aborts by the server, in every load --------------------------------------------------------


def drop_once(scheduler: ServeScheduler, plan: Plan, dropped: set[int]) -> Plan:
    """Abort every third request when it decodes for the first time, as an integrity check does."""
    for sequence in list(scheduler._batch.live_sequences()):
        number = sequence.request.id
        if number % 3 == 0 and number < 2**40 and number not in dropped:
            dropped.add(number)
            scheduler._withdraw(sequence)
            sequence.aborted = INTEGRITY
            plan.failed = [*plan.failed, sequence]
    return plan


class SuspiciousServe(ServeScheduler):
    def _let_in(self, plan: Plan, step_index: int) -> None:
        drop_once(self, plan, self.__dict__.setdefault("dropped", set()))


class SuspiciousDecode(DecodeScheduler):
    def _let_in(self, plan: Plan, step_index: int) -> None:
        super()._let_in(plan, step_index)
        drop_once(self, plan, self.__dict__.setdefault("dropped", set()))


@pytest.fixture
def suspicious(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every third request be aborted once."""
    monkeypatch.setattr(
        fleet, "serve_scheduler", lambda spec, shared: SuspiciousServe(next(spec.lanes())[0])
    )
    monkeypatch.setattr(
        disaggregated_fleet,
        "decode_scheduler",
        lambda spec, in_place=False: SuspiciousDecode(next(spec.lanes())[0], in_place=in_place),
    )


AGAIN = ClientSpec(2, back_off=BackOff(0.02, 2.0, 1.0, 0.0))
TWELVE = [Lengths(10, 5)] * 12


@pytest.mark.usefixtures("suspicious")
@pytest.mark.parametrize("deployment", [colocated(times=TEN_MS), disaggregated(times=TEN_MS)])
def test_requests_that_a_server_aborts_are_sent_again_and_users_wait(
    deployment: Deployment,
) -> None:
    """Of 12 requests, numbers 0, 3, 6, 9 take two attempts, and their users are not free before."""
    loads = (
        OpenLoad([Request(n, n * 0.001, 10, 5) for n in range(12)]),
        ClosedLoad(3, TWELVE),
    )
    for load in loads:
        run = simulate(asking(AGAIN, deployment), load)
        frame = run.records.frame()
        assert set(frame["status"]) == {"completed"}
        assert frame.index[frame["attempts"] == 2].tolist() == [0, 3, 6, 9]
        assert request_counts(run.records)["retried"] == 4
        assert run.pages_left == 0
        once = simulate(asking(ClientSpec(), deployment), load).records.frame()
        assert set(once["reason"].dropna()) == {INTEGRITY}
        assert (once["status"] == "aborted").sum() == 4


@pytest.mark.usefixtures("suspicious")
def test_a_resident_request_that_is_aborted_starts_anew() -> None:
    """It had a share of its output written when it came; the second attempt begins at its first."""
    run = simulate(asking(AGAIN, disaggregated(times=TEN_MS)), ResidentLoad(4, TWELVE))
    frame = run.records.frame()
    assert set(frame["status"]) == {"completed"}
    assert (frame["attempts"] == 2).sum() >= 3
    again = frame[frame["attempts"] == 2]
    assert (again["lost_output_tokens"] <= 1).all()


class TwoSessions(SessionSource):
    """Two sessions of three turns."""

    def __iter__(self):  # type: ignore[no-untyped-def]
        turns = tuple(Turn(0.05, 10 * n, 5, 0, ()) for n in (1, 2, 3))
        yield from (Session(number, 0.0, 0, turns) for number in range(2))


@pytest.mark.usefixtures("suspicious")
def test_a_session_goes_on_after_a_second_attempt_and_ends_without() -> None:
    load = SessionLoad(TwoSessions(), concurrency=2)
    again = simulate(asking(AGAIN), load).records.frame()
    assert again["status"].tolist() == ["completed"] * 6
    assert (again["attempts"] == 2).sum() == 2
    once = simulate(asking(ClientSpec()), load).records.frame()
    assert len(once) < 6


# --- laws ---------------------------------------------------------------------------------------


def test_littles_law_holds_over_attempts_and_waits() -> None:
    """Closed, without thinking: as many requests are open as there are users, back-off included.

    So the times from first attempt to end add up to the users times the time until the list is
    empty, and what is cut off then.
    """
    crashes = InstanceCrash(rate_per_hour=3600.0, restart_s=0.2)
    clients = ClientSpec(3, back_off=BackOff(0.05, 2.0, 1.0, 0.5))
    deployment = replace(asking(clients, colocated(2, times=TEN_MS)), outages=Outages((crashes,)))
    users = 7
    run = simulate(deployment, ClosedLoad(users, [Lengths(20, 15)] * 600, 0.3), seed=3)
    assert run.attempts is not None
    attempts = run.attempts.frame()
    assert (attempts.groupby("id").size() > 1).sum() > 50
    begins_s = attempts.groupby("id")["start_s"].min()
    ends_s = attempts.groupby("id")["end_s"].max()
    last_s = float(begins_s.max())
    open_s = (ends_s.clip(upper=last_s) - begins_s).sum()
    assert open_s == pytest.approx(users * last_s, rel=1e-9)


def test_the_same_seed_gives_the_same_attempts() -> None:
    clients = ClientSpec(4, back_off=BackOff(0.05, 2.0, 1.0, 0.5))
    outages = Outages((InstanceCrash(rate_per_hour=1800.0, restart_s=0.3),), lost_abort=0.3)
    deployment = replace(
        asking(clients, colocated(2, times=TEN_MS, router="random")), outages=outages
    )
    load = OpenLoad(poisson_requests(300, 20.0, 100, 20), 0.4)
    one, two, other = (simulate(deployment, load, seed=seed) for seed in (5, 5, 6))
    assert one.records.frame().equals(two.records.frame())
    assert one.attempts is not None
    assert two.attempts is not None
    assert other.attempts is not None
    assert one.attempts.frame().equals(two.attempts.frame())
    assert one.outages == two.outages
    assert not one.attempts.frame().equals(other.attempts.frame())
