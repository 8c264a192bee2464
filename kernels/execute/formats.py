"""Weight and KV formats that are executed, and the kernels that serve them."""

from __future__ import annotations

from tonnage.sim.domain import BadInputError, Role, WeightTensor

BACKENDS = ("cpu", "triton")
KV_SUFFIX = {"bf16": "bf16", "fp8_e4m3": "fp8"}  # KV format -> suffix of the kernels' names
DENSE_FORMATS = ("bf16", "fp16", "fp32")  # all run as BF16
# Weight format -> scales of the FP8 kernels. One scale per tensor runs as equal scales per row:
# engines quantise activations per token, which the row kernel takes.
FP8_SCALES = {"fp8": "row", "fp8_channel": "row", "fp8_block": "block"}
INT4_GROUPS = {"int4_g32": 32, "int4_g64": 64, "int4_g128": 128}
EXPERT_INT4_GROUPS = (32, 128)


def executed_formats() -> tuple[str, ...]:
    """Return the weight formats that are executed."""
    return (*DENSE_FORMATS, *FP8_SCALES, *INT4_GROUPS)


def refuse_weight_format(tensor: WeightTensor) -> None:
    """Raise BadInputError for a weight whose format has no kernel on every backend."""
    if tensor.role in (Role.NORM, Role.EMBEDDING, Role.VISION):
        return
    known = tensor.format in executed_formats()
    if tensor.role is Role.ROUTED_EXPERT and tensor.format in INT4_GROUPS:
        known = INT4_GROUPS[tensor.format] in EXPERT_INT4_GROUPS
    if not known:
        raise BadInputError(
            f"weights: {tensor.format} of {tensor.name} is not executed; use one of "
            f"{', '.join(executed_formats())}"
        )


def stored_bytes(weight_format: str, parameters: float, backend: str) -> float:
    """Estimate what weights take in memory once they are prepared for a backend."""
    if weight_format in INT4_GROUPS:
        # the CPU holds torch's layout and a plain one
        per_weight = 0.5 + 2 / INT4_GROUPS[weight_format]
        return parameters * (2 * per_weight + 4 / 128 if backend == "cpu" else per_weight)
    return parameters * (1.05 if weight_format in FP8_SCALES else 2.0)
