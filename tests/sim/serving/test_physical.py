"""Pages with an identity: who is given which, and what a page in the queue twice does."""

from __future__ import annotations

import pytest

from tests.sim.serving.page_audit import audit
from tonnage.sim.domain import IntegritySpec, Request
from tonnage.sim.serving.identified import IdentifiedPool
from tonnage.sim.serving.physical import Injection, PhysicalPages, key_of, next_tag
from tonnage.sim.serving.sequence import Sequence


def pool_of(pages: int, tracker: str = "batched") -> IdentifiedPool:
    return IdentifiedPool(pages, 1, integrity=IntegritySpec(tracker))


def given(pool: IdentifiedPool, pages: int, number: int) -> Sequence:
    """Let a request have some pages of a pool."""
    sequence = Sequence(Request(number, 0.0, pages, 2))
    assert pool.allocate(pages)
    pool.watch.pages.assign(pool.watch.pages.hold(sequence), pages)
    return sequence


def ledger(pool: IdentifiedPool, sequence: Sequence) -> list[tuple[int, int]]:
    return [tuple(entry) for entry in pool.watch.pages.held[sequence.request.id].ledger]


def test_pages_freed_first_are_given_first_each_in_a_new_generation() -> None:
    pool = pool_of(3)
    first = given(pool, 2, 0)
    assert ledger(pool, first) == [(0, 1), (1, 1)]
    pool.give_back(first, 2)
    second = given(pool, 3, 1)
    assert ledger(pool, second) == [(2, 1), (1, 2), (0, 2)]
    audit(pool)


def test_pages_kept_for_a_request_come_back_in_their_generation() -> None:
    pool = pool_of(4)
    first = given(pool, 3, 0)
    pool.give_back(first, 3, kept_tokens=2, comes_back=True)
    other = given(pool, 2, 1)  # the page that was not kept, and one that was: the last first
    assert ledger(pool, other) == [(3, 1), (2, 2)]
    audit(pool)
    assert pool.claim(first, pool.find(first)) == 2
    assert ledger(pool, first) == [(0, 1), (1, 1)]
    audit(pool)


@pytest.mark.parametrize("tracker", ["none", "batched"])
def test_a_page_given_twice_is_mended_by_the_tags_alone(tracker: str) -> None:
    """The older holder does not free what is another's; without tags it does, again and again."""
    pool, cause = pool_of(3, tracker), Injection("early_reuse")
    older = given(pool, 2, 0)
    pool.watch.pages.enter_again(1, cause)
    newer = given(pool, 1, 1)
    assert ledger(pool, newer) == [(2, 1)]
    pool.watch.pages.take(1)
    pool.watch.pages.unassigned.clear()  # somebody has page 1 now
    held = pool.watch.pages.held[older.request.id]
    assert pool.watch.pages.mismatches(held, range(2)) == [1]
    pool.give_back(older, 2)
    assert pool.watch.pages.doubled == (tracker == "none")
    assert list(pool.watch.pages.queue) == ([0] if tracker == "batched" else [1, 0])


def test_a_double_free_gives_a_page_to_two_and_the_older_one_mismatches() -> None:
    pool = pool_of(3)
    pool.watch.pages.to_free_twice.append(Injection("double_free"))
    pool.give_back(given(pool, 1, 0), 1)
    assert list(pool.watch.pages.queue) == [1, 2, 0, 0]
    audit(pool)
    older = given(pool, 3, 1)
    assert ledger(pool, older) == [(1, 1), (2, 1), (0, 2)]
    pages = pool.watch.pages
    pages.take(1)  # what the count of free pages does not know
    newer = Sequence(Request(2, 0.0, 1, 2))
    pages.assign(pages.hold(newer), 1)
    assert pages.suspects == {1}
    assert pages.mismatches(pages.held[1], range(3)) == [2]
    assert pages.mismatches(pages.held[2], range(1)) == []
    pool.give_back(older, 3)
    assert (list(pages.queue), pages.doubled) == ([2, 1], 0)


def test_an_idle_pool_drops_what_is_twice_in_its_queue() -> None:
    pool = pool_of(4, "none")
    pool.watch.pages.to_free_twice.append(Injection("double_free"))
    pool.give_back(given(pool, 2, 0), 2)
    audit(pool)
    pool.look_through()
    assert sorted(pool.watch.pages.queue) == [0, 1, 2, 3]
    assert (pool.watch.pages.doubled, pool.watch.books.doubles_mended) == (0, 1)
    audit(pool)


def test_tags_come_round_after_all_of_them() -> None:
    pages = PhysicalPages(1, checks_frees=True)
    pages.tags[0] = 2**32 - 1
    pages.take(1)
    assert pages.tags == [0]
    assert next_tag(0) == 1


def test_what_is_known_to_be_the_same_is_the_same_for_all() -> None:
    """Blocks of 6 tokens on pages of 4: a page is known by the block in which it ends."""
    one = Request(1, 0.0, 14, 4, block_ids=(7, 8), block_tokens=6)
    other = Request(2, 0.0, 20, 4, block_ids=(7, 8, 9), block_tokens=6)
    assert [key_of(one, position, 4) for position in range(4)] == [
        (1, 7, 0),
        (1, 8, 1),
        (1, 8, 2),
        (0, 1, 3),
    ]
    assert [key_of(other, position, 4)[1] for position in range(5)] == [7, 8, 8, 9, 2]
