"""Page pools that know every page: they count as the others do, and say which pages those are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tonnage.sim.domain import Coverage, IntegritySpec
from tonnage.sim.serving.blocks import Block, HeldPrefix
from tonnage.sim.serving.integrity import Watch
from tonnage.sim.serving.pages import Found, PagePool
from tonnage.sim.serving.physical import Entry, Held, PhysicalPages
from tonnage.sim.serving.prefix_cache import PrefixCache
from tonnage.sim.serving.sequence import Sequence


class _Identified(PagePool):
    """What both kinds of pool share: allocation, and pages kept for their owner.

    Invariant, after every call: the pages in the queue, those kept and those of cached blocks that
    nobody holds are as many as the count of free pages, and `doubled` more.
    """

    watch: Watch

    def _identify(self, spec: IntegritySpec) -> None:
        pages = PhysicalPages(self.capacity_pages, checks_frees=spec.tracker == "batched")
        self.watch = Watch(pages, spec, self.page_tokens, self.extra_tokens)

    @property
    def idle_entries(self) -> Iterable[Entry]:
        """Free pages that a cache may still want."""
        return ()

    def allocate(self, pages: int) -> bool:
        """Take `pages` pages, or take none and return False."""
        if not super().allocate(pages):
            return False
        self._let_go_of_lost_ones()
        self.watch.pages.take(pages)
        return True

    def return_unneeded(self, pages: int) -> None:
        """Give back pages that nobody was given."""
        self.release(pages)
        self.watch.pages.return_unassigned(pages)

    def _let_go_of_lost_ones(self) -> None:
        """Queue what was kept for owners and is to be given to others, the last pages first."""
        retained = self.watch.pages.retained
        for owner in list(retained):
            entries, left = retained[owner], self.reusable_pages(owner)
            while len(entries) > left:
                self.watch.pages.free(entries.pop(), owner)
            if not entries:
                del retained[owner]

    def _take_kept(self, sequence: Sequence, taken: int) -> None:
        """Let a sequence have the last `taken` pages that were kept for it; others are nobody's."""
        pages = self.watch.pages
        entries = pages.retained.pop(sequence.request.id, [])
        held = pages.hold(sequence)
        first = len(held.ledger)
        for entry in reversed(entries[: len(entries) - taken]):
            pages.free(entry, held.id)
        for entry in entries[len(entries) - taken :]:
            pages.append(held, entry, own=True)
        self.watch.distrust_if_wrong(held, range(first, len(held.ledger)))

    def look_through(self) -> None:
        """Drop what is twice in the queue of a pool of which nobody holds anything."""
        if self.watch.pages.doubled and not self.used_pages:
            before = self.watch.pages.doubled
            self.watch.pages.mend(self.idle_entries)
            self.watch.books.doubles_mended += before - self.watch.pages.doubled


