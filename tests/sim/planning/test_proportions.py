"""Intervals and numbers of questions: published examples, exact binomials, and simulation."""

from __future__ import annotations

from math import comb, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.sim.domain import BadInputError
from tonnage.sim.planning.proportions import (
    Counts,
    Interval,
    Paired,
    detectable_difference,
    difference_interval,
    independent_variance,
    mcnemar_p,
    paired_interval,
    questions_for_equivalence,
    wilson,
)

# --- published examples ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "baseline", "low", "high"),
    [
        # Newcombe 1998, Statistics in Medicine 17:873, table II, method 10.
        ((56, 70), (48, 80), 0.0524, 0.3339),
        ((9, 10), (3, 10), 0.1705, 0.8090),
        ((6, 7), (2, 7), 0.0582, 0.8062),
        ((5, 56), (0, 29), -0.0381, 0.1926),
        ((10, 10), (0, 20), 0.6791, 1.0000),
        ((10, 10), (0, 10), 0.6075, 1.0000),
    ],
)
def test_independent_shares_by_newcombe(
    variant: tuple[int, int], baseline: tuple[int, int], low: float, high: float
) -> None:
    found = difference_interval(Counts(*baseline), Counts(*variant))
    assert found.low == pytest.approx(low, abs=1e-4)
    assert found.high == pytest.approx(high, abs=1e-4)


@pytest.mark.parametrize(
    ("pairs", "low", "high"),
    [
        # Newcombe 1998, Statistics in Medicine 17:2635, method 10, as printed in the test data of
        # the R package propint: only the variant right 12 times, only the baseline twice.
        (Paired(36, 2, 12, 0), 0.0569, 0.3404),
        (Paired(18, 2, 12, 18), 0.0562, 0.3290),
        (Paired(53, 0, 0, 1), -0.0729, 0.0729),
    ],
)
def test_paired_shares_by_newcombe(pairs: Paired, low: float, high: float) -> None:
    found = paired_interval(pairs)
    assert found.low == pytest.approx(low, abs=1e-4)
    assert found.high == pytest.approx(high, abs=1e-4)


def test_wilson_solves_its_equation() -> None:
    """At each limit p the observed share lies z standard errors of p away."""
    counts = Counts(81, 263)
    found = wilson(counts)
    for limit in (found.low, found.high):
        error = sqrt(limit * (1 - limit) / 263)
        assert abs(counts.share - limit) / error == pytest.approx(1.959964, rel=1e-5)
    assert wilson(Counts(0, 20)).low == 0.0
    assert wilson(Counts(20, 20)).high == 1.0


# --- exact coverage -------------------------------------------------------------------------------


def binomial(n: int, share: float) -> list[float]:
    return [comb(n, k) * share**k * (1 - share) ** (n - k) for k in range(n + 1)]


@pytest.mark.parametrize(("first", "second"), [(0.9, 0.9), (0.94, 0.9), (0.6, 0.7), (0.5, 0.5)])
def test_exact_coverage_of_the_difference(first: float, second: float) -> None:
    """Over every pair of counts of 30 and 40 questions, weighed by its probability."""
    weights = np.outer(binomial(30, first), binomial(40, second))
    covered = 0.0
    for x in range(31):
        for y in range(41):
            found = difference_interval(Counts(x, 30), Counts(y, 40))
            if found.low <= second - first <= found.high:
                covered += weights[x, y]
    assert 0.935 < covered < 0.985


def test_coverage_of_paired_shares_by_simulation() -> None:
    """800 questions, nine of ten right under both: the same ones mostly."""
    rng = np.random.default_rng(1)
    shares = [0.87, 0.03, 0.02, 0.08]  # both, baseline alone, variant alone, neither
    drawn = [Paired(*map(int, one)) for one in rng.multinomial(800, shares, size=2000)]
    found = [paired_interval(one) for one in drawn]
    covered = np.mean([one.low <= -0.01 <= one.high for one in found])
    assert 0.93 < covered < 0.975
    # Taken for independent, the same answers give intervals far too wide.
    wide = [difference_interval(one.baseline, one.variant) for one in drawn]
    assert np.mean([one.high - one.low for one in wide]) > 1.3 * np.mean(
        [one.high - one.low for one in found]
    )


# --- McNemar --------------------------------------------------------------------------------------


