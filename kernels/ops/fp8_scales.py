"""FP8 operands of a GEMM, and their scales inside a kernel: at each 128 of K, or at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from tonnage.kernels.quantise.checks import require, require_multiple


@triton.jit
def block_scales(x_scale_ptr, w_scale_ptr, step, rows, first_col, m, steps):
    """Load the factors f32 `[rows, 1]` of one step of 128 K for columns of one block of 128."""
    x_scale = tl.load(x_scale_ptr + step * m + rows, mask=rows < m, other=0.0)
    w_scale = tl.load(w_scale_ptr + (first_col // 128) * steps + step)
    return (x_scale * w_scale)[:, None]


@triton.jit
def whole_scales(acc, x_scale_ptr, w_scale_ptr, rows, cols, m, n, SCALES: tl.constexpr):
    """Multiply sums `[rows, cols]` by tensor or row scales; block scales are already in them."""
    if SCALES == "tensor":
        return acc * (tl.load(x_scale_ptr) * tl.load(w_scale_ptr))
    elif SCALES == "row":
        x_scale = tl.load(x_scale_ptr + rows, mask=rows < m, other=0.0)
        w_scale = tl.load(w_scale_ptr + cols, mask=cols < n, other=0.0)
        return acc * x_scale[:, None] * w_scale[None, :]
    else:
        return acc


@dataclass(frozen=True, slots=True)
class Fp8Operands:
    """Two e4m3 operands with K contiguous, x `[m, k]` and w `[..., n, k]`, and their f32 scales."""

    x: torch.Tensor
    w: torch.Tensor
    x_scale: torch.Tensor
    w_scale: torch.Tensor
    scales: str  # tensor, row or block

    @classmethod
    def of(cls, inputs: Mapping[str, Any], scales: str) -> Fp8Operands:
        """Return the operands that are among a kernel's inputs."""
        return cls(inputs["x"], inputs["w"], inputs["x_scale"], inputs["w_scale"], scales)

    @property
    def k(self) -> int:
        """Return what both are summed over."""
        return self.x.shape[1]

    @property
    def n(self) -> int:
        """Return the output features."""
        return self.w.shape[-2]

    def check(self) -> None:
        """Refuse operands that the kernels cannot read."""
        for name, operand in (("x", self.x), ("w", self.w)):
            require(
                operand.dtype == torch.float8_e4m3fn and operand.is_contiguous(),
                f"{name} must be contiguous float8_e4m3fn with k last, not {operand.dtype}",
            )
        require(self.w.shape[-1] == self.k, f"x has k = {self.k}, w has {self.w.shape[-1]}")
        if self.scales == "block":
            require_multiple("k", self.k, 128, "a block scale covers 128 of K")
        require_multiple("k", self.k, 16, "FP8 rows are read 16 bytes at a time")
        require_multiple("n", self.n, 16, "output rows are written 32 bytes at a time")
        for name, scale in (("x_scale", self.x_scale), ("w_scale", self.w_scale)):
            wanted = self.scale_shapes[name]
            require(
                scale.dtype == torch.float32 and scale.is_contiguous() and scale.shape == wanted,
                f"{name} must be contiguous float32 {list(wanted)}, not {list(scale.shape)}",
            )

    @property
    def scale_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the scales, or refuse a kind of scales that there is not."""
        m, stack, blocks = self.x.shape[0], self.w.shape[:-2], -(-self.n // 128)
        shapes = {
            "tensor": ((1,), (*stack, 1)),
            "row": ((m,), (*stack, self.n)),
            "block": ((self.k // 128, m), (*stack, blocks, self.k // 128)),
        }
        require(self.scales in shapes, f"scales = {self.scales!r}: use {', '.join(shapes)}")
        x_scale, w_scale = shapes[self.scales]
        return {"x_scale": x_scale, "w_scale": w_scale}
