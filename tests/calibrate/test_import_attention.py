"""The importers of attention tables: what each raw table means, and what is refused."""

from __future__ import annotations

from importlib import util
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tonnage.calibrate.imports import attention, linear_attention, sparse_attention
from tonnage.calibrate.imports.attention_rows import (
    DECODE_COLUMNS,
    PREFILL_COLUMNS,
    attention_table,
)
from tonnage.calibrate.imports.wheel import read_table
from tonnage.sim.domain import BadInputError

needs_wheel = pytest.mark.skipif(
    util.find_spec("aiconfigurator_core") is None, reason="aiconfigurator-core is not installed"
)
GPUS = ("h200_sxm", "b200_sxm")


def raw(calls: list[dict[str, Any]], **common: Any) -> pd.DataFrame:
    """Return raw rows: `calls` over what all of them share."""
    base = {
        "framework": "SGLang",
        "version": "0.5.14",
        "device": "NVIDIA H200",
        "op_name": "mla_generation",
        "kernel_source": "flash_attention",
        "kv_cache_dtype": "bfloat16",
        "num_heads": 8,
        "batch_size": 1,
        "isl": 1,
        "step": 127,
        "tp_size": 8,
        "latency": 0.02,
    }
    return pd.DataFrame([{**base, **common, **call} for call in calls])


def gqa(calls: list[dict[str, Any]], **common: Any) -> pd.DataFrame:
    shape = {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "beam_width": 1,
        "attn_dtype": "bfloat16",
        "window_size": 0,
    }
    return raw(calls, **{**shape, "kernel_source": "fa3", **common})


def module(calls: list[dict[str, Any]], **common: Any) -> pd.DataFrame:
    kind = {
        "framework": "VLLM",
        "op_name": "mla_generation_module",
        "kernel_source": "FLASHMLA",
        "gemm_type": "bfloat16",
        "tp_size": 1,
    }
    return raw(calls, **{**kind, **common})


def dsa(calls: list[dict[str, Any]], **common: Any) -> pd.DataFrame:
    kind = {
        "op_name": "dsa_generation_module",
        "kernel_source": "sglang_dsa_indexer_flashmla_kv",
        "model": "zai-org/GLM-5-FP8",
        "architecture": "GlmMoeDsaForCausalLM",
        "kv_cache_dtype": "fp8",
        "gemm_type": "fp8_block",
    }
    return raw(calls, **{**kind, **common})


# --- contexts, heads, formats -------------------------------------------------------------------


def test_the_context_of_a_kernel_row_is_the_cached_tokens_and_the_new_one() -> None:
    rows = attention.mla_decode(raw([{"step": 2**k - 1, "latency": 0.01 * k} for k in (1, 7, 12)]))
    assert rows["context_tokens"].tolist() == [2, 128, 4096]
    assert rows["seconds"].tolist() == pytest.approx([1e-5, 7e-5, 12e-5])
    assert tuple(rows.columns) == DECODE_COLUMNS


def test_the_context_of_a_module_row_is_its_step() -> None:
    rows = sparse_attention.dsa_decode(dsa([{"step": 4096}, {"step": 8192, "latency": 0.03}]))
    assert rows["context_tokens"].tolist() == [4096, 8192]
    assert set(rows["content"]) == {"module"}


def test_a_prefill_row_has_its_new_tokens_and_its_prefix() -> None:
    call = {"isl": 8192, "step": 2048, "op_name": "dsa_context_module", "latency": 7.0}
    rows = sparse_attention.dsa_prefill(dsa([call]))
    assert rows[["new_tokens", "past_tokens"]].to_numpy().tolist() == [[8192, 2048]]
    assert tuple(rows.columns) == PREFILL_COLUMNS


@pytest.mark.parametrize("tp_size", [1, 8])
def test_heads_are_those_of_one_rank_whatever_tp_size_says(tp_size: int) -> None:
    rows = attention.mla_decode(raw([{"num_heads": 8, "tp_size": tp_size}]))
    assert rows["heads"].tolist() == [8]


def test_a_window_of_zero_is_no_window() -> None:
    rows = attention.gqa_decode(gqa([{"window_size": 0}, {"window_size": 128, "latency": 0.01}]))
    windows = rows["window_tokens"].tolist()
    assert 128.0 in windows
    assert sum(np.isnan(windows)) == 1


