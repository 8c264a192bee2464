"""The operators of a pass whose time depends on its rows alone, each bound to its curve once."""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.sim.cost.estimate import OperatorCurve
from tonnage.sim.cost.operator_times import OperatorTime
from tonnage.sim.cost.step_time import Rows


@dataclass(frozen=True, slots=True)
class RowTerm:
    """`count` calls of an operator over one of the row counts of a pass.

    `rows`: which of them, by its place in `Rows`; fewer than one cost as much as one.
    `per_row`: what the curve is asked for per row, such as bytes. `factor`: what an engine makes of
    the kernels' time of its `family` (`sim.cost.engine_terms`).
    """

    name: str
    curve: OperatorCurve
    count: int
    rows: int
    per_row: float = 1.0
    family: str = ""
    factor: float = 1.0

    def seconds(self, rows: Rows) -> float:
        """Return the seconds of all calls, and nothing else: this is asked at every step."""
        number = rows[self.rows]
        alone_s = self.curve.at(self.per_row * (number if number > 1.0 else 1.0))
        return self.count * self.factor * alone_s

    def time(self, rows: Rows) -> OperatorTime:
        """Return the same with all that is known about it."""
        estimate = self.curve.estimate(self.per_row * max(rows[self.rows], 1.0))
        return OperatorTime.of(self.name, estimate, self.count * self.factor, self.family)


@dataclass(frozen=True, slots=True)
class RowTerms:
    """All of them in one kind of pass: `beside` run on a second stream while `routed` do."""

    routed: tuple[RowTerm, ...]
    beside: tuple[RowTerm, ...]
    others: tuple[RowTerm, ...]

    def seconds(self, rows: Rows) -> float:
        """Return the sum of `times`."""
        routed_s = beside_s = others_s = 0.0
        for term in self.routed:
            routed_s += term.seconds(rows)
        for term in self.beside:
            beside_s += term.seconds(rows)
        for term in self.others:
            others_s += term.seconds(rows)
        return max(routed_s, beside_s) + others_s

    def times(self, rows: Rows) -> list[OperatorTime]:
        """Return each operator, of those beside others what lasts longer."""
        routed = [term.time(rows) for term in self.routed]
        left_s = sum(time.seconds for time in routed)
        found = [term.time(rows) for term in self.others]
        for term in self.beside:
            alone = term.time(rows)
            found.append(alone.beside(left_s))
            left_s = max(left_s - alone.seconds, 0.0)
        return [*found, *routed]
