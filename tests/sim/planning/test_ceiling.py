"""The search for the largest load that holds, on systems whose ceiling is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.sim.domain import BadInputError
from tonnage.sim.planning.ceiling import Ceiling, Probe, Verdict, largest_meeting


class System:
    """Holds up to a ceiling, and remembers what it was asked."""

    def __init__(self, ceiling: float, reason: str = "tpot") -> None:
        self.ceiling = ceiling
        self.reason = reason
        self.asked: list[float] = []

    def __call__(self, load: float) -> Verdict:
        self.asked.append(load)
        return Verdict() if load <= self.ceiling else Verdict((self.reason,))


@given(st.integers(0, 300), st.integers(1, 200))
def test_whole_loads_are_found_to_one(ceiling: int, high: int) -> None:
    system = System(ceiling)
    found = largest_meeting(system, 1, high, integer=True, relative_tolerance=0.0)
    expected = min(ceiling, high)
    assert found.largest == (expected or None)
    assert found.binds == ("none" if ceiling >= high else "tpot")
    assert found.monotone
    assert sorted(set(system.asked)) == sorted(system.asked)  # nothing is tried twice
    assert [probe.load for probe in found.probes] == sorted(system.asked)
    assert all(load == int(load) and 1 <= load <= high for load in system.asked)


@given(st.floats(1e-3, 1e3))
def test_rates_are_found_to_the_tolerance(ceiling: float) -> None:
    found = largest_meeting(System(ceiling, "prefill"), 1e-4, 1e4)
    assert found.largest is not None
    assert ceiling / 1.02 <= found.largest <= ceiling
    assert (found.binds, found.monotone, found.largest_holding) == ("prefill", True, found.largest)


def test_a_search_by_hand() -> None:
    """16 holds, 32 fails; 23, 27, 25 and 26 between them; 22 and 29 confirm 25 and 26."""
    system = System(25)
    largest_meeting(system, 1, 256, integer=True, relative_tolerance=0.0)
    assert system.asked == [16, 32, 23, 27, 25, 26, 22, 29]


def test_it_starts_from_what_is_known() -> None:
    system = System(70)
    known = [Probe(load, Verdict() if load <= 70 else Verdict(("itl",))) for load in (1, 64, 128)]
    found = largest_meeting(system, 1, 4096, integer=True, relative_tolerance=0.0, known=known)
    assert (found.largest, found.binds) == (70, "tpot")
    assert all(60 <= load <= 128 for load in system.asked)
    assert {probe.load for probe in found.probes} == {1, 64, 128, *system.asked}


def test_nothing_is_simulated_where_everything_is_known() -> None:
    known = [Probe(7, Verdict()), Probe(8, Verdict()), Probe(9, Verdict(("ttft",)))]
    known += [Probe(10, Verdict(("ttft",)))]
    system = System(8)
    found = largest_meeting(system, 1, 64, integer=True, relative_tolerance=0.0, known=known)
    assert (found.largest, found.binds, system.asked) == (8, "ttft", [])


def test_whole_loads_may_be_found_to_a_tolerance() -> None:
    system = System(3000)
    found = largest_meeting(system, 1, 100_000, integer=True, relative_tolerance=0.01)
    assert found.largest is not None
    assert 2970 <= found.largest <= 3000
    assert len(system.asked) < 16


def noisy(load: float) -> Verdict:
    """Holds up to 40, but for 21, which fails by chance."""
    return Verdict() if load <= 40 and load != 21 else Verdict(("ttft",))


def test_a_failure_below_loads_that_hold_is_told() -> None:
    known = [Probe(21, noisy(21)), Probe(32, noisy(32))]
    found = largest_meeting(noisy, 1, 64, integer=True, relative_tolerance=0.0, known=known)
    assert not found.monotone
    assert (found.largest, found.largest_holding) == (20, 32)
    assert found.binds == "ttft"


def test_an_end_that_is_not_confirmed_moves() -> None:
    """The bracket closes on 30 and 31, then 27 fails: what holds above it no longer counts."""

    def meets(load: float) -> Verdict:
        return Verdict() if load <= 30 and load != 27 else Verdict(("e2e",))

    found = largest_meeting(meets, 1, 64, integer=True, relative_tolerance=0.0)
    assert found == Ceiling(26, "e2e", False, 30, found.probes)


def test_a_load_that_holds_beyond_the_bracket_is_told() -> None:
    def meets(load: float) -> Verdict:
        return Verdict() if load != 31 else Verdict(("e2e",))

    known = [Probe(31, meets(31))]
    found = largest_meeting(meets, 1, 64, integer=True, relative_tolerance=0.0, known=known)
    assert (found.largest, found.largest_holding, found.monotone) == (30, 34, False)


@pytest.mark.parametrize("limits", [(0, 10), (5, 4), (-1.0, 1.0)])
def test_limits_that_are_none_are_refused(limits: tuple[float, float]) -> None:
    with pytest.raises(BadInputError, match="must be positive and rise"):
        largest_meeting(System(1), *limits)
