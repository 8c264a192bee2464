"""NVFP4: e2m1 values, an e4m3 scale per 16 of K, an f32 scale per tensor.

A stored value q stands for `q * block_scale * tensor_scale`. Block scales are kept in the order
that Blackwell's block-scaled MMA reads from tensor memory: tiles of 128 rows x 4 scales, shape
`[rows / 128, k / 64, 32, 4, 4]` where row r of a tile stands at `[r % 32, r // 32]` (PTX ISA,
tcgen05.mma block scaling; cuBLAS "1D block scaling factors layout").
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch

from tonnage.kernels.quantise.checks import require_multiple
from tonnage.kernels.quantise.fp8 import E4M3_MAX, to_e4m3
from tonnage.kernels.quantise.groups import in_groups

BLOCK = 16
TILE_ROWS = 128
TILE_SCALES = 4
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = E2M1_VALUES[-1]


@dataclass(frozen=True, slots=True)
class Nvfp4Matrix:
    """A matrix `[rows, k]` in NVFP4, an operand of the GEMM.

    packed: uint8 `[rows, k / 2]`, even k in the low nibble. scales: e4m3
    `[ceil(rows / 128), k / 64, 32, 4, 4]`, zero beyond the last row. tensor_scale: f32 `[1]`.
    """

    packed: torch.Tensor
    scales: torch.Tensor
    tensor_scale: torch.Tensor

    @property
    def rows(self) -> int:
        """Return the rows of the matrix."""
        return self.packed.shape[0]

    @property
    def k(self) -> int:
        """Return the columns of the matrix."""
        return 2 * self.packed.shape[1]

    @property
    def bytes(self) -> int:
        """Return the stored bytes, padding of the scale tiles included."""
        tensors = (self.packed, self.scales, self.tensor_scale)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def quantise_nvfp4(values: torch.Tensor) -> Nvfp4Matrix:
    """Quantise `[rows, k]`; error <= 1/6 of a block's largest magnitude, scale rounding apart."""
    require_multiple(
        "k", values.shape[-1], BLOCK * TILE_SCALES, "NVFP4 scales are stored four blocks of 16 wide"
    )
    blocks = in_groups(values.float(), BLOCK)
    largest = blocks.abs().amax()
    tensor_scale = torch.where(largest == 0, 1.0, largest / (E4M3_MAX * E2M1_MAX)).reshape(1)
    scales = to_e4m3(blocks.abs().amax(-1) / (E2M1_MAX * tensor_scale))
    step = scales.float()[..., None] * tensor_scale
    codes = to_e2m1(torch.where(step == 0, 0.0, blocks / step)).flatten(-2)
    return Nvfp4Matrix(pack_e2m1(codes), pack_scales(scales), tensor_scale)


def dequantise_nvfp4(matrix: Nvfp4Matrix) -> torch.Tensor:
    """Return f32 `[rows, k]`."""
    scales = unpack_scales(matrix.scales, matrix.rows).float()
    values = in_groups(from_e2m1(unpack_e2m1(matrix.packed)), BLOCK)
    return (values * scales[..., None] * matrix.tensor_scale).flatten(-2)


def to_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Return the 4-bit codes of the nearest e2m1, ties to even, saturating at 6."""
    # Between neighbours; where the lower one is even, a tie must not reach the upper.
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=values.device)
    upwards = torch.nextafter(midpoints, torch.tensor(torch.inf, device=values.device))
    bounds = torch.where(torch.arange(7, device=values.device) % 2 == 0, upwards, midpoints)
    magnitude = torch.bucketize(values.float().abs(), bounds, right=True)
    return (magnitude | (torch.signbit(values).long() << 3)).to(torch.uint8)


def from_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Return the f32 values of 4-bit e2m1 codes."""
    positive = torch.tensor(E2M1_VALUES, device=codes.device)
    return torch.cat((positive, -positive))[codes.long()]


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes `[rows, k]` two per byte, even k in the low nibble."""
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).contiguous()


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Return the codes `[rows, k]` of packed bytes `[rows, k / 2]`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def pack_scales(scales: torch.Tensor) -> torch.Tensor:
    """Reorder e4m3 scales `[rows, k / 16]` into tiles, padding the rows with zeros."""
    rows, columns = scales.shape
    require_multiple("k / 16", columns, TILE_SCALES, "NVFP4 scales are stored four at a time")
    padded_rows = ceil(rows / TILE_ROWS) * TILE_ROWS
    padded = torch.nn.functional.pad(scales.view(torch.uint8), (0, 0, 0, padded_rows - rows))
    tiles = padded.view(padded_rows // TILE_ROWS, 4, 32, columns // TILE_SCALES, TILE_SCALES)
    return tiles.permute(0, 3, 2, 1, 4).contiguous().view(torch.float8_e4m3fn)


def unpack_scales(tiles: torch.Tensor, rows: int) -> torch.Tensor:
    """Return e4m3 scales `[rows, k / 16]` from tiles."""
    columns = tiles.shape[1] * TILE_SCALES
    ordered = tiles.view(torch.uint8).permute(0, 3, 2, 1, 4).reshape(-1, columns)
    return ordered[:rows].contiguous().view(torch.float8_e4m3fn)
