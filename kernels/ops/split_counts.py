"""The counters of a GEMM that splits K, for inputs that are run many times."""

from __future__ import annotations

import torch

TILE_M, TILE_N = 16, 64  # the smallest tile of any GEMM kernel
SPLIT_ROWS_MAX = 1024  # no kernel splits the K of more


def arrivals_for(m: int, n: int, device: torch.device) -> torch.Tensor:
    """Return int32 zeros, one for each tile that a product `[m, n]` may have and split."""
    rows = min(m, SPLIT_ROWS_MAX)
    tiles = -(-rows // TILE_M) * -(-n // TILE_N)
    return torch.zeros(tiles, dtype=torch.int32, device=device)
