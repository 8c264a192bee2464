"""The parts of a step that are no kernel of the registry: torch's own operators, as it runs them.

`kernels/execute` runs these between the kernels; they are described as kernels are, so that the
same code measures them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from tonnage.kernels.gemm_specs import expected_experts
from tonnage.kernels.spec import Axes, KernelSpec

PARTS = "tonnage.kernels.parts"
BF16_BYTES = 2.0
LATENT_NUMBERS = 512
ROPE_NUMBERS = 64
# Bytes of an expert's weight, scales included, by weight format.
EXPERT_FORMATS: Mapping[str, float] = {
    "bf16": 2.0,
    "fp8": 1.0,
    "fp8_block": 1.0,
    "int4_g32": 0.5625,
    "int4_g128": 0.515625,
}
EXPERT_AXES = {
    "tokens": "tokens",
    "experts": "experts",
    "top_k": "experts a token goes to",
    "hidden": "features of a token",
    "inter": "width of a rank's part of an expert",
    "ways": "ranks that an expert is cut over",
    "balanced": "1: tokens take the experts in turn; 0: at random",
}
# Operators on rows, and how often each number of a row crosses memory.
ROW_PARTS: Mapping[str, tuple[str, float]] = {
    "norm": ("divide rows by their root mean square", 2.0),
    "rope": ("rotate the halves of heads of 64", 2.0),
    "gate": ("silu(gate) * up of rows that hold both", 1.5),
    "add": ("add rows to rows", 3.0),
    "join": ("put two halves of rows beside each other", 2.0),
    "route": ("sigmoid, best two experts and their shares", 1.0),
    "embed": ("look rows up", 2.0),
    "sample": ("find the largest of each row", 1.0),
    "put": ("write BF16 rows to a paged cache", 2.0),
}


def _row_bytes(axes: Axes, crossings: float) -> float:
    return BF16_BYTES * crossings * axes["rows"] * axes["width"]


def _row_flops(axes: Axes) -> float:
    return float(axes["rows"] * axes["width"])


def _row_part(name: str) -> KernelSpec:
    summary, crossings = ROW_PARTS[name]
    run = f"{PARTS}:{name}"
    return KernelSpec(
        name=name,
        summary=summary,
        axes={"rows": "rows", "width": "numbers of a row"},
        flops=_row_flops,
        bytes=partial(_row_bytes, crossings=crossings),
        inputs=f"{PARTS}:make_{name}_inputs",
        reference_function=run,
        runs={"torch": run, "cpu": run},
        tolerances={"out": 0.0},
        examples=({"rows": 3, "width": 256},),
    )


def _experts_flops(axes: Axes) -> float:
    return 6.0 * axes["tokens"] * axes["top_k"] * axes["hidden"] * axes["inter"]


def _experts_bytes(axes: Axes, weight_bytes: float) -> float:
    touched = min(axes["tokens"] * axes["top_k"], axes["experts"])
    if not axes["balanced"]:
        touched_on_average = {**axes, "skew_percent": 0}
        touched = round(expected_experts(touched_on_average))
    weights = 3.0 * axes["hidden"] * axes["inter"] * touched * weight_bytes
    rows = axes["tokens"] * axes["top_k"]
    return weights + BF16_BYTES * rows * (2.0 * axes["hidden"] + 3.0 * axes["inter"])


def _experts(weight_format: str) -> KernelSpec:
    return KernelSpec(
        name=f"experts_{weight_format}",
        summary=f"routed experts of a layer, {weight_format}: up, gate, down, sum of choices",
        axes=EXPERT_AXES,
        flops=_experts_flops,
        bytes=partial(_experts_bytes, weight_bytes=EXPERT_FORMATS[weight_format]),
        inputs=f"{PARTS}:make_{weight_format}_experts",
        reference_function=f"{PARTS}:experts_reference",
        runs={"triton": f"{PARTS}:run_experts", "cpu": f"{PARTS}:run_experts"},
        tolerances={"out": 5e-2},
        examples=tuple(
            dict(zip(EXPERT_AXES, sizes, strict=True))
            for sizes in ((5, 4, 2, 128, 128, 1, 1), (17, 4, 1, 256, 128, 1, 0))
        ),
    )


def _latent_flops(axes: Axes) -> float:
    widths = axes["nope"] + axes["value"]
    return 2.0 * axes["rows"] * axes["heads"] * LATENT_NUMBERS * widths


def _latent_bytes(axes: Axes) -> float:
    widths = axes["nope"] + axes["value"]
    weights = axes["heads"] * LATENT_NUMBERS * widths
    rows = axes["rows"] * axes["heads"] * (widths + 2 * LATENT_NUMBERS)
    return BF16_BYTES * (weights + rows)


LATENT_PRODUCTS = KernelSpec(
    name="latent_products",
    summary="queries into the latent's space before MLA decode, and values out of it after",
    axes={
        "rows": "requests",
        "heads": "query heads",
        "nope": "numbers of a query without rope",
        "value": "numbers of a head's value",
    },
    flops=_latent_flops,
    bytes=_latent_bytes,
    inputs=f"{PARTS}:make_latent_inputs",
    reference_function=f"{PARTS}:latent_products_reference",
    runs={"torch": f"{PARTS}:latent_products", "cpu": f"{PARTS}:latent_products"},
    tolerances={"absorbed": 1e-2, "out": 1e-2},
    examples=({"rows": 3, "heads": 2, "nope": 64, "value": 128},),
)


def _pairs(axes: Axes) -> float:
    new, past = axes["new_tokens"], axes["prefix_tokens"]
    return new * past + new * (new + 1) / 2


def _mla_prefill_flops(axes: Axes) -> float:
    return 2.0 * axes["batch"] * axes["heads"] * _pairs(axes) * (axes["key"] + axes["value"])


def _mla_prefill_bytes(axes: Axes) -> float:
    held = axes["new_tokens"] + axes["prefix_tokens"]
    widths = axes["new_tokens"] * (axes["key"] + axes["value"])
    widths += held * (axes["key"] + axes["value"])
    return BF16_BYTES * axes["batch"] * axes["heads"] * widths


MLA_PREFILL = KernelSpec(
    name="mla_prefill",
    summary="prefill attention over decompressed latents, prompt by prompt",
    axes={
        "batch": "prompts",
        "heads": "query heads",
        "key": "numbers of a head's key, rope included",
        "value": "numbers of a head's value",
        "prefix_tokens": "tokens in the cache before",
        "new_tokens": "tokens to prefill of a prompt",
    },
    flops=_mla_prefill_flops,
    bytes=_mla_prefill_bytes,
    inputs=f"{PARTS}:make_mla_prefill_inputs",
    reference_function=f"{PARTS}:mla_prefill_reference",
    runs={"torch": f"{PARTS}:mla_prefill", "cpu": f"{PARTS}:mla_prefill"},
    tolerances={"out": 2e-2},
    examples=(
        {"batch": 2, "heads": 2, "key": 128, "value": 64, "prefix_tokens": 5, "new_tokens": 17},
    ),
)

PART_KERNELS: tuple[KernelSpec, ...] = (
    *map(_row_part, ROW_PARTS),
    *map(_experts, EXPERT_FORMATS),
    LATENT_PRODUCTS,
    MLA_PREFILL,
)
