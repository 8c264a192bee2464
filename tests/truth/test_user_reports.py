"""What people got wrong when they sized a deployment, and the right value where one is known.

Numbers are those of `shared/facts/user_reports.md`, which gives the source of each. Cases that
other files test, and cases that state a rule and no value, are listed at the end.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.sim.model.test_memory import GIB, memory_of
from tests.sim.model.test_wheel_configs import FOLDER, REFUSED, wheel_model
from tonnage import api
from tonnage.scenarios.catalogue import load_gpu, load_model
from tonnage.scenarios.load import parse_scenario
from tonnage.sim.domain import (
    BadInputError,
    EngineSpec,
    GqaAttention,
    LayerSpec,
    ModelSpec,
    ParallelLayout,
    PoolSpec,
)
from tonnage.sim.model.budget import gpu_budget, vllm_activation_bytes
from tonnage.sim.model.engine_rules import VllmRules, rules_for
from tonnage.sim.model.hf_config import read_model
from tonnage.sim.model.kv import kv_bytes_per_token, kv_shape, request_kv_bytes, stage_kv_shapes
from tonnage.sim.model.memory import estimate_pool_memory, max_concurrency
from tonnage.sim.model.requantise import with_weights

ROOT = Path(__file__).resolve().parents[2]
FACTS = ROOT.parent / "shared" / "facts" / "user_reports.md"
WHOLE, TP8 = ParallelLayout(), ParallelLayout(tp=8)
needs_wheel = pytest.mark.skipif(FOLDER is None, reason="aiconfigurator-core is not installed")


def test_01_a_latent_is_not_counted_as_heads() -> None:
    """The heuristic took 2 x heads x (hidden / heads), 25 times the latent: 64 where 242 fit.

    Neither the lengths nor the memory behind 242 are in the report: the ratio is what can be had.
    """
    model = load_model("deepseek-v3.2")
    latent = stage_kv_shapes(load_model("deepseek-v3"), WHOLE, "bf16")[0].growing_bytes_per_token
    assert latent == 61 * 576 * 2 == 70_272
    assert kv_bytes_per_token(model, WHOLE, "fp8_e4m3") == (656 + 132) * 61 == 48_068
    as_heads = 2 * 61 * 128 * (model.hidden_size // 128) * 2
    assert as_heads / latent == pytest.approx(25, rel=0.01)


def test_04_sliding_layers_of_gpt_oss_are_half_at_long_context() -> None:
    model = load_model("gpt-oss-120b")
    (shape,) = stage_kv_shapes(model, WHOLE, "bf16")
    assert shape.billed_bytes_per_token == 73_728
    long_bytes = float(request_kv_bytes(model, WHOLE, "bf16", 131_072))
    assert long_bytes / 131_072 == pytest.approx(73_728 / 2, rel=0.002)


def test_06_the_indexer_is_in_the_pool() -> None:
    per_token = kv_bytes_per_token(load_model("deepseek-v3.2"), WHOLE, "fp8_e4m3")
    assert 43.67 * GIB / per_token == pytest.approx(975_424, rel=2e-4)
    assert per_token == pytest.approx(48_072, abs=4)


@needs_wheel
@pytest.mark.parametrize("name", ["deepseek-ai--DeepSeek-V4-Flash", "deepseek-ai--DeepSeek-V4-Pro"])
def test_07_and_23_a_compressed_latent_is_refused_rather_than_sized_as_another(name: str) -> None:
    """V4's layer groups are not modelled: no figure is better than 88,064 B per token."""
    assert "DeepseekV4ForCausalLM" in REFUSED
    assert FOLDER is not None
    with pytest.raises(BadInputError, match="DeepseekV4ForCausalLM"):
        read_model(FOLDER / f"{name}_config.json")


def test_09_gib_of_fp8_kv_to_tokens_at_the_length_asked_for() -> None:
    model = load_model("qwen3-30b-a3b")  # 48 layers of 4 kv heads, as the log's bytes say
    per_token = kv_bytes_per_token(model, WHOLE, "fp8_e4m3")
    assert per_token == 49_152
    assert 10.55 * GIB / per_token == pytest.approx(230_528, rel=5e-4)
    assert 10.55 * GIB / per_token / 100_000 == pytest.approx(2.31, abs=0.01)
    assert 221_000 * per_token / GIB == pytest.approx(10.12, abs=0.01)
    assert 5.59 * GIB / per_token == pytest.approx(122_080, rel=5e-4)


