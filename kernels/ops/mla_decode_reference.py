"""Inputs and reference of decode attention over a paged cache of MLA latents."""

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

LATENT = 512
HALF = LATENT // 2
ROPE = 64
LOGIT_SCALE = (128 + 64) ** -0.5  # DeepSeek-V3's nope and rope dims before absorption


def make_bf16_inputs(axes: Axes, seed: int, device: str) -> Inputs:
    """Return absorbed queries and a bf16 paged cache of latents."""
    return _make_inputs(axes, seed, device, torch.bfloat16)


def make_fp8_inputs(axes: Axes, seed: int, device: str) -> Inputs:
    """Return absorbed queries and an e4m3 paged cache of latents with one scale."""
    return _make_inputs(axes, seed, device, E4M3)


def _make_inputs(axes: Axes, seed: int, device: str, dtype: torch.dtype) -> Inputs:
    random = generator_of(seed, device)
    tokens = token_counts(axes["batch"], axes["context_tokens"], axes["ragged"], random)
    pages = random_page_table(tokens, axes["page_tokens"], random)
    cache, scale = random_cache(pages, (LATENT + ROPE,), dtype, random)
    shape = (axes["batch"], axes["heads"], LATENT + ROPE)
    # absorbed queries sum 128 products, so that logits spread as before absorption
    queries = torch.randn(shape, generator=random, device=device) * (192 / (LATENT + ROPE)) ** 0.5
    return {
        "queries": queries.bfloat16(),
        "cache": cache,
        "cache_scale": scale,
        "page_table": pages.table,
        "context_tokens": tokens,
        "context_tokens_max": axes["context_tokens"],
        "logit_scale": LOGIT_SCALE,
    }


def reference(inputs: Inputs) -> Outputs:
    """Attend in float64, request by request."""
    queries, cache = inputs["queries"], inputs["cache"]
    pages = PageTable(inputs["page_table"], inputs["context_tokens"], cache.shape[1], len(cache))
    shape = (*queries.shape[:2], LATENT)
    output = torch.zeros(shape, dtype=torch.float64, device=queries.device)
    for request in range(len(queries)):
        slots = pages.slots(request)
        if len(slots):
            rows = gathered(cache, inputs["cache_scale"], slots)
            logits = queries[request].double() @ rows.T * inputs["logit_scale"]
            output[request] = logits.softmax(-1) @ rows[:, :LATENT]
    return {"output": output}
