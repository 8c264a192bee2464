"""The paged KV memory of one instance: how many pages there are and who holds them."""

from __future__ import annotations


class PagePool:
    """Count the pages of one instance; a page holds the KV of `page_tokens` tokens.

    Invariant: the pages that requests hold and the free pages add up to the pool.
    """

    def __init__(self, capacity_tokens: int, page_tokens: int, extra_tokens: int = 0) -> None:
        """Make an empty pool.

        `extra_tokens`: what a request takes whatever its length (windows, states), in tokens.
        """
        self.page_tokens = page_tokens
        self._extra_tokens = extra_tokens
        self.capacity_pages = capacity_tokens // page_tokens
        self.free_pages = self.capacity_pages
        self.peak_used_pages = 0

    @property
    def used_pages(self) -> int:
        """Pages that requests hold now."""
        return self.capacity_pages - self.free_pages

    def pages_for(self, tokens: int) -> int:
        """Return the pages that `tokens` tokens of one request fill, the last one partly."""
        return -(-(tokens + self._extra_tokens) // self.page_tokens)

    def could_ever_hold(self, tokens: int) -> bool:
        """Tell whether one request of that many tokens fits into the empty pool."""
        return self.pages_for(tokens) <= self.capacity_pages

    def allocate(self, pages: int) -> bool:
        """Take `pages` pages, or take none and return False."""
        if pages > self.free_pages:
            return False
        self.free_pages -= pages
        self.peak_used_pages = max(self.peak_used_pages, self.used_pages)
        return True

    def release(self, pages: int) -> None:
        """Give `pages` pages back; ValueError if that is more than are held."""
        if pages > self.used_pages:
            raise ValueError(f"{pages} pages released, but only {self.used_pages} are held")
        self.free_pages += pages
