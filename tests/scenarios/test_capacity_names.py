"""Names in tables of KV capacities, in ours."""

from __future__ import annotations

import pytest

from tonnage.scenarios.capacity_names import gpu_of, kv_format_of, model_of, weights_of
from tonnage.scenarios.catalogue import load_model


@pytest.mark.parametrize(
    ("repository", "model", "wanted"),
    [
        ("Qwen/Qwen3-14B", "", "qwen3-14b"),
        ("Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8", "", "qwen3-coder-480b"),
        ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "", "llama-3.1-70b"),
        ("neuralmagic/Meta-Llama-3.1-70B-Instruct-quantized.w8a8", "", "llama-3.1-70b"),
        ("meta-llama/Llama-2-70b-hf", "", "llama-2-70b"),
        ("moonshotai/Kimi-K2-Thinking", "", "kimi-k2.5"),
        ("deepseek-ai/DeepSeek-V3.2-Exp", "", "deepseek-v3.2"),
        ("deepseek-ai/DeepSeek-R1-0528", "", "deepseek-r1"),
        ("google/gemma-4-31B-it", "", "gemma-4-31b"),
        ("", "Qwen3.6-35B-A3B NVFP4", "qwen3.5-35b-a3b"),
        ("", "Qwen3.5-122B-A10B-NVFP4 resharded", "qwen3.5-122b-a10b"),
        ("", "gpt-oss-120b", "gpt-oss-120b"),
        ("Qwen/Qwen3-Embedding-8B", "", None),
        ("some/Qwen3-14B-Vision", "", None),
        ("", "", None),
    ],
)
def test_models(repository: str, model: str, wanted: str | None) -> None:
    assert model_of(repository, model) == wanted


@pytest.mark.parametrize(
    ("model", "quantisation", "repository", "wanted"),
    [
        ("qwen3-14b", "bf16", "", "native"),
        ("qwen3-14b", "", "", "native"),
        ("qwen3-coder-480b", "fp8", "", "fp8_block"),
        ("deepseek-v3.2", "fp8", "", "native"),
        ("llama-3.1-70b", "fp8", "RedHatAI/Llama-FP8-dynamic", "fp8_channel"),
        ("llama-3.1-70b", "w8a8 int8", "", "int8"),
        ("kimi-k2.5", "int4 (native)", "", "native"),
        ("gpt-oss-120b", "mxfp4", "", "native"),
        ("glm-5.2", "nvfp4", "", "nvfp4"),
        ("llama-3.1-8b", "fp32 (--dtype float32)", "", "fp32"),
        ("deepseek-v3.2", "bf16", "", "bf16"),
    ],
)
def test_weights(model: str, quantisation: str, repository: str, wanted: str) -> None:
    assert weights_of(quantisation, repository, load_model(model)) == wanted


@pytest.mark.parametrize(
    ("name", "memory", "wanted"),
    [
        ("H200", "", "h200-sxm"),
        ("H20", "141 GB class", "h20-141g"),
        ("H20", "95", "h20"),
        ("RTX 4090", "24 GB", "rtx-4090"),
        ("A100", "80 GB", "a100-80g"),
        ("MI300X", "192 GB", None),
        ("H200 emulating 80 GB", "80", None),
        ("", "", None),
    ],
)
def test_gpus(name: str, memory: str, wanted: str | None) -> None:
    assert gpu_of(name, memory) == wanted


def test_kv_formats() -> None:
    texts = ["fp8_e4m3", "fp8 (656 B/tok/layer)", "auto (bf16)", "", "fp32"]
    assert list(map(kv_format_of, texts)) == ["fp8_e4m3", "fp8_e4m3", "bf16", "bf16", "fp32"]
