"""Moves a request's KV from one paged memory to another, converting BF16 to FP8 on the way.

What was sent and what has arrived are compared by sums that do not depend on where pages lie. They
compare bytes: where the handoff converts, the sender sums what it converted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tonnage.kernels.execute.formats import KV_SUFFIX
from tonnage.kernels.execute.pages import HeldPages, PagedMemory
from tonnage.sim.domain import BadInputError

_SPREAD = -7046029254386353131  # 2^64 over the golden ratio, odd, as a signed number
_MIXED = -4658895280553007687  # 0xbf58476d1ce4e5b9, the multiplier of splitmix64's mixing


def hand_over(
    source: PagedMemory,
    given: Sequence[HeldPages],
    target: PagedMemory,
    taken: Sequence[HeldPages],
) -> None:
    """Copy all layers of requests `given` to the pages that the target gave each of them.

    FP8 pages can be copied as they are, but not turned back to BF16. The source keeps its pages.
    """
    if source.shape.layers != target.shape.layers:
        raise BadInputError("handoff: the two memories do not store the same layers")
    if source.is_fp8 and not target.is_fp8:
        raise BadInputError(
            f"handoff: pages of {source.shape.kv_format} cannot become {target.shape.kv_format}"
        )
    for one, other in zip(given, taken, strict=True):
        if other.tokens < one.tokens:
            raise BadInputError(
                f"handoff: {one.tokens:,} tokens do not fit pages given for {other.tokens:,}"
            )
    tokens = torch.tensor([one.tokens for one in given], dtype=torch.int32)
    inputs = {
        "source_table": source.page_table[source.rows_of(given)],
        "target_table": target.page_table[target.rows_of(taken)],
        "tokens": tokens.to(source.place.device),
        "tokens_max": int(tokens.max()),
    }
    as_bytes = source.is_fp8  # two e4m3 numbers go as one of BF16's size, unread
    name = "kv_copy_bf16" if as_bytes else f"kv_copy_{KV_SUFFIX[target.shape.kv_format]}"
    for before, after in zip(source.layers, target.layers, strict=True):
        for part, its_target in zip(before.rows, after.rows, strict=True):
            pair = {"source": part, "target": its_target}
            if as_bytes:
                pair = {key: rows.view(torch.bfloat16) for key, rows in pair.items()}
            source.place.run(name, {**inputs, **pair, "scale": after.scale})


def kv_sum(memory: PagedMemory, held: HeldPages, tokens: int) -> torch.Tensor:
    """Return a number int64 of the bytes of a request's first tokens in all layers, as a tensor.

    Every word of 32 bits counts times an odd number of its own place, modulo 2^64: one word that
    is another always changes the sum, several do but for one case in 2^64 or so.
    """
    slots = memory.slots(held, 0, tokens)
    total, counted = torch.zeros((), dtype=torch.int64, device=slots.device), 0
    for layer in memory.layers:
        for part in layer.parts:
            rows = part.flatten(2).flatten(0, 1).view(torch.uint8).view(torch.int32)
            words = rows[slots].flatten().long()
            total = total + (words * _place_factors(counted, len(words), slots.device)).sum()
            counted += len(words)
    return total


def _place_factors(first: int, count: int, device: torch.device) -> torch.Tensor:
    """Return an odd number of 64 bits for each place, spread as random ones are."""
    place = torch.arange(first + 1, first + count + 1, device=device) * _SPREAD
    place = (place ^ (place >> 30)) * _MIXED
    return (place ^ (place >> 27)) | 1