def test_formats_get_our_names_and_an_unknown_one_is_refused() -> None:
    rows = attention.gqa_decode(gqa([{"kv_cache_dtype": "fp8"}]))
    assert rows["kv_format"].tolist() == ["fp8_e4m3"]
    with pytest.raises(BadInputError, match="kv_cache_dtype: unknown int3"):
        attention.gqa_decode(gqa([{"kv_cache_dtype": "int3"}]))


def test_rows_of_a_beam_are_refused() -> None:
    with pytest.raises(BadInputError, match="beam_width"):
        attention.gqa_decode(gqa([{"beam_width": 4}]))


def test_over_an_fp8_cache_the_rows_that_compute_in_fp8_stand() -> None:
    calls = [
        {"attn_dtype": "bfloat16", "latency": 0.04},
        {"attn_dtype": "fp8", "latency": 0.03},
    ]
    rows = attention.gqa_prefill(gqa(calls, kv_cache_dtype="fp8", isl=512, step=0))
    assert rows["seconds"].tolist() == pytest.approx([3e-5])


# --- rows that do not measure what they say -----------------------------------------------------


def test_rows_without_time_are_dropped_and_repeated_ones_become_their_median() -> None:
    latencies = [0.0, -1.0, 0.010, 0.011, 0.030]
    rows = attention.mla_decode(raw([{"latency": one} for one in latencies]))
    assert rows["seconds"].tolist() == pytest.approx([1.1e-5])


def test_a_spike_is_dropped_and_a_steep_climb_is_not() -> None:
    grid = {
        (batch, step): 0.01 * batch * step for batch in (1, 2, 4) for step in (127, 255, 511, 1023)
    }
    grid[2, 255] *= 100
    calls = [{"batch_size": b, "step": s, "latency": t} for (b, s), t in grid.items()]
    rows = attention.mla_decode(raw(calls))
    found = set(zip(rows["batch"], rows["context_tokens"] - 1, strict=True))
    assert found == set(grid) - {(2, 255)}


@pytest.mark.parametrize(
    ("kernel", "kept"), [("flash_attention", []), ("trtllm_mla", ["fp8_e4m3"])]
)
def test_fp8_rows_that_cast_the_whole_pool_are_refused(kernel: str, kept: list[str]) -> None:
    rows = attention.mla_decode(raw([{"kv_cache_dtype": "fp8", "kernel_source": kernel}]))
    assert rows["kv_format"].tolist() == kept


def test_of_a_launch_bound_module_only_the_growth_with_the_context_is_used() -> None:
    calls = [
        {"step": step, "latency": floor + slope * step, "gemm_type": gemm}
        for step in (2, 4, 8, 4096)
        for gemm, floor, slope in (("bfloat16", 0.10, 1e-5), ("fp8_block", 0.13, 2e-5))
    ]
    growth = attention.mla_module_growth(module(calls, kv_cache_dtype="fp8"))
    longest = growth[growth["context_tokens"] == 4096]["seconds"].tolist()
    assert longest == pytest.approx([1e-8 * (4096 - 4)])
    assert (growth["seconds"] >= 0).all()


def test_growth_stands_on_the_kernel_over_an_empty_context_and_says_so() -> None:
    empty = attention.mla_decode(raw([{"step": 1, "latency": 0.011}, {"step": 4095}]))
    calls = [{"step": step, "latency": 0.1 + 1e-5 * step} for step in (2, 4096)]
    growth = attention.mla_module_growth(module(calls, kv_cache_dtype="fp8"))
    rows = attention.mla_composed(empty, growth)
    assert rows["seconds"].tolist() == pytest.approx([1.1e-5, 1.1e-5 + 4094e-8])
    assert set(rows["source_framework"]) == {"sglang+vllm"}
    assert set(rows["content"]) == {"kernel"}
    assert set(rows["kv_format"]) == {"fp8_e4m3"}


@pytest.mark.parametrize(
    ("kernel", "kind"), [("flash_attention", "mla_absorbed"), ("trtllm_mla", "mla")]
)
def test_prefill_over_the_latent_is_a_kind_of_its_own(kernel: str, kind: str) -> None:
    rows = attention.mla_prefill(raw([{"isl": 512, "step": 0, "kernel_source": kernel}]))
    assert rows["kind"].tolist() == [kind]


# --- sparse modules -----------------------------------------------------------------------------


