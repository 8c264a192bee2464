"""A circuit breaker: after too many failures nobody asks for a while, then a few ask first."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

Scope = Literal["pool", "instance"]
State = Literal["closed", "open", "half_open"]


@dataclass(frozen=True, slots=True)
class BreakerSpec:
    """When a breaker opens and closes; the defaults are those of sglang_router 0.3.2.

    `scope`: one for all clients (`pool`), which then send nothing while it is open; or one for
    every instance, which the router then passes over, as sglang_router does. `failures`: in a row.
    `successes`: in a row, of attempts made after `open_s`, until it is closed again.
    """

    scope: Scope = "pool"
    failures: int = 10
    open_s: float = 60.0
    successes: int = 3


class Breaker:
    """Closed, open, or half open; the caller has the clock.

    Attempts carry the period in which they began: what began before the last change of state says
    nothing about the present one and is not counted. Half open, a breaker of all clients lets as
    many through at a time as it needs successes; one of an instance lets all through.
    """

    def __init__(self, spec: BreakerSpec) -> None:
        """Start closed."""
        self.state: State = "closed"
        self.times_opened = 0
        self._spec = spec
        self._probes_most = spec.successes if spec.scope == "pool" else inf
        self._period = 0
        self._count = 0  # failures in a row while closed, successes while half open
        self._probes = 0  # under way while half open
        self._opens_until_s = 0.0

    def admits(self, now_s: float) -> bool:
        """Tell whether an attempt may be made now; an open breaker half opens when it is time."""
        if self.state == "open" and now_s >= self._opens_until_s:
            self._enter("half_open")
        if self.state == "half_open":
            return self._probes < self._probes_most
        return self.state == "closed"

    def begin(self) -> int:
        """Note an attempt that is made, and return the period in which it began."""
        self._probes += self.state == "half_open"
        return self._period

    def succeeded(self, period: int) -> None:
        """Take in that an attempt was served."""
        if period != self._period:
            return
        if self.state == "closed":
            self._count = 0
        elif self.state == "half_open":
            self._probes -= 1
            self._count += 1
            if self._count >= self._spec.successes:
                self._enter("closed")

    def failed(self, period: int, now_s: float) -> bool:
        """Take in that an attempt failed; tell whether the breaker opened because of it."""
        if period != self._period or self.state == "open":
            return False
        self._count += 1
        if self.state == "closed" and self._count < self._spec.failures:
            return False
        self._enter("open")
        self.times_opened += 1
        self._opens_until_s = now_s + self._spec.open_s
        return True

    def withdrawn(self, period: int) -> None:
        """Take in that an attempt ended in a way that says nothing of the servers."""
        if period == self._period and self.state == "half_open":
            self._probes -= 1

    def _enter(self, state: State) -> None:
        self.state = state
        self._period += 1
        self._count = self._probes = 0
