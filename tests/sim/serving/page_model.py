"""The page pool again, slowly: every free page by itself, in the order they are given away."""

from __future__ import annotations

from tonnage.sim.serving.pages import PagePool


class PageByPage(PagePool):
    """A pool whose free pages are a list of owners, None for nobody's: the first one goes first.

    It trusts nobody: what `PagePool` would let pass in silence is an error here.
    """

    def __init__(
        self,
        capacity_tokens: int,
        page_tokens: int,
        extra_tokens: int = 0,
        *,
        free_first: bool = False,
    ) -> None:
        super().__init__(capacity_tokens, page_tokens, extra_tokens, free_first=free_first)
        self.queue: list[int | None] = [None] * self.capacity_pages

    def allocate(self, pages: int) -> bool:
        assert pages >= 0
        if pages > len(self.queue):
            return False
        for _ in range(pages):
            first = self.queue.index(None) if self._free_first and None in self.queue else 0
            del self.queue[first]
        self._count()
        return True

    def release(self, pages: int) -> None:
        self._take_back([None] * pages)

    def retain(self, owner: int, pages: int) -> None:
        assert owner not in self.queue
        if pages:
            self._take_back([owner] * pages)

    def _take_back(self, pages: list[int | None]) -> None:
        self.queue += pages
        assert len(self.queue) <= self.capacity_pages
        self.times_given_back += 1
        self._count()

    def reusable_pages(self, owner: int) -> int:
        return self.queue.count(owner)

    def reclaim(self, owner: int) -> int:
        pages = self.queue.count(owner)
        self.queue = [one for one in self.queue if one != owner]
        self._count()
        return pages

    def forget(self, owner: int) -> None:
        self.queue = [None if one == owner else one for one in self.queue]

    def _count(self) -> None:
        self.free_pages = len(self.queue)
        self.peak_used_pages = max(self.peak_used_pages, self.used_pages)
