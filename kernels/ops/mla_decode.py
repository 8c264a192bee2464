"""Decode attention over a paged cache of MLA latents, BF16 or FP8, split over the context.

* queries `[batch, heads, 576]` bf16: 512 already multiplied into the latent's space, 64 of rope.
* cache `[pages, page_tokens, 576]` bf16 or e4m3: 512 of latent, 64 of rope key; an e4m3 number q
  stands for `q * scale`, cache_scale `[1]` f32 (1 for bf16).
* page_table `[batch, width]` int32, context_tokens `[batch]` int32, 0 for an empty request.
* output `[batch, heads, 512]` bf16: `softmax(q k * logit_scale) latent`, zero if empty. The logit
  scale belongs to the model (`(nope_dim + rope_dim) ** -0.5`, times its rope scaling).

One program attends a block of heads to one split of one request's context. A block of latents is
loaded once: transposed it is the keys, as it is the values (vLLM pull request 33529: +53 %). FP8
numbers are multiplied as FP16, which holds every e4m3 exactly (queries beyond 65504 are clamped);
the scale multiplies logits and output, outside the dots. The next block's FP8 rows are loaded into
registers while a block is attended: Triton pipelines a load by itself only if its users agree on
one layout, as BF16's do, and otherwise loads late and decodes twice (seen in its IR).

Error, relative to an element or its row's RMS: 2^-9 of the probabilities and of the output for
bf16, 2^-12 and 2^-9 for FP8; 1e-2 is asserted. Method: SGLang 0.5.14 decode_attention.py,
FlashMLA docs/20250422 (absorbed queries, one latent for all heads).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tonnage.kernels.ops.combine import combine
from tonnage.kernels.ops.gqa_decode import LOG2_E, rows_at, split_range, token_pages
from tonnage.kernels.ops.launch import launch, processor_count
from tonnage.kernels.ops.mla_decode_reference import LATENT, ROPE
from tonnage.kernels.ops.split_plan import split_count
from tonnage.kernels.paged_inputs import E4M3
from tonnage.kernels.spec import Inputs, LaunchConfig, Outputs


@triton.jit
def _query_part(
    queries, head, kept, first, COMPUTE: tl.constexpr, ROW: tl.constexpr, DIM: tl.constexpr
):
    at = head[:, None] * ROW + first + tl.arange(0, DIM)[None, :]
    q = tl.load(queries + at, mask=kept[:, None], other=0.0)
    if COMPUTE.is_fp16():
        q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
    return q


@triton.jit
def _load_rows(
    cache,
    page_row,
    block,
    end,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return the latents and rope keys of a block of tokens as they are stored."""
    ROW: tl.constexpr = LATENT + ROPE
    page, position = token_pages(page_row, block, end, PAGE_TOKENS, BLOCK_N)
    first = rows_at(cache, page * (PAGE_TOKENS * ROW), PAGE_TOKENS, BLOCK_N)
    at = first + position[:, None] * ROW
    return (
        tl.load(at + tl.arange(0, LATENT)[None, :]),
        tl.load(at + LATENT + tl.arange(0, ROPE)[None, :]),
    )


