"""Readers of dense decoder architectures: Llama, Mistral, Qwen2, Qwen3, MiMo."""

from __future__ import annotations

from tonnage.sim.model.hf_attention import GqaOptions, gqa_weights
from tonnage.sim.model.layers import (
    dense_layer,
    join,
    mtp_projection,
    optional_qwen_vision,
    plain_attention,
    read_gqa,
    refuse_window,
    with_projection,
)
from tonnage.sim.model.skeleton import ModelFields, Skeleton


def read_llama(model: ModelFields) -> Skeleton:
    """Read Llama 2 and 3."""
    layer = join(plain_attention(model.text), dense_layer(model.text))
    return Skeleton((layer,) * model.layers)


def read_mistral(model: ModelFields) -> Skeleton:
    """Read Mistral and Ministral 3: Llama's layers, all with a window where the config has one."""
    fields = model.text
    attention = read_gqa(fields, fields.optional_integer("sliding_window"))
    weights = gqa_weights(model.hidden_size, attention, GqaOptions(model.hidden_size))
    return Skeleton((join((attention, weights), dense_layer(fields)),) * model.layers)


def read_qwen2(model: ModelFields) -> Skeleton:
    """Read Qwen2 and 2.5: biases on q, k and v."""
    refuse_window(model.text)
    layer = join(plain_attention(model.text, bias=True), dense_layer(model.text))
    return Skeleton((layer,) * model.layers)


def read_mimo(model: ModelFields) -> Skeleton:
    """Read MiMo-7B: Qwen2's layers and dense MTP layers."""
    skeleton = read_qwen2(model)
    projection = mtp_projection(model.hidden_size, "input_proj")
    mtp = with_projection(skeleton.layers[0], projection)
    count = model.text.optional_integer("num_nextn_predict_layers") or 0
    roots = tuple(f"mtp_layers.{index}" for index in range(count))
    return Skeleton(skeleton.layers, (mtp,) * count, roots)


def read_qwen3(model: ModelFields) -> Skeleton:
    """Read Qwen3 and the text model of Qwen3-VL."""
    refuse_window(model.text)
    layer = join(plain_attention(model.text, qk_norm=True), dense_layer(model.text))
    return Skeleton((layer,) * model.layers, vision=optional_qwen_vision(model))
