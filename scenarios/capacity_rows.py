"""Reads a table of KV capacities that engines printed, and says what the memory model predicts.

The columns are those of `kv_capacity.csv`: one row per server start, tokens and bytes as its log
printed them, so that prediction and log can stand side by side.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tonnage.scenarios.catalogue import load_gpu, load_model
from tonnage.sim.domain import EngineSpec, ModelSpec, ParallelLayout, PoolSpec
from tonnage.sim.model.engine_rules import (
    GIB,
    default_chunk_tokens,
    default_max_running_requests,
    default_page_tokens,
)
from tonnage.sim.model.kv import kv_bytes_per_token
from tonnage.sim.model.memory import PoolMemory, estimate_pool_memory
from tonnage.sim.model.requantise import with_weights

# Repository -> (model, weights). The Llama 3.3 releases have the geometry of Llama 3.1, and
# Kimi-K2-Thinking that of Kimi-K2.5 without its vision tower.
_MODELS = {
    "moonshotai/Kimi-K2-Thinking": ("kimi-k2.5", "native"),
    "deepseek-ai/DeepSeek-V3.2-Exp": ("deepseek-v3.2", "native"),
    "nvidia/GLM-5.2-NVFP4": ("glm-5.2", "nvfp4"),
    "zai-org/GLM-5.3": ("glm-5.2", "native"),
    "Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8": ("qwen3-coder-480b", "fp8_block"),
    "openai/gpt-oss-20b": ("gpt-oss-20b", "native"),
    "openai/gpt-oss-120b": ("gpt-oss-120b", "native"),
    "meta-llama/Llama-3.1-8B-Instruct": ("llama-3.1-8b", "native"),
    "Qwen/Qwen2.5-7B-Instruct": ("qwen2.5-7b", "native"),
    "Qwen/Qwen3-14B": ("qwen3-14b", "native"),
    "RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic": ("llama-3.1-70b", "fp8_channel"),
    "neuralmagic/Meta-Llama-3.1-70B-Instruct-quantized.w8a8": ("llama-3.1-70b", "int8"),
    "meta-llama/Llama-2-70b-hf": ("llama-2-70b", "native"),
}
# Rows of models that are not described, by their number -> a model with the same KV geometry.
_KV_GEOMETRY = {
    "K040": "llama-3.1-70b",  # 80 layers, 8 kv heads of 128; the log does not name it
    "K046": "qwen3-30b-a3b",  # 48 layers, 4 kv heads of 128; the log does not name it
    "K094": "qwen3-14b",  # Mistral-Small-3.2-24B: 40 layers, 8 kv heads of 128
    "K106": "qwen3-14b",  # Ministral-3-14B: the same
}
_GPUS = {
    "H100": "h100-sxm",
    "H200": "h200-sxm",
    "A100": "a100-80g",
    "B200": "b200-sxm",
    "B300": "b300-sxm",
    "H20": "h20-141g",
    "RTX 4090": "rtx-4090",
    "RTX 5090": "rtx-5090",
}
_DCP = {"K002": 8}  # said in its remark only


@dataclass(frozen=True, slots=True)
class CapacityRow:
    """One server start: its configuration and what its log printed; None is not stated.

    `kv_tokens` are those of one data-parallel rank. `is_geometry_only`: the named model only shares
    the KV geometry, so nothing but bytes per token can be compared.
    """

    id: str
    source_url: str
    engine: EngineSpec
    model: ModelSpec
    gpu: str | None
    layout: ParallelLayout
    weights: str
    kv_format: str
    kv_tokens: float | None
    kv_bytes: float | None
    weights_bytes: float | None
    is_geometry_only: bool
    remark: str

    def tokens_from_bytes(self) -> float | None:
        """Return the tokens that the printed bytes hold at the model's bytes per token."""
        if self.kv_bytes is None:
            return None
        return self.kv_bytes / kv_bytes_per_token(self.model, self.layout, self.kv_format)

    def predicted(self) -> PoolMemory | None:
        """Return what the configuration alone leads to; None where it says too little."""
        says_enough = self.gpu is not None and self.engine.mem_fraction is not None
        if not says_enough or self.is_geometry_only or self.kv_format == "fp32":
            return None
        assert self.gpu is not None
        gpu, engine = load_gpu(self.gpu), self.engine
        model = with_weights(self.model, self.weights)
        running = default_max_running_requests(engine, gpu, model)
        pool = PoolSpec(
            role="serve",
            instances=1,
            layout=self.layout,
            weights=self.weights,
            kv_format=self.kv_format,
            page_tokens=default_page_tokens(engine, model, gpu, self.kv_format),
            chunk_tokens=default_chunk_tokens(engine, gpu),
            max_running_requests=running * self.layout.attention_dp,
        )
        return estimate_pool_memory(model, gpu, engine, pool)


def read_capacity_rows(path: Path, models_folder: Path | None = None) -> list[CapacityRow]:
    """Return the rows whose model is described, in the package or in `models_folder`."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [_read_row(fields, models_folder) for fields in csv.DictReader(file)]
    return [row for row in rows if row is not None]


def _read_row(fields: Mapping[str, str], models_folder: Path | None) -> CapacityRow | None:
    geometry = _KV_GEOMETRY.get(fields["id"])
    name, weights = (geometry, "native") if geometry else _MODELS.get(fields["hf_repo"], ("", ""))
    if not name:
        return None
    described = models_folder / f"{name}.json" if models_folder else None
    is_described = described is not None and described.is_file()
    model = load_model(described if is_described and described else name)
    fraction = _number(fields["mem_fraction"])
    version = re.match(r"\d[\d.]*\d", fields["version"])
    engine = EngineSpec(
        fields["framework"].split()[0],
        version.group() if version else "0",
        fraction,
        "auto" if fraction is None else "given",
    )
    return CapacityRow(
        id=fields["id"],
        source_url=fields["source_url"],
        engine=engine,
        model=model,
        gpu=_gpu(fields),
        layout=_layout(fields),
        weights=weights,
        kv_format=_kv_format(fields["kv_dtype"]),
        kv_tokens=_number(fields["kv_tokens"]),
        kv_bytes=_gib(fields["kv_bytes_gib_per_gpu"]),
        weights_bytes=_gib(fields["weights_gib_per_gpu"]),
        is_geometry_only=geometry is not None,
        remark=fields["notes"],
    )


def _layout(fields: Mapping[str, str]) -> ParallelLayout:
    """Return the layout in SGLang's convention, where tp counts the attention-DP ranks too."""
    tp, ranks = int(fields["tp"] or 1), int(fields["dp"] or 1)
    if fields["framework"].startswith("vllm"):
        tp *= ranks
    layout = ParallelLayout(
        tp=tp, pp=int(fields["pp"] or 1), ep=int(fields["ep"] or 1), attention_dp=ranks
    )
    return replace(layout, dcp=_DCP.get(fields["id"], 1))


def _gpu(fields: Mapping[str, str]) -> str | None:
    if fields["gpu"] == "H20" and not fields["gpu_mem_gib"].startswith("141"):
        return "h20"
    if not fields["gpu"] and fields["gpu_mem_gib"].startswith("80 GB"):
        return "a100-80g"
    return _GPUS.get(fields["gpu"])


def _kv_format(text: str) -> str:
    if text.startswith("fp8"):
        return "fp8_e4m3"
    return "fp32" if text.startswith("fp32") else "bf16"


def _number(text: str) -> float | None:
    return float(text) if text else None


def _gib(text: str) -> float | None:
    return float(text) * GIB if text else None
