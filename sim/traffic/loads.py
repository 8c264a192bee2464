"""The ways of offering load to a deployment.

A client gives a request up `timeout_s` after its arrival; None: it waits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tonnage.sim.domain import Request
from tonnage.sim.traffic.sessions import SessionLoad


@dataclass(frozen=True, slots=True)
class Lengths:
    """The token counts of one request, before it has an arrival time."""

    input_tokens: int
    output_tokens: int
    output_limit_tokens: int | None = None  # as of `Request`


@dataclass(frozen=True, slots=True)
class OpenLoad:
    """Requests that arrive at their own times, in order of arrival, whatever the system does."""

    requests: Iterable[Request]
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class ClosedLoad:
    """`concurrency` users in the whole system; each sends its next request when one ends.

    The next entry of `lengths` goes to whichever user is free first; the run ends with the list.
    """

    concurrency: int
    lengths: Iterable[Lengths]
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class ResidentLoad:
    """`concurrency` requests held in one decode instance at staggered positions of their output.

    Request *i* of the first set starts with the share i / concurrency of its output already
    written; a request that ends is replaced at once by the next entry of `lengths`. Prefill is
    not simulated: the standard decode curve.
    """

    concurrency: int
    lengths: Iterable[Lengths]


Load = OpenLoad | ClosedLoad | ResidentLoad | SessionLoad
