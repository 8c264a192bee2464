"""From simulated points and verdicts to the ceilings of a scenario."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tonnage.sim.planning.ceiling import Probe, Verdict
from tonnage.sim.planning.load_search import (
    LoadAxis,
    ceiling_figures,
    find_ceiling,
    known_probes,
)
from tonnage.sim.planning.verdict import Capacity
from tonnage.sim.traffic.spec import LoadPoint, TraceSource, TrafficSpec

HELD = Verdict()
LATE = Verdict(("ttft",))


def users(*concurrency: int, memory: int = 50, requests: int = 400) -> LoadAxis:
    traffic = TrafficSpec("closed", concurrency=concurrency, requests=requests)
    return LoadAxis(traffic, Capacity(memory, "memory"))


def up_to(ceiling: float) -> Callable[[TrafficSpec, LoadPoint], Verdict]:
    def judged(traffic: TrafficSpec, point: LoadPoint) -> Verdict:
        load = point.concurrency if point.concurrency is not None else point.rate_per_s
        assert load is not None
        return HELD if load <= ceiling else LATE

    return judged


def probes_of(axis: LoadAxis, ceiling: float) -> list[Probe]:
    points = axis.traffic.points()
    judged = up_to(ceiling)
    return known_probes(axis, points, [judged(axis.traffic, point) for point in points])


def test_without_a_search_the_simulated_points_tell() -> None:
    axis = users(1, 8, 32)
    found = find_ceiling(axis, probes_of(axis, 20), None)
    assert (found.largest, found.binds) == (8, "ttft")
    figures = ceiling_figures(axis, found, searched=False)
    assert figures == {
        "memory_concurrency": 50,
        "slo_concurrency": 8,
        "slo_rate_per_s": None,
        "binds": "ttft",
    }


def test_a_search_goes_on_from_the_simulated_points() -> None:
    axis = users(1, 8, 32)
    found = find_ceiling(axis, probes_of(axis, 20), up_to(20))
    figures = ceiling_figures(axis, found, searched=True)
    assert (figures["slo_concurrency"], figures["binds"]) == (20, "ttft")
    assert figures["monotone"] is True
    assert {"load": 8, "failed": []} in figures["probes"]
    assert {"load": 21, "failed": ["ttft"]} in figures["probes"]


@pytest.mark.parametrize("limited_by", ["memory", "max_running_requests"])
def test_no_more_users_than_are_held_at_once(limited_by: str) -> None:
    """All that are tried hold, and those beyond the limit fail by it whatever they were found."""
    traffic = TrafficSpec("closed", concurrency=(8, 64), requests=400)
    axis = LoadAxis(traffic, Capacity(50, limited_by))
    known = probes_of(axis, 1000)
    assert known[1] == Probe(64, Verdict((limited_by,)))
    without = find_ceiling(axis, known, None)
    assert (without.largest, without.binds) == (8, limited_by)
    found = find_ceiling(axis, known, up_to(1000))
    assert (found.largest, found.binds) == (50, limited_by)


def test_too_few_requests_leave_the_ceiling_open() -> None:
    axis = users(8, memory=5000, requests=40)
    found = find_ceiling(axis, probes_of(axis, 1000), up_to(1000))
    assert (found.largest, found.binds) == (40, "none")


def test_memory_that_holds_no_request_binds() -> None:
    axis = users(1, memory=0)
    found = find_ceiling(axis, probes_of(axis, 1000), up_to(1000))
    assert (found.largest, found.binds) == (None, "memory")


def test_rates_are_searched_around_those_asked_for() -> None:
    traffic = TrafficSpec("poisson", rates_per_s=(2.0,), requests=100)
    axis = LoadAxis(traffic, Capacity(50, "memory"))
    found = find_ceiling(axis, probes_of(axis, 11.0), up_to(11.0))
    figures = ceiling_figures(axis, found, searched=True)
    assert 11.0 / 1.02 <= figures["slo_rate_per_s"] <= 11.0
    assert figures["slo_concurrency"] is None


def test_a_trace_is_replayed_faster_or_slower() -> None:
    """A file of 1.5 requests a second, replayed twice as fast: 3 a second."""
    source = TraceSource(Path("trace.csv"), rate_scale=2.0)
    axis = LoadAxis(TrafficSpec("trace", trace=source), Capacity(50, "memory"), 3.0)
    asked = []

    def judged(traffic: TrafficSpec, point: LoadPoint) -> Verdict:
        assert point == LoadPoint()
        assert traffic.trace is not None
        asked.append(traffic.trace.rate_scale)
        return HELD if traffic.trace.rate_scale <= 3.2 else LATE

    found = find_ceiling(axis, known_probes(axis, [LoadPoint()], [HELD]), judged)
    assert found.largest is not None
    assert 4.8 / 1.02 <= found.largest <= 4.8  # 1.5 x 3.2
    assert asked[0] == pytest.approx(4.0)


def test_without_objectives_memory_is_all_that_binds() -> None:
    figures = ceiling_figures(users(1), None, searched=False)
    assert figures["slo_concurrency"] is None
    assert figures["binds"] == "memory"
    assert "probes" not in figures
