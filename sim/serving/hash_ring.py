"""Consistent hashing: keys on a ring, each served by the next node clockwise."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from hashlib import blake2b
from itertools import chain

VIRTUAL_NODES = 150  # of one node, as SGLang's model gateway has (`core/worker_registry.rs`)
_BITS = 2**64 - 1


class HashRing:
    """Nodes at many points of a ring of 64-bit numbers.

    A key goes to the node at the first point after its own. Taking a node away moves only its own
    keys, each to the node after it; adding one takes its share from all others.
    """

    def __init__(self, nodes: Iterable[int], virtual_nodes: int = VIRTUAL_NODES) -> None:
        """Place the nodes; where depends on their numbers alone, never on a seed."""
        points = sorted(
            (_point(node, replica), node) for node in nodes for replica in range(virtual_nodes)
        )
        self._points = [point for point, _ in points]
        self._nodes = [node for _, node in points]
        self._count = len(set(self._nodes))
        self._orders: dict[int, list[int]] = {}  # by place, of those that were asked for

    def preferred(self, key: int) -> int:
        """Return the node of a key."""
        place = bisect_right(self._points, mixed(key))
        return self._nodes[place if place < len(self._nodes) else 0]

    def first(self, key: int, accepts: Callable[[int], bool]) -> int | None:
        """Return the first node clockwise from a key that is accepted; None if none is."""
        place = bisect_right(self._points, mixed(key)) % len(self._points)
        order = self._orders.get(place)
        if order is None:
            order = self._orders[place] = self._order_from(place)
        return next(filter(accepts, order), None)

    def _order_from(self, place: int) -> list[int]:
        """Return every node once, in the order in which the ring has them from a place on."""
        order: dict[int, None] = {}
        for node in chain(self._nodes[place:], self._nodes[:place]):
            order[node] = None
            if len(order) == self._count:
                break
        return list(order)


def mixed(key: int) -> int:
    """Return 64 bits that look random, different for different keys (SplitMix64's finaliser)."""
    bits = (key + 0x9E3779B97F4A7C15) & _BITS
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _BITS
    return bits ^ (bits >> 31)


def _point(node: int, replica: int) -> int:
    digest = blake2b(f"{node}#{replica}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
