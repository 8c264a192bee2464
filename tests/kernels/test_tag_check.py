"""The tag check finds the one wrong page, wherever it is, and accuses no other."""

from __future__ import annotations

import pytest
import torch

from tonnage.kernels.ops.tag_check import ENTRIES, SINGLE_PAGES, tag_check
from tonnage.kernels.ops.tag_check_reference import clean_inputs, spoil
from tonnage.kernels.spec import Inputs

# Tables of a width, and how many: 100,000 in all. The interpreter pays per program, so most are
# checked with more rows a program than a GPU would take; the decision of a row is the same.
MANY_ROWS = 1 << 18
BULK = (
    *((width, 10_000) for width in (1, 2, 5, 16, 17, 32)),
    *((width, 6_000) for width in (33, 64, 65, 127, 128, 129)),
    *((width, 500) for width in (255, 256, 257, 511, 1023, 1024)),
    *((width, 80) for width in (1025, 4095, 4096)),
)
SHIPPED = (*((width, 200) for width in (1, 17, 64, 65, 129)), (1025, 20), (4097, 10), (9001, 3))
UNIFORM_TAGS = 5  # every page has this tag: only the page numbers can tell


def random_of(width: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + width)


def spoil_one_each(inputs: Inputs, random: torch.Generator) -> torch.Tensor:
    """Make one entry of every table wrong in one of three ways; return its position.

    The tag of its page moves on, the table names the next page, or one that does not exist. An
    empty table keeps its width as position.
    """
    table, tags, counts = inputs["page_table"], inputs["live_tags"], inputs["page_counts"]
    requests, width = table.shape
    at = (torch.rand(requests, generator=random, dtype=torch.float64) * counts).long()
    kind = torch.randint(0, 3, (requests,), generator=random)
    rows = torch.arange(requests)[counts > 0]
    bumped = rows[kind[rows] == 0]
    tags[table[bumped, at[bumped]].long()] += 1
    stale = rows[kind[rows] == 1]
    table[stale, at[stale]] = (table[stale, at[stale]] + 1) % len(tags)
    outside = rows[kind[rows] == 2]
    beyond = torch.where(outside % 2 == 0, -1, len(tags))
    table[outside, at[outside]] = beyond.int()
    return torch.where(counts > 0, at, width)


def check_case(width: int, requests: int, entries: int) -> int:
    """Check clean tables, then the same with one mismatch each; return how many had one."""
    random = random_of(width)
    inputs = clean_inputs(requests, width, 1, random)
    if width % 2:
        inputs["live_tags"].fill_(UNIFORM_TAGS)
        inputs["ledger_tags"].fill_(UNIFORM_TAGS)
    mismatches, first_bad = tag_check(inputs, entries)
    assert not mismatches.any(), f"a clean table of width {width} is accused"
    assert bool((first_bad == width).all())
    ledger = [inputs[name].clone() for name in ("ledger_pages", "ledger_tags")]
    at = spoil_one_each(inputs, random)
    assert torch.equal(inputs["ledger_pages"], ledger[0])
    assert torch.equal(inputs["ledger_tags"], ledger[1])
    mismatches, first_bad = tag_check(inputs, entries)
    holds = inputs["page_counts"] > 0
    assert torch.equal(mismatches, holds.int()), f"width {width}"
    assert torch.equal(first_bad.long(), at), f"width {width}"
    return int(holds.sum())


def test_one_mismatch_is_found_in_each_of_100_000_tables() -> None:
    assert sum(requests for _, requests in (*BULK, *SHIPPED)) >= 100_000
    found = sum(check_case(width, requests, MANY_ROWS) for width, requests in BULK)
    assert found > 80_000  # the rest were empty


@pytest.mark.parametrize(("width", "requests"), SHIPPED)
def test_as_shipped(width: int, requests: int) -> None:
    assert check_case(width, requests, ENTRIES) > 0


def test_a_stale_table_is_seen_though_the_ledger_is_intact() -> None:
    # The page was given to another request, whose tag is live; the ledger has the request's own
    # new page, so that comparing the ledger with itself or with live tags finds nothing.
    inputs = clean_inputs(2, 4, 0, random_of(4))
    live = inputs["live_tags"]
    assert torch.equal(live[inputs["ledger_pages"].long()], inputs["ledger_tags"])
    inputs["page_table"][1, 2] = inputs["page_table"][0, 0]
    assert torch.equal(live[inputs["ledger_pages"].long()], inputs["ledger_tags"])
    mismatches, first_bad = tag_check(inputs)
    assert mismatches.tolist() == [0, 1]
    assert first_bad.tolist() == [4, 2]


def test_a_recycled_row_is_seen_whole() -> None:
    inputs = clean_inputs(3, 5, 0, random_of(5))
    inputs["page_table"][2] = inputs["page_table"][1]
    mismatches, first_bad = tag_check(inputs)
    assert mismatches.tolist() == [0, 0, 5]
    assert first_bad.tolist() == [5, 5, 0]


@pytest.mark.parametrize("page", [-1, 6, 2**31 - 1])
def test_a_page_that_does_not_exist_is_wrong_whatever_the_ledger_says(page: int) -> None:
    inputs = clean_inputs(1, 4, 0, random_of(4))
    assert len(inputs["live_tags"]) == 6
    for name in ("page_table", "ledger_pages"):
        inputs[name][0, 3] = page
    inputs["ledger_tags"][0, 3] = 0
    assert [part.tolist() for part in tag_check(inputs)] == [[1], [3]]


def test_entries_beyond_the_count_are_not_looked_at() -> None:
    inputs = clean_inputs(1, 8, 0, random_of(8))
    spoil(inputs, request=0, at=5, kind=0)
    inputs["page_counts"][0] = 5
    assert tag_check(inputs)[0].tolist() == [0]
    inputs["page_counts"][0] = 6
    assert [part.tolist() for part in tag_check(inputs)] == [[1], [5]]


@pytest.mark.parametrize("width", [SINGLE_PAGES, SINGLE_PAGES + 1])
def test_many_mismatches_are_counted_across_programs(width: int) -> None:
    inputs = clean_inputs(1, width, 0, random_of(width))
    places = [1, 1023, 1024, width - 1]
    for at in places:
        spoil(inputs, 0, at, kind=0)
    assert [part.tolist() for part in tag_check(inputs)] == [[len(places)], [1]]
