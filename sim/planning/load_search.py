"""The ceiling of a kind of traffic: how many users, or how many requests per second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tonnage.sim.planning.ceiling import Ceiling, Probe, Verdict, ceiling_of, largest_meeting
from tonnage.sim.planning.verdict import Capacity
from tonnage.sim.traffic.spec import LoadPoint, TrafficSpec

_CONCURRENCY_TOLERANCE = 0.01  # below 200 users: to one
_RATE_TOLERANCE = 0.02
_RATE_SPAN = 1024.0  # how far from the rates that were asked for, as a factor


@dataclass(frozen=True, slots=True)
class LoadAxis:
    """One kind of traffic as a number that can be raised: users, or requests per second.

    `trace_rate_per_s`: mean arrival rate of the trace as the scenario replays it.
    """

    traffic: TrafficSpec
    capacity: Capacity
    trace_rate_per_s: float | None = None

    @property
    def counts_users(self) -> bool:
        """Whether the load is a number of requests in the system, not a rate."""
        return self.traffic.kind in ("closed", "resident")

    def load(self, point: LoadPoint) -> float | None:
        """Return a point as a number; None for a trace whose rate is not known."""
        if self.counts_users:
            return point.concurrency
        return self.trace_rate_per_s if self.traffic.trace else point.rate_per_s

    def offer(self, load: float) -> tuple[TrafficSpec, LoadPoint]:
        """Return the traffic of a load; a trace is replayed faster or slower."""
        if self.counts_users:
            return self.traffic, LoadPoint(concurrency=round(load))
        if self.traffic.trace is None:
            return self.traffic, LoadPoint(rate_per_s=load)
        assert self.trace_rate_per_s is not None
        scale = self.traffic.trace.rate_scale * load / self.trace_rate_per_s
        return replace(
            self.traffic, trace=replace(self.traffic.trace, rate_scale=scale)
        ), LoadPoint()

    def limits(self, known: Sequence[Probe]) -> tuple[float, float]:
        """Return the least and the largest load to try.

        No more users than memory holds at once, for the rest of them would only wait, nor than
        there are requests.
        """
        if self.counts_users:
            return 1, min(self.capacity.concurrency, self.traffic.requests)
        rates = [probe.load for probe in known]
        return min(rates) / _RATE_SPAN, max(rates) * _RATE_SPAN


def known_probes(
    axis: LoadAxis, points: Sequence[LoadPoint], verdicts: Sequence[Verdict]
) -> list[Probe]:
    """Return the points that were simulated as loads; more users than memory holds fail by it."""
    probes = []
    for point, verdict in zip(points, verdicts, strict=True):
        load = axis.load(point)
        if load is None:
            continue
        if axis.counts_users and load > axis.capacity.concurrency:
            verdict = Verdict(tuple(dict.fromkeys((axis.capacity.limited_by, *verdict.failed))))
        probes.append(Probe(load, verdict))
    return probes


def find_ceiling(
    axis: LoadAxis,
    known: Sequence[Probe],
    judged: Callable[[TrafficSpec, LoadPoint], Verdict] | None,
) -> Ceiling:
    """Return the largest load that holds: among the `known`, or by trying others if `judged`."""
    if judged is None or not known:
        return _at_the_limit(axis, ceiling_of(known))
    low, high = axis.limits(known)
    if high < low:  # not one request fits
        return ceiling_of([Probe(low, Verdict((axis.capacity.limited_by,)))])
    found = largest_meeting(
        lambda load: judged(*axis.offer(load)),
        low,
        high,
        integer=axis.counts_users,
        relative_tolerance=_CONCURRENCY_TOLERANCE if axis.counts_users else _RATE_TOLERANCE,
        known=known,
    )
    return _at_the_limit(axis, found)


def _at_the_limit(axis: LoadAxis, ceiling: Ceiling) -> Ceiling:
    """Name what stops a load that holds up to the most that is held at once."""
    full = axis.counts_users and ceiling.largest == axis.capacity.concurrency
    return replace(ceiling, binds=axis.capacity.limited_by) if full else ceiling


def ceiling_figures(axis: LoadAxis, ceiling: Ceiling | None, *, searched: bool) -> dict[str, Any]:
    """Return the JSON object of `ceilings`; `ceiling` None: there is no objective to meet."""
    figures: dict[str, Any] = {
        "memory_concurrency": axis.capacity.concurrency,
        "slo_concurrency": None,
        "slo_rate_per_s": None,
        "binds": axis.capacity.limited_by,
    }
    if ceiling is None:
        return figures
    name = "slo_concurrency" if axis.counts_users else "slo_rate_per_s"
    figures |= {name: ceiling.largest, "binds": ceiling.binds}
    if searched:
        figures["monotone"] = ceiling.monotone
        figures["probes"] = [
            {"load": probe.load, "failed": list(probe.verdict.failed)} for probe in ceiling.probes
        ]
    return figures
