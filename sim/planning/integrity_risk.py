"""What a rare fault of the KV comes to over a year of a fleet: wrong reads, and aborts instead.

Faults come one by one, each with a small probability per request or per page given, so that a
year's number of them is Poisson; those that the check catches and those that it does not are
Poisson too, and independent (thinning). A caught fault aborts one request; one that is not caught
is a request that reads somebody else's KV: the cautious case, in which every fault is read by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import expm1
from typing import Literal

from scipy.stats import chi2, poisson

from tonnage.sim.domain import BadInputError

DAYS_PER_YEAR = 365.25
Per = Literal["request", "allocation"]


@dataclass(frozen=True, slots=True)
class FaultRate:
    """How likely a fault is, per request or per page that is given to one.

    `low` and `high`: what the rate may be; both are the rate where it is only assumed.
    """

    per: Per
    rate: float
    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.low <= self.rate <= self.high <= 1.0:
            raise BadInputError(
                f"fault rate {self.rate:g} ({self.low:g} to {self.high:g}): probabilities between "
                "0 and 1, the rate within its interval"
            )

    @classmethod
    def assumed(cls, rate: float, per: Per = "request") -> FaultRate:
        """Return a rate that is taken for granted."""
        return cls(per, rate, rate, rate)

    @classmethod
    def observed(
        cls, faults: int, trials: int, per: Per = "request", confidence: float = 0.95
    ) -> FaultRate:
        """Return the rate of faults that were counted, with its exact (Garwood) interval."""
        if faults < 0 or trials < 1:
            raise BadInputError(f"{faults} faults in {trials} trials: count at least one trial")
        if not 0.0 < confidence < 1.0:
            raise BadInputError(f"confidence {confidence:g}: between 0 and 1")
        tail = (1.0 - confidence) / 2.0
        low = float(chi2.ppf(tail, 2 * faults)) / 2.0 if faults else 0.0
        high = float(chi2.isf(tail, 2 * (faults + 1))) / 2.0
        return cls(per, faults / trials, low / trials, min(high / trials, 1.0))


@dataclass(frozen=True, slots=True)
class YearlyCount:
    """Events of a year: their mean, what `confidence` of years lie between, and that of any.

    `low` and `high` hold at least that share of years for every rate within the rate's interval.
    """

    expected: float
    low: int
    high: int
    any_probability: float


@dataclass(frozen=True, slots=True)
class FleetRisk:
    """What a year brings without the check and with it."""

    faults: YearlyCount
    wrong_reads_without: YearlyCount
    wrong_reads_with: YearlyCount
    aborts_with: YearlyCount


def fleet_risk(
    requests_per_day: float,
    fault: FaultRate,
    coverage: float,
    *,
    allocations_per_request: float = 1.0,
    confidence: float = 0.95,
) -> FleetRisk:
    """Return the wrong reads and aborts of a fleet's year.

    `coverage`: the share of faults that the check catches before anything is read; take it from
    injections. `allocations_per_request`: pages given to a request, where faults come per page.
    """
    if requests_per_day < 0 or allocations_per_request < 0:
        raise BadInputError("requests per day and pages per request cannot be negative")
    if not 0.0 <= coverage <= 1.0:
        raise BadInputError(f"coverage {coverage:g}: the share of faults caught, from 0 to 1")
    if not 0.0 < confidence < 1.0:
        raise BadInputError(f"confidence {confidence:g}: between 0 and 1")
    trials = requests_per_day * DAYS_PER_YEAR
    if fault.per == "allocation":
        trials *= allocations_per_request

    def counted(share: float) -> YearlyCount:
        low, mean, high = (share * trials * one for one in (fault.low, fault.rate, fault.high))
        return _count(low, mean, high, confidence)

    everything = counted(1.0)
    return FleetRisk(everything, everything, counted(1.0 - coverage), counted(coverage))


def _count(low: float, mean: float, high: float, confidence: float) -> YearlyCount:
    """Return the count of a mean that lies between two; equal tails of the Poisson law."""
    tail = (1.0 - confidence) / 2.0
    return YearlyCount(
        expected=mean,
        low=int(poisson.ppf(tail, low)) if low else 0,
        high=int(poisson.isf(tail, high)) if high else 0,
        any_probability=-expm1(-mean),
    )
