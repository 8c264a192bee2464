"""The page pool against a ledger of who holds what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
