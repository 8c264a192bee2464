"""Weights that a rank loads, which is more than its share of the checkpoint."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil

from tonnage.sim.domain import (
    LayerSpec,
    MlaAttention,
    ModelSpec,
    MoeMlp,
    ParallelLayout,
    Role,
    Shard,
    WeightTensor,
)
from tonnage.sim.model.formats import weight_bytes
from tonnage.sim.model.kv import stage_layers
from tonnage.sim.model.layout import mlp_ways

_BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class StageWeights:
    """Bytes that one GPU of a pipeline stage loads.

    `replicated`: what exceeds its equal share (stage / tp), by reason; with the shares it adds up
    to the total.
    """

    by_role: Mapping[Role, float] = field(hash=False)
    replicated: Mapping[str, float] = field(hash=False)

    @property
    def total_bytes(self) -> float:
        """Bytes of one GPU, all roles."""
        return sum(self.by_role.values())


def tensor_ways(tensor: WeightTensor, layout: ParallelLayout, engine: str) -> int:
    """Return among how many ranks of a stage the engine splits a tensor.

    Under attention-DP SGLang 0.5.23 splits the embedding over the attention ranks and the head over
    all of tp; each vLLM engine holds both itself. Experts are over all of tp, whole or cut.
    """
    if tensor.shard is Shard.REPLICATED:
        return 1
    if tensor.shard is Shard.EXPERT:
        return layout.tp
    if tensor.shard is Shard.ATTENTION:
        return layout.attention_tp
    if tensor.shard is Shard.KV_HEADS:
        return min(layout.attention_tp, tensor.shard_ways_max or layout.attention_tp)
    if tensor.shard is Shard.VOCAB and tensor.role is Role.EMBEDDING:
        return layout.attention_tp
    return mlp_ways(layout, engine)


def stage_weights(
    model: ModelSpec,
    layout: ParallelLayout,
    engine: str = "sglang",
    draft_layers_loaded: bool = False,
) -> list[StageWeights]:
    """Return what one GPU of each pipeline stage loads.

    The first stage holds the embedding and the vision tower, the last one the head, the final norm
    and, when the server speculates, the MTP layers.
    """
    stages = stage_layers(len(model.layers), layout, engine)
    result = []
    for index, stage in enumerate(stages):
        layers = list(model.layers[stage.start : stage.stop])
        is_last = index == layout.pp - 1
        if is_last and draft_layers_loaded:
            layers.extend(model.mtp_layers)
        tensors = [tensor for layer in layers for tensor in layer.weights]
        tensors.extend(_outer_tensors(model, is_first=index == 0, is_last=is_last))
        result.append(_loaded(tensors, layers, layout, engine, model.hidden_size))
    return result


def _outer_tensors(model: ModelSpec, is_first: bool, is_last: bool) -> Iterator[WeightTensor]:
    is_tied = all(tensor.role is not Role.HEAD for tensor in model.outer_weights)
    for tensor in model.outer_weights:
        if tensor.role is Role.EMBEDDING:
            held = is_first or (is_last and is_tied)
        else:
            held = is_first if tensor.role is Role.VISION else is_last
        if held:
            yield tensor


def _loaded(
    tensors: list[WeightTensor],
    layers: list[LayerSpec],
    layout: ParallelLayout,
    engine: str,
    hidden_size: int,
) -> StageWeights:
    by_role: defaultdict[Role, float] = defaultdict(float)
    replicated: defaultdict[str, float] = defaultdict(float)
    for tensor in tensors:
        stored_bytes = weight_bytes(tensor)
        ways = tensor_ways(tensor, layout, engine)
        by_role[tensor.role] += stored_bytes / ways
        if ways < layout.tp:
            excess_bytes = stored_bytes / ways - stored_bytes / layout.tp
            replicated[_reason(tensor, ways, layout)] += excess_bytes
    if engine == "vllm":
        padding_bytes = sum(_padding_bytes(layer, hidden_size, layout) for layer in layers)
        if padding_bytes:
            by_role[Role.ROUTED_EXPERT] += padding_bytes
            replicated["routed_expert: MXFP4 matrices padded for the kernel"] += padding_bytes
    absorbed_bytes = sum(_absorbed_bytes(layer, layout) for layer in layers)
    if absorbed_bytes:
        by_role[Role.ATTENTION] += absorbed_bytes
        replicated["attention: kv_b_proj again, absorbed, BF16"] += absorbed_bytes
    return StageWeights(dict(by_role), dict(replicated))


def _reason(tensor: WeightTensor, ways: int, layout: ParallelLayout) -> str:
    if tensor.shard is Shard.REPLICATED:
        return f"{tensor.role.value}: whole on every rank"
    if ways < layout.attention_tp:
        return f"{tensor.role.value}: fewer kv heads than ranks"
    return f"{tensor.role.value}: whole in every attention-DP rank"


def _absorbed_bytes(layer: LayerSpec, layout: ParallelLayout) -> float:
    """Return the bytes of the absorbed projections of latent attention.

    Both engines keep kv_b_proj for prefill and a rearranged BF16 copy for decode (SGLang `w_kc`,
    `w_vc`; vLLM `W_UK_T`, `W_UV`).
    """
    attention = layer.attention
    if not isinstance(attention, MlaAttention):
        return 0.0
    width = attention.heads * (attention.nope_dim + attention.value_dim)
    return width * attention.kv_lora_rank * _BF16_BYTES / layout.attention_tp


def _padding_bytes(layer: LayerSpec, hidden_size: int, layout: ParallelLayout) -> float:
    """Return what vLLM's MXFP4 expert kernels add: rounded-up width and hidden size.

    Its Marlin backend needs multiples of 128 and 256; gpt-oss-120b then loads 65.97 GiB of a
    60.8 GiB checkpoint (ovg-project/kvcached issue 187).
    """
    if not isinstance(layer.mlp, MoeMlp):
        return 0.0
    width = layer.mlp.intermediate_size / (layout.tp // layout.ep)
    padded = ceil(width / 128) * 128 * ceil(hidden_size / 256) * 256 / (width * hidden_size)
    stored_bytes = sum(
        weight_bytes(tensor)
        for tensor in layer.weights
        if tensor.shard is Shard.EXPERT and tensor.format == "mxfp4"
    )
    return (padded - 1) * stored_bytes / layout.tp
