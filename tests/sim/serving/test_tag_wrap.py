"""The chance that a tag comes round, against the Poisson distribution summed term by term."""

from __future__ import annotations

from math import exp, inf, log10

import pytest
from scipy.stats import poisson

from tonnage.sim.serving.tag_wrap import chance_text, wrap_chance


@pytest.mark.parametrize("bits", [1, 3, 8])
@pytest.mark.parametrize("mean", [0.5, 20.0, 700.0])
def test_small_tags_against_the_sum_of_terms(bits: int, mean: float) -> None:
    found = wrap_chance(allocations_per_s=mean * 10, pages=10, life_s=1.0, tag_bits=bits)
    terms = poisson.pmf(range(2**bits, 4000, 2**bits), mean)
    assert 10**found.log10_chance == pytest.approx(float(terms.sum()), rel=1e-9)
    assert found.seconds_to_wrap == pytest.approx(2**bits / mean)


def test_tags_of_32_bits_do_not_come_round() -> None:
    """A page given a thousand times a second is back at its tag after 50 days, not in an hour.

    By Stirling's formula the chance is about ``(e m / n)^n`` for a mean m far below n = 2^32.
    """
    found = wrap_chance(allocations_per_s=1e9, pages=10**6, life_s=3600.0)
    assert found.seconds_to_wrap == pytest.approx(2**32 / 1000)
    times, mean = 2**32, 3.6e6
    by_stirling = times * (log10(mean / times) + log10(exp(1.0)))
    assert found.log10_chance == pytest.approx(by_stirling, rel=1e-3)
    assert chance_text(found.log10_chance).startswith("10^-1.1e10")


def test_where_nothing_is_given_again_nothing_comes_round() -> None:
    assert wrap_chance(0.0, 10, 5.0).log10_chance == -inf
    assert wrap_chance(3.0, 10, 0.0).log10_chance == -inf
    assert (chance_text(-inf), chance_text(-2.0), chance_text(-5000.0)) == ("0", "0.01", "10^-5000")
