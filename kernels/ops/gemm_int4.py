"""W4A16 GEMM: BF16 activations by INT4 weights with a scale per group of K.

`out[m, n] = x[m, k] @ ((q - zero) * scale)[n, k].T`, f32 sums, BF16 out.

Nibbles become BF16 by one OR into the mantissa of 128 and one subtraction, exact for 0..15. The
group's scale multiplies the f32 partial sum, so the only rounding is that of the output: error <=
2^-8 of an element or, where f32 sums cancel, of its row's RMS. Up to `FUSED_M_MAX` rows it reads
INT4 and splits K to fill the GPU (arXiv 2402.00025: +124 % over one program a tile). Beyond,
where multiplying bounds the time, the weight is dequantised once to BF16 and the vendor's GEMM
does the rest: one more rounding of 2^-8 a weight, which leaves errors within 2^-6 of an element
or its row's RMS. The threshold is where a weight-only kernel was seen to lose its advantage
(Marlin against Machete, vLLM pull request 8046), not a measurement of this one.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tonnage.kernels.ops.dequantise_int4 import dequantise
from tonnage.kernels.ops.gemm_tiles import (
    BAND_ROWS,
    Tile,
    grouped_tile,
    pick_tile,
    splits_of_k,
    store_tile,
    workspace,
)
from tonnage.kernels.ops.int4_decode import block_groups, block_product
from tonnage.kernels.ops.launch import launch, processor_count
from tonnage.kernels.quantise.checks import require
from tonnage.kernels.quantise.int4 import Int4Weight, half_block
from tonnage.kernels.spec import Inputs, LaunchConfig, Outputs

FUSED_M_MAX = 128

# Wide in n: a step reads block_m * 256 bytes of x from the L2 for block_n * 64 bytes of weights.
NARROW_TILES = (
    Tile(16, 16, 128, 128, num_warps=4, num_stages=4, programs_per_sm=4),
    Tile(32, 32, 128, 128, num_warps=8, num_stages=4, programs_per_sm=3),
)
WIDE_TILE = Tile(None, 64, 128, 128, num_warps=8, num_stages=4, programs_per_sm=2)
# Halves with scales of their own need two accumulators, for which 128 rows have no registers.
SHARED_TILES = (
    Tile(64, 64, 128, 128, num_warps=8, num_stages=4, programs_per_sm=2),
    Tile(None, 128, 128, 128, num_warps=8, num_stages=3),
)


def tiles_for(group: int) -> tuple[Tile, ...]:
    """Return the tiles by M for a group size."""
    return NARROW_TILES + (SHARED_TILES if group >= 128 else (WIDE_TILE,))


@triton.jit
def int4_gemm_kernel(
    x_ptr, packed_ptr, scales_ptr, zeros_ptr, out_ptr, partials_ptr, arrivals_ptr,
    m, n, row_bytes, GROUP: tl.constexpr, HALF: tl.constexpr, BAND_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute one tile over one run of K. Grid: (tiles of `[m, n]`, splits of K).

    A weight row has row_bytes = k / 2, a multiple of 16 that the compiler could not tell from k.
    """
    k = 2 * row_bytes
    tile = tl.program_id(0)
    tile_m, tile_n = grouped_tile(tile, tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N), BAND_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    lanes = tl.arange(0, HALF)
    x_at = x_ptr + rows[:, None] * k + lanes[None, :]
    packed_at = packed_ptr + cols[None, :] * row_bytes + lanes[:, None]
    row_inside = (rows < m)[:, None]
    col_inside = (cols < n)[None, :]

    blocks = row_bytes // HALF
    run = tl.cdiv(blocks, tl.num_programs(1))
    first = tl.program_id(1) * run
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for block in range(first, tl.minimum(first + run, blocks)):
        groups = block_groups(scales_ptr, zeros_ptr, block, cols, n, GROUP, HALF)
        low_x = tl.load(x_at + block * (2 * HALF), mask=row_inside, other=0.0)
        high_x = tl.load(x_at + block * (2 * HALF) + HALF, mask=row_inside, other=0.0)
        packed = tl.load(packed_at + block * HALF, mask=col_inside, other=0)
        acc += block_product(low_x, high_x, packed, groups, GROUP, HALF)
    store_tile(acc, out_ptr, partials_ptr, arrivals_ptr, tile, rows, cols, m, n)


