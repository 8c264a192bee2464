"""What load a scenario offers, without a file format: plain values that `build_load` takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tonnage.sim.traffic.durations import DurationDistribution
from tonnage.sim.traffic.lengths import Constant, LengthDistribution
from tonnage.sim.traffic.shapes import DayShape

KINDS = ("closed", "resident", "poisson", "gamma", "trace", "sessions")


@dataclass(frozen=True, slots=True)
class TraceSource:
    """A trace file; `rate_scale` 2 replays it twice as fast, `limit` reads that many requests."""

    path: Path
    format: str = "auto"  # auto | mooncake | azure | csv | sessions
    rate_scale: float = 1.0
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """`count` sessions to be drawn: what they share, how they grow, how long their users think.

    The context begins with one of `shared_prefixes` texts of `shared_prefix_tokens` (tools and
    system prompt), the n-th of them as frequent as n to the power `-zipf_exponent`, and the first
    message. A turn adds its new input, and its output before the next. A context that would grow
    beyond `compact_at_tokens`, output included, is compacted: prefix and `compacted_tokens` of new
    text remain, at most the limit; a first message is cut there.
    `rewrite_share` of the turns find the text after the prefix changed, at the same length.
    Contents are known in blocks of `block_tokens`.
    """

    count: int
    turns: LengthDistribution
    shared_prefix_tokens: int
    shared_prefixes: int
    zipf_exponent: float
    first_input_tokens: LengthDistribution
    new_input_tokens: LengthDistribution
    output_tokens: LengthDistribution
    think_time: DurationDistribution
    compact_at_tokens: int | None
    compacted_tokens: LengthDistribution
    rewrite_share: float
    block_tokens: int


@dataclass(frozen=True, slots=True)
class SessionTrace:
    """Recorded sessions to be replayed: `count` of them in a random order, None: all."""

    path: Path
    count: int | None = None


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """One point of a curve: so many concurrent requests or sessions, or such a rate; or a trace."""

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
    shape: DayShape | None = None  # of the rate over the day
    sessions: SessionSpec | SessionTrace | None = None  # kind sessions; rates are of their starts

    def files(self) -> tuple[Path, ...]:
        """Return the files that requests are read from."""
        if isinstance(self.sessions, SessionTrace):
            path = self.sessions.path
            return tuple(sorted(path.iterdir())) if path.is_dir() else (path,)
        return () if self.trace is None else (self.trace.path,)

    def points(self) -> tuple[LoadPoint, ...]:
        """List the points of the curve in the order they are simulated."""
        if self.kind == "trace":
            return (LoadPoint(),)
        if self.kind in ("poisson", "gamma") or (self.kind == "sessions" and self.rates_per_s):
            return tuple(LoadPoint(rate_per_s=rate) for rate in self.rates_per_s)
        return tuple(LoadPoint(concurrency=users) for users in self.concurrency)
