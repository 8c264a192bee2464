"""What one step of one rank reads, computes and sends, operator by operator, from geometry alone.

Units: bytes and FLOP of one GPU. A matrix product of `tokens` rows costs 2 FLOP per weight and row
and reads every weight once; attention reads the KV of every context.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from tonnage.sim.domain import (
    GqaAttention,
    LayerSpec,
    LinearAttention,
    MlaAttention,
    ModelSpec,
    MoeMlp,
    ParallelLayout,
    Role,
    WeightTensor,
)
from tonnage.sim.model.formats import weight_bytes
from tonnage.sim.model.kv import (
    indexer_bytes_per_token,
    layer_bytes_per_token,
    state_bytes,
)
from tonnage.sim.model.weights import tensor_ways

ACTIVATION_BYTES = 2  # BF16 between operators


@dataclass(frozen=True, slots=True)
class MatrixProduct:
    """A weight matrix (or a group of experts) of one rank, `count` times per step."""

    tensor: WeightTensor
    ways: int
    count: int

    @property
    def weight_bytes(self) -> float:
        """Stored bytes of one rank's share, all copies."""
        return weight_bytes(self.tensor) / self.ways

    @property
    def parameters(self) -> float:
        """Weights of one rank's share, all copies."""
        return self.tensor.parameters / self.ways

    def activation_bytes(self, tokens: float) -> float:
        """Bytes of inputs and outputs of one product."""
        width = self.tensor.in_features + self.tensor.out_features / self.ways
        return tokens * width * ACTIVATION_BYTES


def matrix_products(
    model: ModelSpec, layout: ParallelLayout, engine: str
) -> Iterator[MatrixProduct]:
    """Yield every weight that a step multiplies with, equal ones counted together."""
    counts = Counter(tensor for layer in model.layers for tensor in layer.weights)
    counts.update(model.outer_weights)
    head_shown = any(tensor.role is Role.HEAD for tensor in counts)
    for tensor, count in counts.items():
        is_tied_head = tensor.role is Role.EMBEDDING and not head_shown
        if tensor.role in (Role.EMBEDDING, Role.NORM, Role.VISION) and not is_tied_head:
            continue
        yield MatrixProduct(tensor, tensor_ways(tensor, layout, engine), count)


def experts_touched(mlp: MoeMlp, tokens: float) -> float:
    """Return how many of all experts a batch reaches under uniform routing.

    ``E (1 - (1 - k/E)^T)``: every token picks k of E experts independently of the others.
    """
    return float(mlp.experts * (1.0 - (1.0 - mlp.top_k / mlp.experts) ** tokens))


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """One kind of attention layer and how many layers have it."""

    attention: GqaAttention | MlaAttention | LinearAttention
    layers: int


def attention_kinds(layers: tuple[LayerSpec, ...]) -> list[AttentionKind]:
    """Return the distinct attention layers with their counts."""
    counts = Counter(layer.attention for layer in layers if layer.attention is not None)
    return [AttentionKind(attention, count) for attention, count in counts.items()]


@dataclass(frozen=True, slots=True)
class ReadCost:
    """Cost of one layer's attention for one query token per token of context that it reads.

    `per_query`: every query of a sequence selects its own tokens, so none shares another's read.
    """

    bytes_per_token: float
    flops_per_token: float
    limit_tokens: int | None  # at most so many tokens are read (window, sparse top-k)
    per_query: bool = False


def decode_reads(
    attention: GqaAttention | MlaAttention, layout: ParallelLayout, kv_format: str
) -> list[ReadCost]:
    """Return what a query of one sequence reads in one layer: its KV, and the indexer's keys.

    MLA in its absorbed form: every head multiplies the whole latent twice, once for the scores
    (kv_lora + rope) and once for the values (kv_lora). Under dcp a rank reads its share of the
    context for the heads of all dcp ranks: fewer bytes, the same FLOP.
    """
    heads = attention.heads / layout.attention_tp
    bytes_per_token = layer_bytes_per_token(attention, layout, kv_format) / layout.dcp
    if isinstance(attention, GqaAttention):
        flops = 2 * heads * (attention.head_dim + attention.value_dim)
        return [ReadCost(bytes_per_token, flops, attention.window_tokens)]
    flops = 2 * heads * (2 * attention.kv_lora_rank + attention.rope_dim)
    is_sparse = attention.sparse_top_k is not None
    reads = [ReadCost(bytes_per_token, flops, attention.sparse_top_k, is_sparse)]
    if attention.indexer is not None:
        indexer_flops = 2.0 * attention.indexer.heads * attention.indexer.head_dim
        reads.append(ReadCost(indexer_bytes_per_token(attention), indexer_flops, None))
    return reads


def prefill_pair_flops(
    attention: GqaAttention | MlaAttention, layout: ParallelLayout
) -> list[tuple[float, int | None]]:
    """Return (FLOP per query-key pair of one layer, most keys per query) of each part.

    MLA prefill decompresses the latent: nope + rope for the scores, the value width for the sum.
    """
    heads = attention.heads / layout.attention_tp
    if isinstance(attention, GqaAttention):
        width = attention.head_dim + attention.value_dim
        return [(2 * heads * width, attention.window_tokens)]
    width = attention.nope_dim + attention.rope_dim + attention.value_dim
    parts: list[tuple[float, int | None]] = [(2 * heads * width, attention.sparse_top_k)]
    if attention.indexer is not None:
        parts.append((2.0 * attention.indexer.heads * attention.indexer.head_dim, None))
    return parts


def causal_pairs(new_tokens: int, past_tokens: int, limit: int | None) -> float:
    """Return the query-key pairs of one chunk, each query seeing at most `limit` keys."""
    if limit is None or new_tokens + past_tokens <= limit:
        return new_tokens * past_tokens + new_tokens * (new_tokens + 1) / 2
    growing = min(max(limit - past_tokens, 0), new_tokens)  # queries that see fewer keys
    saturated = (new_tokens - growing) * limit
    return growing * past_tokens + growing * (growing + 1) / 2 + saturated


def state_traffic_bytes(attention: LinearAttention, layout: ParallelLayout) -> float:
    """Return bytes that one sequence's state moves in one layer and step: read and written."""
    return 2.0 * state_bytes(attention, layout)
