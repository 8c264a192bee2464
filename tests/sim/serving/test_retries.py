"""Back-off and circuit breakers, without a clock, by hand."""

from __future__ import annotations

import pytest

from tonnage.sim.domain import Request
from tonnage.sim.serving.breaker import Breaker, BreakerSpec
from tonnage.sim.serving.retries import BackOff
from tonnage.sim.serving.router import Dispatcher, RoutingSpec


def test_the_wait_grows_by_the_factor_up_to_the_most() -> None:
    """The router's own rule: 50 ms, then half as much again."""
    rule = BackOff(0.05, 1.5, 0.15, 0.2)
    waits_s = [rule.delay_s(failures) for failures in range(1, 6)]
    assert waits_s == pytest.approx([0.05, 0.075, 0.1125, 0.15, 0.15])


def test_jitter_spreads_the_wait_evenly_around_it() -> None:
    rule = BackOff(1.0, 2.0, 60.0, 0.5)
    assert [rule.delay_s(2, uniform) for uniform in (0.0, 0.25, 0.5)] == pytest.approx([1, 1.5, 2])
    assert rule.delay_s(2, 1 - 1e-9) == pytest.approx(3.0)


@pytest.mark.parametrize("failures", [1, 2, 10_000])
def test_a_first_wait_of_nothing_stays_nothing(failures: int) -> None:
    assert BackOff(0.0, 2.0, 30.0, 0.5).delay_s(failures, 0.9) == 0.0


def test_a_thousand_failures_wait_the_most_and_do_not_overflow() -> None:
    assert BackOff(1.0, 1e9, 30.0, 0.0).delay_s(1000) == 30.0


# --- breakers -----------------------------------------------------------------------------------

POOL = BreakerSpec("pool", failures=3, open_s=10.0, successes=2)


def fail(breaker: Breaker, times: int, now_s: float = 0.0) -> list[bool]:
    """Let attempts fail one after the other; return which of them opened the breaker."""
    return [breaker.failed(breaker.begin(), now_s) for _ in range(times)]


def test_failures_in_a_row_open_it_and_a_success_starts_the_row_anew() -> None:
    breaker = Breaker(POOL)
    assert fail(breaker, 2) == [False, False]
    breaker.succeeded(breaker.begin())
    assert fail(breaker, 3) == [False, False, True]
    assert (breaker.state, breaker.times_opened) == ("open", 1)


def test_open_it_admits_nobody_and_half_open_as_many_as_it_needs_successes() -> None:
    """Open at 0 s; two probes from 10 s on, a third attempt must wait for one of them."""
    breaker = Breaker(POOL)
    fail(breaker, 3)
    assert not breaker.admits(9.999)
    assert breaker.admits(10.0)
    first = breaker.begin()
    assert breaker.admits(10.0)
    second = breaker.begin()
    assert not breaker.admits(11.0)
    breaker.succeeded(first)
    assert breaker.state == "half_open"
    assert breaker.admits(11.0)
    breaker.succeeded(second)
    assert breaker.state == "closed"


def test_a_probe_that_fails_opens_it_for_as_long_again() -> None:
    breaker = Breaker(POOL)
    fail(breaker, 3)
    assert breaker.admits(12.0)
    assert fail(breaker, 1, 14.0) == [True]
    assert not breaker.admits(23.9)
    assert breaker.admits(24.0)


def test_a_probe_that_says_nothing_makes_room_for_another() -> None:
    breaker = Breaker(BreakerSpec("pool", 1, 10.0, 1))
    fail(breaker, 1)
    assert breaker.admits(10.0)
    probe = breaker.begin()
    assert not breaker.admits(10.0)
    breaker.withdrawn(probe)
    assert breaker.admits(10.0)


def test_what_began_before_the_last_change_does_not_count() -> None:
    """A late failure neither opens a breaker that has closed since nor fills its row."""
    breaker = Breaker(BreakerSpec("pool", 1, 10.0, 1))
    old = breaker.begin()
    fail(breaker, 1)
    assert not breaker.failed(old, 5.0)
    assert breaker.admits(10.0)
    breaker.succeeded(breaker.begin())
    assert breaker.state == "closed"
    assert not breaker.failed(old, 11.0)
    assert breaker.state == "closed"


def test_that_of_an_instance_lets_all_through_when_half_open() -> None:
    breaker = Breaker(BreakerSpec("instance", 1, 10.0, 3))
    fail(breaker, 1)
    for _ in range(20):
        assert breaker.admits(10.0)
        breaker.begin()


# --- the router ---------------------------------------------------------------------------------


def instances(dispatcher: Dispatcher, count: int = 6) -> list[int]:
    return [dispatcher.assign(Request(n, 0.0, 10, 2))[0] for n in range(count)]


@pytest.mark.parametrize("policy", ["round_robin", "least_requests", "cache_aware", "random"])
def test_who_is_shunned_or_down_gets_nothing_until_neither_holds(policy: str) -> None:
    dispatcher = Dispatcher(RoutingSpec(policy), {"serve": 2}, 0)  # type: ignore[arg-type]
    dispatcher.mark("serve", 0, up=False)
    dispatcher.mark("serve", 0, up=False, shunned=True)
    assert set(instances(dispatcher)) == {1}
    dispatcher.mark("serve", 0, up=True)
    assert set(instances(dispatcher)) == {1}
    dispatcher.mark("serve", 0, up=True, shunned=True)
    assert 0 in instances(dispatcher, 20)


def test_a_known_prefix_does_not_lead_to_who_is_shunned() -> None:
    dispatcher = Dispatcher(RoutingSpec("cache_aware"), {"serve": 2}, 0)
    prompt = Request(0, 0.0, 100, 1, block_ids=(1, 2), block_tokens=50)
    (first,) = dispatcher.assign(prompt)
    assert dispatcher.assign(prompt) == [first]
    dispatcher.mark("serve", first, up=False, shunned=True)
    assert dispatcher.assign(prompt) == [1 - first]


def test_a_pool_without_instances_is_not_available_until_one_is_back() -> None:
    dispatcher = Dispatcher(RoutingSpec(), {"prefill": 1, "decode": 2}, 0)
    assert dispatcher.available
    dispatcher.mark("prefill", 0, up=False)
    assert not dispatcher.available
    dispatcher.mark("prefill", 0, up=True)
    assert dispatcher.available