def test_10_tensor_ranks_do_not_shrink_a_latent_but_attention_ranks_hold_their_own() -> None:
    """The report: 20.43 full requests with TP8; 156.9, the sum of eight engines, with DP8."""
    model = load_model("kimi-k2.6")
    assert kv_bytes_per_token(model, TP8, "bf16") == kv_bytes_per_token(model, WHOLE, "bf16")
    together = memory_of("kimi-k2.6", "b200-sxm")
    apart = memory_of("kimi-k2.6", "b200-sxm", layout=ParallelLayout(tp=8, ep=8, attention_dp=8))
    assert apart.kv_tokens == 8 * apart.kv_tokens_per_rank
    # Each rank loads all of attention, so it holds less than the eight together did: of their
    # model, which is not described here, 19.6 against 20.43.
    assert 156.9 / 8 < 20.43
    assert 0.5 < apart.kv_tokens_per_rank / together.kv_tokens < 1.0


def test_12_kv_heads_are_shared_among_tensor_ranks() -> None:
    pool_bytes = 208_500 * kv_bytes_per_token(load_model("qwen3-32b"), WHOLE, "bf16")
    per_token = kv_bytes_per_token(load_model("qwen3-32b"), ParallelLayout(tp=4), "bf16")
    assert pool_bytes / per_token == pytest.approx(834_000, rel=1e-3)


def test_18_more_than_the_missing_gib_is_in_the_model() -> None:
    """gpt-oss-120b on 8 x 32 GB was 1.37 GiB over: activations, graphs and what is not torch's."""
    model = load_model("gpt-oss-120b")
    gpu = replace(load_gpu("rtx-pro-6000"), memory_bytes=32 * GIB)
    pool = PoolSpec("serve", 1, TP8, "native", "bf16", 16, 2048, 256)
    budget = gpu_budget(model, gpu, EngineSpec("vllm", "0.33"), pool)
    left_out_bytes = budget.mem_fraction * budget.base_bytes - budget.static_bytes
    assert left_out_bytes > 1.37 * GIB


def test_19_graphs_grow_with_attention_ranks() -> None:
    """Kimi-K2, 32 Hopper GPUs, DP32, 0.70: about 20 GB to graphs, 19 GiB of KV left.

    What SGLang reserves for them, which is what the model has, is a quarter less than they took.
    """
    engine = EngineSpec("sglang", "0.5.23", 0.70, "given")
    model, gpu = with_weights(load_model("kimi-k2"), "fp8"), load_gpu("h100-sxm")
    wide = ParallelLayout(tp=32, ep=32, attention_dp=32)
    pool = PoolSpec("serve", 1, wide, "fp8", "bf16", 64, 8192, 128)
    found = estimate_pool_memory(model, gpu, engine, pool)
    narrow = estimate_pool_memory(model, gpu, engine, replace(pool, layout=ParallelLayout(tp=32)))
    assert found.graph_bytes - narrow.graph_bytes == 128 * 32 * 3 * 2**20
    assert found.graph_bytes == pytest.approx(20e9, rel=0.3)
    assert found.kv_bytes_per_gpu == pytest.approx(19 * GIB, rel=0.25)


@pytest.mark.parametrize(("version", "gib"), [("0.16.0", 5.64), ("0.17.0", 2.23)])
def test_20_the_activation_constant_has_a_version(version: str, gib: float) -> None:
    rules = rules_for(EngineSpec("vllm", version)).rules
    assert isinstance(rules, VllmRules)
    pool = PoolSpec("serve", 1, WHOLE, "native", "bf16", 16, 8192, 1024)
    peak_bytes = vllm_activation_bytes(rules, load_model("qwen3-14b"), pool)
    assert peak_bytes / GIB == pytest.approx(gib, rel=0.01)


