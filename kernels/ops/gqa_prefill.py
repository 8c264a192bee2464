"""Causal prefill attention with grouped queries: new tokens attend a cached prefix and themselves.

* queries `[new tokens, heads, head_dim]` bf16, requests packed one after another; query_start
  `[batch + 1]` int32 says where each begins.
* key_cache, value_cache `[pages, page_tokens, kv_heads, head_dim]` bf16 or e4m3, holding prefix
  and new tokens; an e4m3 number q stands for `q * scale`, key_scale and value_scale `[1]` f32.
* page_table `[batch, width]` int32; context_tokens `[batch]` int32, prefix and new together.
* output `[new tokens, heads, head_dim]` bf16. A request may bring no new token.

One program attends a block of new tokens of one head, the latest (longest) blocks first. Blocks of
context that all its tokens may see go unmasked. FP8 as in `gqa_decode`. Multiplying bounds it:
`4 * head_dim` FLOP per head and visible pair.

Error, relative to an element or its row's RMS: 2^-9 of the probabilities and of the output for
bf16, 2^-12 and 2^-9 for FP8; 1e-2 is asserted. Method: FlashAttention-2 (arXiv 2307.08691).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tonnage.kernels.ops.gqa_decode import LOG2_E, rows_at, token_pages
from tonnage.kernels.ops.launch import launch
from tonnage.kernels.paged_inputs import E4M3
from tonnage.kernels.spec import Inputs, LaunchConfig, Outputs

BLOCK_M = 128
BLOCK_N = 64


@triton.jit
def _attend_block(
    q,
    result,
    total,
    largest,
    key_cache,
    value_cache,
    page_row,
    kv_head,
    position,
    block,
    tokens,
    to_log2,
    ROW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    page, at_page = token_pages(page_row, block, tokens, PAGE_TOKENS, BLOCK_N)
    first = page * (PAGE_TOKENS * ROW) + kv_head * HEAD_DIM
    at = at_page[:, None] * ROW + tl.arange(0, HEAD_DIM)[None, :]
    k = tl.load(rows_at(key_cache, first, PAGE_TOKENS, BLOCK_N) + at).to(q.dtype)
    logits = tl.dot(q, tl.trans(k)) * to_log2
    if MASKED:
        token = block + tl.arange(0, BLOCK_N)[None, :]
        logits = tl.where(token <= position[:, None], logits, -1.0e30)
    larger = tl.maximum(largest, tl.max(logits, axis=1))
    weights = tl.exp2(logits - larger[:, None])
    shrink = tl.exp2(largest - larger)
    total = total * shrink + tl.sum(weights, axis=1)
    v = tl.load(rows_at(value_cache, first, PAGE_TOKENS, BLOCK_N) + at).to(q.dtype)
    result = tl.dot(weights.to(q.dtype), v, result * shrink[:, None])
    return result, total, larger


@triton.jit
def gqa_prefill_kernel(
    queries,
    query_start,
    key_cache,
    value_cache,
    key_scale,
    value_scale,
    page_table,
    context_tokens,
    output,
    table_stride,
    logit_scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend one block of new tokens (axis 1) of one head (axis 0) of a request (axis 2)."""
    ROW: tl.constexpr = KV_HEADS * HEAD_DIM
    head = tl.program_id(0)
    request = tl.program_id(2)
    start = tl.load(query_start + request)
    new = tl.load(query_start + request + 1) - start
    first_new = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    if first_new >= new:
        return
    tokens = tl.load(context_tokens + request)
    row = tl.arange(0, BLOCK_M)
    position = tokens - new + first_new + row
    kept = (first_new + row < new)[:, None]
    first_row = ((start + first_new).to(tl.int64) * HEADS + head) * HEAD_DIM
    queries += first_row
    output += first_row
    at = row[:, None] * (HEADS * HEAD_DIM) + tl.arange(0, HEAD_DIM)[None, :]
    q = tl.load(queries + at, mask=kept, other=0.0)
    if key_cache.dtype.element_ty.is_fp8():
        q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
    to_log2 = logit_scale * tl.load(key_scale)

    largest = tl.full([BLOCK_M], -1.0e30, dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    result = tl.zeros([BLOCK_M, HEAD_DIM], dtype=tl.float32)
    page_row = page_table + request.to(tl.int64) * table_stride
    kv_head = head // (HEADS // KV_HEADS)
    seen_by_all = (tokens - new + first_new + 1) // BLOCK_N * BLOCK_N
    seen_by_any = tl.minimum(tokens - new + first_new + BLOCK_M, tokens)
    for block in range(0, seen_by_all, BLOCK_N):
        result, total, largest = _attend_block(
            q, result, total, largest, key_cache, value_cache, page_row, kv_head, position, block,
            tokens, to_log2, ROW, HEAD_DIM, PAGE_TOKENS, BLOCK_N, False,
        )  # fmt: skip
    for block in range(seen_by_all, seen_by_any, BLOCK_N):
        result, total, largest = _attend_block(
            q, result, total, largest, key_cache, value_cache, page_row, kv_head, position, block,
            tokens, to_log2, ROW, HEAD_DIM, PAGE_TOKENS, BLOCK_N, True,
        )  # fmt: skip

    result = result * (tl.load(value_scale) / total)[:, None]
    tl.store(output + at, result.to(output.dtype.element_ty), mask=kept)


def config(heads: int, kv_heads: int, head_dim: int, page_tokens: int, fp8: bool) -> LaunchConfig:
    """Return how that shape is attended."""
    cache = "*fp8e4nv" if fp8 else "*bf16"
    pointers = {
        "queries": "*bf16",
        "query_start": "*i32",
        "key_cache": cache,
        "value_cache": cache,
        "key_scale": "*fp32",
        "value_scale": "*fp32",
        "page_table": "*i32",
        "context_tokens": "*i32",
        "output": "*bf16",
    }
    return LaunchConfig(
        kernel="gqa_prefill_kernel",
        name=f"{heads}/{kv_heads} heads, page {page_tokens}",
        signature={**pointers, "table_stride": "i32", "logit_scale": "fp32"},
        constants={
            "HEADS": heads,
            "KV_HEADS": kv_heads,
            "HEAD_DIM": head_dim,
            "PAGE_TOKENS": page_tokens,
            "BLOCK_M": BLOCK_M,
            "BLOCK_N": BLOCK_N,
        },
        num_warps=8,
        num_stages=3,
        aligned=tuple(pointers),
        instruction={90: "wgmma", 100: "tcgen05.mma"},
    )


BF16_CONFIGS, FP8_CONFIGS = (
    tuple(config(32, 8, 128, page_tokens, fp8) for page_tokens in (16, 64)) for fp8 in (False, True)
)


def run(inputs: Inputs) -> Outputs:
    """Attend in one launch."""
    queries, key_cache = inputs["queries"], inputs["key_cache"]
    _, heads, head_dim = queries.shape
    page_tokens, kv_heads = key_cache.shape[1:3]
    chosen = config(heads, kv_heads, head_dim, page_tokens, key_cache.dtype == E4M3)
    output = torch.empty_like(queries)
    blocks = triton.cdiv(inputs["new_tokens_max"], BLOCK_M)
    launch(
        gqa_prefill_kernel,
        (heads, blocks, len(inputs["context_tokens"])),
        chosen,
        **{name: inputs[name] for name in chosen.signature if name in inputs},
        output=output,
        table_stride=inputs["page_table"].stride(0),
        logit_scale=head_dim**-0.5 * LOG2_E,
    )
    return {"output": output}