def test_the_op_and_not_the_model_says_which_layers_own_an_indexer() -> None:
    calls = [
        {"op_name": "dsa_generation_module", "model": "nvidia/GLM-5.2-NVFP4"},
        {"op_name": "dsa_generation_module_skip_indexer", "model": "zai-org/GLM-5"},
    ]
    rows = sparse_attention.dsa_decode(dsa(calls))
    assert sorted(rows["kind"]) == ["dsa_full", "dsa_shared"]


def test_modules_of_two_models_do_not_mix() -> None:
    calls: list[dict[str, Any]] = [
        {"num_heads": 16, "architecture": "GlmMoeDsaForCausalLM"},
        {"num_heads": 16, "architecture": "DeepseekV32ForCausalLM"},
    ]
    rows = sparse_attention.dsa_decode(dsa(calls))
    assert sorted(rows["hidden_size"]) == [6144, 7168]


def test_eager_batches_are_refused() -> None:
    calls = [{"batch_size": batch, "latency": 0.1 + batch / 1e4} for batch in (1, 256, 512, 1024)]
    rows = sparse_attention.dsa_decode(dsa(calls))
    assert rows["batch"].tolist() == [1, 256]


def dsa_prefill(calls: list[dict[str, Any]], **common: Any) -> pd.DataFrame:
    return sparse_attention.dsa_prefill(dsa(calls, **{"op_name": "dsa_context_module", **common}))


def test_prefill_rows_that_the_host_bounds_are_refused() -> None:
    calls = [
        {"isl": tokens, "step": 4096, "latency": max(1.5, tokens * 1e-3)}
        for tokens in (4, 16, 64, 256, 1024, 2048, 4096, 8192)
    ]
    assert dsa_prefill(calls)["new_tokens"].tolist() == [2048, 4096, 8192]


@pytest.mark.parametrize(("jump", "pasts"), [(1.4, [0]), (1.03, [0, 256, 1024, 8192])])
def test_shared_layers_that_jump_behind_a_prefix_keep_the_value_without(
    jump: float, pasts: list[int]
) -> None:
    calls = [
        {"isl": 8192, "step": past, "latency": 6.3 * (jump if past >= 1024 else 1.0)}
        for past in (0, 256, 1024, 8192)
    ]
    rows = dsa_prefill(calls, op_name="dsa_context_module_skip_indexer")
    assert rows["past_tokens"].tolist() == pasts


# --- linear attention and the products around MLA -----------------------------------------------


def linear(calls: list[dict[str, Any]]) -> pd.DataFrame:
    base = {
        "framework": "SGLang",
        "version": "0.5.14",
        "op_name": "gdn",
        "phase": "generation",
        "batch_size": 8,
        "seq_len": 1,
        "num_k_heads": 4,
        "head_k_dim": 128,
        "num_v_heads": 8,
        "head_v_dim": 128,
        "kernel_source": "causal_conv1d_update",
        "latency": 0.002,
    }
    return linear_attention.linear_rows(pd.DataFrame([{**base, **call} for call in calls]))


def test_a_call_of_linear_attention_is_the_sum_of_its_kernels() -> None:
    rows = linear([{}, {"kernel_source": "fused_recurrent", "latency": 0.005}])
    assert rows["seconds"].tolist() == pytest.approx([7e-6])
    assert rows["kind"].tolist() == ["gated_delta_net_decode"]


def test_a_call_that_lacks_a_kernel_is_dropped_unless_the_kernel_holds_all() -> None:
    assert linear([{}]).empty
    fused = linear([{"op_name": "kda", "kernel_source": "kda_fused_decode"}])
    assert fused["kind"].tolist() == ["kda_decode"]


def test_prompts_that_thrash_are_refused() -> None:
    calls = [
        {"phase": "context", "seq_len": 1024, "batch_size": batch, "kernel_source": kernel}
        for batch in (1, 16, 32)
        for kernel in ("causal_conv1d_fn", "chunk")
    ]
    assert linear(calls)["batch"].tolist() == [1, 16]


def test_the_two_products_around_mla_are_added_up() -> None:
    base = {
        "framework": "SGLang",
        "version": "0.5.14",
        "kernel_source": "torch_bmm",
        "bmm_dtype": "bfloat16",
        "num_heads": 8,
    }
    calls = [
        {"op_name": "mla_gen_pre", "num_tokens": 1, "latency": 0.004},
        {"op_name": "mla_gen_post", "num_tokens": 1, "latency": 0.005},
        {"op_name": "mla_gen_pre", "num_tokens": 2, "latency": 0.004},
    ]
    rows = linear_attention.bmm_rows(pd.DataFrame([{**base, **call} for call in calls]))
    assert rows[["tokens", "seconds"]].to_numpy().tolist() == [[1, pytest.approx(9e-6)]]