@needs_wheel
def test_21_windows_of_gemma_take_a_third_of_the_pool() -> None:
    """972,134 tokens were estimated in 74.95 GiB: as if sliding layers took nothing.

    The log said 626,949 in 64.68 GiB; its length is not in the report, 32,768 is assumed.
    """
    (shape,) = stage_kv_shapes(wheel_model("nvidia--Gemma-4-31B-IT-NVFP4"), WHOLE, "bf16")
    assert 74.95 * GIB / shape.growing_bytes_per_token == pytest.approx(972_134, rel=0.02)
    requests = 64.68 * GIB / float(shape.request_bytes(32_768, 16))
    assert requests * 32_768 == pytest.approx(626_949, rel=0.03)


def test_23_the_longest_request_is_told_apart_from_concurrency() -> None:
    scenario = parse_scenario({"model": "kimi-k2.6", "gpu": "h20", "pools": {"serve": {}}})
    figures = api.memory(scenario).to_dict()["memory"]["serve"]
    assert figures["longest_request_tokens"] < load_model("kimi-k2.6").max_context_tokens
    assert figures["longest_request_tokens"] == figures["kv_tokens"]
    assert figures["max_concurrency"] == figures["kv_tokens"] // figures["tokens_per_request"]


def test_25_concurrency_is_the_smaller_of_two_limits() -> None:
    """Tokens over the length of a full request is a floor; the engine's own limit is another."""

    def figures(**pool: int) -> dict[str, Any]:
        data = {
            "model": "kimi-k2.6",
            "traffic": {"input_tokens": 131_072, "output_tokens": 1},
            "pools": {"serve": {"tp": 8, **pool}},
        }
        found: dict[str, Any] = api.memory(parse_scenario(data)).to_dict()["memory"]["serve"]
        return found

    free = figures()
    assert free["max_concurrency"] == free["kv_tokens"] // 131_072 > 4
    assert figures(max_running_requests=4)["max_concurrency"] == 4
    # Of requests of 10,000 tokens the same pool holds more: the printed figure is no hard cap.
    tokens = free["kv_tokens"]
    assert tokens // 10_000 > 10 * free["max_concurrency"]


def test_27_tokens_of_a_hybrid_cache_need_a_length() -> None:
    """One pool prints more tokens the longer a request may be: windows are paid once each."""
    (shape,) = stage_kv_shapes(load_model("gpt-oss-120b"), WHOLE, "bf16")
    printed = {
        length: 24.5 * GIB / float(shape.request_bytes(length)) * length
        for length in (500, 5_000, 50_000, 131_072)
    }
    assert list(printed.values()) == sorted(printed.values())
    assert printed[131_072] > 1.2 * printed[500]
    most = 24.5 * GIB / shape.growing_bytes_per_token
    assert printed[131_072] < most


def test_28_the_profiled_batch_moves_the_pool() -> None:
    """Lengths of 20,000 start, 29,000 do not: the longer batch that is profiled leaves less.

    31,232 tokens and 23,648, of a vLLM (0.6) older than the rules; the difference is what 9,000
    more tokens of activations take.
    """
    model = load_model("llama-3.1-8b")
    per_token = kv_bytes_per_token(model, WHOLE, "bf16")
    assert 23_648 * per_token / GIB == pytest.approx(2.89, abs=0.005)
    rules = rules_for(EngineSpec("vllm", "0.11")).rules
    assert isinstance(rules, VllmRules)
    pool = PoolSpec("serve", 1, WHOLE, "native", "bf16", 16, 2048, 8)
    shorter, longer = (
        vllm_activation_bytes(rules, model, replace(pool, chunk_tokens=tokens))
        for tokens in (20_000, 29_000)
    )
    assert (longer - shorter) / per_token == pytest.approx(31_232 - 23_648, rel=0.25)


