"""Dequantise an INT4 matrix to BF16 once, for GEMMs of many rows.

Reads `quantise.int4`'s bytes, writes BF16 `[n, k]`: `(q - zero) * scale` in f32, rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tonnage.kernels.ops.int4_decode import centred, group_scale, group_zero
from tonnage.kernels.ops.launch import launch
from tonnage.kernels.quantise.int4 import Int4Weight, half_block
from tonnage.kernels.spec import LaunchConfig

BLOCK_N = 64


@triton.jit
def dequantise_int4_kernel(
    packed_ptr, scales_ptr, zeros_ptr, out_ptr, n, row_bytes,
    GROUP: tl.constexpr, HALF: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Decode BLOCK_N rows of one block of K. Grid: (blocks of K, tiles of n)."""
    block = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    lanes = tl.arange(0, HALF)
    inside = (rows < n)[:, None]
    wide_rows = rows.to(tl.int64)[:, None]
    packed = tl.load(
        packed_ptr + wide_rows * row_bytes + block * HALF + lanes[None, :], mask=inside, other=0
    )
    out_at = out_ptr + wide_rows * (2 * row_bytes) + block * (2 * HALF) + lanes[None, :]
    group = block * (2 * HALF) // GROUP
    high_group = (block * (2 * HALF) + HALF) // GROUP
    low = centred(packed & 15, group_zero(zeros_ptr, group, rows, n)[:, None]).to(tl.float32)
    high = centred(packed >> 4, group_zero(zeros_ptr, high_group, rows, n)[:, None]).to(tl.float32)
    low *= group_scale(scales_ptr, group, rows, n)[:, None]
    high *= group_scale(scales_ptr, high_group, rows, n)[:, None]
    tl.store(out_at, low.to(tl.bfloat16), mask=inside)
    tl.store(out_at + HALF, high.to(tl.bfloat16), mask=inside)


def config_for(group: int, zeros: bool) -> LaunchConfig:
    """Return how the kernel is compiled for a format."""
    signature = {"packed_ptr": "*u8", "scales_ptr": "*bf16", "out_ptr": "*bf16"}
    signature |= {"zeros_ptr": "*u8"} if zeros else {}
    signature |= {"n": "i32", "row_bytes": "i32"}
    constants = {"GROUP": group, "HALF": half_block(group), "BLOCK_N": BLOCK_N}
    return LaunchConfig(
        kernel="dequantise_int4_kernel",
        name=f"dequantise_int4_g{group}{'_zp' * zeros}",
        signature=signature,
        constants=constants if zeros else {**constants, "zeros_ptr": None},
        num_warps=4,
        num_stages=1,
        aligned=tuple(signature),
        instruction={90: None, 100: None},
    )


FORMATS = ((32, False), (64, False), (128, False), (128, True))  # group, with zero points
CONFIGS = tuple(config_for(*one) for one in FORMATS)


def dequantise(weight: Int4Weight) -> torch.Tensor:
    """Return BF16 `[n, k]` of one matrix."""
    n, k = weight.n, weight.k
    out = torch.empty((n, k), dtype=torch.bfloat16, device=weight.packed.device)
    zeros = {} if weight.zeros is None else {"zeros_ptr": weight.zeros}
    launch(
        dequantise_int4_kernel,
        (k // (2 * weight.half), triton.cdiv(n, BLOCK_N)),
        config_for(weight.group, bool(zeros)),
        packed_ptr=weight.packed,
        scales_ptr=weight.scales,
        out_ptr=out,
        n=n,
        row_bytes=k // 2,
        **zeros,
    )
    return out
