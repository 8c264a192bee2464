"""Reads a table of KV capacities that engines printed, and says what the memory model predicts.

The columns are those of `kv_capacity.csv`: one row per server start, tokens and bytes as its log
printed them, so that prediction and log can stand side by side. An empty cell is not stated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path

from tonnage.scenarios.capacity_names import (
    gpu_of,
    kv_format_of,
    kv_geometry_of,
    model_of,
    weights_of,
)
from tonnage.scenarios.catalogue import load_gpu, load_model
from tonnage.scenarios.csv_lines import csv_lines
from tonnage.scenarios.schema import ENGINE_VERSIONS
from tonnage.sim.domain import (
    BadInputError,
    EngineSpec,
    LayerSpec,
    ModelSpec,
    ParallelLayout,
    PoolSpec,
)
from tonnage.sim.model.engine_rules import (
    GIB,
    default_chunk_tokens,
    default_max_running_requests,
    default_page_tokens,
)
from tonnage.sim.model.kv import kv_bytes_per_token
from tonnage.sim.model.memory import PoolMemory, estimate_pool_memory
from tonnage.sim.model.requantise import with_weights

COLUMNS = (
    *("id", "framework", "version", "model", "hf_repo", "gpu", "gpu_mem_gib"),
    *("tp", "dp", "pp", "ep", "weight_quant", "kv_dtype", "mem_fraction", "weights_gib_per_gpu"),
    *("kv_tokens", "kv_bytes_gib_per_gpu", "max_model_len", "max_concurrency"),
)
_ENGINES = {"tensorrt-llm": "trtllm", "trt-llm": "trtllm"}
# Settings that remarks give, as flags or in words.
_DCP = re.compile(r"(?:decode-context-parallel|dcp)[ =](\d+)", re.IGNORECASE)
_CHUNK = re.compile(r"(?:max[-_]num[-_]batched[-_]tokens|mbt)[ =](\d+)")
_RUNNING = re.compile(r"max[-_]num[-_]seqs[ =](\d+)")


@dataclass(frozen=True, slots=True)
class CapacityRow:
    """One server start: its configuration and what its log printed; None is not stated.

    `kv_tokens` are those of one data-parallel rank. `is_geometry_only`: the named model only shares
    the KV geometry, so nothing but bytes per token can be compared. `max_concurrency`: requests of
    `longest_tokens` that the log says fit, all ranks together.
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
    longest_tokens: int | None = None
    max_concurrency: float | None = None
    version_is_stated: bool = True
    chunk_tokens: int | None = None
    running_requests: int | None = None

    def tokens_from_bytes(self) -> float | None:
        """Return the tokens that the printed bytes hold at the model's bytes per token."""
        if self.kv_bytes is None:
            return None
        return self.kv_bytes / kv_bytes_per_token(self.model, self.layout, self.kv_format)

    def missing(self) -> str | None:
        """Return why the configuration alone predicts no pool; None where it does."""
        if self.is_geometry_only:
            return "the model is not described, only its KV geometry is known"
        if self.gpu is None:
            return "the GPU is not stated, or not in the catalogue"
        if self.engine.mem_fraction is None:
            return "the memory fraction is not stated"
        return None

    def predicted(self) -> PoolMemory | None:
        """Return what the configuration alone leads to; None where it says too little."""
        if self.missing() is not None:
            return None
        assert self.gpu is not None
        gpu, engine = load_gpu(self.gpu), self.engine
        is_fp32 = self.weights == "fp32"
        model = _in_fp32(self.model) if is_fp32 else with_weights(self.model, self.weights)
        running = self.running_requests or default_max_running_requests(engine, gpu, model)
        pool = PoolSpec(
            role="serve",
            instances=1,
            layout=self.layout,
            weights=self.weights,
            kv_format=self.kv_format,
            page_tokens=default_page_tokens(engine, model, gpu, self.kv_format),
            chunk_tokens=self.chunk_tokens or default_chunk_tokens(engine, gpu),
            max_running_requests=running * self.layout.attention_dp,
        )
        return estimate_pool_memory(model, gpu, engine, pool)


@dataclass(frozen=True, slots=True)
class UnknownRow:
    """A row whose model or engine is not known, and which one it is."""

    id: str
    model: str
    gpu: str
    engine: str
    reason: str


def read_capacity_rows(path: Path, models_folder: Path | None = None) -> list[CapacityRow]:
    """Return the rows whose model is described, in the package or in `models_folder`."""
    rows = read_capacity_table(path, models_folder)
    return [row for row in rows if isinstance(row, CapacityRow)]


def read_capacity_table(
    path: Path, models_folder: Path | None = None
) -> list[CapacityRow | UnknownRow]:
    """Return all rows in order; BadInputError names the file, and the line and the column."""
    return list(_rows(path, models_folder))


