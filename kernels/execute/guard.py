"""The tag check of a step and what follows from it, on the device: bad requests are masked.

A masked request keeps its row in the batch, so that all shapes stay as they are, but its page table
names nobody's page and its new KV goes there. The host reads the verdict with the tokens, and
returns none of a masked request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tonnage.kernels.execute.batch import Batch
from tonnage.kernels.execute.pages import HeldPages, PagedMemory


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """Wrong entries of each request int32, among the pages it reads and those it writes.

    None where they were not checked.
    """

    reads: torch.Tensor | None
    writes: torch.Tensor | None

    @property
    def bad(self) -> torch.Tensor:
        """Say which requests must not run, `[requests]` bool."""
        first, *more = (part > 0 for part in (self.reads, self.writes) if part is not None)
        return first | more[0] if more else first


def verdict_on(
    batch: Batch, memory: PagedMemory, reads: bool = True, writes: bool = False
) -> Verdict:
    """Check the pages that a batch is about to read, those it is about to write, or both.

    A step writes to pages that it reads too: a check of its reads covers its writes, while both
    are checked at one time. The check of writes alone is for a writer that reads nothing.
    """
    read = written = None
    if reads:
        read = memory.place.run("tag_check", batch.tags)["mismatches"]
    if writes:
        by_entry = memory.place.run("tag_check", batch.writes.inputs)["mismatches"]
        nothing = torch.zeros_like(batch.tags["page_counts"])
        written = nothing.index_add(0, batch.writes.request_of_entry, by_entry)
    return Verdict(read, written)


def masked(batch: Batch, bad: torch.Tensor, memory: PagedMemory) -> Batch:
    """Return the batch with nobody's page for the bad requests `[requests]` bool."""
    page, slot = memory.scratch_page, memory.scratch_page * memory.shape.page_tokens
    decodes = 0 if batch.decode is None else batch.decode.requests
    decode, prefill = batch.decode, batch.prefill
    if decode is not None:
        table = decode.page_table.masked_fill(bad[:decodes, None], page)
        decode = replace(decode, page_table=table)
    if prefill is not None:
        of_chunks = bad[decodes:]
        past = tuple(
            slots.masked_fill(one, slot)
            for slots, one in zip(prefill.past_slots, of_chunks, strict=True)
        )
        table = prefill.page_table.masked_fill(of_chunks[:, None], page)
        prefill = replace(prefill, page_table=table, past_slots=past)
    bad_rows = bad if prefill is None else bad[batch.request_of_row]
    slots = batch.slots.masked_fill(bad_rows, slot)
    return replace(batch, slots=slots, decode=decode, prefill=prefill)


def returned(logits: torch.Tensor, bad: torch.Tensor) -> dict[int, torch.Tensor]:
    """Return what the host hands out of a step: the logits of requests that were not masked."""
    return {request: logits[request] for request in (~bad).nonzero().flatten().tolist()}


@dataclass(frozen=True, slots=True)
class Books:
    """What an audit of the pages found; empty is sound.

    `lost`: neither free nor anybody's. `owned_twice`: two requests hold them under their live tag.
    `free_and_owned`: would be given away under their owner. `listed_twice`: free more than once.
    """

    lost: tuple[int, ...] = ()
    owned_twice: tuple[int, ...] = ()
    free_and_owned: tuple[int, ...] = ()
    listed_twice: tuple[int, ...] = ()


def audit(memory: PagedMemory, running: Sequence[HeldPages]) -> Books:
    """Compare the free pages with the ledgers of all who hold any."""
    owners = [0] * memory.shape.pages
    for held in running:
        for page, tag in zip(held.pages, held.tags, strict=True):
            owners[page] += memory.tag(page) == tag
    listed = [memory.times_listed(page) for page in range(memory.shape.pages)]
    both = list(enumerate(zip(owners, listed, strict=True)))
    return Books(
        lost=tuple(page for page, (own, free) in both if not own and not free),
        owned_twice=tuple(page for page, (own, _) in both if own > 1),
        free_and_owned=tuple(page for page, (own, free) in both if own and free),
        listed_twice=tuple(page for page, (_, free) in both if free > 1),
    )
