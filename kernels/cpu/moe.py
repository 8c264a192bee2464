"""Grouped GEMMs of a mixture of experts on a CPU: one product per expert that has rows.

`out[token * top_k + choice] = x[token] @ w[expert of that choice].T`, BF16.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tonnage.kernels.cpu.gemm_fp8 import gemm_fp8
from tonnage.kernels.cpu.gemm_int4 import gemm_int4, weight_of
from tonnage.kernels.cpu.linear import linear
from tonnage.kernels.spec import Inputs, Outputs

ExpertProduct = Callable[[torch.Tensor, int], torch.Tensor]  # tokens int64, expert -> [tokens, n]


def grouped(expert_ids: torch.Tensor, experts: int, n: int, product: ExpertProduct) -> torch.Tensor:
    """Return every choice's product: BF16 `[tokens * top_k, n]`."""
    ids = expert_ids.flatten().long()
    order = ids.argsort(stable=True)
    counts = torch.bincount(ids, minlength=experts).tolist()
    out = torch.empty((len(ids), n), dtype=torch.bfloat16)
    for expert, rows in enumerate(order.split(counts)):
        if len(rows):
            out[rows] = product(rows // expert_ids.shape[1], expert)
    return out


def run_int4(inputs: Inputs) -> Outputs:
    """Multiply by INT4 experts, on prepared inputs."""
    x, weight = inputs["x"], weight_of(inputs)

    def product(tokens: torch.Tensor, expert: int) -> torch.Tensor:
        return gemm_int4(x[tokens], weight.of(expert))

    return {"out": grouped(inputs["expert_ids"], len(weight.bytes), weight.n, product)}


def _run_fp8(inputs: Inputs, scales: str) -> Outputs:
    x, w, x_scale, w_scale = (inputs[name] for name in ("x", "w", "x_scale", "w_scale"))
    codes = x.view(torch.uint8)

    def product(tokens: torch.Tensor, expert: int) -> torch.Tensor:
        scale = x_scale[:, tokens] if scales == "block" else x_scale[tokens]
        return gemm_fp8(codes[tokens], w[expert], scale, w_scale[expert], scales)

    return {"out": grouped(inputs["expert_ids"], w.shape[0], w.shape[1], product)}


def run_bf16(inputs: Inputs) -> Outputs:
    """Multiply by BF16 experts."""
    x, w = inputs["x"], inputs["w"]

    def product(tokens: torch.Tensor, expert: int) -> torch.Tensor:
        return linear(x[tokens], w[expert])

    return {"out": grouped(inputs["expert_ids"], w.shape[0], w.shape[1], product)}


run_fp8_row = partial(_run_fp8, scales="row")
run_fp8_block = partial(_run_fp8, scales="block")
