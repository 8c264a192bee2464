"""From a traffic specification to a load: determinism, independent streams, and kinds."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.sim.domain import BadInputError, Request
from tonnage.sim.traffic.build import build_load
from tonnage.sim.traffic.lengths import Constant, Uniform
from tonnage.sim.traffic.loads import ClosedLoad, OpenLoad, ResidentLoad
from tonnage.sim.traffic.spec import LoadPoint, TraceSource, TrafficSpec

POISSON = TrafficSpec(
    kind="poisson",
    rates_per_s=(2.0, 4.0),
    input_tokens=Uniform(1, 10_000),
    output_tokens=Uniform(1, 500),
    requests=9_000,
)


def opened(traffic: TrafficSpec, point: LoadPoint, seed: int) -> Iterable[Request]:
    """Return the requests of an open load."""
    load = build_load(traffic, point, seed)
    assert isinstance(load, OpenLoad)
    return load.requests


def test_an_open_load_is_in_order_and_complete() -> None:
    requests = list(opened(POISSON, POISSON.points()[0], 0))
    assert [request.id for request in requests] == list(range(9_000))
    arrivals_s = [request.arrival_s for request in requests]
    assert arrivals_s == sorted(arrivals_s)


@settings(deadline=None)
@given(st.integers(0, 2**63))
def test_the_same_seed_gives_the_same_requests_every_time(seed: int) -> None:
    point = POISSON.points()[0]
    requests = opened(POISSON, point, seed)
    first = list(islice(requests, 50))
    assert first == list(islice(requests, 50))
    assert first == list(islice(opened(POISSON, point, seed), 50))
    assert first != list(islice(opened(POISSON, point, seed + 1), 50))


def test_changing_one_stream_leaves_the_others() -> None:
    slow, fast = (list(islice(opened(POISSON, p, 3), 100)) for p in POISSON.points())
    assert [request.input_tokens for request in slow] == [request.input_tokens for request in fast]
    other = replace(POISSON, input_tokens=Constant(7))
    changed = list(islice(opened(other, POISSON.points()[0], 3), 100))
    assert [r.output_tokens for r in changed] == [r.output_tokens for r in slow]
    assert [r.arrival_s for r in changed] == [r.arrival_s for r in slow]


def test_gamma_with_a_coefficient_of_one_is_poisson() -> None:
    gamma = replace(POISSON, kind="gamma")
    point = POISSON.points()[0]
    same = list(islice(opened(gamma, point, 3), 50))
    assert same == list(islice(opened(POISSON, point, 3), 50))
    bursty = replace(gamma, coefficient_of_variation=3.0)
    assert same != list(islice(opened(bursty, point, 3), 50))


def test_closed_and_resident_loads_carry_their_concurrency() -> None:
    spec = replace(POISSON, kind="closed", concurrency=(4, 8), requests=20)
    closed = build_load(spec, spec.points()[1], 0)
    assert isinstance(closed, ClosedLoad)
    assert closed.concurrency == 8
    assert len(list(closed.lengths)) == 20
    resident = build_load(replace(spec, kind="resident"), spec.points()[0], 0)
    assert isinstance(resident, ResidentLoad)
    assert list(resident.lengths) == list(closed.lengths)


def test_a_trace_has_one_point_and_may_be_read_twice(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n0,10,2\n")
    spec = TrafficSpec(kind="trace", trace=TraceSource(path))
    assert spec.points() == (LoadPoint(),)
    requests = opened(spec, LoadPoint(), 0)
    assert list(requests) == list(requests) == [Request(0, 0.0, 10, 2)]


def test_memory_does_not_grow_with_the_number_of_requests() -> None:
    def peak_bytes(count: int) -> int:
        tracemalloc.start()
        for _ in opened(replace(POISSON, requests=count), POISSON.points()[0], 0):
            pass
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    assert peak_bytes(60_000) < 1.2 * peak_bytes(10_000)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("trace", r"traffic\.path"),
        ("poisson", r"traffic\.rate_per_s"),
        ("closed", r"traffic\.concurrency"),
    ],
)
def test_a_point_without_what_its_kind_needs(kind: str, expected: str) -> None:
    with pytest.raises(BadInputError, match=expected):
        build_load(replace(POISSON, kind=kind), LoadPoint(), 0)
