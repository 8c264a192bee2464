"""Attention layers as Hugging Face configs describe them: geometry and weight tensors.

Names are the module names of the published modelling code, relative to the layer. Formats are
those of an unquantised checkpoint; `hf_quantisation` changes them afterwards. Sources: the
modelling files of transformers and of the models' own repositories.
"""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.sim.domain import (
    GqaAttention,
    Indexer,
    LinearAttention,
    MlaAttention,
    Role,
    Shard,
    WeightTensor,
)
from tonnage.sim.model.config_fields import ConfigFields

Weights = tuple[WeightTensor, ...]


def vector(
    name: str, elements: int, shard: Shard = Shard.REPLICATED, copies: int = 1
) -> WeightTensor:
    """Return a tensor of norm weights, biases or other vectors that no GEMM reads."""
    return WeightTensor(name, Role.NORM, elements, 1, "bf16", shard, copies)


def attention_matrix(
    name: str, out_features: int, in_features: int, shard: Shard = Shard.ATTENTION
) -> WeightTensor:
    """Return one attention projection `[out_features, in_features]`."""
    return WeightTensor(name, Role.ATTENTION, out_features, in_features, "bf16", shard)


@dataclass(frozen=True, slots=True)
class GqaOptions:
    """What differs between grouped-query attention layers besides their sizes.

    `norm_elements`: input norm and query/key norms. `bias_elements`: all biases and sinks.
    `gated`: q_proj also makes a gate of its own size (Qwen3.5). `key_is_value`: no v_proj; V is
    read from the key projection but still stored (Gemma 4's global layers).
    """

    norm_elements: int
    bias_elements: int = 0
    gated: bool = False
    key_is_value: bool = False
    prefix: str = "self_attn"


def gqa_weights(hidden_size: int, attention: GqaAttention, options: GqaOptions) -> Weights:
    """Return the projections of a grouped-query attention layer, its norms and biases."""
    prefix, kv_heads = options.prefix, attention.kv_heads
    query_size = attention.heads * attention.head_dim * (2 if options.gated else 1)

    def kv_matrix(name: str, head_size: int) -> WeightTensor:
        out_features, shard = kv_heads * head_size, Shard.KV_HEADS
        return WeightTensor(
            f"{prefix}.{name}",
            Role.ATTENTION,
            out_features,
            hidden_size,
            "bf16",
            shard,
            shard_ways_max=kv_heads,
        )

    weights = [
        vector("input_layernorm", options.norm_elements),
        attention_matrix(f"{prefix}.q_proj", query_size, hidden_size),
        kv_matrix("k_proj", attention.head_dim),
    ]
    if not options.key_is_value:
        weights.append(kv_matrix("v_proj", attention.value_dim))
    output_size = attention.heads * attention.value_dim
    weights.append(attention_matrix(f"{prefix}.o_proj", hidden_size, output_size))
    if options.bias_elements:
        weights.append(vector(f"{prefix}.bias", options.bias_elements))
    return tuple(weights)


def read_mla(fields: ConfigFields, owns_indexer: bool) -> MlaAttention:
    """Return the geometry of latent attention; sparse where the config has `index_topk`."""
    top_k = fields.optional_integer("index_topk")
    indexer = None
    if top_k and owns_indexer:
        indexer = Indexer(fields.integer("index_n_heads"), fields.integer("index_head_dim"))
    return MlaAttention(
        heads=fields.integer("num_attention_heads"),
        q_lora_rank=fields.optional_integer("q_lora_rank"),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        nope_dim=fields.integer("qk_nope_head_dim"),
        rope_dim=fields.integer("qk_rope_head_dim"),
        value_dim=fields.integer("v_head_dim"),
        sparse_top_k=top_k,
        indexer=indexer,
    )


def mla_weights(hidden_size: int, mla: MlaAttention) -> Weights:
    """Return the projections of latent attention: the down-projections are on every rank."""
    query_size = mla.heads * (mla.nope_dim + mla.rope_dim)
    latent_size = mla.kv_lora_rank + mla.rope_dim
    norm_elements = hidden_size + (mla.q_lora_rank or 0) + mla.kv_lora_rank
    weights = [vector("input_layernorm", norm_elements)]
    if mla.q_lora_rank is None:
        weights.append(attention_matrix("self_attn.q_proj", query_size, hidden_size))
    else:
        rank, shard = mla.q_lora_rank, Shard.REPLICATED
        weights.append(attention_matrix("self_attn.q_a_proj", rank, hidden_size, shard))
        weights.append(attention_matrix("self_attn.q_b_proj", query_size, rank))
    up_size = mla.heads * (mla.nope_dim + mla.value_dim)
    down, output_size = "self_attn.kv_a_proj_with_mqa", mla.heads * mla.value_dim
    weights.append(attention_matrix(down, latent_size, hidden_size, Shard.REPLICATED))
    weights.append(attention_matrix("self_attn.kv_b_proj", up_size, mla.kv_lora_rank))
    weights.append(attention_matrix("self_attn.o_proj", hidden_size, output_size))
    return (*weights, *_indexer_weights(hidden_size, mla))


