"""The small operators between a step's kernels, from the measured rows of a profile.

Norms, rope, residual sums, gates, routing, KV writes, sampling. On a GPU each is a few microseconds
and the constants of `StepAssumptions` stand for them; on a CPU they are a large part of a step.
Times are read over the numbers that an operator works on, rows times width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tonnage.sim.cost.models.grid import LogCurve, monotone
from tonnage.sim.domain import (
    DenseMlp,
    GqaAttention,
    LayerSpec,
    MlaAttention,
    ModelSpec,
    MoeMlp,
    ParallelLayout,
    Role,
)
from tonnage.sim.model.kv import kv_heads_per_gpu
from tonnage.sim.model.weights import tensor_ways

if TYPE_CHECKING:
    import pandas as pd

_ROPE_ANGLES_WIDTH = 64  # of one head, as it is measured
Operator = tuple[str, int]  # name in the table, numbers of a row


@dataclass(frozen=True, slots=True)
class SmallOps:
    """Seconds of each operator over rows times width."""

    curves: Mapping[str, LogCurve]

    @classmethod
    def from_tables(cls, tables: Mapping[str, pd.DataFrame]) -> SmallOps | None:
        """Return them from the tables `small_ops` and `kv_write`, None where they are not there."""
        small = tables.get("small_ops")
        if small is None:
            return None
        curves = {str(name): _curve(rows, "rows") for name, rows in small.groupby("op")}
        written = tables.get("kv_write")
        for kind, rows in () if written is None else written.groupby("kind"):
            curves[f"write_{kind}"] = _curve(rows, "tokens")
        return cls(curves)

    def seconds(self, name: str, rows: float, width: int) -> float:
        """Return the seconds of an operator; one that was not measured takes none."""
        curve = self.curves.get(name)
        return curve.at(max(rows, 1.0) * width) if curve is not None else 0.0


def _curve(rows: pd.DataFrame, count: str) -> LogCurve:
    """Return the curve of an operator, the median of rows that work on as many numbers."""
    numbers = (rows[count] * rows["width"]).astype(np.float64)
    medians = rows["seconds"].groupby(numbers).median().sort_index()
    points = medians.index.to_numpy(np.float64)
    return LogCurve.of(points, monotone(np.log(medians.to_numpy(np.float64))))


@dataclass(frozen=True, slots=True)
class SmallOpTerms:
    """The operators of a pass: those on all rows of a rank, and those on the sampled ones."""

    ops: SmallOps
    decoding: Mapping[Operator, int]  # of a pass of decoding requests alone
    prompting: Mapping[Operator, int]
    sampled: Mapping[Operator, int]

    @classmethod
    def of(
        cls,
        ops: SmallOps,
        model: ModelSpec,
        layout: ParallelLayout,
        kv_format: str,
        *,
        in_module: bool = False,
    ) -> SmallOpTerms:
        """Count the operators of a model's rank; `in_module`: attention rows hold their own."""
        heads = [tensor for tensor in model.outer_weights if tensor.role is Role.HEAD]
        head = (heads or [one for one in model.outer_weights if one.role is Role.EMBEDDING])[0]
        vocabulary = head.out_features // tensor_ways(head, layout, "sglang")
        decoding, prompting = (
            Counter(_of_pass(model, layout, None if in_module else kv_format, is_decode))
            for is_decode in (True, False)
        )
        sampled = {("norm", model.hidden_size): 1, ("sample", vocabulary): 1}
        return cls(ops, decoding, prompting, sampled)

    def seconds(self, rows: float, sampled_rows: float, is_decode: bool) -> float:
        """Return the seconds of all small operators of a pass."""
        each = (
            (self.decoding if is_decode else self.prompting, rows),
            (self.sampled, sampled_rows),
        )
        return sum(
            count * self.ops.seconds(name, number, width)
            for counts, number in each
            for (name, width), count in counts.items()
        )


def _of_pass(
    model: ModelSpec, layout: ParallelLayout, kv_format: str | None, is_decode: bool
) -> Iterator[Operator]:
    """Yield the operators of a pass; without a KV format, those of attention are left out."""
    yield "embed", model.hidden_size
    yield "rope", _ROPE_ANGLES_WIDTH
    for layer in model.layers:
        yield from [("norm", model.hidden_size), ("add", model.hidden_size)] * 2
        attention = layer.attention
        if kv_format is None:
            pass
        elif isinstance(attention, GqaAttention):
            yield from _of_gqa(attention, layout, kv_format)
        elif isinstance(attention, MlaAttention):
            yield from _of_mla(attention, layout, kv_format, is_decode)
        yield from _of_mlp(layer, model.hidden_size, layout)


def _of_gqa(attention: GqaAttention, layout: ParallelLayout, kv_format: str) -> Iterator[Operator]:
    heads, kv_heads = (
        attention.heads // layout.attention_tp,
        int(kv_heads_per_gpu(attention, layout)),
    )
    dim = attention.head_dim
    yield "rope", (heads + kv_heads) * dim
    yield "join", (heads + 2 * kv_heads) * dim
    if kv_format == "bf16":
        yield from [("put", kv_heads * dim)] * 2
    else:
        yield "write_gqa", 2 * kv_heads * dim


def _of_mla(
    attention: MlaAttention, layout: ParallelLayout, kv_format: str, is_decode: bool
) -> Iterator[Operator]:
    heads, rope = attention.heads // layout.attention_tp, attention.rope_dim
    latent = attention.kv_lora_rank + rope
    if attention.q_lora_rank is not None:
        yield "norm", attention.q_lora_rank
    yield from [("norm", attention.kv_lora_rank), ("rope", heads * rope), ("rope", rope)]
    if kv_format == "bf16":
        yield from [("join", latent), ("put", latent)]
    else:
        yield "write_mla", latent
    if is_decode:
        yield "join", heads * latent
    else:
        yield from [("join", latent)] + [("join", heads * (attention.nope_dim + rope))] * 2


def _of_mlp(layer: LayerSpec, hidden: int, layout: ParallelLayout) -> Iterator[Operator]:
    mlp = layer.mlp
    if isinstance(mlp, DenseMlp):
        yield "gate", mlp.intermediate_size // layout.tp
    elif isinstance(mlp, MoeMlp):
        yield "route", mlp.experts
        if mlp.shared_experts:
            yield "gate", mlp.shared_experts * mlp.intermediate_size // layout.tp
            yield "add", hidden
