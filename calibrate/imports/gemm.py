"""Dense GEMM and activation quantisation: raw kernel tables to rows in our units and formats.

A row's seconds are those of one call in a CUDA graph, with the activations in BF16 outside: rows of
fp8, fp8_block and nvfp4 include the quantisation of the activations, which TensorRT-LLM's fp8 does
in torch operators (about 9 us). Weights `[n, k]`, activations `[m, k]`, result `[m, n]`.
"""

from __future__ import annotations

import pandas as pd

from tonnage.calibrate.imports import wheel
from tonnage.sim.domain import BadInputError
from tonnage.sim.model.formats import number_format

_REQUIRED = ("framework", "version", "kernel_source", "gemm_dtype", "m", "n", "k", "latency")
_OPTIONAL = ("device", "op_name")
_QUANTISE_REQUIRED = ("version", "op_name", "kernel_source", "m", "k", "quant_dtype", "latency")
_QUANTISE_OPTIONAL = ("device", "framework")
_MOE_REQUIRED = (
    *("moe_dtype", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts"),
    *("moe_tp_size", "moe_ep_size", "distribution", "latency"),
)
_MOE_OPTIONAL = ("framework", "version", "device", "op_name", "kernel_source")

# Their names to ours. TensorRT-LLM's "sq" is W8A8 (SmoothQuant); its weight-only INT4 is group 128.
_FORMATS = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "fp8": "fp8",
    "fp8_block": "fp8_block",
    "nvfp4": "nvfp4",
    "int4_wo": "int4_g128",
    "sq": "int8",
}
_NO_FORMAT_OF_OURS = {"int8_wo"}

# Products of at most 16 rows and 512 x 512 weights take 2 to 13 us in every table whose kernels are
# timed in a graph, and 150 to 350 us where the host's launches are timed (vLLM's fp8_block).
LAUNCH_BOUND_S = 30e-6
_SMALL_ROWS, _SMALL_WIDTH = 16, 512

COLUMNS = ("format", "m", "n", "k", "seconds", "source_framework", "source_version", "kernel")


def gemm_rows(gpu: str, backend: str) -> pd.DataFrame:
    """Return the GEMM rows of the current version of a backend on a GPU folder (`h200_sxm`).

    Columns: `COLUMNS` and `launch_bound`, true for all rows of a format whose table times the
    host. An empty frame where the package has no such table.
    """
    frames = [
        normalised(wheel.read_table(table, _REQUIRED, _OPTIONAL), backend)
        for table in _current(gpu, backend, "gemm", "gemm")
    ]
    return pd.concat(frames) if frames else normalised(pd.DataFrame(columns=_REQUIRED), backend)


def normalised(raw: pd.DataFrame, backend: str) -> pd.DataFrame:
    """Return raw GEMM rows in our formats and seconds, without impossible and doubled ones.

    Rows of no time at all are failed measurements. Of several rows for one product the median
    holds: they were found to differ by up to 1.2 times, and none of them is marked as the better.
    """
    unknown = sorted(set(raw["gemm_dtype"]) - set(_FORMATS) - _NO_FORMAT_OF_OURS)
    if unknown:
        raise BadInputError(f"gemm: gemm_dtype {', '.join(unknown)}: not a number format we know")
    kept = raw[(raw["latency"] > 0) & raw["gemm_dtype"].isin(list(_FORMATS))]
    frame = pd.DataFrame(
        {
            "format": kept["gemm_dtype"].map(_FORMATS),
            "m": kept["m"],
            "n": kept["n"],
            "k": kept["k"],
            "seconds": kept["latency"] * 1e-3,
            "source_framework": backend,
            "source_version": kept["version"],
            "kernel": kept["kernel_source"],
        }
    )
    key = ["format", "m", "n", "k"]
    if frame.duplicated(key).any():
        seconds = frame.groupby(key)["seconds"].transform("median")
        frame = frame.assign(seconds=seconds).drop_duplicates(key)
    bound = launch_bound_formats(frame)
    return frame.assign(launch_bound=frame["format"].isin(bound)).reset_index(drop=True)


def launch_bound_formats(frame: pd.DataFrame) -> list[str]:
    """Return the formats whose smallest products take longer than any kernel does."""
    small = frame[
        (frame["m"] <= _SMALL_ROWS) & (frame["n"] <= _SMALL_WIDTH) & (frame["k"] <= _SMALL_WIDTH)
    ]
    typical = small.groupby("format")["seconds"].median()
    return sorted(str(name) for name in typical[typical > LAUNCH_BOUND_S].index)


def quantise_rows(gpu: str, backend: str) -> pd.DataFrame:
    """Return the kernels that quantise activations `[m, k]` to FP8, with `op` and seconds.

    `op`: quantise (with a given scale), or scale (finding the scale, over and above quantising; its
    rows were got by subtraction, and those of no time or less are dropped).
    """
    names = {"scale_matrix": "quantise", "compute_scale": "scale"}
    frames = []
    for op in ("scale_matrix", "computescale"):
        for table in _current(gpu, backend, "quantize", op):
            raw = wheel.read_table(table, _QUANTISE_REQUIRED, _QUANTISE_OPTIONAL)
            raw = raw[(raw["latency"] > 0) & (raw["quant_dtype"] == "fp8")]
            frames.append(
                pd.DataFrame(
                    {
                        "op": raw["op_name"].map(names),
                        "format": raw["quant_dtype"],
                        "m": raw["m"],
                        "k": raw["k"],
                        "seconds": raw["latency"] * 1e-3,
                        "source_framework": backend,
                        "source_version": raw["version"],
                        "kernel": raw["kernel_source"],
                    }
                )
            )
    if not frames:
        return pd.DataFrame(columns=["op", *(name for name in COLUMNS if name != "n")])
    return pd.concat(frames).drop_duplicates(["op", "m", "k"]).reset_index(drop=True)


def int4_expert_bytes_per_s(gpu: str) -> float | None:
    """Return the rate at which INT4 expert weights are streamed and decoded, None without rows.

    Of unsplit experts under balanced routing (every one of `tokens x top_k` choices another expert
    until all are touched), at 16 to 256 tokens: between launch-bound and compute-bound. The group
    is not recorded; 128 is assumed. SGLang's rows serve every engine.
    """
    backend = "sglang"
    tables = _current(gpu, backend, "moe", "moe")
    if not tables:
        return None
    raw = wheel.read_table(tables[0], _MOE_REQUIRED, _MOE_OPTIONAL)
    rows = raw[
        (raw["moe_dtype"] == "int4_wo")
        & (raw["distribution"] == "balanced")
        & (raw["moe_tp_size"] == 1)
        & (raw["moe_ep_size"] == 1)
        & raw["num_tokens"].between(16, 256)
        & (raw["latency"] > 0)
    ]
    if rows.empty:
        return None
    touched = (rows["num_tokens"] * rows["topk"]).clip(upper=rows["num_experts"])
    weights = 3.0 * rows["hidden_size"] * rows["inter_size"]
    weight_bytes = weights * number_format("int4_g128").matrix_bytes(128, 1280) / (128 * 1280)
    return float((touched * weight_bytes / (rows["latency"] * 1e-3)).median())


def _current(gpu: str, backend: str, family: str, op: str) -> tuple[wheel.KernelTable, ...]:
    version = wheel.current_version(gpu, backend)
    return wheel.kernel_tables(gpu, family, backend, version, op) if version else ()
