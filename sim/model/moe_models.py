"""Readers of mixtures of experts with grouped-query attention."""

from __future__ import annotations

from tonnage.sim.domain import GqaAttention
from tonnage.sim.model.config_fields import ConfigFields
from tonnage.sim.model.hf_attention import GqaOptions, Weights, gqa_weights
from tonnage.sim.model.hf_mlp import FUSED, MIXTRAL, MoeShape
from tonnage.sim.model.hf_vision import llama4_vision
from tonnage.sim.model.layers import (
    deepseek_moe,
    dense_layer,
    join,
    layer_windows,
    moe_layer,
    optional_qwen_vision,
    plain_attention,
    qkv_bias_elements,
    read_gqa,
    refuse_window,
)
from tonnage.sim.model.skeleton import ModelFields, Skeleton

LLAMA4_GLOBAL_LAYER_INTERVAL = 4  # transformers' default: every fourth layer without RoPE


def read_qwen3_moe(model: ModelFields) -> Skeleton:
    """Read Qwen3-MoE and the text model of Qwen3-VL-MoE."""
    fields = model.text
    refuse_window(fields)
    shape = MoeShape(
        model.hidden_size,
        fields.integer("num_experts"),
        fields.integer("num_experts_per_tok"),
        fields.integer("moe_intermediate_size"),
        shared_size=fields.optional_integer("shared_expert_intermediate_size") or 0,
        shared="shared_expert",
        shared_gate=bool(fields.optional_integer("shared_expert_intermediate_size")),
    )
    attention, moe = plain_attention(fields, qk_norm=True), moe_layer(shape)
    step = fields.optional_integer("decoder_sparse_step") or 1
    dense_only = fields.items("mlp_only_layers") or ()
    layers = tuple(
        join(attention, dense_layer(fields) if index in dense_only or (index + 1) % step else moe)
        for index in range(model.layers)
    )
    return Skeleton(layers, vision=optional_qwen_vision(model))


def read_mixtral(model: ModelFields) -> Skeleton:
    """Read Mixtral."""
    fields = model.text
    attention = read_gqa(fields, fields.optional_integer("sliding_window"))
    weights = gqa_weights(model.hidden_size, attention, GqaOptions(model.hidden_size))
    layer = join((attention, weights), moe_layer(_mixtral_moe(model)))
    return Skeleton((layer,) * model.layers)


def _mixtral_moe(model: ModelFields) -> MoeShape:
    fields = model.text
    return MoeShape(
        model.hidden_size,
        fields.integer("num_local_experts"),
        fields.integer("num_experts_per_tok"),
        fields.integer("intermediate_size"),
        prefix="block_sparse_moe",
        names=MIXTRAL,
    )


def read_minimax_m2(model: ModelFields) -> Skeleton:
    """Read MiniMax-M2: norms over all query and all key heads.

    Its MTP modules (`num_mtp_modules`) are not in the released checkpoints, so none are counted.
    """
    fields = model.text
    if fields.optional_integer("shared_intermediate_size"):
        raise fields.refuse("shared_intermediate_size", "other than 0 is not modelled")
    attention = read_gqa(fields)
    heads = attention.heads + attention.kv_heads
    norms = heads * attention.head_dim if fields.flag("use_qk_norm", False) else 0
    options = GqaOptions(model.hidden_size + norms)
    weights = gqa_weights(model.hidden_size, attention, options)
    layer = join((attention, weights), moe_layer(_mixtral_moe(model)))
    return Skeleton((layer,) * model.layers)


def read_gpt_oss(model: ModelFields) -> Skeleton:
    """Read gpt-oss: sinks, biases everywhere, windows on every second layer."""
    fields, hidden_size = model.text, model.hidden_size
    moe = moe_layer(
        MoeShape(
            hidden_size,
            fields.integer("num_local_experts"),
            fields.integer("num_experts_per_tok", "experts_per_token"),
            fields.integer("intermediate_size"),
            names=FUSED,
            router="router",
            expert_bias=True,
        )
    )
    layers = []
    for window in layer_windows(fields, model.layers):
        attention = read_gqa(fields, window)
        biases = qkv_bias_elements(attention) + hidden_size + attention.heads
        options = GqaOptions(hidden_size, biases)
        layers.append(join((attention, gqa_weights(hidden_size, attention, options)), moe))
    return Skeleton(tuple(layers))


def read_llama4(model: ModelFields) -> Skeleton:
    """Read Llama 4: chunked attention (held as a window) except on every fourth layer."""
    fields, hidden_size = model.text, model.hidden_size
    expert_size = fields.integer("intermediate_size")
    moe = moe_layer(
        MoeShape(
            hidden_size,
            fields.integer("num_local_experts"),
            fields.integer("num_experts_per_tok"),
            expert_size,
            shared_size=expert_size,
            prefix="feed_forward",
            names=FUSED,
            router="router",
            shared="shared_expert",
        )
    )
    dense = dense_layer(fields, "feed_forward", fields.integer("intermediate_size_mlp"))
    step = fields.integer("interleave_moe_layer_step")
    uses_rope = fields.per_layer("no_rope_layers", model.layers)
    layers = []
    for index in range(model.layers):
        is_local = (index + 1) % LLAMA4_GLOBAL_LAYER_INTERVAL != 0
        if uses_rope is not None:
            is_local = bool(uses_rope[index])
        attention = read_gqa(fields, fields.integer("attention_chunk_size") if is_local else None)
        weights = gqa_weights(hidden_size, attention, GqaOptions(hidden_size))
        layers.append(join((attention, weights), dense if (index + 1) % step else moe))
    vision = model.whole.section("vision_config")
    towers = () if vision is None else llama4_vision(vision, hidden_size)
    return Skeleton(tuple(layers), vision=towers)


def read_mimo_v2(model: ModelFields) -> Skeleton:
    """Read MiMo-V2-Flash: windowed layers with their own head counts, keys wider than values.

    The config does not describe its MTP layers, so none are counted.
    """
    fields = model.text
    windowed = fields.per_layer("hybrid_layer_pattern", model.layers)
    sparse = fields.per_layer("moe_layer_freq", model.layers)
    if windowed is None or sparse is None:
        missing = "hybrid_layer_pattern" if windowed is None else "moe_layer_freq"
        raise fields.refuse(missing, "is missing")
    halves = (dense_layer(fields), moe_layer(deepseek_moe(model)))
    attentions = (_mimo_attention(fields, ""), _mimo_attention(fields, "swa_"))
    pairs = zip(windowed, sparse, strict=True)
    return Skeleton(tuple(join(attentions[bool(w)], halves[bool(s)]) for w, s in pairs))


def _mimo_attention(fields: ConfigFields, prefix: str) -> tuple[GqaAttention, Weights]:
    hidden_size, is_windowed = fields.integer("hidden_size"), prefix == "swa_"
    attention = GqaAttention(
        fields.integer(f"{prefix}num_attention_heads"),
        fields.integer(f"{prefix}num_key_value_heads"),
        fields.integer(f"{prefix}head_dim"),
        fields.integer(f"{prefix}v_head_dim"),
        fields.integer("sliding_window") if is_windowed else None,
    )
    flag = f"add_{'swa' if is_windowed else 'full'}_attention_sink_bias"
    sinks = attention.heads if fields.flag(flag, False) else 0
    return attention, gqa_weights(hidden_size, attention, GqaOptions(hidden_size, sinks))
