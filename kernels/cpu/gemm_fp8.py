"""FP8 GEMM on a CPU: operands stay e4m3 in memory, weights are decoded a chunk at a time.

Storage alone is FP8: no CPU multiplies it, so this costs more than BF16, whatever m is. Scales per
tensor and row multiply the product, those per 128 of K the operands.
"""

from __future__ import annotations

from functools import partial

import torch

from tonnage.kernels.cpu.formats import decode_e4m3
from tonnage.kernels.cpu.linear import CHUNK_ROWS, decoded_product
from tonnage.kernels.spec import Inputs, Outputs

BLOCK = 128
assert CHUNK_ROWS == BLOCK  # a chunk lies in one row of blocks


def gemm_fp8(
    x: torch.Tensor, w: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor, scales: str
) -> torch.Tensor:
    """Multiply e4m3 `[m, k]` by e4m3 `[n, k]`: BF16 `[m, n]`. Scales as in `ops.gemm_fp8`."""
    n = w.shape[0]
    if scales == "block":
        values = activations_by_block(x, x_scale)
        return decoded_product(values, n, partial(rows_by_block, w, w_scale)).bfloat16()
    out = decoded_product(decode_e4m3(x), n, lambda first, last: decode_e4m3(w[first:last]))
    by_row = x_scale[:, None] if scales == "row" else x_scale
    return out.mul_(by_row).mul_(w_scale).bfloat16()


def activations_by_block(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return e4m3 `[m, k]` times its scales `[k / 128, m]` in f32."""
    values = decode_e4m3(x)
    values.view(len(x), -1, BLOCK).mul_(scale.mT[..., None])
    return values


def rows_by_block(w: torch.Tensor, scale: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Return some rows of e4m3 `[n, k]` times their scales `[ceil(n / 128), k / 128]` in f32."""
    values = decode_e4m3(w[first:last])
    values.view(last - first, -1, BLOCK).mul_(scale[first // BLOCK, :, None])
    return values


def _run(inputs: Inputs, scales: str) -> Outputs:
    x, w, x_scale, w_scale = (inputs[name] for name in ("x", "w", "x_scale", "w_scale"))
    return {"out": gemm_fp8(x, w, x_scale, w_scale, scales)}


run_tensor = partial(_run, scales="tensor")
run_row = partial(_run, scales="row")
run_block = partial(_run, scales="block")
