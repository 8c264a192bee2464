"""What TensorRT-LLM leaves for KV: a fraction of what is free once the weights are there."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.scenarios.catalogue import load_gpu, load_model
from tonnage.sim.domain import EngineSpec, ParallelLayout, PoolSpec
from tonnage.sim.model.budget import cuda_visible_bytes, gpu_budget
from tonnage.sim.model.kv import stage_layers
from tonnage.sim.model.memory import PoolMemory, estimate_pool_memory
from tonnage.sim.model.weights import stage_weights

TRTLLM = EngineSpec("trtllm", "1.2.0")
POOL = PoolSpec("serve", 1, ParallelLayout(tp=8), "native", "fp8_e4m3", 32, 8192, 512)


def memory(
    model: str, gpu: str, pool: PoolSpec = POOL, fraction: float | None = None
) -> PoolMemory:
    engine = replace(TRTLLM, mem_fraction=fraction)
    return estimate_pool_memory(load_model(model), load_gpu(gpu), engine, pool)


@pytest.mark.parametrize("fraction", [0.5, 0.8, 0.9])
def test_kv_is_that_fraction_of_what_is_free(fraction: float) -> None:
    """`_cal_max_memory`: (total - peak) x fraction, the peak with weights and activations."""
    found = memory("deepseek-r1", "b200-sxm", fraction=fraction)
    budget = gpu_budget(load_model("deepseek-r1"), load_gpu("b200-sxm"), TRTLLM, POOL)
    free = budget.static_bytes - found.weights_bytes_per_gpu
    assert found.kv_bytes_per_gpu == pytest.approx(fraction * free)
    assert found.kv_bytes_per_gpu < cuda_visible_bytes(load_gpu("b200-sxm"))


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([1, 2, 4, 8]), st.floats(0.05, 1.0), st.sampled_from(["bf16", "fp8_e4m3"]))
def test_the_items_add_up_to_the_gpu(tp: int, fraction: float, kv: str) -> None:
    pool = replace(POOL, layout=ParallelLayout(tp=tp), kv_format=kv)
    found = memory("llama-3.1-8b", "h200-sxm", pool, fraction)
    items = found.weights_bytes_per_gpu + found.activation_bytes + found.graph_bytes
    items += found.other_bytes + found.kv_bytes_per_gpu
    assert items == pytest.approx(found.gpu_memory_bytes)


def test_deepseek_fp8_on_four_b200_fits_only_with_this_rule() -> None:
    """158 GiB of weights on each GPU of 179 GiB: 0.9 of what is left is a pool all the same."""
    four = replace(POOL, layout=ParallelLayout(tp=4))
    found = memory("deepseek-r1", "b200-sxm", four)
    assert found.fits
    assert found.kv_tokens > 100_000


def test_deficit_is_one_page_short() -> None:
    two = replace(POOL, layout=ParallelLayout(tp=2))
    found = memory("deepseek-r1", "b200-sxm", two)
    assert not found.fits
    assert found.deficit_bytes_per_gpu > 0


def test_each_attention_dp_rank_holds_its_own_dense_and_shared_mlp() -> None:
    """`_compute_mlp_tp_size`: under attention-DP the MLP is not split, unlike SGLang's."""
    model, layout = load_model("deepseek-r1"), ParallelLayout(tp=8, ep=8, attention_dp=8)
    sglang = stage_weights(model, layout, "sglang")[0].total_bytes
    trtllm = stage_weights(model, layout, "trtllm")[0].total_bytes
    assert trtllm - sglang > 1e9
    assert trtllm == stage_weights(model, layout, "vllm")[0].total_bytes


def test_the_first_stages_take_the_remainder() -> None:
    """`Mapping.pp_layers`: 61 layers over 4 stages are 16, 15, 15, 15."""
    stages = stage_layers(61, ParallelLayout(pp=4), "trtllm")
    assert [len(stage) for stage in stages] == [16, 15, 15, 15]
