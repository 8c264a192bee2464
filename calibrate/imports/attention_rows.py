"""What the importers of attention tables share: formats, duplicates, spikes, columns.

Raw tables are those of aiconfigurator-core: milliseconds, one row per call, local head counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from tonnage.calibrate.imports.wheel import (
    KernelTable,
    current_version,
    kernel_tables,
)
from tonnage.sim.domain import BadInputError

KV_FORMATS = {"bfloat16": "bf16", "float16": "fp16", "fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3"}
PROJECTION_FORMATS = {"bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8_block", "nvfp4": "nvfp4"}
FRAMEWORKS = {"SGLang": "sglang", "VLLM": "vllm", "vLLM": "vllm", "TRTLLM": "trtllm"}

IDENTITY = (
    "kind",
    "kv_format",
    "heads",
    "kv_heads",
    "head_dim",
    "window_tokens",
    "projection_format",
    "hidden_size",
)
SOURCE = ("content", "source_framework", "source_version", "kernel")
DECODE_COLUMNS = (*IDENTITY, "batch", "context_tokens", "seconds", *SOURCE)
PREFILL_COLUMNS = (*IDENTITY, "batch", "new_tokens", "past_tokens", "seconds", *SOURCE)

# A row is a spike when the next batch and the next context, which do more, both take less than
# 1 / 1.5 of its time: kernels jitter by a few percent, spikes were 1.7 to 266 times off.
_SPIKE = 1.5


def attention_table(gpu: str, family: str, backend: str, op: str) -> KernelTable | None:
    """Return the current table of a GPU folder and backend, None where there is none."""
    version = current_version(gpu, backend)
    found = kernel_tables(gpu, family, backend, version, op) if version else ()
    return found[0] if found else None


def named(values: pd.Series[str], names: Mapping[str, str], what: str) -> pd.Series[str]:
    """Return our names of a raw column's values; a value that was not read is an error."""
    unknown = sorted(set(values.unique()) - names.keys())
    if unknown:
        raise BadInputError(
            f"{what}: unknown {', '.join(map(str, unknown))}; known are {', '.join(names)}"
        )
    return values.map(names)


def base_rows(raw: pd.DataFrame, kind: str, content: str) -> pd.DataFrame:
    """Return the columns that every attention table gives alike; the rest is the caller's."""
    rows = pd.DataFrame(index=raw.index)
    rows["kind"] = kind
    rows["kv_format"] = named(raw["kv_cache_dtype"], KV_FORMATS, "kv_cache_dtype")
    rows["heads"] = raw["num_heads"].astype(np.int64)  # local: of one rank, whatever tp_size says
    rows["kv_heads"] = 1
    rows["window_tokens"] = np.nan
    rows["projection_format"] = "none"
    rows["hidden_size"] = np.nan
    rows["batch"] = raw["batch_size"].astype(np.int64)
    rows["seconds"] = raw["latency"].astype(np.float64) * 1e-3
    rows["content"] = content
    rows["source_framework"] = named(raw["framework"], FRAMEWORKS, "framework")
    rows["source_version"] = raw["version"].astype(str)
    rows["kernel"] = raw["kernel_source"].astype(str)
    return rows


def finished(rows: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Return clean rows in order: positive times, one per key (the median), without spikes."""
    keys = [name for name in columns if name not in ("seconds", *SOURCE)]
    positive = rows[rows["seconds"] > 0]
    groups = positive.groupby(keys, dropna=False, as_index=False, sort=True)
    one = groups.agg({"seconds": "median", **dict.fromkeys(SOURCE, "first")})
    axis = "context_tokens" if "context_tokens" in columns else "new_tokens"
    return one[~spikes(one, axis)][list(columns)].reset_index(drop=True)


def joined(parts: Sequence[pd.DataFrame], columns: Sequence[str]) -> pd.DataFrame:
    """Return the parts below each other; empty parts would turn numbers into objects."""
    filled = [part for part in parts if len(part)]
    if not filled:
        return pd.DataFrame(columns=list(columns))
    return pd.concat(filled, ignore_index=True)


def spikes(rows: pd.DataFrame, axis: str) -> pd.Series[bool]:
    """Return which rows are far above both the next batch and the next `axis`."""
    others = [name for name in (*IDENTITY, "past_tokens") if name in rows.columns and name != axis]
    next_batch = _next(rows, [*others, axis], "batch")
    next_tokens = _next(rows, [*others, "batch"], axis)
    # At the edge of the grid there is one of the two; without any, nothing tells a spike.
    ahead = np.fmax(next_batch, next_tokens)
    return pd.Series(rows["seconds"].to_numpy() > _SPIKE * ahead, index=rows.index)


def _next(
    rows: pd.DataFrame, within: list[str], along: str
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    ordered = rows.sort_values(along)
    shifted = ordered.groupby(within, dropna=False)["seconds"].shift(-1)
    return np.asarray(shifted.reindex(rows.index), dtype=np.float64)
