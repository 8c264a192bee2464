"""Activations to quantise to FP8, and torch's codes and scales for them."""

from __future__ import annotations

import torch

from tonnage.kernels.ops.gemm_fp8_reference import spread_values
from tonnage.kernels.paged_inputs import generator_of
from tonnage.kernels.quantise import fp8
from tonnage.kernels.spec import Axes, Inputs, Outputs


def make_inputs(axes: Axes, seed: int, device: str) -> Inputs:
    """Return BF16 `[m, k]` with zeros and rows of very different magnitude."""
    x = spread_values((axes["m"], axes["k"]), generator_of(seed, device))
    x[-1] = 0
    return {"x": x.to(torch.bfloat16)}


def row_reference(inputs: Inputs) -> Outputs:
    """Return codes and scales per row."""
    return dict(zip(("codes", "scales"), fp8.quantise_rows(inputs["x"]), strict=True))


def block_reference(inputs: Inputs) -> Outputs:
    """Return codes and scales per 1 x 128."""
    return dict(zip(("codes", "scales"), fp8.quantise_groups(inputs["x"]), strict=True))
