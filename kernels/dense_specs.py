"""The products with BF16 weights, which are torch's own: cuBLAS on a GPU.

What quantised weights are compared with, and what runs the layers that are not quantised.
"""

from __future__ import annotations

from tonnage.kernels.gemm_specs import (
    GEMM_AXES,
    GEMM_EXAMPLES,
    MOE_AXES,
    MOE_EXAMPLES,
    OUT_ERROR,
    expected_experts,
    gemm_flops,
    moe_flops,
)
from tonnage.kernels.spec import Axes, KernelSpec

DENSE = "tonnage.kernels.dense"


def gemm_bytes(axes: Axes) -> float:
    """Count both operands and the product in BF16."""
    m, n, k = (axes[name] for name in "mnk")
    return 2.0 * (m * k + n * k + m * n)


def moe_bytes(axes: Axes) -> float:
    """Count tokens, touched experts and products in BF16."""
    out = axes["tokens"] * axes["top_k"] * axes["n"]
    experts = expected_experts(axes) * axes["n"] * axes["k"]
    return 2.0 * (axes["tokens"] * axes["k"] + experts + out)


GEMM_BF16 = KernelSpec(
    name="gemm_bf16",
    summary="BF16 by BF16",
    axes=GEMM_AXES,
    flops=gemm_flops,
    bytes=gemm_bytes,
    inputs=f"{DENSE}:make_inputs",
    reference_function=f"{DENSE}:reference",
    runs={"torch": f"{DENSE}:run", "cpu": "tonnage.kernels.cpu.linear:run"},
    tolerances={"out": OUT_ERROR},
    examples=GEMM_EXAMPLES,
)

MOE_GEMM_BF16 = KernelSpec(
    name="moe_gemm_bf16",
    summary="routed rows by their experts' BF16 matrices",
    axes=MOE_AXES,
    flops=moe_flops,
    bytes=moe_bytes,
    inputs=f"{DENSE}:make_moe_inputs",
    reference_function=f"{DENSE}:moe_reference",
    runs={"torch": f"{DENSE}:run_moe", "cpu": "tonnage.kernels.cpu.moe:run_bf16"},
    tolerances={"out": OUT_ERROR},
    examples=MOE_EXAMPLES,
    prepares={"torch": f"{DENSE}:prepare_moe"},
)

DENSE_KERNELS: tuple[KernelSpec, ...] = (GEMM_BF16, MOE_GEMM_BF16)
