"""Grouped FP8 GEMM of a mixture of experts: every routed row by its own expert's matrix.

`out[row] = x[row // top_k] @ w[expert of row].T`, `row = token * top_k + choice`, BF16 `[rows,
n]`; with row weights f32 `[rows]` each row is multiplied by its own. x e4m3 `[tokens, k]`, w e4m3
`[experts, n, k]`; scales and error as in `gemm_fp8`, per expert:

| scales | x_scale f32 | w_scale f32 |
|---|---|---|
| row | `[tokens]` | `[experts, n]` |
| block | `[k / 128, tokens]` | `[experts, ceil(n / 128), k / 128]` |

One launch serves any routing: the grid covers the most blocks that so many rows can need, and
blocks that this routing leaves unused return at once. Consecutive programs take the same columns
of a band of blocks, so where the routing is skewed they read the same columns of one expert.
"""

from __future__ import annotations

from functools import partial
from math import ceil
from typing import Any

import torch
import triton
import triton.language as tl

from tonnage.kernels.ops.fp8_scales import Fp8Operands, block_scales, whole_scales
from tonnage.kernels.ops.gemm_tiles import BAND_ROWS, Tile, grouped_tile, pick_tile, tile_of_rows
from tonnage.kernels.ops.launch import launch
from tonnage.kernels.ops.moe_routing import Routing, routing_of, with_routing
from tonnage.kernels.ops.moe_tiles import block_rows, store_rows
from tonnage.kernels.quantise.checks import require
from tonnage.kernels.spec import Inputs, LaunchConfig, Outputs

SCALES = ("row", "block")

# By the mean rows of an expert.
TILES = (
    Tile(16, 16, 64, 128, num_warps=4, num_stages=5),
    Tile(32, 32, 128, 128, num_warps=4, num_stages=4),
    Tile(64, 64, 128, 128, num_warps=4, num_stages=4),
    Tile(None, 128, 128, 128, num_warps=8, num_stages=4),
)


@triton.jit
def moe_fp8_kernel(
    x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, row_weights_ptr, out_ptr,
    sorted_rows_ptr, block_experts_ptr, used_blocks_ptr, tokens, top_k, blocks, n, k,
    SCALES: tl.constexpr, BAND_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute one tile of columns of one block of rows. Grid: (blocks * tiles of n,)."""
    block, tile_n = grouped_tile(tl.program_id(0), blocks, tl.cdiv(n, BLOCK_N), BAND_M)
    if block >= tl.load(used_blocks_ptr):
        return
    expert = tl.load(block_experts_ptr + block).to(tl.int64)
    rows = block_rows(sorted_rows_ptr, block, BLOCK_M)
    token = rows // top_k
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    lanes = tl.arange(0, BLOCK_K)
    x_at = x_ptr + token.to(tl.int64)[:, None] * k + lanes[None, :]
    w_at = w_ptr + expert * n * k + cols[None, :] * k + lanes[:, None]
    token_inside = (token < tokens)[:, None]
    col_inside = (cols < n)[None, :]
    steps = tl.cdiv(k, BLOCK_K)
    if SCALES == "block":
        w_scale_ptr += expert * tl.cdiv(n, 128) * steps
    else:
        w_scale_ptr += expert * n

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(steps):
        if SCALES == "block":
            scale = block_scales(
                x_scale_ptr, w_scale_ptr, step, token, tile_n * BLOCK_N, tokens, steps
            )
        left = k - step * BLOCK_K
        x = tl.load(x_at + step * BLOCK_K, mask=token_inside & (lanes < left)[None, :], other=0.0)
        w = tl.load(w_at + step * BLOCK_K, mask=col_inside & (lanes < left)[:, None], other=0.0)
        if SCALES == "block":
            acc += tl.dot(x, w) * scale
        else:
            acc = tl.dot(x, w, acc)
    acc = whole_scales(acc, x_scale_ptr, w_scale_ptr, token, cols, tokens, n, SCALES)
    store_rows(acc, out_ptr, row_weights_ptr, rows, cols, tokens * top_k, n)


def config_for(tile: Tile, scales: str, weighted: bool) -> LaunchConfig:
    """Return how the kernel is compiled for a tile and a kind of scales."""
    pointers = {"x_ptr": "*fp8e4nv", "w_ptr": "*fp8e4nv", "x_scale_ptr": "*fp32"}
    pointers |= {"w_scale_ptr": "*fp32", "out_ptr": "*bf16"}
    pointers |= {"row_weights_ptr": "*fp32"} if weighted else {}
    names = ("sorted_rows_ptr", "block_experts_ptr", "used_blocks_ptr")
    pointers |= dict.fromkeys(names, "*i32")
    sizes = dict.fromkeys(("tokens", "top_k", "blocks", "n", "k"), "i32")
    constants: dict[str, Any] = {"SCALES": scales, "BAND_M": BAND_ROWS, **tile.constants}
    return LaunchConfig(
        kernel="moe_fp8_kernel",
        name=f"moe_fp8_{scales}_{tile.label}{'_weighted' * weighted}",
        signature={**pointers, **sizes},
        constants=constants if weighted else {**constants, "row_weights_ptr": None},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        aligned=(*pointers, "n", "k"),
        instruction=tile.instruction,
    )


ROW_CONFIGS, BLOCK_CONFIGS = (
    tuple(config_for(tile, scales, weighted) for weighted in (False, True) for tile in TILES)
    for scales in SCALES
)


def tile_for(rows: int, experts: int) -> Tile:
    """Return the tile for the mean rows of an expert; route with its `block_m`."""
    return pick_tile(TILES, ceil(rows / experts))


def moe_gemm_fp8(
    operands: Fp8Operands, routing: Routing, row_weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply every routed row by its expert's matrix: BF16 `[rows, n]`."""
    operands.check()
    x, w = operands.x, operands.w
    require(operands.scales in SCALES, f"experts have row or block scales, not {operands.scales}")
    require(w.dim() == 3, "w must be [experts, n, k]")
    routing.check(x.shape[0], row_weights)
    tile = tile_of_rows(TILES, routing.block_m)
    weights = {} if row_weights is None else {"row_weights_ptr": row_weights}
    out = torch.empty((routing.rows, operands.n), dtype=torch.bfloat16, device=x.device)
    launch(
        moe_fp8_kernel,
        (routing.blocks * triton.cdiv(operands.n, tile.block_n),),
        config_for(tile, operands.scales, bool(weights)),
        x_ptr=x,
        w_ptr=w,
        x_scale_ptr=operands.x_scale,
        w_scale_ptr=operands.w_scale,
        out_ptr=out,
        **routing.arguments(x.shape[0]),
        n=operands.n,
        k=operands.k,
        **weights,
    )
    return out


def prepare(inputs: Inputs) -> Inputs:
    """Add the routing: both GEMMs of a layer share it, so it is not timed with one of them."""
    ids, experts = inputs["expert_ids"], inputs["w"].shape[0]
    return with_routing(inputs, experts, tile_for(ids.numel(), experts).block_m)


def _run(inputs: Inputs, scales: str) -> Outputs:
    return {"out": moe_gemm_fp8(Fp8Operands.of(inputs, scales), routing_of(inputs))}


run_row = partial(_run, scales="row")
run_block = partial(_run, scales="block")
