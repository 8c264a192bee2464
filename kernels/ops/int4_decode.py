"""Decode INT4 weights inside a kernel: cheap exact BF16, scales on f32 sums.

Layouts are those of `quantise.int4`: bytes `[n, k / 2]`, scales `[k / group, n]`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def centred(nibbles, zero):
    """Return nibbles minus their zero point in BF16, exactly; `zero` is 128 plus the zero point."""
    # 0x4300 is 128 in BF16, and the last bit of its mantissa is worth one.
    return (nibbles.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True) - zero


@triton.jit
def group_scale(scales_ptr, group, cols, n):
    """Load the scales of one group as f32 `[cols]`."""
    return tl.load(scales_ptr + group * n + cols, mask=cols < n, other=0.0).to(tl.float32)


@triton.jit
def group_zero(zeros_ptr, group, cols, n):
    """Load the zero points of one group, two to a byte along n, plus 128 as BF16 `[cols]`."""
    if zeros_ptr is None:
        return tl.full([1], 136.0, tl.bfloat16)
    else:
        pair = tl.load(zeros_ptr + group * (n // 2) + cols // 2, mask=cols < n, other=0)
        nibble = (pair >> ((cols & 1) * 4).to(tl.uint8)) & 15
        return (nibble.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True)


@triton.jit
def block_groups(scales_ptr, zeros_ptr, block, cols, n, GROUP: tl.constexpr, HALF: tl.constexpr):
    """Load scales and zero points of both halves of a block of 2 * HALF of K, each `[1, cols]`.

    To be called before the block's bytes are asked for: two bytes a thread are too few for an
    asynchronous copy, so the wait for them must coincide with the wait for the bytes.
    """
    low = block * (2 * HALF) // GROUP
    low_scale = group_scale(scales_ptr, low, cols, n)[None, :]
    low_zero = group_zero(zeros_ptr, low, cols, n)[None, :]
    if GROUP >= 2 * HALF:
        return low_scale, low_zero, low_scale, low_zero
    else:
        high_scale = group_scale(scales_ptr, low + 1, cols, n)[None, :]
        high_zero = group_zero(zeros_ptr, low + 1, cols, n)[None, :]
        return low_scale, low_zero, high_scale, high_zero


@triton.jit
def block_product(low_x, high_x, packed, groups, GROUP: tl.constexpr, HALF: tl.constexpr):
    """Multiply 2 * HALF of K: x `[m, HALF]` twice by bytes `[HALF, n]`; scaled f32 `[m, n]`."""
    low_scale, low_zero, high_scale, high_zero = groups
    product = tl.dot(low_x, centred(packed & 15, low_zero))
    if GROUP >= 2 * HALF:
        return tl.dot(high_x, centred(packed >> 4, high_zero), product) * low_scale
    else:
        return product * low_scale + tl.dot(high_x, centred(packed >> 4, high_zero)) * high_scale