# --- the installed tables -----------------------------------------------------------------------


@needs_wheel
@pytest.mark.parametrize("gpu", GPUS)
def test_contexts_of_the_installed_tables_are_powers_of_two(gpu: str) -> None:
    for backend in ("sglang", "vllm", "trtllm"):
        rows = attention.decode_rows(gpu, backend)
        contexts = rows["context_tokens"].to_numpy(np.int64)
        assert ((contexts & (contexts - 1)) == 0).all(), backend
        assert {"gqa", "mla"} <= set(rows["kind"])
        assert set(rows["kv_format"]) == {"bf16", "fp8_e4m3"}
        assert set(rows["content"]) == {"kernel"}


@needs_wheel
def test_sglang_on_the_h200_has_no_row_that_casts_the_pool() -> None:
    rows = attention.decode_rows("h200_sxm", "sglang")
    mla = rows[(rows["kind"] == "mla") & (rows["heads"] == 8)]
    fp8 = mla[mla["kv_format"] == "fp8_e4m3"]
    assert set(fp8["source_framework"]) == {"sglang+vllm"}
    # 64 requests of 4096 tokens: FlashMLA reads half the bytes of BF16; the cast took 536 us.
    both = mla[(mla["batch"] == 64) & (mla["context_tokens"] == 4096)]
    seconds = both.set_index("kv_format")["seconds"]
    assert 0.5 < seconds["fp8_e4m3"] / seconds["bf16"] < 0.9


@needs_wheel
def test_the_spikes_of_tensorrt_llm_are_gone() -> None:
    table = attention_table("h200_sxm", "mla", "trtllm", "generation_mla")
    assert table is not None
    found = attention.mla_decode(read_table(table, attention.MLA_COLUMNS))
    spike = found[
        (found["heads"] == 8)
        & (found["batch"] == 512)
        & (found["context_tokens"] == 32)
        & (found["seconds"] > 5e-4)
    ]
    assert spike.empty
    assert len(found) > 0.99 * 2896


@needs_wheel
@pytest.mark.parametrize("gpu", GPUS)
def test_full_and_shared_layers_of_glm_are_there_on_every_gpu(gpu: str) -> None:
    rows = sparse_attention.decode_rows(gpu)
    glm = rows[(rows["hidden_size"] == 6144) & (rows["heads"] == 8)]
    assert set(glm["kind"]) == {"dsa_full", "dsa_shared"}
    assert rows["batch"].max() == 256
    assert (glm["batch"] * glm["context_tokens"])[glm["batch"] == 64].max() <= 262_144


@needs_wheel
def test_glm_layers_of_the_study_are_read_as_it_read_them() -> None:
    """21 full and 57 shared layers over 64 requests of 4096 tokens: 10.4 ms on the H200."""
    rows = sparse_attention.decode_rows("h200_sxm")
    glm = rows[
        (rows["hidden_size"] == 6144)
        & (rows["heads"] == 8)
        & (rows["kv_format"] == "fp8_e4m3")
        & (rows["projection_format"] == "fp8_block")
        & (rows["batch"] == 64)
        & (rows["context_tokens"] == 4096)
    ].set_index("kind")["seconds"]
    assert 21 * glm["dsa_full"] + 57 * glm["dsa_shared"] == pytest.approx(10.4e-3, rel=0.01)


@needs_wheel
@pytest.mark.parametrize(("gpu", "is_flat"), [("h100_sxm", False), ("h200_sxm", True)])
def test_only_the_h200_jumps_behind_a_prefix(gpu: str, is_flat: bool) -> None:
    rows = sparse_attention.prefill_rows(gpu)
    sparse = rows[(rows["kind"] == "dsa_shared") & ~sparse_attention.is_dense(rows)]
    assert (sparse["past_tokens"].max() <= 1) == is_flat


@needs_wheel
def test_mamba2_is_not_imported_for_its_tables_hold_no_scan() -> None:
    kinds = set(linear_attention.rows_of("h200_sxm", "trtllm")["kind"])
    assert kinds == {"gated_delta_net_decode", "gated_delta_net_prefill"}
