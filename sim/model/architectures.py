"""Decoder architectures that use one kind of attention: which layers they have, from the config.

Each reader follows the published modelling code of its architecture; the table at the end is the
list of what tonnage knows. Others are refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence

from tonnage.sim.domain import GqaAttention, LayerSpec, Role, Shard, WeightTensor
from tonnage.sim.model.config_fields import ConfigFields
from tonnage.sim.model.hf_attention import (
    GqaOptions,
    Weights,
    gqa_weights,
    mla_weights,
    owns_indexer,
    read_mla,
    vector,
)
from tonnage.sim.model.hf_mlp import FUSED, MIXTRAL, MoeShape, dense_block, moe_block
from tonnage.sim.model.hf_vision import kimi_vision, llama4_vision, qwen_vision
from tonnage.sim.model.skeleton import ModelFields, Skeleton

LLAMA4_GLOBAL_LAYER_INTERVAL = 4  # transformers' default: every fourth layer without RoPE


def read_gqa(fields: ConfigFields, window_tokens: int | None = None) -> GqaAttention:
    """Return the geometry of grouped-query attention; a head count that is absent means MHA."""
    heads = fields.integer("num_attention_heads")
    head_dim = fields.optional_integer("head_dim") or fields.integer("hidden_size") // heads
    kv_heads = fields.optional_integer("num_key_value_heads") or heads
    return GqaAttention(heads, kv_heads, head_dim, head_dim, window_tokens)


def join(attention: tuple[GqaAttention, Weights], mlp: LayerSpec) -> LayerSpec:
    """Return the layer that has this attention and the MLP of another."""
    return LayerSpec(attention[0], mlp.mlp, (*attention[1], *mlp.weights))


def dense_layer(fields: ConfigFields, prefix: str = "mlp", size: int | None = None) -> LayerSpec:
    """Return the MLP half of a layer with a gated dense feed-forward block."""
    intermediate = size or fields.integer("intermediate_size")
    mlp, weights = dense_block(fields.integer("hidden_size"), intermediate, prefix)
    if fields.flag("mlp_bias", False):
        weights += (vector(f"{prefix}.bias", 2 * intermediate + fields.integer("hidden_size")),)
    return LayerSpec(None, mlp, weights)


def moe_layer(shape: MoeShape) -> LayerSpec:
    """Return the MLP half of a layer with routed experts."""
    mlp, weights = moe_block(shape)
    return LayerSpec(None, mlp, weights)


def qkv_bias_elements(attention: GqaAttention) -> int:
    """Return the number of biases of the q, k and v projections."""
    key_value = attention.kv_heads * (attention.head_dim + attention.value_dim)
    return attention.heads * attention.head_dim + key_value


# --- dense: Llama, Mistral, Qwen2, Qwen3, MiMo ----------------------------------------------------


def _plain_attention(
    fields: ConfigFields, qk_norm: bool = False, bias: bool | None = None
) -> tuple[GqaAttention, Weights]:
    """Return full attention; `bias` None takes `attention_bias`, which puts one on o_proj too."""
    attention, hidden_size = read_gqa(fields), fields.integer("hidden_size")
    bias_elements = 0
    if bias or (bias is None and fields.flag("attention_bias", False)):
        bias_elements = qkv_bias_elements(attention) + (hidden_size if bias is None else 0)
    norm_elements = hidden_size + (2 * attention.head_dim if qk_norm else 0)
    options = GqaOptions(norm_elements, bias_elements)
    return attention, gqa_weights(hidden_size, attention, options)


def _refuse_window(fields: ConfigFields) -> None:
    """Refuse a sliding window that the config switches on for only some of the layers."""
    if fields.flag("use_sliding_window", False):
        raise fields.refuse("use_sliding_window", "true is not modelled for this architecture")


def read_llama(model: ModelFields) -> Skeleton:
    """Read Llama 2 and 3, and Ministral 3."""
    layer = join(_plain_attention(model.text), dense_layer(model.text))
    return Skeleton((layer,) * model.layers)


def read_mistral(model: ModelFields) -> Skeleton:
    """Read Mistral: Llama's layers, all of them with the window where the config has one."""
    fields = model.text
    attention = read_gqa(fields, fields.optional_integer("sliding_window"))
    weights = gqa_weights(model.hidden_size, attention, GqaOptions(model.hidden_size))
    return Skeleton((join((attention, weights), dense_layer(fields)),) * model.layers)


def read_qwen2(model: ModelFields) -> Skeleton:
    """Read Qwen2 and 2.5: biases on q, k and v."""
    _refuse_window(model.text)
    layer = join(_plain_attention(model.text, bias=True), dense_layer(model.text))
    return Skeleton((layer,) * model.layers)


def read_mimo(model: ModelFields) -> Skeleton:
    """Read MiMo-7B: Qwen2's layers and dense MTP layers."""
    skeleton = read_qwen2(model)
    projection = _mtp_projection(model.hidden_size, "input_proj")
    mtp = _with_projection(skeleton.layers[0], projection)
    count = model.text.optional_integer("num_nextn_predict_layers") or 0
    return Skeleton(skeleton.layers, (mtp,) * count, "mtp_layers.{index}")


def read_qwen3(model: ModelFields) -> Skeleton:
    """Read Qwen3 and the text model of Qwen3-VL."""
    _refuse_window(model.text)
    layer = join(_plain_attention(model.text, qk_norm=True), dense_layer(model.text))
    return Skeleton((layer,) * model.layers, vision=_qwen_vision(model))


