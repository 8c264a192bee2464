"""Routed experts: raw kernel tables to rows in our units and formats.

A row's seconds are those of the experts of one rank: the rank with the most work where routing is
skewed. `tokens` are those of all ranks together, `inter` is the full width of an expert, of which
a rank holds ``1 / tp`` (the tables keep `moe_tp_size` beside the full size). At ep 1 a row holds
the selection of the top k too, and on SGLang's FP8 and BF16 paths three copies of small tensors,
but not the router's product; activations come and go in BF16, so that quantising them is inside.

Rows that do not measure what their label says are kept with the reason in `flag` (`FLAGS`); a fit
drops them. The group size of INT4 rows is not recorded: their format is `int4`.
"""

from __future__ import annotations

import pandas as pd

from tonnage.calibrate.imports import wheel
from tonnage.sim.cost.models.moe_form import INT4, MEASURED_ROUTINGS
from tonnage.sim.domain import BadInputError

_REQUIRED = (
    *("kernel_source", "moe_dtype", "num_tokens", "hidden_size", "inter_size", "topk"),
    *("num_experts", "moe_tp_size", "moe_ep_size", "distribution", "latency"),
)
_OPTIONAL = ("framework", "version", "device", "op_name")

_FORMATS = {
    "bfloat16": "bf16",
    "fp8": "fp8",
    "fp8_block": "fp8_block",
    "int4_wo": INT4,
    "w4a16_mxfp4": "mxfp4",
    "w4a8_mxfp4_mxfp8": "mxfp4",
    "nvfp4": "nvfp4",
}
# MXFP4 with BF16 activations; where a GPU has rows with MXFP8 activations, engines run those.
_WIDE_ACTIVATIONS, _NARROW_ACTIVATIONS = "w4a16_mxfp4", "w4a8_mxfp4_mxfp8"

KEY = ("format", "hidden", "inter", "experts", "top_k", "tp", "ep", "routing", "tokens")
COLUMNS = (*KEY, "seconds", "source_framework", "source_version", "kernel", "flag")

# flag -> what is wrong with such rows.
FLAGS = {
    "grouped_top_k": "the router's groups concentrate the rows: balanced ones are not balanced",
    "slow_kernel": "a kernel that no deployment would keep, several times slower than its peers",
    "two_matrices": "experts without a gate: two matrices, where all others have three",
    "other_backend": "a second kernel for the same experts, behind a setting",
}

# DeepSeek-V3's experts. SGLang 0.5.14 and vLLM 0.24 put its grouped top-k (4 of 8 groups) before
# the experts; made-up router scores then fall on few groups. With 32 tokens "balanced" touches
# about half of 256 experts (1.39 ms against 2.35 ms of GLM-5's smaller experts, H200, FP8 blocks,
# one rank); of 64 ranks the busiest takes 4.7 times as long at 16,384 tokens. SGLang 0.5.10 and
# TensorRT-LLM show none of it.
_GROUPED_EXPERTS = (7168, 2048, 256, 8)
_GROUPED_TOP_K = {("sglang", "0.5.14"), ("vllm", "0.24.0"), ("vllm", "0.22.0")}

# Nemotron-3's experts (squared ReLU). TensorRT-LLM's tables name the kernel; others do not.
_NO_GATE = {
    (1024, 2688, 512, 22),
    (2048, 5120, 512, 22),
    (2688, 1856, 128, 6),
    (4096, 2688, 512, 22),
    (8192, 5120, 512, 22),
}

# vLLM 0.24's default for per-tensor FP8 on Hopper takes 3 to 6 times as long as its own FP8 blocks
# from 16 to 192 tokens, and 4 to 5.7 times as long as TensorRT-LLM's FP8 (medians of layouts).
_SLOW_FP8_KERNEL = "vllm_modeloptfp8moe_flashinfer_cutlass_flashinferexperts"
# INT4 of vLLM 0.19 is 2.4 to 4 times slower than SGLang's, where 0.24 is level with it.
_SLOW_INT4 = ("vllm", "0.19.0")

# TensorRT-LLM's NVFP4 on B200 and GB200 is timed on two back ends. Deployments take kernels made
# for Blackwell (trtllm-gen): CUTLASS at 4 tokens on four ranks makes 9.0 ms of DeepSeek's 58 layers
# alone, where whole decode steps of DeepSeek-V3 were measured at 7.9 ms (serving runs of
# TensorRT-LLM 1.2.0rc6 on B200).
TRTLLM_GEN_KERNEL = "moe_torch_flow_min_latency"
_OTHER_BACKEND = "moe_torch_flow_cutlass"


