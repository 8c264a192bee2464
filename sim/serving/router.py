"""Which instance serves a request: pure choices over what is in flight on each one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

POLICIES = ("round_robin", "random", "least_requests", "token_aware")


@dataclass(slots=True)
class InFlight:
    """What a router knows of one instance: requests and tokens that it sent and are not done."""

    requests: int = 0
    tokens: int = 0


class Router:
    """Choose an instance of one pool by a named policy; ties go to the lowest index.

    `token_aware` sends to the instance with the fewest tokens in flight: prompt tokens not yet
    computed for a prefill pool, prompt tokens resident for a decode pool (output lengths are not
    known to a router).
    """

    def __init__(self, policy: str, instances: int, rng: np.random.Generator) -> None:
        self.in_flight = [InFlight() for _ in range(instances)]
        self._rng = rng
        self._next = 0
        self._choose: Callable[[Sequence[InFlight]], int] = {
            "round_robin": self._round_robin,
            "random": self._random,
            "least_requests": _least_requests,
            "token_aware": _least_tokens,
        }[policy]

    def assign(self, tokens: int) -> int:
        """Return the index of the chosen instance and count the request in."""
        index = self._choose(self.in_flight)
        self.in_flight[index].requests += 1
        self.in_flight[index].tokens += tokens
        return index

    def done(self, index: int, tokens: int) -> None:
        """Count a request out."""
        self.in_flight[index].requests -= 1
        self.in_flight[index].tokens -= tokens

    def _round_robin(self, in_flight: Sequence[InFlight]) -> int:
        index = self._next
        self._next = (index + 1) % len(in_flight)
        return index

    def _random(self, in_flight: Sequence[InFlight]) -> int:
        return int(self._rng.integers(len(in_flight)))


def _least_requests(in_flight: Sequence[InFlight]) -> int:
    return min(range(len(in_flight)), key=lambda index: in_flight[index].requests)


def _least_tokens(in_flight: Sequence[InFlight]) -> int:
    return min(range(len(in_flight)), key=lambda index: in_flight[index].tokens)
