"""What the layers of a `RankModel` should compute: full attention in f64, without a cache."""

from __future__ import annotations

import torch

from tonnage.kernels.execute.attention import GqaBlock
from tonnage.kernels.execute.build import Layer
from tonnage.kernels.execute.latent_attention import MlaBlock
from tonnage.kernels.execute.mlp import DenseBlock, MoeBlock
from tonnage.kernels.execute.products import ExpertProduct, Product
from tonnage.kernels.execute.rank import RankModel
from tonnage.sim.domain import GqaAttention, MlaAttention, ModelSpec
from tonnage.sim.model.hf_config import model_from_config

Tensor = torch.Tensor

MLA_CONFIG: dict[str, object] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_size": 128,
    "intermediate_size": 256,
    "kv_lora_rank": 512,
    "max_position_embeddings": 256,
    "moe_intermediate_size": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "vocab_size": 256,
}
GQA_CONFIG: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}


def tiny(kind: str, **changes: object) -> ModelSpec:
    """Return a two-layer model: `mla` with a dense and an expert layer, or `gqa`, dense."""
    config = {"mla": MLA_CONFIG, "gqa": GQA_CONFIG}[kind]
    return model_from_config({**config, **changes}, name=kind, source="test")


def plain_logits(model: RankModel, tokens: Tensor) -> Tensor:
    """Return the logits f64 `[tokens, vocabulary]` of one sequence."""
    hidden = model.embedding[tokens].double()
    layers = [layer for group in model.layers for layer in group]
    specs = [group.spec for group in model.groups for _ in range(group.run)]
    for layer, spec in zip(layers, specs, strict=True):
        hidden = hidden + plain_attention(layer, spec.attention, normed(hidden))
        hidden = hidden + plain_mlp(layer.mlp, normed(hidden))
    return normed(hidden) @ values_of(model.head).T


def normed(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def values_of(product: Product | ExpertProduct) -> Tensor:
    values = product.weight.values
    assert values is not None, "build the rank with keep_values"
    return values.double()


def turned(x: Tensor) -> Tensor:
    """Rotate `[tokens, heads, dim]`: number j and j + dim / 2 are one complex number."""
    tokens, _, dim = x.shape
    frequency = 1e4 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.arange(tokens, dtype=torch.float64)[:, None, None] * frequency
    number = torch.complex(x[..., : dim // 2], x[..., dim // 2 :])
    number = number * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((number.real, number.imag), -1)


def attended(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attend `[tokens, heads, dim]` to all before and itself."""
    logits = torch.einsum("qhd,thd->hqt", queries, keys) * queries.shape[-1] ** -0.5
    later = torch.ones(logits.shape[1:], dtype=torch.bool).triu(1)
    weights = logits.masked_fill(later, -torch.inf).softmax(-1)
    return torch.einsum("hqt,thd->qhd", weights, values)


def plain_attention(layer: Layer, attention: object, x: Tensor) -> Tensor:
    """Return what an attention block adds."""
    block = layer.attention
    if isinstance(block, GqaBlock):
        assert isinstance(attention, GqaAttention)
        return _plain_gqa(block, attention, x)
    assert isinstance(block, MlaBlock)
    assert isinstance(attention, MlaAttention)
    return _plain_mla(block, attention, x)


def _plain_gqa(block: GqaBlock, attention: GqaAttention, x: Tensor) -> Tensor:
    heads, kv_heads = block.parts.heads, block.parts.kv_heads
    products = block.parts.products
    joined = (x @ values_of(products["qkv_proj"]).T).view(len(x), -1, attention.head_dim)
    queries, keys, values = joined.split((heads, kv_heads, kv_heads), 1)
    keys, values = (p.repeat_interleave(heads // kv_heads, 1) for p in (keys, values))
    out = attended(turned(normed(queries)), turned(normed(keys)), values)
    return out.flatten(1) @ values_of(products["o_proj"]).T


def _plain_mla(block: MlaBlock, attention: MlaAttention, x: Tensor) -> Tensor:
    products, heads = block.parts.products, block.parts.heads
    down = x @ values_of(products["fused_qkv_a_proj"]).T
    assert attention.q_lora_rank is not None
    low, latents, rope_keys = down.split((attention.q_lora_rank, 512, 64), -1)
    queries = (normed(low) @ values_of(products["q_b_proj"]).T).view(len(x), heads, -1)
    opened = (normed(latents) @ values_of(products["kv_b_proj"]).T).view(len(x), heads, -1)
    plain, values = opened.split((attention.nope_dim, attention.value_dim), -1)
    rope_keys = turned(rope_keys[:, None]).expand(-1, heads, -1)
    plain_queries, rope_queries = queries.split((attention.nope_dim, 64), -1)
    queries = torch.cat((plain_queries, turned(rope_queries)), -1)
    out = attended(queries, torch.cat((plain, rope_keys), -1), values)
    return out.flatten(1) @ values_of(products["o_proj"]).T


def plain_mlp(block: object, x: Tensor) -> Tensor:
    """Return what a feed-forward block adds."""
    if isinstance(block, DenseBlock):
        (gate_up,) = block.inputs
        return _gated(x @ values_of(gate_up).T) @ values_of(block.output).T
    assert isinstance(block, MoeBlock)
    scores = (x @ values_of(block.router).T).sigmoid()
    best, ids = scores.topk(block.experts.top_k, -1)
    shares = best / best.sum(-1, keepdim=True)
    up, down = values_of(block.experts.gate_up), values_of(block.experts.down)
    out = torch.zeros_like(x)
    for row in range(len(x)):
        for expert, share in zip(ids[row].tolist(), shares[row], strict=True):
            out[row] += share * (_gated(x[row] @ up[expert].T) @ down[expert].T)
    return out if block.shared is None else out + plain_mlp(block.shared, x)


def _gated(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return gate * gate.sigmoid() * up
