"""What watching the KV adds to a handoff: page tags on both sides, a checksum, ledger entries.

All of it is in the way of the prompt's first token in the decode instance. On the sender every part
that leaves is checked by itself; on the receiver a prompt once, when all of it has arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tonnage.sim.cost.check_prices import CheckPrices, Price
from tonnage.sim.cost.operator_times import OperatorTime
from tonnage.sim.domain import Coverage, IntegritySpec


@dataclass(frozen=True, slots=True)
class SideChecks:
    """What one side of a handoff does with the KV of so many tokens.

    `moved_bytes`: that one of its GPUs sends or receives. `receives`: it takes the KV in, and gives
    it pages. `summed`: a checksum goes with the KV.
    """

    spec: IntegritySpec
    page_tokens: int
    moved_bytes: Callable[[int], float]
    prices: CheckPrices
    receives: bool
    summed: bool

    @property
    def is_nothing(self) -> bool:
        """Say that no prompt takes longer for it."""
        return not (self.summed or self.spec.tracker == "batched")

    def __call__(self, tokens: int) -> float:
        """Return the seconds that so many tokens take longer."""
        return sum(one.seconds for one in self.items(tokens)) if tokens > 0 else 0.0

    def items(self, tokens: int) -> list[OperatorTime]:
        """Return what so many tokens take, item by item."""
        found: list[OperatorTime] = []
        if self.spec.checks(Coverage.HANDOFF):
            found += self._tags(tokens)
        if self.summed:
            found.append(self._checksum(tokens).item("handoff.checksum"))
        if self.receives and self.spec.tracker == "batched":
            pages, prices = self._pages(tokens), self.prices
            given = prices.ledger.plus(prices.ledger_page.times(pages)).plus(prices.launch)
            found.append(given.item("handoff.bookkeeping"))
        return found

    def _pages(self, tokens: int) -> float:
        return float(np.ceil(tokens / self.page_tokens))

    def _tags(self, tokens: int) -> list[OperatorTime]:
        """Return a launched check of the prompt's pages, whose verdict the handoff waits for."""
        pages, prices = self._pages(tokens), self.prices
        parts = {
            "tag_check": prices.kernel(pages, pages),
            "launch": prices.launch.times(1 + prices.zeroing_kernels(pages)),
            "agreement": prices.agree_eager,
            "readback": prices.readback,
        }
        return [one.item(f"handoff.{name}") for name, one in parts.items() if one.seconds]

    def _checksum(self, tokens: int) -> Price:
        """Return the sum over all bytes of a GPU, as fast as its memory lets a kernel read."""
        prices = self.prices
        start = prices.sum_batched if self.receives else prices.sum_start
        whole = start.plus(prices.sum_byte_s.times(self.moved_bytes(tokens)))
        return whole.plus(prices.agree_eager) if self.receives else whole


def load_check_s(spec: IntegritySpec, prices: CheckPrices) -> float:
    """Return what a load from a lower tier takes longer: a launched check of the pages it fills.

    However many they are: a load of thousands of pages takes milliseconds, its check one more
    microsecond.
    """
    if not spec.checks(Coverage.TIER):
        return 0.0
    return sum(
        one.seconds
        for one in (prices.kernel(1.0, 1.0), prices.launch, prices.agree_eager, prices.readback)
    )
