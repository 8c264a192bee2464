"""Inputs and reference of the page-tag check; whole numbers, so equality is asked for."""

from __future__ import annotations

import torch

from tonnage.kernels.paged_inputs import UNUSED_PAGE, generator_of
from tonnage.kernels.spec import Axes, Inputs, Outputs


def make_inputs(axes: Axes, seed: int, device: str) -> Inputs:
    """Return clean tables, of which every third request is made wrong in one of four ways.

    A page is reused (its live tag moved on), the table is stale (another page than the ledger's),
    it points outside the cache, or the page is another request's with that one's valid tag.
    """
    random = generator_of(seed, device)
    inputs = clean_inputs(axes["requests"], axes["pages"], axes["ragged"], random)
    for request in range(1, axes["requests"], 3):
        count = int(inputs["page_counts"][request])
        if count:
            at = int(torch.randint(count, (1,), generator=random, device=device))
            spoil(inputs, request, at, request // 3 % 4)
    return inputs


def clean_inputs(requests: int, pages: int, ragged: int, random: torch.Generator) -> Inputs:
    """Return tables `[requests, width]`, live tags and ledgers without a mismatch."""
    device = random.device
    counts = torch.full((requests,), pages, device=device)
    if ragged:
        counts = torch.randint(0, pages + 1, (requests,), generator=random, device=device)
        counts[0] = pages
    total = int(counts.sum()) + 2
    order = torch.randperm(total, generator=random, device=device).int()
    tags = torch.randint(1, 1 << 31, (total,), generator=random, device=device).int()
    table = torch.full((requests, pages), UNUSED_PAGE, device=device).int()
    owned = torch.arange(pages, device=device) < counts[:, None]
    table[owned] = order[: int(counts.sum())]
    ledger_tags = torch.full_like(table, 7)
    ledger_tags[owned] = tags[table[owned].long()]
    return {
        "page_table": table,
        "page_counts": counts.int(),
        "live_tags": tags,
        "ledger_pages": table.clone(),
        "ledger_tags": ledger_tags,
    }


def spoil(inputs: Inputs, request: int, at: int, kind: int) -> None:
    """Make one entry wrong; the ledger is touched by none of the four kinds."""
    table, tags = inputs["page_table"], inputs["live_tags"]
    page = int(table[request, at])
    if kind == 0:
        tags[page] ^= 1
    elif kind == 1:
        table[request, at] = (page + 1) % len(tags)
    elif kind == 2:
        table[request, at] = len(tags) if at % 2 else -1
    else:
        other = int(table[0, 0]) if request else (page + 1) % len(tags)
        table[request, at] = other
        tags[other] = tags[page]


def reference(inputs: Inputs) -> Outputs:
    """Compare entry by entry."""
    table, tags = inputs["page_table"], inputs["live_tags"]
    width = table.shape[1]
    position = torch.arange(width, device=table.device)
    exists = (table >= 0) & (table < len(tags))
    live = tags[torch.where(exists, table, 0).long()]
    right = exists & (table == inputs["ledger_pages"]) & (live == inputs["ledger_tags"])
    bad = ~right & (position < inputs["page_counts"][:, None])
    first = torch.where(bad, position, width).amin(1) if width else bad.sum(1)
    return {"mismatches": bad.sum(1).int(), "first_bad": first.int()}
