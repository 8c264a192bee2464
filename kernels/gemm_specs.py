"""The kernels that multiply by quantised weights: one matrix, or one per expert."""

from __future__ import annotations

import math
from functools import partial

from tonnage.kernels.spec import Axes, KernelSpec

OPS = "tonnage.kernels.ops"
OUT_ERROR = 1e-2  # BF16's own rounding is 2^-8
# Where a weight is dequantised to BF16 first, two more roundings of 2^-8 add up in the worst case.
DEQUANTISED_ERROR = 2**-6

GEMM_AXES = {"m": "rows", "n": "output features", "k": "input features"}
MOE_AXES = {
    "tokens": "tokens",
    "experts": "experts",
    "top_k": "experts a token goes to",
    "n": "output features",
    "k": "input features",
    "skew_percent": "popularity of experts falls with rank to the power of this / 100; 0: uniform",
}


def gemm_flops(axes: Axes) -> float:
    """Count a multiply-add of every row with every weight."""
    return 2.0 * axes["m"] * axes["n"] * axes["k"]


def moe_flops(axes: Axes) -> float:
    """Count a multiply-add of every choice with every weight of its expert."""
    return 2.0 * axes["tokens"] * axes["top_k"] * axes["n"] * axes["k"]


def int4_bytes(n: int, k: int, group: int, zeros: bool = False) -> float:
    """Count half a byte a weight, a BF16 scale and perhaps half a byte of zero point a group."""
    return n * k / 2 + n * (k / group) * (2.5 if zeros else 2.0)


def fp8_bytes(n: int, k: int, scales: str) -> float:
    """Count a byte a weight and the f32 scales."""
    return n * k + 4.0 * {"tensor": 1, "row": n, "block": math.ceil(n / 128) * (k / 128)}[scales]


def fp8_activation_bytes(m: int, k: int, scales: str) -> float:
    """Count a byte an activation and the f32 scales."""
    return m * k + 4.0 * {"tensor": 1, "row": m, "block": m * (k / 128)}[scales]


def nvfp4_bytes(rows: int, k: int) -> float:
    """Count half a byte a value, a byte of scale per 16 of rows padded to 128, and one f32."""
    return rows * k / 2 + math.ceil(rows / 128) * 128 * (k / 16) + 4


def _gemm_int4_bytes(axes: Axes, group: int, zeros: bool) -> float:
    m, n, k = (axes[name] for name in "mnk")
    return 2.0 * m * (n + k) + int4_bytes(n, k, group, zeros)


def _gemm_fp8_bytes(axes: Axes, scales: str) -> float:
    m, n, k = (axes[name] for name in "mnk")
    return fp8_activation_bytes(m, k, scales) + fp8_bytes(n, k, scales) + 2.0 * m * n


def _gemm_nvfp4_bytes(axes: Axes) -> float:
    m, n, k = (axes[name] for name in "mnk")
    return nvfp4_bytes(m, k) + nvfp4_bytes(n, k) + 2.0 * m * n


def expected_experts(axes: Axes) -> float:
    """Estimate how many experts are touched: how often each is picked, token by token.

    The chance that a token picks an expert is taken as top_k times its share of the popularity, at
    most one: exact without skew.
    """
    popularity = [
        math.pow(rank, -axes["skew_percent"] / 100) for rank in range(1, axes["experts"] + 1)
    ]
    picked = (min(1.0, axes["top_k"] * one / sum(popularity)) for one in popularity)
    return sum(1 - (1 - chance) ** axes["tokens"] for chance in picked)


def _moe_bytes(axes: Axes, activation_bytes: float, expert_bytes: float) -> float:
    out = 2.0 * axes["tokens"] * axes["top_k"] * axes["n"]
    return activation_bytes + expected_experts(axes) * expert_bytes + out


def _moe_fp8_bytes(axes: Axes, scales: str) -> float:
    x = fp8_activation_bytes(axes["tokens"], axes["k"], scales)
    return _moe_bytes(axes, x, fp8_bytes(axes["n"], axes["k"], scales))


def _moe_int4_bytes(axes: Axes, group: int) -> float:
    return _moe_bytes(
        axes, 2.0 * axes["tokens"] * axes["k"], int4_bytes(axes["n"], axes["k"], group)
    )


def _gemm_examples(*shapes: tuple[int, int, int]) -> tuple[Axes, ...]:
    return tuple(dict(zip("mnk", shape, strict=True)) for shape in shapes)


def _moe_examples(*shapes: tuple[int, int, int, int, int, int]) -> tuple[Axes, ...]:
    return tuple(dict(zip(MOE_AXES, shape, strict=True)) for shape in shapes)


GEMM_EXAMPLES = _gemm_examples((1, 80, 1024), (17, 144, 512), (65, 144, 256), (129, 272, 128))
MOE_EXAMPLES = _moe_examples(
    (1, 8, 2, 80, 256, 0), (17, 8, 4, 144, 256, 100), (65, 4, 2, 80, 256, 200)
)


def _gemm_int4(group: int, zeros: bool = False) -> KernelSpec:
    label = f"g{group}{'_zp' * zeros}"
    return KernelSpec(
        name=f"gemm_int4_{label}",
        summary=f"BF16 by INT4 in groups of {group}{' with zero points' * zeros}",
        axes=GEMM_AXES,
        flops=gemm_flops,
        bytes=partial(_gemm_int4_bytes, group=group, zeros=zeros),
        inputs=f"{OPS}.gemm_int4_reference:make_inputs_{label}",
        reference_function=f"{OPS}.gemm_int4_reference:reference",
        runs={"triton": f"{OPS}.gemm_int4:run"},
        tolerances={"out": DEQUANTISED_ERROR},
        examples=GEMM_EXAMPLES,
        configs_name=f"{OPS}.gemm_int4:{label.upper()}_CONFIGS",
        prepares={"triton": f"{OPS}.gemm_int4_reference:prepare"},
        capability_min=80,
    )


