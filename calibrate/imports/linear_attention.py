"""Linear attention and the products around MLA from aiconfigurator-core, as normalised rows.

A call of linear attention is several raw rows, one per kernel: the short convolution and the
recurrent (decode) or chunked (prefill) kernel; their sum is the call, and a call that lacks one of
them is dropped. Refused: mamba2, whose tables hold the convolution without the scan; KDA's verify
rows (speculation); calls over more than 16,384 prompt tokens, which jump by up to 4 at twice the
work; decode batches beyond 512 for the same reason.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from tonnage.calibrate.imports.attention_rows import (
    FRAMEWORKS,
    PREFILL_COLUMNS,
    attention_table,
    finished,
    joined,
    named,
)
from tonnage.calibrate.imports.wheel import kernel_tables, read_table
from tonnage.sim.cost.models.linear_attention import LINEAR_HEAD_DIM

_COMMON = ("framework", "version", "device", "op_name", "kernel_source")
LINEAR_COLUMNS = (
    *_COMMON,
    "phase",
    "batch_size",
    "seq_len",
    "num_tokens",
    "d_model",
    "d_conv",
    "num_k_heads",
    "head_k_dim",
    "num_v_heads",
    "head_v_dim",
    "model_name",
    "latency",
)
BMM_COLUMNS = (*_COMMON, "bmm_dtype", "num_tokens", "num_heads", "latency")
BMM_TABLE_COLUMNS = (
    "format",
    "heads",
    "tokens",
    "seconds",
    "source_framework",
    "source_version",
    "kernel",
)

_KINDS = {"gdn": "gated_delta_net", "kda": "kda"}
_PHASES = {"generation": "decode", "context": "prefill", "verify": "verify"}
_BMM_FORMATS = {"bfloat16": "bf16", "fp8": "fp8"}
_MOST_TOKENS = 16384
_MOST_BATCH = 512
# Kernels that hold the convolution too.
_WHOLE = ("kda_fused_decode", "fused_kda_decode")


def linear_rows(raw: pd.DataFrame) -> pd.DataFrame:
    """Return the calls of a gdn or kda table: kind ``gated_delta_net_decode`` and so on."""
    calls = _calls(raw[raw["phase"] != "verify"])
    rows = pd.DataFrame(index=calls.index)
    kind = named(calls["op_name"], _KINDS, "op_name")
    rows["kind"] = kind + "_" + named(calls["phase"], _PHASES, "phase")
    rows["kv_format"] = "bf16"
    rows["heads"] = calls["num_v_heads"].astype(np.int64)
    rows["kv_heads"] = rows["heads"]
    rows["head_dim"] = LINEAR_HEAD_DIM
    rows["window_tokens"] = np.nan
    rows["projection_format"] = "none"
    rows["hidden_size"] = np.nan
    rows["batch"] = calls["batch_size"].astype(np.int64)
    rows["new_tokens"] = calls["seq_len"].astype(np.int64)
    rows["past_tokens"] = 0
    rows["seconds"] = calls["latency"].astype(np.float64) * 1e-3
    rows["content"] = "kernel"
    rows["source_framework"] = named(calls["framework"], FRAMEWORKS, "framework")
    rows["source_version"] = calls["version"].astype(str)
    rows["kernel"] = calls["kernel_source"]
    is_small = (rows["batch"] * rows["new_tokens"] <= _MOST_TOKENS) & (rows["batch"] <= _MOST_BATCH)
    return finished(rows[is_small], PREFILL_COLUMNS)


def _calls(raw: pd.DataFrame) -> pd.DataFrame:
    """Return one row per call: the sum over its kernels, or the one kernel that holds all."""
    if ((raw["head_k_dim"] != LINEAR_HEAD_DIM) | (raw["head_v_dim"] != LINEAR_HEAD_DIM)).any():
        raw = raw[(raw["head_k_dim"] == LINEAR_HEAD_DIM) & (raw["head_v_dim"] == LINEAR_HEAD_DIM)]
    call = ["op_name", "framework", "version", "phase", "batch_size", "seq_len"]
    call += ["num_k_heads", "num_v_heads"]
    kernels = raw.groupby([*call, "kernel_source"], as_index=False)["latency"].median()
    whole = kernels[kernels["kernel_source"].isin(_WHOLE)]
    parts = kernels[~kernels["kernel_source"].isin(_WHOLE)]
    summed = parts.groupby(call, as_index=False).agg(
        latency=("latency", "sum"),
        kernel_source=("kernel_source", " + ".join),
        count=("kernel_source", "size"),
    )
    complete = summed[summed["count"] == 2].drop(columns="count")
    # Where both were measured, the fused kernel stands.
    both: pd.DataFrame = pd.concat([whole, complete], ignore_index=True)
    return both.drop_duplicates(call, keep="first")


def bmm_rows(raw: pd.DataFrame) -> pd.DataFrame:
    """Return the products before and after the attention kernel of MLA decode, added up."""
    keys = ["framework", "version", "bmm_dtype", "num_heads", "num_tokens"]
    positive = raw[raw["latency"] > 0]
    one = positive.groupby([*keys, "op_name"], as_index=False).agg(
        latency=("latency", "median"), kernel=("kernel_source", "first")
    )
    pair = one.groupby(keys, as_index=False).agg(
        latency=("latency", "sum"), kernel=("kernel", "first"), count=("op_name", "nunique")
    )
    pair = pair[pair["count"] == 2]
    rows = pd.DataFrame(index=pair.index)
    rows["format"] = named(pair["bmm_dtype"], _BMM_FORMATS, "bmm_dtype")
    rows["heads"] = pair["num_heads"].astype(np.int64)
    rows["tokens"] = pair["num_tokens"].astype(np.int64)
    rows["seconds"] = pair["latency"].astype(np.float64) * 1e-3
    rows["source_framework"] = named(pair["framework"], FRAMEWORKS, "framework")
    rows["source_version"] = pair["version"].astype(str)
    rows["kernel"] = pair["kernel"]
    ordered: pd.DataFrame = rows[list(BMM_TABLE_COLUMNS)]
    return ordered.reset_index(drop=True)


def rows_of(gpu: str, backend: str) -> pd.DataFrame:
    """Return the linear-attention rows that an engine's tables hold for a GPU folder."""
    tables = [attention_table(gpu, "linear_attention", backend, "gdn")]
    # KDA was collected on one version per backend, which is not that of the other tables.
    tables += kernel_tables(gpu, "kda", backend, None, "kda")[-1:]
    parts = [linear_rows(read_table(one, LINEAR_COLUMNS)) for one in tables if one is not None]
    return joined(parts, PREFILL_COLUMNS)


def bmm_of(gpu: str, backend: str) -> pd.DataFrame:
    """Return the products around MLA decode that an engine's table holds for a GPU folder."""
    table = attention_table(gpu, "mla_bmm", backend, "mla_bmm")
    rows = [] if table is None else [bmm_rows(read_table(table, BMM_COLUMNS))]
    return joined(rows, BMM_TABLE_COLUMNS)
