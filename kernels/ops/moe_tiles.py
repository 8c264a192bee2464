"""What the grouped GEMMs share: finding a program's rows and expert, and storing routed rows."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def block_rows(sorted_rows_ptr, block, BLOCK_M: tl.constexpr):
    """Load the routed rows of a block; padding holds the number of rows."""
    return tl.load(sorted_rows_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))


@triton.jit
def store_rows(acc, out_ptr, row_weights_ptr, rows, cols, row_count, n):
    """Store f32 sums to routed rows of BF16 `[rows, n]`, each times its weight if there are any."""
    row_inside = rows < row_count
    if row_weights_ptr is not None:
        acc *= tl.load(row_weights_ptr + rows, mask=row_inside, other=0.0)[:, None]
    at = rows.to(tl.int64)[:, None] * n + cols[None, :]
    inside = row_inside[:, None] & (cols < n)[None, :]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)
