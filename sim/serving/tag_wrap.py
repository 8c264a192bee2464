"""How likely it is that a stale reference meets its own tag again, after all others."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, exp, inf, lgamma, log, log10, sqrt

from tonnage.sim.serving.physical import TAG_BITS

_TERMS_MOST = 10_000


@dataclass(frozen=True, slots=True)
class WrapChance:
    """When a page's tag is back where it was, and how likely a stale reference lives to see it.

    `seconds_to_wrap`: on average. `log10_chance`: of one stale reference, which is checked when it
    is so old; -inf where no page is ever given again.
    """

    seconds_to_wrap: float
    log10_chance: float


def wrap_chance(
    allocations_per_s: float, pages: int, life_s: float, tag_bits: int = TAG_BITS
) -> WrapChance:
    """Return the chance that a page was given again exactly k x 2^bits times in `life_s`.

    Pages take turns, and a page is given again at random instants, so that the number of times is
    Poisson with mean ``m = allocations x life / pages``: the sum over k of ``e^-m m^n / n!``, with
    ``n = k 2^bits``, in logarithms, for it is usually smaller than any floating-point number.
    """
    tags = 2**tag_bits
    if not allocations_per_s or not life_s:
        return WrapChance(inf if not allocations_per_s else tags * pages / allocations_per_s, -inf)
    mean = allocations_per_s * life_s / pages
    last = ceil((mean + 12.0 * sqrt(mean)) / tags) + 1
    terms = [
        -mean + times * log(mean) - lgamma(times + 1)
        for times in range(tags, min(last, _TERMS_MOST) * tags + 1, tags)
    ]
    largest = max(terms)
    log_chance = largest + log(sum(exp(term - largest) for term in terms))
    return WrapChance(tags * pages / allocations_per_s, log_chance / log(10.0))


def chance_text(log10_chance: float) -> str:
    """Spell a chance that may be too small for a number, such as `10^-3.1e9`."""
    if log10_chance == -inf:
        return "0"
    if log10_chance > -300.0:
        return f"{10.0**log10_chance:.2g}"
    return f"10^-{_short(-log10_chance)}"


def _short(value: float) -> str:
    digits = int(log10(value))
    return f"{value:.0f}" if digits < 6 else f"{value / 10**digits:.1f}e{digits}"
