"""Which rows of routed experts stand for an engine: its own, cleaned and thinned, and a few lent.

What is missing in the engine's current version comes from an older one or another engine, scaled
by the ratio of the two on experts that both have, layout by layout, and is marked `scaled`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, lru_cache

import numpy as np
import pandas as pd

from tonnage.calibrate.imports.moe import TRTLLM_GEN_KERNEL, moe_rows
from tonnage.scenarios.catalogue import load_model, model_names
from tonnage.sim.cost.models.grid import monotone
from tonnage.sim.cost.models.moe_form import INT4
from tonnage.sim.domain import FloatArray, MoeMlp

FAMILY = ["hidden", "inter", "experts", "top_k"]
LAYOUT = ["tp", "ep"]
CURVE = ["format", "kernel", *FAMILY, *LAYOUT, "routing"]
COLUMNS = [
    *("format", *FAMILY, *LAYOUT, "routing", "tokens", "seconds"),
    *("source", "source_framework", "source_version", "kernel"),
]

TOKEN_KNOTS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# Experts of no catalogue model only lend their residuals: fewer layouts and knots of them do.
_SPREAD_KNOTS = (1, 4, 16, 32, 64, 256, 1024, 4096, 16384)
_SPREAD_TP, _SPREAD_EP = (1, 2, 8), (1, 4, 8, 32)
_MOST_TP, _MOST_EP = 16, 128

# Formats of which no engine's current version has more than one shape, and whose rows are lent.
# SGLang 0.5.10 has ten shapes of INT4 on H100 and H200; on Blackwell nobody has a second one.
LENT_FORMATS = (INT4,)
_LENDERS = {"sglang": ("sglang", "0.5.10"), "vllm": ("sglang", "0.5.10")}

# The kernels made for Blackwell (trtllm-gen), which SGLang calls through FlashInfer, are the ones
# that TensorRT-LLM deploys there too; its own tables hold CUTLASS and DeepGEMM for these formats.
# vLLM's MXFP4 experts are timed with BF16 activations alone, where MXFP8 ones are deployed.
_BLACKWELL = ("b200_sxm", "b300_sxm", "gb200", "gb300")
_GEN_KERNEL = "sglang_flashinfer_trtllm_moe"
_GEN_FORMATS = {"trtllm": ("fp8_block", "mxfp4", "nvfp4"), "vllm": ("mxfp4",)}

_SIGNIFICANT_DIGITS = 4


@cache
def catalogue_families() -> frozenset[tuple[int, int, int, int]]:
    """Return (hidden, inter, experts, top_k) of the routed experts of every catalogue model."""
    found = set()
    for name in model_names():
        model = load_model(name)
        for layer in model.layers:
            if isinstance(layer.mlp, MoeMlp):
                mlp = layer.mlp
                found.add((model.hidden_size, mlp.intermediate_size, mlp.experts, mlp.top_k))
    return frozenset(found)


def engine_rows(gpu: str, engine: str) -> pd.DataFrame:
    """Return the rows of the kernels that an engine runs, in order, with `source` imported.

    They are its own, but for formats whose kernels for Blackwell are timed under SGLang alone.
    """
    own = usable(moe_rows(gpu, engine))
    if gpu not in _BLACKWELL or engine not in _GEN_FORMATS:
        return own
    has_own = set(own.loc[own["kernel"] == TRTLLM_GEN_KERNEL, "format"])
    wanted = [name for name in _GEN_FORMATS[engine] if name not in has_own]
    elsewhere = usable(moe_rows(gpu, "sglang"))
    lent = elsewhere[(elsewhere["kernel"] == _GEN_KERNEL) & elsewhere["format"].isin(wanted)]
    kept = own[~own["format"].isin(set(lent["format"]))]
    joined = pd.concat([kept, lent], ignore_index=True)
    return joined.sort_values([*CURVE, "tokens"], ignore_index=True)


def usable(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows without a flag, sorted by curve and tokens, each curve never falling."""
    kept = rows[rows["flag"] == ""].sort_values([*CURVE, "tokens"], ignore_index=True)
    return kept.assign(seconds=never_falling(kept), measured_s=kept["seconds"], source="imported")


