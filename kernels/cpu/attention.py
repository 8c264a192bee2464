"""Attention over paged caches on a CPU: gather a few requests' rows, then torch's kernel.

The heads that share a key are the query rows of `scaled_dot_product_attention`, whose CPU kernel
keeps logits and softmax in f32; its `enable_gqa` is ten times slower. BF16 caches are attended in
BF16, FP8 ones in f32: their scale would round a BF16 result a second time. In decode, requests
whose contexts are nearly as long go through it together, as many as keep what they gather in cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as functional

from tonnage.kernels.cpu.formats import decode_e4m3
from tonnage.kernels.cpu.linear import multiplies_bf16
from tonnage.kernels.cpu.pages import rows_of, slots_of
from tonnage.kernels.ops.mla_decode_reference import LATENT
from tonnage.kernels.paged_inputs import E4M3
from tonnage.kernels.spec import Inputs, Outputs

GATHERED_BYTES_MAX = 8 << 20
SHORTEST_SHARE = 0.75  # of the longest context in a group: what padding may waste
PREFILL_ROWS = 512  # queries at a time, so that most of what a mask would hide is not computed


@dataclass(frozen=True, slots=True)
class Group:
    """Requests attended together."""

    requests: torch.Tensor  # int64
    slots: torch.Tensor  # [requests, tokens] int64; padding repeats the last token
    mask: torch.Tensor | None  # [requests, 1, 1, tokens] bool, False on padding


def groups_of(context_tokens: torch.Tensor, row_bytes: int) -> Iterator[list[int]]:
    """Yield requests with a context, longest first, in groups of nearly equal contexts."""
    lengths = context_tokens.tolist()
    group: list[int] = []
    for request in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if lengths[request] == 0:
            break
        if group:
            longest = lengths[group[0]]
            full = (len(group) + 1) * longest * row_bytes > GATHERED_BYTES_MAX
            if full or lengths[request] < SHORTEST_SHARE * longest:
                yield group
                group = []
        group.append(request)
    if group:
        yield group


def located(inputs: Inputs, table_name: str, page_tokens: int, row_bytes: int) -> Iterator[Group]:
    """Yield the groups of a batch with their tokens' slots."""
    tokens = inputs["context_tokens"]
    for chosen in groups_of(tokens, row_bytes):
        requests = torch.tensor(chosen)
        lengths = tokens[requests].long()[:, None]
        position = torch.arange(int(lengths[0]))
        ragged = bool(lengths[0] != lengths[-1])
        mask = (position < lengths)[:, None, None] if ragged else None
        at = position.minimum(lengths - 1)
        yield Group(requests, slots_of(inputs[table_name][requests], at, page_tokens), mask)


def gathered(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return the rows of slots `[requests, tokens]`, unscaled: bf16, or f32 of an e4m3 cache."""
    rows = rows_of(cache).index_select(0, slots.flatten())
    rows = rows.view(torch.uint8)
    numbers = decode_e4m3(rows) if cache.dtype == E4M3 else rows.view(cache.dtype)
    return numbers.view(*slots.shape, *cache.shape[2:])


def row_bytes(cache: torch.Tensor) -> int:
    """Return the bytes of one token's decoded row."""
    return (4 if cache.dtype == E4M3 else 2) * cache.shape[2:].numel()


def gqa_decode(inputs: Inputs) -> Outputs:
    """Attend one query per request. Inputs as in `ops.gqa_decode`."""
    queries, keys, values = (inputs[name] for name in ("queries", "key_cache", "value_cache"))
    _, heads, head_dim = queries.shape
    page_tokens, kv_heads = keys.shape[1:3]
    scale = head_dim**-0.5 * float(inputs["key_scale"])
    value_scale = float(inputs["value_scale"])
    output = torch.zeros_like(queries)
    for group in located(inputs, "page_table", page_tokens, 2 * row_bytes(keys)):
        rows = queries[group.requests].unflatten(1, (kv_heads, heads // kv_heads))
        found = gathered(keys, group.slots)
        attended = functional.scaled_dot_product_attention(
            rows.to(found.dtype),
            found.transpose(1, 2),
            gathered(values, group.slots).transpose(1, 2),
            attn_mask=group.mask,
            scale=scale,
        )
        output[group.requests] = (attended.flatten(1, 2) * value_scale).to(output.dtype)
    return {"output": output}


def mla_decode(inputs: Inputs) -> Outputs:
    """Attend one absorbed query per request. Inputs as in `ops.mla_decode`.

    torch's fast kernel wants values as wide as keys: the latent with its rope key serves as both,
    and the columns of the rope key are dropped from the result.
    """
    queries, cache = inputs["queries"], inputs["cache"]
    cache_scale = float(inputs["cache_scale"])
    output = queries.new_zeros((*queries.shape[:2], LATENT))
    for group in located(inputs, "page_table", cache.shape[1], row_bytes(cache)):
        latents = gathered(cache, group.slots)[:, None]
        attended = functional.scaled_dot_product_attention(
            queries[group.requests][:, None].to(latents.dtype),
            latents,
            latents,
            attn_mask=group.mask,
            scale=inputs["logit_scale"] * cache_scale,
        )
        output[group.requests] = (attended[:, 0, :, :LATENT] * cache_scale).to(output.dtype)
    return {"output": output}


def gqa_prefill(inputs: Inputs) -> Outputs:
    """Attend new tokens to a cached prefix and to themselves. Inputs as in `ops.gqa_prefill`."""
    queries, keys, values = (inputs[name] for name in ("queries", "key_cache", "value_cache"))
    value_scale = float(inputs["value_scale"])
    scale = queries.shape[-1] ** -0.5 * float(inputs["key_scale"])
    output = torch.zeros_like(queries)
    starts = inputs["query_start"].tolist()
    lengths = inputs["context_tokens"].tolist()
    for request, (start, end) in enumerate(pairwise(starts)):
        if start == end:
            continue
        position = torch.arange(lengths[request])[None]
        slots = slots_of(inputs["page_table"][request : request + 1], position, keys.shape[1])
        attended = causal_attention(
            queries[start:end], gathered(keys, slots)[0], gathered(values, slots)[0], scale
        )
        output[start:end] = (attended * value_scale).to(output.dtype)
    return {"output": output}


def causal_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attend `[new, heads, dim]`, the last of `[tokens, kv_heads, dim]`: `[new, heads, dim]`."""
    new, heads, _ = queries.shape
    tokens, kv_heads, _ = keys.shape
    dtype = keys.dtype if multiplies_bf16() else torch.float32
    by_head = queries.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).to(dtype)
    shared = [part.transpose(0, 1)[:, None].to(dtype) for part in (keys, values)]
    chunks = []
    for first in range(0, new, PREFILL_ROWS):
        rows = by_head[:, :, first : first + PREFILL_ROWS]
        seen = tokens - new + first + rows.shape[2]
        k, v = (part[:, :, :seen].expand(-1, heads // kv_heads, -1, -1) for part in shared)
        mask = torch.ones(rows.shape[2], seen, dtype=torch.bool).tril(seen - rows.shape[2])
        chunks.append(
            functional.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scale)
        )
    return torch.cat(chunks, 2).permute(2, 0, 1, 3).flatten(1, 2)