class IdentifiedPool(_Identified):
    """A pool without shared pages."""

    def __init__(self, *args: Any, integrity: IntegritySpec, **settings: Any) -> None:
        """Make an empty pool."""
        super().__init__(*args, **settings)
        self._identify(integrity)

    def claim(self, sequence: Sequence, found: Found) -> int:
        """Take what was found of a prompt, and return its pages."""
        taken = super().claim(sequence, found)
        self._take_kept(sequence, taken)
        return taken

    def give_back(
        self, sequence: Sequence, pages: int, kept_tokens: int = 0, *, comes_back: bool = False
    ) -> None:
        """Give all pages of a sequence back."""
        physical = self.watch.pages
        if pages:
            physical.assign(physical.hold(sequence), pages)
        kept = min(kept_tokens // self.page_tokens, pages) if comes_back else 0
        entries = physical.close(sequence, pages, range(kept))
        if kept:
            physical.retained[sequence.request.id] = entries
        super().give_back(sequence, pages, kept_tokens, comes_back=comes_back)
        self._let_go_of_lost_ones()

    def abandon(self, sequence: Sequence) -> None:
        """Let what was kept for a sequence be anybody's."""
        super().abandon(sequence)
        self._let_go_of_lost_ones()


class IdentifiedCache(_Identified, PrefixCache):
    """A prefix cache: its blocks have pages and tags of their own, which requests take over."""

    def __init__(self, *args: Any, integrity: IntegritySpec, **settings: Any) -> None:
        """Make an empty cache."""
        super().__init__(*args, **settings)
        self._identify(integrity)
        self._entries: dict[Block, list[Entry]] = {}
        self._held: Held | None = None  # of the sequence at hand
        self._unsound: dict[Block, None] = {}  # to be dropped when nobody holds them

    @property
    def idle_entries(self) -> Iterable[Entry]:
        """Pages of blocks that nobody holds."""
        return [
            entry
            for block, entries in self._entries.items()
            if not block.locks
            for entry in entries
        ]

    # --- what requests take over ----------------------------------------------------------------

    def find(self, sequence: Sequence) -> Found:
        """Return what of a prompt is in place; what fails its check is not."""
        found = super().find(sequence)
        if found.block is None or not self.watch.spec.checks(Coverage.PREFIX):
            return found
        path = self._path(found.block)
        mismatched = [block for block in path if not self.watch.sound(self._entries[block])]
        # Some are to be dropped already: nobody wrote them, and somebody holds them still.
        unsound = [block for block in path if block in self._unsound or block in mismatched]
        if not unsound:
            return found
        if mismatched:
            self._note_unsound(mismatched)
        if unsound[0].locks:  # whoever holds it is aborted by its own check; nobody joins it
            run = self._runs.get(sequence.request.id)
            return Found(0 if run is None else run.beyond(0))
        self._drop(unsound[0])
        return super().find(sequence)

    def _note_unsound(self, unsound: list[Block]) -> None:
        pages, books = self.watch.pages, self.watch.books
        books.detected += 1
        books.recomputed += 1
        self._unsound.update((block, None) for block in unsound if block.locks)
        for block in unsound:
            for entry in self._entries[block]:
                cause = pages.causes.get(entry.page)
                if cause is not None and pages.tags[entry.page] != entry.tag:
                    cause.found()

    def _path(self, block: Block) -> list[Block]:
        """Return the blocks up to and with one, the first of a prompt first."""
        path = []
        while block.parent is not None:
            path.append(block)
            block = block.parent
        return path[::-1]

    def _drop(self, block: Block) -> None:
        """Drop a block that nobody holds, and all that follow it."""
        following = sorted(
            (one for one in self._entries if block in self._path(one)),
            key=lambda one: -one.depth,
        )
        for one in following:
            self._items.discard(one)
            self._contents -= 1
            self._orphan(one)
            self._evicted([one])
            self._free(one.pages)

    def claim(self, sequence: Sequence, found: Found) -> int:
        """Hold what was found of a prompt, load what the host has, and return its pages."""
        pages = self.watch.pages
        self._held = held = pages.hold(sequence)
        if found.block is not None:
            for block in self._path(found.block):
                for entry in self._entries[block]:
                    pages.append(held, entry, own=False)
            self.watch.distrust_if_wrong(held, range(len(held.ledger)))
        return super().claim(sequence, found)

    def _reclaim_after(self, owner: int, pages: int) -> int:
        taken = super()._reclaim_after(owner, pages)
        assert self._held is not None
        self._take_kept(self._held.sequence, taken)
        return taken

    def _load(self, sequence: Sequence, held: HeldPrefix, found: Found) -> None:
        super()._load(sequence, held, found)
        mine = self.watch.pages.hold(sequence)
        positions = range(len(mine.ledger) - found.loaded_pages, len(mine.ledger))
        if self.watch.refused(mine, positions, Coverage.TIER):
            self.watch.not_loaded.update(mine.ledger[position] for position in positions)
        else:
            self.watch.write_own(mine, positions)
        self.watch.fresh.append((mine, positions))

    # --- blocks ---------------------------------------------------------------------------------

    def store(self, sequence: Sequence, tokens: int) -> None:
        """Take in that the first `tokens` tokens of a sequence are in place."""
        self._held = self.watch.pages.hold(sequence)
        self._assign_at_most(self._held, self.pages_for(tokens))
        super().store(sequence, tokens)

    def _assign_at_most(self, held: Held, pages: int) -> None:
        self.watch.pages.assign(held, pages)

    def _add_block(self, parent: Block, block_id: int, held: HeldPrefix) -> Block:
        block = super()._add_block(parent, block_id, held)
        mine = self._held
        assert mine is not None
        first = self._pages_to(parent.depth)
        self._assign_at_most(mine, first + block.pages)
        self._entries[block] = mine.ledger[first : first + block.pages]
        mine.own[first : first + block.pages] = [False] * block.pages
        return block

    def _share(self, held: HeldPrefix, known: Block) -> None:
        super()._share(held, known)
        if not self._dedupes:
            return
        mine, first = self._held, self._pages_to(known.depth - 1)
        assert mine is not None
        for position, entry in enumerate(self._entries[known], start=first):
            self.watch.pages.replace(mine, position, entry)
        self.watch.distrust_if_wrong(mine, range(first, first + known.pages))

    def _evicted(self, blocks: list[Block]) -> None:
        super()._evicted(blocks)
        for block in blocks:
            self._unsound.pop(block, None)
            for entry in self._entries.pop(block):
                self.watch.pages.free(entry)

    # --- the end --------------------------------------------------------------------------------

    def give_back(
        self, sequence: Sequence, pages: int, kept_tokens: int = 0, *, comes_back: bool = False
    ) -> None:
        """Give all pages of a sequence back: blocks stay, until their pages are needed."""
        physical = self.watch.pages
        if pages:
            self._held = physical.hold(sequence)
            physical.assign(self._held, pages)
        if sequence.aborted is not None:
            kept_tokens = 0  # what it has is not to be shared
            self._distrust_blocks(sequence)
        super().give_back(sequence, pages, kept_tokens, comes_back=comes_back)
        run = self._runs.get(sequence.request.id) if comes_back else None
        kept = range(0) if run is None else range(run.first_page, run.first_page + run.pages)
        entries = physical.close(sequence, pages, kept)
        if entries:
            physical.retained[sequence.request.id] = entries
        self._let_go_of_lost_ones()
        self._drop_unsound()

    def _distrust_blocks(self, sequence: Sequence) -> None:
        """Let blocks go to which an aborted request was to write, and did not."""
        held, mine = sequence.prefix, self.watch.pages.held.get(sequence.request.id)
        if held is None or held.block is None or mine is None:
            return
        for block in self._path(held.block):
            first = self._pages_to(block.depth - 1)
            if not self.watch.holds_its_own(mine, range(first, first + block.pages)):
                self._unsound[block] = None

    def _drop_unsound(self) -> None:
        for block in [one for one in self._unsound if not one.locks]:
            if block in self._entries:
                self._drop(block)

    def abandon(self, sequence: Sequence) -> None:
        """Let what was kept for a sequence be anybody's."""
        super().abandon(sequence)
        self._let_go_of_lost_ones()
