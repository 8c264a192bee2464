"""The paged KV memory of one instance: how many pages there are and who holds them."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from tonnage.sim.serving.blocks import Block
from tonnage.sim.serving.sequence import Sequence
from tonnage.sim.serving.tiers import LoadPlan


class Found(NamedTuple):
    """The pages of a prompt that need not be computed, and where they are.

    `pages`: all that are on the GPU. Of those, `held_pages` are held by running requests and
    `idle_pages` by nobody but the prefix cache, up to and with `block`; the rest is the request's
    own, from before it lost them. `loads`: the blocks after it that the host holds, which take
    `loaded_pages` pages.
    """

    pages: int = 0
    held_pages: int = 0
    idle_pages: int = 0
    block: Block | None = None
    loads: int = 0
    loaded_pages: int = 0


_NOTHING = Found()


class PagePool:
    """Count the pages of one instance; a page holds the KV of `page_tokens` tokens.

    Invariant: the pages that requests hold and the free pages add up to the pool. Free pages may
    still hold the KV of a request that lost them (`retain`); it can take those back (`reclaim`)
    that nobody else has been given since. The queue of free pages is the engines': pages freed
    first are given away first, and of one request its last pages before its first.
    """

    def __init__(
        self,
        capacity_tokens: int,
        page_tokens: int,
        extra_tokens: int = 0,
        *,
        free_first: bool = False,
    ) -> None:
        """Make an empty pool.

        `extra_tokens`: what a request takes whatever its length (windows, states), in tokens.
        `free_first`: retained pages are given away after all others, not in their turn.
        """
        self.page_tokens = page_tokens
        self.extra_tokens = extra_tokens
        self.capacity_pages = capacity_tokens // page_tokens
        self.free_pages = self.capacity_pages
        self.peak_used_pages = 0
        self.times_given_back = 0  # whoever found no pages need not look until it changes
        self._free_first = free_first
        # Free pages in the order they will be given away, by owner; negative keys are nobody's.
        # Empty as long as nothing is retained, which is nearly always.
        self._queue: OrderedDict[int, int] = OrderedDict()
        self._retained = 0  # owners in the queue
        self._nobody = 0  # the last negative key

    @property
    def used_pages(self) -> int:
        """Pages that requests hold now."""
        return self.capacity_pages - self.free_pages

    @property
    def free_tokens(self) -> int:
        """Tokens that the free pages hold."""
        return self.free_pages * self.page_tokens

    def pages_for(self, tokens: int) -> int:
        """Return the pages that `tokens` tokens of one request fill, the last one partly."""
        return -(-(tokens + self.extra_tokens) // self.page_tokens)

    def could_ever_hold(self, tokens: int) -> bool:
        """Tell whether one request of that many tokens fits into the empty pool."""
        return self.pages_for(tokens) <= self.capacity_pages

    def allocate(self, pages: int) -> bool:
        """Take `pages` pages, or take none and return False."""
        if pages > self.free_pages:
            return False
        self.free_pages -= pages
        if self._retained:
            self._take_from_queue(pages)
        self.peak_used_pages = max(self.peak_used_pages, self.used_pages)
        return True

    def release(self, pages: int) -> None:
        """Give `pages` pages back; ValueError if that is more than are held."""
        if pages > self.used_pages:
            raise ValueError(f"{pages} pages released, but only {self.used_pages} are held")
        self.free_pages += pages
        self.times_given_back += 1
        if self._retained:
            self._append_nobodys(pages)

    # --- the pages of a sequence ----------------------------------------------------------------

    stores_when: str | None = None  # a prefix cache takes blocks in: "scheduled" or "computed"
    loading_tokens = 0  # that the next step waits for

    def find(self, sequence: Sequence) -> Found:
        """Return what of a prompt is in place."""
        pages = self.reusable_pages(sequence.request.id)
        return Found(pages) if pages else _NOTHING

    def claim(self, sequence: Sequence, found: Found) -> int:
        """Take what was found of a prompt, and return its pages."""
        return self.reclaim(sequence.request.id)

    def give_back(
        self, sequence: Sequence, pages: int, kept_tokens: int = 0, *, comes_back: bool = False
    ) -> None:
        """Give all pages of a sequence back.

        Those of its first `kept_tokens` tokens hold valid KV, which it may want again if it
        comes back.
        """
        kept = min(kept_tokens // self.page_tokens, pages) if comes_back else 0
        self.release(pages - kept)
        self.retain(sequence.request.id, kept)

    def abandon(self, sequence: Sequence) -> None:
        """Let what was kept for a sequence be anybody's, for it does not come back."""
        self.forget(sequence.request.id)

    def store(self, sequence: Sequence, tokens: int) -> None:
        """Take in that the first `tokens` tokens of a sequence are in place: nobody else asks."""

    def prefetch(self, sequence: Sequence) -> LoadPlan | None:
        """Return what to bring to the host for a sequence that has just come."""
        return None

    def landed(self, sequence: Sequence, plan: LoadPlan, blocks: int) -> None:
        """Take in that the first blocks of a plan are on the host."""

    # --- pages that can be taken back -----------------------------------------------------------

    def retain(self, owner: int, pages: int) -> None:
        """Give pages back whose KV their owner may want again."""
        if not pages:
            return
        if not self._retained:
            self._queue.clear()
            self._append_nobodys(self.free_pages)
        self.free_pages += pages
        self.times_given_back += 1
        self._queue[owner] = pages
        self._retained += 1

    def reusable_pages(self, owner: int) -> int:
        """Return how many of its retained pages an owner could take back."""
        return self._queue.get(owner, 0) if self._retained else 0

    def reclaim(self, owner: int) -> int:
        """Take the retained pages of an owner that are left, and return their number."""
        pages = self._queue.pop(owner, 0) if self._retained else 0
        if pages:
            self._retained -= 1
            self.free_pages -= pages
            self.peak_used_pages = max(self.peak_used_pages, self.used_pages)
        return pages

    def forget(self, owner: int) -> None:
        """Let the retained pages of an owner be anybody's."""
        if self.reusable_pages(owner):
            self._retained -= 1
            self._nobody -= 1
            self._queue = OrderedDict(  # rebuilt, for the entry keeps its place
                (self._nobody if key == owner else key, pages) for key, pages in self._queue.items()
            )

    def _append_nobodys(self, pages: int) -> None:
        self._nobody -= 1
        self._queue[self._nobody] = pages

    def _take_from_queue(self, pages: int) -> None:
        if self._free_first:
            for key in [key for key in self._queue if key < 0]:
                pages -= self._take_entry(key, pages)
        while pages:
            pages -= self._take_entry(next(iter(self._queue)), pages)

    def _take_entry(self, key: int, pages: int) -> int:
        """Take up to `pages` pages of one entry; return how many."""
        held = self._queue[key]
        if held > pages:
            self._queue[key] = held - pages
            return pages
        del self._queue[key]
        self._retained -= key >= 0
        return held
