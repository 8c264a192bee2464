"""Inputs of the grouped GEMMs, and what they should compute."""

from __future__ import annotations

from functools import partial

import torch

from tonnage.kernels.ops import gemm_int4_reference
from tonnage.kernels.ops.gemm_fp8_reference import Quantiser, spread_values
from tonnage.kernels.ops.moe_routing import skewed_expert_ids
from tonnage.kernels.paged_inputs import generator_of
from tonnage.kernels.quantise import fp8
from tonnage.kernels.spec import Axes, Inputs, Outputs


def _expert_ids(axes: Axes, random: torch.Generator) -> torch.Tensor:
    skew = axes["skew_percent"] / 100
    return skewed_expert_ids(axes["tokens"], axes["experts"], axes["top_k"], skew, random)


def _fp8_inputs(axes: Axes, seed: int, device: str, of_x: Quantiser, of_w: Quantiser) -> Inputs:
    random = generator_of(seed, device)
    x, x_scale = of_x(spread_values((axes["tokens"], axes["k"]), random))
    w, w_scale = of_w(spread_values((axes["experts"], axes["n"], axes["k"]), random))
    ids = _expert_ids(axes, random)
    return {"x": x, "w": w, "x_scale": x_scale, "w_scale": w_scale, "expert_ids": ids}


make_fp8_row_inputs = partial(_fp8_inputs, of_x=fp8.quantise_rows, of_w=fp8.quantise_rows)
make_fp8_block_inputs = partial(_fp8_inputs, of_x=fp8.quantise_groups, of_w=fp8.quantise_blocks)


def _int4_inputs(axes: Axes, seed: int, device: str, group: int) -> Inputs:
    random = generator_of(seed, device)
    x = torch.randn((axes["tokens"], axes["k"]), generator=random, device=device)
    shape = (axes["experts"], axes["n"], axes["k"])
    weight = gemm_int4_reference.random_int4(shape, group, False, random)
    return {"x": x.to(torch.bfloat16), **weight, "expert_ids": _expert_ids(axes, random)}


make_int4_g32_inputs = partial(_int4_inputs, group=32)
make_int4_g128_inputs = partial(_int4_inputs, group=128)


def grouped(x: torch.Tensor, w: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
    """Multiply every choice of every token by its expert: f64 `[tokens * top_k, n]`."""
    rows = x.double().repeat_interleave(expert_ids.shape[1], 0)
    ids = expert_ids.flatten().long()
    out = rows.new_zeros((len(rows), w.shape[1]))
    for expert in range(len(w)):
        out[ids == expert] = rows[ids == expert] @ w[expert].double().mT
    return out


def fp8_row_reference(inputs: Inputs) -> Outputs:
    """Return the products in f64."""
    x = fp8.dequantise_rows(inputs["x"], inputs["x_scale"])
    w = fp8.dequantise_rows(inputs["w"], inputs["w_scale"])
    return {"out": grouped(x, w, inputs["expert_ids"])}


def fp8_block_reference(inputs: Inputs) -> Outputs:
    """Return the products in f64."""
    x = fp8.dequantise_groups(inputs["x"], inputs["x_scale"])
    w = fp8.dequantise_blocks(inputs["w"], inputs["w_scale"])
    return {"out": grouped(x, w, inputs["expert_ids"])}


def int4_reference(inputs: Inputs) -> Outputs:
    """Return the products in f64."""
    weight = gemm_int4_reference.dequantised(inputs)
    return {"out": grouped(inputs["x"], weight, inputs["expert_ids"])}
