"""Free pages that keep their content, in the order in which they are given away."""

from __future__ import annotations

from tonnage.sim.serving.blocks import Block, EvictionQueue, LfuQueue, LruQueue, Run
from tonnage.sim.serving.pages import PagePool


class QueuedPool(PagePool):
    """A page pool whose free pages may hold blocks, which anybody can use until they are evicted.

    `_loose` pages hold nothing that is wanted and go first. `free_first`: all pages without content
    are loose, as in SGLang; else they wait their turn with the others, as in vLLM.
    """

    def __init__(
        self,
        capacity_tokens: int,
        page_tokens: int,
        extra_tokens: int,
        *,
        free_first: bool,
        lfu: bool,
    ) -> None:
        """Make an empty pool; `lfu`: blocks go by how many used them, and loose pages first."""
        free_first = free_first or lfu
        super().__init__(capacity_tokens, page_tokens, extra_tokens, free_first=free_first)
        self._loose = self.free_pages
        self._items: EvictionQueue = LfuQueue() if lfu else LruQueue()
        self._runs: dict[int, Run] = {}  # by owner
        self._contents = 0  # queued blocks, and queued runs with an owner

    # --- pages, whoever asks --------------------------------------------------------------------

    def allocate(self, pages: int) -> bool:
        """Take `pages` pages, evicting what they hold, or take none and return False."""
        if pages > self.free_pages:
            return False
        self.free_pages -= pages
        if pages > self._loose:
            self._evict(pages)
        self._loose -= pages
        self._note_peak()
        return True

    def release(self, pages: int) -> None:
        """Give `pages` pages without content back; ValueError if that is more than are held."""
        if pages > self.used_pages:
            raise ValueError(f"{pages} pages released, but only {self.used_pages} are held")
        self.free_pages += pages
        self.times_given_back += 1
        self._free(pages)

    def _free(self, pages: int) -> None:
        """Put free pages without content where they belong."""
        if self._free_first or not self._contents:
            self._loose += pages
        elif pages:
            self._items.add(Run(pages))

    def _evict(self, pages: int) -> None:
        """Make the pages of the items that go next loose until `pages` are; a run goes in part."""
        evicted: list[Block] = []
        items = self._items
        while pages > self._loose:
            item = items.first()
            if isinstance(item, Block):
                items.discard(item)
                self._loose += item.pages
                evicted.append(item)
                self._orphan(item)
                continue
            assert isinstance(item, Run)
            if item.pages > pages - self._loose:
                item.pages -= pages - self._loose
                self._loose = pages
                break
            items.discard(item)
            self._loose += item.pages
            if item.owner is not None:
                self._contents -= 1
                del self._runs[item.owner]
        self._contents -= len(evicted)
        self._evicted(evicted)

    def _orphan(self, block: Block) -> None:
        """Let the block before one that goes know."""
        parent = block.parent
        assert parent is not None
        parent.children -= 1
        if not parent.children and not parent.locks:
            self._items.became_leaf(parent)

    def _evicted(self, blocks: list[Block]) -> None:
        """Take in that the content of some blocks is lost, in this order."""

    def _note_peak(self) -> None:
        self.peak_used_pages = max(self.peak_used_pages, self.used_pages)

    # --- pages that only their owner can use again ----------------------------------------------

    def retain(self, owner: int, pages: int) -> None:
        """Give pages back whose KV their owner may want again."""
        if pages:
            self.free_pages += pages
            self.times_given_back += 1
            self._keep_for(owner, pages, 0)

    def _keep_for(self, owner: int, pages: int, first_page: int) -> None:
        self._runs[owner] = run = Run(pages, owner, first_page)
        self._items.add(run)
        self._contents += 1

    def reusable_pages(self, owner: int) -> int:
        """Return how many of its retained pages an owner could take back."""
        run = self._runs.get(owner)
        return 0 if run is None else run.pages

    def reclaim(self, owner: int) -> int:
        """Take the retained pages of an owner that are left, and return their number."""
        return self._reclaim_after(owner, 0)

    def _reclaim_after(self, owner: int, pages: int) -> int:
        """Take those that come after its first `pages` pages; the others are nobody's."""
        run = self._runs.pop(owner, None)
        if run is None:
            return 0
        self._items.discard(run)
        self._contents -= 1
        taken = run.beyond(pages)
        self.free_pages -= taken
        self._free(run.pages - taken)
        self._note_peak()
        return taken

    def forget(self, owner: int) -> None:
        """Let the retained pages of an owner be anybody's."""
        run = self._runs.pop(owner, None)
        if run is None:
            return
        self._contents -= 1
        run.owner = None  # it keeps its turn, unless pages without content have none
        if self._free_first:
            self._items.discard(run)
            self._loose += run.pages
