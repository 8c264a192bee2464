"""Consistent hashing: who moves when a node comes or goes, and how even it is."""

from __future__ import annotations

from collections import Counter

import pytest

from tonnage.sim.serving.hash_ring import HashRing, mixed

KEYS = range(20_000)


def owners(nodes: list[int]) -> list[int]:
    ring = HashRing(nodes)
    return [ring.preferred(key) for key in KEYS]


@pytest.mark.parametrize("gone", [0, 5, 11])
def test_only_the_keys_of_a_node_that_goes_move(gone: int) -> None:
    """About one in twelve: with 150 points a node's share has a standard deviation of 8 %."""
    before = owners(list(range(12)))
    after = owners([node for node in range(12) if node != gone])
    moved = [was for was, now in zip(before, after, strict=True) if was != now]
    assert set(moved) == {gone}
    assert len(moved) == before.count(gone)
    assert len(moved) / len(KEYS) == pytest.approx(1 / 12, rel=0.3)


def test_a_new_node_takes_from_everybody() -> None:
    before, after = owners(list(range(11))), owners(list(range(12)))
    moved = Counter(was for was, now in zip(before, after, strict=True) if was != now)
    assert set(moved) == set(range(11))
    assert sum(moved.values()) == after.count(11)


def test_keys_are_spread_evenly() -> None:
    shares = Counter(owners(list(range(12))))
    assert max(shares.values()) < 1.3 * len(KEYS) / 12
    assert min(shares.values()) > 0.7 * len(KEYS) / 12


def test_the_walk_starts_with_the_preferred_one_and_meets_everybody_once() -> None:
    ring = HashRing(range(5))
    for key in range(50):
        met: list[int] = []

        def refuse(node: int, met: list[int] = met) -> bool:
            met.append(node)
            return False

        assert ring.first(key, refuse) is None
        assert met[0] == ring.preferred(key)
        assert sorted(met) == [0, 1, 2, 3, 4]


def test_a_ring_without_a_node_is_the_walk_that_refuses_it() -> None:
    whole, without = HashRing(range(6)), HashRing([0, 1, 2, 4, 5])
    for key in range(2000):
        assert whole.first(key, lambda node: node != 3) == without.preferred(key)


def test_near_keys_are_mixed_far_apart() -> None:
    assert len({mixed(key) >> 48 for key in range(1000)}) > 980
