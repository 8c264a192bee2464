"""FP8 GEMM of many rows: one program per SM walks the tiles, operands and output by TMA.

Same operands, scales and error as `gemm_fp8`. Descriptors fill tiles beyond the edges with zeros
and drop what is stored there, so no mask is left in the loop over K.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tonnage.kernels.ops.fp8_scales import Fp8Operands, block_scales, whole_scales
from tonnage.kernels.ops.gemm_tiles import BAND_ROWS, Tile, grouped_tile
from tonnage.kernels.ops.launch import launch, processor_count
from tonnage.kernels.spec import LaunchConfig

# A whole-K scale leaves registers for a wide tile; block scales need a second set of sums.
TILES = {
    "tensor": Tile(None, 128, 256, 128, num_warps=8, num_stages=3),
    "row": Tile(None, 128, 256, 128, num_warps=8, num_stages=3),
    "block": Tile(None, 128, 128, 128, num_warps=8, num_stages=4),
}


@triton.jit
def fp8_gemm_persistent_kernel(
    x_desc, w_desc, out_desc, x_scale_ptr, w_scale_ptr, m, n, k,
    SCALES: tl.constexpr, BAND_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute every `num_programs`-th tile. Grid: (programs,)."""
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    steps = tl.cdiv(k, BLOCK_K)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, BAND_M)
        first_row = tile_m * BLOCK_M
        first_col = tile_n * BLOCK_N
        rows = first_row + tl.arange(0, BLOCK_M)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for step in range(steps):
            if SCALES == "block":
                scale = block_scales(x_scale_ptr, w_scale_ptr, step, rows, first_col, m, steps)
            x = x_desc.load([first_row, step * BLOCK_K])
            w = w_desc.load([first_col, step * BLOCK_K])
            if SCALES == "block":
                acc += tl.dot(x, w.T) * scale
            else:
                acc = tl.dot(x, w.T, acc)
        cols = first_col + tl.arange(0, BLOCK_N)
        acc = whole_scales(acc, x_scale_ptr, w_scale_ptr, rows, cols, m, n, SCALES)
        out_desc.store([first_row, first_col], acc.to(tl.bfloat16))


def config_for(scales: str) -> LaunchConfig:
    """Return how the kernel is compiled for a kind of scales."""
    tile = TILES[scales]
    constants: dict[str, Any] = {"SCALES": scales, "BAND_M": BAND_ROWS, **tile.constants}
    signature = {
        "x_desc": f"tensordesc<fp8e4nv[{tile.block_m},{tile.block_k}]>",
        "w_desc": f"tensordesc<fp8e4nv[{tile.block_n},{tile.block_k}]>",
        "out_desc": f"tensordesc<bf16[{tile.block_m},{tile.block_n}]>",
        "x_scale_ptr": "*fp32",
        "w_scale_ptr": "*fp32",
        "m": "i32",
        "n": "i32",
        "k": "i32",
    }
    return LaunchConfig(
        kernel="fp8_gemm_persistent_kernel",
        name=f"gemm_fp8_{scales}_persistent_{tile.label}",
        signature=signature,
        constants=constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        aligned=("x_scale_ptr", "w_scale_ptr", "n", "k"),
        instruction=tile.instruction,
    )


CONFIGS = tuple(config_for(scales) for scales in TILES)


def gemm_fp8_persistent(operands: Fp8Operands) -> torch.Tensor:
    """Multiply checked operands of at least one row: BF16 `[m, n]`."""
    x, w, tile = operands.x, operands.w, TILES[operands.scales]
    m, n = x.shape[0], operands.n
    out = torch.empty((m, n), dtype=torch.bfloat16, device=x.device)
    launch(
        fp8_gemm_persistent_kernel,
        (min(tile.count(m, n), processor_count(x.device)),),
        config_for(operands.scales),
        x_desc=TensorDescriptor.from_tensor(x, [tile.block_m, tile.block_k]),
        w_desc=TensorDescriptor.from_tensor(w, [tile.block_n, tile.block_k]),
        out_desc=TensorDescriptor.from_tensor(out, [tile.block_m, tile.block_n]),
        x_scale_ptr=operands.x_scale,
        w_scale_ptr=operands.w_scale,
        m=m,
        n=n,
        k=operands.k,
    )
    return out
