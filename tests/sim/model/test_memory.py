"""What fits: items that add up, published pools, layouts refused, and what mends a deficit."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.scenarios.catalogue import load_gpu, load_model
from tonnage.sim.domain import (
    BadInputError,
    EngineSpec,
    InfeasibleError,
    ParallelLayout,
    PoolSpec,
    Role,
    SpeculationSpec,
)
from tonnage.sim.model.budget import cuda_visible_bytes
from tonnage.sim.model.engine_rules import (
    default_chunk_tokens,
    default_max_running_requests,
    default_page_tokens,
)
from tonnage.sim.model.formats import checkpoint_bytes
from tonnage.sim.model.layout import layout_problem
from tonnage.sim.model.memory import (
    PoolMemory,
    check_request_fits,
    estimate_pool_memory,
    max_concurrency,
    pool_memory,
)
from tonnage.sim.model.requantise import with_weights
from tonnage.sim.model.weights import stage_weights

GIB, MIB = 2**30, 2**20
SGLANG = EngineSpec("sglang", "0.5.23")
VLLM = EngineSpec("vllm", "0.33.0")
TP8 = ParallelLayout(tp=8)
# The fractions that meet the published pools (docs/memory.md).
KIMI_FITTED = EngineSpec("sglang", "0.5.23", 0.848, "fitted")
GLM_FITTED = EngineSpec("sglang", "0.5.23", 0.828, "fitted")


def memory_of(
    name: str,
    gpu_name: str = "h200-sxm",
    engine: EngineSpec = SGLANG,
    layout: ParallelLayout = TP8,
    *,
    kv: str = "bf16",
    weights: str = "native",
    role: str = "decode",
    raises: bool = True,
    speculation: SpeculationSpec | None = None,
) -> PoolMemory:
    model, gpu = with_weights(load_model(name), weights), load_gpu(gpu_name)
    running = default_max_running_requests(engine, gpu, model)
    pool = PoolSpec(
        role=role,
        instances=1,
        layout=layout,
        weights=weights,
        kv_format=kv,
        page_tokens=default_page_tokens(engine, model, gpu, kv),
        chunk_tokens=default_chunk_tokens(engine, gpu),
        max_running_requests=running * layout.attention_dp,
        speculation=speculation,
    )
    calculate = pool_memory if raises else estimate_pool_memory
    return calculate(model, gpu, engine, pool)


# --- published pools ----------------------------------------------------------------------------


@pytest.mark.parametrize(("kv", "published"), [("bf16", 686_000), ("fp8_e4m3", 1_370_000)])
def test_one_fitted_fraction_gives_both_published_kimi_pools(kv: str, published: int) -> None:
    memory = memory_of("kimi-k2.6", engine=KIMI_FITTED, kv=kv)
    assert memory.kv_tokens == pytest.approx(published, rel=0.01)
    assert memory.mem_fraction_source == "fitted"


def test_a_fitted_fraction_gives_the_published_glm_pool() -> None:
    memory = memory_of("glm-5.2", engine=GLM_FITTED, kv="fp8_e4m3", weights="int4_g32")
    assert memory.kv_tokens == pytest.approx(1_180_000, rel=0.02)


@pytest.mark.parametrize(
    ("name", "weights", "gib", "tolerance"),
    [
        ("glm-5.2", "fp8_block", 88, 0.02),
        ("glm-5.2", "int4_g32", 52, 0.02),
        ("kimi-k2.6", "native", 69.2, 0.01),
    ],
)
def test_checkpoint_per_gpu(name: str, weights: str, gib: float, tolerance: float) -> None:
    memory = memory_of(name, weights=weights, kv="fp8_e4m3")
    assert memory.checkpoint_bytes_per_gpu / GIB == pytest.approx(gib, rel=tolerance)
    assert memory.weights_bytes_per_gpu > 0.99 * memory.checkpoint_bytes_per_gpu


def test_an_unfitted_pool_matches_a_published_deepseek_server() -> None:
    # ai-dynamo/aisimulate pull request 263: fraction 0.82 on 8 x H200 gives about 509,000 tokens.
    engine = EngineSpec("sglang", "0.5.23", 0.82, "given")
    memory = memory_of("deepseek-r1", engine=engine, role="serve")
    assert memory.kv_tokens == pytest.approx(509_000, rel=0.01)


# --- fractions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "role", "fraction"),
    [
        ("kimi-k2.6", "decode", 0.929),
        ("kimi-k2.6", "serve", 0.886 * 0.95),
        ("glm-5.2", "serve", 0.886),
        ("llama-3.1-70b", "serve", 0.893),
    ],
)
def test_sglang_default_fraction_on_h200(name: str, role: str, fraction: float) -> None:
    memory = memory_of(name, role=role)
    assert memory.mem_fraction == pytest.approx(fraction)
    assert memory.mem_fraction_source == "auto"


@pytest.mark.parametrize(
    ("gpu", "gib"),
    [("h100-sxm", 79.18), ("h200-sxm", 139.8), ("b200-sxm", 182642 / 1024), ("rtx-5090", 31.36)],
)
def test_cuda_sees_less_than_the_driver_reports(gpu: str, gib: float) -> None:
    assert cuda_visible_bytes(load_gpu(gpu)) / GIB == pytest.approx(gib, abs=0.02)


def test_cuda_sees_the_bytes_that_torch_reports_on_an_rtx_4090() -> None:
    assert cuda_visible_bytes(load_gpu("rtx-4090")) == pytest.approx(25_250_627_584, abs=MIB)


def test_vllm_counts_graphs_and_more_fraction_since_0_21() -> None:
    before = memory_of("glm-5.2", engine=EngineSpec("vllm", "0.19.0"), role="serve")
    after = memory_of("glm-5.2", engine=EngineSpec("vllm", "0.21.0"), role="serve")
    visible = cuda_visible_bytes(load_gpu("h200-sxm"))
    gained = after.kv_bytes_per_gpu - before.kv_bytes_per_gpu
    assert gained == pytest.approx(0.02 * visible - after.graph_bytes)


def test_another_version_and_a_tight_fraction_are_said() -> None:
    tight = memory_of("kimi-k2.6", engine=EngineSpec("sglang", "0.5.30", 0.99, "given"))
    assert any("memory rules of 0.5.23" in text for text in tight.assumptions)
    assert any("less than activations and graphs take" in text for text in tight.assumptions)


# --- items --------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [SGLANG, VLLM])
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("kimi-k2.6", TP8),
        ("kimi-k2.6", ParallelLayout(tp=8, ep=8, attention_dp=8)),
        ("gpt-oss-120b", ParallelLayout(tp=2)),
        ("qwen3-235b-a22b", ParallelLayout(tp=8, pp=2, ep=2)),
    ],
)
def test_items_add_up_to_the_gpu(name: str, layout: ParallelLayout, engine: EngineSpec) -> None:
    memory = memory_of(name, engine=engine, layout=layout, role="serve")
    total = memory.weights_bytes_per_gpu + memory.kv_bytes_per_gpu + memory.activation_bytes
    total += memory.graph_bytes + memory.other_bytes
    assert total == pytest.approx(memory.gpu_memory_bytes)
    assert sum(memory.weights_by_role.values()) == pytest.approx(memory.weights_bytes_per_gpu)


@given(
    tp=st.sampled_from([1, 2, 4, 8, 16]),
    dp_share=st.sampled_from([1, 2, 4]),
    engine=st.sampled_from(["sglang", "vllm"]),
    name=st.sampled_from(["kimi-k2.6", "glm-5.2", "llama-3.1-8b", "gpt-oss-120b"]),
)
def test_loaded_weights_are_the_share_plus_what_is_replicated(
    tp: int, dp_share: int, engine: str, name: str
) -> None:
    layout = ParallelLayout(tp=tp, attention_dp=max(1, tp // dp_share))
    model = load_model(name)
    (loaded,) = stage_weights(model, layout, engine)
    stored = checkpoint_bytes(replace(model, mtp_layers=()))
    replicated = sum(loaded.replicated.values())
    assert loaded.total_bytes == pytest.approx(stored / tp + replicated)
    assert all(size >= 0 for size in loaded.replicated.values())


def test_pipeline_stages_hold_everything_once() -> None:
    model = load_model("llama-3.1-70b")
    stages = stage_weights(model, ParallelLayout(pp=4))
    assert sum(stage.total_bytes for stage in stages) == pytest.approx(checkpoint_bytes(model))
    assert [Role.EMBEDDING in stage.by_role for stage in stages] == [True, False, False, False]
    assert [Role.HEAD in stage.by_role for stage in stages] == [False, False, False, True]


def test_what_kimi_replicates_is_itemised() -> None:
    replicated = memory_of("kimi-k2.6").replicated_bytes_per_gpu
    down_bytes = 61 * 7168 * (1536 + 512 + 64) * 2
    assert replicated["attention: whole on every rank"] == pytest.approx(down_bytes * 7 / 8)
    assert replicated["vision: whole on every rank"] > 0.5 * GIB
    absorbed = 61 * 64 * 256 * 512 * 2 / 8
    assert replicated["attention: kv_b_proj again, absorbed, BF16"] == absorbed


def test_duplicate_kv_heads_and_attention_dp_copies_are_itemised() -> None:
    few_heads = memory_of("qwen3-235b-a22b").replicated_bytes_per_gpu  # 4 kv heads on 8 ranks
    kv_bytes = 94 * 2 * 4 * 128 * 4096 * 2
    expected = kv_bytes / 4 - kv_bytes / 8
    assert few_heads["attention: fewer kv heads than ranks"] == pytest.approx(expected)
    ranks = ParallelLayout(tp=8, attention_dp=8, ep=8)
    sglang = memory_of("glm-5.2", layout=ranks, kv="fp8_e4m3").replicated_bytes_per_gpu
    vllm = memory_of("glm-5.2", layout=ranks, kv="fp8_e4m3", engine=VLLM)
    assert "embedding: whole in every attention-DP rank" in sglang
    assert "head: whole in every attention-DP rank" not in sglang
    assert "head: whole in every attention-DP rank" in vllm.replicated_bytes_per_gpu


def test_mtp_layers_are_loaded_when_speculating() -> None:
    mtp = SpeculationSpec(1, (0.2, 0.8), "mtp")
    without = memory_of("glm-5.2", kv="fp8_e4m3")
    speculating = memory_of("glm-5.2", kv="fp8_e4m3", speculation=mtp)
    assert speculating.weights_bytes_per_gpu > without.weights_bytes_per_gpu + GIB
    assert speculating.kv_bytes_per_token >= without.kv_bytes_per_token + 656
    assert speculating.checkpoint_bytes_per_gpu == without.checkpoint_bytes_per_gpu


@pytest.mark.parametrize(("engine", "gib"), [("sglang", 60.8), ("vllm", 65.97)])
def test_vllm_pads_mxfp4_experts(engine: str, gib: float) -> None:
    (loaded,) = stage_weights(load_model("gpt-oss-120b"), ParallelLayout(), engine)
    assert loaded.total_bytes / GIB == pytest.approx(gib, rel=0.005)


# --- tokens and concurrency ---------------------------------------------------------------------


def test_attention_dp_multiplies_a_latent_pool() -> None:
    # vllm issue 51454: a small model holds 7.7 times as much with data-parallel attention as with
    # tp 8; a large one gains less, for each rank loads all attention weights.
    tensor = memory_of("kimi-k2.6", "b200-sxm", role="serve")
    ranks = ParallelLayout(tp=8, attention_dp=8, ep=8)
    data = memory_of("kimi-k2.6", "b200-sxm", layout=ranks, role="serve")
    assert data.kv_bytes_per_token == tensor.kv_bytes_per_token
    assert data.kv_tokens == 8 * data.kv_tokens_per_rank
    assert data.kv_tokens > 4 * tensor.kv_tokens


def test_context_parallel_ranks_share_a_latent_pool() -> None:
    one, shared = memory_of("kimi-k2.6"), memory_of("kimi-k2.6", layout=ParallelLayout(8, dcp=8))
    assert shared.kv_tokens == pytest.approx(8 * one.kv_tokens, abs=8)


def test_tokens_are_whole_pages() -> None:
    memory = memory_of("glm-5.2", kv="fp8_e4m3")
    assert memory.page_tokens == 64
    assert memory.kv_tokens % 64 == 0
    assert memory.kv_tokens * memory.kv_bytes_per_token <= memory.kv_bytes_per_gpu


def test_concurrency_is_tokens_over_request_in_whole_pages() -> None:
    memory = memory_of("glm-5.2", kv="fp8_e4m3")
    assert max_concurrency(memory, 10_000) == memory.kv_tokens // 10_048  # 157 pages of 64
    ranks = memory_of("glm-5.2", layout=ParallelLayout(tp=8, attention_dp=8, ep=8), kv="fp8_e4m3")
    assert max_concurrency(ranks, 10_000) == ranks.kv_tokens_per_rank // 10_048 * 8


def test_windows_leave_room_for_more_requests_than_tokens_suggest() -> None:
    memory = memory_of("gpt-oss-120b", layout=ParallelLayout(tp=2), role="serve")
    long_requests = max_concurrency(memory, 131_072)
    assert long_requests == memory.kv_tokens // (131_072 + 128)  # the windows weigh 128 more
    assert max_concurrency(memory, 128) == pytest.approx(memory.kv_tokens / 256, abs=1)


def test_the_longest_request_is_bounded_by_pool_and_context() -> None:
    assert memory_of("kimi-k2.6").longest_request_tokens == 262_144
    full = memory_of("glm-5.2", kv="fp8_e4m3")
    assert full.longest_request_tokens == full.kv_tokens < 1_048_576
    assert max_concurrency(full, full.longest_request_tokens) == 1


def test_a_request_that_is_too_long_is_refused_with_the_longest_that_fits() -> None:
    memory = memory_of("kimi-k2", kv="bf16")
    check_request_fits(memory, memory.longest_request_tokens)
    message = rf"131,072 tokens needs 8\.6 GiB .* at most {memory.kv_tokens:,} tokens fit"
    with pytest.raises(InfeasibleError, match=message):
        check_request_fits(memory, 131_072)


@given(tokens=st.integers(1, 300_000), more=st.integers(0, 300_000))
def test_longer_requests_never_raise_concurrency(tokens: int, more: int) -> None:
    memory = memory_of("gpt-oss-120b", layout=ParallelLayout(tp=2), role="serve")
    assert max_concurrency(memory, tokens + more) <= max_concurrency(memory, tokens)


@pytest.mark.parametrize("name", ["kimi-k2.6", "llama-3.1-70b", "qwen3-235b-a22b"])
@pytest.mark.parametrize("engine", [SGLANG, VLLM])
def test_more_tensor_ranks_never_hold_fewer_tokens(name: str, engine: EngineSpec) -> None:
    held = [
        memory_of(name, engine=engine, layout=ParallelLayout(tp=tp), raises=False).kv_tokens
        for tp in (1, 2, 4, 8, 16)
    ]
    assert held == sorted(held)


# --- layouts that cannot be ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "layout", "message"),
    [
        (
            "kimi-k2.6",
            ParallelLayout(tp=7),
            "pools.decode.tp: 7 does not divide the 64 attention heads of kimi-k2.6; "
            "use 1, 2, 4, 8, 16, 32, 64",
        ),
        ("llama-3.1-8b", ParallelLayout(tp=64), "pools.decode.tp: 64 does not divide the 32"),
        ("llama-3.1-8b", ParallelLayout(pp=33), "pools.decode.pp: 33 is more than the 32 layers"),
        (
            "llama-3.1-8b",
            ParallelLayout(tp=2, ep=2),
            "pools.decode.ep: llama-3.1-8b has no experts",
        ),
        ("llama-3.1-8b", ParallelLayout(tp=8, dcp=2), "pools.decode.dcp: 2 ranks share the KV"),
        (
            "kimi-k2.6",
            ParallelLayout(tp=512, attention_dp=8, ep=512),
            "pools.decode.ep: 512 does not divide the 384 experts of kimi-k2.6; use 1, 2, 4",
        ),
    ],
)
def test_a_layout_that_the_model_cannot_have_is_bad_input(
    name: str, layout: ParallelLayout, message: str
) -> None:
    with pytest.raises(BadInputError, match=re.escape(message)):
        memory_of(name, layout=layout)


def test_tensor_ranks_must_not_cut_quantisation_blocks() -> None:
    # Real refusal of Qwen3-Coder-480B-FP8 with tp 8: 2560 / 8 = 320 is not a multiple of 128.
    message = r"tp: 8 ranks cut the fp8_block groups of .*; use ep 2"
    with pytest.raises(BadInputError, match=message):
        memory_of("qwen3-coder-480b", weights="fp8_block")
    memory_of("qwen3-coder-480b", weights="fp8_block", layout=ParallelLayout(tp=8, ep=2))


def test_vllm_splits_an_mlp_within_one_data_parallel_engine() -> None:
    model = load_model("deepseek-v3")
    layout = ParallelLayout(tp=32, attention_dp=32, ep=32)
    assert layout_problem(model, layout, "vllm") is None
    assert "cut the fp8_block groups" in str(layout_problem(model, layout, "sglang"))


# --- what does not fit --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "gpu", "fraction", "layout", "mend"),
    [
        ("kimi-k2.6", "h200-sxm", None, ParallelLayout(tp=4), "pools.decode.tp 8"),
        ("kimi-k2.6", "h100-sxm", None, TP8, "pools.decode.tp 8 with pp 2"),
        ("kimi-k2.6", "h100-sxm", None, ParallelLayout(tp=4, ep=4), "pools.decode.tp 8 with pp 2"),
        ("kimi-k2.6", "h100-sxm", None, ParallelLayout(tp=4, dcp=4), "pools.decode.tp 8 with pp 2"),
        ("kimi-k2", "h200-sxm", 0.85, TP8, "engine.mem_fraction 0.878"),
        ("llama-3.1-70b", "h100-sxm", None, ParallelLayout(), "pools.decode.weights fp8_block"),
    ],
)
def test_a_deficit_names_what_would_fit(
    name: str, gpu: str, fraction: float | None, layout: ParallelLayout, mend: str
) -> None:
    engine = replace(SGLANG, mem_fraction=fraction)
    with pytest.raises(InfeasibleError) as caught:
        memory_of(name, gpu, engine, layout)
    message = str(caught.value)
    deficit = memory_of(name, gpu, engine, layout, raises=False).deficit_bytes_per_gpu
    assert f"short of {deficit / GIB:.1f} GiB" in message
    assert mend in message


def test_the_advised_fraction_fits_and_the_one_below_does_not() -> None:
    assert memory_of("kimi-k2", engine=replace(SGLANG, mem_fraction=0.878)).fits
    below = memory_of("kimi-k2", engine=replace(SGLANG, mem_fraction=0.877), raises=False)
    assert not below.fits
    assert (below.kv_tokens, below.kv_bytes_per_gpu) == (0, 0)
    assert max_concurrency(below, 1) == 0


def test_hopeless_pools_say_so() -> None:
    with pytest.raises(InfeasibleError, match="use GPUs with more memory"):
        memory_of("kimi-k2", "rtx-4090", layout=ParallelLayout(tp=1))
