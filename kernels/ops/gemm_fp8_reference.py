"""Inputs of the FP8 GEMM, and what it should compute."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tonnage.kernels.ops.split_counts import arrivals_for
from tonnage.kernels.paged_inputs import generator_of
from tonnage.kernels.quantise import fp8
from tonnage.kernels.spec import Axes, Inputs, Outputs

Quantiser = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Dequantiser = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def spread_values(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return normal values whose rows differ in magnitude, so that a misplaced scale shows."""
    device = generator.device
    magnitude = torch.rand((*shape[:-1], 1), generator=generator, device=device) * 4 - 2
    return torch.randn(shape, generator=generator, device=device) * magnitude.exp2()


def _make_inputs(axes: Axes, seed: int, device: str, of_x: Quantiser, of_w: Quantiser) -> Inputs:
    generator = generator_of(seed, device)
    x, x_scale = of_x(spread_values((axes["m"], axes["k"]), generator))
    w, w_scale = of_w(spread_values((axes["n"], axes["k"]), generator))
    return {"x": x, "w": w, "x_scale": x_scale, "w_scale": w_scale}


def make_tensor_inputs(axes: Axes, seed: int, device: str) -> Inputs:
    """Return operands with one scale each."""
    return _make_inputs(axes, seed, device, fp8.quantise_tensor, fp8.quantise_tensor)


def make_row_inputs(axes: Axes, seed: int, device: str) -> Inputs:
    """Return operands with a scale per row."""
    return _make_inputs(axes, seed, device, fp8.quantise_rows, fp8.quantise_rows)


def make_block_inputs(axes: Axes, seed: int, device: str) -> Inputs:
    """Return activations with a scale per 1 x 128, weights with one per 128 x 128."""
    return _make_inputs(axes, seed, device, fp8.quantise_groups, fp8.quantise_blocks)


def prepare(inputs: Inputs) -> Inputs:
    """Add the counters of the product's splits."""
    m, n = inputs["x"].shape[0], inputs["w"].shape[0]
    return {**inputs, "arrivals": arrivals_for(m, n, inputs["x"].device)}


def _reference(inputs: Inputs, of_x: Dequantiser, of_w: Dequantiser) -> Outputs:
    x = of_x(inputs["x"], inputs["x_scale"]).double()
    return {"out": x @ of_w(inputs["w"], inputs["w_scale"]).double().mT}


def tensor_reference(inputs: Inputs) -> Outputs:
    """Return the product in f64."""
    return _reference(inputs, fp8.dequantise_tensor, fp8.dequantise_tensor)


def row_reference(inputs: Inputs) -> Outputs:
    """Return the product in f64."""
    return _reference(inputs, fp8.dequantise_rows, fp8.dequantise_rows)


def block_reference(inputs: Inputs) -> Outputs:
    """Return the product in f64."""
    return _reference(inputs, fp8.dequantise_groups, fp8.dequantise_blocks)
