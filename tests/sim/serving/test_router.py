"""Routers: their policies by hand and by statistics, affinity, full and missing instances."""

from __future__ import annotations

from collections import Counter
from itertools import count, pairwise
from typing import Any

import numpy as np
import pytest

from tonnage.sim.domain import Request
from tonnage.sim.serving.router import POLICIES, Dispatcher, PolicyName, Router, RoutingSpec
from tonnage.sim.serving.router_policies import CacheRules

BLOCK = 100
NUMBERS = count()


def ask(tokens: int = 10, session: int | None = None) -> Request:
    return Request(next(NUMBERS), 0.0, tokens, 1, None, session)


def prompt(*blocks: int, session: int | None = None) -> Request:
    return Request(next(NUMBERS), 0.0, len(blocks) * BLOCK, 1, None, session, blocks, BLOCK)


def router(policy: PolicyName, instances: int = 3, **rules: Any) -> Router:
    return Router(RoutingSpec(**rules), policy, instances, np.random.default_rng(0))


def load(one: Router, *requests: int) -> Router:
    """Put so many requests in flight on each instance."""
    one.loads.requests[:] = requests
    return one


# --- by present load ----------------------------------------------------------------------------


def test_round_robin_takes_turns() -> None:
    turns = router("round_robin")
    assert [turns.assign(ask()) for _ in range(5)] == [0, 1, 2, 0, 1]


def test_round_robin_skips_who_is_down() -> None:
    turns = router("round_robin")
    turns.mark_down(1)
    assert [turns.assign(ask()) for _ in range(3)] == [0, 2, 0]
    turns.mark_up(1)
    assert [turns.assign(ask()) for _ in range(3)] == [1, 2, 0]


def test_least_requests_ignores_their_size() -> None:
    least = router("least_requests")
    first, small, other = ask(1000), ask(1), ask(1)
    assert [least.assign(one) for one in (first, small, other)] == [0, 1, 2]
    least.done(1, small)
    assert least.assign(ask(5)) == 1


def test_token_aware_sends_to_the_fewest_tokens() -> None:
    aware = router("token_aware")
    long = ask(1000)
    requests = (long, ask(300), ask(200), ask(50))
    assert [aware.assign(one) for one in requests] == [0, 1, 2, 2]
    aware.done(0, long)
    assert aware.assign(ask(1)) == 0
    aware.mark_down(0)
    assert aware.assign(ask(1)) == 2


def test_random_reaches_everyone_who_is_up() -> None:
    chance = router("random")
    assert {chance.assign(ask()) for _ in range(50)} == {0, 1, 2}
    chance.mark_down(1)
    assert {chance.assign(ask()) for _ in range(50)} == {0, 2}


def test_power_of_two_takes_the_less_loaded_of_the_only_two() -> None:
    two = load(router("power_of_two", 2), 3, 0)
    assert [two.assign(ask()) for _ in range(3)] == [1, 1, 1]


def test_power_of_two_never_takes_the_most_loaded_of_three() -> None:
    three = router("power_of_two")
    for _ in range(200):
        load(three, 9, 5, 0)
        assert three.assign(ask()) != 0


def test_power_of_two_is_far_more_even_than_random() -> None:
    """100 requests per instance: the fullest of 100 holds a few more, not a few dozen more."""
    most = {}
    for policy in ("random", "power_of_two"):
        one = router(policy, 100)
        for _ in range(10_000):
            one.assign(ask())
        most[policy] = max(one.loads.requests)
    assert most["power_of_two"] <= 105
    assert most["random"] >= 120


@pytest.mark.parametrize("affinity", ["none", "session", "prefix"])
@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_done_is_no_longer_in_flight(policy: PolicyName, affinity: Any) -> None:
    spec = RoutingSpec(policy, affinity=affinity, regions=2, hop_probability=0.5)
    both = Dispatcher(spec, {"prefill": 5, "decode": 3}, 0)
    requests = [prompt(*range(number % 7 + 1), session=number % 3) for number in range(40)]
    sent = [both.assign(one) for one in requests]
    for (prefill, decode), one in zip(sent, requests, strict=True):
        both.done("prefill", prefill, one)
        both.done("decode", decode, one)
    loads = [router.loads for pool in both.pools for router in pool.routers]
    assert all(not any(one.requests) and not any(one.tokens) for one in loads)


# --- by what was sent where ---------------------------------------------------------------------


def test_unknown_prompts_go_where_the_fewest_tokens_were_sent() -> None:
    cache = router("cache_aware")
    prompts = [prompt(1, 2, 3), prompt(4), prompt(5), prompt(6), prompt(7, 8), prompt(9)]
    # 300, 100, 100 -> the first of the two with 100, and so on.
    assert [cache.assign(one) for one in prompts] == [0, 1, 2, 1, 2, 1]


