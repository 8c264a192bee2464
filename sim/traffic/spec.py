"""What load a scenario offers, without a file format: plain values that `build_load` takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tonnage.sim.traffic.lengths import Constant, LengthDistribution

KINDS = ("closed", "resident", "poisson", "gamma", "trace")


@dataclass(frozen=True, slots=True)
class TraceSource:
    """A trace file; `rate_scale` 2 replays it twice as fast, `limit` reads that many requests."""

    path: Path
    format: str = "auto"  # auto | mooncake | azure | csv
    rate_scale: float = 1.0
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """One point of a curve: so many concurrent requests, or such a rate; a trace has neither."""

    concurrency: int | None = None
    rate_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class TrafficSpec:
    """The kind of load, the points to try, and the lengths of its requests."""

    kind: str  # one of KINDS
    concurrency: tuple[int, ...] = ()
    rates_per_s: tuple[float, ...] = ()
    coefficient_of_variation: float = 1.0  # of the gaps between arrivals, kind gamma
    input_tokens: LengthDistribution = field(default=Constant(1))
    output_tokens: LengthDistribution = field(default=Constant(1))
    requests: int = 1
    trace: TraceSource | None = None
    timeout_s: float | None = None  # after which a client gives a request up
    output_limit_tokens: int | None = None  # that clients allow at least; None: what they get

    def points(self) -> tuple[LoadPoint, ...]:
        """List the points of the curve in the order they are simulated."""
        if self.kind in ("closed", "resident"):
            return tuple(LoadPoint(concurrency=users) for users in self.concurrency)
        if self.kind in ("poisson", "gamma"):
            return tuple(LoadPoint(rate_per_s=rate) for rate in self.rates_per_s)
        return (LoadPoint(),)
