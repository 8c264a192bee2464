"""Copy requests' tokens between paged caches, as a handoff does, bf16 to FP8 on the way or not.

source `[pages, page_tokens, row]` bf16 and target `[pages, page_tokens, row]` bf16 or e4m3, each
with its page table `[requests, width]` int32 and its own page size; tokens `[requests]` int32;
scale `[1]` f32, unused for a bf16 target. A row is one token's K, V (`kv_heads * head_dim`) or MLA
latent (576). Codes are those of `cache_write`, so a copy and a fresh write give the same bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tonnage.kernels.ops.launch import launch
from tonnage.kernels.paged_inputs import E4M3
from tonnage.kernels.spec import Inputs, LaunchConfig, Outputs

TILE_NUMBERS = 4096
WIDTH_MAX = 512


@triton.jit
def kv_copy_kernel(
    source,
    target,
    source_table,
    target_table,
    tokens,
    scale,
    source_table_stride,
    target_table_stride,
    ROW: tl.constexpr,
    SOURCE_PAGE: tl.constexpr,
    TARGET_PAGE: tl.constexpr,
    CONVERT: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Copy one block of columns (axis 2) of one block of tokens (axis 1) of a request (axis 0)."""
    request = tl.program_id(0)
    count = tl.load(tokens + request)
    token = tl.program_id(1) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    if tl.program_id(1) * BLOCK_TOKENS >= count:
        return
    kept = token < count
    page_in = source_table + request * source_table_stride + token // SOURCE_PAGE
    page_out = target_table + request * target_table_stride + token // TARGET_PAGE
    at = tl.load(page_in, mask=kept, other=0).to(tl.int64) * SOURCE_PAGE + token % SOURCE_PAGE
    to = tl.load(page_out, mask=kept, other=0).to(tl.int64) * TARGET_PAGE + token % TARGET_PAGE
    column = (tl.program_id(2) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH))[None, :]
    mask = kept[:, None]
    values = tl.load(source + at[:, None] * ROW + column, mask=mask, other=0.0)
    if CONVERT:
        values = tl.div_rn(values.to(tl.float32), tl.load(scale)).to(target.dtype.element_ty)
    tl.store(target + to[:, None] * ROW + column, values, mask=mask)


def config(row: int, source_page: int, target_page: int, convert: bool) -> LaunchConfig:
    """Return how rows of that many numbers are copied."""
    width = min(row & -row, WIDTH_MAX)
    pointers = {
        "source": "*bf16",
        "target": "*fp8e4nv" if convert else "*bf16",
        "source_table": "*i32",
        "target_table": "*i32",
        "tokens": "*i32",
        "scale": "*fp32",
    }
    return LaunchConfig(
        kernel="kv_copy_kernel",
        name=f"row {row}, to {'fp8' if convert else 'bf16'}",
        signature={**pointers, "source_table_stride": "i32", "target_table_stride": "i32"},
        constants={
            "ROW": row,
            "SOURCE_PAGE": source_page,
            "TARGET_PAGE": target_page,
            "CONVERT": convert,
            "BLOCK_TOKENS": TILE_NUMBERS // width,
            "BLOCK_WIDTH": width,
        },
        num_warps=4,
        num_stages=1,
        aligned=tuple(pointers),
        instruction={90: None, 100: None},
    )


FP8_CONFIGS, BF16_CONFIGS = (
    tuple(config(row, 64, 64, convert) for row in (1024, 576)) for convert in (True, False)
)


def run(inputs: Inputs) -> Outputs:
    """Copy in one launch; return the cache written."""
    source, target = inputs["source"], inputs["target"]
    row = source.shape[-1]
    chosen = config(row, source.shape[1], target.shape[1], target.dtype == E4M3)
    blocks = triton.cdiv(inputs["tokens_max"], chosen.constants["BLOCK_TOKENS"])
    grid = (len(inputs["tokens"]), blocks, row // chosen.constants["BLOCK_WIDTH"])
    launch(
        kv_copy_kernel,
        grid,
        chosen,
        **{name: inputs[name] for name in chosen.signature if name in inputs},
        source_table_stride=inputs["source_table"].stride(0),
        target_table_stride=inputs["target_table"].stride(0),
    )
    return {"target": target}
