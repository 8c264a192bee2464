"""Engine defaults per version, against the engines' own sources."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.scenarios.catalogue import load_gpu, load_model
from tonnage.sim.domain import BadInputError, EngineSpec
from tonnage.sim.model.engine_rules import (
    SglangRules,
    VllmRules,
    captured_batch_sizes,
    captured_prefill_sizes,
    default_chunk_tokens,
    default_max_prefill_tokens,
    default_max_running_requests,
    default_page_tokens,
    rules_for,
    version_key,
)

SGLANG = EngineSpec("sglang", "0.5.23")
VLLM = EngineSpec("vllm", "0.33.0")
TRTLLM = EngineSpec("trtllm", "1.3.0")


def vllm_rules(version: str) -> VllmRules:
    rules = rules_for(EngineSpec("vllm", version)).rules
    assert isinstance(rules, VllmRules)
    return rules


def test_known_versions_need_no_remark() -> None:
    assert isinstance(rules_for(SGLANG).rules, SglangRules)
    assert rules_for(SGLANG).remark is None
    assert rules_for(VLLM).remark is None
    assert rules_for(EngineSpec("vllm", "0.33")).remark is None


@pytest.mark.parametrize(
    ("name", "version", "remark"),
    [
        ("vllm", "0.28.0", "vllm 0.28.0: memory rules of 0.21.0, the nearest older version known"),
        ("vllm", "0.40", "vllm 0.40: memory rules of 0.33.0, the nearest older version known"),
        ("vllm", "0.7.2", "vllm 0.7.2: memory rules of 0.11.0, the oldest version known"),
        ("sglang", "0.5.14", "sglang 0.5.14: memory rules of 0.5.23, the oldest version known"),
        ("sglang", "0.6", "sglang 0.6: memory rules of 0.5.23, the nearest older version known"),
    ],
)
def test_another_version_takes_the_nearest_older_rules(
    name: str, version: str, remark: str
) -> None:
    assert rules_for(EngineSpec(name, version)).remark == remark


def test_vllm_changed_at_0_17_and_at_0_21() -> None:
    assert vllm_rules("0.16.2").sampler_copies > 2 * vllm_rules("0.17.0").sampler_copies
    before, after = vllm_rules("0.20.1"), vllm_rules("0.21.0")
    assert (before.memory_fraction, before.counts_graphs) == (0.90, False)
    assert (after.memory_fraction, after.counts_graphs) == (0.92, True)


def test_an_unknown_engine_or_version_is_refused() -> None:
    with pytest.raises(BadInputError, match=r"engine\.name: 'tgi' is not known; use one of sglang"):
        rules_for(EngineSpec("tgi", "1"))
    with pytest.raises(BadInputError, match=r"engine\.version: 'latest' is not a version"):
        rules_for(EngineSpec("vllm", "latest"))


def test_version_key_reads_the_leading_numbers() -> None:
    assert version_key("0.10.1.dev101") == (0, 10, 1)
    assert version_key("v0.21") == (0, 21, 0)


@pytest.mark.parametrize(
    ("gpu", "sglang", "vllm"),
    [
        ("rtx-4090", 4096, 2048),
        ("l40s", 4096, 2048),
        ("a100-80g", 8192, 2048),
        ("h100-sxm", 8192, 8192),
        ("h200-sxm", 8192, 8192),
        ("b200-sxm", 16384, 16384),
    ],
)
def test_chunk_tokens(gpu: str, sglang: int, vllm: int) -> None:
    assert default_chunk_tokens(SGLANG, load_gpu(gpu)) == sglang
    assert default_chunk_tokens(VLLM, load_gpu(gpu)) == vllm
    assert default_max_prefill_tokens(SGLANG, load_gpu(gpu)) == 16384
    assert default_max_prefill_tokens(VLLM, load_gpu(gpu)) == vllm


@pytest.mark.parametrize(
    ("model", "gpu", "sglang", "vllm"),
    [
        ("llama-3.1-8b", "h100-sxm", 1, 16),
        ("llama-3.1-8b", "b200-sxm", 64, 16),
        ("kimi-k2.6", "h200-sxm", 1, 64),
        ("kimi-k2.6", "b200-sxm", 64, 64),
        ("kimi-k2.6", "rtx-5090", 1, 64),
        ("glm-5.2", "h200-sxm", 64, 64),
    ],
)
def test_page_tokens(model: str, gpu: str, sglang: int, vllm: int) -> None:
    spec = load_model(model)
    assert default_page_tokens(SGLANG, spec, load_gpu(gpu), "bf16") == sglang
    assert default_page_tokens(VLLM, spec, load_gpu(gpu), "bf16") == vllm


def test_running_requests() -> None:
    model, gpu = load_model("kimi-k2.6"), load_gpu("h200-sxm")  # context 262,144
    assert default_max_running_requests(SGLANG, gpu, model) == 2048
    assert default_max_running_requests(SGLANG, gpu, model, 686_000) == 2048
    assert default_max_running_requests(SGLANG, gpu, model, 1_370_000) == 2675
    assert default_max_running_requests(SGLANG, gpu, model, 10**8) == 4096
    assert default_max_running_requests(SGLANG, gpu, model, 1000) == 500
    assert default_max_running_requests(VLLM, gpu, model) == 1024
    assert default_max_running_requests(VLLM, load_gpu("a100-80g"), model) == 256


def test_captured_batch_sizes() -> None:
    h200 = load_gpu("h200-sxm")
    plain = captured_batch_sizes(SGLANG, h200, 8, 2048)
    assert plain[:7] == (1, 2, 4, 8, 12, 16, 24)
    assert plain[-1] == 512
    assert captured_batch_sizes(SGLANG, h200, 2, 2048)[-1] == 256
    speculating = captured_batch_sizes(SGLANG, h200, 8, 2048, query_tokens=4)
    assert speculating[:10] == (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)
    assert captured_batch_sizes(SGLANG, h200, 8, 100)[-1] == 100
    vllm = captured_batch_sizes(VLLM, load_gpu("rtx-4090"), 1, 256)
    assert vllm[:6] == (1, 2, 4, 8, 16, 24)
    assert (vllm[-1], len(vllm)) == (512, 51)


def test_vllm_captures_multiples_of_the_tokens_of_a_request() -> None:
    """1, 2, 4, 8, 16 ... 512 tokens, rounded up to requests of three or four; 513 is dropped."""
    gpu = load_gpu("h100-sxm")
    four = captured_batch_sizes(VLLM, gpu, 1, 1024, query_tokens=4)
    assert four[:6] == (1, 2, 4, 6, 8, 10)
    assert four[-1] == 128
    three = captured_batch_sizes(VLLM, gpu, 1, 1024, query_tokens=3)
    assert three[:6] == (1, 2, 3, 6, 8, 11)
    assert three[-1] == 166


def test_captured_prefill_sizes_end_at_the_chunk() -> None:
    assert captured_prefill_sizes(8192)[-1] == 8192
    assert len(captured_prefill_sizes(8192)) == 58
    assert captured_prefill_sizes(100) == (4, 8, 12, 16, 20, 24, 28, 32, 48, 64, 80, 96)


@given(
    running=st.integers(1, 5000),
    tp=st.sampled_from([1, 2, 4, 8]),
    engine=st.sampled_from([SGLANG, VLLM]),
    query=st.integers(1, 8),
)
def test_captured_sizes_rise(running: int, tp: int, engine: EngineSpec, query: int) -> None:
    sizes = captured_batch_sizes(engine, load_gpu("h200-sxm"), tp, running, query)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[0] >= 1
    assert sizes[-1] <= 512


# --- TensorRT-LLM --------------------------------------------------------------------------------


def test_trtllm_defaults() -> None:
    """`llm_args.py`: max_batch_size 2048, max_num_tokens 8192, pages of 32 or FlashMLA's 64."""
    llama, kimi = load_model("llama-3.1-8b"), load_model("kimi-k2.6")
    h200, b200 = load_gpu("h200-sxm"), load_gpu("b200-sxm")
    assert default_chunk_tokens(TRTLLM, h200) == default_max_prefill_tokens(TRTLLM, b200) == 8192
    assert default_max_running_requests(TRTLLM, h200, llama, 10**6) == 2048
    assert default_page_tokens(TRTLLM, llama, h200, "bf16") == 32
    assert default_page_tokens(TRTLLM, kimi, h200, "fp8_e4m3") == 64
    assert default_page_tokens(TRTLLM, kimi, b200, "fp8_e4m3") == 32


@pytest.mark.parametrize(
    ("version", "remark"),
    [
        ("1.3", None),
        ("1.2.0rc6", None),
        ("1.1.0", "trtllm 1.1.0: memory rules of 1.0.0, the nearest older version known"),
        ("0.20.0", "trtllm 0.20.0: memory rules of 1.0.0, the oldest version known"),
    ],
)
def test_trtllm_versions(version: str, remark: str | None) -> None:
    assert rules_for(EngineSpec("trtllm", version)).remark == remark


def test_trtllm_captures_eights_then_steps_of_64() -> None:
    gpu = load_gpu("b200-sxm")
    assert captured_batch_sizes(TRTLLM, gpu, 8, 16) == (1, 2, 4, 8, 16)
    assert captured_batch_sizes(TRTLLM, gpu, 8, 300)[-5:] == (120, 128, 192, 256, 300)


@given(st.integers(1, 4096))
def test_trtllm_captures_what_it_may_run(running: int) -> None:
    sizes = captured_batch_sizes(TRTLLM, load_gpu("b200-sxm"), 8, running)
    assert sizes[-1] == running
    assert list(sizes) == sorted(set(sizes))
