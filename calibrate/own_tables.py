"""Rows measured on this machine as the tables of a profile.

Tables that the operator models read have the columns of imported ones. Beside them stand
`kv_write`, `kv_copy`, `page_tags`, `small_ops` and `launch`, whose rows are read as they are.
Collectives are there where more ranks than one were measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from tonnage.calibrate.between_ranks import exchange_tables
from tonnage.calibrate.grid import EXPERTS, KV_SUFFIX, PRODUCTS, SMALL
from tonnage.calibrate.imports.attention_rows import DECODE_COLUMNS, PREFILL_COLUMNS
from tonnage.calibrate.imports.gemm import COLUMNS as GEMM_COLUMNS
from tonnage.calibrate.moe_rows import COLUMNS as MOE_COLUMNS
from tonnage.sim.cost.models.attention import MLA_HEAD_DIM
from tonnage.sim.cost.models.moe_form import BALANCED, INT4

Row = Mapping[str, Any]
Table = list[dict[str, Any]]

FRAMEWORK = "tonnage"
# The first format of a kernel names its rows; the models know which formats share them.
_PRODUCT_FORMATS = {kernel: name for name, (kernel, _) in reversed(PRODUCTS.items())}
_QUANTISERS = {kernel: quantiser for kernel, quantiser in PRODUCTS.values() if quantiser}
_EXPERT_FORMATS = {kernel: name for name, kernel in reversed(EXPERTS.items())}
_KV_FORMATS = {suffix: name for name, suffix in KV_SUFFIX.items()}
_COLUMNS = {
    "gemm": list(GEMM_COLUMNS),
    "quantise": ["op", "format", "m", "k", "seconds", "source_framework", "kernel"],
    "moe": list(MOE_COLUMNS),
    "attention_decode": list(DECODE_COLUMNS),
    "attention_prefill": list(PREFILL_COLUMNS),
    "mla_bmm": ["format", "heads", "tokens", "seconds", "source_framework", "kernel"],
    "kv_write": ["kind", "kv_format", "width", "tokens", "seconds"],
    "kv_copy": ["source_format", "target_format", "width", "tokens", "seconds"],
    "page_tags": ["requests", "pages", "seconds"],
    "small_ops": ["op", "width", "rows", "seconds"],
    "launch": ["in_graph", "seconds"],
}


def tables_of(rows: Iterable[Row], version: str) -> dict[str, pd.DataFrame]:
    """Return tables by name; those without a row are absent. `version`: of the kernels."""
    found: dict[str, Table] = {name: [] for name in _COLUMNS}
    kept = list(rows)
    quantised = {_quantised_key(row): _seconds(row) for row in kept}
    for row in kept:
        for start, add in _ADDERS.items():
            if row["kernel"].startswith(start):
                add(found, row, quantised)
                break
    common = {"source_framework": FRAMEWORK, "source_version": version}
    own = {
        name: _once(pd.DataFrame(one).assign(**common)[_COLUMNS[name]])
        for name, one in found.items()
        if one
    }
    return own | exchange_tables(kept)


def _once(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table with one row per key, the first: those of the models come first.

    Latent heads of other widths have the same key, as the models know one width.
    """
    told = ("seconds", "source", "kernel", "content", "source_framework", "source_version")
    keys = [name for name in table.columns if name not in told]
    return table.drop_duplicates(keys, ignore_index=True)


def random_experts(rows: Iterable[Row]) -> pd.DataFrame:
    """Return the rows of experts whose tokens were routed at random, as rows of `moe`."""
    made = [_experts(row) for row in rows if _is_experts(row) and not row["axes"]["balanced"]]
    return pd.DataFrame(made)


def _seconds(row: Row) -> float:
    return float(row["timing"]["seconds_median"])


def _quantised_key(row: Row) -> tuple[object, ...]:
    return row["kernel"], row["axes"].get("m"), row["axes"].get("k")


def _is_experts(row: Row) -> bool:
    return str(row["kernel"]).startswith("experts_")


Quantised = Mapping[tuple[object, ...], float]
Adder = Callable[[dict[str, Table], Row, Quantised], None]


def _gemm(found: dict[str, Table], row: Row, quantised: Quantised) -> None:
    """Add a product; where its activations are quantised first, that is in its seconds."""
    name = _PRODUCT_FORMATS.get(row["kernel"])
    axes, seconds = row["axes"], _seconds(row)
    quantiser = _QUANTISERS.get(row["kernel"])
    if quantiser is not None:
        seconds += quantised.get((quantiser, axes["m"], axes["k"]), 0.0)
    if name is not None:
        found["gemm"].append({"format": name, **axes, "seconds": seconds, "kernel": row["kernel"]})


def _quantise(found: dict[str, Table], row: Row, quantised: Quantised) -> None:
    if row["kernel"] != "quantise_fp8_row":
        return  # the model knows one way to quantise
    made = {"op": "quantise", "format": "fp8", **row["axes"], "seconds": _seconds(row)}
    found["quantise"].append({**made, "kernel": row["kernel"]})


