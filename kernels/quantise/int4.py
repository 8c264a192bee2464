"""INT4 weights with one scale per group along K, packed for dots over half a block of K.

A stored value q in 0..15 stands for `(q - zero) * scale`; symmetric weights have zero = 8.
Nibbles j and j + half of a block of 2 * half consecutive K share a byte, so that a kernel which
masks low and high nibbles holds two contiguous runs of K and multiplies each as it is, without
interleaving.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tonnage.kernels.quantise.checks import require, require_multiple
from tonnage.kernels.quantise.groups import in_groups

SYMMETRIC_ZERO = 8
LARGEST_HALF = 64  # 64 bytes of a row a block: whole 128-bit loads, and four 16-wide MMA steps
GROUPS = (32, 64, 128)


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """An INT4 matrix `[n, k]`, or a stack of them `[experts, n, k]`, as the kernels read it.

    packed: uint8 `[..., n, k / 2]`. scales: bf16 `[..., k / group, n]`. zeros: None when symmetric,
    else uint8 `[..., k / group, n / 2]` with the even column's zero point in the low nibble.
    """

    packed: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None

    @property
    def n(self) -> int:
        """Return the output features."""
        return self.packed.shape[-2]

    @property
    def k(self) -> int:
        """Return the input features."""
        return 2 * self.packed.shape[-1]

    @property
    def group(self) -> int:
        """Return how many consecutive K share a scale."""
        return self.k // self.scales.shape[-2]

    @property
    def half(self) -> int:
        """Return how many consecutive K the low nibbles of one block hold."""
        return half_block(self.group)

    @property
    def bytes(self) -> int:
        """Return the stored bytes, scales and zero points included."""
        tensors = [self.packed, self.scales] + ([] if self.zeros is None else [self.zeros])
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def half_block(group: int) -> int:
    """Return half the K that one byte run covers: a group, at most 64."""
    return min(group, LARGEST_HALF)


def check_int4_shape(n: int, k: int, group: int) -> None:
    """Refuse a matrix that does not divide into groups, bytes and aligned rows."""
    require(
        group in GROUPS or (group > 0 and group % 128 == 0),
        f"group = {group} must be 32, 64 or a multiple of 128",
    )
    require_multiple("k", k, max(group, 2 * half_block(group)), f"INT4 in groups of {group}")
    require_multiple("n", n, 16, "INT4 scales and zero points are read 16 columns at a time")


def quantise_int4(weight: torch.Tensor, group: int = 128, symmetric: bool = True) -> Int4Weight:
    """Quantise `[..., n, k]` to the nearest of 16 levels per group; error <= 0.56 scale.

    Half a level, and at the ends 15 levels of the scale's own rounding to BF16 (2^-8).
    """
    n, k = weight.shape[-2:]
    check_int4_shape(n, k, group)
    grouped = in_groups(weight.float(), group)
    if symmetric:
        scales = _stored_scale(grouped.abs().amax(-1) / 7)
        zeros = torch.full_like(scales, SYMMETRIC_ZERO)
    else:
        low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
        scales = _stored_scale((high - low) / 15)
        zeros = torch.round(-low / scales).clamp(0, 15)
    levels = torch.round(grouped / scales[..., None]) + zeros[..., None]
    return pack_int4(
        levels.clamp(0, 15).to(torch.uint8).flatten(-2),
        scales.to(torch.bfloat16),
        None if symmetric else zeros.to(torch.uint8),
    )


def pack_int4(levels: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> Int4Weight:
    """Pack levels 0..15 `[..., n, k]` with scales and zero points `[..., n, k / group]`."""
    n, k = levels.shape[-2:]
    group = k // scales.shape[-1]
    check_int4_shape(n, k, group)
    halves = in_groups(levels, half_block(group))
    low, high = halves[..., 0::2, :], halves[..., 1::2, :]
    return Int4Weight(
        packed=(low | (high << 4)).flatten(-2).contiguous(),
        scales=scales.to(torch.bfloat16).mT.contiguous(),
        zeros=None if zeros is None else _pack_pairs(zeros.mT),
    )


def unpack_int4(weight: Int4Weight) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return what `pack_int4` was given: levels, scales and zero points."""
    blocks = in_groups(weight.packed, weight.half)
    levels = torch.stack((blocks & 15, blocks >> 4), dim=-2).flatten(-3)
    zeros = None if weight.zeros is None else _unpack_pairs(weight.zeros).mT.contiguous()
    return levels, weight.scales.mT.contiguous(), zeros


def dequantise_int4(weight: Int4Weight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the matrix `[..., n, k]` that the INT4 weight stands for, rounded once to dtype."""
    levels, scales, zeros = unpack_int4(weight)
    centred = in_groups(levels, weight.group).float()
    centred = centred - (SYMMETRIC_ZERO if zeros is None else zeros.float()[..., None])
    return (centred * scales.float()[..., None]).flatten(-2).to(dtype)


def _stored_scale(scale: torch.Tensor) -> torch.Tensor:
    # An all-zero group keeps scale 1; the levels must be those of the scale that is stored.
    stored = scale.to(torch.bfloat16).float()
    return torch.where(stored == 0, torch.ones_like(stored), stored)


def _pack_pairs(nibbles: torch.Tensor) -> torch.Tensor:
    return (nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)).contiguous()


def _unpack_pairs(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
