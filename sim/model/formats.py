"""Number formats of weights and KV caches as data, and the bytes they take."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import ceil

from tonnage.sim.domain import BadInputError, ModelSpec, WeightTensor


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """How a weight matrix `[out_features, in_features]` is stored.

    One scale of `scale_bytes` (and one zero point of `zero_point_bits`) serves `block_out` rows of
    `block_in` elements; None means the whole dimension. `tensor_bytes` are stored once per matrix.
    `compute_formats`: the GEMM precisions that serve it, best first; the first that a GPU has a
    rate for is used, so that FP8 weights on a GPU without FP8 run weight-only in BF16.
    """

    name: str
    bits: float
    compute_formats: tuple[str, ...]
    block_out: int | None = None
    block_in: int | None = None
    scale_bytes: int = 0
    zero_point_bits: int = 0
    tensor_bytes: int = 0

    def matrix_bytes(self, out_features: int, in_features: int) -> int:
        """Return the bytes of one matrix with its scales and zero points."""
        blocks = ceil(out_features / (self.block_out or out_features))
        blocks *= ceil(in_features / (self.block_in or in_features))
        elements_bytes = ceil(out_features * in_features * self.bits / 8 - 1e-6)
        zero_points_bytes = ceil(blocks * self.zero_point_bits / 8)
        return elements_bytes + blocks * self.scale_bytes + zero_points_bytes + self.tensor_bytes


def _int4(group: int, zero_point_bits: int = 0) -> NumberFormat:
    # compressed-tensors "pack-quantized" keeps one BF16 scale per group and, when symmetric, no
    # zero points; AWQ and GPTQ files keep a 4-bit zero point per group too (the `_zp` formats).
    name = f"int4_g{group}" + ("_zp" if zero_point_bits else "")
    return NumberFormat(
        name, 4, ("bf16",), 1, group, scale_bytes=2, zero_point_bits=zero_point_bits
    )


# bf16_lossless: entropy-coded exponents; about 70 % of the BF16 size, near 11 bits a weight, is
# what DFloat11 publishes (arXiv 2504.11651). nvfp4: e4m3 scale per 16 elements, FP32 weight and
# input scales per matrix. mxfp4: e8m0 scale per 32; served weight-only in BF16 by most kernels.
# fp8_block: FP32 scale per 128 x 128. int8 and fp8_channel: FP32 scale per output channel.
FORMATS: dict[str, NumberFormat] = {
    number_format.name: number_format
    for number_format in (
        NumberFormat("fp32", 32, ("tf32", "bf16")),
        NumberFormat("bf16", 16, ("bf16",)),
        NumberFormat("fp16", 16, ("fp16", "bf16")),
        NumberFormat("bf16_lossless", 11.2, ("bf16",)),
        NumberFormat("fp8", 8, ("fp8", "bf16"), scale_bytes=4),
        NumberFormat("fp8_channel", 8, ("fp8", "bf16"), block_out=1, scale_bytes=4),
        NumberFormat("fp8_block", 8, ("fp8", "bf16"), 128, 128, scale_bytes=4),
        NumberFormat("int8", 8, ("int8", "bf16"), block_out=1, scale_bytes=4),
        *(_int4(group) for group in (32, 64, 128)),
        *(_int4(group, zero_point_bits=4) for group in (32, 64, 128)),
        NumberFormat("mxfp4", 4, ("bf16",), 1, 32, scale_bytes=1),
        NumberFormat("nvfp4", 4, ("fp4", "bf16"), 1, 16, scale_bytes=1, tensor_bytes=8),
        NumberFormat("nvfp4_w4a16", 4, ("bf16",), 1, 16, scale_bytes=1, tensor_bytes=4),
    )
}

UNQUANTISED_FORMATS = frozenset({"fp32", "bf16", "fp16"})

KV_ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp8_e4m3": 1}


def number_format(name: str) -> NumberFormat:
    """Return the format of that name, or refuse with the names that exist."""
    try:
        return FORMATS[name]
    except KeyError:
        valid = ", ".join(FORMATS)
        raise BadInputError(f"unknown weight format {name!r}; use one of {valid}") from None


def weight_bytes(tensor: WeightTensor) -> int:
    """Return the stored bytes of a weight tensor, all copies, scales and zero points included."""
    one = number_format(tensor.format).matrix_bytes(tensor.out_features, tensor.in_features)
    return tensor.copies * one


def checkpoint_bytes(model: ModelSpec) -> int:
    """Return the bytes of the whole checkpoint, MTP layers and vision tower included."""
    layers = (*model.layers, *model.mtp_layers)
    in_layers = sum(weight_bytes(tensor) for layer in layers for tensor in layer.weights)
    return in_layers + sum(weight_bytes(tensor) for tensor in model.outer_weights)


def compute_format(weight_format: str, available: Collection[str] | None = None) -> str:
    """Return the GEMM precision that a weight format runs in, on a GPU that offers `available`."""
    preferred = number_format(weight_format).compute_formats
    if available is None:
        return preferred[0]
    for precision in preferred:
        if precision in available:
            return precision
    offered = ", ".join(sorted(available))
    raise BadInputError(
        f"weight format {weight_format!r} needs {' or '.join(preferred)} arithmetic; "
        f"the GPU has rates for {offered}"
    )


def kv_element_bytes(kv_format: str) -> int:
    """Return the bytes of one stored K or V element."""
    if kv_format not in KV_ELEMENT_BYTES:
        valid = ", ".join(KV_ELEMENT_BYTES)
        raise BadInputError(f"unknown KV format {kv_format!r}; use one of {valid}")
    return KV_ELEMENT_BYTES[kv_format]
