"""The tensors of one step of a rank: rows, their places in the cache, and tables for attention.

Decoding requests come first, one row each, then the new tokens of every prompt chunk. Attention and
the tag check read the same table rows: they are one tensor, of which each has its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tonnage.kernels.execute.pages import HeldPages, PagedMemory
from tonnage.kernels.spec import Inputs
from tonnage.sim.domain import PromptChunk


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRows:
    """What decode attention reads: page-table rows and the tokens of each context."""

    requests: int
    page_table: torch.Tensor  # [requests, width] int32
    context_tokens: torch.Tensor  # [requests] int32, the new token included
    context_tokens_max: int


@dataclass(frozen=True, slots=True, eq=False)
class ChunkRows:
    """What prefill attention reads of all chunks, packed one after another."""

    chunks: tuple[PromptChunk, ...]
    query_start: torch.Tensor  # [chunks + 1] int32
    page_table: torch.Tensor  # [chunks, width] int32
    context_tokens: torch.Tensor  # [chunks] int32, past and new
    new_tokens_max: int
    past_slots: tuple[torch.Tensor, ...]  # of each chunk's cached tokens, int64


@dataclass(frozen=True, slots=True, eq=False)
class PageWrites:
    """The pages that a step writes, one entry each, for the tag check of their writers.

    `inputs`: as the check's, every entry a table row of its own: the page that the step's slots lie
    on, and what the ledger of its request said when the batch was made.
    """

    inputs: Inputs
    request_of_entry: torch.Tensor  # [entries] int64


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step's rows: a token and position each, and the slot where its KV goes."""

    tokens: torch.Tensor  # [rows] int64
    positions: torch.Tensor  # [rows] int64
    slots: torch.Tensor  # [rows] int64
    sampled: torch.Tensor | None  # [samples] int64: rows that make logits; None: all
    decode: DecodeRows | None
    prefill: ChunkRows | None
    tags: Inputs  # of the tag check, over all requests, decoding ones first
    writes: PageWrites
    request_of_row: torch.Tensor  # [rows] int64

    @property
    def rows(self) -> int:
        """Return the rows that products work on."""
        return len(self.tokens)


def make_batch(
    memory: PagedMemory,
    decoding: Sequence[HeldPages],
    contexts: Sequence[int],
    chunks: Sequence[tuple[HeldPages, PromptChunk]],
    tokens: torch.Tensor,
) -> Batch:
    """Return a step's batch of requests that hold their pages already.

    `contexts`: tokens that each decoding request attends, the one it computes included, whose KV is
    written last. `tokens` `[rows]`: the vocabulary's indices.
    """
    places = [
        (held, context - 1, context) for held, context in zip(decoding, contexts, strict=True)
    ]
    places += [(held, c.past_tokens, c.past_tokens + c.new_tokens) for held, c in chunks]
    device = memory.place.device
    positions = torch.cat([torch.arange(first, last) for _, first, last in places]).to(device)
    slots = torch.cat([memory.slots(held, first, last) for held, first, last in places])
    rows = torch.tensor([last - first for _, first, last in places], device=device)
    tags = memory.checked([held for held, _, _ in places])
    tables = tags["page_table"].split((len(decoding), len(chunks)))
    return Batch(
        tokens=tokens,
        positions=positions,
        slots=slots,
        sampled=_sampled(len(decoding), [chunk for _, chunk in chunks], device),
        decode=_decode_rows(memory, tables[0], contexts) if decoding else None,
        prefill=_chunk_rows(memory, tables[1], chunks) if chunks else None,
        tags=tags,
        writes=_page_writes(memory, places, slots),
        request_of_row=torch.arange(len(places), device=device).repeat_interleave(rows),
    )


def _page_writes(
    memory: PagedMemory, places: Sequence[tuple[HeldPages, int, int]], slots: torch.Tensor
) -> PageWrites:
    """Name the first row on every page that is written, and what its writer was given there."""
    page_tokens, row = memory.shape.page_tokens, 0
    entries: list[tuple[int, int, int, int]] = []  # request, row of the batch, ledger, entry there
    for request, (held, first, last) in enumerate(places):
        for entry in range(first // page_tokens, (last - 1) // page_tokens + 1):
            begins = row + max(entry * page_tokens - first, 0)
            entries.append((request, begins, held.ledger, entry))
        row += last - first
    table = torch.tensor(entries, dtype=torch.int64, device=memory.place.device)
    request_of_entry, rows, ledgers, entry_there = table.unbind(1)
    inputs = {
        "page_table": (slots[rows] // page_tokens).int()[:, None],
        "page_counts": torch.ones_like(rows, dtype=torch.int32),
        "live_tags": memory.live_tags,
        "ledger_pages": memory.ledger_pages[ledgers, entry_there][:, None],
        "ledger_tags": memory.ledger_tags[ledgers, entry_there][:, None],
    }
    return PageWrites(inputs, request_of_entry)


def _sampled(decodes: int, chunks: list[PromptChunk], device: str) -> torch.Tensor | None:
    """Return the rows that go through the head: every decoding one, the last one of a chunk."""
    if not chunks:
        return None
    rows, end = list(range(decodes)), decodes
    for chunk in chunks:
        end += chunk.new_tokens
        rows.append(end - 1)
    return torch.tensor(rows, device=device)


def _decode_rows(
    memory: PagedMemory, page_table: torch.Tensor, contexts: Sequence[int]
) -> DecodeRows:
    return DecodeRows(
        requests=len(contexts),
        page_table=page_table,
        context_tokens=_int32(contexts, memory),
        context_tokens_max=max(contexts),
    )


def _chunk_rows(
    memory: PagedMemory,
    page_table: torch.Tensor,
    chunks: Sequence[tuple[HeldPages, PromptChunk]],
) -> ChunkRows:
    starts = [0]
    for _, chunk in chunks:
        starts.append(starts[-1] + chunk.new_tokens)
    return ChunkRows(
        chunks=tuple(chunk for _, chunk in chunks),
        query_start=_int32(starts, memory),
        page_table=page_table,
        context_tokens=_int32([sum(chunk) for _, chunk in chunks], memory),
        new_tokens_max=max(chunk.new_tokens for _, chunk in chunks),
        past_slots=tuple(memory.slots(held, 0, chunk.past_tokens) for held, chunk in chunks),
    )


def _int32(numbers: Sequence[int], memory: PagedMemory) -> torch.Tensor:
    return torch.tensor(list(numbers), dtype=torch.int32, device=memory.place.device)