def _rows(path: Path, models_folder: Path | None) -> Iterator[CapacityRow | UnknownRow]:
    for line in csv_lines(path, COLUMNS):
        try:
            yield _row(_Cells(*line), models_folder)
        except BadInputError as error:
            if str(error).startswith(line.where):
                raise
            raise BadInputError(f"{line.where}: {error}") from error


@dataclass(frozen=True, slots=True)
class _Cells:
    """The cells of one line, checked as they are read."""

    fields: Mapping[str, str | None]
    where: str

    def text(self, name: str) -> str:
        return (self.fields.get(name) or "").strip()

    def number(self, name: str) -> float | None:
        text = self.text(name)
        if not text:
            return None
        try:
            found = float(text)
        except ValueError:
            found = float("nan")
        if not isfinite(found) or found <= 0:
            raise BadInputError(f"{self.where}: {name}: {text!r} is not a number above 0")
        return found

    def whole(self, name: str) -> int | None:
        found = self.number(name)
        if found is not None and found != int(found):
            raise BadInputError(f"{self.where}: {name}: {found:g} is not a whole number")
        return None if found is None else int(found)

    def gib(self, name: str) -> float | None:
        found = self.number(name)
        return None if found is None else found * GIB


def _row(cells: _Cells, models_folder: Path | None) -> CapacityRow | UnknownRow:
    framework = cells.text("framework").lower().partition(" ")[0]
    engine_name = _ENGINES.get(framework, framework)
    repository, model_text = cells.text("hf_repo"), cells.text("model")
    geometry = kv_geometry_of(model_text)
    name = geometry or model_of(repository, model_text)
    if engine_name not in ENGINE_VERSIONS or name is None:
        is_known = engine_name in ENGINE_VERSIONS
        reason = "the model is not in the catalogue" if is_known else "the engine is not known"
        return UnknownRow(cells.text("id"), model_text, cells.text("gpu"), engine_name, reason)
    described = models_folder / f"{name}.json" if models_folder else None
    is_described = described is not None and described.is_file()
    model = load_model(described if is_described and described else name)
    version = re.match(r"\d[\d.]*\d", cells.text("version"))
    fraction = cells.number("mem_fraction")
    engine = EngineSpec(
        engine_name,
        version.group() if version else ENGINE_VERSIONS[engine_name],
        fraction,
        "auto" if fraction is None else "given",
    )
    remark = cells.text("notes")
    weights = "native"
    if geometry is None:
        weights = weights_of(cells.text("weight_quant"), repository, model)
    return CapacityRow(
        id=cells.text("id"),
        source_url=cells.text("source_url"),
        engine=engine,
        model=model,
        gpu=gpu_of(cells.text("gpu"), cells.text("gpu_mem_gib")),
        layout=_layout(cells, engine_name),
        weights=weights,
        kv_format=kv_format_of(cells.text("kv_dtype")),
        kv_tokens=cells.number("kv_tokens"),
        kv_bytes=cells.gib("kv_bytes_gib_per_gpu"),
        weights_bytes=cells.gib("weights_gib_per_gpu"),
        is_geometry_only=geometry is not None,
        remark=remark,
        longest_tokens=cells.whole("max_model_len"),
        max_concurrency=cells.number("max_concurrency"),
        version_is_stated=version is not None,
        chunk_tokens=_stated(_CHUNK, remark),
        running_requests=_stated(_RUNNING, remark),
    )


def _layout(cells: _Cells, engine: str) -> ParallelLayout:
    """Return the layout in SGLang's convention, where tp counts the attention-DP ranks too.

    SGLang's `--dp` without attention-DP is so many servers: each is what tp and pp say.
    """
    tp, ranks = cells.whole("tp") or 1, cells.whole("dp") or 1
    if engine == "sglang" and not cells.text("dp_attention").lower().startswith("yes"):
        ranks = 1
    if engine == "vllm":
        tp *= ranks
    layout = ParallelLayout(
        tp=tp, pp=cells.whole("pp") or 1, ep=cells.whole("ep") or 1, attention_dp=ranks
    )
    return replace(layout, dcp=_stated(_DCP, cells.text("notes")) or 1)


def _stated(setting: re.Pattern[str], remark: str) -> int | None:
    found = setting.search(remark)
    return int(found.group(1)) if found else None


def _in_fp32(model: ModelSpec) -> ModelSpec:
    """Return the model as `--dtype float32` loads it: every weight in FP32."""

    def widened(layer: LayerSpec) -> LayerSpec:
        return replace(layer, weights=tuple(replace(one, format="fp32") for one in layer.weights))

    return replace(
        model,
        layers=tuple(widened(layer) for layer in model.layers),
        outer_weights=tuple(replace(one, format="fp32") for one in model.outer_weights),
        native_weight_format="fp32",
    )
