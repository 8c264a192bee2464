"""Vision towers: their parameters, counted from `vision_config`; engines replicate them."""

from __future__ import annotations

from tonnage.sim.domain import Role, Shard, WeightTensor
from tonnage.sim.model.config_fields import ConfigFields
from tonnage.sim.model.hf_attention import Weights


def _vision(name: str, out_features: int, in_features: int, copies: int = 1) -> WeightTensor:
    shard = Shard.REPLICATED
    return WeightTensor(name, Role.VISION, out_features, in_features, "bf16", shard, copies)


def _blocks(depth: int, width: int, intermediate: int, mlp_inputs: int = 1) -> Weights:
    """Return transformer blocks with fused QKV, an MLP and their biases and norms."""
    vectors = 3 * width + width + 4 * width + intermediate + width  # qkv, o, two norms, mlp
    return (
        _vision("vision.attn.qkv", 3 * width, width, depth),
        _vision("vision.attn.proj", width, width, depth),
        _vision("vision.mlp.in", mlp_inputs * intermediate, width, depth),
        _vision("vision.mlp.out", width, intermediate, depth),
        _vision("vision.vectors", vectors, 1, depth),
    )


def kimi_vision(fields: ConfigFields) -> Weights:
    """Return MoonViT (Kimi-K2.5) with its patch-merging projector."""
    width, depth = fields.integer("vt_hidden_size"), fields.integer("vt_num_hidden_layers")
    patch = 3 * fields.integer("patch_size") ** 2
    positions = fields.integer("init_pos_emb_height") * fields.integer("init_pos_emb_width")
    merged = 4 * fields.integer("mm_hidden_size")
    return (
        _vision("vision.patch_embed", width, patch + 1 + positions),
        *_blocks(depth, width, fields.integer("vt_intermediate_size")),
        _vision("vision.projector.in", merged, merged + 1),
        _vision("vision.projector.out", fields.integer("text_hidden_size"), merged + 1),
    )


def qwen_vision(fields: ConfigFields) -> Weights:
    """Return the Qwen3-VL and Qwen3.5 tower: one merger, and one per deep-stack level."""
    width, depth = fields.integer("hidden_size"), fields.integer("depth")
    patch = fields.integer("in_channels") * fields.integer("patch_size") ** 2
    patch *= fields.integer("temporal_patch_size")
    merged = width * fields.integer("spatial_merge_size") ** 2
    mergers = 1 + len(fields.items("deepstack_visual_indexes") or ())
    return (
        _vision("vision.patch_embed", width, patch + 1),
        _vision("vision.pos_embed", fields.integer("num_position_embeddings"), width),
        *_blocks(depth, width, fields.integer("intermediate_size")),
        _vision("vision.merger.in", merged, merged + 1, mergers),
        _vision("vision.merger.out", fields.integer("out_hidden_size"), merged + 1, mergers),
    )


def gemma_vision(fields: ConfigFields, text_hidden_size: int) -> Weights:
    """Return the Gemma 4 tower: gated MLPs and a learnt table of row and column positions."""
    width, depth = fields.integer("hidden_size"), fields.integer("num_hidden_layers")
    positions = 2 * fields.integer("position_embedding_size")
    return (
        _vision("vision.patch_embed", width, 3 * fields.integer("patch_size") ** 2),
        _vision("vision.pos_embed", positions, width),
        *_blocks(depth, width, fields.integer("intermediate_size"), mlp_inputs=2),
        _vision("vision.projector", text_hidden_size, width),
    )


def llama4_vision(fields: ConfigFields, text_hidden_size: int) -> Weights:
    """Return the Llama 4 tower with its pixel-shuffle adapter."""
    width, depth = fields.integer("hidden_size"), fields.integer("num_hidden_layers")
    patch = 3 * fields.integer("patch_size") ** 2
    output = fields.integer("vision_output_dim")
    return (
        _vision("vision.patch_embed", width, patch + 3),
        *_blocks(depth, width, fields.integer("intermediate_size")),
        _vision("vision.adapter.in", fields.integer("projector_input_dim"), 4 * width),
        _vision("vision.adapter.out", output, fields.integer("projector_output_dim")),
        _vision("vision.projector", text_hidden_size, output),
    )
