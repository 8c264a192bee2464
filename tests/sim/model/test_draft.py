"""Drafts: what they are made of, what they take of a GPU, and that a free one takes nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tonnage.scenarios.catalogue import load_gpu, load_model, model_names
from tonnage.sim.domain import (
    BadInputError,
    EngineSpec,
    GqaAttention,
    MlaAttention,
    ParallelLayout,
    PoolSpec,
    SpeculationSpec,
)
from tonnage.sim.model.draft import DraftSpec, draft_of
from tonnage.sim.model.engine_rules import default_speculative_running_requests
from tonnage.sim.model.formats import checkpoint_bytes
from tonnage.sim.model.layout import layout_problem
from tonnage.sim.model.memory import PoolMemory, pool_memory
from tonnage.sim.model.requantise import with_weights

SGLANG, VLLM = EngineSpec("sglang", "0.5.23"), EngineSpec("vllm", "0.33")
MIB = 2**20
TP8 = ParallelLayout(tp=8)
EAGLE3 = SpeculationSpec(3, (0.25, 0.25, 0.25, 0.25), "eagle3")
MTP = replace(EAGLE3, draft="mtp")


def memory_of(
    name: str,
    speculation: SpeculationSpec | None,
    engine: EngineSpec = SGLANG,
    layout: ParallelLayout = TP8,
    running: int = 48,
    weights: str = "native",
) -> PoolMemory:
    model, gpu = with_weights(load_model(name), weights), load_gpu("h200-sxm")
    pool = PoolSpec("decode", 1, layout, weights, "fp8_e4m3", 64, 8192, running, speculation)
    return pool_memory(model, gpu, engine, pool)


def draft(name: str, speculation: SpeculationSpec) -> DraftSpec:
    made = draft_of(load_model(name), speculation)
    assert made is not None
    return made


# --- geometry -----------------------------------------------------------------------------------


def test_an_eagle3_draft_is_one_dense_layer_of_the_target() -> None:
    kimi = draft("kimi-k2.6", EAGLE3)
    (layer,) = kimi.held.layers
    assert isinstance(layer.attention, MlaAttention)
    shapes = {w.name: (w.out_features, w.in_features) for w in layer.weights}
    assert shapes["fc"] == (7168, 3 * 7168)
    assert shapes["self_attn.q_a_proj"] == (1536, 2 * 7168)
    assert shapes["self_attn.kv_a_proj_with_mqa"] == (576, 2 * 7168)
    assert shapes["self_attn.o_proj"] == (7168, 64 * 128)
    assert shapes["mlp.gate_proj"] == (18432, 7168)
    assert [w.name for w in kimi.held.outer_weights] == ["norm", "lm_head"]
    assert checkpoint_bytes(kimi.held) == pytest.approx(3.7e9, rel=0.01)
    assert not kimi.held.verified
    assert "assumed" in kimi.assumptions[0]
    first, later = kimi.passes
    entry, *others = first.layers[0].weights
    assert entry.name == "fc"
    assert later.layers[0].weights == tuple(others)


def test_an_eagle3_draft_of_grouped_queries_reads_embedding_and_hidden_state() -> None:
    """Llama 3.1 8B: hidden size and o_proj's inputs are equal, and only the former doubles."""
    (layer,) = draft("llama-3.1-8b", EAGLE3).held.layers
    shapes = {w.name: (w.out_features, w.in_features) for w in layer.weights}
    assert shapes["self_attn.q_proj"] == (4096, 8192)
    assert shapes["self_attn.k_proj"] == (1024, 8192)
    assert shapes["self_attn.o_proj"] == (4096, 4096)


@pytest.mark.parametrize("name", [one for one in model_names() if not one.startswith("laptop")])
def test_every_model_can_have_an_eagle3_draft_in_its_own_layout(name: str) -> None:
    model, made = load_model(name), draft(name, EAGLE3)
    assert 0 < checkpoint_bytes(made.held) < 0.2 * checkpoint_bytes(model)
    attention = made.held.layers[0].attention
    assert isinstance(attention, GqaAttention | MlaAttention)
    if layout_problem(model, TP8) is None:
        assert layout_problem(made.held, TP8) is None


def test_an_mtp_draft_is_the_checkpoints_own_layer() -> None:
    model, made = load_model("glm-5.2"), draft("glm-5.2", MTP)
    assert made.held.layers == model.mtp_layers
    assert made.held.outer_weights == ()
    assert [one.layers for one in made.passes] == [model.mtp_layers]
    assert made.passes[0].outer_weights == model.outer_weights


def test_mtp_layers_follow_the_weights_of_the_pool() -> None:
    native = memory_of("glm-5.2", MTP, weights="fp8_block").draft_weights_bytes_per_gpu
    int4 = memory_of("glm-5.2", MTP, weights="int4_g32").draft_weights_bytes_per_gpu
    assert int4 < 0.75 * native


