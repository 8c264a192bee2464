"""Dispatch and combine of expert parallelism: raw tables to rows in seconds, by tokens of one rank.

DeepEP's own benchmark, run within a node under SGLang, times the kernels: 9 to 15 us at one token.
vLLM's and TensorRT-LLM's tables of the same library time the host's launches too (45 us and more,
255 us for a normal dispatch); they are read and flagged, and stand for nothing.
"""

from __future__ import annotations

import pandas as pd

from tonnage.calibrate.imports import wheel
from tonnage.calibrate.imports.comm import monotone_rows, version_key

_SHAPE = ("version", "kernel_source", "node_num", "hidden_size", "num_token", "num_topk")
_LL_REQUIRED = (*_SHAPE, "num_experts", "combine_avg_t_us", "dispatch_avg_t_us")
_LL_OPTIONAL = (
    *("framework", "device", "op_name", "combine_bandwidth_gbps", "dispatch_bandwidth_gbps"),
)
_NORMAL_REQUIRED = (
    *(*_SHAPE, "num_experts", "dispatch_sms", "dispatch_transmit_us", "dispatch_notify_us"),
    *("combine_sms", "combine_transmit_us", "combine_notify_us"),
)
_NORMAL_OPTIONAL = ("framework", "device", "op_name")
_A2A_REQUIRED = (
    *("version", "kernel_source", "comm_backend", "phase", "comm_dtype", "ep_size", "node_num"),
    *("hidden_size", "topk", "num_experts", "num_tokens", "latency"),
)
_A2A_OPTIONAL = ("framework", "device", "op_name", "sms", "transmit_us", "notify_us")

_DEEPEP_SMS = 20  # DeepEP's default number of SMs for its normal kernels
# Fewer were measured for Mixtral-like models, with one or two experts to a rank.
_LEAST_EXPERTS = 128
LAUNCH_BOUND_S = 40e-6

COLUMNS = (
    *("op", "mode", "payload", "gpus", "hidden", "top_k", "experts", "tokens", "seconds"),
    *("source_framework", "source_version", "kernel"),
)
_NAMES = {
    "hidden_size": "hidden",
    "num_topk": "top_k",
    "topk": "top_k",
    "num_experts": "experts",
    "num_token": "tokens",
    "num_tokens": "tokens",
    "version": "source_version",
    "kernel_source": "kernel",
}


def expert_rows(gpu: str) -> pd.DataFrame:
    """Return DeepEP's dispatch (FP8) and combine (BF16) among the GPUs of a node.

    Modes: low_latency (captured decode) and normal (prefill, 20 SMs).
    """
    gpus = int(wheel.gpu_description(gpu)["node"]["num_gpus_per_node"])
    frames = []
    for op, required, optional, mode in (
        ("wideep_deepep_ll", _LL_REQUIRED, _LL_OPTIONAL, "low_latency"),
        ("wideep_deepep_normal", _NORMAL_REQUIRED, _NORMAL_OPTIONAL, "normal"),
    ):
        tables = wheel.kernel_tables(gpu, "comm", "sglang", op=op)
        if tables:
            newest = max(tables, key=version_key)
            frames.append(deepep(wheel.read_table(newest, required, optional), mode, gpus))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=COLUMNS)


def deepep(raw: pd.DataFrame, mode: str, gpus: int) -> pd.DataFrame:
    """Return raw DeepEP rows, a row per phase; these tables hold microseconds."""
    raw = raw[(raw["node_num"] == 1) & (raw["num_experts"] >= _LEAST_EXPERTS)]
    frames = []
    for op, payload in (("dispatch", "fp8"), ("combine", "bf16")):
        if mode == "low_latency":
            part = raw.assign(us=raw[f"{op}_avg_t_us"])
        else:
            part = raw[raw[f"{op}_sms"] == _DEEPEP_SMS]
            part = part.assign(us=part[f"{op}_transmit_us"] + part[f"{op}_notify_us"])
        frames.append(part.assign(op=op, mode=mode, payload=payload, gpus=gpus))
    return _cleaned(pd.concat(frames), "sglang")


def moe_a2a_rows(gpu: str, backend: str) -> pd.DataFrame:
    """Return vLLM's or TensorRT-LLM's rows of its newest table, flagged; empty without a table."""
    tables = wheel.kernel_tables(gpu, "comm", backend, op="moe_a2a")
    if not tables:
        return pd.DataFrame(columns=[*COLUMNS, "launch_bound"])
    newest = max(tables, key=version_key)
    return moe_a2a(wheel.read_table(newest, _A2A_REQUIRED, _A2A_OPTIONAL), backend)


def moe_a2a(raw: pd.DataFrame, backend: str) -> pd.DataFrame:
    """Return raw rows with `launch_bound`; their `latency` is in microseconds, as nowhere else.

    A mode whose fastest dispatch takes longer than `LAUNCH_BOUND_S` was timed with its launches.
    """
    is_low_latency = raw["comm_backend"].str.endswith("_ll")
    frame = raw.assign(
        us=raw["latency"],
        op=raw["phase"],
        mode=is_low_latency.map({True: "low_latency", False: "normal"}),
        payload=raw["comm_dtype"].replace({"bfloat16": "bf16", "default": "bf16"}),
        gpus=raw["ep_size"],
    )
    rows = _cleaned(frame.drop(columns="op_name", errors="ignore"), backend)
    fastest = rows[rows["op"] == "dispatch"].groupby("mode")["seconds"].min()
    return rows.assign(launch_bound=rows["mode"].isin(fastest[fastest > LAUNCH_BOUND_S].index))


def _cleaned(frame: pd.DataFrame, source: str) -> pd.DataFrame:
    """Return frames with our names, in seconds that never fall with the tokens of a shape."""
    rows = frame[frame["us"] > 0].rename(columns=_NAMES)
    rows = rows.assign(seconds=rows["us"] * 1e-6, source_framework=source)[list(COLUMNS)]
    key = ["op", "mode", "payload", "gpus", "hidden", "top_k", "experts"]
    rows = rows.sort_values([*key, "tokens", "seconds"]).drop_duplicates([*key, "tokens"])
    return pd.concat([monotone_rows(part) for _, part in rows.groupby(key)], ignore_index=True)
