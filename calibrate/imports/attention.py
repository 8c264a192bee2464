"""GQA and MLA attention from aiconfigurator-core: raw tables to normalised rows.

What each raw table means (found by looking at the numbers and at its collector):

* kernel tables of decode: one new token (`isl` 1) after `step` = 2^k - 1 cached ones, so the
  context is their sum; module tables: `step` is the length of the KV; prefill: `isl` new tokens
  after `step` cached ones.
* SGLang's FP8 decode rows of MLA on Hopper cast the whole pool to BF16 in every call: refused.
* vLLM measured whole MLA modules, launch-bound where the context is short: only their growth with
  the context is used, on top of the kernel's time over an empty context.
* SGLang's MLA prefill on Hopper multiplies the latent, not the heads' own keys and values (see
  `mla_prefill`).

Whose rows stand for an engine:

| | SGLang | vLLM | TensorRT-LLM |
|---|---|---|---|
| GQA | own | own | own |
| MLA decode BF16 | own | SGLang's empty + own growth | own |
| MLA decode FP8, Hopper | own BF16 empty + vLLM's growth | SGLang's BF16 empty + own growth | own |
| MLA decode FP8, Blackwell | own | SGLang's BF16 empty + own growth | own |
| MLA prefill, Hopper | TensorRT-LLM's; absorbed: own | TensorRT-LLM's | own |
| MLA prefill, Blackwell | own | TensorRT-LLM's | own |
| DSA (sparse_attention.py) | own | SGLang's | SGLang's |
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from tonnage.calibrate.imports.attention_rows import (
    DECODE_COLUMNS,
    PREFILL_COLUMNS,
    attention_table,
    base_rows,
    finished,
    joined,
)
from tonnage.calibrate.imports.wheel import read_table
from tonnage.sim.cost.models.attention import MLA_HEAD_DIM
from tonnage.sim.domain import BadInputError

_COMMON = ("framework", "version", "device", "op_name", "kernel_source", "kv_cache_dtype")
_CALL = ("num_heads", "batch_size", "isl", "step", "latency")
GQA_COLUMNS = (
    *_COMMON,
    *_CALL,
    "num_key_value_heads",
    "head_dim",
    "beam_width",
    "attn_dtype",
    "window_size",
)
MLA_COLUMNS = (*_COMMON, *_CALL, "mla_dtype", "tp_size")
MODULE_COLUMNS = (*MLA_COLUMNS, "model", "architecture", "gemm_type")

# Kernels that read an FP8 cache as it is; "flash_attention" (FA3) casts the layer's whole pool.
_FP8_MLA_KERNELS = ("trtllm_mla", "default")
_ABSORBED_KERNELS = ("flash_attention",)
_EMPTY_CONTEXT = 16  # below so many tokens no kernel's time grows


# --- grouped-query attention --------------------------------------------------------------------


def gqa_decode(raw: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of a generation_attention table."""
    rows = _gqa_rows(raw)
    rows["context_tokens"] = (raw["step"] + raw["isl"]).astype(np.int64)
    return finished(_one_kernel(rows, raw), DECODE_COLUMNS)


