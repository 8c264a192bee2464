"""Refuses a parallel layout that the model cannot have, naming the field and the mend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tonnage.sim.domain import (
    BadInputError,
    DenseMlp,
    GqaAttention,
    LayerSpec,
    LinearAttention,
    ModelSpec,
    MoeMlp,
    ParallelLayout,
    Shard,
    WeightTensor,
)
from tonnage.sim.model.formats import number_format

# Engines refuse a shard that cuts a quantisation group of these formats (vLLM: "not divisible by
# weight quantization block_n"); of the 4-bit float formats they pad the shard instead.
_UNPADDED_FORMATS = ("fp8_block", "int4_")


def check_layout(
    model: ModelSpec, layout: ParallelLayout, field: str = "layout", engine: str = "sglang"
) -> None:
    """Raise BadInputError when the model cannot be split this way; `field` begins the message."""
    problem = layout_problem(model, layout, engine)
    if problem is not None:
        raise BadInputError(f"{field}.{problem}")


def layout_problem(model: ModelSpec, layout: ParallelLayout, engine: str = "sglang") -> str | None:
    """Return "<field>: <what is wrong>; use ...", or None for a layout that the model can have."""
    if layout.pp > len(model.layers):
        return f"pp: {layout.pp} is more than the {len(model.layers)} layers of {model.name}"
    for layer in _kinds(model):
        problem = (
            _attention_problem(model, layer, layout)
            or _mlp_problem(model, layer, layout, engine)
            or _group_problem(model, layer, layout, engine)
        )
        if problem is not None:
            return problem
    has_experts = any(isinstance(layer.mlp, MoeMlp) for layer in model.layers)
    if layout.ep > 1 and not has_experts:
        return f"ep: {model.name} has no experts; use ep 1"
    return None


def mlp_ways(layout: ParallelLayout, engine: str) -> int:
    """Return how many ranks share a dense or shared-expert MLP.

    SGLang gathers the tokens of all attention-DP ranks before it and splits it over all of tp; in
    vLLM each data-parallel engine holds its own, in TensorRT-LLM each attention-DP rank
    (`DeepseekV3DecoderLayer._compute_mlp_tp_size`).
    """
    return layout.attention_tp if engine in ("vllm", "trtllm") else layout.tp


def _kinds(model: ModelSpec) -> Iterator[LayerSpec]:
    """Yield one layer of each kind: the checks need no more."""
    seen = set()
    for layer in model.layers:
        formats = tuple(tensor.format for tensor in layer.weights)
        key = (layer.attention, layer.mlp, formats)
        if key not in seen:
            seen.add(key)
            yield layer


def _attention_problem(model: ModelSpec, layer: LayerSpec, layout: ParallelLayout) -> str | None:
    attention, ranks = layer.attention, layout.attention_tp
    if attention is None:
        return None
    kv_heads = attention.kv_heads if isinstance(attention, GqaAttention) else None
    if not _divides(ranks, attention.heads, kv_heads):
        fitting = [
            size * layout.attention_dp
            for size in range(1, attention.heads + 1)
            if _divides(size, attention.heads, kv_heads)
        ]
        kind = "linear-attention" if isinstance(attention, LinearAttention) else "attention"
        share = f" over {layout.attention_dp} attention_dp" if layout.attention_dp > 1 else ""
        return (
            f"tp: {layout.tp}{share} does not divide the {attention.heads} {kind} heads of "
            f"{model.name}{f' ({kv_heads} kv heads)' if kv_heads else ''}; "
            f"use {', '.join(map(str, fitting))}"
        )
    if kv_heads is not None and layout.dcp > max(1, ranks // kv_heads):
        most = max(1, ranks // kv_heads)
        return (
            f"dcp: {layout.dcp} ranks share the KV of a request only where its {kv_heads} kv heads "
            f"are held that many times over; with tp {layout.tp} use at most {most}"
        )
    return None


def _divides(ranks: int, heads: int, kv_heads: int | None) -> bool:
    if heads % ranks:
        return False
    return kv_heads is None or kv_heads % ranks == 0 or ranks % kv_heads == 0


def _mlp_problem(
    model: ModelSpec, layer: LayerSpec, layout: ParallelLayout, engine: str
) -> str | None:
    mlp = layer.mlp
    if isinstance(mlp, DenseMlp) and mlp.intermediate_size % mlp_ways(layout, engine):
        ways, size = mlp_ways(layout, engine), mlp.intermediate_size
        return f"tp: {ways} ranks do not divide the MLP width {size} of {model.name}"
    if not isinstance(mlp, MoeMlp):
        return None
    if mlp.experts % layout.ep:
        fitting = [ep for ep in _divisors(layout.tp) if mlp.experts % ep == 0]
        return (
            f"ep: {layout.ep} does not divide the {mlp.experts} experts of {model.name}; "
            f"use {', '.join(map(str, fitting))}"
        )
    if mlp.intermediate_size % (layout.tp // layout.ep):
        return (
            f"tp: {layout.tp // layout.ep} ranks per expert do not divide the expert width "
            f"{mlp.intermediate_size} of {model.name}"
        )
    return None


def _group_problem(
    model: ModelSpec, layer: LayerSpec, layout: ParallelLayout, engine: str
) -> str | None:
    for tensor in layer.weights:
        ways = {
            Shard.EXPERT: layout.tp // layout.ep,
            Shard.MLP: mlp_ways(layout, engine),
        }.get(tensor.shard)
        if ways is None or not tensor.format.startswith(_UNPADDED_FORMATS):
            continue
        if not _cuts_a_group(tensor, model.hidden_size, ways):
            continue
        mend = _group_mend(model, layout, engine) if tensor.shard is Shard.EXPERT else ""
        return (
            f"tp: {ways} ranks cut the {tensor.format} groups of {tensor.name} of {model.name} "
            f"[{tensor.out_features}, {tensor.in_features}]{mend}"
        )
    return None


def _cuts_a_group(tensor: WeightTensor, hidden_size: int, ways: int) -> bool:
    form = number_format(tensor.format)
    if tensor.out_features != hidden_size:  # split by rows: gate_proj, up_proj
        return (
            tensor.out_features % ways != 0
            or (tensor.out_features // ways) % (form.block_out or 1) != 0
        )
    return (
        tensor.in_features % ways != 0 or (tensor.in_features // ways) % (form.block_in or 1) != 0
    )


def _group_mend(model: ModelSpec, layout: ParallelLayout, engine: str) -> str:
    """Return which ep would leave the groups whole."""
    for ep in _divisors(layout.tp):
        if ep > layout.ep and layout_problem(model, replace(layout, ep=ep), engine) is None:
            return f"; use ep {ep}"
    return "; use a smaller tp"


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
