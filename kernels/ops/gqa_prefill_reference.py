"""Inputs and reference of prefill attention over a paged cache that holds a prefix."""

from __future__ import annotations

from itertools import pairwise

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
    """Return packed queries and a bf16 paged cache of prefix and new tokens."""
    return _make_inputs(axes, seed, device, torch.bfloat16)


def make_fp8_inputs(axes: Axes, seed: int, device: str) -> Inputs:
    """Return packed queries and an e4m3 paged cache of prefix and new tokens."""
    return _make_inputs(axes, seed, device, E4M3)


def _make_inputs(axes: Axes, seed: int, device: str, dtype: torch.dtype) -> Inputs:
    random = generator_of(seed, device)
    new = token_counts(axes["batch"], axes["new_tokens"], axes["ragged"], random)
    prefix = torch.full_like(new, axes["prefix_tokens"])
    if axes["ragged"]:
        end, requests = axes["prefix_tokens"] + 1, (axes["batch"],)
        prefix = torch.randint(0, end, requests, generator=random, device=device).int()
        prefix[0] = axes["prefix_tokens"]
    pages = random_page_table(prefix + new, axes["page_tokens"], random)
    row = (axes["kv_heads"], axes["head_dim"])
    key_cache, key_scale = random_cache(pages, row, dtype, random)
    value_cache, value_scale = random_cache(pages, row, dtype, random)
    query_start = torch.zeros(axes["batch"] + 1, dtype=torch.int32, device=device)
    query_start[1:] = new.cumsum(0)
    shape = (int(query_start[-1]), axes["heads"], axes["head_dim"])
    return {
        "queries": torch.randn(shape, generator=random, device=device).bfloat16(),
        "query_start": query_start,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "key_scale": key_scale,
        "value_scale": value_scale,
        "page_table": pages.table,
        "context_tokens": prefix + new,
        "new_tokens_max": axes["new_tokens"],
    }


def reference(inputs: Inputs) -> Outputs:
    """Attend in float64, request by request."""
    queries, caches = inputs["queries"], (inputs["key_cache"], inputs["value_cache"])
    pages = PageTable(
        inputs["page_table"], inputs["context_tokens"], caches[0].shape[1], len(caches[0])
    )
    output = torch.zeros(queries.shape, dtype=torch.float64, device=queries.device)
    starts = inputs["query_start"].tolist()
    for request, (start, end) in enumerate(pairwise(starts)):
        slots = pages.slots(request)
        keys = gathered(caches[0], inputs["key_scale"], slots)
        values = gathered(caches[1], inputs["value_scale"], slots)
        output[start:end] = attend_causally(queries[start:end].double(), keys, values)
    return {"output": output}


def attend_causally(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Attend `[new, heads, dim]` queries, the last of the `[tokens, kv_heads, dim]` context."""
    new, heads, dim = queries.shape
    group = heads // keys.shape[1]
    keys, values = (part.repeat_interleave(group, 1) for part in (keys, values))
    logits = torch.einsum("qhd,thd->hqt", queries, keys) * dim**-0.5
    position = torch.arange(len(keys), device=queries.device)
    hidden = position[None, :] > position[len(keys) - new :, None]
    logits = logits.masked_fill(hidden, -torch.inf)
    return torch.einsum("hqt,thd->qhd", logits.softmax(-1), values)