def _qwen_vision(model: ModelFields) -> Weights:
    vision = model.whole.section("vision_config")
    return () if vision is None else qwen_vision(vision)


# --- mixtures of experts: Qwen3-MoE, Mixtral, MiniMax, gpt-oss, Llama 4, MiMo-V2 -------------------


def read_qwen3_moe(model: ModelFields) -> Skeleton:
    """Read Qwen3-MoE and the text model of Qwen3-VL-MoE."""
    fields = model.text
    _refuse_window(fields)
    shape = MoeShape(
        model.hidden_size,
        fields.integer("num_experts"),
        fields.integer("num_experts_per_tok"),
        fields.integer("moe_intermediate_size"),
        shared_size=fields.optional_integer("shared_expert_intermediate_size") or 0,
        shared="shared_expert",
        shared_gate=bool(fields.optional_integer("shared_expert_intermediate_size")),
    )
    attention = _plain_attention(fields, qk_norm=True)
    moe, dense = moe_layer(shape), None
    step, dense_only = fields.optional_integer("decoder_sparse_step") or 1, _indices(fields)
    layers = []
    for index in range(model.layers):
        half = moe
        if index in dense_only or (index + 1) % step:
            half = dense = dense or dense_layer(fields)
        layers.append(join(attention, half))
    return Skeleton(tuple(layers), vision=_qwen_vision(model))


def _indices(fields: ConfigFields) -> Sequence[object]:
    return fields.items("mlp_only_layers") or ()


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


def layer_windows(fields: ConfigFields, layers: int) -> list[int | None]:
    """Return each layer's window in tokens, None where `layer_types` says full attention."""
    types = fields.per_layer("layer_types", layers)
    if types is None:
        raise fields.refuse("layer_types", "is missing")
    unknown = set(types) - {"sliding_attention", "full_attention"}
    if unknown:
        raise fields.refuse("layer_types", f"has unknown kinds: {', '.join(map(str, unknown))}")
    window = fields.integer("sliding_window")
    return [window if kind == "sliding_attention" else None for kind in types]


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
    fields, hidden_size = model.text, model.hidden_size
    windowed = fields.per_layer("hybrid_layer_pattern", model.layers)
    sparse = fields.per_layer("moe_layer_freq", model.layers)
    if windowed is None or sparse is None:
        missing = "hybrid_layer_pattern" if windowed is None else "moe_layer_freq"
        raise fields.refuse(missing, "is missing")
    halves = (dense_layer(fields), moe_layer(_deepseek_moe(model)))
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


# --- latent attention: DeepSeek-V2, V3, V3.2, Kimi-K2, GLM-5 ---------------------------------------


def read_deepseek(model: ModelFields) -> Skeleton:
    """Read the DeepSeek family: latent attention, dense layers first, MTP layers after the last."""
    fields = model.text
    halves = {False: dense_layer(fields), True: moe_layer(_deepseek_moe(model))}
    layers = tuple(
        _latent_layer(fields, owns, halves[sparse])
        for owns, sparse in zip(
            owns_indexer(fields, model.layers), _sparse_layers(model), strict=True
        )
    )
    count = fields.optional_integer("num_nextn_predict_layers") or 0
    projection = _mtp_projection(model.hidden_size, "eh_proj")
    mtp = _with_projection(_latent_layer(fields, True, halves[True]), projection)
    vision = model.whole.section("vision_config")
    towers = () if vision is None else kimi_vision(vision)
    return Skeleton(layers, (mtp,) * count, f"layers.{model.layers}+{{index}}", towers)


def _latent_layer(fields: ConfigFields, owns: bool, half: LayerSpec) -> LayerSpec:
    attention = read_mla(fields, owns)
    weights = mla_weights(fields.integer("hidden_size"), attention)
    return LayerSpec(attention, half.mlp, (*weights, *half.weights))


def _sparse_layers(model: ModelFields) -> list[bool]:
    """Return which layers have routed experts."""
    types = model.text.per_layer("mlp_layer_types", model.layers)
    if types is not None:
        return [kind == "sparse" for kind in types]
    first = model.text.optional_integer("first_k_dense_replace") or 0
    frequency = model.text.optional_integer("moe_layer_freq") or 1
    return [index >= first and index % frequency == 0 for index in range(model.layers)]


def _deepseek_moe(model: ModelFields) -> MoeShape:
    fields = model.text
    size, is_fp32 = fields.integer("moe_intermediate_size"), "float32"
    return MoeShape(
        model.hidden_size,
        fields.integer("n_routed_experts"),
        fields.integer("num_experts_per_tok"),
        size,
        shared_size=size * (fields.optional_integer("n_shared_experts") or 0),
        router_format="fp32" if fields.text("moe_router_dtype") == is_fp32 else "bf16",
    )


def _mtp_projection(hidden_size: int, name: str) -> Weights:
    """Return what joins hidden state and embedding before an MTP layer, with its norms."""
    matrix = WeightTensor(
        name, Role.DENSE_MLP, hidden_size, 2 * hidden_size, "bf16", Shard.REPLICATED
    )
    return (matrix, vector("mtp_norms", 3 * hidden_size))


def _with_projection(layer: LayerSpec, projection: Weights) -> LayerSpec:
    return LayerSpec(layer.attention, layer.mlp, (*projection, *layer.weights))
