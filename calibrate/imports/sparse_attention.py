"""DeepSeek sparse attention (DSA) from aiconfigurator-core: modules of SGLang to normalised rows.

A row is one whole attention module: projections, norms, rope, KV write, indexer where the layer has
one, top-k and the sparse kernel; no all-reduce. Two kinds: layers that own an indexer (`dsa_full`,
op `..._module`) and layers that take another layer's selection (`dsa_shared`, `..._skip_indexer`).
Which of them a row is says its op, not its model: on Hopper GLM-5.2 rows are all shared ones.

Refused: batches of 512 and more (eager, 2-6 times what a captured graph takes); prefill rows that
the host bounds; prefill of shared layers behind a prefix where a long one costs much more than none
(on the H200 alone, 25-50 %, and noisy: elsewhere it is flat). The modules of vLLM and, on Hopper,
TensorRT-LLM are launch-bound (140-240 us at an empty context against 50-90): SGLang's stand for
them.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from tonnage.calibrate.imports.attention import MODULE_COLUMNS
from tonnage.calibrate.imports.attention_rows import (
    DECODE_COLUMNS,
    IDENTITY,
    PREFILL_COLUMNS,
    PROJECTION_FORMATS,
    attention_table,
    base_rows,
    finished,
    joined,
    named,
)
from tonnage.calibrate.imports.wheel import read_table
from tonnage.sim.cost.models.attention import MLA_HEAD_DIM

_HIDDEN_SIZES = {"GlmMoeDsaForCausalLM": 6144, "DeepseekV32ForCausalLM": 7168}
_DECODE_KINDS = {
    "dsa_generation_module": "dsa_full",
    "dsa_generation_module_skip_indexer": "dsa_shared",
}
_PREFILL_KINDS = {
    "dsa_context_module": "dsa_full",
    "dsa_context_module_skip_indexer": "dsa_shared",
}
_FIRST_EAGER_BATCH = 512
_HOST_TOKENS = 256  # so few tokens take no GPU as long as the host takes to launch a module
_HOST_MARGIN = 1.3
_LAUNCHES_GROW = 100_000
_FLAT_PREFIX = 256
_FAR_PREFIX = 1024
_NO_PREFIX = 1  # 2048 tokens take the sparse path behind one token only
_MOST_GROWTH = 1.15


def dsa_decode(raw: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of a dsa_generation_module table; `step` is the length of the KV."""
    rows = _module_rows(raw, _DECODE_KINDS)
    rows["context_tokens"] = raw["step"].astype(np.int64)
    return finished(rows[rows["batch"] < _FIRST_EAGER_BATCH], DECODE_COLUMNS)


def dsa_prefill(raw: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of a dsa_context_module table that the GPU and not the host bounds.

    `is_dense` in `kernel`: up to 2048 tokens, past ones included, SGLang runs dense attention.
    """
    rows = _module_rows(raw, _PREFILL_KINDS)
    rows["new_tokens"] = raw["isl"].astype(np.int64)
    rows["past_tokens"] = raw["step"].astype(np.int64)
    clean = finished(rows, PREFILL_COLUMNS)
    return _without_scattered(_without_host_bound(clean))


def is_dense(rows: pd.DataFrame) -> pd.Series[bool]:
    """Return which prefill rows ran dense attention."""
    return rows["kernel"].str.contains("dense_mha")


def _module_rows(raw: pd.DataFrame, kinds: dict[str, str]) -> pd.DataFrame:
    rows = base_rows(raw, "", "module")
    rows["kind"] = named(raw["op_name"], kinds, "op_name")
    rows["head_dim"] = MLA_HEAD_DIM
    rows["projection_format"] = named(raw["gemm_type"], PROJECTION_FORMATS, "gemm_type")
    sizes = {name: str(size) for name, size in _HIDDEN_SIZES.items()}
    rows["hidden_size"] = named(raw["architecture"], sizes, "architecture").astype(np.int64)
    return rows


def _without_host_bound(rows: pd.DataFrame) -> pd.DataFrame:
    """Drop rows that are not clearly above what the host takes to launch the module."""
    keys = [*IDENTITY, "is_dense", "is_far"]
    # Behind a very long past there is more to launch.
    far = rows["past_tokens"] > _LAUNCHES_GROW
    flagged = rows.assign(is_dense=is_dense(rows), is_far=far)
    small = flagged["seconds"].where(flagged["batch"] * flagged["new_tokens"] <= _HOST_TOKENS)
    floor = small.groupby([flagged[key] for key in keys], dropna=False).transform("median")
    # A family without small calls keeps its rows: nothing says that they are host-bound.
    return rows[~(rows["seconds"] < _HOST_MARGIN * floor)]


def _without_scattered(rows: pd.DataFrame) -> pd.DataFrame:
    """Keep shared shapes without a prefix where their time jumps behind a long one.

    On the H200 several sequences jump behind 4 tokens already, up to 2.8 times.
    """
    parts = []
    for _, shape in rows.groupby(list(IDENTITY), dropna=False):
        is_shared = shape["kind"].iloc[0] == "dsa_shared"
        drop = is_shared and _is_scattered(shape)
        parts.append(shape[shape["past_tokens"] <= _NO_PREFIX] if drop else shape)
    return pd.concat(parts) if parts else rows


def _is_scattered(shape: pd.DataFrame) -> bool:
    """Return whether the longest chunk slows down behind a prefix.

    A query reads its 2048 slots whatever the prefix: H100 and Blackwell gain at most 6 %.
    """
    one = shape[(shape["batch"] == 1) & ~is_dense(shape)]
    longest = one[one["new_tokens"] == one["new_tokens"].max()]
    flat = longest[longest["past_tokens"] <= _FLAT_PREFIX]["seconds"].median()
    behind = longest[longest["past_tokens"] >= _FAR_PREFIX]["seconds"].median()
    return bool(behind > _MOST_GROWTH * flat)


def decode_rows(gpu: str) -> pd.DataFrame:
    """Return the DSA decode rows of a GPU: SGLang's, for every engine."""
    table = attention_table(gpu, "sparse_attention", "sglang", "dsa_generation_module")
    if table is None:
        return joined([], DECODE_COLUMNS)
    return dsa_decode(read_table(table, MODULE_COLUMNS))


def prefill_rows(gpu: str) -> pd.DataFrame:
    """Return the DSA prefill rows of a GPU: SGLang's, for every engine."""
    table = attention_table(gpu, "sparse_attention", "sglang", "dsa_context_module")
    if table is None:
        return joined([], PREFILL_COLUMNS)
    return dsa_prefill(read_table(table, MODULE_COLUMNS))
