"""Max-min fair rates: worked by hand, and against the definition on random networks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.sim.serving.fair_share import Demand, max_min_rates

NO_LIMIT = 1e30


def rates(capacities: dict[int, float], *paths: tuple[int, ...]) -> list[float]:
    """Return the rates of single flows that cross those ports, byte for byte."""
    demands = [Demand(1, tuple((port, 1.0) for port in path), NO_LIMIT) for path in paths]
    return max_min_rates(demands, capacities)


def test_two_flows_halve_a_port() -> None:
    assert rates({0: 10.0}, (0,), (0,)) == [5.0, 5.0]


def test_three_flows_over_two_ports() -> None:
    """Port 1 is full at 2 each; the flow that does not cross it takes the rest of port 0."""
    assert rates({0: 10.0, 1: 4.0}, (0,), (0, 1), (1,)) == [8.0, 2.0, 2.0]


def test_what_one_port_refuses_the_next_one_gives() -> None:
    """Port 0 (12) is full at 4 for three flows, port 1 (9) then has 5 left for its second flow."""
    assert rates({0: 12.0, 1: 9.0}, (0,), (0,), (0, 1), (1,)) == [4.0, 4.0, 4.0, 5.0]


def test_a_flow_that_is_slow_by_itself_leaves_the_rest() -> None:
    slow, fast = Demand(1, ((0, 1.0),), 2.0), Demand(2, ((0, 1.0),), NO_LIMIT)
    assert max_min_rates([slow, fast], {0: 10.0}) == [2.0, 4.0]


def test_bytes_count_by_what_they_are_at_the_port() -> None:
    """Each byte sent is two at port 1: it is full at 3, port 0 at 10 only."""
    assert max_min_rates([Demand(1, ((0, 1.0), (1, 2.0)), NO_LIMIT)], {0: 10.0, 1: 6.0}) == [3.0]


def test_no_flows_no_rates() -> None:
    assert max_min_rates([], {0: 1.0}) == []


PORTS = range(5)
DEMANDS = st.lists(
    st.builds(
        Demand,
        st.integers(1, 4),
        st.lists(st.sampled_from(PORTS), min_size=1, max_size=3, unique=True).flatmap(
            lambda ports: st.tuples(
                *(st.tuples(st.just(port), st.sampled_from([1.0, 0.5, 3.0])) for port in ports)
            )
        ),
        st.sampled_from([1.0, 7.5, 100.0, NO_LIMIT]),
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=300, deadline=None)
@given(DEMANDS, st.lists(st.floats(0.1, 50.0), min_size=5, max_size=5))
def test_nobody_can_gain_but_from_somebody_no_richer(
    demands: list[Demand], capacities: list[float]
) -> None:
    """A flow is at its own limit, or crosses a full port on which nobody is faster than it."""
    found = max_min_rates(demands, dict(enumerate(capacities)))
    used = [
        sum(
            rate * demand.flows * share
            for rate, demand in zip(found, demands, strict=True)
            for crossed, share in demand.crosses
            if crossed == port
        )
        for port in PORTS
    ]
    for port in PORTS:
        assert used[port] <= capacities[port] * (1 + 1e-9)
    for rate, demand in zip(found, demands, strict=True):
        full = [port for port, _ in demand.crosses if used[port] >= capacities[port] * (1 - 1e-9)]
        fastest = [
            max(
                other
                for other, one in zip(found, demands, strict=True)
                if any(crossed == port for crossed, _ in one.crosses)
            )
            for port in full
        ]
        limited = rate >= demand.most_bytes_per_s * (1 - 1e-9)
        assert limited or any(rate >= most * (1 - 1e-9) for most in fastest)


def test_the_order_of_the_flows_does_not_matter() -> None:
    capacities = {0: 10.0, 1: 4.0, 2: 7.0}
    paths = [(0,), (0, 1), (1, 2), (2,)]
    there = rates(capacities, *paths)
    back = rates(capacities, *reversed(paths))
    assert there == pytest.approx(list(reversed(back)), rel=1e-12)
