"""The prefix cache against one that keeps every page by itself, and its rules one by one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.sim.serving.slow_cache import Ids, Member, SlowCache
from tonnage.sim.domain import BadInputError, Request
from tonnage.sim.serving.pages import PagePool
from tonnage.sim.serving.prefix_cache import CacheSpec, PrefixCache
from tonnage.sim.serving.sequence import Sequence
from tonnage.sim.traffic.spec import TraceSource
from tonnage.sim.traffic.traces import read_trace

MOONCAKE = Path(__file__).parents[3] / "scenarios/traces/mooncake_conversation.jsonl.gz"
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
        assert self.cache.claim(sequence, found) == found.pages + found.loaded_pages == in_place
        assert self.cache.allocate(needed - in_place)
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
@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    doings=st.integers(30, 150),
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


# --- without ids --------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    doings=st.integers(1, 80),
    capacity=st.integers(1, 30),
    free_first=st.booleans(),
)
def test_without_ids_it_is_the_plain_pool(
    seed: int, doings: int, capacity: int, free_first: bool
) -> None:
    rng = Random(seed)
    plain = PagePool(capacity, 1, free_first=free_first)
    cache = PrefixCache(capacity, 1, free_first=free_first)
    held: list[tuple[Sequence, int]] = []
    gone: list[Sequence] = []
    for number in range(doings):
        if held and rng.random() < 0.5:
            sequence, pages = held.pop(rng.randrange(len(held)))
            kept, comes_back = rng.randrange(pages + 2), rng.random() < 0.6
            for pool in (plain, cache):
                pool.give_back(sequence, pages, kept, comes_back=comes_back)
            gone.append(sequence)
        elif gone and rng.random() < 0.5:
            sequence = gone.pop(rng.randrange(len(gone)))
            found = plain.find(sequence)
            assert cache.find(sequence) == found
            if rng.random() < 0.3:
                plain.abandon(sequence)
                cache.abandon(sequence)
            else:
                assert plain.claim(sequence, found) == cache.claim(sequence, found)
                held.append((sequence, found.pages))
        else:
            pages = rng.randrange(12)
            taken = plain.allocate(pages)
            assert cache.allocate(pages) is taken
            if taken:
                held.append((Sequence(request(number, 9)), pages))
        for sequence in gone:
            owner = sequence.request.id
            assert plain.reusable_pages(owner) == cache.reusable_pages(owner)
        assert (plain.free_pages, plain.peak_used_pages) == (
            cache.free_pages,
            cache.peak_used_pages,
        )


# --- rules --------------------------------------------------------------------------------------


class Requests:
    """Requests through one cache: blocks of four tokens unless a test says otherwise."""

    def __init__(self, cache: PrefixCache, block: int = 4) -> None:
        self.cache, self.block = cache, block
        self.sent = 0
        self.pages: dict[Sequence, int] = {}

    def start(self, tokens: int, ids: Ids) -> Sequence:
        """Give a prompt its pages, and have it computed."""
        sequence = Sequence(request(self.sent, tokens, ids, self.block))
        self.sent += 1
        needed = self.cache.pages_for(tokens)
        in_place = self.cache.claim(sequence, self.cache.find(sequence))
        assert self.cache.allocate(needed - in_place)
        self.pages[sequence] = needed
        return sequence

    def compute(self, sequence: Sequence) -> None:
        self.cache.store(sequence, sequence.request.input_tokens)

    def end(self, sequence: Sequence) -> None:
        tokens = sequence.request.input_tokens
        self.cache.give_back(sequence, self.pages.pop(sequence), tokens)

    def run(self, tokens: int, ids: Ids) -> int:
        """Run a request on its own; return its cached tokens."""
        sequence = self.start(tokens, ids)
        self.compute(sequence)
        self.end(sequence)
        return sequence.cached_tokens


def requests_of(pages: int, page: int = 1, spec: CacheSpec = SGLANG, block: int = 4) -> Requests:
    free_first = spec.stores == "computed"
    return Requests(PrefixCache(pages * page, page, free_first=free_first, spec=spec), block)


@pytest.mark.parametrize(
    ("page", "block", "tokens", "cached"),
    [
        (1, 4, 13, 12),
        (1, 4, 12, 8),  # one token at least is computed, and blocks are hit whole
        (4, 4, 11, 8),
        (3, 4, 13, 12),
        (3, 4, 10, 6),  # two blocks are 8 tokens, two pages are 6
        (8, 4, 13, 8),
        (16, 4, 13, 0),  # no page is full of known content
    ],
)
def test_a_hit_is_whole_pages_of_whole_blocks(
    page: int, block: int, tokens: int, cached: int
) -> None:
    requests = requests_of(40, page, block=block)
    assert requests.run(20, (1, 2, 3, 4, 5)) == 0
    assert requests.run(tokens, (1, 2, 3)[: tokens // block]) == cached


def test_what_is_being_computed_is_no_hit() -> None:
    requests = requests_of(40)
    one, two = requests.start(9, (1, 2)), requests.start(9, (1, 2))
    requests.compute(one)
    three = requests.start(9, (1, 2))
    assert [one.cached_tokens, two.cached_tokens, three.cached_tokens] == [0, 0, 8]


@pytest.mark.parametrize(("spec", "used"), [(SGLANG, 10), (VLLM, 18)])
def test_who_computed_the_same_shares_its_pages_or_keeps_them(spec: CacheSpec, used: int) -> None:
    """Two prompts of nine tokens, eight of them the same."""
    requests = requests_of(40, spec=spec)
    one, two = requests.start(9, (1, 2)), requests.start(9, (1, 2))
    requests.compute(one)
    requests.compute(two)
    assert requests.cache.used_pages == used
    requests.end(one)
    assert requests.cache.used_pages == used - 1
    requests.end(two)
    assert requests.cache.used_pages == 0


def test_running_requests_hold_what_they_share_once() -> None:
    requests = requests_of(40)
    one = requests.start(9, (1, 2))
    requests.compute(one)
    two = requests.start(9, (1, 2))
    assert requests.cache.used_pages == 8 + 1 + 1
    requests.end(one)
    assert requests.cache.used_pages == 8 + 1
    assert requests.cache.allocate(31)  # and what it holds is not evicted
    assert requests.cache.hit_blocks((1, 2)) == 2
    requests.end(two)
    assert requests.cache.allocate(9)
    assert requests.cache.hit_blocks((1, 2)) == 0


@pytest.mark.parametrize(("spec", "left"), [(SGLANG, (1, 2)), (VLLM, (0, 2))])
def test_pages_go_in_the_order_of_the_engine(spec: CacheSpec, left: tuple[int, int]) -> None:
    """Twenty pages: A leaves 8, then B 8; then the other four come back, and hold nothing.

    Eight are asked for: SGLang takes those four and A's last block, vLLM both blocks of A.
    """
    requests = requests_of(20, spec=spec)
    assert requests.run(8, (1, 2)) == 0
    assert requests.run(8, (3, 4)) == 0
    assert requests.cache.allocate(4)
    requests.cache.release(4)
    assert requests.cache.allocate(8)
    assert (requests.cache.hit_blocks((1, 2)), requests.cache.hit_blocks((3, 4))) == left


@pytest.mark.parametrize(("eviction", "left"), [("lru", 0), ("lfu", 2)])
def test_what_most_requests_used_goes_last_by_lfu(eviction: str, left: int) -> None:
    """A's blocks were used by three requests, B's by one, but later."""
    spec = CacheSpec("lru" if eviction == "lru" else "lfu", "computed")
    requests = requests_of(18, spec=spec)
    for _ in range(3):
        requests.run(9, (1, 2))
    requests.run(9, (3, 4))
    assert requests.cache.allocate(8)
    assert requests.cache.hit_blocks((1, 2)) == left


def test_a_block_computed_twice_counts_as_used_twice() -> None:
    requests = requests_of(18, spec=SGLANG_LFU)
    both = [requests.start(5, (1,)), requests.start(5, (1,))]
    for one in both:
        requests.compute(one)
        requests.end(one)
    requests.run(5, (2,))
    assert requests.cache.allocate(14)
    assert requests.cache.hit_blocks((1,)) == 1


def test_the_end_of_a_prompt_goes_before_its_beginning() -> None:
    requests = requests_of(12)
    requests.run(12, (1, 2, 3))
    for left in (2, 1, 0):
        assert requests.cache.allocate(4)
        assert requests.cache.hit_blocks((1, 2, 3)) == left


def test_an_answer_of_known_content_is_a_hit_too() -> None:
    requests = requests_of(40)
    one = requests.start(6, (1, 2, 3))
    requests.compute(one)
    assert requests.cache.hit_blocks((1, 2, 3)) == 1
    assert requests.cache.allocate(6)  # for six tokens of its answer
    requests.cache.give_back(one, 12, 11)
    assert requests.cache.hit_blocks((1, 2, 3)) == 2


def test_blocks_of_two_sizes_are_refused() -> None:
    requests = requests_of(40)
    requests.run(9, (1, 2))
    requests.block = 2
    with pytest.raises(BadInputError, match="request 1: blocks of 2 tokens after some of 4"):
        requests.run(9, (1, 2))


def test_an_id_that_does_not_stand_for_all_before_it_is_refused() -> None:
    requests = requests_of(40)
    requests.run(9, (1, 2))
    with pytest.raises(BadInputError, match="request 1: block 2 follows block 3, and before it "):
        requests.run(9, (3, 2))
    requests.run(13, (1, 2, 5))
    computed = requests.start(9, (4, 5))
    with pytest.raises(BadInputError, match="request 3: block 5 follows block 4, and before it "):
        requests.compute(computed)


# --- a recorded load ----------------------------------------------------------------------------


def hit_rate(tokens: int, page: int, requests: list[Request], spec: CacheSpec) -> float:
    """Return the share of prompt tokens that were cached, one request after the other."""
    one = requests_of(tokens // page, page, spec, block=512)
    cached = sum(one.run(each.input_tokens, each.block_ids) for each in requests)
    return cached / sum(each.input_tokens for each in requests)


@pytest.mark.parametrize("spec", [SGLANG, VLLM], ids=["sglang", "vllm"])
def test_the_hit_rate_grows_with_the_capacity(spec: CacheSpec) -> None:
    """A larger LRU cache holds all that a smaller one does; the first requests of a trace."""
    requests = list(read_trace(TraceSource(MOONCAKE, "mooncake", 1.0, 1000)))
    longest = max(each.input_tokens for each in requests)
    capacities = [longest + 16, *(longest + 2**n * 10**5 for n in range(6)), 10**9]
    rates = [hit_rate(tokens, 16, requests, spec) for tokens in capacities]
    assert rates == sorted(rates)
    assert rates[0] < 0.6 * rates[-1]
    assert rates[-1] == infinite_hit_rate(requests)


def infinite_hit_rate(requests: list[Request]) -> float:
    """Return the share of prompt tokens in full blocks that came before, one left to compute."""
    seen: set[int] = set()
    cached = 0
    for each in requests:
        known = 0
        while known < (each.input_tokens - 1) // 512 and each.block_ids[known] in seen:
            known += 1
        cached += 512 * known
        seen.update(each.block_ids[: each.input_tokens // 512])
    return cached / sum(each.input_tokens for each in requests)
