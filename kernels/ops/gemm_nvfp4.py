"""NVFP4 GEMM for Blackwell (sm_100): block-scaled tensor cores on packed e2m1 and e4m3 scales.

`out[m, n] = (x * x_scale)[m, k] @ (w * w_scale)[n, k].T * tensor scales`, BF16 out. Operands
uint8 `[rows, k / 2]`, scales in tiles `[ceil(rows / 128), k / 64, 32, 4, 4]`: see
`quantise.nvfp4`.

The tensor core multiplies by both scales and sums in f32: error <= 2^-8 of an element or its
row's RMS. Scale tiles are stored as tensor memory wants them and arrive by TMA, 512 contiguous
bytes a tile of 128 rows by 64 K: in row order they would be read byte by byte, which is what
keeps naive kernels at 1 % of the peak (vLLM pull request 22523). Rows are padded to 128 in the
tile only: the descriptors fill zeros, so small M reads no more than its bytes. Up to
`SPLIT_M_MAX` rows K is split to fill the GPU; beyond, one program per SM walks wide tiles.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tonnage.kernels.ops.gemm_nvfp4_reference import matrix_of
from tonnage.kernels.ops.gemm_tiles import (
    BAND_ROWS,
    Tile,
    grouped_tile,
    splits_of_k,
    store_tile,
    workspace,
)
from tonnage.kernels.ops.launch import launch, processor_count
from tonnage.kernels.quantise.checks import require, require_multiple
from tonnage.kernels.quantise.nvfp4 import Nvfp4Matrix
from tonnage.kernels.spec import Inputs, LaunchConfig, Outputs

SPLIT_M_MAX = 128
SPLIT_TILE = Tile(128, 128, 128, 256, num_warps=8, num_stages=4)
PERSISTENT_TILE = Tile(None, 128, 256, 256, num_warps=8, num_stages=3)
INSTRUCTION = {100: "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale"}


@triton.jit
def scale_tile(scales_desc, first_row, step, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load scales of ROWS rows and one step of K as `[ROWS, BLOCK_K / 16]`."""
    tiles = scales_desc.load([0, first_row // 128, step * (BLOCK_K // 64), 0, 0])
    tiles = tiles.reshape(ROWS // 128, BLOCK_K // 64, 32, 4, 4)
    return tiles.trans(0, 3, 2, 1, 4).reshape(ROWS, BLOCK_K // 16)


@triton.jit
def scaled_product(
    acc, x_desc, x_scales_desc, w_desc, w_scales_desc, first_row, first_col, step,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Add one step of K to the sums of a tile."""
    x = x_desc.load([first_row, step * (BLOCK_K // 2)])
    w = w_desc.load([first_col, step * (BLOCK_K // 2)])
    x_scale = scale_tile(x_scales_desc, first_row, step, BLOCK_M, BLOCK_K)
    w_scale = scale_tile(w_scales_desc, first_col, step, BLOCK_N, BLOCK_K)
    return tl.dot_scaled(x, x_scale, "e2m1", w.T, w_scale, "e2m1", acc)


@triton.jit
def nvfp4_gemm_split_kernel(
    x_desc, x_scales_desc, w_desc, w_scales_desc, x_tensor_scale_ptr, w_tensor_scale_ptr,
    out_ptr, partials_ptr, arrivals_ptr, m, n, k, BAND_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute one tile over one run of K. Grid: (tiles of `[m, n]`, splits of K)."""
    tile = tl.program_id(0)
    tile_m, tile_n = grouped_tile(tile, tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N), BAND_M)
    first_row = tile_m * BLOCK_M
    first_col = tile_n * BLOCK_N
    steps = tl.cdiv(k, BLOCK_K)
    run = tl.cdiv(steps, tl.num_programs(1))
    first = tl.program_id(1) * run
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(first, tl.minimum(first + run, steps)):
        acc = scaled_product(
            acc, x_desc, x_scales_desc, w_desc, w_scales_desc, first_row, first_col, step,
            BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    acc *= tl.load(x_tensor_scale_ptr) * tl.load(w_tensor_scale_ptr)
    rows = first_row + tl.arange(0, BLOCK_M)
    cols = first_col + tl.arange(0, BLOCK_N)
    store_tile(acc, out_ptr, partials_ptr, arrivals_ptr, tile, rows, cols, m, n)


@triton.jit
def nvfp4_gemm_persistent_kernel(
    x_desc, x_scales_desc, w_desc, w_scales_desc, out_desc, x_tensor_scale_ptr, w_tensor_scale_ptr,
    m, n, k, BAND_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute every `num_programs`-th tile. Grid: (programs,)."""
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    scale = tl.load(x_tensor_scale_ptr) * tl.load(w_tensor_scale_ptr)
    # Not flattened: overlapping two tiles takes 576 columns of tensor memory, and there are 512.
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, BAND_M)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for step in range(tl.cdiv(k, BLOCK_K)):
            acc = scaled_product(
                acc, x_desc, x_scales_desc, w_desc, w_scales_desc,
                tile_m * BLOCK_M, tile_n * BLOCK_N, step, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        out_desc.store([tile_m * BLOCK_M, tile_n * BLOCK_N], (acc * scale).to(tl.bfloat16))


def _config(kernel: str, tile: Tile, pointers: dict[str, str], **types: str) -> LaunchConfig:
    columns = tile.block_k // 64
    descriptors = {
        "x_desc": f"tensordesc<u8[{tile.block_m},{tile.block_k // 2}]>",
        "x_scales_desc": f"tensordesc<fp8e4nv[1,{tile.block_m // 128},{columns},2,256]>",
        "w_desc": f"tensordesc<u8[{tile.block_n},{tile.block_k // 2}]>",
        "w_scales_desc": f"tensordesc<fp8e4nv[1,{tile.block_n // 128},{columns},2,256]>",
    }
    pointers = {"x_tensor_scale_ptr": "*fp32", "w_tensor_scale_ptr": "*fp32", **pointers}
    sizes = {"m": "i32", "n": "i32", "k": "i32"}
    constants: dict[str, Any] = {"BAND_M": BAND_ROWS, **tile.constants}
    return LaunchConfig(
        kernel=kernel,
        name=f"gemm_nvfp4_{tile.label}",
        signature={**descriptors, **types, **pointers, **sizes},
        constants=constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        aligned=(*pointers, "n", "k"),
        instruction=INSTRUCTION,
    )


SPLIT_CONFIG = _config(
    "nvfp4_gemm_split_kernel",
    SPLIT_TILE,
    {"out_ptr": "*bf16", "partials_ptr": "*fp32", "arrivals_ptr": "*i32"},
)
PERSISTENT_CONFIG = _config(
    "nvfp4_gemm_persistent_kernel",
    PERSISTENT_TILE,
    {},
    out_desc=f"tensordesc<bf16[{PERSISTENT_TILE.block_m},{PERSISTENT_TILE.block_n}]>",
)
CONFIGS = (SPLIT_CONFIG, PERSISTENT_CONFIG)


def gemm_nvfp4(
    x: Nvfp4Matrix, w: Nvfp4Matrix, arrivals: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply NVFP4 `[m, k]` by NVFP4 `[n, k]`: BF16 `[m, n]`; arrivals: see `workspace`."""
    require(x.k == w.k, f"x has k = {x.k}, w has {w.k}")
    require_multiple("k", x.k, 64, "NVFP4 scales are stored four blocks of 16 wide")
    require_multiple("n", w.rows, 16, "output rows are written 32 bytes at a time")
    out = torch.empty((x.rows, w.rows), dtype=torch.bfloat16, device=x.packed.device)
    if x.rows == 0:  # a descriptor of nothing is refused
        return out
    if x.rows <= SPLIT_M_MAX:
        return _split(x, w, out, arrivals)
    return _persistent(x, w, out)


def _split(
    x: Nvfp4Matrix, w: Nvfp4Matrix, out: torch.Tensor, arrivals: torch.Tensor | None
) -> torch.Tensor:
    (m, n), tile = out.shape, SPLIT_TILE
    steps = triton.cdiv(x.k, tile.block_k)
    splits = splits_of_k(tile, m, n, steps, processor_count(out.device))
    joined = workspace(splits, tile.count(m, n), out, arrivals)
    launch(
        nvfp4_gemm_split_kernel,
        (tile.count(m, n), splits),
        SPLIT_CONFIG,
        **_operands(x, w, tile),
        out_ptr=out,
        **joined.arguments,
        m=m,
        n=n,
        k=x.k,
    )
    return out


def _persistent(x: Nvfp4Matrix, w: Nvfp4Matrix, out: torch.Tensor) -> torch.Tensor:
    (m, n), tile = out.shape, PERSISTENT_TILE
    launch(
        nvfp4_gemm_persistent_kernel,
        (min(tile.count(m, n), processor_count(out.device)),),
        PERSISTENT_CONFIG,
        **_operands(x, w, tile),
        out_desc=TensorDescriptor.from_tensor(out, [tile.block_m, tile.block_n]),
        m=m,
        n=n,
        k=x.k,
    )
    return out


def _operands(x: Nvfp4Matrix, w: Nvfp4Matrix, tile: Tile) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for name, matrix, rows in (("x", x, tile.block_m), ("w", w, tile.block_n)):
        scales = matrix.scales.view(1, *matrix.scales.shape[:2], 2, 256)
        block = [1, rows // 128, tile.block_k // 64, 2, 256]
        arguments |= {
            f"{name}_desc": TensorDescriptor.from_tensor(matrix.packed, [rows, tile.block_k // 2]),
            f"{name}_scales_desc": TensorDescriptor.from_tensor(scales, block),
            f"{name}_tensor_scale_ptr": matrix.tensor_scale,
        }
    return arguments


def run(inputs: Inputs) -> Outputs:
    """Run on two matrices, each as `*_packed`, `*_scales` and `*_tensor_scale`."""
    x, w = (matrix_of(inputs, name) for name in "xw")
    return {"out": gemm_nvfp4(x, w, inputs["arrivals"])}
