"""The pages of one instance as a prefix cache: requests share what they begin with.

Blocks whose content has an id (`Request.block_ids`) form a tree. Running requests share the blocks
at its root side and hold the rest of their pages alone; blocks that nobody holds are free pages,
and are evicted from the leaves when pages are asked for.

Sources: vLLM 0.19 `v1/core/block_pool.py` (one queue of free pages, cached or not, in order of
release, a request's last ones first) and `kv_cache_manager.py` (a block is shared as soon as it is
scheduled); SGLang 0.5.23 `mem_cache/unified_cache/unified_tree_core.py` and `evict_policy.py` (a
tree beside the free pages, which go first; a block is shared when it is computed, and whoever
computed it too gives its own pages up for it).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from tonnage.sim.domain import BadInputError, Request
from tonnage.sim.serving.blocks import Block, HeldPrefix, Run
from tonnage.sim.serving.pages import Found
from tonnage.sim.serving.queued_pool import QueuedPool
from tonnage.sim.serving.sequence import Sequence
from tonnage.sim.serving.tiers import Hierarchy, HierarchySpec, LoadPlan

Eviction = Literal["lru", "lfu"]


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The prefix cache of one instance; its pages are those of the instance's pool.

    `stores`: whether others can share a block once it is scheduled (vLLM) or once it is computed
    (SGLang, which then frees the pages of those that computed it too). `tiers`: what holds blocks
    beyond the GPU.
    """

    eviction: Eviction = "lru"
    stores: Literal["scheduled", "computed"] = "computed"
    tiers: HierarchySpec | None = None


_DEFAULT = CacheSpec()


