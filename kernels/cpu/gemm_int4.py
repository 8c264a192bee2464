"""W4A16 GEMM on a CPU: packed INT4 up to a few rows, decoded a chunk at a time beyond.

`_weight_int4pack_mm_for_cpu` decodes each weight once per block of rows, so its time grows with m
from the first row on; a dense product after decoding pays the decoding once. `FUSED_M_MAX` is
where they were seen to cross. Both read INT4 from memory: a weight is held twice, in torch's
layout and in a plain one, one byte per weight in all. torch's kernel adds zero points times scale,
rounded to BF16: one more error of 2^-9 of what they add.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from tonnage.kernels.cpu.formats import INT4_ZERO, decode_int4
from tonnage.kernels.cpu.linear import decoded_product
from tonnage.kernels.spec import Inputs, Outputs

FUSED_M_MAX = 48
FUSED_GROUPS = (32, 64, 128, 256)  # what torch's kernel takes


def prepare(inputs: Inputs) -> Inputs:
    """Add the weight, or a stack of them, packed for torch's kernel and plainly.

    `cpu_packed` `[..., n, k / 2]` uint8 and `cpu_pairs` `[..., k / group, n, 2]` bf16 (a scale and
    what it adds) are torch's; `cpu_bytes` `[..., n, k / 2]` uint8, `cpu_scales` and `cpu_shifts`
    (8 less the zero point) `[..., n, k / group, 1]` bf16 the plain ones.
    """
    levels, scales = inputs["levels"], inputs["scales"]
    stack, (n, k) = levels.shape[:-2], levels.shape[-2:]
    shifts = INT4_ZERO - inputs.get("zeros", torch.full_like(scales, INT4_ZERO)).to(scales.dtype)
    pairs = torch.stack((scales, shifts * scales), -1).transpose(-3, -2).contiguous()
    packed = [_torch_packed(one) for one in levels.reshape(-1, n, k)]
    return {
        **inputs,
        "cpu_packed": torch.stack(packed).view(*stack, n, k // 2),
        "cpu_pairs": pairs,
        "cpu_bytes": levels[..., 0::2] | (levels[..., 1::2] << 4),
        "cpu_scales": scales[..., None],
        "cpu_shifts": shifts[..., None],
    }


def _torch_packed(levels: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels.int(), 1)
    return packed


@dataclass(frozen=True, slots=True)
class CpuInt4:
    """One prepared weight, or a stack of them."""

    packed: torch.Tensor
    pairs: torch.Tensor
    bytes: torch.Tensor
    scales: torch.Tensor
    shifts: torch.Tensor

    @property
    def n(self) -> int:
        """Return the output features."""
        return self.bytes.shape[-2]

    def of(self, expert: int) -> CpuInt4:
        """Return one weight of a stack."""
        return CpuInt4(*(getattr(self, part.name)[expert] for part in fields(self)))

    def rows(self, first: int, last: int) -> torch.Tensor:
        """Return some rows of one weight, f32 `[last - first, k]`."""
        scales, shifts = self.scales[first:last].float(), self.shifts[first:last].float()
        values = decode_int4(self.bytes[first:last])
        values.view(*scales.shape[:2], -1).add_(shifts).mul_(scales)
        return values


def weight_of(inputs: Inputs) -> CpuInt4:
    """Return the weight that is among prepared inputs."""
    return CpuInt4(*(inputs[f"cpu_{part.name}"] for part in fields(CpuInt4)))


def gemm_int4(x: torch.Tensor, weight: CpuInt4) -> torch.Tensor:
    """Multiply BF16 `[m, k]` by one prepared INT4 weight: BF16 `[m, n]`."""
    group = x.shape[1] // weight.pairs.shape[0]
    if x.shape[0] <= FUSED_M_MAX and group in FUSED_GROUPS:
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
        out: torch.Tensor = multiply(x, weight.packed, group, weight.pairs)
        return out
    return decoded_product(x, weight.n, weight.rows).bfloat16()


def run(inputs: Inputs) -> Outputs:
    """Run on prepared inputs."""
    return {"out": gemm_int4(inputs["x"], weight_of(inputs))}
