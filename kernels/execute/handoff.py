"""Moves a request's KV from one paged memory to another, converting BF16 to FP8 on the way."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tonnage.kernels.execute.formats import KV_SUFFIX
from tonnage.kernels.execute.pages import HeldPages, PagedMemory
from tonnage.sim.domain import BadInputError


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
