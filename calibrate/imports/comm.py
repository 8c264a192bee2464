"""Collectives: raw tables to rows in bytes and seconds, without glitches.

The tables count a message in elements, not in bytes: 64 Mi "half" elements over eight H200 in
562 us are 418 GB/s of bus bandwidth, where a link carries 450; read as bytes, half of that.
A message here is the largest buffer of one rank: what an all-reduce sums, an all-gather's output, a
reduce-scatter's input, what an all-to-all sends to all (its own share included).
"""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tonnage.calibrate.imports import wheel
from tonnage.sim.cost.models.grid import monotone
from tonnage.sim.domain import FloatArray

BoolArray = NDArray[np.bool_]

_ELEMENT_BYTES = 2  # bfloat16 and half
_CUSTOM_REQUIRED = (
    *("version", "op_name", "kernel_source", "allreduce_dtype"),
    *("num_gpus", "message_size", "latency"),
)
_CUSTOM_OPTIONAL = ("framework", "device", "backend", "implementation")
_NCCL_REQUIRED = (
    *("version", "op_name", "kernel_source", "nccl_dtype"),
    *("num_gpus", "message_size", "latency"),
)
_NCCL_OPTIONAL = ("framework", "device")
_NCCL_OPS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
}

# A larger message takes no less time: a row slower than a larger one by more than this is a glitch.
_GLITCH = 1.25

COLUMNS = (
    *("op", "gpus", "message_bytes", "in_graph", "seconds"),
    *("source_framework", "source_version", "kernel"),
)


def all_reduce_rows(gpu: str, backend: str, version: str | None = None) -> pd.DataFrame:
    """Return an engine's own all-reduce, `in_graph` or launched eagerly, by GPUs and bytes.

    `version`: of the engine that was timed; default the current one.
    """
    version = version or wheel.current_version(gpu, backend)
    if version is None:
        return pd.DataFrame(columns=COLUMNS)
    tables = wheel.kernel_tables(gpu, "comm", backend, version, "custom_allreduce")
    frames = [
        custom_all_reduce(wheel.read_table(table, _CUSTOM_REQUIRED, _CUSTOM_OPTIONAL), backend)
        for table in tables
    ]
    return cleaned(pd.concat(frames)) if frames else pd.DataFrame(columns=COLUMNS)


def custom_all_reduce(raw: pd.DataFrame, backend: str) -> pd.DataFrame:
    """Return raw rows of an engine's all-reduce in bytes and seconds.

    TensorRT-LLM's rows are of one kind and take 3 us at the least, which no eager launch does.
    """
    raw = raw[raw["allreduce_dtype"] == "bfloat16"]
    return _rows(raw, raw["op_name"], ~raw["kernel_source"].str.endswith("_eager"), backend)


def nccl_rows(gpu: str) -> pd.DataFrame:
    """Return NCCL's collectives of the newest version measured; launched back to back, no graph."""
    tables = wheel.kernel_tables(gpu, "comm", "nccl", op="nccl")
    if not tables:
        return pd.DataFrame(columns=COLUMNS)
    newest = max(tables, key=version_key)
    return cleaned(nccl(wheel.read_table(newest, _NCCL_REQUIRED, _NCCL_OPTIONAL)))


def nccl(raw: pd.DataFrame) -> pd.DataFrame:
    """Return raw NCCL rows in bytes and seconds; INT8 rows say nothing new and are left out."""
    raw = raw[raw["nccl_dtype"] == "half"]
    return _rows(raw, raw["op_name"].map(_NCCL_OPS), pd.Series(False, index=raw.index), "nccl")


def _rows(raw: pd.DataFrame, op: pd.Series, in_graph: pd.Series, source: str) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "op": op,
            "gpus": raw["num_gpus"],
            "message_bytes": raw["message_size"] * _ELEMENT_BYTES,
            "in_graph": in_graph,
            "seconds": raw["latency"] * 1e-3,
            "source_framework": source,
            "source_version": raw["version"],
            "kernel": raw["kernel_source"],
        }
    )


def version_key(table: wheel.KernelTable) -> list[int]:
    """Return the numbers of a table's version, so that 0.5.12 is newer than 0.5.6."""
    return [int(number) for number in re.findall(r"\d+", table.version)]


def cleaned(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows without failures and glitches, their seconds never falling with the bytes.

    Of rows for the same call the fastest holds; a glitch is a row that takes 1.25 times as long as
    some larger message. What still falls is averaged with its neighbours (logs).
    """
    key = ["op", "gpus", "in_graph"]
    rows = rows[rows["seconds"] > 0].sort_values([*key, "message_bytes", "seconds"])
    rows = rows.drop_duplicates([*key, "message_bytes"])
    parts = [part for _, part in rows.groupby(key)]
    kept = [monotone_rows(part[~is_glitch(part["seconds"].to_numpy())]) for part in parts]
    return pd.concat(kept, ignore_index=True) if kept else rows


def is_glitch(seconds: FloatArray) -> BoolArray:
    """Return which of the seconds, in order of size, exceed some later one by 1.25 times."""
    least_later = np.minimum.accumulate(seconds[::-1])[::-1]
    glitches: BoolArray = seconds > _GLITCH * least_later
    return glitches


def monotone_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows in order of size with seconds that never fall."""
    return rows.assign(seconds=np.exp(monotone(np.log(rows["seconds"].to_numpy()))))