@given(first=st.integers(0, 40), second=st.integers(0, 40), both=st.integers(0, 50))
def test_mcnemar_is_an_exact_even_split(first: int, second: int, both: int) -> None:
    if first + second + both == 0:
        return
    differing = first + second
    tail = sum(comb(differing, k) for k in range(min(first, second) + 1)) / 2**differing
    found = mcnemar_p(Paired(both, first, second, 0))
    assert found == pytest.approx(min(1.0, 2 * tail))


# --- power ----------------------------------------------------------------------------------------


def test_the_questions_that_are_said_to_be_needed_give_the_power() -> None:
    """Two alike shares of 0.9: equivalence within 3 points is shown four times of five."""
    needed = questions_for_equivalence(independent_variance(0.9), 0.03, power=0.8)
    rng = np.random.default_rng(2)
    right = rng.binomial(needed, 0.9, size=(1500, 2))
    shown = [
        difference_interval(Counts(int(x), needed), Counts(int(y), needed), 0.90).is_within(0.03)
        for x, y in right
    ]
    assert np.mean(shown) == pytest.approx(0.8, abs=0.04)


def test_equivalence_is_rarely_claimed_at_the_margin() -> None:
    """Truly 3 points apart: the two one-sided tests err one time of twenty at most, and noise."""
    rng = np.random.default_rng(3)
    first, second = rng.binomial(2000, 0.9, 2000), rng.binomial(2000, 0.87, 2000)
    claimed = [
        difference_interval(Counts(int(x), 2000), Counts(int(y), 2000), 0.90).is_within(0.03)
        for x, y in zip(first, second, strict=True)
    ]
    assert 0.03 < np.mean(claimed) < 0.065


def test_paired_answers_need_as_many_questions_as_they_differ_on() -> None:
    independent = questions_for_equivalence(independent_variance(0.9), 0.01)
    paired = questions_for_equivalence(0.03, 0.01)
    assert independent / paired == pytest.approx(0.18 / 0.03, rel=1e-3)
    assert questions_for_equivalence(0.18, 0.005) == pytest.approx(4 * independent, rel=1e-3)


def test_a_detectable_difference_is_detected_with_its_power() -> None:
    apart = detectable_difference(independent_variance(0.85), 2000, power=0.8)
    rng = np.random.default_rng(4)
    first = rng.binomial(2000, 0.85 + apart / 2, 1500)
    second = rng.binomial(2000, 0.85 - apart / 2, 1500)
    told = [
        difference_interval(Counts(int(x), 2000), Counts(int(y), 2000)).excludes_zero
        for x, y in zip(first, second, strict=True)
    ]
    assert np.mean(told) == pytest.approx(0.8, abs=0.04)


# --- properties -----------------------------------------------------------------------------------

counts = st.integers(1, 300).flatmap(lambda n: st.builds(Counts, st.integers(0, n), st.just(n)))


@given(baseline=counts, variant=counts)
def test_intervals_hold_the_difference_and_turn_with_the_sides(
    baseline: Counts, variant: Counts
) -> None:
    found = difference_interval(baseline, variant)
    difference = variant.share - baseline.share
    assert -1 - 1e-9 <= found.low <= difference + 1e-12
    assert difference - 1e-12 <= found.high <= 1 + 1e-9
    turned = difference_interval(variant, baseline)
    assert (turned.low, turned.high) == pytest.approx((-found.high, -found.low))
    wider = difference_interval(baseline, variant, 0.99)
    assert wider.low <= found.low <= found.high <= wider.high


def test_an_interval_within_a_margin() -> None:
    assert Interval(-0.009, 0.0099).is_within(0.01)
    assert not Interval(-0.010, 0.0).is_within(0.01)
    assert Interval(0.001, 0.002).excludes_zero
    assert not Interval(-0.001, 0.002).excludes_zero


@pytest.mark.parametrize(("right", "questions"), [(-1, 5), (6, 5), (0, 0)])
def test_counts_that_cannot_be_are_refused(right: int, questions: int) -> None:
    with pytest.raises(BadInputError, match="cannot be"):
        Counts(right, questions)


def test_pairs_that_cannot_be_are_refused() -> None:
    with pytest.raises(BadInputError, match="counts of questions"):
        Paired(0, 0, 0, 0)
    with pytest.raises(BadInputError, match="counts of questions"):
        Paired(5, -1, 0, 0)