def gqa_prefill(raw: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of a context_attention table.

    Over an FP8 cache the rows that also compute in FP8 are kept where there are any.
    """
    rows = _gqa_rows(raw)
    rows["new_tokens"] = raw["isl"].astype(np.int64)
    rows["past_tokens"] = raw["step"].astype(np.int64)
    return finished(_one_kernel(rows, raw), PREFILL_COLUMNS)


def _gqa_rows(raw: pd.DataFrame) -> pd.DataFrame:
    if (raw["beam_width"] != 1).any():
        raise BadInputError("attention table: beam_width other than 1 was not read")
    rows = base_rows(raw, "gqa", "kernel")
    rows["kv_heads"] = raw["num_key_value_heads"].astype(np.int64)
    rows["head_dim"] = raw["head_dim"].astype(np.int64)
    rows["window_tokens"] = raw["window_size"].where(raw["window_size"] > 0).astype(np.float64)
    return rows


def _one_kernel(rows: pd.DataFrame, raw: pd.DataFrame) -> pd.DataFrame:
    """Keep one kernel and arithmetic per key: that of the KV's format, the table's main kernel."""
    keys = [name for name in rows.columns if name not in ("seconds", "kernel", "content")]
    rank = raw["kernel_source"].map(-raw["kernel_source"].value_counts()).astype(np.float64)
    rank += 0.5 * (raw["attn_dtype"] != raw["kv_cache_dtype"])
    ordered = rows.assign(rank=rank).sort_values("rank", kind="stable")
    best = ordered.groupby(keys, dropna=False)["rank"].transform("min")
    return ordered[ordered["rank"] == best].drop(columns="rank")


# --- latent attention ---------------------------------------------------------------------------


def mla_decode(raw: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of a generation_mla kernel table; those of a whole-pool cast are refused."""
    rows = base_rows(raw, "mla", "kernel")
    rows["head_dim"] = MLA_HEAD_DIM
    rows["context_tokens"] = (raw["step"] + raw["isl"]).astype(np.int64)
    refused = (rows["kv_format"] != "bf16") & ~rows["kernel"].isin(_FP8_MLA_KERNELS)
    return finished(rows[~refused], DECODE_COLUMNS)


def mla_prefill(raw: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of a context_mla kernel table.

    FA3 rows of SGLang do the FLOP of the absorbed form (heads share the latent of 576 + 512) in a
    plausible 580 TFLOP/s; as the decompressed form (192 + 128) they would run at 172. SGLang serves
    prompts without a cached prefix in the decompressed form, so they are a kind of their own; its
    FP8 rows cast the pool as in decode and are refused.
    """
    absorbed = raw["kernel_source"].isin(_ABSORBED_KERNELS)
    rows = base_rows(raw, "mla", "kernel")
    rows["kind"] = np.where(absorbed, "mla_absorbed", "mla")
    rows["head_dim"] = MLA_HEAD_DIM
    rows["new_tokens"] = raw["isl"].astype(np.int64)
    rows["past_tokens"] = raw["step"].astype(np.int64)
    refused = absorbed & (rows["kv_format"] != "bf16")
    return finished(rows[~refused], PREFILL_COLUMNS)


def mla_module_growth(raw: pd.DataFrame) -> pd.DataFrame:
    """Return what a generation module's time grows by over an empty context, as decode rows.

    Of the modules with BF16 projections: those with fp8_block ones grow by up to 13 us more at 8
    and 16 sequences of 4096 tokens, which no read of 19 MB takes. Rows of no growth have 0 seconds.
    """
    plain = raw[raw["gemm_type"] == "bfloat16"]
    rows = base_rows(plain, "mla", "module")
    rows["head_dim"] = MLA_HEAD_DIM
    rows["context_tokens"] = plain["step"].astype(np.int64)
    clean = finished(rows, DECODE_COLUMNS)
    at_start = clean["seconds"].where(clean["context_tokens"] <= _EMPTY_CONTEXT)
    empty = at_start.groupby([clean[name] for name in ("kv_format", "heads", "batch")])
    clean["seconds"] = (clean["seconds"] - empty.transform("median")).clip(lower=0.0)
    return clean


def mla_composed(empty: pd.DataFrame, growth: pd.DataFrame) -> pd.DataFrame:
    """Return kernel rows over an empty context plus a module's growth with the context.

    `empty`: BF16 rows of a kernel table; its shortest context stands for an empty one, for both KV
    formats (an FP8 row of FA3 would hold the launch of its cast).
    """
    first = empty[empty["context_tokens"] == empty["context_tokens"].min()]
    start = first.groupby(["heads", "batch"], as_index=False).agg(
        empty_s=("seconds", "first"), base=("source_framework", "first"), under=("kernel", "first")
    )
    rows = growth.merge(start, on=["heads", "batch"])
    rows["seconds"] += rows["empty_s"]
    rows["content"] = "kernel"
    rows["source_framework"] = rows["base"] + "+" + rows["source_framework"]
    rows["kernel"] = rows["under"] + ", empty, + growth of " + rows["kernel"]
    return finished(rows[list(DECODE_COLUMNS)], DECODE_COLUMNS)


# --- what a GPU and an engine get ---------------------------------------------------------------


def decode_rows(gpu: str, backend: str) -> pd.DataFrame:
    """Return the GQA and MLA decode rows that stand for an engine on a GPU folder."""
    gqa = _read(gpu, "attention", backend, "generation_attention", GQA_COLUMNS)
    own = _read(gpu, "mla", backend, "generation_mla", MLA_COLUMNS)
    parts = [] if gqa is None else [gqa_decode(gqa)]
    kernel = None if own is None else mla_decode(own)
    if kernel is not None:
        parts.append(kernel)
    return joined([*parts, *_composed(gpu, kernel)], DECODE_COLUMNS)


def prefill_rows(gpu: str, backend: str) -> pd.DataFrame:
    """Return the GQA and MLA prefill rows that stand for an engine on a GPU folder.

    vLLM measured only modules and SGLang on Hopper only the absorbed form: TensorRT-LLM's kernel
    stands for their decompressed form.
    """
    gqa = _read(gpu, "attention", backend, "context_attention", GQA_COLUMNS)
    own = _read(gpu, "mla", backend, "context_mla", MLA_COLUMNS)
    parts = [] if gqa is None else [gqa_prefill(gqa)]
    if own is not None:
        parts.append(mla_prefill(own))
    if not any((part["kind"] == "mla").any() for part in parts):
        other = _read(gpu, "mla", "trtllm", "context_mla", MLA_COLUMNS)
        parts += [] if other is None else [mla_prefill(other)]
    return joined(parts, PREFILL_COLUMNS)


def _composed(gpu: str, kernel: pd.DataFrame | None) -> list[pd.DataFrame]:
    """Return composed rows of the KV formats that an engine's own kernel table lacks."""
    lacking = {"bf16", "fp8_e4m3"} - set([] if kernel is None else kernel["kv_format"])
    if kernel is None:
        sglang = _read(gpu, "mla", "sglang", "generation_mla", MLA_COLUMNS)
        kernel = None if sglang is None else mla_decode(sglang)
    module = _read(gpu, "mla", "vllm", "mla_generation_module", MODULE_COLUMNS)
    if not lacking or module is None or kernel is None:
        return []
    composed = mla_composed(kernel[kernel["kv_format"] == "bf16"], mla_module_growth(module))
    return [composed[composed["kv_format"].isin(lacking)]]


def _read(
    gpu: str, family: str, backend: str, op: str, columns: tuple[str, ...]
) -> pd.DataFrame | None:
    table = attention_table(gpu, family, backend, op)
    return None if table is None else read_table(table, columns)
