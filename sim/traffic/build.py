"""From a traffic specification, one point of it and a seed to the load that is offered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, repeat

import numpy as np

from tonnage.sim.domain import BadInputError, Request
from tonnage.sim.traffic.arrivals import BLOCK, GammaArrivals
from tonnage.sim.traffic.lengths import LengthDistribution
from tonnage.sim.traffic.loads import ClosedLoad, Lengths, Load, OpenLoad, ResidentLoad
from tonnage.sim.traffic.session_sources import DrawnSessions, RecordedSessions
from tonnage.sim.traffic.sessions import SessionLoad, SessionSource
from tonnage.sim.traffic.shapes import Arrivals, ShapedArrivals
from tonnage.sim.traffic.spec import LoadPoint, SessionSpec, TraceSource, TrafficSpec
from tonnage.sim.traffic.traces import read_trace


@dataclass(frozen=True, slots=True)
class _Streams:
    """One independent seed per stream, so that changing one leaves the draws of the others."""

    arrivals: np.random.SeedSequence
    input_lengths: np.random.SeedSequence
    output_lengths: np.random.SeedSequence
    sessions: np.random.SeedSequence

    @classmethod
    def from_seed(cls, seed: int) -> _Streams:
        return cls(*np.random.SeedSequence(seed).spawn(4))


@dataclass(frozen=True, slots=True)
class SampledLengths:
    """`count` pairs of lengths; every iteration draws the same ones, a block at a time."""

    input_tokens: LengthDistribution
    output_tokens: LengthDistribution
    count: int
    streams: _Streams
    output_limit_tokens: int | None = None

    def __iter__(self) -> Iterator[Lengths]:
        input_rng = np.random.default_rng(self.streams.input_lengths)
        output_rng = np.random.default_rng(self.streams.output_lengths)
        for drawn in range(0, self.count, BLOCK):
            size = min(BLOCK, self.count - drawn)
            inputs = self.input_tokens.sample(input_rng, size).tolist()
            outputs = self.output_tokens.sample(output_rng, size).tolist()
            yield from map(Lengths, inputs, outputs, repeat(self.output_limit_tokens))


@dataclass(frozen=True, slots=True)
class OpenRequests:
    """Requests of an open load in order of arrival; every iteration gives the same ones."""

    arrivals: Arrivals
    lengths: SampledLengths

    def __iter__(self) -> Iterator[Request]:
        rng = np.random.default_rng(self.lengths.streams.arrivals)
        blocks_s = self.arrivals.times_s(rng, self.lengths.count)
        times_s = chain.from_iterable(block_s.tolist() for block_s in blocks_s)
        for number, (arrival_s, pair) in enumerate(zip(times_s, self.lengths, strict=True)):
            yield Request(
                number,
                arrival_s,
                pair.input_tokens,
                pair.output_tokens,
                pair.output_limit_tokens,
            )


@dataclass(frozen=True, slots=True)
class TraceRequests:
    """Requests of a trace; every iteration reads the file again."""

    source: TraceSource
    output_limit_tokens: int | None = None

    def __iter__(self) -> Iterator[Request]:
        requests = read_trace(self.source)
        limit = self.output_limit_tokens
        if limit is None:
            return requests
        return (replace(request, output_limit_tokens=limit) for request in requests)


def build_load(traffic: TrafficSpec, point: LoadPoint, seed: int) -> Load:
    """Build the load of one point; the same seed gives the same requests.

    Points of one curve share their draws, so that they differ by the load alone.
    """
    if traffic.kind == "trace":
        if traffic.trace is None:
            raise BadInputError("traffic.path: kind trace needs the path of a trace file")
        requests = TraceRequests(traffic.trace, traffic.output_limit_tokens)
        return OpenLoad(requests, traffic.timeout_s)
    streams = _Streams.from_seed(seed)
    if traffic.kind == "sessions":
        return SessionLoad(
            build_sessions(traffic, point, seed),
            point.concurrency,
            traffic.timeout_s,
            traffic.output_limit_tokens,
        )
    lengths = SampledLengths(
        traffic.input_tokens,
        traffic.output_tokens,
        traffic.requests,
        streams,
        traffic.output_limit_tokens,
    )
    if traffic.kind in ("poisson", "gamma"):
        return OpenLoad(OpenRequests(_arrivals(traffic, point), lengths), traffic.timeout_s)
    if point.concurrency is None:
        raise BadInputError(f"traffic.concurrency: kind {traffic.kind} needs a number of requests")
    if traffic.kind == "closed":
        return ClosedLoad(point.concurrency, lengths, traffic.timeout_s)
    if traffic.kind == "resident":
        return ResidentLoad(point.concurrency, lengths)
    raise BadInputError(f"traffic.kind: unknown kind {traffic.kind!r}")


def build_sessions(traffic: TrafficSpec, point: LoadPoint, seed: int) -> SessionSource:
    """Build the sessions of one point; they differ between points by their starts alone."""
    if traffic.sessions is None:
        raise BadInputError("traffic.session: kind sessions needs sessions, drawn or of a trace")
    if point.concurrency is None and point.rate_per_s is None:
        raise BadInputError("traffic.concurrency: kind sessions needs it, or traffic.rate_per_s")
    arrivals = _arrivals(traffic, point) if point.concurrency is None else None
    stream = _Streams.from_seed(seed).sessions
    if isinstance(traffic.sessions, SessionSpec):
        return DrawnSessions(traffic.sessions, arrivals, stream)
    return RecordedSessions(traffic.sessions, arrivals, stream)


def session_totals(traffic: TrafficSpec) -> tuple[int, float]:
    """Return how many requests the sessions hold, and the mean tokens of one when it ends.

    Of one draw; those of other seeds differ by chance.
    """
    sessions = build_sessions(traffic, LoadPoint(concurrency=1), 0)
    tokens = [
        turn.input_tokens + turn.output_tokens - 1 for session in sessions for turn in session.turns
    ]
    return len(tokens), float(np.mean(tokens))


def _arrivals(traffic: TrafficSpec, point: LoadPoint) -> Arrivals:
    if point.rate_per_s is None:
        raise BadInputError(f"traffic.rate_per_s: kind {traffic.kind} needs a rate")
    burstiness = traffic.coefficient_of_variation if traffic.kind == "gamma" else 1.0
    arrivals = GammaArrivals(point.rate_per_s, burstiness)
    return arrivals if traffic.shape is None else ShapedArrivals(arrivals, traffic.shape)
