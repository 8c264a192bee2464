"""Compare the pages that attention is about to read with what each request was given.

A page is `(index, generation tag)`; the tag of a page changes whenever the page is given to
someone. Entry j of a request is wrong when its page-table row names another page than its ledger,
a page that does not exist, or one whose live tag is not the ledger's tag. The rows compared are
those on the device that attention reads, so that a stale table with an intact ledger is seen.

* page_table, ledger_pages, ledger_tags `[requests, width]` int32, page_counts `[requests]` int32:
  entries at and beyond a request's count are not looked at. A width that is a multiple of 16 is
  read 128 bits at a time.
* live_tags `[pages]` int32.
* mismatches `[requests]` int32: wrong entries. first_bad `[requests]` int32: position of the
  first, `width` where there is none.

16 bytes are read per entry, of which the tag is a gather. One launch while a table is at most
`SINGLE_PAGES` wide; beyond, programs share a request, and sum and minimum are atomic. Run it on
the stream that runs attention, and bump tags on that stream, or a page given away between the two
is missed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tonnage.kernels.ops.launch import launch
from tonnage.kernels.spec import Inputs, LaunchConfig, Outputs

ENTRIES = 1024  # compared by one program at a time
SINGLE_PAGES = 4096


@triton.jit
def tag_check_kernel(
    page_table,
    page_counts,
    live_tags,
    ledger_pages,
    ledger_tags,
    mismatches,
    first_bad,
    requests,
    width,
    page_total,
    SINGLE: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Check one chunk of the tables (axis 1) of some requests (axis 0)."""
    request = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = request < requests
    count = tl.load(page_counts + request, mask=exists, other=0)
    first_entry = tl.program_id(1) * CHUNK
    last_entry = tl.minimum(first_entry + CHUNK, tl.max(count, axis=0))
    row = request.to(tl.int64)[:, None] * width
    wrong = tl.zeros([ROWS], dtype=tl.int32)
    first = tl.zeros([ROWS], dtype=tl.int32) + width
    for start in range(first_entry, last_entry, BLOCK):
        entry = start + tl.arange(0, BLOCK)[None, :]
        looked_at = entry < count[:, None]
        # loaded up to the table's width, whose alignment is known: 128 bits at a time
        inside = exists[:, None] & (entry < width)
        at = row + entry
        page = tl.load(page_table + at, mask=inside, other=0)
        given = tl.load(ledger_pages + at, mask=inside, other=0)
        tag = tl.load(ledger_tags + at, mask=inside, other=0)
        known = (page >= 0) & (page < page_total)
        live = tl.load(live_tags + page, mask=looked_at & known, other=0)
        bad = looked_at & ((page != given) | (live != tag) | (known == 0))
        wrong += tl.sum(bad.to(tl.int32), axis=1)
        first = tl.minimum(first, tl.min(tl.where(bad, entry, width), axis=1))
    if SINGLE:
        tl.store(mismatches + request, wrong, mask=exists)
        tl.store(first_bad + request, first, mask=exists)
    else:
        found = exists & (wrong > 0)
        tl.atomic_add(mismatches + request, wrong, mask=found, sem="relaxed")
        tl.atomic_min(first_bad + request, first, mask=found, sem="relaxed")


def config(width: int, entries: int = ENTRIES) -> LaunchConfig:
    """Return how tables of that width are checked: narrow ones several requests a program."""
    block = min(triton.next_power_of_2(max(width, 16)), ENTRIES)
    single = width <= SINGLE_PAGES
    tables = dict.fromkeys(
        ("page_table", "page_counts", "live_tags", "ledger_pages", "ledger_tags"), "*i32"
    )
    outputs = {"mismatches": "*i32", "first_bad": "*i32"}
    sizes = {"requests": "i32", "width": "i32", "page_total": "i32"}
    return LaunchConfig(
        kernel="tag_check_kernel",
        name=f"width up to {SINGLE_PAGES if block == ENTRIES else block}" if single else "wide",
        signature={**tables, **outputs, **sizes},
        constants={
            "SINGLE": single,
            "CHUNK": SINGLE_PAGES,
            "ROWS": entries // block,
            "BLOCK": block,
        },
        num_warps=4,
        num_stages=2,
        aligned=(*tables, *outputs, "width"),
        instruction={90: None, 100: None},
    )


CONFIGS = (config(64), config(SINGLE_PAGES), config(SINGLE_PAGES + 1))


def tag_check(inputs: Inputs, entries: int = ENTRIES) -> tuple[torch.Tensor, torch.Tensor]:
    """Return every request's number of mismatches and the position of the first."""
    requests, width = inputs["page_table"].shape
    chosen = config(width, entries)
    device = inputs["page_table"].device
    if chosen.constants["SINGLE"]:
        mismatches = torch.empty(requests, dtype=torch.int32, device=device)
        first_bad = torch.empty_like(mismatches)
    else:
        mismatches = torch.zeros(requests, dtype=torch.int32, device=device)
        first_bad = torch.full_like(mismatches, width)
    chunks = max(1, triton.cdiv(width, chosen.constants["CHUNK"]))
    launch(
        tag_check_kernel,
        (triton.cdiv(requests, chosen.constants["ROWS"]), chunks),
        chosen,
        **inputs,
        mismatches=mismatches,
        first_bad=first_bad,
        requests=requests,
        width=width,
        page_total=len(inputs["live_tags"]),
    )
    return mismatches, first_bad


def run(inputs: Inputs) -> Outputs:
    """Check every request."""
    mismatches, first_bad = tag_check(inputs)
    return {"mismatches": mismatches, "first_bad": first_bad}