def moe_rows(gpu: str, backend: str, version: str | None = None) -> pd.DataFrame:
    """Return the rows of a backend on a GPU folder (`h200_sxm`), `COLUMNS`, flagged ones too.

    `version`: default the current one. An empty frame where the package has no such table.
    """
    wanted = version or wheel.current_version(gpu, backend)
    frames = [
        normalised(wheel.read_table(table, _REQUIRED, _OPTIONAL), backend, table.version)
        for table in wheel.kernel_tables(gpu, "moe", backend, wanted, "moe")
    ]
    return pd.concat(frames) if frames else pd.DataFrame(columns=COLUMNS)


def normalised(raw: pd.DataFrame, backend: str, version: str) -> pd.DataFrame:
    """Return raw rows in our formats and seconds, sorted, one per `KEY` and kernel.

    Rows of no time at all are failed measurements. Of several rows with one key (8,505 keys of
    SGLang 0.5.10 on H200, up to 2.0 times apart; most keys of 0.5.14 on B300, up to 1.55 times;
    1.01 times in the median) the median holds: none of them is marked as the better. An unknown
    format or routing is an error.
    """
    _refuse_unknown(raw, "moe_dtype", set(_FORMATS))
    _refuse_unknown(raw, "distribution", set(MEASURED_ROUTINGS))
    kept = raw[(raw["latency"] > 0) & ~_has_narrower(raw)]
    rows = pd.DataFrame(
        {
            "format": kept["moe_dtype"].map(_FORMATS),
            "hidden": kept["hidden_size"],
            "inter": kept["inter_size"],
            "experts": kept["num_experts"],
            "top_k": kept["topk"],
            "tp": kept["moe_tp_size"],
            "ep": kept["moe_ep_size"],
            "routing": kept["distribution"],
            "tokens": kept["num_tokens"],
            "seconds": kept["latency"] / 1e3,
            "kernel": kept["kernel_source"],
        }
    )
    rows = rows.groupby([*KEY, "kernel"])["seconds"].median().reset_index()
    rows = rows.assign(source_framework=backend, source_version=version)
    return rows.assign(flag=_flags(rows, backend, version))[list(COLUMNS)]


def _has_narrower(raw: pd.DataFrame) -> pd.Series[bool]:
    """Tell which MXFP4 rows with BF16 activations are there with MXFP8 ones too."""
    narrow = set(raw.loc[raw["moe_dtype"] == _NARROW_ACTIVATIONS, "hidden_size"])
    return (raw["moe_dtype"] == _WIDE_ACTIVATIONS) & raw["hidden_size"].isin(narrow)


def _refuse_unknown(raw: pd.DataFrame, column: str, known: set[str]) -> None:
    unknown = sorted(set(raw[column]) - known)
    if unknown:
        listed = ", ".join(sorted(known))
        raise BadInputError(f"moe: {column} {', '.join(unknown)}: not one of {listed}")


def _flags(rows: pd.DataFrame, backend: str, version: str) -> list[str]:
    """Return what is wrong with each row, nothing with most."""
    experts = zip(rows["hidden"], rows["inter"], rows["experts"], rows["top_k"], strict=True)
    kinds = zip(rows["format"], rows["kernel"], strict=True)
    is_grouped = (backend, version) in _GROUPED_TOP_K
    others = (_OTHER_BACKEND,) if (rows["kernel"] == TRTLLM_GEN_KERNEL).any() else ()
    return [
        "two_matrices"
        if sizes in _NO_GATE
        else "grouped_top_k"
        if is_grouped and sizes == _GROUPED_EXPERTS
        else "other_backend"
        if kernel in others and weight_format == "nvfp4"
        else "slow_kernel"
        if _is_slow(weight_format, kernel, (backend, version))
        else ""
        for sizes, (weight_format, kernel) in zip(experts, kinds, strict=True)
    ]


def _is_slow(weight_format: str, kernel: str, source: tuple[str, str]) -> bool:
    return kernel == _SLOW_FP8_KERNEL or (weight_format == INT4 and source == _SLOW_INT4)
