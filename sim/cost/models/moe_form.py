"""What the routed experts of one rank read and compute, and the physical form of their time.

A rank holds ``experts / ep`` experts, each ``inter / tp`` wide: gate and up
`[2 inter / tp, hidden]`, down `[hidden, inter / tp]`. Tokens are those of all ranks together.
Units: tokens, bytes, seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import ArrayLike

from tonnage.sim.domain import BadInputError, FloatArray, GpuSpec
from tonnage.sim.model.formats import compute_format, number_format

# The routings of measured rows. `balanced` gives every expert its turn: k T distinct experts until
# all have a row. The power laws draw the experts' loads, and time the rank with the most work.
BALANCED = "balanced"
UNIFORM = "uniform"
MEASURED_ROUTINGS = (BALANCED, "power_law_1.01", "power_law_1.2")
ROUTINGS = (UNIFORM, *MEASURED_ROUTINGS)

# Rows of `int4` do not say their group. Their bytes are counted with 128; with 32 the scales make
# them 1.09 times as many (4.5 bits a weight, not 4.125), which widens the interval upwards.
INT4 = "int4"
_INT4_GROUP = "int4_g128"

_ACTIVATION_BYTES = 2  # BF16


@dataclass(frozen=True, slots=True)
class MoeShape:
    """Experts of a layer and how they are spread: `tp` ways along the width, `ep` ways in number.

    `inter` is the full width of one expert, not a rank's share.
    """

    hidden: int
    inter: int
    experts: int
    top_k: int
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        if min(self.hidden, self.inter, self.experts, self.top_k, self.tp, self.ep) < 1:
            raise BadInputError(f"{self}: sizes of experts must be at least 1")
        if self.top_k > self.experts or self.ep > self.experts:
            raise BadInputError(f"{self}: top_k and ep must be at most the number of experts")

    @property
    def family(self) -> tuple[int, int, int, int]:
        """The experts without their layout."""
        return self.hidden, self.inter, self.experts, self.top_k

    @property
    def features(self) -> FloatArray:
        """Logs to base 2 of hidden, a rank's width, a rank's experts, top_k and ep."""
        sizes = (self.hidden, self.inter / self.tp, self.experts / self.ep, self.top_k, self.ep)
        return np.log2(np.array(sizes, dtype=np.float64))

    @property
    def full_tokens(self) -> float:
        """Tokens from which balanced routing touches every expert."""
        return self.experts / self.top_k

    def expert_bytes(self, weight_format: str) -> float:
        """Stored bytes of a rank's share of one expert, scales included."""
        width = ceil(self.inter / self.tp)
        form = number_format(_INT4_GROUP if weight_format == INT4 else weight_format)
        gate_and_up = form.matrix_bytes(2 * width, self.hidden)
        return float(gate_and_up + form.matrix_bytes(self.hidden, width))

    def experts_touched(self, tokens: ArrayLike, routing: str) -> FloatArray:
        """Return the expected experts of one rank that have a row, at least one.

        Balanced: ``min(k T, E) / ep``; any other: ``E (1 - (1 - k/E)^T) / ep``, the uniform one,
        whose difference from a power law is left to the residuals.
        """
        count = np.asarray(tokens, dtype=np.float64)
        if routing == BALANCED:
            touched = np.minimum(count * self.top_k, self.experts)
        else:
            touched = self.experts * (1.0 - (1.0 - self.top_k / self.experts) ** count)
        least: FloatArray = np.maximum(touched / self.ep, 1.0)
        return least

    def rows(self, tokens: ArrayLike) -> FloatArray:
        """Return the mean rows of a rank, at least one."""
        mean: FloatArray = np.asarray(tokens, dtype=np.float64) * self.top_k / self.ep
        return np.maximum(mean, 1.0)

    @property
    def row_bytes(self) -> float:
        """Bytes that one row reads and writes: in and out, gate and up, and their product."""
        return _ACTIVATION_BYTES * (2.0 * self.hidden + 3.0 * self.inter / self.tp)

    @property
    def row_flop(self) -> float:
        """FLOP of one row: 2 per weight of gate, up and down."""
        return 6.0 * self.hidden * self.inter / self.tp


@dataclass(frozen=True, slots=True)
class MoeForm:
    """``t0 + ((bytes / B)^p + (FLOP / P)^p)^(1/p) + row bytes / R + local experts x e``.

    Bytes are the weights of the experts touched. Row bytes stand for permuting, activating and
    summing the rows; e for what a kernel does per local expert, touched or not.
    """

    t0_s: float
    bytes_per_s: float
    flops_per_s: float
    sharpness: float
    row_bytes_per_s: float
    expert_s: float

    def seconds(
        self, shape: MoeShape, expert_bytes: float, tokens: ArrayLike, routing: str
    ) -> FloatArray:
        """Return the seconds of the experts of one rank for each number of tokens."""
        rows = shape.rows(tokens)
        sizes = (expert_bytes, shape.row_flop, shape.row_bytes, shape.experts / shape.ep)
        return self.of_sizes(shape.experts_touched(tokens, routing), rows, *sizes)

    def of_sizes(
        self,
        touched: FloatArray,
        rows: FloatArray,
        expert_bytes: ArrayLike,
        row_flop: ArrayLike,
        row_bytes: ArrayLike,
        local_experts: ArrayLike,
    ) -> FloatArray:
        """Return the same from sizes, which broadcast: bytes of one expert, FLOP of one row."""
        power = self.sharpness
        moved_s = touched * np.asarray(expert_bytes) / self.bytes_per_s
        multiplied_s = rows * np.asarray(row_flop) / self.flops_per_s
        seconds: FloatArray = self.t0_s + (moved_s**power + multiplied_s**power) ** (1.0 / power)
        seconds = seconds + rows * np.asarray(row_bytes) / self.row_bytes_per_s
        return seconds + np.asarray(local_experts) * self.expert_s


def roofline_s(
    shape: MoeShape, weight_format: str, tokens: ArrayLike, routing: str, rates: GpuSpec
) -> FloatArray:
    """Return what the datasheet allows one rank: touched weights and rows moved, or FLOP."""
    touched, rows = shape.experts_touched(tokens, routing), shape.rows(tokens)
    moved = touched * shape.expert_bytes(weight_format) + rows * shape.row_bytes
    flops_per_s = rates.dense_flops_per_s[precision(weight_format, rates.dense_flops_per_s)]
    bound: FloatArray = np.maximum(
        moved / rates.memory_bandwidth_bytes_per_s, rows * shape.row_flop / flops_per_s
    )
    return bound


def precision(weight_format: str, flops_per_s: Mapping[str, float]) -> str:
    """Return the arithmetic that a format's experts run in, on a GPU with these rates."""
    name = _INT4_GROUP if weight_format == INT4 else weight_format
    return compute_format(name, flops_per_s)


def weight_bits(weight_format: str) -> str:
    """Return the bits of one weight, scales apart, as a key of a profile: "16", "8", "4"."""
    name = _INT4_GROUP if weight_format == INT4 else weight_format
    return f"{number_format(name).bits:g}"
