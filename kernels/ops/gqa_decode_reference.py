"""Inputs and reference of GQA decode attention over a paged cache."""

from __future__ import annotations

import torch

from tonnage.kernels.paged_inputs import (
    E4M3,
    PageTable,
    gathered,
    generator_of,
    random_cache,
    random_page_table,
    token_counts,
)
from tonnage.kernels.spec import Axes, Inputs, Outputs


def make_bf16_inputs(axes: Axes, seed: int, device: str) -> Inputs:
    """Return queries and a bf16 paged cache."""
    return _make_inputs(axes, seed, device, torch.bfloat16)


def make_fp8_inputs(axes: Axes, seed: int, device: str) -> Inputs:
    """Return queries and an e4m3 paged cache with one scale for K and one for V."""
    return _make_inputs(axes, seed, device, E4M3)


def _make_inputs(axes: Axes, seed: int, device: str, dtype: torch.dtype) -> Inputs:
    random = generator_of(seed, device)
    tokens = token_counts(axes["batch"], axes["context_tokens"], axes["ragged"], random)
    pages = random_page_table(tokens, axes["page_tokens"], random)
    row = (axes["kv_heads"], axes["head_dim"])
    key_cache, key_scale = random_cache(pages, row, dtype, random)
    value_cache, value_scale = random_cache(pages, row, dtype, random)
    shape = (axes["batch"], axes["heads"], axes["head_dim"])
    return {
        "queries": torch.randn(shape, generator=random, device=device).bfloat16(),
        "key_cache": key_cache,
        "value_cache": value_cache,
        "key_scale": key_scale,
        "value_scale": value_scale,
        "page_table": pages.table,
        "context_tokens": tokens,
        "context_tokens_max": axes["context_tokens"],
    }


def reference(inputs: Inputs) -> Outputs:
    """Attend in float64, request by request."""
    queries, caches = inputs["queries"], (inputs["key_cache"], inputs["value_cache"])
    page_tokens = caches[0].shape[1]
    pages = PageTable(inputs["page_table"], inputs["context_tokens"], page_tokens, len(caches[0]))
    output = torch.zeros(queries.shape, dtype=torch.float64, device=queries.device)
    for request in range(len(queries)):
        slots = pages.slots(request)
        if len(slots):
            keys = gathered(caches[0], inputs["key_scale"], slots)
            values = gathered(caches[1], inputs["value_scale"], slots)
            output[request] = attend(queries[request].double(), keys, values)
    return {"output": output}


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attend `[heads, dim]` queries to `[tokens, kv_heads, dim]` keys and values."""
    group = queries.shape[0] // keys.shape[1]
    keys, values = (part.repeat_interleave(group, 1) for part in (keys, values))
    logits = torch.einsum("hd,thd->ht", queries, keys) * queries.shape[-1] ** -0.5
    return torch.einsum("ht,thd->hd", logits.softmax(-1), values)
