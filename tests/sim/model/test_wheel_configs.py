"""Every published config.json in the aiconfigurator-core wheel: read rightly, or refused by name.

A model that is read must have, within 2 %, the parameters that its name says, or, where the name
says none or rounds by more than that, those that are published.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest

import tonnage.scenarios
from tonnage.sim.domain import BadInputError, LinearAttention, ModelSpec, Role
from tonnage.sim.model.counts import mtp_parameters
from tonnage.sim.model.hf_config import read_model
from tonnage.sim.model.requantise import with_weights

TOLERANCE = 0.02
REFUSED = {
    "DeciLMForCausalLM",
    "DeepseekV4ForCausalLM",
    "KimiK3ForConditionalGeneration",
    "MiniMaxM3ForCausalLM",
    "MiniMaxM3SparseForConditionalGeneration",
    "Step3p7FlashForCausalLM",
}


class Published(NamedTuple):
    """A published total; some count the MTP layers too, as a file listing does."""

    parameters: float
    source: str
    with_mtp: bool = False


CARD = "model card"
FILES = "safetensors total on the model's Hugging Face page"
# By the longest prefix of the name after the organisation.
PUBLISHED = {
    "DeepSeek-R1": Published(671e9, CARD),
    "DeepSeek-V3": Published(671e9, CARD),
    "DeepSeek-V3.1": Published(671e9, CARD),
    "DeepSeek-V3.2": Published(685e9, FILES, with_mtp=True),
    "GLM-5": Published(744e9, CARD),
    "Kimi-K2": Published(1.04e12, "Kimi K2 technical report, arXiv 2507.20534"),
    "Llama-4-Maverick-17B-128E": Published(400e9, CARD),  # 17B is the active size
    "Llama-4-Scout-17B-16E": Published(109e9, CARD),
    "MiMo-7B": Published(7.83e9, FILES, with_mtp=True),
    "MiMo-V2-Flash": Published(309e9, CARD),
    "MiniMax-M2": Published(230e9, CARD),
    "Mixtral-8x22B": Published(141e9, "announcement: 39B active of 141B"),
    "Mixtral-8x7B": Published(46.7e9, "arXiv 2401.04088 and announcement: 46.7B"),
    "NVIDIA-Nemotron-3-Nano-30B-A3B": Published(31.6e9, "technical report"),
    "NVIDIA-Nemotron-3.5-Lightning-30B-A3B": Published(31.6e9, "the geometry of Nano"),
    "Qwen3-8B": Published(8.2e9, CARD),
    "Qwen3-32B": Published(32.8e9, CARD),
    "Qwen3-VL-2B": Published(2.13e9, FILES),
    "Qwen3-VL-4B": Published(4.44e9, FILES),
    "Qwen3-VL-8B": Published(8.77e9, FILES),
    "Qwen3-VL-30B-A3B": Published(31.1e9, FILES),
    "Qwen3-VL-32B": Published(33.4e9, FILES),
    "gpt-oss-120b": Published(116.8e9, CARD),
    "gpt-oss-20b": Published(20.9e9, CARD),
}


def config_folder() -> Path | None:
    """Return the wheel's folder of configs without importing the package."""
    spec = importlib.util.find_spec("aiconfigurator_core")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / "model_configs"


FOLDER = config_folder()
CONFIGS = [
    path
    for path in (sorted(FOLDER.glob("*_config.json")) if FOLDER else [])
    if not path.name.endswith("_hf_quant_config.json")
]
MODELS = Path(tonnage.scenarios.__file__).parent / "models"
needs_wheel = pytest.mark.skipif(not CONFIGS, reason="aiconfigurator-core is not installed")
pytestmark = needs_wheel


def name_of(path: Path) -> str:
    return path.name.removesuffix("_config.json").split("--")[1]


def published_of(name: str) -> Published:
    """Return the published total, or the size that the name says."""
    bare = name.removeprefix("Meta-")
    prefixes = [prefix for prefix in PUBLISHED if bare.startswith(prefix)]
    if prefixes:
        return PUBLISHED[max(prefixes, key=len)]
    said = re.search(r"(?:^|-)(\d+(?:\.\d+)?)B(?:-|$)", bare)
    assert said, f"{name}: says no size; add its published total"
    return Published(float(said[1]) * 1e9, "name")


def wheel_model(name: str) -> ModelSpec:
    assert FOLDER is not None
    return read_model(FOLDER / f"{name}_config.json")