def _gemm_fp8(scales: str) -> KernelSpec:
    return KernelSpec(
        name=f"gemm_fp8_{scales}",
        summary=f"FP8 by FP8 with {scales} scales",
        axes=GEMM_AXES,
        flops=gemm_flops,
        bytes=partial(_gemm_fp8_bytes, scales=scales),
        inputs=f"{OPS}.gemm_fp8_reference:make_{scales}_inputs",
        reference_function=f"{OPS}.gemm_fp8_reference:{scales}_reference",
        runs={"triton": f"{OPS}.gemm_fp8:run_{scales}"},
        tolerances={"out": OUT_ERROR},
        examples=GEMM_EXAMPLES,
        configs_name=f"{OPS}.gemm_fp8:{scales.upper()}_CONFIGS",
        prepares={"triton": f"{OPS}.gemm_fp8_reference:prepare"},
        capability_min=90,
    )


GEMM_NVFP4 = KernelSpec(
    name="gemm_nvfp4",
    summary="NVFP4 by NVFP4 with packed scales",
    axes=GEMM_AXES,
    flops=gemm_flops,
    bytes=_gemm_nvfp4_bytes,
    inputs=f"{OPS}.gemm_nvfp4_reference:make_inputs",
    reference_function=f"{OPS}.gemm_nvfp4_reference:reference",
    runs={"triton": f"{OPS}.gemm_nvfp4:run"},
    tolerances={"out": OUT_ERROR},
    examples=_gemm_examples((1, 80, 2048), (17, 144, 320), (65, 16, 64), (129, 272, 256)),
    configs_name=f"{OPS}.gemm_nvfp4:CONFIGS",
    prepares={"triton": f"{OPS}.gemm_nvfp4_reference:prepare"},
    capability_min=100,
)


def _moe_fp8(scales: str) -> KernelSpec:
    return KernelSpec(
        name=f"moe_gemm_fp8_{scales}",
        summary=f"routed rows by their experts' FP8 matrices with {scales} scales",
        axes=MOE_AXES,
        flops=moe_flops,
        bytes=partial(_moe_fp8_bytes, scales=scales),
        inputs=f"{OPS}.moe_gemm_reference:make_fp8_{scales}_inputs",
        reference_function=f"{OPS}.moe_gemm_reference:fp8_{scales}_reference",
        runs={"triton": f"{OPS}.moe_gemm_fp8:run_{scales}"},
        tolerances={"out": OUT_ERROR},
        examples=MOE_EXAMPLES,
        configs_name=f"{OPS}.moe_gemm_fp8:{scales.upper()}_CONFIGS",
        prepares={"triton": f"{OPS}.moe_gemm_fp8:prepare"},
        capability_min=90,
    )


def _moe_int4(group: int) -> KernelSpec:
    return KernelSpec(
        name=f"moe_gemm_int4_g{group}",
        summary=f"routed rows by their experts' INT4 matrices in groups of {group}",
        axes=MOE_AXES,
        flops=moe_flops,
        bytes=partial(_moe_int4_bytes, group=group),
        inputs=f"{OPS}.moe_gemm_reference:make_int4_g{group}_inputs",
        reference_function=f"{OPS}.moe_gemm_reference:int4_reference",
        runs={"triton": f"{OPS}.moe_gemm_int4:run"},
        tolerances={"out": OUT_ERROR},
        examples=MOE_EXAMPLES,
        configs_name=f"{OPS}.moe_gemm_int4:G{group}_CONFIGS",
        prepares={"triton": f"{OPS}.moe_gemm_int4:prepare"},
        capability_min=80,
    )


def quantise_flops(axes: Axes) -> float:
    """Count one division per activation."""
    return float(axes["m"] * axes["k"])


def _quantise_bytes(axes: Axes, scales: str) -> float:
    return 2.0 * axes["m"] * axes["k"] + fp8_activation_bytes(axes["m"], axes["k"], scales)


def _quantise_fp8(scales: str) -> KernelSpec:
    return KernelSpec(
        name=f"quantise_fp8_{scales}",
        summary=f"quantise BF16 activations to FP8 with {scales} scales",
        axes={"m": "rows", "k": "features"},
        flops=quantise_flops,
        bytes=partial(_quantise_bytes, scales=scales),
        inputs=f"{OPS}.quantise_activations_reference:make_inputs",
        reference_function=f"{OPS}.quantise_activations_reference:{scales}_reference",
        runs={
            "triton": f"{OPS}.quantise_activations:run_{scales}",
            "cpu": f"{OPS}.quantise_activations_reference:{scales}_reference",
        },
        tolerances={"codes": 0.0, "scales": 0.0},
        examples=tuple({"m": m, "k": k} for m, k in ((1, 128), (17, 5120), (65, 256), (129, 128))),
        configs_name=f"{OPS}.quantise_activations:{scales.upper()}_CONFIGS",
        capability_min=89,
    )


ACTIVATION_KERNELS: tuple[KernelSpec, ...] = tuple(map(_quantise_fp8, ("row", "block")))

GEMM_KERNELS: tuple[KernelSpec, ...] = (
    *(_gemm_int4(group) for group in (32, 64, 128)),
    _gemm_int4(128, zeros=True),
    *(_gemm_fp8(scales) for scales in ("tensor", "row", "block")),
    GEMM_NVFP4,
    *(_moe_fp8(scales) for scales in ("row", "block")),
    *(_moe_int4(group) for group in (32, 128)),
)
