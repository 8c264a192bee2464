"""Inputs of the W4A16 GEMM, its packing, and what it should compute."""

from __future__ import annotations

from functools import partial

import torch

from tonnage.kernels.ops.split_counts import arrivals_for
from tonnage.kernels.paged_inputs import generator_of
from tonnage.kernels.quantise.groups import in_groups
from tonnage.kernels.quantise.int4 import Int4Weight, check_int4_shape, pack_int4
from tonnage.kernels.spec import Axes, Inputs, Outputs


def random_int4(
    shape: tuple[int, ...], group: int, zeros: bool, generator: torch.Generator
) -> Inputs:
    """Return random levels uint8 `[..., n, k]` and scales, zeros `[..., n, k / group]` for them."""
    device = generator.device
    *stack, n, k = shape
    check_int4_shape(n, k, group)
    groups = (*stack, n, k // group)
    scales = torch.rand(groups, generator=generator, device=device) + 0.5
    inputs: Inputs = {
        "levels": torch.randint(16, shape, generator=generator, device=device, dtype=torch.uint8),
        "scales": (scales / (8 * k**0.5)).to(torch.bfloat16),
    }
    if zeros:
        inputs["zeros"] = torch.randint(
            16, groups, generator=generator, device=device, dtype=torch.uint8
        )
    return inputs


def _make_inputs(axes: Axes, seed: int, device: str, group: int, zeros: bool) -> Inputs:
    generator = generator_of(seed, device)
    x = torch.randn((axes["m"], axes["k"]), generator=generator, device=device)
    weight = random_int4((axes["n"], axes["k"]), group, zeros, generator)
    return {"x": x.to(torch.bfloat16), **weight}


make_inputs_g32 = partial(_make_inputs, group=32, zeros=False)
make_inputs_g64 = partial(_make_inputs, group=64, zeros=False)
make_inputs_g128 = partial(_make_inputs, group=128, zeros=False)
make_inputs_g128_zp = partial(_make_inputs, group=128, zeros=True)


def prepare(inputs: Inputs) -> Inputs:
    """Add the weight as the kernel reads it, and the counters of its splits."""
    packed = pack(inputs)
    arrivals = arrivals_for(inputs["x"].shape[0], packed.n, packed.packed.device)
    return {**inputs, **packed_tensors(packed), "arrivals": arrivals}


def pack(inputs: Inputs) -> Int4Weight:
    """Return the weight, or the stack of them, as the kernels read it."""
    return pack_int4(inputs["levels"], inputs["scales"], inputs.get("zeros"))


def packed_tensors(packed: Int4Weight) -> dict[str, torch.Tensor]:
    """Return a packed weight's tensors as they stand among a kernel's inputs."""
    tensors = {"packed": packed.packed, "packed_scales": packed.scales}
    if packed.zeros is not None:
        tensors["packed_zeros"] = packed.zeros
    return tensors


def dequantised(inputs: Inputs) -> torch.Tensor:
    """Return the weight f64 `[..., n, k]`."""
    levels, scales = inputs["levels"], inputs["scales"].double()
    zeros = inputs["zeros"].double() if "zeros" in inputs else torch.full_like(scales, 8)
    centred = in_groups(levels.double(), levels.shape[-1] // scales.shape[-1]) - zeros[..., None]
    weight: torch.Tensor = centred * scales[..., None]
    return weight.flatten(-2)


def reference(inputs: Inputs) -> Outputs:
    """Return the product in f64."""
    return {"out": inputs["x"].double() @ dequantised(inputs).mT}