def test_a_known_prefix_goes_where_it_was_sent() -> None:
    cache = router("cache_aware")
    assert cache.assign(prompt(1, 2, 3, 4)) == 0
    assert cache.assign(prompt(1, 2, 3, 9)) == 0
    assert cache.assign(prompt(1, 2, 3, 4, 5, 6)) == 0


def test_a_prefix_counts_only_above_the_threshold() -> None:
    """3 of 10 blocks are not more than 0.3; 3 of 9 are."""
    cache = router("cache_aware")
    assert cache.assign(prompt(1, 2, 3)) == 0
    assert cache.assign(prompt(1, 2, 3, *range(50, 57))) == 1
    assert cache.assign(prompt(1, 2, 3, *range(60, 66))) == 1  # the last to be sent it
    strict = router("cache_aware", cache=CacheRules(threshold=0.9))
    assert strict.assign(prompt(1, 2, 3)) == 0
    assert strict.assign(prompt(1, 2, 3, 4)) == 1


def test_out_of_balance_the_shortest_queue_gets_it() -> None:
    """65 more than the fewest, and more than half as many again: SGLang's 64 and 1.5."""
    cache = router("cache_aware")
    assert cache.assign(prompt(1, 2, 3)) == 0
    assert load(cache, 64, 0, 1).assign(prompt(1, 2, 3)) == 0  # 64 more
    assert load(cache, 200, 135, 150).assign(prompt(1, 2, 3)) == 0  # less than 1.5 times
    assert load(cache, 65, 1, 0).assign(prompt(1, 2, 3)) == 2
    assert load(cache, 3, 3, 3).assign(prompt(1, 2, 3)) == 2  # it has it now, too


def test_an_instance_that_went_down_has_lost_its_cache() -> None:
    cache = router("cache_aware")
    assert cache.assign(prompt(1, 2, 3)) == 0
    cache.mark_down(0)
    assert cache.assign(prompt(1, 2, 3)) == 1
    cache.mark_up(0)
    assert cache.assign(prompt(1, 2, 3)) == 1
    assert cache.assign(prompt(7)) == 0


def test_blocks_of_the_output_are_not_the_routers_to_know() -> None:
    cache = router("cache_aware")
    answered = Request(next(NUMBERS), 0.0, 2 * BLOCK, 800, None, None, tuple(range(10)), BLOCK)
    assert cache.assign(answered) == 0
    assert cache.assign(prompt(*range(10))) == 1  # 2 of its 10 blocks are known


def test_prompts_that_share_nothing_known_spread_by_their_tokens() -> None:
    cache = router("cache_aware", 2)
    assert [cache.assign(ask(tokens)) for tokens in (500, 100, 100, 400)] == [0, 1, 1, 1]


# --- by a key -----------------------------------------------------------------------------------


def test_a_session_stays_on_one_instance() -> None:
    one = router("round_robin", 12, affinity="session")
    homes = {session: {one.assign(ask(), session) for _ in range(20)} for session in range(300)}
    assert all(len(instances) == 1 for instances in homes.values())
    assert set.union(*homes.values()) == set(range(12))


def test_a_request_without_a_session_goes_by_the_policy() -> None:
    one = Dispatcher(RoutingSpec("round_robin", affinity="session"), {"serve": 3}, 0)
    assert [one.assign(ask()) for _ in range(4)] == [[0], [1], [2], [0]]


def test_equal_beginnings_meet() -> None:
    """256 tokens are two whole blocks of 100: the third does not matter, the second does."""
    spec = RoutingSpec("round_robin", affinity="prefix", prefix_tokens=256)
    one = Dispatcher(spec, {"serve": 50}, 0)
    assert one.assign(prompt(1, 2, 3)) == one.assign(prompt(1, 2, 4)) == one.assign(prompt(1, 2))
    seconds = {tuple(one.assign(prompt(1, second, 3))) for second in range(10, 40)}
    assert len(seconds) > 10


def test_a_full_instance_is_passed_over_for_the_next_on_the_ring() -> None:
    """Four instances, 10 requests and the one at hand: more than 1.25 x 11 / 4 = 3.4 is full."""
    one = router("round_robin", 4, affinity="session", load_factor=1.25)
    key = 5
    first = one.assign(ask(), key)
    order = [first]
    for _ in range(3):  # the ring's order, by making those before it full
        one.loads.requests[:] = [9 if index in order else 0 for index in range(4)]
        order.append(one.assign(ask(), key))
    assert sorted(order) == [0, 1, 2, 3]
    for loads, expected in (((3, 3, 2, 2), 0), ((4, 2, 2, 2), 1), ((4, 4, 1, 1), 2)):
        for place, requests in enumerate(loads):
            one.loads.requests[order[place]] = requests
        assert one.assign(ask(), key) == order[expected]


