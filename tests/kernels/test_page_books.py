"""Any requests and any faults on real pages: none leaked, none owned twice, every theft seen."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.kernels.execute.guard import Books, audit
from tonnage.kernels.execute.pages import HeldPages, OutOfPagesError, PagedMemory, PageShape
from tonnage.kernels.execute.place import Place, place_on
from tonnage.kernels.execute.plan import RowShape

PAGES, ROWS = 10, 4
SHAPE = PageShape((RowShape(1, 64),), "bf16", PAGES, 4, ROWS, 32)
PLACE = place_on("cpu")

DEEDS = ("open", "extend", "close", "abort", "close twice", "free early", "free again", "recycle")
steps = st.lists(
    st.tuples(st.sampled_from(DEEDS), st.integers(0, 9), st.integers(1, 14)),
    min_size=12,
    max_size=40,
)


def memory_on(place: Place) -> PagedMemory:
    place.random.manual_seed(0)
    return PagedMemory(SHAPE, place)


def do(memory: PagedMemory, running: list[HeldPages], deed: str, which: int, tokens: int) -> None:
    """Do one deed, sound or faulty, where there is somebody to do it to."""
    try:
        if deed == "open":
            running.append(memory.open(tokens))
        elif deed == "free again":
            memory.free_unchecked([which % PAGES])  # whoever holds it, or nobody
        elif running:
            one = running[which % len(running)]
            if deed == "extend":
                memory.extend(one, tokens)
            elif deed == "recycle":
                memory.recycle_row(one)
            elif deed == "free early":
                memory.free_unchecked(one.pages[:1])
            else:
                end(memory, running, one, twice=deed == "close twice")
    except OutOfPagesError:
        pass


def end(memory: PagedMemory, running: list[HeldPages], one: HeldPages, twice: bool) -> None:
    twin = HeldPages(one.row, one.ledger, one.serial, one.tokens, list(one.pages), list(one.tags))
    running.remove(one)
    before, wrong = audit(memory, running), mismatches(memory, running)
    memory.close(one)
    if twice:
        memory.close(twin)
    after = audit(memory, running)
    assert set(after.free_and_owned) <= set(before.free_and_owned), "another's page was freed"
    assert set(after.listed_twice) <= set(before.listed_twice), "a page was freed twice"
    now = zip(wrong, mismatches(memory, running), strict=True)
    assert all(count or not later for count, later in now), "a sound request was touched"


def mismatches(memory: PagedMemory, running: list[HeldPages]) -> list[int]:
    if not running:
        return []
    found: list[int] = PLACE.run("tag_check", memory.checked(running))["mismatches"].tolist()
    return found


def robbed(memory: PagedMemory, one: HeldPages) -> int:
    """Return how many entries of a request are not its own, by the books of the host."""
    row = memory.page_table[one.row, : len(one.pages)].tolist()
    given_and_read = zip(row, one.pages, one.tags, strict=True)
    return sum(page != given or memory.tag(given) != tag for page, given, tag in given_and_read)


@settings(max_examples=60, deadline=None)
@given(steps)
def test_books_stay_sound_whatever_is_freed_by_mistake(
    deeds: list[tuple[str, int, int]],
) -> None:
    memory, running = memory_on(PLACE), list[HeldPages]()
    for deed, which, tokens in deeds:
        do(memory, running, deed, which, tokens)
        books, listed = audit(memory, running), Counter(memory._free_pages)
        assert all(memory.times_listed(page) == listed[page] for page in range(PAGES))
        assert not books.lost
        assert not books.owned_twice
    assert memory.live_tags.tolist() == [memory.tag(page) for page in range(PAGES)]
    found = mismatches(memory, running)
    assert found == [robbed(memory, one) for one in running]
    abort(memory, running, found)
    assert not audit(memory, running).lost
    for one in list(running):
        end(memory, running, one, twice=False)
    heal(memory)


def abort(memory: PagedMemory, running: list[HeldPages], found: list[int]) -> None:
    """Abort who reads what is not theirs; all others keep every page they own."""
    bad = [one for one, wrong in zip(running, found, strict=True) if wrong]
    others = [one for one in running if one not in bad]
    own = [(list(one.pages), [memory.tag(page) for page in one.pages]) for one in others]
    for one in bad:
        end(memory, running, one, twice=False)
    assert own == [(one.pages, one.tags) for one in others]
    assert not any(mismatches(memory, others))


def heal(memory: PagedMemory) -> None:
    """Once all that is listed as free was given away and came back, each page is free once."""
    for _ in range(4):  # of 32 pages each: more than were ever listed
        held = []
        while memory.free_pages and len(held) < ROWS:
            held.append(memory.open(4 * min(memory.free_pages, 8)))
        for one in held:
            memory.close(one)
    assert audit(memory, []) == Books()
    assert memory.free_pages == PAGES
