"""What a table of KV capacities calls models, weights, formats and GPUs, in our names."""

from __future__ import annotations

import re

from tonnage.scenarios.catalogue import gpu_names, model_names
from tonnage.sim.domain import ModelSpec

# Releases with the geometry of a model under another name: Llama 3.3 is that of 3.1,
# Kimi-K2-Thinking that of Kimi-K2.5 without its vision tower, GLM-5.3 that of GLM-5.2.
_SAME_GEOMETRY = {
    "deepseek-v3.1": "deepseek-v3",
    "glm-5.3": "glm-5.2",
    "kimi-k2-thinking": "kimi-k2.5",
    "kimi-k2.7-code": "kimi-k2.6",
    "llama-3.3-70b": "llama-3.1-70b",
    "qwen3-coder-480b-a35b": "qwen3-coder-480b",
    "qwen3.6-27b": "qwen3.5-27b",
    "qwen3.6-35b-a3b": "qwen3.5-35b-a3b",
    "qwen3.8-27b": "qwen3.5-27b",
}
# Models that are not described -> one with the same KV geometry, good for bytes per token alone.
_KV_GEOMETRY = {
    "80-layer gqa-8 model": "llama-3.1-70b",  # 80 layers, 8 kv heads of 128
    "model with 49,152 b/tok fp8 kv (48x4x128x2)": "qwen3-30b-a3b",
    "mistral-small-3.2-24b-instruct-2506": "qwen3-14b",  # 40 layers, 8 kv heads of 128
    "ministral-3-14b-reasoning-2512": "qwen3-14b",  # the same
}
# What a release's name says of its tuning and its weights, not of its geometry.
_TUNING = re.compile(
    r"-(instruct|it|hf|chat|base|reasoning|exp|w8a8|awq|gptq|fp8|nvfp4|mxfp4|bf16|int4|int8|w4a16|"
    r"dynamic|block|4bit|8bit|quantized\.w8a8|quantized\.w4a16|\d{4})$"
)
_VENDOR = re.compile(r"^(meta|nvidia)-(?=llama|deepseek|glm|kimi|qwen)")
_GPU_ALIASES = {"a100": "a100-80g", "a100-sxm": "a100-80g"}


def model_of(repository: str, model: str) -> str | None:
    """Return our name of a model from its repository, else from its own name; None if unknown."""
    known = model_names()
    for text in (repository, model, model.partition(" ")[0]):
        name = _plain(text)
        while name:
            name = _SAME_GEOMETRY.get(name, name)
            if name in known:
                return name
            shorter = _TUNING.sub("", name)
            if shorter == name:
                break
            name = shorter
    return None


def kv_geometry_of(model: str) -> str | None:
    """Return a described model with the same KV geometry, None where none is known."""
    return _KV_GEOMETRY.get(model.strip().lower())


def weights_of(quantisation: str, repository: str, model: ModelSpec) -> str:
    """Return the weights that a row names, `native` where they are the checkpoint's own."""
    text, native = quantisation.lower(), model.native_weight_format
    if not text or "native" in text or text.startswith(native.partition("_")[0]):
        return "native"
    if text.startswith("fp8"):
        is_channel = "dynamic" in repository.lower()
        return "fp8_channel" if is_channel else "fp8_block"
    for start, name in (
        ("fp32", "fp32"),
        ("w8a8", "int8"),
        ("int8", "int8"),
        ("nvfp4", "nvfp4"),
        ("mxfp4", "mxfp4"),
        ("awq", "int4_g128"),
        ("gptq", "int4_g128"),
        ("int4", "int4_g128"),
    ):
        if text.startswith(start):
            return name
    is_unquantised = native in ("bf16", "fp16")
    return "native" if is_unquantised else "bf16"


def gpu_of(name: str, memory: str) -> str | None:
    """Return our name of a GPU; `memory` tells releases of one name apart. None if unknown."""
    wanted = re.sub(r"\s*\(.*\)", "", name.strip().lower()).replace(" ", "-")
    if not wanted:
        return "a100-80g" if memory.startswith("80 GB") else None
    if wanted == "h20":
        return "h20-141g" if memory.startswith("141") else "h20"
    wanted = _GPU_ALIASES.get(wanted, wanted)
    for known in (wanted, f"{wanted}-sxm"):
        if known in gpu_names():
            return known
    return None


def kv_format_of(text: str) -> str:
    """Return the format of the KV cache; `auto` is that of the activations."""
    if text.startswith("fp8"):
        return "fp8_e4m3"
    return "fp32" if text.startswith("fp32") else "bf16"


def _plain(text: str) -> str:
    """Return a repository's or a model's name in lower case, without remarks in brackets."""
    name = re.sub(r"\s*\(.*\)", "", text.rpartition("/")[2]).strip().lower()
    return _VENDOR.sub("", name.replace(" ", "-"))