@triton.jit
def mla_decode_kernel(
    queries,
    cache,
    cache_scale,
    page_table,
    context_tokens,
    partial,
    mass,
    output,
    splits,
    table_stride,
    logit_scale,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    SINGLE: tl.constexpr,
    PREFETCH: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend one block of heads (axis 1) of a request (axis 0) to one split (axis 2)."""
    COMPUTE: tl.constexpr = tl.bfloat16 if cache.dtype.element_ty == tl.bfloat16 else tl.float16
    ROW: tl.constexpr = LATENT + ROPE
    request = tl.program_id(0)
    split = tl.program_id(2)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    head_kept = head < HEADS
    # a request is a 64-bit offset of the base, what is within one takes 32: fewer registers
    queries += request.to(tl.int64) * (HEADS * ROW)

    tokens = tl.load(context_tokens + request)
    start, end = split_range(tokens, split, splits, BLOCK_N)
    q = _query_part(queries, head, head_kept, 0, COMPUTE, ROW, LATENT)
    q_rope = _query_part(queries, head, head_kept, LATENT, COMPUTE, ROW, ROPE)
    scale = tl.load(cache_scale)
    to_log2 = logit_scale * scale

    largest = tl.full([BLOCK_H], -1.0e30, dtype=tl.float32)
    total = tl.zeros([BLOCK_H], dtype=tl.float32)
    result = tl.zeros([BLOCK_H, LATENT], dtype=tl.float32)
    page_row = page_table + request.to(tl.int64) * table_stride
    dim = tl.arange(0, LATENT)[None, :]
    if PREFETCH:
        rows, rope_rows = _load_rows(
            cache, page_row, start, end, LATENT, ROPE, PAGE_TOKENS, BLOCK_N
        )  # fmt: skip
    for block in range(start, end, BLOCK_N):
        kept = block + tl.arange(0, BLOCK_N) < end
        if PREFETCH:
            latent = rows.to(COMPUTE)
            k_rope = rope_rows.to(COMPUTE)
            rows, rope_rows = _load_rows(
                cache, page_row, block + BLOCK_N, end, LATENT, ROPE, PAGE_TOKENS, BLOCK_N
            )
        else:
            latent, k_rope = _load_rows(
                cache, page_row, block, end, LATENT, ROPE, PAGE_TOKENS, BLOCK_N
            )
        logits = tl.dot(q, tl.trans(latent))
        logits = tl.dot(q_rope, tl.trans(k_rope), logits) * to_log2
        logits = tl.where(kept[None, :], logits, -1.0e30)
        larger = tl.maximum(largest, tl.max(logits, axis=1))
        weights = tl.exp2(logits - larger[:, None])
        shrink = tl.exp2(largest - larger)
        total = total * shrink + tl.sum(weights, axis=1)
        result = tl.dot(weights.to(COMPUTE), latent, result * shrink[:, None])
        largest = larger

    result = result * (scale / tl.maximum(total, 1.0e-30))[:, None]
    if SINGLE:
        to = output + request.to(tl.int64) * (HEADS * LATENT) + head[:, None] * LATENT + dim
        tl.store(to, result.to(output.dtype.element_ty), mask=head_kept[:, None])
    else:
        at_split = head * splits + split
        mass += request.to(tl.int64) * (HEADS * splits)
        partial += request.to(tl.int64) * (HEADS * splits * LATENT)
        empty = start >= end
        log_mass = tl.where(empty, -1.0e30, largest + tl.log2(tl.maximum(total, 1.0e-30)))
        tl.store(mass + at_split, log_mass, mask=head_kept)
        if start < end:
            to_partial = partial + at_split[:, None] * LATENT + dim
            tl.store(to_partial, result, mask=head_kept[:, None])


# Tokens a block, warps and stages by (FP8, heads a program). 64 heads of FP8 would spill in every
# shape tried, as the decoded block must pass through registers; 32 do not.
TILES = {
    (False, 16): (32, 4, 2),
    (False, 32): (32, 8, 2),
    (False, 64): (32, 8, 2),
    (True, 16): (64, 8, 1),
    (True, 32): (32, 8, 1),
}


def heads_per_program(heads: int, fp8: bool) -> int:
    """Return the block of heads that share a loaded latent."""
    if heads <= 16:
        return 16
    return 32 if fp8 or heads <= 32 else 64


def config(heads: int, page_tokens: int, fp8: bool, single: bool) -> LaunchConfig:
    """Return how that shape is attended."""
    pointers = {
        "queries": "*bf16",
        "cache": "*fp8e4nv" if fp8 else "*bf16",
        "cache_scale": "*fp32",
        "page_table": "*i32",
        "context_tokens": "*i32",
        "partial": "*fp32",
        "mass": "*fp32",
        "output": "*bf16",
    }
    block_h = heads_per_program(heads, fp8)
    block_n, num_warps, num_stages = TILES[fp8, block_h]
    return LaunchConfig(
        kernel="mla_decode_kernel",
        name=f"{heads} heads, page {page_tokens}{', one split' if single else ''}",
        signature={**pointers, "splits": "i32", "table_stride": "i32", "logit_scale": "fp32"},
        constants={
            "HEADS": heads,
            "LATENT": LATENT,
            "ROPE": ROPE,
            "PAGE_TOKENS": page_tokens,
            "SINGLE": single,
            "PREFETCH": fp8,
            "BLOCK_H": block_h,
            "BLOCK_N": block_n,
        },
        num_warps=num_warps,
        num_stages=num_stages,
        aligned=tuple(pointers),
        instruction={
            90: "wgmma" if block_h >= 64 else "mma.sync",
            100: "tcgen05.mma" if block_h >= 64 else "mma.sync",
        },
        stack_bytes_max=SPILL_BYTES if block_h >= 64 else 0,
        exception=SPILL_REASON if block_h >= 64 else "",
    )


SPILL_BYTES = 56
SPILL_REASON = (
    "Triton 3.9's ptxas keeps up to 14 numbers of the epilogue in local memory, written before the"
    " loop and read after it; Triton 3.6 none"
)
BF16_CONFIGS, FP8_CONFIGS = (
    tuple(config(heads, 64, fp8, single) for heads in (16, 32, 128) for single in (False, True))
    for fp8 in (False, True)
)


def mla_decode(inputs: Inputs, splits: int | None = None) -> torch.Tensor:
    """Attend in one launch, or in two where the context is split."""
    queries, cache = inputs["queries"], inputs["cache"]
    batch, heads, _ = queries.shape
    fp8 = cache.dtype == E4M3
    head_blocks = triton.cdiv(heads, heads_per_program(heads, fp8))
    if splits is None:
        processors = processor_count(queries.device)  # a program fills one with its registers
        splits = split_count(batch * head_blocks, inputs["context_tokens_max"], processors)
    output: torch.Tensor = queries.new_empty((batch, heads, LATENT))
    partial = queries.new_empty((batch, heads, splits, LATENT), dtype=torch.float32)
    mass = queries.new_empty((batch, heads, splits), dtype=torch.float32)
    chosen = config(heads, cache.shape[1], fp8, splits == 1)
    launch(
        mla_decode_kernel,
        (batch, head_blocks, splits),
        chosen,
        **{name: inputs[name] for name in chosen.signature if name in inputs}
        | {"logit_scale": inputs["logit_scale"] * LOG2_E},
        partial=partial,
        mass=mass,
        output=output,
        splits=splits,
        table_stride=inputs["page_table"].stride(0),
    )
    if splits > 1:
        combine(partial, mass, output)
    return output


def run(inputs: Inputs) -> Outputs:
    """Attend with the splits that occupancy asks for."""
    return {"output": mla_decode(inputs)}
