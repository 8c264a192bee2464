"""Random paged caches for checks and timings: pages in random order, everything unowned poisoned.

A slot is `page * page_tokens + position in the page`. Slots no request owns hold NaN and unused
page-table entries hold a page that does not exist, so that a kernel reading past a context either
gives NaN or faults.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

UNUSED_PAGE = 1 << 30
SPARE_PAGES = 3
E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0


def generator_of(seed: int, device: str) -> torch.Generator:
    """Return the one random stream of a set of inputs."""
    return torch.Generator(device).manual_seed(seed)


def token_counts(requests: int, tokens: int, ragged: int, random: torch.Generator) -> torch.Tensor:
    """Return tokens per request `[requests]` int32: all alike, or from empty to `tokens`."""
    if not ragged:
        return torch.full((requests,), tokens, dtype=torch.int32, device=random.device)
    counts = torch.randint(1, tokens + 1, (requests,), generator=random, device=random.device)
    counts[0] = tokens
    counts[1:2] = 0
    return counts.to(torch.int32)


@dataclass(frozen=True, slots=True)
class PageTable:
    """Which page holds which tokens: `table` `[requests, width]` int32, disjoint random pages."""

    table: torch.Tensor
    tokens: torch.Tensor  # [requests] int32
    page_tokens: int
    page_count: int  # pages in the cache, spare ones included

    def slots(self, request: int) -> torch.Tensor:
        """Return the slots of a request's tokens, in order, int64."""
        position = torch.arange(int(self.tokens[request]), device=self.table.device)
        page = self.table[request].long()[position // self.page_tokens]
        return page * self.page_tokens + position % self.page_tokens


def random_page_table(tokens: torch.Tensor, page_tokens: int, random: torch.Generator) -> PageTable:
    """Deal pages to requests in random order, with one unused column at the end of the table."""
    device = random.device
    counts = (tokens.long() + page_tokens - 1) // page_tokens
    page_count = int(counts.sum()) + SPARE_PAGES
    pages = torch.randperm(page_count, generator=random, device=device).to(torch.int32)
    table = torch.full((len(tokens), int(counts.max()) + 1), UNUSED_PAGE, device=device).int()
    owned = torch.arange(table.shape[1], device=device) < counts[:, None]
    table[owned] = pages[: int(counts.sum())]
    return PageTable(table, tokens, page_tokens, page_count)


def quantised(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return `values / scale` in f32, rounded to e4m3, ties to even, saturating at 448."""
    return (values.float() / scale.float()).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def random_cache(
    pages: PageTable, row_shape: tuple[int, ...], dtype: torch.dtype, random: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a cache `[pages, page_tokens, *row_shape]` of N(0, 1) values and its scale `[1]` f32.

    A bf16 cache has scale 1. Filled a request at a time, so as not to hold it in f32.
    """
    device = random.device
    shape = (pages.page_count, pages.page_tokens, *row_shape)
    cache = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=device).to(dtype)
    scale = torch.tensor([4.0 / E4M3_MAX if dtype == E4M3 else 1.0], device=device)
    rows = cache.flatten(0, 1)
    for request in range(len(pages.tokens)):
        count = int(pages.tokens[request])
        values = torch.randn(count, *row_shape, generator=random, device=device)
        stored = quantised(values, scale) if dtype == E4M3 else values.to(dtype)
        rows.view(_bits(dtype))[pages.slots(request)] = stored.view(_bits(dtype))
    return cache, scale


def random_slots(
    tokens: int, page_count: int, page_tokens: int, random: torch.Generator
) -> torch.Tensor:
    """Return distinct slots `[tokens]` int64 in random order; about one in eight is -1: skip it."""
    device = random.device
    slots = torch.randperm(page_count * page_tokens, generator=random, device=device)[:tokens]
    skipped = torch.rand(tokens, generator=random, device=device) < 1 / 8
    skipped[0] = False
    return torch.where(skipped, -1, slots)


def gathered(cache: torch.Tensor, scale: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return the rows of those slots, dequantised, in float64."""
    rows = cache.flatten(0, 1).view(_bits(cache.dtype))[slots].view(cache.dtype)
    return rows.double() * scale.double()


def _bits(dtype: torch.dtype) -> torch.dtype:
    # e4m3 tensors cannot be indexed on every device; their bytes can
    return torch.uint8 if dtype == E4M3 else dtype
