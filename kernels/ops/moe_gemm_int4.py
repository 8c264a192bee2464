"""Grouped W4A16 GEMM of a mixture of experts: every routed row by its own expert's INT4 matrix.

`out[row] = x[row // top_k] @ w[expert of row].T`, `row = token * top_k + choice`, BF16 `[rows,
n]`; with row weights f32 `[rows]` each row is multiplied by its own. x BF16 `[tokens, k]`, weight
a stack `[experts, n, k]` as `quantise.int4` packs it, symmetric. Decoding, scales and error are
those of `gemm_int4`'s kernel, routing that of `moe_gemm_fp8`; there is no dequantise-once path,
as a layer's experts in BF16 would take four times the memory.
"""

from __future__ import annotations

from math import ceil
from typing import Any

import torch
import triton
import triton.language as tl

from tonnage.kernels.ops.gemm_int4 import check_activations, tiles_for, weight_of
from tonnage.kernels.ops.gemm_int4_reference import pack, packed_tensors
from tonnage.kernels.ops.gemm_tiles import BAND_ROWS, Tile, grouped_tile, pick_tile, tile_of_rows
from tonnage.kernels.ops.int4_decode import block_groups, block_product
from tonnage.kernels.ops.launch import launch
from tonnage.kernels.ops.moe_routing import Routing, routing_of, with_routing
from tonnage.kernels.ops.moe_tiles import block_rows, store_rows
from tonnage.kernels.quantise.checks import require
from tonnage.kernels.quantise.int4 import Int4Weight, half_block
from tonnage.kernels.spec import Inputs, LaunchConfig, Outputs

GROUPS = (32, 128)  # shipped; Kimi K2's experts are in groups of 32


@triton.jit
def moe_int4_kernel(
    x_ptr, packed_ptr, scales_ptr, row_weights_ptr, out_ptr,
    sorted_rows_ptr, block_experts_ptr, used_blocks_ptr, tokens, top_k, blocks, n, row_bytes,
    GROUP: tl.constexpr, HALF: tl.constexpr, BAND_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute one tile of columns of one block of rows. Grid: (blocks * tiles of n,)."""
    k = 2 * row_bytes
    block, tile_n = grouped_tile(tl.program_id(0), blocks, tl.cdiv(n, BLOCK_N), BAND_M)
    if block >= tl.load(used_blocks_ptr):
        return
    expert = tl.load(block_experts_ptr + block).to(tl.int64)
    rows = block_rows(sorted_rows_ptr, block, BLOCK_M)
    token = rows // top_k
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    lanes = tl.arange(0, HALF)
    x_at = x_ptr + token.to(tl.int64)[:, None] * k + lanes[None, :]
    packed_at = packed_ptr + expert * n * row_bytes + cols[None, :] * row_bytes + lanes[:, None]
    scales_ptr += expert * n * (k // GROUP)
    token_inside = (token < tokens)[:, None]
    col_inside = (cols < n)[None, :]

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(row_bytes // HALF):
        groups = block_groups(scales_ptr, None, step, cols, n, GROUP, HALF)
        low_x = tl.load(x_at + step * (2 * HALF), mask=token_inside, other=0.0)
        high_x = tl.load(x_at + step * (2 * HALF) + HALF, mask=token_inside, other=0.0)
        packed = tl.load(packed_at + step * HALF, mask=col_inside, other=0)
        acc += block_product(low_x, high_x, packed, groups, GROUP, HALF)
    store_rows(acc, out_ptr, row_weights_ptr, rows, cols, tokens * top_k, n)


def config_for(tile: Tile, group: int, weighted: bool) -> LaunchConfig:
    """Return how the kernel is compiled for a tile and a group size."""
    pointers = {"x_ptr": "*bf16", "packed_ptr": "*u8", "scales_ptr": "*bf16", "out_ptr": "*bf16"}
    pointers |= {"row_weights_ptr": "*fp32"} if weighted else {}
    names = ("sorted_rows_ptr", "block_experts_ptr", "used_blocks_ptr")
    pointers |= dict.fromkeys(names, "*i32")
    sizes = dict.fromkeys(("tokens", "top_k", "blocks", "n", "row_bytes"), "i32")
    constants: dict[str, Any] = {"GROUP": group, "HALF": half_block(group), "BAND_M": BAND_ROWS}
    constants |= {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
    return LaunchConfig(
        kernel="moe_int4_kernel",
        name=f"moe_int4_g{group}_{tile.block_m}x{tile.block_n}{'_weighted' * weighted}",
        signature={**pointers, **sizes},
        constants=constants if weighted else {**constants, "row_weights_ptr": None},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        aligned=(*pointers, "n", "row_bytes"),
        instruction=tile.instruction,
    )


G32_CONFIGS, G128_CONFIGS = (
    tuple(
        config_for(tile, group, weighted) for weighted in (False, True) for tile in tiles_for(group)
    )
    for group in GROUPS
)


def tile_for(rows: int, experts: int, group: int) -> Tile:
    """Return the tile for the mean rows of an expert; route with its `block_m`."""
    return pick_tile(tiles_for(group), ceil(rows / experts))


def moe_gemm_int4(
    x: torch.Tensor,
    weight: Int4Weight,
    routing: Routing,
    row_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply every routed row by its expert's matrix: BF16 `[rows, n]`."""
    check_activations(x, weight.k)
    require(weight.zeros is None, "INT4 experts must be symmetric")
    require(weight.packed.dim() == 3, "the INT4 weight must be [experts, n, k]")
    routing.check(x.shape[0], row_weights)
    tile = tile_of_rows(tiles_for(weight.group), routing.block_m)
    weights = {} if row_weights is None else {"row_weights_ptr": row_weights}
    out = torch.empty((routing.rows, weight.n), dtype=torch.bfloat16, device=x.device)
    launch(
        moe_int4_kernel,
        (routing.blocks * triton.cdiv(weight.n, tile.block_n),),
        config_for(tile, weight.group, bool(weights)),
        x_ptr=x,
        packed_ptr=weight.packed,
        scales_ptr=weight.scales,
        out_ptr=out,
        **routing.arguments(x.shape[0]),
        n=weight.n,
        row_bytes=weight.k // 2,
        **weights,
    )
    return out


def prepare(inputs: Inputs) -> Inputs:
    """Pack the weight and add the routing, which both GEMMs of a layer share."""
    experts, group = (
        inputs["levels"].shape[0],
        inputs["levels"].shape[-1] // inputs["scales"].shape[-1],
    )
    tile = tile_for(inputs["expert_ids"].numel(), experts, group)
    return with_routing({**inputs, **packed_tensors(pack(inputs))}, experts, tile.block_m)


def run(inputs: Inputs) -> Outputs:
    """Run on prepared inputs."""
    return {"out": moe_gemm_int4(inputs["x"], weight_of(inputs), routing_of(inputs))}
