"""Pieces that the readers of several architectures share: halves of layers and MTP projections."""

from __future__ import annotations

from tonnage.sim.domain import GqaAttention, LayerSpec, Role, Shard, WeightTensor
from tonnage.sim.model.config_fields import ConfigFields
from tonnage.sim.model.hf_attention import GqaOptions, Weights, gqa_weights, vector
from tonnage.sim.model.hf_mlp import MoeShape, dense_block, moe_block
from tonnage.sim.model.hf_vision import qwen_vision
from tonnage.sim.model.skeleton import ModelFields


def read_gqa(fields: ConfigFields, window_tokens: int | None = None) -> GqaAttention:
    """Return the geometry of grouped-query attention; a head count that is absent means MHA."""
    heads = fields.integer("num_attention_heads")
    head_dim = fields.optional_integer("head_dim")
    if head_dim is None:
        head_dim, remainder = divmod(fields.integer("hidden_size"), heads)
        if remainder:
            raise fields.refuse("num_attention_heads", f"{heads} does not divide 'hidden_size'")
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


def plain_attention(
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


def refuse_window(fields: ConfigFields) -> None:
    """Refuse a sliding window that the config switches on for only some of the layers."""
    if fields.flag("use_sliding_window", False):
        raise fields.refuse("use_sliding_window", "true is not modelled for this architecture")


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


def deepseek_moe(model: ModelFields) -> MoeShape:
    """Return the mixture of experts that DeepSeek's field names describe."""
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


def mtp_projection(hidden_size: int, name: str) -> Weights:
    """Return what joins hidden state and embedding before an MTP layer, with its norms."""
    matrix = WeightTensor(
        name, Role.DENSE_MLP, hidden_size, 2 * hidden_size, "bf16", Shard.REPLICATED
    )
    return (matrix, vector("mtp_norms", 3 * hidden_size))


def with_projection(layer: LayerSpec, projection: Weights) -> LayerSpec:
    """Return the layer with an MTP projection before it."""
    return LayerSpec(layer.attention, layer.mlp, (*projection, *layer.weights))


def optional_qwen_vision(model: ModelFields) -> Weights:
    vision = model.whole.section("vision_config")
    return () if vision is None else qwen_vision(vision)
