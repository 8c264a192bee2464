"""What clients do when a request fails: how often they try again, on what, and after how long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tonnage.sim.serving.breaker import BreakerSpec

Failure = Literal["aborted", "rejected", "timed_out"]
FAILURES: tuple[Failure, ...] = ("aborted", "rejected", "timed_out")


@dataclass(frozen=True, slots=True)
class BackOff:
    """The wait before the next attempt; the defaults are those of sglang_router 0.3.2.

    `first_s` after the first failure, `factor` times longer after each further one, at most
    `most_s`; all that times a random number within `jitter_share` of 1. `first_s` 0: at once.
    """

    first_s: float = 0.05
    factor: float = 1.5
    most_s: float = 30.0
    jitter_share: float = 0.2

    def delay_s(self, failures: int, uniform: float = 0.5) -> float:
        """Return the wait after so many failures; `uniform` from [0, 1), one half: no jitter."""
        delay_s = min(self.first_s, self.most_s)
        for _ in range(failures - 1):
            if delay_s in (0.0, self.most_s):
                break
            delay_s = min(delay_s * self.factor, self.most_s)
        return delay_s * (1.0 + self.jitter_share * (2.0 * uniform - 1.0))


@dataclass(frozen=True, slots=True)
class ClientSpec:
    """How all clients of a run behave; the default tries once.

    `attempts`: in all. `retry_on`: the failures after which they try again. A request that no
    instance could ever hold is not sent twice. `deadline_s`: of a request, all its attempts and
    waits together; None: there is none.
    """

    attempts: int = 1
    retry_on: frozenset[Failure] = frozenset(FAILURES)
    back_off: BackOff = BackOff()
    breaker: BreakerSpec | None = None
    deadline_s: float | None = None
