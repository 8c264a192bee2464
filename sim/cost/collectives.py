"""What the GPUs of an instance send each other in a step, in seconds per row.

Bytes per GPU over the link, one direction; no latency. Per layer and row of BF16 activations:

- attention split over n ranks: an all-reduce, ``2 (n - 1) / n`` of the row;
- an MLP split over n ranks: the same. Where it is split over more ranks than attention is, under
  attention-DP, it is an all-gather before and a reduce-scatter after, of all ranks' rows, which
  move as much together. Experts spread over ranks are charged this too, not an all-to-all;
- decode context parallelism, of each decoding token: the queries of n ranks are gathered,
  ``(n - 1) heads x query width``, their partial outputs reduced and scattered,
  ``(n - 1) heads x value width``, and FP32 log-sums gathered, ``(n - 1) n heads`` (vLLM's
  `cp_lse_ag_out_rs`). `heads` are those of one rank; an MLA query is as wide as latent and rope
  part, its output as the latent. What prefill gathers under it is not modelled.

Per row and boundary of pipeline stages: hidden state and residual, each rank its slice, which the
next stage then gathers (SGLang's and vLLM's `send_tensor_dict`).
"""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.sim.cost.operators import ACTIVATION_BYTES
from tonnage.sim.domain import (
    DenseMlp,
    GpuSpec,
    GqaAttention,
    MlaAttention,
    ModelSpec,
    MoeMlp,
    ParallelLayout,
)
from tonnage.sim.model.layout import mlp_ways

_LOG_SUM_BYTES = 4  # FP32
_PIPELINE_TENSORS = 2  # hidden state and residual


@dataclass(frozen=True, slots=True)
class CollectiveTimes:
    """Seconds per row of an attention-DP rank, per row of all of them, per decoding token."""

    rank_row_s: float
    gathered_row_s: float
    decode_token_s: float


def collective_times(
    model: ModelSpec, layout: ParallelLayout, gpu: GpuSpec, engine: str
) -> CollectiveTimes:
    """Return what one pass through all layers of the model sends."""
    row_bytes = float(model.hidden_size * ACTIVATION_BYTES)
    rank_row_s = gathered_row_s = 0.0
    for layer in model.layers:
        if layer.attention is not None:
            rank_row_s += _all_reduce_s(row_bytes, layout.attention_tp, gpu)
        if isinstance(layer.mlp, DenseMlp | MoeMlp):
            is_dense = isinstance(layer.mlp, DenseMlp)
            ways = mlp_ways(layout, engine) if is_dense else layout.tp
            seconds = _all_reduce_s(row_bytes, ways, gpu)
            if ways > layout.attention_tp:
                gathered_row_s += seconds
            else:
                rank_row_s += seconds
    rank_row_s += pipeline_row_s(model, layout, gpu)
    return CollectiveTimes(rank_row_s, gathered_row_s, context_parallel_token_s(model, layout, gpu))


def context_parallel_token_s(model: ModelSpec, layout: ParallelLayout, gpu: GpuSpec) -> float:
    """Return the seconds per decoding token to share contexts, over all layers."""
    moved_bytes = sum(
        context_parallel_bytes(layer.attention, layout)
        for layer in model.layers
        if isinstance(layer.attention, GqaAttention | MlaAttention)
    )
    return moved_bytes / link_bytes_per_s(gpu, layout.dcp)


def context_parallel_bytes(attention: GqaAttention | MlaAttention, layout: ParallelLayout) -> float:
    """Return the bytes that a GPU moves per decoding token and layer to share a context."""
    ranks, heads = layout.dcp, attention.heads / layout.attention_tp
    if isinstance(attention, MlaAttention):
        width = 2 * attention.kv_lora_rank + attention.rope_dim
    else:
        width = attention.head_dim + attention.value_dim
    return (ranks - 1) * heads * (width * ACTIVATION_BYTES + ranks * _LOG_SUM_BYTES)


def link_bytes_per_s(gpu: GpuSpec, ranks: int) -> float:
    """Return the bandwidth between so many neighbouring ranks: the network's beyond one node."""
    if ranks > gpu.gpus_per_node:
        return gpu.network_bytes_per_s
    return gpu.nvlink_bytes_per_s or gpu.pcie_bytes_per_s


def _all_reduce_s(row_bytes: float, ranks: int, gpu: GpuSpec) -> float:
    return 2 * (ranks - 1) / ranks * row_bytes / link_bytes_per_s(gpu, ranks)


def pipeline_row_s(model: ModelSpec, layout: ParallelLayout, gpu: GpuSpec) -> float:
    """Return the seconds per row to hand it from stage to stage."""
    row_bytes = float(model.hidden_size * ACTIVATION_BYTES)
    message_bytes, ranks = _PIPELINE_TENSORS * row_bytes, layout.attention_tp
    gather_s = (ranks - 1) / ranks * message_bytes / link_bytes_per_s(gpu, ranks)
    total_s = 0.0
    for stage in range(1, layout.pp):
        last, first = stage * layout.tp - 1, stage * layout.tp
        same_node = last // gpu.gpus_per_node == first // gpu.gpus_per_node
        hop_bytes_per_s = link_bytes_per_s(gpu, 1) if same_node else gpu.network_bytes_per_s
        total_s += message_bytes / ranks / hop_bytes_per_s + gather_s
    return total_s
