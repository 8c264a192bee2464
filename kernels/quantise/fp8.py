"""FP8 e4m3 with f32 scales: one per tensor, per row, per 1 x 128 group or per 128 x 128 block.

A stored value q stands for `q * scale`. Scales are chosen so that the largest magnitude becomes
448.
"""

from __future__ import annotations

from math import ceil

import torch

from tonnage.kernels.quantise.checks import require_multiple
from tonnage.kernels.quantise.groups import in_groups

E4M3_MAX = 448.0
BLOCK = 128


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Round to the nearest e4m3, ties to even, saturating at 448; NaN stays NaN.

    The clamp makes it so on every torch release: older ones turned an overflow into NaN.
    """
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def quantise_tensor(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise with one scale: e4m3 like values, f32 `[1]`."""
    scale = _scale(values.float().abs().amax()).reshape(1)
    return to_e4m3(values.float() / scale), scale


def quantise_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise `[..., m, k]` with a scale per row: f32 `[..., m]`."""
    scale = _scale(values.float().abs().amax(-1))
    return to_e4m3(values.float() / scale[..., None]), scale


def quantise_groups(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise activations `[m, k]` with a scale per 1 x 128: f32 `[k / 128, m]`.

    The scales of one K group lie side by side, so that a tile of rows reads them in one go.
    """
    require_multiple("k", values.shape[-1], BLOCK, "FP8 activations carry a scale per 128 of K")
    grouped = in_groups(values.float(), BLOCK)
    scale = _scale(grouped.abs().amax(-1))
    return to_e4m3(grouped / scale[..., None]).flatten(-2), scale.mT.contiguous()


def quantise_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise `[..., n, k]` with a scale per 128 x 128: f32 `[..., ceil(n / 128), k / 128]`."""
    n, k = weight.shape[-2:]
    require_multiple("k", k, BLOCK, "FP8 weights carry a scale per 128 of K")
    rows = ceil(n / BLOCK) * BLOCK
    padded = torch.nn.functional.pad(weight.float(), (0, 0, 0, rows - n))
    of_rows = in_groups(padded.abs(), BLOCK).amax(-1)
    scale = _scale(in_groups(of_rows.mT, BLOCK).amax(-1).mT.contiguous())
    return to_e4m3(weight.float() / _spread_blocks(scale, n)), scale


def dequantise_tensor(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return f32 values of a tensor with one scale."""
    return values.float() * scale.reshape(())


def dequantise_rows(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return f32 values of a tensor `[..., m, k]` with scales `[..., m]`."""
    return values.float() * scale[..., None]


def dequantise_groups(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return f32 activations `[m, k]` with scales `[k / 128, m]`."""
    return values.float() * scale.mT.repeat_interleave(BLOCK, -1)


def dequantise_blocks(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return f32 weights `[..., n, k]` with a scale per 128 x 128 block."""
    return weight.float() * _spread_blocks(scale, weight.shape[-2])


def _scale(largest: torch.Tensor) -> torch.Tensor:
    # All-zero data keep scale 1; a subnormal quotient would make the division overflow to infinity.
    scale = largest / E4M3_MAX
    return torch.where(scale < torch.finfo(torch.float32).tiny, torch.ones_like(scale), scale)


def _spread_blocks(scale: torch.Tensor, n: int) -> torch.Tensor:
    return scale.repeat_interleave(BLOCK, -1).repeat_interleave(BLOCK, -2)[..., :n, :]