@pytest.mark.parametrize("path", CONFIGS, ids=name_of)
def test_a_config_is_read_rightly_or_refused_by_name(path: Path) -> None:
    architecture = json.loads(path.read_text(encoding="utf-8"))["architectures"][0]
    if architecture in REFUSED:
        with pytest.raises(BadInputError, match=f"architecture '{architecture}' is not one"):
            read_model(path)
        return
    model, published = read_model(path), published_of(name_of(path))
    parameters = model.parameters + (mtp_parameters(model) if published.with_mtp else 0)
    error = parameters / published.parameters - 1
    assert abs(error) < TOLERANCE, f"{parameters / 1e9:.2f}e9 is {error:+.1%} from {published}"


def test_most_configs_are_read() -> None:
    refused = [
        path
        for path in CONFIGS
        if json.loads(path.read_text(encoding="utf-8"))["architectures"][0] in REFUSED
    ]
    assert len(refused) <= 0.2 * len(CONFIGS)


# What each quantised release stores, by role: (model, role, formats).
STORED = [
    ("Qwen--Qwen3-32B-FP8-Static-PerTensor", Role.DENSE_MLP, {"fp8"}),
    ("nvidia--Llama-3.1-70B-Instruct-FP8", Role.ATTENTION, {"fp8"}),
    ("nvidia--Llama-3.1-70B-Instruct-FP8", Role.HEAD, {"bf16"}),
    ("nvidia--DeepSeek-V3.1-NVFP4", Role.SHARED_EXPERT, {"nvfp4"}),
    ("nvidia--DeepSeek-V3.1-NVFP4", Role.ATTENTION, {"nvfp4", "bf16"}),  # o_proj alone is nvfp4
    ("nvidia--DeepSeek-V3.2-NVFP4", Role.INDEXER, {"bf16"}),
    ("nvidia--GLM-5-NVFP4", Role.ATTENTION, {"bf16"}),
    ("nvidia--GLM-5-NVFP4", Role.DENSE_MLP, {"nvfp4"}),
    ("nvidia--GLM-5.2-NVFP4", Role.ROUTED_EXPERT, {"nvfp4"}),
    ("nvidia--Gemma-4-26B-A4B-NVFP4", Role.ROUTED_EXPERT, {"nvfp4"}),
    ("nvidia--Gemma-4-26B-A4B-NVFP4", Role.SHARED_EXPERT, {"bf16"}),
    ("nvidia--Gemma-4-31B-IT-NVFP4", Role.DENSE_MLP, {"nvfp4"}),
    ("nvidia--Gemma-4-31B-IT-NVFP4", Role.ATTENTION, {"bf16"}),
    ("nvidia--Kimi-K2.5-NVFP4", Role.SHARED_EXPERT, {"nvfp4"}),
    ("nvidia--Kimi-K2.6-NVFP4", Role.SHARED_EXPERT, {"bf16"}),
    ("nvidia--MiniMax-M2.5-NVFP4", Role.ROUTED_EXPERT, {"nvfp4"}),
    ("nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4", Role.ATTENTION, {"nvfp4", "bf16"}),
    ("nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-FP8", Role.ROUTED_EXPERT, {"fp8"}),
    ("nvidia--NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4", Role.ROUTED_EXPERT, {"nvfp4_w4a16"}),
    ("nvidia--NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4", Role.ATTENTION, {"fp8", "bf16"}),
    ("nvidia--NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4", Role.HEAD, {"nvfp4_w4a16"}),
    ("nvidia--Qwen3-235B-A22B-NVFP4", Role.ATTENTION, {"nvfp4"}),
    ("nvidia--Qwen3.5-397B-A17B-NVFP4", Role.ROUTED_EXPERT, {"nvfp4"}),
    ("nvidia--Qwen3.5-397B-A17B-NVFP4", Role.SHARED_EXPERT, {"bf16"}),
    ("nvidia--Qwen3.6-27B-NVFP4", Role.DENSE_MLP, {"nvfp4_w4a16"}),
    ("nvidia--Qwen3.6-35B-A3B-NVFP4", Role.ATTENTION, {"fp8", "bf16"}),
]


@pytest.mark.parametrize(("name", "role", "formats"), STORED)
def test_quantised_releases_store_what_their_files_say(
    name: str, role: Role, formats: set[str]
) -> None:
    model = wheel_model(name)
    weights = [weight for layer in model.layers for weight in layer.weights]
    found = {weight.format for weight in (*weights, *model.outer_weights) if weight.role is role}
    assert found == formats


