"""What the GEMM kernels share: tiles by M, the order of tiles, and the store that joins splits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

import torch
import triton
import triton.language as tl

from tonnage.kernels.quantise.checks import require

BAND_ROWS = 8  # rows of tiles that consecutive programs share columns of
RUN_STEPS_MIN = 4  # of the loop over K, so that a split's pipeline fills before it drains


@triton.jit
def grouped_tile(pid, tiles_m, tiles_n, BAND_M: tl.constexpr):
    """Walk the tiles in bands of BAND_M rows, so that a wave of programs shares both operands."""
    band_tiles = BAND_M * tiles_n
    first_m = (pid // band_tiles) * BAND_M
    band_rows = tl.minimum(tiles_m - first_m, BAND_M)
    within = pid % band_tiles
    return first_m + within % band_rows, within // band_rows


@triton.jit
def store_tile(acc, out_ptr, partials_ptr, arrivals_ptr, tile, rows, cols, m, n):
    """Store f32 sums to `[m, n]`; where K is split over grid axis 1 the last to arrive stores.

    Every split writes its sums to partials f32 `[splits, m, n]` and counts itself in arrivals int32
    `[tiles]`. The last one adds them in the order of K, so the result does not depend on timing,
    and sets the count back to zero, so the workspace serves the next launch. The barrier and the
    acquire-release count order every thread's partials before the reads.
    """
    splits = tl.num_programs(1)
    at = rows.to(tl.int64)[:, None] * n + cols[None, :]
    inside = (rows < m)[:, None] & (cols < n)[None, :]
    if splits == 1:
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        plane = tl.cast(m, tl.int64) * n
        tl.store(partials_ptr + tl.program_id(1) * plane + at, acc, mask=inside)
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel")
        if arrived == splits - 1:
            total = tl.zeros_like(acc)
            for split in range(splits):
                part = partials_ptr + split * plane + at
                total += tl.load(part, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)
            tl.store(arrivals_ptr + tile, 0)


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program computes, for problems of up to `m_max` rows (None: of any size)."""

    m_max: int | None
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1  # how many splitting K may aim at

    @property
    def constants(self) -> dict[str, int]:
        """Return the tile as the kernels' constants."""
        return {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k}

    @property
    def label(self) -> str:
        """Return the tile as `64x128x128`."""
        return f"{self.block_m}x{self.block_n}x{self.block_k}"

    @property
    def instruction(self) -> Mapping[int, str]:
        """Return the matrix instruction that Triton emits: the wide ones from 64 rows on."""
        if self.block_m < 64:
            return {90: "mma.sync", 100: "mma.sync"}
        return {90: "wgmma.mma_async", 100: "tcgen05.mma"}

    def count(self, m: int, n: int) -> int:
        """Return how many tiles cover `[m, n]`."""
        return ceil(m / self.block_m) * ceil(n / self.block_n)


def pick_tile(tiles: tuple[Tile, ...], m: int) -> Tile:
    """Return the first tile that is meant for m rows."""
    return next(tile for tile in tiles if tile.m_max is None or m <= tile.m_max)


def tile_of_rows(tiles: tuple[Tile, ...], block_m: int) -> Tile:
    """Return the tile whose blocks hold that many rows, as a routing was made for."""
    known = {tile.block_m: tile for tile in tiles}
    require(
        block_m in known,
        f"block_m = {block_m} has no tile; route with {', '.join(map(str, known))}",
    )
    return known[block_m]


def splits_of_k(tile: Tile, m: int, n: int, steps: int, processors: int) -> int:
    """Return into how many runs to split K so that the processors are full and no run is short."""
    wanted = tile.programs_per_sm * processors // max(1, tile.count(m, n))
    return max(1, min(wanted, steps // RUN_STEPS_MIN))


@dataclass(frozen=True, slots=True)
class Workspace:
    """Where the splits of a product `[m, n]` meet."""

    partials: torch.Tensor  # f32 [splits, m, n], empty when K is not split
    arrivals: torch.Tensor  # int32, at least one a tile

    @property
    def arguments(self) -> dict[str, torch.Tensor]:
        """Return the kernels' arguments."""
        return {"partials_ptr": self.partials, "arrivals_ptr": self.arrivals}


def workspace(
    splits: int, tiles: int, out: torch.Tensor, arrivals: torch.Tensor | None
) -> Workspace:
    """Return what so many splits of a product need; counts at zero may be given.

    A launch leaves the counts at zero, so one tensor serves all launches of a stream, and giving
    it saves the launch that clears a new one.
    """
    planes, counts = (splits, tiles) if splits > 1 else (0, 0)
    if arrivals is None:
        arrivals = torch.zeros(counts, dtype=torch.int32, device=out.device)
    require(
        arrivals.numel() >= counts and arrivals.dtype == torch.int32,
        f"arrivals must be int32 zeros, one for each of {counts} tiles",
    )
    partials = torch.empty((planes, *out.shape), dtype=torch.float32, device=out.device)
    return Workspace(partials, arrivals)