def test_30_no_more_requests_than_kv_at_the_engines_fraction() -> None:
    """A planner chose 96 requests of 8,150 + 1,024 tokens; the engine admits 28.98.

    Kimi-K2.5 NVFP4, B200, vLLM 0.22, fraction 0.92. The layout is not in the report; with four
    tensor ranks the bound is near the engine's.
    """
    found = memory_of(
        "kimi-k2.5",
        "b200-sxm",
        EngineSpec("vllm", "0.22.0"),
        ParallelLayout(tp=4),
        weights="nvfp4",
    )
    assert found.mem_fraction == 0.92
    assert max_concurrency(found, 8150 + 1024) == pytest.approx(28.98, rel=0.1)
    # At a fraction of 1.0 the pool would have held far more: 14 GiB of the GPU are not the pool's.
    assert found.gpu_memory_bytes * (1 - 0.92) > 14 * GIB


@needs_wheel
@pytest.mark.parametrize(
    ("name", "tokens", "gib"),
    [("Qwen--Qwen3.5-27B", 262_144, 16.00), ("Qwen--Qwen3-0.6B", 40_960, 4.38)],
)
def test_39_hybrid_and_explicit_head_dim(name: str, tokens: int, gib: float) -> None:
    found = kv_bytes_per_token(wheel_model(name), WHOLE, "bf16") * tokens
    assert found / GIB == pytest.approx(gib, abs=0.005)


@pytest.mark.parametrize(
    ("name", "tokens", "gib"),
    [("deepseek-v3", 163_840, 10.72), ("kimi-k2.5", 262_144, 17.16)],
)
def test_39_latents(name: str, tokens: int, gib: float) -> None:
    found = kv_bytes_per_token(load_model(name), WHOLE, "bf16") * tokens
    assert found / GIB == pytest.approx(gib, abs=0.005)


def test_39_the_latents_of_glm_5_with_its_mtp_layer_and_without_indexers() -> None:
    """The report's 17.18 is of 79 layers and leaves out the indexer, 132 B on each: ours has it."""
    model = load_model("glm-5")
    (shape,) = stage_kv_shapes(model, WHOLE, "bf16", draft_layers_loaded=True)
    assert shape.shared_bytes_per_token * 202_752 / GIB == pytest.approx(17.18, abs=0.005)
    assert shape.whole_bytes_per_token == 79 * 132


def test_39_sliding_windows_of_gemma_3() -> None:
    """Gemma-3-27B: 62 layers, every sixth full, 16 kv heads of 128, window 1,024."""
    full = LayerSpec(GqaAttention(32, 16, 128, 128), None, ())
    sliding = LayerSpec(GqaAttention(32, 16, 128, 128, window_tokens=1024), None, ())
    layers = tuple(full if index % 6 == 5 else sliding for index in range(62))
    model = ModelSpec("gemma-3-27b", "Gemma3", 5376, 262_208, 131_072, layers, ())
    found = float(request_kv_bytes(model, WHOLE, "bf16", 131_072))
    assert found / GIB == pytest.approx(10.41, abs=0.005)
    as_if_full = kv_shape(model.layers, WHOLE, "bf16").billed_bytes_per_token * 131_072
    assert as_if_full / found == pytest.approx(6, rel=0.02)


# --- the other cases ----------------------------------------------------------------------------

ELSEWHERE = {
    13: "tests/sim/model/test_kv.py::test_a_printed_pool_is_that_of_the_group",
    16: "tests/sim/model/test_kv.py::test_stages_hold_their_own_layers_of_every_request",
    35: "tests/sim/serving/test_decode_pool.py",
    37: "tests/sim/model/test_kv.py::test_full_and_sliding_pools_of_a_hybrid_model",
}
RULES_WITHOUT_A_VALUE = {
    32: "balance prefill and decode rates, then check decode's KV: a planner's rule",
    33: "one prefill per decode worker can be the worst ratio: measured on a model with speech",
}


def test_every_case_is_here_or_elsewhere() -> None:
    here = {
        int(number)
        for name in globals()
        if name.startswith("test_")
        for number in re.findall(r"(?<![0-9a-z])(\d\d)(?=_)", name)
    }
    for place in ELSEWHERE.values():
        file, _, function = place.partition("::")
        assert f"def {function}" in (ROOT / file).read_text(encoding="utf-8")
    if FACTS.is_file():
        cases = {int(number) for number in re.findall(r"(?m)^(\d+)\. ", FACTS.read_text())}
        assert cases == here | set(ELSEWHERE) | set(RULES_WITHOUT_A_VALUE)
