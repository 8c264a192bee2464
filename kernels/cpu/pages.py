"""Paged caches on a CPU: slots of tokens, and rows of any type gathered by their bytes."""

from __future__ import annotations

import torch


def slots_of(table: torch.Tensor, position: torch.Tensor, page_tokens: int) -> torch.Tensor:
    """Return the slots int64 of positions `[requests, n]` by page tables `[requests, width]`."""
    return table.long().gather(1, position // page_tokens) * page_tokens + position % page_tokens


WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def as_words(rows: torch.Tensor) -> torch.Tensor:
    """View rows of bytes as rows of the widest words they divide into: torch moves one by one."""
    width = next(width for width in WORDS if rows.shape[-1] % width == 0)
    return rows.view(WORDS[width])


def rows_of(cache: torch.Tensor) -> torch.Tensor:
    """View a cache `[pages, page_tokens, ...]` as its tokens' bytes `[slots, words]`."""
    return as_words(cache.view(torch.uint8).view(cache.shape[0] * cache.shape[1], -1))


def write_rows(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Write rows `[tokens, ...]` to their slots; negative ones are left out."""
    target = rows_of(cache)
    flat = rows.contiguous().view(torch.uint8).view(target.dtype).view(len(slots), target.shape[1])
    kept = slots >= 0
    if not bool(kept.all()):
        slots, flat = slots[kept], flat[kept]
    target.index_copy_(0, slots, flat)


def quantise(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return `values / scale` in f32, rounded to e4m3, ties to even, saturating at 448."""
    return (values.float() / scale).clamp_(-448.0, 448.0).to(torch.float8_e4m3fn)
