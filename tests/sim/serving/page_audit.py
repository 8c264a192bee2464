"""Every page of an identified pool accounted for, whatever has gone wrong in it."""

from __future__ import annotations

from collections import Counter

import pytest

from tonnage.sim.serving.guarded import Guarded
from tonnage.sim.serving.identified import IdentifiedCache, IdentifiedPool
from tonnage.sim.serving.plan import Plan


def audit(pool: IdentifiedPool | IdentifiedCache) -> None:
    """No page is lost; none has two owners by its tag; what is twice is counted.

    The free pages that are known, in the queue or kept, are those that the count says and those
    that faults entered again.
    """
    pages, idle = pool.watch.pages, list(pool.idle_entries)
    kept = [entry for entries in pages.retained.values() for entry in entries]
    assert len(pages.queue) + len(kept) + len(idle) == pool.free_pages + pages.doubled
    assert pages.doubled >= 0

    free = [*pages.queue, *(entry.page for entry in (*kept, *idle))]
    owned: Counter[int] = Counter()
    held = [
        entry
        for one in pages.held.values()
        for entry, own in zip(one.ledger, one.own, strict=False)
        if own
    ]
    blocks = getattr(pool, "_entries", {})
    held += [entry for block, entries in blocks.items() if block.locks for entry in entries]
    held += pages.unassigned
    for page, tag in held:
        owned[page] += tag == pages.tags[page]
    assert max(owned.values(), default=0) <= 1
    assert {*free, *(page for page, _ in held)} == set(range(pool.capacity_pages))
    if not pages.doubled:
        assert len(set(free)) == len(free)
        assert not set(free) & {page for page, count in owned.items() if count}


def audited(patch: pytest.MonkeyPatch) -> None:
    """Audit the pool of every guarded scheduler after each of its plans."""
    close = Guarded._close

    def close_and_audit(self: Guarded, plan: Plan) -> None:
        close(self, plan)
        assert not self.watch.pages.unassigned or self._shares_pool
        audit(self._identified)

    patch.setattr(Guarded, "_close", close_and_audit)