def test_no_instance_is_ever_fuller_than_the_bound() -> None:
    """One session of half the requests among many: 1.25 times the mean, rounded up, is the most."""
    rng = np.random.default_rng(1)
    one = router("random", 8, affinity="session", load_factor=1.25)
    for sent in range(1, 4001):
        one.assign(ask(), 0 if rng.random() < 0.5 else int(rng.integers(1000)))
        assert max(one.loads.requests) <= 1.25 * sent / 8 + 1


def test_sessions_of_an_instance_that_is_down_move_and_come_back() -> None:
    one = router("round_robin", 6, affinity="session")
    before = [one.assign(ask(), session) for session in range(600)]
    one.mark_down(2)
    meanwhile = [one.assign(ask(), session) for session in range(600)]
    one.mark_up(2)
    after = [one.assign(ask(), session) for session in range(600)]
    assert after == before
    assert 2 not in meanwhile
    for was, is_now in zip(before, meanwhile, strict=True):
        assert is_now == was or was == 2
    moved_to = Counter(there for was, there in zip(before, meanwhile, strict=True) if was == 2)
    assert len(moved_to) == 5  # to all the others, not to one neighbour


# --- pools and regions --------------------------------------------------------------------------


def test_prefill_and_decode_have_policies_of_their_own() -> None:
    spec = RoutingSpec("round_robin", {"decode": "token_aware"})
    both = Dispatcher(spec, {"prefill": 2, "decode": 2}, 0)
    sent = [both.assign(ask(tokens)) for tokens in (1000, 10, 10, 10)]
    assert sent == [[0, 0], [1, 1], [0, 1], [1, 1]]


def test_affinity_chooses_where_prompts_are_computed_alone() -> None:
    spec = RoutingSpec("round_robin", affinity="session")
    both = Dispatcher(spec, {"prefill": 4, "decode": 4}, 0)
    sent = [both.assign(ask(session=7)) for _ in range(8)]
    assert len({prefill for prefill, _ in sent}) == 1
    assert [decode for _, decode in sent] == [0, 1, 2, 3] * 2


def region(instances: list[int]) -> int:
    """Return the region of a prefill and a decode instance, of 5 and 4 in two regions."""
    prefill, decode = instances
    assert (prefill >= 2) == (decode >= 2)
    return int(decode >= 2)


def visits(session_requests: int, **rules: Any) -> list[list[int]]:
    """Return the regions that 300 sessions visit, one list each."""
    spec = RoutingSpec("random", regions=2, **rules)
    both = Dispatcher(spec, {"prefill": 5, "decode": 4}, 3)
    rounds = [
        [region(both.assign(ask(session=session))) for session in range(300)]
        for _ in range(session_requests)
    ]
    return [list(of_session) for of_session in zip(*rounds, strict=True)]


def test_a_request_is_computed_and_decoded_in_one_region() -> None:
    assert {at for of_session in visits(1) for at in of_session} == {0, 1}


@pytest.mark.parametrize("hop_probability", [0.0, 0.25, 1.0])
def test_sessions_without_a_key_hop(hop_probability: float) -> None:
    """300 x 40 hops: the share has a standard error of 0.4 points at 0.25."""
    hops = [
        before != after
        for of_session in visits(41, hop_probability=hop_probability)
        for before, after in pairwise(of_session)
    ]
    assert np.mean(hops) == pytest.approx(hop_probability, abs=0.016)


def test_sessions_with_a_key_stay() -> None:
    found = visits(10, hop_probability=0.5, affinity="session")
    assert all(len(set(of_session)) == 1 for of_session in found)
    assert 0.35 < np.mean([of_session[0] for of_session in found]) < 0.65


def test_what_belongs_to_no_session_comes_in_anywhere() -> None:
    both = Dispatcher(RoutingSpec(regions=2), {"prefill": 5, "decode": 4}, 0)
    assert Counter(region(both.assign(ask())) for _ in range(400))[0] == pytest.approx(200, abs=40)


def test_a_region_without_a_pool_that_is_up_hands_over_to_the_next() -> None:
    spec = RoutingSpec(regions=2, down={"decode": (0, 1)})
    both = Dispatcher(spec, {"prefill": 5, "decode": 4}, 0)
    assert {region(both.assign(ask())) for _ in range(50)} == {1}


def test_the_same_seed_gives_the_same_choices() -> None:
    def choices(seed: int) -> list[list[int]]:
        spec = RoutingSpec("power_of_two", regions=2, hop_probability=0.3)
        both = Dispatcher(spec, {"prefill": 6, "decode": 4}, seed)
        return [both.assign(ask(session=number % 9)) for number in range(200)]

    assert choices(1) == choices(1)
    assert choices(1) != choices(2)
