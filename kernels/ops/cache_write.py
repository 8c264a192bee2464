"""Quantise new keys and values to FP8 and write them to their slots of a paged cache.

Slots `[tokens]` int64 are `page * page_tokens + position`; a negative one is not written (the
padding of a captured batch). Codes are e4m3 of `x / scale`, divided in f32, rounded to nearest
even and saturated at 448: byte for byte the reference's. Every row is read and written once.

* GQA: keys, values `[tokens, kv_heads, head_dim]` bf16 to caches
  `[pages, page_tokens, kv_heads, head_dim]` e4m3, one f32 scale each.
* MLA: latent `[tokens, 512]` and rope key `[tokens, 64]` bf16 to rows of 576 e4m3, one f32 scale.
* DSA: the same to rows of 656 bytes: 512 e4m3, 4 f32 scales of 128 each, 64 bf16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tonnage.kernels.ops.cache_write_reference import DSA_ROW_BYTES, LATENT, ROPE, TILE
from tonnage.kernels.ops.launch import launch
from tonnage.kernels.spec import Inputs, LaunchConfig, Outputs

WIDTH_MAX = 1024
BLOCK_TOKENS = 4
NARROW_TILE = 1024  # numbers: 128 bits a thread


@triton.jit
def _write_tile(
    source,
    cache,
    slots,
    scale,
    token_count,
    first_column,
    ROW_IN: tl.constexpr,
    ROW_OUT: tl.constexpr,
    COLUMN_OUT: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    slot = tl.load(slots + token, mask=token < token_count, other=-1)
    column = first_column + tl.arange(0, BLOCK_WIDTH)
    kept = (slot >= 0)[:, None]
    at = token[:, None].to(tl.int64) * ROW_IN + column[None, :]
    values = tl.load(source + at, mask=kept, other=0.0).to(tl.float32)
    codes = tl.div_rn(values, scale).to(cache.dtype.element_ty)
    tl.store(cache + slot[:, None] * ROW_OUT + COLUMN_OUT + column[None, :], codes, mask=kept)


@triton.jit
def gqa_write_kernel(
    keys,
    values,
    key_cache,
    value_cache,
    key_scale,
    value_scale,
    slots,
    token_count,
    ROW: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Write one block of columns of some tokens, keys on the first half of axis 2."""
    column = tl.program_id(1) * BLOCK_WIDTH
    if tl.program_id(2) == 0:
        scale = tl.load(key_scale)
        _write_tile(
            keys, key_cache, slots, scale, token_count, column,
            ROW, ROW, 0, BLOCK_TOKENS, BLOCK_WIDTH,
        )  # fmt: skip
    else:
        scale = tl.load(value_scale)
        _write_tile(
            values, value_cache, slots, scale, token_count, column,
            ROW, ROW, 0, BLOCK_TOKENS, BLOCK_WIDTH,
        )  # fmt: skip