class PrefixCache(QueuedPool):
    """A page pool whose free pages keep their content, shared by blocks of known content.

    Invariant: the pages of held blocks, those that requests hold alone, and the free pages add up
    to the pool; blocks that nobody holds are among the free pages. Sequences without block ids
    take no part: for them it is the pool that it extends.
    """

    def __init__(
        self,
        capacity_tokens: int,
        page_tokens: int,
        extra_tokens: int = 0,
        *,
        free_first: bool = False,
        spec: CacheSpec = _DEFAULT,
        tiers: Hierarchy | None = None,
    ) -> None:
        """Make an empty pool; `free_first`: pages without content are given away first."""
        lfu = spec.eviction == "lfu"
        super().__init__(capacity_tokens, page_tokens, extra_tokens, free_first=free_first, lfu=lfu)
        self.stores_when = spec.stores
        self.tiers = tiers
        self._dedupes = spec.stores == "computed"
        self._counts_hits = lfu or (tiers is not None and tiers.spec.write == "selective")
        self._root = Block(-1, None, 0)
        self._root.locks = 1  # for ever
        self._blocks: dict[int, Block] = {}  # by id
        self._block_tokens = 0  # of the ids seen so far
        self._block_pages = 0  # 0: not the same for all

    # --- the pages of a sequence ----------------------------------------------------------------

    def hit_blocks(self, block_ids: tuple[int, ...]) -> int:
        """Return how many of these blocks, from the first on, are on the GPU."""
        return self._deepest(block_ids, len(block_ids)).depth

    def find(self, sequence: Sequence) -> Found:
        """Return what of a prompt is in place; one token at least is left to be computed."""
        request = sequence.request
        ids = request.block_ids
        if not ids:
            return super().find(sequence)
        self._check_block_tokens(sequence)
        most = min(len(ids), (sequence.prompt_tokens - 1) // self._block_tokens)
        last = held = self._deepest(ids, most)
        if last.depth > 1:
            self._check_parent(request, last, ids[last.depth - 2])
        while not held.locks:
            assert held.parent is not None
            held = held.parent
        shared, held_pages = self._pages_to(last.depth), self._pages_to(held.depth)
        run = self._runs.get(request.id)
        own = 0 if run is None else run.beyond(shared)
        loads = 0
        if self.tiers is not None and not own and last.depth < most:
            loads = self.tiers.on_host(ids[last.depth : most])
        loaded_pages = self._pages_to(last.depth + loads) - shared
        return Found(shared + own, held_pages, shared - held_pages, last, loads, loaded_pages)

    def _check_block_tokens(self, sequence: Sequence) -> None:
        request = sequence.request
        if request.block_tokens == self._block_tokens:
            return
        if self._block_tokens:
            raise BadInputError(
                f"request {request.id}: blocks of {request.block_tokens} tokens after some of "
                f"{self._block_tokens}; a prefix cache needs blocks of one size"
            )
        self._block_tokens = request.block_tokens
        if not self._block_tokens % self.page_tokens:
            self._block_pages = self._block_tokens // self.page_tokens
        if self.tiers is not None:
            self.tiers.set_block_tokens(request.block_tokens)

    def _check_parent(self, request: Request, block: Block, before: int) -> None:
        parent = block.parent
        if parent is None or parent is self._root or parent.block_id == before:
            return
        raise BadInputError(
            f"request {request.id}: block {block.block_id} follows block {before}, and before it "
            f"followed block {parent.block_id}; an id must stand for its block and all before it"
        )

    def _deepest(self, ids: tuple[int, ...], most: int) -> Block:
        """Return the last of the first `most` blocks that is here; all before it are, too."""
        found, missing, last = 0, most + 1, self._root
        probe = most  # all of them is the likeliest answer, none the next
        while missing - found > 1:
            block = self._blocks.get(ids[probe - 1])
            if block is not None and block.depth == probe:
                found, last = probe, block
            else:
                missing = probe
            probe = 1 if probe == most and not found else (found + missing) // 2
        return last

    def _pages_to(self, depth: int) -> int:
        """Return the pages that the first `depth` blocks fill."""
        return depth * self._block_tokens // self.page_tokens

    def claim(self, sequence: Sequence, found: Found) -> int:
        """Hold what was found of a prompt, load what the host has, and return its pages."""
        request, last = sequence.request, found.block
        if last is None:
            return super().claim(sequence, found)
        held = sequence.prefix
        if held is None:
            held = sequence.prefix = HeldPrefix()
        if last is not self._root:
            self._lock(last)
        held.block, held.pages = last, self._pages_to(last.depth)
        pages = held.pages + self._reclaim_after(request.id, held.pages)
        if found.loads:
            self._load(sequence, held, found)
            pages += found.loaded_pages
        self._note_peak()
        if not sequence.retractions:
            most = sequence.prompt_tokens - 1
            sequence.cached_tokens = min(pages * self.page_tokens, most)
        return pages

    def _lock(self, last: Block) -> None:
        """Hold a block and all before it."""
        block = last
        block.locks += 1
        while block.locks == 1:
            self._items.discard(block)
            self._contents -= 1
            self.free_pages -= block.pages
            assert block.parent is not None
            block = block.parent
            block.locks += 1
        if self._counts_hits:
            while last.parent is not None:
                last.hits += 1
                last = last.parent

    def _unlock(self, block: Block) -> None:
        """Let a block and all before it go, as far as nobody else holds them."""
        block.locks -= 1
        while not block.locks:
            self.free_pages += block.pages
            self._items.add(block)
            self._contents += 1
            assert block.parent is not None
            block = block.parent
            block.locks -= 1

    def _load(self, sequence: Sequence, held: HeldPrefix, found: Found) -> None:
        """Give the blocks pages that the host holds; the step that comes waits for them."""
        assert self.tiers is not None
        assert held.block is not None
        taken = self.allocate(found.loaded_pages)
        assert taken
        depth = held.block.depth
        ids = sequence.request.block_ids[depth : depth + found.loads]
        for block_id in ids:
            held.block = self._add_block(held.block, block_id, held)
        tokens = found.loaded_pages * self.page_tokens
        self.loading_tokens += tokens
        self.tiers.note_load("host", tokens)
        if not sequence.retractions:
            came: Counter[str] = Counter()
            for block_id in ids:
                name = held.prefetched.get(block_id, "host")
                came[name] += self._blocks[block_id].pages * self.page_tokens
            held.loaded_tokens = dict(came)

    # --- blocks that are new --------------------------------------------------------------------

    def store(self, sequence: Sequence, tokens: int) -> None:
        """Take in that the first `tokens` tokens of a sequence are in place: others can share them.

        Its pages become those of its blocks. Where a block is here already, the sequence gives its
        own pages of it up, or keeps them beside (vLLM) until it ends.
        """
        ids, held = sequence.request.block_ids, sequence.prefix
        if not ids or held is None or held.block is None:
            return
        depth = held.block.depth
        most = min(len(ids), tokens // self._block_tokens)
        for block_id in ids[depth:most]:
            known = self._blocks.get(block_id)
            if known is None:
                held.block = self._add_block(held.block, block_id, held)
            else:
                self._check_parent(sequence.request, known, held.block.block_id)
                self._share(held, known)
        if self.tiers is not None and held.block.depth > depth:
            self.tiers.stored(ids[depth : held.block.depth][::-1])

    def _add_block(self, parent: Block, block_id: int, held: HeldPrefix) -> Block:
        """Make a block of pages that the holder of its parent has."""
        pages = self._block_pages or (
            self._pages_to(parent.depth + 1) - self._pages_to(parent.depth)
        )
        block = Block(block_id, parent, pages)
        block.locks = 1
        parent.children += 1
        if parent is self._root:
            parent.locks += 1
        # Else its holder's lock moves on to the block, and the block's takes its place.
        self._blocks[block_id] = block
        held.pages += pages
        return block

    def _share(self, held: HeldPrefix, known: Block) -> None:
        """Let the holder of its parent hold a block that is here."""
        parent = known.parent
        assert parent is not None
        if not known.locks:
            self._items.discard(known)
            self._contents -= 1
            self.free_pages -= known.pages
            parent.locks += 1
        known.locks += 1
        known.hits += 1
        if parent is not self._root:
            parent.locks -= 1
        held.block = known
        if self._dedupes:
            held.pages += known.pages
            self.free_pages += known.pages
            self._free(known.pages)

    def _evicted(self, blocks: list[Block]) -> None:
        for block in blocks:
            del self._blocks[block.block_id]
            if self.tiers is not None:
                self.tiers.evicted(block.block_id)

    # --- the end --------------------------------------------------------------------------------

    def give_back(
        self, sequence: Sequence, pages: int, kept_tokens: int = 0, *, comes_back: bool = False
    ) -> None:
        """Give all pages of a sequence back: blocks stay, until their pages are needed.

        Full pages beyond its blocks can be used again if it comes back. If not, they go when they
        would, did anybody know what they hold: as in the engines, where somebody does.
        """
        held = sequence.prefix
        if held is None or held.block is None:
            super().give_back(sequence, pages, kept_tokens, comes_back=comes_back)
            return
        if kept_tokens:
            self.store(sequence, kept_tokens)
        last, alone = held.block, pages - held.pages
        first_page = self._pages_to(last.depth)
        tail = min(max(kept_tokens // self.page_tokens - first_page, 0), alone)
        self.free_pages += alone
        self.times_given_back += 1
        self._free(alone - tail)
        if tail and comes_back:
            self._keep_for(sequence.request.id, tail, first_page)
        elif tail and self._free_first:
            self._items.add(Run(tail))
        else:
            self._free(tail)
        held.block, held.pages, held.unstored_tokens = None, 0, 0
        if last is not self._root:
            if self.tiers is not None:
                self.tiers.used(sequence.request.block_ids[: last.depth][::-1], last)
            self._unlock(last)

    # --- tiers ----------------------------------------------------------------------------------

    def prefetch(self, sequence: Sequence) -> LoadPlan | None:
        """Return what to bring to the host for a sequence that has just come."""
        ids = sequence.request.block_ids
        if self.tiers is None or not ids:
            return None
        self._check_block_tokens(sequence)
        most = min(len(ids), (sequence.prompt_tokens - 1) // self._block_tokens)
        return self.tiers.plan(ids[self._deepest(ids, most).depth : most])

    def landed(self, sequence: Sequence, plan: LoadPlan, blocks: int) -> None:
        """Take in that the first blocks of a plan are on the host."""
        assert self.tiers is not None
        self.tiers.landed(plan, blocks)
        if sequence.prefix is None:
            sequence.prefix = HeldPrefix()
        pairs = zip(plan.block_ids[:blocks], plan.tiers, strict=False)
        sequence.prefix.prefetched.update(pairs)
