"""The largest load that meets all constraints, by bracketing and bisection."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tonnage.sim.domain import BadInputError

_CONFIRM_STRIDE = 0.1  # how far beyond the bracket it is confirmed, relative
_OUTWARD_FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one load failed, the constraint that binds first; empty where it holds."""

    failed: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether the load met every constraint."""
        return not self.failed


@dataclass(frozen=True, slots=True)
class Probe:
    """One load that was tried."""

    load: float
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Where a search ended, and every load it tried, in rising order.

    `largest`: the largest load tried that holds below all that fail; None where the smallest to
    try fails. `binds`: what the next larger load tried failed first; "none" where the largest to
    try holds. `monotone` False: some load holds above one that fails, by chance or because the
    system is like that; the largest that holds is then `largest_holding`.
    """

    largest: float | None
    binds: str
    monotone: bool
    largest_holding: float | None
    probes: tuple[Probe, ...]


def largest_meeting(
    meets: Callable[[float], Verdict],
    low: float,
    high: float,
    *,
    integer: bool = False,
    relative_tolerance: float = 0.02,
    known: Iterable[Probe] = (),
) -> Ceiling:
    """Find the largest load from `low` to `high` that holds, given that smaller ones hold too.

    Starts from what is `known`, else from the geometric middle, and goes outward by factors of two
    until one end holds and one fails; then bisects to the tolerance, integers to one at least. One
    load on either side is tried for confirmation, so that noise is seen. Loads are positive.
    """
    if not 0 < low <= high:
        raise BadInputError(f"the loads to search, {low:g} to {high:g}, must be positive and rise")
    search = _Search(meets, low, high, integer, relative_tolerance)
    search.tried = {probe.load: probe.verdict for probe in known if low <= probe.load <= high}
    search.close_in()
    if search.confirm():
        search.close_in()
    return search.ceiling()


def ceiling_of(probes: Iterable[Probe]) -> Ceiling:
    """Return what is known from loads that have been tried, without trying another."""
    search = _Search(lambda load: Verdict(), 0.0, math.inf, False, 0.0)
    search.tried = {probe.load: probe.verdict for probe in probes}
    return search.ceiling()


class _Search:
    """The loads tried so far, and which one is next."""

    tried: dict[float, Verdict]

    def __init__(
        self,
        meets: Callable[[float], Verdict],
        low: float,
        high: float,
        integer: bool,
        relative_tolerance: float,
    ) -> None:
        self._meets = meets
        self._low = low
        self._high = high
        self._integer = integer
        self._tolerance = relative_tolerance

    @property
    def failing(self) -> float | None:
        """The smallest load that fails."""
        return min(
            (load for load, verdict in self.tried.items() if not verdict.holds), default=None
        )

    @property
    def holding(self) -> float | None:
        """The largest load that holds below all that fail."""
        limit = math.inf if self.failing is None else self.failing
        held = (load for load, verdict in self.tried.items() if verdict.holds and load < limit)
        return max(held, default=None)

    def close_in(self) -> None:
        """Try loads until the bracket is as narrow as asked."""
        while (load := self._next()) is not None:
            self._try(load)

    def confirm(self) -> bool:
        """Try a load beyond each end; return whether the bracket is no longer one."""
        below, above = self.holding, self.failing
        if below is not None:
            self._try(self._allowed(below - self._stride(below)))
        if above is not None:
            self._try(self._allowed(above + self._stride(above)))
        return self.failing != above

    def ceiling(self) -> Ceiling:
        """Return where the search stands."""
        holding, failing = self.holding, self.failing
        held = max((load for load, verdict in self.tried.items() if verdict.holds), default=None)
        probes = tuple(Probe(load, self.tried[load]) for load in sorted(self.tried))
        binds = "none" if failing is None else self.tried[failing].failed[0]
        return Ceiling(holding, binds, held == holding, held, probes)

    def _next(self) -> float | None:
        below, above = self.holding, self.failing
        if below is None and above is None:
            return self._allowed(math.sqrt(self._low * self._high))
        if below is None:
            assert above is not None
            return None if above <= self._low else self._allowed(above / _OUTWARD_FACTOR)
        if above is None:
            return None if below >= self._high else self._allowed(below * _OUTWARD_FACTOR)
        return self._middle(below, above)

    def _middle(self, below: float, above: float) -> float | None:
        gap = above - below
        if gap <= self._tolerance * below or (self._integer and gap <= 1):
            return None
        middle = math.sqrt(below * above)
        return min(max(round(middle), below + 1), above - 1) if self._integer else middle

    def _stride(self, load: float) -> float:
        return max(_CONFIRM_STRIDE * load, 1.0 if self._integer else 0.0)

    def _allowed(self, load: float) -> float:
        """Return the nearest load that may be tried."""
        return min(max(round(load) if self._integer else load, self._low), self._high)

    def _try(self, load: float) -> None:
        if load not in self.tried:
            self.tried[load] = self._meets(load)