def test_gemma_shares_key_and_value_on_global_layers_only() -> None:
    model = wheel_model("google--gemma-4-26B-A4B")
    for layer in model.layers:
        names = {weight.name for weight in layer.weights}
        window = getattr(layer.attention, "window_tokens", 0)
        sizes = (getattr(layer.attention, "kv_heads", 0), getattr(layer.attention, "head_dim", 0))
        assert ("self_attn.v_proj" in names) == (window == 1024)
        assert sizes == ((8, 256) if window else (2, 512))


def test_qwen3_5_has_full_attention_in_every_fourth_layer() -> None:
    model = wheel_model("Qwen--Qwen3.5-397B-A17B")
    linear = [isinstance(layer.attention, LinearAttention) for layer in model.layers]
    assert linear == [True, True, True, False] * 15
    attention = model.layers[0].attention
    assert isinstance(attention, LinearAttention)
    assert attention.recurrent_elements == 64 * 128 * 128
    assert attention.convolution_elements == (2 * 16 * 128 + 64 * 128) * 3


def test_mimo_v2_flash_has_windows_and_wider_keys() -> None:
    model = wheel_model("XiaomiMiMo--MiMo-V2-Flash")
    shapes = {
        (
            getattr(layer.attention, "window_tokens", 0),
            getattr(layer.attention, "kv_heads", 0),
            getattr(layer.attention, "head_dim", 0),
            getattr(layer.attention, "value_dim", 0),
        )
        for layer in model.layers
    }
    assert shapes == {(None, 4, 192, 128), (128, 8, 192, 128)}


def test_llama_4_attends_in_chunks_except_on_every_fourth_layer() -> None:
    model = wheel_model("meta-llama--Llama-4-Scout-17B-16E-Instruct")
    windows = [getattr(layer.attention, "window_tokens", 0) for layer in model.layers]
    assert windows == [8192, 8192, 8192, None] * 12


# The shipped entries are trimmed copies: they must read as the originals do.
ORIGINALS = {
    "deepseek-v3": "deepseek-ai--DeepSeek-V3",
    "deepseek-r1": "deepseek-ai--DeepSeek-R1",
    "deepseek-v3.2": "deepseek-ai--DeepSeek-V3.2",
    "glm-5": "zai-org--GLM-5-FP8",
    "glm-5.1": "zai-org--GLM-5.1-FP8",
    "glm-5.2": "zai-org--GLM-5.2-FP8",
    "gpt-oss-20b": "openai--gpt-oss-20b",
    "gpt-oss-120b": "openai--gpt-oss-120b",
    "kimi-k2": "moonshotai--Kimi-K2-Instruct",
    "kimi-k2.5": "moonshotai--Kimi-K2.5",
    "kimi-k2.6": "moonshotai--Kimi-K2.5",
    "llama-3.1-8b": "meta-llama--Meta-Llama-3.1-8B",
    "llama-3.1-70b": "meta-llama--Meta-Llama-3.1-70B",
    "llama-3.1-405b": "meta-llama--Meta-Llama-3.1-405B",
    "minimax-m2.5": "MiniMaxAI--MiniMax-M2.5",
    "minimax-m2.7": "MiniMaxAI--MiniMax-M2.7",
    "qwen3-8b": "Qwen--Qwen3-8B",
    "qwen3-32b": "Qwen--Qwen3-32B",
    "qwen3-30b-a3b": "Qwen--Qwen3-30B-A3B",
    "qwen3-235b-a22b": "Qwen--Qwen3-235B-A22B",
    "qwen3-coder-480b": "Qwen--Qwen3-Coder-480B-A35B-Instruct",
}


@pytest.mark.parametrize("name", ORIGINALS)
def test_a_shipped_entry_reads_as_the_original(name: str) -> None:
    shipped, original = read_model(MODELS / f"{name}.json"), wheel_model(ORIGINALS[name])
    assert shipped.layers == original.layers
    assert shipped.mtp_layers == original.mtp_layers
    assert shipped.outer_weights == original.outer_weights
    assert shipped.max_context_tokens == original.max_context_tokens


@pytest.mark.parametrize(
    ("name", "release"),
    [
        ("kimi-k2.6", "nvidia--Kimi-K2.6-NVFP4"),
        ("glm-5.1", "nvidia--GLM-5.1-NVFP4"),
        ("minimax-m2.5", "nvidia--MiniMax-M2.5-NVFP4"),
    ],
)
def test_the_nvfp4_recipe_is_that_of_the_published_release(name: str, release: str) -> None:
    ours, theirs = with_weights(read_model(MODELS / f"{name}.json"), "nvfp4"), wheel_model(release)
    assert ours.layers == theirs.layers
    assert ours.mtp_layers == theirs.mtp_layers
    assert ours.outer_weights == theirs.outer_weights
