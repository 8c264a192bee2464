"""A prefix cache that keeps every page by itself and looks for everything: slow, and plain to see.

Pages that nobody holds lie in one list, in the order in which they came back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

Ids = tuple[int, ...]  # of a block and of all before it


@dataclass(eq=False)
class Page:
    """One page: the block or the request whose KV it holds, who holds it, when it came back."""

    block: Ids | None = None
    owner: str | None = None  # "" stands for a request that does not come back
    holders: set[str] = field(default_factory=set)
    turn: int = 0


@dataclass(eq=False)
class Member:
    """A request: the ids of its blocks, and its pages in the order of its tokens."""

    name: str
    ids: Ids
    pages: list[Page] = field(default_factory=list)
    path: Ids = ()  # the blocks that it shares


class SlowTiers:
    """Host memory and the tiers below it as lists of blocks, the one used last at the end."""

    def __init__(self, capacities: dict[str, int], write: str) -> None:
        self.capacities, self.write = capacities, write
        self.blocks: dict[str, list[Ids]] = {name: [] for name in capacities}

    def put(self, name: str, path: Ids) -> None:
        """Write a block to one tier, or refresh it there."""
        here = self.blocks[name]
        if path in here:
            here.remove(path)
        here.append(path)
        if len(here) > self.capacities[name]:
            del here[0]

    def keep(self, path: Ids) -> None:
        """Write a block to the host and on from there, unless the host has it."""
        known = path in self.blocks["host"]
        for name, here in self.blocks.items():
            if not known or path in here:
                self.put(name, path)

    def refresh(self, path: Ids) -> None:
        """Note that a block is used, wherever it is."""
        for name, here in self.blocks.items():
            if path in here:
                self.put(name, path)

    def holder(self, path: Ids) -> str | None:
        """Return the nearest tier that has a block."""
        return next((name for name, here in self.blocks.items() if path in here), None)


class SlowCache:
    """Pages of `page` tokens, blocks of `block` tokens; rules as in `PrefixCache`.

    `sglang`: pages that hold nothing go first, and who computed a block too gives its own up.
    """

    def __init__(
        self,
        pages: int,
        page: int,
        block: int,
        *,
        sglang: bool,
        lfu: bool,
        tiers: SlowTiers | None = None,
    ) -> None:
        self.page, self.block, self.sglang, self.lfu = page, block, sglang, lfu
        self.tiers = tiers
        self.free = [Page() for _ in range(pages)]
        self.blocks: dict[Ids, list[Page]] = {}
        self.hits: dict[Ids, int] = {}
        self.kept: dict[str, tuple[int, list[Page]]] = {}  # name -> (first page, pages)
        self.turns = 0

    def span(self, blocks: int) -> int:
        """Return the full pages of so many blocks."""
        return blocks * self.block // self.page

    # --- what is there --------------------------------------------------------------------------

    def matched(self, ids: Ids, prompt_tokens: int) -> Ids:
        """Return the longest prefix that is here and leaves a token to be computed."""
        most = min(len(ids), (prompt_tokens - 1) // self.block)
        lengths = [n for n in range(most + 1) if all(ids[: k + 1] in self.blocks for k in range(n))]
        return ids[: max(lengths)]

    def shared(self, path: Ids) -> list[Page]:
        """Return the pages of a block and of all before it."""
        return [page for n in range(len(path)) for page in self.blocks[path[: n + 1]]]

    def own(self, member: Member, path: Ids) -> list[Page]:
        """Return the pages that a request kept for itself and that come after a path."""
        first, pages = self.kept.get(member.name, (0, []))
        gap = self.span(len(path)) - first
        return [] if gap < 0 else pages[gap:]

    def on_host(self, member: Member, path: Ids, prompt_tokens: int) -> Ids:
        """Return a path continued by the blocks that the host has."""
        most = (prompt_tokens - 1) // self.block
        while self.tiers is not None and len(path) < min(most, len(member.ids)):
            if member.ids[: len(path) + 1] not in self.tiers.blocks["host"]:
                break
            path = member.ids[: len(path) + 1]
        return path

    # --- giving pages away ----------------------------------------------------------------------

    def take(self, count: int) -> list[Page] | None:
        """Return so many pages, or None if there are fewer."""
        return None if count > len(self.free) else [self._take_one() for _ in range(count)]

    def _take_one(self) -> Page:
        page = self._next()
        self.free.remove(page)
        if page.block is not None:
            path = page.block
            del self.hits[path]
            for one in self.blocks.pop(path):
                one.block = None
            if self.tiers is not None and self.tiers.write == "back":
                self.tiers.keep(path)
        if page.owner:
            pages = self.kept[page.owner][1]
            assert pages.pop() is page
            if not pages:
                del self.kept[page.owner]
        page.owner = None
        return page

    def _next(self) -> Page:
        empty = [page for page in self.free if page.block is None and page.owner is None]
        if self.sglang and empty:
            return empty[0]
        if not self.lfu:
            return self.free[0]
        last = [page for page in self.free if not self._is_followed(page)]
        return min(last, key=lambda one: (self.hits.get(one.block or (), 1), one.turn))

    def _is_followed(self, page: Page) -> bool:
        path = page.block or ()
        return bool(path) and any(
            len(one) > len(path) and one[: len(path)] == path for one in self.blocks
        )

    def _put_back(self, pages: Iterable[Page], owner: str | None = None) -> None:
        for page in pages:
            self.turns += 1
            page.turn, page.owner = self.turns, owner
            self.free.append(page)

    def _hold(self, name: str, pages: list[Page]) -> None:
        for page in pages:
            if not page.holders:
                self.free.remove(page)
            page.holders.add(name)

    # --- requests -------------------------------------------------------------------------------

    def start(self, member: Member, prompt_tokens: int, pages: int) -> int | None:
        """Give a request its pages; return how many were in place, None if there is no room."""
        path = self.matched(member.ids, prompt_tokens)
        in_place, own = self.shared(path), self.own(member, path)
        if pages - sum(bool(page.holders) for page in in_place) > len(self.free):
            return None
        self._hold(member.name, in_place)
        for n in range(len(path)):
            self.hits[path[: n + 1]] += 1
        kept = self.kept.pop(member.name, (0, []))[1]
        for page in kept:
            self.free.remove(page)
            page.owner = None
        self._put_back(page for page in kept if page not in own)
        loaded = path if own else self.on_host(member, path, prompt_tokens)
        fresh = self.take(pages - len(in_place) - len(own))
        assert fresh is not None
        member.path, member.pages = path, in_place + own + fresh
        for n in range(len(path), len(loaded)):
            self._add(member, loaded[: n + 1], slice(self.span(n), self.span(n + 1)))
        return max(self.span(len(loaded)), len(in_place) + len(own))

    def _add(self, member: Member, path: Ids, places: slice) -> None:
        member.path = path
        self.hits[path], self.blocks[path] = 1, member.pages[places]
        for page in member.pages[places]:
            page.block, page.holders = path, {member.name}

    def grow(self, member: Member) -> bool:
        """Give a request one more page."""
        page = self.take(1)
        member.pages += page or []
        return page is not None

    def store(self, member: Member, tokens: int) -> None:
        """Share the blocks whose tokens are in place."""
        first = len(member.path)
        for n in range(first, min(len(member.ids), tokens // self.block)):
            path, places = member.ids[: n + 1], slice(self.span(n), self.span(n + 1))
            if path not in self.blocks:
                self._add(member, path, places)
                continue
            member.path = path
            self.hits[path] += 1
            self._hold(member.name, self.blocks[path])
            if self.sglang:
                self._put_back(member.pages[places])
                member.pages[places] = self.blocks[path]
        if self.tiers is not None and self.tiers.write == "through":
            for n in range(len(member.path), first, -1):
                self.tiers.keep(member.path[:n])

    def end(self, member: Member, kept_tokens: int, *, comes_back: bool) -> None:
        """Take all pages of a request back."""
        self.store(member, kept_tokens)
        alone = [page for page in member.pages if page.block is None]
        tail = member.pages[self.span(len(member.path)) : kept_tokens // self.page]
        self._put_back(page for page in alone if page not in tail)
        name = member.name if comes_back else ""
        if tail and comes_back:
            self.kept[name] = (self.span(len(member.path)), tail)
        keeps = comes_back or (self.sglang and bool(member.ids))
        self._put_back(reversed(tail), name if keeps else None)
        self._use_tiers(member.path)
        for n in range(len(member.path), 0, -1):
            pages = self.blocks[member.path[:n]]
            for page in pages:
                page.holders.remove(member.name)
            self._put_back(page for page in pages if not page.holders)
        member.pages, member.path = [], ()

    def _use_tiers(self, path: Ids) -> None:
        if self.tiers is None:
            return
        least = {"through": 1, "selective": 2, "back": 10**9}[self.tiers.write]
        for n in range(len(path), 0, -1):
            keeps = self.hits[path[:n]] >= least
            (self.tiers.keep if keeps else self.tiers.refresh)(path[:n])

    def abandon(self, member: Member) -> None:
        """Let what a request kept be anybody's."""
        for page in self.kept.pop(member.name, (0, []))[1]:
            page.owner = None
