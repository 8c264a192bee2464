"""Inputs and reference of the copy between paged caches; the same bytes are asked for."""

from __future__ import annotations

import torch

from tonnage.kernels.paged_inputs import (
    E4M3,
    generator_of,
    quantised,
    random_cache,
    random_page_table,
    token_counts,
)
from tonnage.kernels.spec import Axes, Inputs, Outputs


def make_bf16_inputs(axes: Axes, seed: int, device: str) -> Inputs:
    """Return caches `[pages, page_tokens, row]`, both bf16, and a page table for each."""
    return _make_inputs(axes, seed, device, torch.bfloat16)


def make_fp8_inputs(axes: Axes, seed: int, device: str) -> Inputs:
    """Return caches `[pages, page_tokens, row]`, bf16 to e4m3, and a page table for each."""
    return _make_inputs(axes, seed, device, E4M3)


def _make_inputs(axes: Axes, seed: int, device: str, target: torch.dtype) -> Inputs:
    random = generator_of(seed, device)
    tokens = token_counts(axes["requests"], axes["tokens"], axes["ragged"], random)
    pages = random_page_table(tokens, axes["page_tokens"], random)
    target_pages = random_page_table(tokens, axes["target_page_tokens"], random)
    source, _ = random_cache(pages, (axes["row"],), torch.bfloat16, random)
    shape = (target_pages.page_count, axes["target_page_tokens"], axes["row"])
    return {
        "source": source,
        "target": torch.zeros(shape, device=device).to(target),
        "source_table": pages.table,
        "target_table": target_pages.table,
        "tokens": tokens,
        "tokens_max": axes["tokens"],
        "scale": torch.tensor([0.011], device=device),
    }


def reference(inputs: Inputs) -> Outputs:
    """Copy token by token, quantising where the target is e4m3."""
    source, target = inputs["source"], inputs["target"].clone()
    page_in, page_out = source.shape[1], target.shape[1]
    rows = source.flatten(0, 1)
    written = target.flatten(0, 1).view(torch.uint8)
    for request, count in enumerate(inputs["tokens"].tolist()):
        position = torch.arange(count, device=source.device)
        at = inputs["source_table"][request].long()[position // page_in] * page_in
        to = inputs["target_table"][request].long()[position // page_out] * page_out
        values = rows[at + position % page_in]
        if target.dtype == E4M3:
            values = quantised(values, inputs["scale"])
        written[to + position % page_out] = values.view(torch.uint8)
    return {"target": target}
