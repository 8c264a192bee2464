"""Routing policies on what is in flight."""

from __future__ import annotations

import numpy as np
import pytest

from tonnage.sim.serving.router import Router


def router(policy: str, instances: int = 3) -> Router:
    return Router(policy, instances, np.random.default_rng(0))


def test_round_robin_takes_turns() -> None:
    turns = router("round_robin")
    assert [turns.assign(10) for _ in range(5)] == [0, 1, 2, 0, 1]


def test_least_requests_ignores_their_size() -> None:
    least = router("least_requests")
    assert [least.assign(tokens) for tokens in (1000, 1, 1)] == [0, 1, 2]
    least.done(1, 1)
    assert least.assign(5) == 1


def test_token_aware_sends_to_the_fewest_tokens() -> None:
    aware = router("token_aware")
    assert [aware.assign(tokens) for tokens in (1000, 300, 200, 50)] == [0, 1, 2, 2]
    aware.done(0, 1000)
    assert aware.assign(1) == 0


def test_random_reaches_everyone() -> None:
    chance = router("random")
    assert {chance.assign(1) for _ in range(50)} == {0, 1, 2}


@pytest.mark.parametrize("policy", ["round_robin", "random", "least_requests", "token_aware"])
def test_what_is_done_is_no_longer_in_flight(policy: str) -> None:
    one = router(policy)
    indices = [one.assign(tokens) for tokens in range(1, 20)]
    for index, tokens in zip(indices, range(1, 20), strict=True):
        one.done(index, tokens)
    assert all(view.requests == view.tokens == 0 for view in one.in_flight)