def test_a_model_without_mtp_layers_cannot_draft_with_them() -> None:
    with pytest.raises(BadInputError, match=r"kimi-k2\.6 carries no MTP layers; use eagle3"):
        draft_of(load_model("kimi-k2.6"), MTP)


def test_a_draft_that_cannot_be_split_is_refused() -> None:
    """Qwen3 14B has 40 heads: not over the sixteen ranks of its target."""
    own = replace(EAGLE3, draft="model", draft_model=load_model("qwen3-14b"))
    with pytest.raises(BadInputError, match=r"speculation\.draft: tp: 16 .* qwen3-14b"):
        memory_of("llama-3.1-405b", own, layout=ParallelLayout(tp=16))
    assert memory_of("llama-3.1-405b", own).draft_weights_bytes_per_gpu > 3e9


# --- memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [SGLANG, VLLM])
@pytest.mark.parametrize("name", ["kimi-k2.6", "gpt-oss-120b"])
def test_no_draft_tokens_and_a_free_draft_take_the_bytes_of_no_speculation(
    name: str, engine: EngineSpec
) -> None:
    none = SpeculationSpec(0, (1.0,), "free")
    assert memory_of(name, none, engine, running=2048) == memory_of(
        name, None, engine, running=2048
    )


def test_sglang_charges_a_draft_layer_as_one_of_the_target() -> None:
    plain, drafted = memory_of("kimi-k2.6", None), memory_of("kimi-k2.6", EAGLE3)
    assert drafted.kv_bytes_per_token == pytest.approx(plain.kv_bytes_per_token * 62 / 61)
    # GLM's indexer, on 21 of 78 layers, is charged in proportion too.
    glm = memory_of("glm-5.2", MTP, weights="int4_g32")
    assert glm.kv_bytes_per_token == pytest.approx(53_940 * 79 / 78)


def test_vllm_counts_a_drafts_layers_as_its_own() -> None:
    glm = memory_of("glm-5.2", MTP, VLLM, weights="int4_g32")
    assert glm.kv_bytes_per_token == 53_940 + 656 + 132
    own = replace(EAGLE3, draft="model", draft_model=load_model("llama-3.1-8b"))
    drafted, plain = (memory_of("llama-3.1-70b", one, VLLM) for one in (own, None))
    assert drafted.kv_bytes_per_token == plain.kv_bytes_per_token + 32 * 2 * 128


def test_a_draft_is_on_the_last_stage_and_its_bytes_are_itemised() -> None:
    plain, drafted = memory_of("kimi-k2.6", None), memory_of("kimi-k2.6", EAGLE3)
    added = drafted.weights_bytes_per_gpu - plain.weights_bytes_per_gpu
    assert drafted.draft_weights_bytes_per_gpu == pytest.approx(added)
    assert plain.draft_weights_bytes_per_gpu == 0
    assert sum(drafted.weights_by_role.values()) == pytest.approx(drafted.weights_bytes_per_gpu)
    items = (
        drafted.weights_bytes_per_gpu
        + drafted.kv_bytes_per_gpu
        + drafted.activation_bytes
        + drafted.graph_bytes
        + drafted.other_bytes
    )
    assert items == pytest.approx(drafted.gpu_memory_bytes)
    assert drafted.checkpoint_bytes_per_gpu == plain.checkpoint_bytes_per_gpu
    assert any("EAGLE-3" in text for text in drafted.assumptions)
    two = ParallelLayout(tp=8, pp=2)
    staged, bare = (
        memory_of("kimi-k2.6", EAGLE3, layout=two),
        memory_of("kimi-k2.6", None, layout=two),
    )
    pools = [
        before.pool_bytes - after.pool_bytes
        for before, after in zip(bare.stages, staged.stages, strict=True)
    ]
    assert pools == [0, pytest.approx(added)]


def test_sliding_windows_are_charged_for_the_draft_too() -> None:
    plain, drafted = memory_of("gpt-oss-120b", None), memory_of("gpt-oss-120b", EAGLE3)
    for before, after in zip(plain.stages, drafted.stages, strict=True):
        ratio = 1 + 1 / 36
        assert after.shape.shared_bytes_per_token == before.shape.shared_bytes_per_token * ratio
        assert after.shape.windows == tuple((w, size * ratio) for w, size in before.shape.windows)


def test_a_decode_servers_activations_count_every_verified_token() -> None:
    """SGLang: 1.5 MiB for each of max(running requests x tokens per request, 2048)."""
    assert memory_of("kimi-k2.6", EAGLE3, running=48).activation_bytes == 2048 * 1.5 * MIB
    assert memory_of("kimi-k2.6", EAGLE3, running=1024).activation_bytes == 4096 * 1.5 * MIB
    assert memory_of("kimi-k2.6", None, running=1024).activation_bytes == 2048 * 1.5 * MIB


def test_a_speculating_server_runs_few_requests_by_default() -> None:
    assert default_speculative_running_requests(SGLANG) == 48
    assert default_speculative_running_requests(VLLM) is None
