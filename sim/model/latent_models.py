"""Reader of the latent-attention family: DeepSeek-V2, V3, V3.2, Kimi-K2, GLM-5."""

from __future__ import annotations

from tonnage.sim.domain import LayerSpec
from tonnage.sim.model.config_fields import ConfigFields
from tonnage.sim.model.hf_attention import mla_weights, owns_indexer, read_mla
from tonnage.sim.model.hf_vision import kimi_vision
from tonnage.sim.model.layers import (
    deepseek_moe,
    dense_layer,
    moe_layer,
    mtp_projection,
    with_projection,
)
from tonnage.sim.model.skeleton import ModelFields, Skeleton


def read_deepseek(model: ModelFields) -> Skeleton:
    """Read the DeepSeek family: latent attention, dense layers first, MTP layers after the last."""
    fields = model.text
    halves = {False: dense_layer(fields), True: moe_layer(deepseek_moe(model))}
    layers = tuple(
        _latent_layer(fields, owns, halves[sparse])
        for owns, sparse in zip(
            owns_indexer(fields, model.layers), _sparse_layers(model), strict=True
        )
    )
    count = fields.optional_integer("num_nextn_predict_layers") or 0
    projection = mtp_projection(model.hidden_size, "eh_proj")
    mtp = with_projection(_latent_layer(fields, True, halves[True]), projection)
    vision = model.whole.section("vision_config")
    towers = () if vision is None else kimi_vision(vision)
    roots = tuple(f"layers.{model.layers + index}" for index in range(count))
    return Skeleton(layers, (mtp,) * count, roots, towers)


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