def _indexer_weights(hidden_size: int, mla: MlaAttention) -> Weights:
    if mla.indexer is None:
        return ()
    heads, head_dim = mla.indexer.heads, mla.indexer.head_dim

    def matrix(name: str, out_features: int, in_features: int) -> WeightTensor:
        name, shard = f"self_attn.indexer.{name}", Shard.REPLICATED
        return WeightTensor(name, Role.INDEXER, out_features, in_features, "bf16", shard)

    return (
        matrix("wq_b", heads * head_dim, mla.q_lora_rank or hidden_size),
        matrix("wk", head_dim, hidden_size),
        matrix("weights_proj", heads, hidden_size),
        vector("self_attn.indexer.k_norm", 2 * head_dim),
    )


def owns_indexer(fields: ConfigFields, layers: int) -> tuple[bool, ...]:
    """Return, per layer, whether it computes its own top-k selection or reuses an earlier one.

    Without the explicit list, `index_topk_freq` f and `index_skip_topk_offset` o mean that layer i
    owns one where max(i - o + 1, 0) is a multiple of f (GLM-5.2's list follows the same rule).
    """
    types = fields.per_layer("indexer_types", layers)
    if types is not None:
        return tuple(kind == "full" for kind in types)
    if fields.get("index_topk_pattern") is not None:
        raise fields.refuse("index_topk_pattern", "is not understood without 'indexer_types'")
    frequency = fields.optional_integer("index_topk_freq") or 1
    offset = fields.optional_integer("index_skip_topk_offset") or 0
    return tuple(max(index - offset + 1, 0) % frequency == 0 for index in range(layers))


def gated_delta_net(fields: ConfigFields, hidden_size: int) -> tuple[LinearAttention, Weights]:
    """Return a gated delta-rule layer (Qwen3.5): one key x value matrix of state per value head."""
    heads = fields.integer("linear_num_value_heads")
    key_dim = fields.integer("linear_key_head_dim")
    value_dim = fields.integer("linear_value_head_dim")
    kernel = fields.integer("linear_conv_kernel_dim")
    value_size = heads * value_dim
    mixed_size = 2 * fields.integer("linear_num_key_heads") * key_dim + value_size
    attention = LinearAttention(
        "gated_delta_net", heads, heads * key_dim * value_dim, mixed_size * (kernel - 1)
    )
    weights = (
        vector("input_layernorm", hidden_size),
        attention_matrix("linear_attn.in_proj_qkv", mixed_size, hidden_size),
        attention_matrix("linear_attn.in_proj_z", value_size, hidden_size),
        attention_matrix("linear_attn.in_proj_b", heads, hidden_size),
        attention_matrix("linear_attn.in_proj_a", heads, hidden_size),
        attention_matrix("linear_attn.out_proj", hidden_size, value_size),
        vector("linear_attn.conv1d", mixed_size * kernel, Shard.ATTENTION),
        vector("linear_attn.norm", 2 * heads + value_dim),
    )
    return attention, weights


def mamba2(fields: ConfigFields, hidden_size: int) -> tuple[LinearAttention, Weights]:
    """Return a Mamba-2 layer: head_dim x state_size numbers of state per head."""
    heads, head_dim = fields.integer("mamba_num_heads"), fields.integer("mamba_head_dim")
    state_size, kernel = fields.integer("ssm_state_size"), fields.integer("conv_kernel")
    inner_size = heads * head_dim
    mixed_size = inner_size + 2 * fields.integer("n_groups") * state_size
    attention = LinearAttention("mamba2", heads, inner_size * state_size, mixed_size * (kernel - 1))
    weights = (
        vector("norm", hidden_size),
        attention_matrix("mixer.in_proj", inner_size + mixed_size + heads, hidden_size),
        attention_matrix("mixer.out_proj", hidden_size, inner_size),
        vector("mixer.conv1d", mixed_size * (kernel + 1), Shard.ATTENTION),
        vector("mixer.norm", inner_size + 3 * heads, Shard.ATTENTION),
    )
    return attention, weights