def config_for(tile: Tile, group: int, zeros: bool) -> LaunchConfig:
    """Return how the kernel is compiled for a tile and a format."""
    signature = {"x_ptr": "*bf16", "packed_ptr": "*u8", "scales_ptr": "*bf16"}
    signature |= {"zeros_ptr": "*u8"} if zeros else {}
    signature |= {"out_ptr": "*bf16", "partials_ptr": "*fp32", "arrivals_ptr": "*i32"}
    aligned = (*signature, "n", "row_bytes")
    constants: dict[str, Any] = {"GROUP": group, "HALF": half_block(group), "BAND_M": BAND_ROWS}
    constants |= {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
    return LaunchConfig(
        kernel="int4_gemm_kernel",
        name=f"gemm_int4_g{group}{'_zp' * zeros}_{tile.block_m}x{tile.block_n}",
        signature={**signature, "m": "i32", "n": "i32", "row_bytes": "i32"},
        constants=constants if zeros else {**constants, "zeros_ptr": None},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        aligned=aligned,
        instruction=tile.instruction,
    )


def _configs(group: int, zeros: bool = False) -> tuple[LaunchConfig, ...]:
    return tuple(config_for(tile, group, zeros) for tile in tiles_for(group))


G32_CONFIGS, G64_CONFIGS, G128_CONFIGS = (_configs(group) for group in (32, 64, 128))
G128_ZP_CONFIGS = _configs(128, zeros=True)


def gemm_int4(
    x: torch.Tensor, weight: Int4Weight, arrivals: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply BF16 `[m, k]` by an INT4 matrix `[n, k]`: BF16 `[m, n]`; arrivals: `workspace`."""
    check_activations(x, weight.k)
    if x.shape[0] > FUSED_M_MAX:
        return torch.mm(x, dequantise(weight).mT)
    return gemm_int4_fused(x, weight, arrivals)


def check_activations(x: torch.Tensor, k: int) -> None:
    """Refuse activations that the kernels cannot read."""
    require(x.shape[1] == k, f"x has k = {x.shape[1]}, the INT4 weight has {k}")
    require(
        x.dtype == torch.bfloat16 and x.is_contiguous(),
        f"x must be contiguous bfloat16 for INT4 weights, not {x.dtype}",
    )


def gemm_int4_fused(
    x: torch.Tensor, weight: Int4Weight, arrivals: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply without dequantising the weight, for any m."""
    m, n, k = x.shape[0], weight.n, weight.k
    require(
        max(m * k, n * k // 2) < 2**31,
        f"m * k = {m * k} and n * k / 2 = {n * k // 2} must be below 2^31: offsets have 32 bits",
    )
    tile = pick_tile(tiles_for(weight.group), m)
    out = torch.empty((m, n), dtype=torch.bfloat16, device=x.device)
    tiles = tile.count(m, n)
    splits = splits_of_k(tile, m, n, k // (2 * weight.half), processor_count(x.device))
    joined = workspace(splits, tiles, out, arrivals)
    zeros = {} if weight.zeros is None else {"zeros_ptr": weight.zeros}
    launch(
        int4_gemm_kernel,
        (tiles, splits),
        config_for(tile, weight.group, bool(zeros)),
        x_ptr=x,
        packed_ptr=weight.packed,
        scales_ptr=weight.scales,
        out_ptr=out,
        **joined.arguments,
        m=m,
        n=n,
        row_bytes=k // 2,
        **zeros,
    )
    return out


def weight_of(inputs: Inputs) -> Int4Weight:
    """Return the packed weight that is among prepared inputs."""
    return Int4Weight(inputs["packed"], inputs["packed_scales"], inputs.get("packed_zeros"))


def run(inputs: Inputs) -> Outputs:
    """Run on prepared inputs."""
    return {"out": gemm_int4(inputs["x"], weight_of(inputs), inputs["arrivals"])}
