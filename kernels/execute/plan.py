"""Which part of a model one rank runs: its kinds of layers, its products, and what is refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from tonnage.kernels.execute.formats import refuse_weight_format
from tonnage.kernels.ops.mla_decode_reference import LATENT, ROPE
from tonnage.sim.cost.fused import FusedProduct, fused_products
from tonnage.sim.domain import (
    BadInputError,
    GqaAttention,
    LayerSpec,
    MlaAttention,
    ModelSpec,
    MoeMlp,
    ParallelLayout,
    Role,
)
from tonnage.sim.model.kv import kv_heads_per_gpu
from tonnage.sim.model.layout import check_layout

ENGINE = "sglang"  # whose merging of projections is followed; vLLM's is the same without DP
HEAD_DIMS = (64, 128, 256)  # powers of two that the attention kernels take


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one kind: the model has `count` of them, of which `run` are executed."""

    label: str
    spec: LayerSpec
    count: int
    run: int

    @property
    def scale(self) -> float:
        """What the time of the executed layers is multiplied by."""
        return self.count / self.run


@dataclass(frozen=True, slots=True)
class RowShape:
    """What a layer stores of one token: a latent row, or K and V of the rank's heads."""

    kv_heads: int | None  # None: a latent
    width: int  # numbers of a row: of a head's K, or of the latent with its rope key

    @property
    def numbers(self) -> int:
        """Return the numbers stored per token and layer."""
        return self.width if self.kv_heads is None else 2 * self.kv_heads * self.width


def layer_groups(model: ModelSpec, layers: int | None = None) -> tuple[LayerGroup, ...]:
    """Return the kinds of layers in order of appearance, and how many of each to run.

    With fewer `layers` than the model has, every kind runs at least once and the rest goes to the
    kinds that are scaled most.
    """
    counts = Counter(model.layers)
    wanted = len(model.layers) if layers is None else min(layers, len(model.layers))
    if wanted < len(counts):
        raise BadInputError(
            f"layers: {wanted} are fewer than the {len(counts)} kinds of layers of {model.name}; "
            f"use at least {len(counts)}"
        )
    run = dict.fromkeys(counts, 1)
    for _ in range(wanted - len(counts)):
        left = [spec for spec in counts if run[spec] < counts[spec]]
        most_scaled = max(left, key=lambda spec: counts[spec] / run[spec])
        run[most_scaled] += 1
    labels: Counter[str] = Counter()
    groups = []
    for spec, count in counts.items():
        label = _label(spec)
        labels[label] += 1
        number = "" if labels[label] == 1 else f" {labels[label]}"
        groups.append(LayerGroup(label + number, spec, count, run[spec]))
    return tuple(groups)


def layer_kinds(model: ModelSpec) -> int:
    """Return how many kinds of layers there are: the fewest that are executed."""
    return len(set(model.layers))


def _label(spec: LayerSpec) -> str:
    attention = "mla" if isinstance(spec.attention, MlaAttention) else "gqa"
    indexed = isinstance(spec.attention, MlaAttention) and spec.attention.indexer is not None
    mlp = "moe" if isinstance(spec.mlp, MoeMlp) else "dense"
    return f"{attention}{' indexed' * indexed}, {mlp}"


def layer_products(model: ModelSpec, spec: LayerSpec, layout: ParallelLayout) -> list[FusedProduct]:
    """Return the matrix products of one layer of a rank, as the cost model lists them."""
    alone = replace(model, layers=(spec,), outer_weights=())
    return [product for product, _ in fused_products(alone, layout, ENGINE)]


def head_product(model: ModelSpec, layout: ParallelLayout) -> FusedProduct:
    """Return the product that makes logits; with tied embeddings it is the embedding's."""
    products = [product for product, _ in fused_products(model, layout, ENGINE)]
    return next(p for p in products if p.role in (Role.HEAD, Role.EMBEDDING))


def row_shape(spec: LayerSpec, layout: ParallelLayout) -> RowShape:
    """Return what one rank stores of a token in a layer."""
    attention = spec.attention
    if isinstance(attention, MlaAttention):
        return RowShape(None, attention.kv_lora_rank + attention.rope_dim)
    assert isinstance(attention, GqaAttention)
    return RowShape(int(kv_heads_per_gpu(attention, layout)), attention.head_dim)


def local_heads(attention: GqaAttention | MlaAttention, layout: ParallelLayout) -> int:
    """Return the query heads of one rank."""
    return attention.heads // layout.attention_tp


def refuse_unrunnable(model: ModelSpec, layout: ParallelLayout) -> None:
    """Raise BadInputError where the model or its layout has something that is not executed."""
    check_layout(model, layout)
    for name in ("pp", "ep", "attention_dp", "dcp"):
        size = getattr(layout, name)
        if size != 1:
            raise BadInputError(
                f"layout.{name}: {size} is not executed, only ranks of plain tensor parallelism; "
                f"use {name} 1"
            )
    for spec in dict.fromkeys(model.layers):
        problem = _layer_problem(spec)
        if problem is not None:
            raise BadInputError(f"{model.name}: {problem}")
        for tensor in spec.weights:
            refuse_weight_format(tensor)


def _layer_problem(spec: LayerSpec) -> str | None:
    attention = spec.attention
    if spec.mlp is None or not isinstance(attention, GqaAttention | MlaAttention):
        return "layers of linear attention, or without attention or MLP, are not executed"
    if isinstance(attention, MlaAttention):
        if (attention.kv_lora_rank, attention.rope_dim) != (LATENT, ROPE):
            return f"the MLA kernels take latents of {LATENT} + {ROPE}, not of " + (
                f"{attention.kv_lora_rank} + {attention.rope_dim}"
            )
        return None
    if attention.window_tokens is not None:
        return "sliding windows are not executed"
    if attention.head_dim != attention.value_dim or attention.head_dim not in HEAD_DIMS:
        return f"heads of {attention.head_dim} and values of {attention.value_dim} are not executed"
    return None


def left_out(model: ModelSpec, layout: ParallelLayout) -> tuple[str, ...]:
    """Return what a real step of the model does and an executed one does not."""
    remarks = []
    if layout.tp > 1:
        remarks.append(f"collectives among the {layout.tp} ranks")
    if any(one.name.endswith("bias") for layer in model.layers for one in layer.weights):
        remarks.append("biases and attention sinks")
    attentions = [layer.attention for layer in model.layers]
    if any(isinstance(one, MlaAttention) and one.sparse_top_k is not None for one in attentions):
        remarks.append(
            "scoring and selection of sparse attention (decode attends the first top-k tokens, "
            "prefill all)"
        )
    return tuple(remarks)
