"""Every model that is shipped, against the published geometry (facts/serving.md, section 1)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

import tonnage.scenarios
from tonnage.sim.domain import (
    GqaAttention,
    LayerSpec,
    LinearAttention,
    MlaAttention,
    ModelSpec,
    MoeMlp,
    Role,
    Shard,
)
from tonnage.sim.model.counts import active_parameters, mtp_parameters
from tonnage.sim.model.hf_config import read_model

MODELS = Path(tonnage.scenarios.__file__).parent / "models"
NAMES = sorted(path.stem for path in MODELS.glob("*.json"))


def shipped(name: str) -> ModelSpec:
    return read_model(MODELS / f"{name}.json")


@pytest.mark.parametrize("name", NAMES)
def test_an_entry_states_repository_and_source(name: str) -> None:
    entry = json.loads((MODELS / f"{name}.json").read_text(encoding="utf-8"))["tonnage"]
    assert "/" in entry["hf_repo"]
    assert isinstance(entry["verified"], bool)
    assert shipped(name).source == entry["source"]
    assert shipped(name).verified == (name != "devstral-2-123b")


@dataclass(frozen=True)
class Latent:
    """One row of the table of latent-attention models."""

    layers: int
    dense: int
    hidden: int
    heads: int
    q_lora: int
    dims: tuple[int, int, int]
    experts: int
    dense_size: int
    vocab: int
    context: int
    mtp: int
    native: str


KIMI = Latent(61, 1, 7168, 64, 1536, (128, 64, 128), 384, 18432, 163840, 262144, 0, "int4_g32")
DEEPSEEK = Latent(
    61, 3, 7168, 128, 1536, (128, 64, 128), 256, 18432, 129280, 163840, 1, "fp8_block"
)
GLM_FIELDS = (78, 3, 6144, 64, 2048, (192, 64, 256), 256, 12288, 154880)
LATENT = {
    "kimi-k2": Latent(
        61, 1, 7168, 64, 1536, (128, 64, 128), 384, 18432, 163840, 131072, 0, "fp8_block"
    ),
    "kimi-k2.5": KIMI,
    "kimi-k2.6": KIMI,
    "glm-5": Latent(*GLM_FIELDS, 202752, 1, "fp8_block"),
    "glm-5.1": Latent(*GLM_FIELDS, 202752, 1, "fp8_block"),
    "glm-5.2": Latent(*GLM_FIELDS, 1048576, 1, "fp8_block"),
    "deepseek-v3": DEEPSEEK,
    "deepseek-r1": DEEPSEEK,
    "deepseek-v3.2": DEEPSEEK,
}


@pytest.mark.parametrize("name", LATENT)
def test_geometry_of_latent_attention_models(name: str) -> None:
    model, row = shipped(name), LATENT[name]
    assert (len(model.layers), model.hidden_size) == (row.layers, row.hidden)
    assert (model.vocab_size, model.max_context_tokens) == (row.vocab, row.context)
    assert len(model.mtp_layers) == row.mtp
    assert model.native_weight_format == row.native
    for index, layer in enumerate(model.layers):
        attention = layer.attention
        assert isinstance(attention, MlaAttention)
        assert (attention.heads, attention.q_lora_rank) == (row.heads, row.q_lora)
        assert attention.kv_lora_rank == 512
        assert (attention.nope_dim, attention.rope_dim, attention.value_dim) == row.dims
        if index < row.dense:
            assert getattr(layer.mlp, "intermediate_size", 0) == row.dense_size
        else:
            assert layer.mlp == MoeMlp(row.experts, 8, 2048, shared_experts=1)


# name: layers, hidden, heads, kv heads, head dim, experts, top-k, MLP size, vocabulary, context
GQA = {
    "devstral-2-123b": (88, 12288, 96, 8, 128, 0, 0, 28672, 131072, 262144),
    "gpt-oss-20b": (24, 2880, 64, 8, 64, 32, 4, 2880, 201088, 131072),
    "gpt-oss-120b": (36, 2880, 64, 8, 64, 128, 4, 2880, 201088, 131072),
    "llama-3.1-8b": (32, 4096, 32, 8, 128, 0, 0, 14336, 128256, 131072),
    "llama-3.1-70b": (80, 8192, 64, 8, 128, 0, 0, 28672, 128256, 131072),
    "llama-3.1-405b": (126, 16384, 128, 8, 128, 0, 0, 53248, 128256, 131072),
    "minimax-m2.5": (62, 3072, 48, 8, 128, 256, 8, 1536, 200064, 196608),
    "minimax-m2.7": (62, 3072, 48, 8, 128, 256, 8, 1536, 200064, 204800),
    "llama-2-70b": (80, 8192, 64, 8, 128, 0, 0, 28672, 32000, 4096),
    "qwen2.5-7b": (28, 3584, 28, 4, 128, 0, 0, 18944, 152064, 32768),
    "qwen3-8b": (36, 4096, 32, 8, 128, 0, 0, 12288, 151936, 40960),
    "qwen3-14b": (40, 5120, 40, 8, 128, 0, 0, 17408, 151936, 40960),
    "qwen3-32b": (64, 5120, 64, 8, 128, 0, 0, 25600, 151936, 40960),
    "qwen3-30b-a3b": (48, 2048, 32, 4, 128, 128, 8, 768, 151936, 40960),
    "qwen3-235b-a22b": (94, 4096, 64, 4, 128, 128, 8, 1536, 151936, 40960),
    "qwen3-coder-480b": (62, 6144, 96, 8, 128, 160, 8, 2560, 151936, 262144),
}


# Models that mix kinds of attention: layers, of them linear, of them windowed, hidden size,
# vocabulary, context, experts and top-k.
MIXED = {
    "gemma-4-26b-a4b": (30, 0, 25, 2816, 262144, 262144, (128, 8)),
    "gemma-4-31b": (60, 0, 50, 5376, 262144, 262144, None),
    "mimo-v2-flash": (48, 0, 39, 4096, 152576, 262144, (256, 8)),
    "qwen3-next-80b-a3b": (48, 36, 0, 2048, 151936, 262144, (512, 10)),
    "qwen3.5-27b": (64, 48, 0, 5120, 248320, 262144, None),
    "qwen3.5-35b-a3b": (40, 30, 0, 2048, 248320, 262144, (256, 8)),
    "qwen3.5-122b-a10b": (48, 36, 0, 3072, 248320, 262144, (256, 8)),
    "qwen3.5-397b-a17b": (60, 45, 0, 4096, 248320, 262144, (512, 10)),
}


def test_the_catalogue_holds_the_models_of_the_three_tables() -> None:
    assert sorted([*LATENT, *GQA, *MIXED, "laptop", "laptop-gqa"]) == NAMES


@pytest.mark.parametrize("name", MIXED)
def test_geometry_of_models_that_mix_attention(name: str) -> None:
    model, row = shipped(name), MIXED[name]
    kinds = [layer.attention for layer in model.layers]
    linear = sum(isinstance(kind, LinearAttention) for kind in kinds)
    windowed = sum(getattr(kind, "window_tokens", None) is not None for kind in kinds)
    assert (len(kinds), linear, windowed) == row[:3]
    assert (model.hidden_size, model.vocab_size, model.max_context_tokens) == row[3:6]
    mlp = model.layers[-1].mlp
    found = (mlp.experts, mlp.top_k) if isinstance(mlp, MoeMlp) else None
    assert found == row[6]


def test_the_interval_alone_says_which_layers_of_qwen3_next_are_full() -> None:
    is_full = [
        isinstance(one.attention, GqaAttention) for one in shipped("qwen3-next-80b-a3b").layers
    ]
    assert [index for index, full in enumerate(is_full) if full] == list(range(3, 48, 4))


@pytest.mark.parametrize("name", GQA)
def test_geometry_of_grouped_query_models(name: str) -> None:
    model = shipped(name)
    layers, hidden, heads, kv_heads, head_dim, experts, top_k, size, vocab, context = GQA[name]
    assert (len(model.layers), model.hidden_size) == (layers, hidden)
    assert (model.vocab_size, model.max_context_tokens) == (vocab, context)
    for layer in model.layers:
        attention = layer.attention
        assert isinstance(attention, GqaAttention)
        assert (attention.heads, attention.kv_heads) == (heads, kv_heads)
        assert attention.head_dim == attention.value_dim == head_dim
        assert getattr(layer.mlp, "intermediate_size", 0) == size
        assert isinstance(layer.mlp, MoeMlp) == bool(experts)
        if isinstance(layer.mlp, MoeMlp):
            assert (layer.mlp.experts, layer.mlp.top_k) == (experts, top_k)


# Totals without MTP, MTP, and active, in 1e9 weights; K2.5 adds its vision tower to the 1026.4.
COUNTS = {
    "kimi-k2": (1026.4, 0.0, 31.7),
    "kimi-k2.5": (1026.9, 0.0, 31.7),
    "kimi-k2.6": (1026.9, 0.0, 31.7),
    "glm-5.2": (743.4, 9.9, 40.3),
    "deepseek-v3": (671.0, 11.6, 36.6),
    "deepseek-v3.2": (671.9, 11.6, 37.5),
    "minimax-m2.5": (228.7, 0.0, 10.4),
    "devstral-2-123b": (125.0, 0.0, 123.4),
    "gpt-oss-120b": (116.8, 0.0, 5.2),
    "gpt-oss-20b": (20.9, 0.0, 3.6),
    "llama-3.1-405b": (405.9, 0.0, 403.8),
    "gemma-4-31b": (31.3, 0.0, 30.7),
    "llama-2-70b": (69.0, 0.0, 68.7),
    "mimo-v2-flash": (308.8, 0.0, 14.8),
    "qwen2.5-7b": (7.6, 0.0, 7.1),
    "qwen3-next-80b-a3b": (79.7, 0.0, 3.6),
    "qwen3.5-397b-a17b": (396.8, 6.6, 16.3),
    "qwen3-14b": (14.8, 0.0, 14.0),
    "qwen3-235b-a22b": (235.1, 0.0, 21.6),
}


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts(name: str) -> None:
    model, (total, mtp, active) = shipped(name), COUNTS[name]
    assert model.parameters / 1e9 == pytest.approx(total, abs=0.06)
    assert mtp_parameters(model) / 1e9 == pytest.approx(mtp, abs=0.06)
    assert active_parameters(model) / 1e9 == pytest.approx(active, abs=0.06)


def parameters_by_role(model: ModelSpec) -> dict[Role, float]:
    found: dict[Role, float] = {}
    weights = [weight for layer in model.layers for weight in layer.weights]
    for weight in (*weights, *model.outer_weights):
        found[weight.role] = found.get(weight.role, 0.0) + weight.parameters / 1e9
    return found


# 1e9 weights by role; embedding and head together are "tables".
BY_ROLE = {
    "kimi-k2": {
        Role.ATTENTION: 6.17,
        Role.ROUTED_EXPERT: 1014.7,
        Role.SHARED_EXPERT: 2.64,
        Role.DENSE_MLP: 0.40,
    },
    "glm-5.2": {
        Role.ATTENTION: 12.87,
        Role.INDEXER: 0.20,
        Role.ROUTED_EXPERT: 724.8,
        Role.SHARED_EXPERT: 2.83,
        Role.DENSE_MLP: 0.68,
    },
}


@pytest.mark.parametrize(("name", "tables"), [("kimi-k2", 2.35), ("glm-5.2", 1.90)])
def test_parameters_by_role(name: str, tables: float) -> None:
    found = parameters_by_role(shipped(name))
    assert {role: found[role] for role in BY_ROLE[name]} == pytest.approx(
        BY_ROLE[name], rel=1e-4, abs=0.006
    )
    assert found[Role.EMBEDDING] + found[Role.HEAD] == pytest.approx(tables, abs=0.006)
    assert (Role.INDEXER in found) == (name == "glm-5.2")


def indexer_owners(layers: tuple[LayerSpec, ...]) -> list[int]:
    return [
        index
        for index, layer in enumerate(layers)
        if isinstance(layer.attention, MlaAttention) and layer.attention.indexer is not None
    ]


def test_glm_5_2_shares_its_indexers() -> None:
    model = shipped("glm-5.2")
    owners = indexer_owners(model.layers)
    assert owners == [0, 1, 2, *range(6, 78, 4)]
    assert len(owners) == 21
    assert indexer_owners(model.mtp_layers) == [0]
    by_layer = [any(w.role is Role.INDEXER for w in layer.weights) for layer in model.layers]
    assert [index for index, has_weights in enumerate(by_layer) if has_weights] == owners


@pytest.mark.parametrize(
    ("name", "layers", "heads"),
    [("glm-5", 78, 32), ("glm-5.1", 78, 32), ("deepseek-v3.2", 61, 64)],
)
def test_every_layer_owns_an_indexer(name: str, layers: int, heads: int) -> None:
    model = shipped(name)
    assert indexer_owners(model.layers) == list(range(layers))
    attention = model.layers[0].attention
    assert isinstance(attention, MlaAttention)
    assert attention.sparse_top_k == 2048
    assert attention.indexer is not None
    assert (attention.indexer.heads, attention.indexer.head_dim) == (heads, 128)


@pytest.mark.parametrize("name", ["kimi-k2", "kimi-k2.6", "deepseek-v3", "deepseek-r1"])
def test_dense_attention_has_no_indexer(name: str) -> None:
    assert indexer_owners(shipped(name).layers) == []


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gpt-oss-120b"])
def test_gpt_oss_windows_every_second_layer(name: str) -> None:
    model = shipped(name)
    windows = [getattr(layer.attention, "window_tokens", 0) for layer in model.layers]
    assert windows == [128, None] * (len(model.layers) // 2)


def stored_formats(model: ModelSpec) -> dict[Role, set[str]]:
    found: dict[Role, set[str]] = {}
    layers = (*model.layers, *model.mtp_layers)
    weights = [weight for layer in layers for weight in layer.weights]
    for weight in (*weights, *model.outer_weights):
        found.setdefault(weight.role, set()).add(weight.format)
    return found


@pytest.mark.parametrize("name", ["kimi-k2.5", "kimi-k2.6"])
def test_kimi_int4_is_in_the_routed_experts_alone(name: str) -> None:
    found = stored_formats(shipped(name))
    assert found.pop(Role.ROUTED_EXPERT) == {"int4_g32"}
    assert set.union(*found.values()) == {"bf16"}
    assert Role.VISION in found


@pytest.mark.parametrize("name", ["glm-5.2", "deepseek-v3.2", "minimax-m2.7", "kimi-k2"])
def test_fp8_releases_keep_router_head_and_embedding(name: str) -> None:
    found = stored_formats(shipped(name))
    assert found[Role.ATTENTION] == found[Role.ROUTED_EXPERT] == {"fp8_block"}
    assert found[Role.EMBEDDING] == found[Role.HEAD] == found[Role.NORM] == {"bf16"}
    assert found[Role.ROUTER] == ({"fp32"} if name == "glm-5.2" else {"bf16"})


def test_gpt_oss_stores_only_experts_in_mxfp4() -> None:
    found = stored_formats(shipped("gpt-oss-120b"))
    assert found.pop(Role.ROUTED_EXPERT) == {"mxfp4"}
    assert set.union(*found.values()) == {"bf16"}


@pytest.mark.parametrize("name", NAMES)
def test_shards_follow_the_roles(name: str) -> None:
    model = shipped(name)
    for layer in {*model.layers, *model.mtp_layers}:
        for weight in layer.weights:
            if weight.role is Role.ROUTED_EXPERT:
                assert weight.shard is Shard.EXPERT
                assert isinstance(layer.mlp, MoeMlp)
                assert weight.copies == layer.mlp.experts
            if weight.role in (Role.ROUTER, Role.INDEXER):
                assert weight.shard is Shard.REPLICATED
            if weight.shard is Shard.KV_HEADS:
                assert isinstance(layer.attention, GqaAttention)
                assert weight.shard_ways_max == layer.attention.kv_heads
    outer = {weight.role: weight.shard for weight in model.outer_weights}
    tied = outer[Role.EMBEDDING]  # Gemma 4 has no other head
    assert tied == outer.get(Role.HEAD, tied) == Shard.VOCAB
