"""Dense products on a CPU, and products with weights that are decoded a few rows at a time.

A CPU with BF16 instructions (AVX512-BF16, AMX) multiplies BF16 as it is. On others torch falls
back to a scalar loop, which f32 beats from three rows on even with the conversion. Decoded weights
are multiplied in f32 everywhere: rounding them to BF16 once more would double the error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from tonnage.kernels.spec import Inputs, Outputs

CHUNK_ROWS = 128  # of a weight decoded at a time: 2 MB of f32 at k = 4096, which stays in cache
SCALAR_M_MAX = 2

RowsDecoder = Callable[[int, int], torch.Tensor]  # first, last -> f32 [last - first, k]


@cache
def multiplies_bf16() -> bool:
    """Say whether this CPU has instructions for products of BF16."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply BF16 `[m, k]` by BF16 `[n, k]`: BF16 `[m, n]`."""
    if multiplies_bf16() or x.shape[0] <= SCALAR_M_MAX:
        return x @ weight.mT

    def rows(first: int, last: int) -> torch.Tensor:
        return weight[first:last].float()

    return decoded_product(x, weight.shape[0], rows).bfloat16()


def decoded_product(x: torch.Tensor, n: int, rows: RowsDecoder) -> torch.Tensor:
    """Multiply `[m, k]` by a weight `[n, k]` that `rows(first, last)` decodes: f32 `[m, n]`."""
    out = torch.empty((x.shape[0], n))
    values = x.float()
    for first in range(0, n, CHUNK_ROWS):
        last = min(first + CHUNK_ROWS, n)
        out[:, first:last] = values @ rows(first, last).mT
    return out


def run(inputs: Inputs) -> Outputs:
    """Multiply x `[m, k]` by w `[n, k]`."""
    return {"out": linear(inputs["x"], inputs["w"])}
