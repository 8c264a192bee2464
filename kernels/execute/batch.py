"""The tensors of one step of a rank: rows, their places in the cache, and tables for attention.

Decoding requests come first, one row each, then the new tokens of every prompt chunk.
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
class Batch:
    """One step's rows: a token and position each, and the slot where its KV goes."""

    tokens: torch.Tensor  # [rows] int64
    positions: torch.Tensor  # [rows] int64
    slots: torch.Tensor  # [rows] int64
    sampled: torch.Tensor | None  # [samples] int64: rows that make logits; None: all
    decode: DecodeRows | None
    prefill: ChunkRows | None
    tags: Inputs  # of the tag check, over all requests

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
    return Batch(
        tokens=tokens,
        positions=positions,
        slots=slots,
        sampled=_sampled(len(decoding), [chunk for _, chunk in chunks], device),
        decode=_decode_rows(memory, decoding, contexts) if decoding else None,
        prefill=_chunk_rows(memory, chunks) if chunks else None,
        tags=memory.checked([*decoding, *(held for held, _ in chunks)]),
    )


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
    memory: PagedMemory, decoding: Sequence[HeldPages], contexts: Sequence[int]
) -> DecodeRows:
    return DecodeRows(
        requests=len(decoding),
        page_table=memory.tables(decoding),
        context_tokens=_int32(contexts, memory),
        context_tokens_max=max(contexts),
    )


def _chunk_rows(memory: PagedMemory, chunks: Sequence[tuple[HeldPages, PromptChunk]]) -> ChunkRows:
    starts = [0]
    for _, chunk in chunks:
        starts.append(starts[-1] + chunk.new_tokens)
    return ChunkRows(
        chunks=tuple(chunk for _, chunk in chunks),
        query_start=_int32(starts, memory),
        page_table=memory.tables([held for held, _ in chunks]),
        context_tokens=_int32([sum(chunk) for _, chunk in chunks], memory),
        new_tokens_max=max(chunk.new_tokens for _, chunk in chunks),
        past_slots=tuple(memory.slots(held, 0, chunk.past_tokens) for held, chunk in chunks),
    )


def _int32(numbers: Sequence[int], memory: PagedMemory) -> torch.Tensor:
    return torch.tensor(list(numbers), dtype=torch.int32, device=memory.place.device)
