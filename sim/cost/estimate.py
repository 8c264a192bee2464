"""The answer of an operator's model: seconds, how far they may be off, and where they come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from tonnage.sim.domain import FloatArray

Source = Literal["measured", "imported", "scaled", "datasheet"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """Predicted seconds of one call of an operator.

    `low` and `high` are factors on `seconds`: 5 % of the held-out measurements lie below
    ``low x seconds`` and 5 % above ``high x seconds``. `inside` is true when every point lies
    within the measured grid. `roofline_s` is what the datasheet's rates allow, for comparison.
    `seconds` and `roofline_s` have the shape of the points that were asked for.
    """

    seconds: float | FloatArray
    low: float
    high: float
    source: Source
    inside: bool
    roofline_s: float | FloatArray


class OperatorCurve(Protocol):
    """One operator of fixed sizes over one variable: rows, tokens or bytes."""

    def at(self, point: float, /) -> float:
        """Return the seconds, and nothing else: this is asked at every step."""

    def estimate(self, point: float, /) -> Estimate:
        """Return the same with all that is known about it."""