@triton.jit
def mla_write_kernel(
    latents,
    rope_keys,
    cache,
    scale,
    slots,
    token_count,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Write whole rows of some tokens."""
    factor = tl.load(scale)
    _write_tile(
        latents, cache, slots, factor, token_count, 0,
        LATENT, LATENT + ROPE, 0, BLOCK_TOKENS, LATENT,
    )  # fmt: skip
    _write_tile(
        rope_keys, cache, slots, factor, token_count, 0,
        ROPE, LATENT + ROPE, LATENT, BLOCK_TOKENS, ROPE,
    )  # fmt: skip


@triton.jit
def _write_rope_keys(
    rope_keys, cache, token, slot, ROPE: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr
):
    kept = (slot >= 0)[:, None]
    column = tl.arange(0, ROPE)[None, :]
    values = tl.load(rope_keys + token[:, None].to(tl.int64) * ROPE + column, mask=kept, other=0.0)
    tl.store(cache + slot[:, None] * ROW + COLUMN + column, values, mask=kept)


@triton.jit
def dsa_write_kernel(
    latents,
    rope_keys,
    codes_cache,  # the cache's bytes as e4m3, as f32 and as bf16
    scales_cache,
    rope_cache,
    slots,
    token_count,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    TILE: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Write one tile of 128 numbers of some latents, or the rope keys: axis 1 says which."""
    part = tl.program_id(1)
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    slot = tl.load(slots + token, mask=token < token_count, other=-1)
    if part < LATENT // TILE:
        kept = slot >= 0
        column = part * TILE + tl.arange(0, TILE)[None, :]
        at = token[:, None].to(tl.int64) * LATENT + column
        values = tl.load(latents + at, mask=kept[:, None], other=0.0).to(tl.float32)
        largest = tl.max(tl.abs(values), axis=1)
        scale = tl.maximum(tl.div_rn(largest, 448.0), 1.1754943508222875e-38)
        codes = tl.div_rn(values, scale[:, None]).to(codes_cache.dtype.element_ty)
        tl.store(codes_cache + slot[:, None] * ROW_BYTES + column, codes, mask=kept[:, None])
        tl.store(scales_cache + slot * (ROW_BYTES // 4) + LATENT // 4 + part, scale, mask=kept)
    else:
        column_of_rope: tl.constexpr = (LATENT + LATENT // TILE * 4) // 2
        _write_rope_keys(
            rope_keys, rope_cache, token, slot, ROPE, ROW_BYTES // 2, column_of_rope
        )  # fmt: skip


def gqa_config(row: int) -> LaunchConfig:
    """Return how rows of `kv_heads * head_dim` numbers are written."""
    width = min(row & -row, WIDTH_MAX)
    block = max(BLOCK_TOKENS, NARROW_TILE // width)
    caches = dict.fromkeys(("key_cache", "value_cache"), "*fp8e4nv")
    scales = dict.fromkeys(("key_scale", "value_scale"), "*fp32")
    pointers = {"keys": "*bf16", "values": "*bf16", **caches, **scales, "slots": "*i64"}
    return LaunchConfig(
        kernel="gqa_write_kernel",
        name=f"row {row}",
        signature={**pointers, "token_count": "i32"},
        constants={"ROW": row, "BLOCK_TOKENS": block, "BLOCK_WIDTH": width},
        num_warps=4,
        num_stages=1,
        aligned=tuple(pointers),
        instruction={90: None, 100: None},
    )


def _mla_config(kernel: str, cache: dict[str, str], constants: dict[str, int]) -> LaunchConfig:
    pointers = {"latents": "*bf16", "rope_keys": "*bf16", **cache, "slots": "*i64"}
    return LaunchConfig(
        kernel=kernel,
        name="512 + 64",
        signature={**pointers, "token_count": "i32"},
        constants={"LATENT": LATENT, "ROPE": ROPE, **constants},
        num_warps=4,
        num_stages=1,
        aligned=tuple(pointers),
        instruction={90: None, 100: None},
    )


MLA_CONFIG = _mla_config(
    "mla_write_kernel", {"cache": "*fp8e4nv", "scale": "*fp32"}, {"BLOCK_TOKENS": BLOCK_TOKENS}
)
DSA_CONFIG = _mla_config(
    "dsa_write_kernel",
    {"codes_cache": "*fp8e4nv", "scales_cache": "*fp32", "rope_cache": "*bf16"},
    {"TILE": TILE, "ROW_BYTES": DSA_ROW_BYTES, "BLOCK_TOKENS": NARROW_TILE // TILE},
)
GQA_CONFIGS = (gqa_config(1024), gqa_config(128))
MLA_CONFIGS = (MLA_CONFIG,)
DSA_CONFIGS = (DSA_CONFIG,)


def run_gqa(inputs: Inputs) -> Outputs:
    """Write keys and values in one launch; return the caches written."""
    tokens, row = inputs["keys"].shape[0], inputs["keys"].shape[1:].numel()
    config = gqa_config(row)
    blocks = triton.cdiv(tokens, config.constants["BLOCK_TOKENS"])
    grid = (blocks, row // config.constants["BLOCK_WIDTH"], 2)
    launch(gqa_write_kernel, grid, config, **inputs, token_count=tokens)
    return {name: inputs[name] for name in ("key_cache", "value_cache")}


def run_mla(inputs: Inputs) -> Outputs:
    """Write latents and rope keys as rows of 576 codes; return the cache written."""
    tokens = len(inputs["slots"])
    grid = (triton.cdiv(tokens, BLOCK_TOKENS),)
    launch(mla_write_kernel, grid, MLA_CONFIG, **inputs, token_count=tokens)
    return {"cache": inputs["cache"]}


def run_dsa(inputs: Inputs) -> Outputs:
    """Write latents and rope keys as rows of 656 bytes; return the cache written."""
    cache, tokens = inputs["cache"], len(inputs["slots"])
    launch(
        dsa_write_kernel,
        (triton.cdiv(tokens, DSA_CONFIG.constants["BLOCK_TOKENS"]), LATENT // TILE + 1),
        DSA_CONFIG,
        latents=inputs["latents"],
        rope_keys=inputs["rope_keys"],
        codes_cache=cache.view(torch.float8_e4m3fn),
        scales_cache=cache.view(torch.float32),
        rope_cache=cache.view(torch.bfloat16),
        slots=inputs["slots"],
        token_count=tokens,
    )
    return {"cache": cache}
