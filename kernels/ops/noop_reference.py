"""Inputs and reference of the kernel that does nothing."""

from __future__ import annotations

import torch

from tonnage.kernels.paged_inputs import generator_of
from tonnage.kernels.spec import Axes, Inputs, Outputs


def make_inputs(axes: Axes, seed: int, device: str) -> Inputs:
    """Return a small tensor."""
    random = generator_of(seed, device)
    return {"untouched": torch.randn(16, generator=random, device=device)}


def reference(inputs: Inputs) -> Outputs:
    """Return the tensor as it is."""
    return {"untouched": inputs["untouched"].clone()}
