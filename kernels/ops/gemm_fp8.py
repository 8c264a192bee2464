"""FP8 e4m3 GEMM with scales per tensor, per row, or per 128 of K.

`out[m, n] = (x * x_scale)[m, k] @ (w * w_scale)[n, k].T`, both operands with K contiguous, BF16
out.

| scales | x_scale f32 | w_scale f32 |
|---|---|---|
| tensor | `[1]` | `[1]` |
| row | `[m]` | `[n]` |
| block | `[k / 128, m]` | `[ceil(n / 128), k / 128]` |

Products of e4m3 are exact in f32. Block scales multiply the sum of each 128 of K and add it in
f32, which also bounds the error of Hopper's tensor cores, whose FP8 sums keep about 14 bits
(DeepSeek-V3 report, section 3.3.2): error <= 2^-8 of an element or its row's RMS. Tensor and row
scales multiply once at the end, and sums stay in the tensor cores throughout, as in CUTLASS's
"fast accumulation" kernels: where those keep 14 bits, add up to 2^-13 of the largest partial sum
per step of 128 K. Small M splits K; from `PERSISTENT_M_MIN` rows on `gemm_fp8_persistent` reads
tiles by TMA.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from tonnage.kernels.ops.fp8_scales import Fp8Operands, block_scales, whole_scales
from tonnage.kernels.ops.gemm_fp8_persistent import gemm_fp8_persistent
from tonnage.kernels.ops.gemm_tiles import (
    BAND_ROWS,
    Tile,
    grouped_tile,
    pick_tile,
    splits_of_k,
    store_tile,
    workspace,
)
from tonnage.kernels.ops.launch import launch, processor_count
from tonnage.kernels.spec import Inputs, LaunchConfig, Outputs

SCALES = ("tensor", "row", "block")
PERSISTENT_M_MIN = 1024

TILES = (
    Tile(16, 16, 64, 128, num_warps=4, num_stages=5, programs_per_sm=4),
    Tile(32, 32, 128, 128, num_warps=4, num_stages=4, programs_per_sm=3),
    Tile(64, 64, 128, 128, num_warps=4, num_stages=4, programs_per_sm=2),
    Tile(None, 128, 128, 128, num_warps=8, num_stages=4),
)


@triton.jit
def fp8_gemm_kernel(
    x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, out_ptr, partials_ptr, arrivals_ptr, m, n, k,
    SCALES: tl.constexpr, BAND_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute one tile over one run of K. Grid: (tiles of `[m, n]`, splits of K)."""
    tile = tl.program_id(0)
    tile_m, tile_n = grouped_tile(tile, tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N), BAND_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    lanes = tl.arange(0, BLOCK_K)
    x_at = x_ptr + rows.to(tl.int64)[:, None] * k + lanes[None, :]
    w_at = w_ptr + cols.to(tl.int64)[None, :] * k + lanes[:, None]
    row_inside = (rows < m)[:, None]
    col_inside = (cols < n)[None, :]

    steps = tl.cdiv(k, BLOCK_K)
    run = tl.cdiv(steps, tl.num_programs(1))
    first = tl.program_id(1) * run
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(first, tl.minimum(first + run, steps)):
        if SCALES == "block":
            scale = block_scales(x_scale_ptr, w_scale_ptr, step, rows, tile_n * BLOCK_N, m, steps)
        left = k - step * BLOCK_K
        x = tl.load(x_at + step * BLOCK_K, mask=row_inside & (lanes < left)[None, :], other=0.0)
        w = tl.load(w_at + step * BLOCK_K, mask=col_inside & (lanes < left)[:, None], other=0.0)
        if SCALES == "block":
            acc += tl.dot(x, w) * scale
        else:
            acc = tl.dot(x, w, acc)
    acc = whole_scales(acc, x_scale_ptr, w_scale_ptr, rows, cols, m, n, SCALES)
    store_tile(acc, out_ptr, partials_ptr, arrivals_ptr, tile, rows, cols, m, n)


def config_for(tile: Tile, scales: str) -> LaunchConfig:
    """Return how the kernel is compiled for a tile and a kind of scales."""
    signature = {"x_ptr": "*fp8e4nv", "w_ptr": "*fp8e4nv"}
    signature |= {"x_scale_ptr": "*fp32", "w_scale_ptr": "*fp32", "out_ptr": "*bf16"}
    signature |= {"partials_ptr": "*fp32", "arrivals_ptr": "*i32"}
    constants: dict[str, Any] = {"SCALES": scales, "BAND_M": BAND_ROWS, **tile.constants}
    return LaunchConfig(
        kernel="fp8_gemm_kernel",
        name=f"gemm_fp8_{scales}_{tile.label}",
        signature={**signature, "m": "i32", "n": "i32", "k": "i32"},
        constants=constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        aligned=(*signature, "n", "k"),
        instruction=tile.instruction,
    )


TENSOR_CONFIGS, ROW_CONFIGS, BLOCK_CONFIGS = (
    tuple(config_for(tile, scales) for tile in TILES) for scales in SCALES
)


def gemm_fp8(operands: Fp8Operands, arrivals: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply e4m3 `[m, k]` by e4m3 `[n, k]`: BF16 `[m, n]`; arrivals: see `workspace`."""
    operands.check()
    if operands.x.shape[0] >= PERSISTENT_M_MIN:
        return gemm_fp8_persistent(operands)
    return gemm_fp8_tiled(operands, arrivals)


def gemm_fp8_tiled(operands: Fp8Operands, arrivals: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply with one program per tile and split of K."""
    x, (m, n, k) = operands.x, (operands.x.shape[0], operands.n, operands.k)
    tile = pick_tile(TILES, m)
    tiles = tile.count(m, n)
    steps = triton.cdiv(k, tile.block_k)
    splits = splits_of_k(tile, m, n, steps, processor_count(x.device))
    out = torch.empty((m, n), dtype=torch.bfloat16, device=x.device)
    joined = workspace(splits, tiles, out, arrivals)
    launch(
        fp8_gemm_kernel,
        (tiles, splits),
        config_for(tile, operands.scales),
        x_ptr=x,
        w_ptr=operands.w,
        x_scale_ptr=operands.x_scale,
        w_scale_ptr=operands.w_scale,
        out_ptr=out,
        **joined.arguments,
        m=m,
        n=n,
        k=k,
    )
    return out


def _run(inputs: Inputs, scales: str) -> Outputs:
    return {"out": gemm_fp8(Fp8Operands.of(inputs, scales), inputs["arrivals"])}


run_tensor = partial(_run, scales="tensor")
run_row = partial(_run, scales="row")
run_block = partial(_run, scales="block")
