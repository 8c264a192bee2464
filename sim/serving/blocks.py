"""Blocks of cached KV, who holds them, and the order in which the others are evicted."""

from __future__ import annotations

from collections import OrderedDict
from heapq import heappop, heappush
from itertools import count
from typing import Protocol


class Item:
    """Free pages with content that leave the GPU together, or one after the other.

    `hits`: requests that used it. `children`: blocks that follow it; it goes after them.
    """

    __slots__ = ("children", "hits", "pages", "turn")

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.children = 0
        self.hits = 1
        self.turn = -1  # when it was queued, -1 while it is not


class Run(Item):
    """Pages that only their owner can use again, None if nobody can.

    `first_page`: how many pages of the owner come before them.
    """

    __slots__ = ("first_page", "owner")

    def __init__(self, pages: int, owner: int | None = None, first_page: int = 0) -> None:
        super().__init__(pages)
        self.owner = owner
        self.first_page = first_page

    def beyond(self, pages: int) -> int:
        """Return how many come after the first `pages` pages of the owner; none after a gap."""
        return max(self.first_page + self.pages - pages, 0) if pages >= self.first_page else 0


class Block(Item):
    """A block of tokens whose KV is in place; `parent` is the block before it.

    `depth`: blocks up to and with it. `locks`: sequences of which it is the last block that they
    share, and blocks after it that are locked; a block with none can be evicted.
    """

    __slots__ = ("block_id", "depth", "locks", "parent")

    def __init__(self, block_id: int, parent: Block | None, pages: int) -> None:
        # As Item does, but many are made, and a call costs as much as all of this.
        self.pages = pages
        self.children = 0
        self.hits = 1
        self.turn = -1
        self.block_id = block_id
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.locks = 0


class HeldPrefix:
    """What one sequence has to do with a prefix cache.

    `block`: the last block that it shares. `pages`: of the pages it holds, those of shared blocks.
    `unstored_tokens`: computed, and still to be shared. `loaded_tokens`: of its cached tokens,
    those that came from a tier. `prefetched`: blocks brought to the host for it, and whence.
    """

    __slots__ = ("block", "loaded_tokens", "pages", "prefetched", "unstored_tokens")

    def __init__(self) -> None:
        self.block: Block | None = None
        self.pages = 0
        self.unstored_tokens = 0
        self.loaded_tokens: dict[str, int] = {}
        self.prefetched: dict[int, str] = {}


class EvictionQueue(Protocol):
    """Items that nobody holds. Blocks are added the last of a path first."""

    def add(self, item: Item) -> None:
        """Queue an item that nobody holds any more."""

    def discard(self, item: Item) -> None:
        """Take an item out that is held again."""

    def first(self) -> Item:
        """Return the item that goes next, and leave it where it is."""

    def became_leaf(self, block: Block) -> None:
        """Take in that no block follows a queued one any more."""

    def clear(self) -> None:
        """Forget all items."""


class LruQueue:
    """The least recently used first; of what was used together, the last block first."""

    def __init__(self) -> None:
        self._items: OrderedDict[Item, None] = OrderedDict()

    def add(self, item: Item) -> None:
        """Queue an item as the one used last."""
        self._items[item] = None

    def discard(self, item: Item) -> None:
        """Take an item out."""
        del self._items[item]

    def first(self) -> Item:
        """Return the item that was used the longest time ago."""
        return next(iter(self._items))

    def became_leaf(self, block: Block) -> None:
        """Nothing: a block is behind those that follow it anyway."""

    def clear(self) -> None:
        """Forget all items."""
        self._items.clear()


class LfuQueue:
    """The item that the fewest requests used first, of those the least recently used.

    A block is eligible when none follows it (SGLang 0.5.23, `mem_cache/evict_policy.py`).
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Item]] = []
        self._turns = count()

    def add(self, item: Item) -> None:
        """Queue an item as the one used last."""
        item.turn = next(self._turns)
        if not item.children:
            heappush(self._heap, (item.hits, item.turn, item))

    def discard(self, item: Item) -> None:
        """Take an item out; its place in the heap is dropped when it comes up."""
        item.turn = -1

    def first(self) -> Item:
        """Return the item used by the fewest."""
        while self._heap[0][1] != self._heap[0][2].turn:
            heappop(self._heap)
        return self._heap[0][2]

    def became_leaf(self, block: Block) -> None:
        """Make a block eligible."""
        heappush(self._heap, (block.hits, block.turn, block))

    def clear(self) -> None:
        """Forget all items."""
        self._heap.clear()