def _moe(found: dict[str, Table], row: Row, quantised: Quantised) -> None:
    if row["axes"]["balanced"]:
        found["moe"].append(_experts(row))


def _experts(row: Row) -> dict[str, Any]:
    axes = row["axes"]
    name = _EXPERT_FORMATS[row["kernel"]]
    return {
        # the model has one table for all groups of INT4
        "format": INT4 if name.startswith("int4_g") else name,
        **{key: axes[key] for key in ("hidden", "experts", "top_k", "tokens")},
        "inter": axes["inter"] * axes["ways"],
        "tp": axes["ways"],
        "ep": 1,
        "routing": BALANCED,
        "seconds": _seconds(row),
        "source": "measured",
        "kernel": row["kernel"],
    }


def _attention(row: Row) -> dict[str, Any]:
    axes, kernel = row["axes"], str(row["kernel"])
    is_latent = kernel.startswith("mla")
    return {
        "kind": "mla" if is_latent else "gqa",
        "kv_format": _KV_FORMATS[kernel.rpartition("_")[2]],
        "heads": axes["heads"],
        "kv_heads": 1 if is_latent else axes["kv_heads"],
        "head_dim": MLA_HEAD_DIM if is_latent else axes["head_dim"],
        "window_tokens": np.nan,
        "projection_format": "none",
        "hidden_size": np.nan,
        "batch": axes["batch"],
        "seconds": _seconds(row),
        "content": "kernel",
        "kernel": kernel.rpartition("_")[0],
    }


def _decode(found: dict[str, Table], row: Row, quantised: Quantised) -> None:
    made = {**_attention(row), "context_tokens": row["axes"]["context_tokens"]}
    found["attention_decode"].append(made)


def _gqa_prefill(found: dict[str, Table], row: Row, quantised: Quantised) -> None:
    axes = row["axes"]
    made = {"new_tokens": axes["new_tokens"], "past_tokens": axes["prefix_tokens"]}
    found["attention_prefill"].append({**_attention(row), **made})


def _mla_prefill(found: dict[str, Table], row: Row, quantised: Quantised) -> None:
    """Add a prompt without a past under every KV format: it reads no cache."""
    axes = row["axes"]
    made = {"new_tokens": axes["new_tokens"], "past_tokens": axes["prefix_tokens"]}
    for suffix in _KV_FORMATS:
        named = {**row, "kernel": f"mla_prefill_{suffix}"}
        found["attention_prefill"].append({**_attention(named), **made})


def _latent(found: dict[str, Table], row: Row, quantised: Quantised) -> None:
    axes = row["axes"]
    made = {"format": "bf16", "heads": axes["heads"], "tokens": axes["rows"]}
    found["mla_bmm"].append({**made, "seconds": _seconds(row), "kernel": row["kernel"]})


def _write(found: dict[str, Table], row: Row, quantised: Quantised) -> None:
    axes = row["axes"]
    is_latent = row["kernel"].startswith("mla")
    width = MLA_HEAD_DIM if is_latent else 2 * axes["kv_heads"] * axes["head_dim"]
    made = {"kind": "mla" if is_latent else "gqa", "kv_format": "fp8_e4m3", "width": width}
    found["kv_write"].append({**made, "tokens": axes["tokens"], "seconds": _seconds(row)})


def _copy(found: dict[str, Table], row: Row, quantised: Quantised) -> None:
    axes = row["axes"]
    target = _KV_FORMATS[str(row["kernel"]).rpartition("_")[2]]
    made = {"source_format": "bf16", "target_format": target, "width": axes["row"]}
    tokens = axes["requests"] * axes["tokens"]
    found["kv_copy"].append({**made, "tokens": tokens, "seconds": _seconds(row)})


def _tags(found: dict[str, Table], row: Row, quantised: Quantised) -> None:
    axes = row["axes"]
    made = {"requests": axes["requests"], "pages": axes["pages"], "seconds": _seconds(row)}
    found["page_tags"].append(made)


def _launch(found: dict[str, Table], row: Row, quantised: Quantised) -> None:
    found["launch"].append({"in_graph": bool(row["graph"]), "seconds": _seconds(row)})


def _small(found: dict[str, Table], row: Row, quantised: Quantised) -> None:
    axes = row["axes"]
    made = {"op": row["kernel"], "width": axes["width"], "rows": axes["rows"]}
    found["small_ops"].append({**made, "seconds": _seconds(row)})


_ADDERS: dict[str, Adder] = {
    "gemm_": _gemm,
    "quantise_": _quantise,
    "experts_": _moe,
    "gqa_decode": _decode,
    "mla_decode": _decode,
    "gqa_prefill": _gqa_prefill,
    "mla_prefill": _mla_prefill,
    "latent_products": _latent,
    "gqa_write": _write,
    "mla_write": _write,
    "kv_copy": _copy,
    "tag_check": _tags,
    "noop": _launch,
    **dict.fromkeys(SMALL, _small),
}
