"""Readers of models that mix kinds of attention: Qwen3-Next and 3.5, Nemotron-H, Gemma 4."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tonnage.sim.domain import DenseMlp, GqaAttention, LayerSpec
from tonnage.sim.model.config_fields import ConfigFields
from tonnage.sim.model.hf_attention import (
    GqaOptions,
    Weights,
    gated_delta_net,
    gqa_weights,
    mamba2,
    vector,
)
from tonnage.sim.model.hf_mlp import FUSED, PLAIN, MoeShape, dense_block, moe_block
from tonnage.sim.model.hf_vision import gemma_vision
from tonnage.sim.model.layers import (
    dense_layer,
    join,
    layer_windows,
    moe_layer,
    mtp_projection,
    optional_qwen_vision,
    read_gqa,
    with_projection,
)
from tonnage.sim.model.skeleton import ModelFields, Skeleton

NEMOTRON_BLOCKS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def read_qwen3_5(model: ModelFields) -> Skeleton:
    """Read Qwen3-Next, 3.5 and 3.6: gated delta rule, full attention in every fourth layer.

    Where Qwen3-Next's config does not list the layers, it gives the interval alone.
    """
    fields, hidden_size = model.text, model.hidden_size
    half = _qwen3_5_mlp(fields)
    attention, weights = gated_delta_net(fields, hidden_size)
    linear = LayerSpec(attention, half.mlp, (*weights, *half.weights))
    full = _qwen3_5_attention_layer(fields, half)
    kinds = {"linear_attention": linear, "full_attention": full}
    interval = fields.optional_integer("full_attention_interval")
    if fields.get("layer_types") is None and interval:
        is_full = [(index + 1) % interval == 0 for index in range(model.layers)]
        layers = tuple(full if one else linear for one in is_full)
    else:
        layers = tuple(_choose(fields, "layer_types", kinds, model.layers))
    count = fields.optional_integer("mtp_num_hidden_layers") or 0
    mtp = with_projection(full, mtp_projection(hidden_size, "mtp.fc"))
    roots = tuple(f"mtp.layers.{index}" for index in range(count))
    return Skeleton(layers, (mtp,) * count, roots, optional_qwen_vision(model))


def _choose(
    fields: ConfigFields, name: str, kinds: dict[str, LayerSpec], layers: int
) -> list[LayerSpec]:
    """Return one layer per item of a list field that names their kinds."""
    types = fields.per_layer(name, layers)
    if types is None:
        raise fields.refuse(name, "is missing")
    unknown = sorted({str(kind) for kind in types} - set(kinds))
    if unknown:
        raise fields.refuse(name, f"has unknown kinds: {', '.join(unknown)}")
    return [kinds[str(kind)] for kind in types]


def _qwen3_5_attention_layer(fields: ConfigFields, half: LayerSpec) -> LayerSpec:
    attention, hidden_size = read_gqa(fields), fields.integer("hidden_size")
    norm_elements = hidden_size + 2 * attention.head_dim
    options = GqaOptions(norm_elements, gated=fields.flag("attn_output_gate", True))
    return join((attention, gqa_weights(hidden_size, attention, options)), half)


def _qwen3_5_mlp(fields: ConfigFields) -> LayerSpec:
    experts = fields.optional_integer("num_experts")
    if not experts:
        return dense_layer(fields)
    return moe_layer(
        MoeShape(
            fields.integer("hidden_size"),
            experts,
            fields.integer("num_experts_per_tok"),
            fields.integer("moe_intermediate_size"),
            shared_size=fields.integer("shared_expert_intermediate_size"),
            shared="shared_expert",
            shared_gate=True,
        )
    )


# --- Nemotron-H ----------------------------------------------------------------------------------


def read_nemotron_h(model: ModelFields) -> Skeleton:
    """Read Nemotron-H and Nemotron 3: every layer is one block, Mamba-2, attention, MLP or MoE."""
    fields = model.text
    kinds = _nemotron_kinds(fields, "layers_block_type", "hybrid_override_pattern")
    stated = fields.optional_integer("num_hidden_layers")
    if stated is not None and stated != len(kinds):
        raise fields.refuse("num_hidden_layers", f"is {stated} for {len(kinds)} listed layers")
    blocks = {kind: _NEMOTRON_READERS[kind](model) for kind in set(kinds)}
    count = fields.optional_integer("num_nextn_predict_layers") or 0
    mtp_kinds: tuple[str, ...] = ()
    if count:
        mtp_kinds = _nemotron_kinds(fields, "mtp_layers_block_type", "mtp_hybrid_override_pattern")
    mtp = [_NEMOTRON_READERS[kind](model) for kind in mtp_kinds]
    if mtp:
        mtp[0] = with_projection(mtp[0], mtp_projection(model.hidden_size, "eh_proj"))
    roots = tuple(f"mtp.layers.{index}" for index in range(count * len(mtp)))
    return Skeleton(tuple(blocks[kind] for kind in kinds), tuple(mtp) * count, roots)


def _nemotron_kinds(fields: ConfigFields, list_name: str, pattern_name: str) -> tuple[str, ...]:
    names: Sequence[str] = fields.texts(list_name)
    if not names:
        pattern = fields.text(pattern_name)
        if pattern is None:
            raise fields.refuse(pattern_name, "is missing")
        names = [NEMOTRON_BLOCKS.get(letter, letter) for letter in pattern]
    unknown = sorted(set(names) - set(_NEMOTRON_READERS))
    if unknown:
        raise fields.refuse(pattern_name, f"has unknown kinds: {', '.join(unknown)}")
    return tuple(names)


def _nemotron_mamba(model: ModelFields) -> LayerSpec:
    attention, weights = mamba2(model.text, model.hidden_size)
    return LayerSpec(attention, None, weights)


def _nemotron_attention(model: ModelFields) -> LayerSpec:
    fields = model.text
    heads, head_dim = (
        fields.integer("num_attention_heads"),
        fields.integer("head_dim", "attention_head_dim"),
    )
    kv_heads = fields.integer("num_key_value_heads")
    attention = GqaAttention(heads, kv_heads, head_dim, head_dim)
    options = GqaOptions(model.hidden_size, prefix="mixer")
    return LayerSpec(attention, None, gqa_weights(model.hidden_size, attention, options))


def _nemotron_mlp(model: ModelFields) -> LayerSpec:
    mlp, weights = dense_block(
        model.hidden_size, model.text.integer("intermediate_size"), "mixer", PLAIN
    )
    return LayerSpec(None, mlp, weights)


def _nemotron_moe(model: ModelFields) -> LayerSpec:
    fields = model.text
    mlp, weights = moe_block(
        MoeShape(
            model.hidden_size,
            fields.integer("n_routed_experts"),
            fields.integer("num_experts_per_tok"),
            fields.integer("moe_intermediate_size"),
            shared_size=fields.integer("moe_shared_expert_intermediate_size"),
            prefix="mixer",
            names=PLAIN,
            shared_names=PLAIN,
            expert_hidden_size=fields.optional_integer("moe_latent_size"),
        )
    )
    return LayerSpec(None, mlp, weights)


_NEMOTRON_READERS: dict[str, Callable[[ModelFields], LayerSpec]] = {
    "mamba": _nemotron_mamba,
    "attention": _nemotron_attention,
    "mlp": _nemotron_mlp,
    "moe": _nemotron_moe,
}


# --- Gemma 4 -------------------------------------------------------------------------------------


def read_gemma4(model: ModelFields) -> Skeleton:
    """Read Gemma 4 without per-layer embeddings: windows, and global layers with wider heads."""
    fields = model.text
    for name in ("num_kv_shared_layers", "hidden_size_per_layer_input"):
        if fields.optional_integer(name):
            raise fields.refuse(name, "other than 0 is not modelled")
    half = _gemma4_mlp(fields)
    layers = tuple(
        join(_gemma4_attention(fields, window), half)
        for window in layer_windows(fields, model.layers)
    )
    vision = model.whole.section("vision_config")
    towers = () if vision is None else gemma_vision(vision, model.hidden_size)
    return Skeleton(layers, vision=towers)


def _gemma4_attention(
    fields: ConfigFields, window_tokens: int | None
) -> tuple[GqaAttention, Weights]:
    attention, hidden_size = read_gqa(fields, window_tokens), fields.integer("hidden_size")
    key_is_value = False
    if window_tokens is None:
        key_is_value = fields.flag("attention_k_eq_v", False)
        head_dim = fields.integer("global_head_dim", "head_dim")
        kv_heads = attention.kv_heads
        if key_is_value:
            kv_heads = fields.integer("num_global_key_value_heads", "num_key_value_heads")
        attention = replace(attention, kv_heads=kv_heads, head_dim=head_dim, value_dim=head_dim)
    norm_elements = 2 * hidden_size + 2 * attention.head_dim
    options = GqaOptions(norm_elements, key_is_value=key_is_value)
    return attention, gqa_weights(hidden_size, attention, options)


def _gemma4_mlp(fields: ConfigFields) -> LayerSpec:
    """Return a dense block, or experts with the dense block beside them as the shared expert."""
    hidden_size, dense_size = fields.integer("hidden_size"), fields.integer("intermediate_size")
    norm = vector("post_feedforward_layernorm", hidden_size)
    if not fields.flag("enable_moe_block", False):
        half = dense_layer(fields)
        return LayerSpec(None, DenseMlp(dense_size), (norm, *half.weights))
    half = moe_layer(
        MoeShape(
            hidden_size,
            fields.integer("num_experts"),
            fields.integer("top_k_experts", "num_experts_per_tok"),
            fields.integer("moe_intermediate_size"),
            shared_size=dense_size,
            prefix="",
            names=FUSED,
            router="router.proj",
            shared="mlp",
        )
    )
    branch_norms = vector("branch_layernorms", 4 * hidden_size)  # three norms, router scale
    return LayerSpec(None, half.mlp, (norm, branch_norms, *half.weights))
