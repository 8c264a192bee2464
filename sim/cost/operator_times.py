"""The time of one operator in a step, where it comes from, and sums of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tonnage.sim.cost.estimate import Estimate, Source

_WORST_LAST: tuple[Source, ...] = ("measured", "imported", "scaled", "datasheet")


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """Seconds of one operator over all layers of a pass.

    `low_s` and `high_s`: 5 % and 95 % of the held-out measurements, carried over; `roofline_s`:
    what the datasheet allows. `hidden_s`: time that runs beside another operator and is not in
    `seconds`. `family`: operators that an engine treats alike (`sim.cost.engine_terms`).
    """

    name: str
    seconds: float
    low_s: float
    high_s: float
    roofline_s: float
    source: Source
    inside: bool = True
    hidden_s: float = 0.0
    family: str = ""

    @classmethod
    def of(
        cls, name: str, estimate: Estimate, count: float = 1.0, family: str = ""
    ) -> OperatorTime:
        """Return `count` calls of an operator."""
        seconds = count * float(estimate.seconds)
        return cls(
            name,
            seconds,
            seconds * estimate.low,
            seconds * estimate.high,
            count * float(estimate.roofline_s),
            estimate.source,
            estimate.inside,
            family=family,
        )

    @classmethod
    def assumed(
        cls,
        name: str,
        seconds: float,
        source: Source = "datasheet",
        spread: float = 2.0,
        family: str = "",
    ) -> OperatorTime:
        """Return a time that no measurement stands behind, with a wide interval."""
        low_s, high_s = seconds / spread, seconds * spread
        return cls(name, seconds, low_s, high_s, seconds, source, False, family=family)

    def scaled(self, factor: float) -> OperatorTime:
        """Return so many times as much."""
        return replace(
            self,
            seconds=self.seconds * factor,
            low_s=self.low_s * factor,
            high_s=self.high_s * factor,
            roofline_s=self.roofline_s * factor,
            hidden_s=self.hidden_s * factor,
        )

    def beside(self, other_s: float) -> OperatorTime:
        """Return what is left of it when it runs beside `other_s` seconds of something else."""
        shown = max(self.seconds - other_s, 0.0)
        share = shown / self.seconds if self.seconds else 0.0
        return replace(
            self,
            seconds=shown,
            low_s=self.low_s * share,
            high_s=self.high_s * share,
            hidden_s=self.seconds - shown,
        )


def total_s(times: Iterable[OperatorTime]) -> float:
    """Return the sum of the seconds."""
    return sum(one.seconds for one in times)


def interval_factors(times: Iterable[OperatorTime]) -> tuple[float, float]:
    """Return the factors on the sum if all operators are off the same way (the cautious case)."""
    rows = list(times)
    seconds = total_s(rows)
    if not seconds:
        return 1.0, 1.0
    return sum(row.low_s for row in rows) / seconds, sum(row.high_s for row in rows) / seconds


def worst_source(times: Iterable[OperatorTime]) -> Source:
    """Return the weakest source of those whose time counts."""
    return weakest(one.source for one in times if one.seconds > 0)


def weakest(sources: Iterable[Source]) -> Source:
    """Return the weakest of some sources; of none, the datasheet."""
    return max(sources, key=_WORST_LAST.index, default="datasheet")
