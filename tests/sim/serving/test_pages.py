"""The page pool against a ledger of who holds what, and against one that keeps every page."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.sim.serving.page_model import PageByPage
from tonnage.sim.serving.pages import PagePool


@given(
    capacity=st.integers(0, 500),
    page=st.sampled_from([1, 16, 64]),
    asks=st.lists(st.tuples(st.booleans(), st.integers(0, 200))),
)
def test_held_and_free_pages_add_up(capacity: int, page: int, asks: list[tuple[bool, int]]) -> None:
    pool = PagePool(capacity, page)
    held: list[int] = []
    for takes, tokens in asks:
        if takes or not held:
            pages = pool.pages_for(tokens)
            fits = sum(held) + pages <= capacity // page
            assert pool.allocate(pages) is fits
            if fits:
                held.append(pages)
        else:
            pool.release(held.pop())
        assert pool.used_pages == sum(held)
        assert pool.free_pages + pool.used_pages == pool.capacity_pages


def test_a_page_cannot_be_given_back_twice() -> None:
    pool = PagePool(10, 1)
    assert pool.allocate(3)
    pool.release(3)
    with pytest.raises(ValueError, match="1 pages released, but only 0"):
        pool.release(1)


def test_what_every_request_takes_counts_as_tokens() -> None:
    pool = PagePool(100, 10, extra_tokens=15)
    assert pool.pages_for(5) == 2
    assert not pool.could_ever_hold(90)


# --- pages that can be taken back ---------------------------------------------------------------


def retained_after_two(free_first: bool) -> PagePool:
    """Ten pages: three stay held, two are free, then 7 leaves three and 8 leaves two."""
    pool = PagePool(10, 1, free_first=free_first)
    assert pool.allocate(8)
    pool.retain(7, 3)
    pool.retain(8, 2)
    return pool


@pytest.mark.parametrize(
    ("free_first", "taken", "left_of_7", "left_of_8"),
    [
        (False, 2, 3, 2),  # those that were free already
        (False, 4, 1, 2),  # then 7's, which left first, its last pages first
        (False, 6, 0, 1),
        (True, 6, 0, 1),  # the same: nobody else has given any back
    ],
)
def test_pages_are_given_away_in_the_order_they_came_back(
    free_first: bool, taken: int, left_of_7: int, left_of_8: int
) -> None:
    pool = retained_after_two(free_first)
    assert pool.allocate(taken)
    assert (pool.reusable_pages(7), pool.reusable_pages(8)) == (left_of_7, left_of_8)


@pytest.mark.parametrize(("free_first", "left_of_7"), [(False, 1), (True, 3)])
def test_cached_pages_can_be_spared_for_others(free_first: bool, left_of_7: int) -> None:
    """Three more pages come back last; SGLang takes them before it evicts, vLLM takes its turns."""
    pool = retained_after_two(free_first)
    pool.release(3)
    assert pool.allocate(4)
    assert pool.reusable_pages(7) == left_of_7


def test_a_request_takes_back_what_is_left_once() -> None:
    pool = retained_after_two(False)
    assert pool.allocate(3)
    assert pool.reclaim(7) == 2
    assert pool.reclaim(7) == 0
    assert pool.free_pages == 2  # 8's
    assert pool.reusable_pages(8) == 2


def test_forgotten_pages_are_nobodys_and_keep_their_turn() -> None:
    pool = retained_after_two(False)
    pool.forget(7)
    assert pool.reclaim(7) == 0
    assert pool.allocate(5)
    assert pool.reusable_pages(8) == 2


class PoolMachine(RuleBasedStateMachine):
    """The pool and one that keeps every page see the same requests come and go."""

    @initialize(capacity=st.integers(1, 30), free_first=st.booleans())
    def start(self, capacity: int, free_first: bool) -> None:
        self.pool = PagePool(capacity, 1, free_first=free_first)
        self.model = PageByPage(capacity, 1, free_first=free_first)
        self.held: list[int] = []
        self.owners: set[int] = set()
        self.next_owner = 0

    @rule(pages=st.integers(0, 12))
    def take(self, pages: int) -> None:
        taken = self.pool.allocate(pages)
        assert taken is self.model.allocate(pages)
        if taken:
            self.held.append(pages)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99), kept=st.integers(0, 12))
    def give_back(self, which: int, kept: int) -> None:
        """As a request does that is retracted: the rest first, then what can be used again."""
        pages = self.held.pop(which % len(self.held))
        kept = min(kept, pages)
        for pool in (self.pool, self.model):
            pool.release(pages - kept)
            pool.retain(self.next_owner, kept)
        self.owners.add(self.next_owner)
        self.next_owner += 1

    @precondition(lambda self: self.owners)
    @rule(which=st.integers(0, 99))
    def take_back(self, which: int) -> None:
        owner = sorted(self.owners)[which % len(self.owners)]
        pages = self.pool.reclaim(owner)
        assert pages == self.model.reclaim(owner)
        self.held.append(pages)
        self.owners.discard(owner)

    @precondition(lambda self: self.owners)
    @rule(which=st.integers(0, 99))
    def forget(self, which: int) -> None:
        owner = sorted(self.owners)[which % len(self.owners)]
        self.pool.forget(owner)
        self.model.forget(owner)

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert self.pool.used_pages == sum(self.held) == self.model.used_pages
        assert 0 <= self.pool.free_pages == self.pool.capacity_pages - self.pool.used_pages
        assert self.pool.peak_used_pages == self.model.peak_used_pages
        assert self.pool.times_given_back == self.model.times_given_back
        for owner in self.owners:
            assert self.pool.reusable_pages(owner) == self.model.reusable_pages(owner)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolPageByPage = PoolMachine.TestCase
