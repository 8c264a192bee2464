"""Quantise BF16 activations to FP8 in one launch, for the FP8 GEMMs.

x BF16 `[m, k]` to e4m3 `[m, k]` and f32 scales, per row `[m]` or per 1 x 128 `[k / 128, m]`. A
scale is the largest magnitude / 448 (1 where that is zero or subnormal), a code `x / scale`,
divided in f32, to nearest even, saturated at 448: byte for byte those of `quantise.fp8`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tonnage.kernels.ops.launch import launch
from tonnage.kernels.quantise.checks import require, require_multiple
from tonnage.kernels.quantise.fp8 import BLOCK
from tonnage.kernels.spec import Inputs, LaunchConfig, Outputs

GROUP_ROWS = 16
ROW_STEP = 4096


@triton.jit
def scale_of(largest):
    """Return the scale that makes the largest magnitude 448."""
    scale = tl.div_rn(largest, 448.0)
    return tl.where(scale < 1.1754943508222875e-38, 1.0, scale)


@triton.jit
def quantise_groups_kernel(
    x_ptr, codes_ptr, scales_ptr, m, k, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Quantise one group of BLOCK_M rows. Grid: (blocks of rows, groups)."""
    group = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = rows < m
    at = rows.to(tl.int64)[:, None] * k + group * BLOCK + tl.arange(0, BLOCK)[None, :]
    values = tl.load(x_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32)
    scale = scale_of(tl.max(tl.abs(values), axis=1))
    codes = tl.div_rn(values, scale[:, None]).to(tl.float8e4nv)
    tl.store(codes_ptr + at, codes, mask=inside[:, None])
    tl.store(scales_ptr + group.to(tl.int64) * m + rows, scale, mask=inside)


@triton.jit
def quantise_rows_kernel(x_ptr, codes_ptr, scales_ptr, k, STEP: tl.constexpr):
    """Quantise one row: its largest magnitude first, then its codes, read from the L2 again.

    Grid: (rows,).
    """
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, STEP)
    largest = tl.zeros([STEP], tl.float32)
    for first in range(0, k, STEP):
        values = tl.load(x_ptr + row * k + first + lanes, mask=first + lanes < k, other=0.0)
        largest = tl.maximum(largest, tl.abs(values.to(tl.float32)))
    scale = scale_of(tl.max(largest, axis=0))
    for first in range(0, k, STEP):
        inside = first + lanes < k
        values = tl.load(x_ptr + row * k + first + lanes, mask=inside, other=0.0)
        codes = tl.div_rn(values.to(tl.float32), scale).to(tl.float8e4nv)
        tl.store(codes_ptr + row * k + first + lanes, codes, mask=inside)
    tl.store(scales_ptr + row, scale)


def _config(kernel: str, sizes: tuple[str, ...], constants: dict[str, int]) -> LaunchConfig:
    pointers = {"x_ptr": "*bf16", "codes_ptr": "*fp8e4nv", "scales_ptr": "*fp32"}
    return LaunchConfig(
        kernel=kernel,
        name=kernel.removesuffix("_kernel"),
        signature={**pointers, **dict.fromkeys(sizes, "i32")},
        constants=constants,
        num_warps=4,
        num_stages=1,
        aligned=(*pointers, "k"),
        instruction={90: None, 100: None},
    )


BLOCK_CONFIGS = (
    _config("quantise_groups_kernel", ("m", "k"), {"BLOCK": BLOCK, "BLOCK_M": GROUP_ROWS}),
)
ROW_CONFIGS = (_config("quantise_rows_kernel", ("k",), {"STEP": ROW_STEP}),)


def quantise_groups(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise with a scale per 1 x 128: e4m3 `[m, k]`, f32 `[k / 128, m]`."""
    require_multiple("k", x.shape[1], BLOCK, "FP8 activations carry a scale per 128 of K")
    codes = _codes_for(x)
    m, k = x.shape
    scales = torch.empty((k // BLOCK, m), dtype=torch.float32, device=x.device)
    launch(
        quantise_groups_kernel,
        (triton.cdiv(m, GROUP_ROWS), k // BLOCK),
        BLOCK_CONFIGS[0],
        x_ptr=x,
        codes_ptr=codes,
        scales_ptr=scales,
        m=m,
        k=k,
    )
    return codes, scales


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise with a scale per row: e4m3 `[m, k]`, f32 `[m]`."""
    require_multiple("k", x.shape[1], 16, "FP8 rows are written 16 bytes at a time")
    codes = _codes_for(x)
    m, k = x.shape
    scales = torch.empty(m, dtype=torch.float32, device=x.device)
    launch(
        quantise_rows_kernel,
        (m,),
        ROW_CONFIGS[0],
        x_ptr=x,
        codes_ptr=codes,
        scales_ptr=scales,
        k=k,
    )
    return codes, scales


def _codes_for(x: torch.Tensor) -> torch.Tensor:
    require(
        x.dtype == torch.bfloat16 and x.is_contiguous(),
        f"activations must be contiguous bfloat16, not {x.dtype}",
    )
    return torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)


def run_row(inputs: Inputs) -> Outputs:
    """Quantise with a scale per row."""
    return dict(zip(("codes", "scales"), quantise_rows(inputs["x"]), strict=True))


def run_block(inputs: Inputs) -> Outputs:
    """Quantise with a scale per 1 x 128."""
    return dict(zip(("codes", "scales"), quantise_groups(inputs["x"]), strict=True))
