"""The prefix cache against one that keeps every page by itself, and its rules one by one."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.sim.serving.slow_cache import Ids, Member, SlowCache
from tonnage.sim.domain import BadInputError, Request
from tonnage.sim.serving.pages import PagePool
from tonnage.sim.serving.prefix_cache import CacheSpec, PrefixCache
from tonnage.sim.serving.sequence import Sequence

SGLANG = CacheSpec("lru", "computed")
SGLANG_LFU = CacheSpec("lfu", "computed")
VLLM = CacheSpec("lru", "scheduled")


def request(number: int, tokens: int, ids: Ids = (), block: int = 1) -> Request:
    return Request(number, 0.0, tokens, 99, None, None, ids, block if ids else 0)


# --- against every page by itself ---------------------------------------------------------------


@dataclass(eq=False)
class Pair:
    """The same request in both caches."""

    sequence: Sequence
    member: Member
    tokens: int  # its prompt and the tokens that it has written
    pages: int = 0
    runs: bool = False


class Both:
    """Both caches see the same requests start, go on, lose their pages, and end."""

    def __init__(self, spec: CacheSpec, pages: int, page: int, block: int) -> None:
        sglang, lfu = spec.stores == "computed", spec.eviction == "lfu"
        self.page, self.block = page, block
        self.cache = PrefixCache(pages * page, page, free_first=sglang, spec=spec)
        self.slow = SlowCache(pages, page, block, sglang=sglang, lfu=lfu)
        self.pairs: list[Pair] = []
        self.asks: set[Ids] = set()

    def do(self, what: str, ids: Ids, which: int, share: float) -> None:
        """Do one thing, if there is anybody to do it to."""
        if what == "comes":  # a prompt of these blocks and tokens that nobody knows
            self._come(ids, len(ids) * self.block + 1 + which % 5)
        elif what == "comes with its answer":  # its last blocks are of the answer
            self._come(ids, max(len(ids) * self.block - which % 5, 1))
        elif what == "returns":
            waiting = [pair for pair in self.pairs if pair.member.name in self.slow.kept]
            if waiting:
                self._return(waiting[which % len(waiting)], goes=share == 0.0)
        else:
            running = [pair for pair in self.pairs if pair.runs]
            if running:
                self._go_on(running[which % len(running)], what, share)
        self.check()

    def _come(self, ids: Ids, tokens: int) -> None:
        one = request(len(self.pairs), tokens, ids, self.block)
        self.pairs.append(Pair(Sequence(one), Member(str(one.id), ids), tokens))
        self.asks.add(ids)
        self._admit(self.pairs[-1])

    def _admit(self, pair: Pair) -> None:
        sequence = pair.sequence
        sequence.prompt_tokens = pair.tokens
        needed = self.cache.pages_for(pair.tokens)
        found = self.cache.find(sequence)
        fits = needed - found.held_pages <= self.cache.free_pages
        in_place = self.slow.start(pair.member, pair.tokens, needed)
        assert fits is (in_place is not None)
        if not fits:
            return
        assert self.cache.claim(sequence, found) == found.pages == in_place
        assert self.cache.allocate(needed - found.pages)
        pair.pages, pair.runs = needed, True

    def _return(self, pair: Pair, *, goes: bool) -> None:
        """It starts again with all that it had, or its client has gone."""
        if goes:
            self.cache.abandon(pair.sequence)
            self.slow.abandon(pair.member)
        else:
            self._admit(pair)

    def _go_on(self, pair: Pair, what: str, share: float) -> None:
        tokens = int(share * pair.tokens)
        if what == "computes":
            self.cache.store(pair.sequence, tokens)
            self.slow.store(pair.member, tokens)
        elif what == "writes":
            self._write(pair)
        else:
            comes_back = what == "loses its pages"
            self.cache.give_back(pair.sequence, pair.pages, tokens, comes_back=comes_back)
            self.slow.end(pair.member, tokens, comes_back=comes_back)
            pair.runs = False

    def _write(self, pair: Pair) -> None:
        """Give it a token more, and a page for it if the last one is full."""
        if pair.tokens % self.page == 0:
            grows = self.slow.grow(pair.member)
            assert self.cache.allocate(1) is grows
            if not grows:
                return
            pair.pages += 1
        pair.tokens += 1

    def check(self) -> None:
        """Compare what is there, and count all pages."""
        cache, slow = self.cache, self.slow
        assert cache.free_pages == len(slow.free)
        for ids in self.asks:
            assert cache.hit_blocks(ids) == len(slow.matched(ids, 10**9))
        held = sum(block.pages for block in cache._blocks.values() if block.locks)
        alone = 0
        for pair in self.pairs:
            kept = slow.kept.get(pair.member.name, (0, []))[1]
            assert cache.reusable_pages(pair.sequence.request.id) == len(kept)
            if pair.runs:
                prefix = pair.sequence.prefix
                alone += pair.pages - (0 if prefix is None else prefix.pages)
        assert held + alone + cache.free_pages == cache.capacity_pages


DOINGS = (
    *["comes"] * 2,
    "comes with its answer",
    "computes",
    "writes",
    "ends",
    "loses its pages",
    "returns",
)


def contents(rng: Random) -> Ids:
    """Draw the ids of a prompt that is likely to begin as others do; an id stands for its path."""
    path: Ids = ()
    for _ in range(rng.randrange(5)):
        path = (*path, 2 * (path[-1] if path else 1) + (rng.random() < 0.25))
    return path


@pytest.mark.parametrize("spec", [SGLANG, SGLANG_LFU, VLLM], ids=["sglang", "lfu", "vllm"])
@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    doings=st.integers(1, 120),
    pages=st.integers(6, 18),
    sizes=st.sampled_from([(1, 2), (2, 4), (3, 3), (2, 5), (1, 1), (4, 6)]),
)
def test_it_is_one_that_keeps_every_page(
    spec: CacheSpec, seed: int, doings: int, pages: int, sizes: tuple[int, int]
) -> None:
    """What is done is drawn from the seed: hypothesis alone would draw most of the time."""
    both, rng = Both(spec, pages, *sizes), Random(seed)
    for _ in range(doings):
        share = rng.choice([1.0, 0.8, 0.6, 0.4, 0.0])
        both.do(rng.choice(DOINGS), contents(rng), rng.randrange(10), share)
    event(f"hits: {sum(pair.sequence.cached_tokens > 0 for pair in both.pairs) // 5 * 5}")
