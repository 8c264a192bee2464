"""What goes wrong outside of the KV: instances that die, links that are slow, aborts that are lost.

Data alone; `sim/engine/outages.py` lets it happen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Lost = Literal["retry", "fail", "recompute"]


@dataclass(frozen=True, slots=True)
class InstanceCrash:
    """One instance, or each of several, that dies with all KV that it holds.

    `role`, `instance`: which; None: of any pool, any that is up. It happens once, `at_s`, or again
    and again to each instance by itself, `rate_per_hour` while it is up. It is back, empty, after
    `restart_s` (None: never). The router goes on to send to it for `noticed_s`: what it sends fails
    at once. `lost`, the requests that it had: they are aborted, and their clients do what they do
    then (`retry`) or never send them again (`fail`); or the router sends prompt and tokens so far
    to other instances, and the client sees a pause (`recompute`).
    """

    role: str | None = None
    instance: int | None = None
    at_s: float | None = None
    rate_per_hour: float | None = None
    restart_s: float | None = 60.0
    noticed_s: float = 0.0
    lost: Lost = "retry"


@dataclass(frozen=True, slots=True)
class LinkFault:
    """A span in which KV travels at `factor` times the rate it would, 0: it does not.

    `role`, `instance`: whose link; None: of both pools, of all instances.
    """

    at_s: float
    until_s: float
    factor: float = 0.0
    role: str | None = None
    instance: int | None = None


@dataclass(frozen=True, slots=True)
class Outages:
    """All that goes wrong in a run; `lost_abort`: the probability that an abort gets lost.

    The client has gone then, and its request runs on.
    """

    crashes: tuple[InstanceCrash, ...] = ()
    links: tuple[LinkFault, ...] = ()
    lost_abort: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.crashes or self.links or self.lost_abort)
