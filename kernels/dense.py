"""Products with BF16 weights by torch: inputs, runs and references."""

from __future__ import annotations

import torch

from tonnage.kernels.ops.moe_gemm_reference import grouped
from tonnage.kernels.ops.moe_routing import skewed_expert_ids
from tonnage.kernels.paged_inputs import generator_of
from tonnage.kernels.spec import Axes, Inputs, Outputs


def _random(shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=random, device=random.device).bfloat16()


def make_inputs(axes: Axes, seed: int, device: str) -> Inputs:
    """Return x `[m, k]` and w `[n, k]` bf16."""
    random = generator_of(seed, device)
    return {
        "x": _random((axes["m"], axes["k"]), random),
        "w": _random((axes["n"], axes["k"]), random),
    }


def run(inputs: Inputs) -> Outputs:
    """Multiply: bf16 `[m, n]`."""
    return {"out": torch.mm(inputs["x"], inputs["w"].mT)}


def reference(inputs: Inputs) -> Outputs:
    """Multiply in f64."""
    return {"out": inputs["x"].double() @ inputs["w"].double().mT}


def make_moe_inputs(axes: Axes, seed: int, device: str) -> Inputs:
    """Return x `[tokens, k]`, w `[experts, n, k]` bf16 and expert ids `[tokens, top_k]` int32."""
    random = generator_of(seed, device)
    skew = axes["skew_percent"] / 100
    return {
        "x": _random((axes["tokens"], axes["k"]), random),
        "w": _random((axes["experts"], axes["n"], axes["k"]), random),
        "expert_ids": skewed_expert_ids(
            axes["tokens"], axes["experts"], axes["top_k"], skew, random
        ),
    }


def prepare_moe(inputs: Inputs) -> Inputs:
    """Sort the choices by expert: `order` int64 `[rows]`, `ends` int32 `[experts]`."""
    ids = inputs["expert_ids"].flatten().long()
    counts = torch.bincount(ids, minlength=len(inputs["w"]))
    return {**inputs, "order": ids.argsort(stable=True), "ends": counts.cumsum(0).int()}


def run_moe(inputs: Inputs) -> Outputs:
    """Multiply every choice by its expert's matrix: bf16 `[tokens * top_k, n]`."""
    order = inputs["order"]
    rows = inputs["x"][order // inputs["expert_ids"].shape[1]]
    products = torch._grouped_mm(rows, inputs["w"].mT, inputs["ends"])
    return {"out": torch.empty_like(products).index_copy_(0, order, products)}


def moe_reference(inputs: Inputs) -> Outputs:
    """Multiply in f64."""
    return {"out": grouped(inputs["x"], inputs["w"], inputs["expert_ids"])}
