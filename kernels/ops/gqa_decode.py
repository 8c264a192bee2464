"""Decode attention with grouped queries over a paged cache, BF16 or FP8, split over the context.

* queries `[batch, heads, head_dim]` bf16.
* key_cache, value_cache `[pages, page_tokens, kv_heads, head_dim]` bf16 or e4m3; an e4m3 number q
  stands for `q * scale`, key_scale and value_scale `[1]` f32 (1 for bf16).
* page_table `[batch, width]` int32, context_tokens `[batch]` int32, 0 for an empty request.
* output `[batch, heads, head_dim]` bf16: `softmax(q k / sqrt(head_dim)) v`, zero if empty.

One program attends the heads of one KV head to one split of one request's context, a block of
tokens at a time with a running softmax. FP8 numbers are multiplied as FP16, which holds every
e4m3 exactly and takes one instruction where BF16 takes three (queries beyond 65504 are clamped);
the scales multiply logits and output, outside the dots. Splits fill the GPU once (`split_plan`).

Error, relative to an element or its row's RMS: 2^-9 of the probabilities and of the output for
bf16, 2^-12 and 2^-9 for FP8; 1e-2 is asserted. Method: FlashDecoding's split softmax as in SGLang
0.5.14 decode_attention.py and vLLM triton_unified_attention.py (arXiv 2511.11581).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tonnage.kernels.ops.combine import combine
from tonnage.kernels.ops.launch import launch, processor_count
from tonnage.kernels.ops.split_plan import split_count
from tonnage.kernels.paged_inputs import E4M3
from tonnage.kernels.spec import Inputs, LaunchConfig, Outputs

LOG2_E = 1.4426950408889634
BLOCK_H = 16  # heads of one KV head a program attends: the fewest rows a matrix instruction takes
BLOCK_N = 64
# One program has 22 KB (FP8) to 39 KB (bf16) of loads in flight; an H200 needs 36 KB an SM to keep
# 4.8 TB/s busy for 1 us of latency, and two programs fit an SM.
PROGRAMS_PER_PROCESSOR = 2
SPILL_BYTES = 8
SPILL_REASON = (
    "Triton 3.9's ptxas settles for 80 registers and keeps two numbers of the epilogue in local"
    " memory, written before the loop and read after it; Triton 3.6 none"
)


@triton.jit
def token_pages(page_row, start, end, PAGE_TOKENS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the page of a block of tokens, int64, one for all if it can be, and each position.

    Tokens at and beyond `end` stand for the last one before it: that is loaded again, without a
    mask, and given no weight, so that no load needs a predicate. A block may begin beyond `end`;
    without any token, page 0 is named.
    """
    last = tl.maximum(end - 1, 0)
    token = tl.minimum(start + tl.arange(0, BLOCK_N), last)
    paged = tl.minimum(start, last) if PAGE_TOKENS % BLOCK_N == 0 else token
    page = tl.load(page_row + paged // PAGE_TOKENS, mask=paged < end, other=0)
    return page.to(tl.int64), token % PAGE_TOKENS


@triton.jit
def rows_at(cache, first, PAGE_TOKENS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return where a block's pages begin: one pointer, or a column of them."""
    if PAGE_TOKENS % BLOCK_N == 0:
        return cache + first
    else:
        return (cache + first)[:, None]


@triton.jit
def split_range(tokens, split, splits, BLOCK_N: tl.constexpr):
    """Return the first and the end token of a split: whole blocks, evenly dealt."""
    blocks = tl.cdiv(tl.cdiv(tokens, BLOCK_N), splits)
    start = split * blocks * BLOCK_N
    return start, tl.minimum(start + blocks * BLOCK_N, tokens)


@triton.jit
def gqa_decode_kernel(
    queries,
    key_cache,
    value_cache,
    key_scale,
    value_scale,
    page_table,
    context_tokens,
    partial,
    mass,
    output,
    splits,
    table_stride,
    logit_scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    SINGLE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend one block of heads (axis 1) of a request (axis 0) to one split (axis 2)."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    HEAD_BLOCKS: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    ROW: tl.constexpr = KV_HEADS * HEAD_DIM
    COMPUTE: tl.constexpr = tl.bfloat16 if key_cache.dtype.element_ty == tl.bfloat16 else tl.float16
    request = tl.program_id(0)
    kv_head = tl.program_id(1) // HEAD_BLOCKS
    split = tl.program_id(2)
    in_group = tl.program_id(1) % HEAD_BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
    head = kv_head * GROUP + in_group
    head_kept = in_group < GROUP
    # a request is a 64-bit offset of the base, what is within one takes 32: fewer registers
    queries += request.to(tl.int64) * (HEADS * HEAD_DIM)
    dim = tl.arange(0, HEAD_DIM)

    tokens = tl.load(context_tokens + request)
    start, end = split_range(tokens, split, splits, BLOCK_N)
    q = tl.load(
        queries + head[:, None] * HEAD_DIM + dim[None, :], mask=head_kept[:, None], other=0.0
    )
    if COMPUTE.is_fp16():
        q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
    to_log2 = logit_scale * tl.load(key_scale)

    largest = tl.full([BLOCK_H], -1.0e30, dtype=tl.float32)
    total = tl.zeros([BLOCK_H], dtype=tl.float32)
    result = tl.zeros([BLOCK_H, HEAD_DIM], dtype=tl.float32)
    page_row = page_table + request.to(tl.int64) * table_stride
    for block in range(start, end, BLOCK_N):
        page, position = token_pages(page_row, block, end, PAGE_TOKENS, BLOCK_N)
        kept = block + tl.arange(0, BLOCK_N) < end
        first = page * (PAGE_TOKENS * ROW) + kv_head * HEAD_DIM
        at = position[:, None] * ROW + dim[None, :]
        k = tl.load(rows_at(key_cache, first, PAGE_TOKENS, BLOCK_N) + at).to(COMPUTE)
        logits = tl.dot(q, tl.trans(k)) * to_log2
        logits = tl.where(kept[None, :], logits, -1.0e30)
        larger = tl.maximum(largest, tl.max(logits, axis=1))
        weights = tl.exp2(logits - larger[:, None])
        shrink = tl.exp2(largest - larger)
        total = total * shrink + tl.sum(weights, axis=1)
        v = tl.load(rows_at(value_cache, first, PAGE_TOKENS, BLOCK_N) + at).to(COMPUTE)
        result = tl.dot(weights.to(COMPUTE), v, result * shrink[:, None])
        largest = larger

    result = result * (tl.load(value_scale) / tl.maximum(total, 1.0e-30))[:, None]
    at = head[:, None] * HEAD_DIM + dim[None, :]
    if SINGLE:
        output += request.to(tl.int64) * (HEADS * HEAD_DIM)
        tl.store(output + at, result.to(output.dtype.element_ty), mask=head_kept[:, None])
    else:
        mass += request.to(tl.int64) * (HEADS * splits)
        partial += request.to(tl.int64) * (HEADS * splits * HEAD_DIM)
        at_split = head * splits + split
        empty = start >= end
        log_mass = tl.where(empty, -1.0e30, largest + tl.log2(tl.maximum(total, 1.0e-30)))
        tl.store(mass + at_split, log_mass, mask=head_kept)
        if start < end:
            to_partial = partial + at_split[:, None] * HEAD_DIM + dim[None, :]
            tl.store(to_partial, result, mask=head_kept[:, None])


def config(
    heads: int, kv_heads: int, head_dim: int, page_tokens: int, fp8: bool, single: bool
) -> LaunchConfig:
    """Return how that shape is attended."""
    cache = "*fp8e4nv" if fp8 else "*bf16"
    pointers = {
        "queries": "*bf16",
        "key_cache": cache,
        "value_cache": cache,
        "key_scale": "*fp32",
        "value_scale": "*fp32",
        "page_table": "*i32",
        "context_tokens": "*i32",
        "partial": "*fp32",
        "mass": "*fp32",
        "output": "*bf16",
    }
    spills = single and not fp8 and page_tokens % BLOCK_N != 0
    return LaunchConfig(
        kernel="gqa_decode_kernel",
        name=f"{heads}/{kv_heads} heads, page {page_tokens}{', one split' if single else ''}",
        signature={**pointers, "splits": "i32", "table_stride": "i32", "logit_scale": "fp32"},
        constants={
            "HEADS": heads,
            "KV_HEADS": kv_heads,
            "HEAD_DIM": head_dim,
            "PAGE_TOKENS": page_tokens,
            "SINGLE": single,
            "BLOCK_H": BLOCK_H,
            "BLOCK_N": BLOCK_N,
        },
        num_warps=4,
        num_stages=3,
        aligned=tuple(pointers),
        instruction={90: "mma.sync", 100: "mma.sync"},
        stack_bytes_max=SPILL_BYTES if spills else 0,
        exception=SPILL_REASON if spills else "",
    )


BF16_CONFIGS, FP8_CONFIGS = (
    tuple(
        config(heads, kv_heads, 128, page_tokens, fp8, single)
        for heads, kv_heads in ((32, 8), (8, 1))
        for page_tokens in (16, 64)
        for single in (False, True)
    )
    for fp8 in (False, True)
)


def gqa_decode(inputs: Inputs, splits: int | None = None) -> torch.Tensor:
    """Attend in one launch, or in two where the context is split."""
    queries, key_cache = inputs["queries"], inputs["key_cache"]
    batch, heads, head_dim = queries.shape
    page_tokens, kv_heads = key_cache.shape[1:3]
    fp8 = key_cache.dtype == E4M3
    head_blocks = kv_heads * triton.cdiv(heads // kv_heads, BLOCK_H)
    if splits is None:
        slots = PROGRAMS_PER_PROCESSOR * processor_count(queries.device)
        splits = split_count(batch * head_blocks, inputs["context_tokens_max"], slots)
    output = torch.empty_like(queries)
    partial = queries.new_empty((batch, heads, splits, head_dim), dtype=torch.float32)
    mass = queries.new_empty((batch, heads, splits), dtype=torch.float32)
    chosen = config(heads, kv_heads, head_dim, page_tokens, fp8, splits == 1)
    launch(
        gqa_decode_kernel,
        (batch, head_blocks, splits),
        chosen,
        **{name: inputs[name] for name in chosen.signature if name in inputs},
        partial=partial,
        mass=mass,
        output=output,
        splits=splits,
        table_stride=inputs["page_table"].stride(0),
        logit_scale=head_dim**-0.5 * LOG2_E,
    )
    if splits > 1:
        combine(partial, mass, output)
    return output


def run(inputs: Inputs) -> Outputs:
    """Attend with the splits that occupancy asks for."""
    return {"output": gqa_decode(inputs)}
