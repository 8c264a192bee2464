"""Second stage of split decode attention: weigh the splits' outputs by their softmax mass.

partial `[batch, heads, splits, value_dim]` f32 holds each split's normalised output, mass
`[batch, heads, splits]` f32 the base-2 logarithm of its sum of exponentials; a split without
tokens has mass `EMPTY` and an unwritten partial. output `[batch, heads, value_dim]` bf16: zero
for a request without tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tonnage.kernels.ops.launch import launch
from tonnage.kernels.spec import LaunchConfig

EMPTY = -1.0e30  # finite: differences of it are no NaN
BLOCK_DIM = 128


@triton.jit
def combine_kernel(
    partial,
    mass,
    output,
    splits,
    VALUE_DIM: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Combine one block of columns (axis 1) of one head of one request (axis 0)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    split = tl.arange(0, BLOCK_SPLITS)
    masses = tl.load(mass + row * splits + split, mask=split < splits, other=-1.0e30)
    largest = tl.max(masses, axis=0)
    total = tl.sum(tl.where(masses > -1.0e29, tl.exp2(masses - largest), 0.0), axis=0)
    result = tl.zeros([BLOCK_DIM], dtype=tl.float32)
    for number in range(splits):
        one = tl.load(mass + row * splits + number)
        used = one > -1.0e29
        at = partial + (row * splits + number) * VALUE_DIM + column
        values = tl.load(at, mask=column < tl.where(used, VALUE_DIM, 0), other=0.0)
        result += values * tl.where(used, tl.exp2(one - largest), 0.0)
    result = result / tl.maximum(total, 1.0e-30)
    to = output + row * VALUE_DIM + column
    tl.store(to, result.to(output.dtype.element_ty), mask=column < VALUE_DIM)


def config(value_dim: int, splits: int) -> LaunchConfig:
    """Return how that many splits are combined."""
    pointers = {"partial": "*fp32", "mass": "*fp32", "output": "*bf16"}
    return LaunchConfig(
        kernel="combine_kernel",
        name=f"value dim {value_dim}, up to {triton.next_power_of_2(splits)} splits",
        signature={**pointers, "splits": "i32"},
        constants={
            "VALUE_DIM": value_dim,
            "BLOCK_SPLITS": triton.next_power_of_2(splits),
            "BLOCK_DIM": min(BLOCK_DIM, triton.next_power_of_2(value_dim)),
        },
        num_warps=1,
        num_stages=2,
        aligned=tuple(pointers),
        instruction={90: None, 100: None},
    )


CONFIGS = tuple(config(value_dim, splits) for value_dim in (128, 512) for splits in (8, 64))


def combine(partial: torch.Tensor, mass: torch.Tensor, output: torch.Tensor) -> None:
    """Write the output from the splits' partial results."""
    rows, value_dim = output.shape[0] * output.shape[1], output.shape[2]
    chosen = config(value_dim, mass.shape[-1])
    grid = (rows, triton.cdiv(value_dim, chosen.constants["BLOCK_DIM"]))
    launch(
        combine_kernel, grid, chosen, partial=partial, mass=mass, output=output,
        splits=mass.shape[-1],
    )  # fmt: skip