def never_falling(rows: pd.DataFrame) -> FloatArray:
    """Return the seconds of sorted rows, made non-decreasing in tokens, curve by curve."""
    result = np.empty(len(rows))
    logs = np.log(rows["seconds"].to_numpy(dtype=np.float64))
    for positions in rows.groupby(CURVE, sort=False).indices.values():
        result[positions] = np.exp(monotone(logs[positions]))
    return result


# --- rows from elsewhere ------------------------------------------------------------------------


def lent_rows(own: pd.DataFrame, gpu: str, engine: str) -> pd.DataFrame:
    """Return rows of `LENT_FORMATS` for the experts that `own` lacks, scaled to the engine."""
    lender = lender_rows(gpu, engine)
    parts = [
        scaled_rows(own[own["format"] == name], lender[lender["format"] == name])
        for name in LENT_FORMATS
    ]
    return _joined(parts, own)


@lru_cache(maxsize=1)
def lender_rows(gpu: str, engine: str) -> pd.DataFrame:
    """Return all rows of the version or engine that lends to an engine on a GPU folder.

    TensorRT-LLM has no INT4 experts: what SGLang has, its own and lent ones, stands in for them.
    """
    if engine in _LENDERS:
        return usable(moe_rows(gpu, *_LENDERS[engine]))
    own = engine_rows(gpu, "sglang")
    older = usable(moe_rows(gpu, *_LENDERS["sglang"]))
    lent = [
        scaled_rows(own[own["format"] == name], older[older["format"] == name])
        for name in LENT_FORMATS
    ]
    return _joined([own, *lent], own)


def _joined(parts: Iterable[pd.DataFrame], like: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of parts; empty ones, whose columns have no types, are left out."""
    filled = [part for part in parts if len(part)]
    return pd.concat(filled, ignore_index=True) if filled else like.head(0)


def scaled_rows(own: pd.DataFrame, lender: pd.DataFrame) -> pd.DataFrame:
    """Return the lender's rows of experts that `own` lacks, times the ratio on common ones.

    The ratio is that of the same layout, routing and tokens (median over the common experts); rows
    whose layout has none are left out. Where `own` has no rows at all the ratio is one.
    """
    held = set(map(tuple, own[FAMILY].drop_duplicates().to_numpy().tolist()))
    is_new = [
        one not in held for one in map(tuple, lender[FAMILY].to_numpy(dtype=np.int64).tolist())
    ]
    new = lender[is_new].assign(source="scaled")
    if own.empty or new.empty:
        return new
    new = new.assign(kernel=own["kernel"].mode().iloc[0])
    place = [*LAYOUT, "routing", "tokens"]
    common = own.merge(lender, on=[*FAMILY, *place], suffixes=("", "_lent"))
    common = common.assign(ratio=common["seconds"] / common["seconds_lent"])
    ratio = common.groupby(place, as_index=False)["ratio"].median()
    scaled = new.merge(ratio, on=place)
    scaled = scaled.assign(seconds=scaled["seconds"] * scaled["ratio"]).drop(columns="ratio")
    scaled = scaled.sort_values([*CURVE, "tokens"], ignore_index=True)
    return scaled.assign(seconds=never_falling(scaled), measured_s=scaled["seconds"])


# --- thinning -----------------------------------------------------------------------------------


def thinned(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that ship: catalogue experts in full layouts, a spread of the others."""
    families = map(tuple, rows[FAMILY].to_numpy(dtype=np.int64).tolist())
    is_known = np.array([one in catalogue_families() for one in families], dtype=bool)
    is_wide = (rows["tp"] <= _MOST_TP) & (rows["ep"] <= _MOST_EP)
    full = is_known & is_wide & rows["tokens"].isin(TOKEN_KNOTS)
    spread = rows["tp"].isin(_SPREAD_TP) & rows["ep"].isin(_SPREAD_EP)
    kept = rows[full | (~is_known & spread & rows["tokens"].isin(_SPREAD_KNOTS))]
    ordered = kept.sort_values([*CURVE, "tokens"], ignore_index=True)[COLUMNS]
    return ordered.assign(seconds=rounded(ordered["seconds"]))


def rounded(seconds: Iterable[float]) -> list[float]:
    """Return numbers to four significant digits: tables compress, and no row is that exact."""
    return [float(f"{value:.{_SIGNIFICANT_DIGITS}g}") for value in seconds]
