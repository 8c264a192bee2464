"""Inputs of the NVFP4 GEMM, and what it should compute."""

from __future__ import annotations

from tonnage.kernels.ops.gemm_fp8_reference import spread_values
from tonnage.kernels.ops.split_counts import arrivals_for
from tonnage.kernels.paged_inputs import generator_of
from tonnage.kernels.quantise.nvfp4 import Nvfp4Matrix, dequantise_nvfp4, quantise_nvfp4
from tonnage.kernels.spec import Axes, Inputs, Outputs


def make_inputs(axes: Axes, seed: int, device: str) -> Inputs:
    """Return two matrices, each as `*_packed`, `*_scales` and `*_tensor_scale`."""
    random = generator_of(seed, device)
    inputs: Inputs = {}
    for name, rows in (("x", axes["m"]), ("w", axes["n"])):
        matrix = quantise_nvfp4(spread_values((rows, axes["k"]), random))
        inputs[f"{name}_packed"] = matrix.packed
        inputs[f"{name}_scales"] = matrix.scales
        inputs[f"{name}_tensor_scale"] = matrix.tensor_scale
    return inputs


def prepare(inputs: Inputs) -> Inputs:
    """Add the counters of the product's splits."""
    x, w = inputs["x_packed"], inputs["w_packed"]
    return {**inputs, "arrivals": arrivals_for(x.shape[0], w.shape[0], x.device)}


def matrix_of(inputs: Inputs, name: str) -> Nvfp4Matrix:
    """Return one of the two matrices, `x` or `w`."""
    return Nvfp4Matrix(*(inputs[f"{name}_{part}"] for part in ("packed", "scales", "tensor_scale")))


def reference(inputs: Inputs) -> Outputs:
    """Return the product in f64."""
    x, w = (dequantise_nvfp4(matrix_of(inputs, name)).double() for name in ("x", "w"))
    return {"out": x @ w.mT}
