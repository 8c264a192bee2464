"""Messages are elements in the tables and bytes here; glitches and host-bound rows go."""

from __future__ import annotations

from importlib import util

import numpy as np
import pandas as pd
import pytest

from tonnage.calibrate import fit_comm
from tonnage.calibrate.imports.comm import (
    all_reduce_rows,
    cleaned,
    custom_all_reduce,
    is_glitch,
    nccl,
    nccl_rows,
    version_key,
)
from tonnage.calibrate.imports.expert_comm import deepep, expert_rows, moe_a2a, moe_a2a_rows
from tonnage.calibrate.imports.wheel import KernelTable
from tonnage.scenarios.catalogue import load_gpu
from tonnage.sim.cost.models.comm import CommModel

needs_wheel = pytest.mark.skipif(
    util.find_spec("aiconfigurator_core") is None, reason="aiconfigurator-core is not installed"
)


def raw_all_reduce(
    latencies_ms: list[float], kernel: str = "SGLang_CustomAllReduce_graph"
) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "version": "0.5.14",
            "op_name": "all_reduce",
            "kernel_source": kernel,
            "allreduce_dtype": "bfloat16",
            "num_gpus": 8,
            "message_size": [1024 * 2**power for power in range(len(latencies_ms))],
            "latency": latencies_ms,
        }
    )


# --- collectives --------------------------------------------------------------------------------


def test_a_message_of_elements_becomes_twice_as_many_bytes() -> None:
    rows = custom_all_reduce(raw_all_reduce([0.005]), "sglang")
    assert rows["message_bytes"].tolist() == [2048]
    assert rows["seconds"].tolist() == pytest.approx([5e-6])


def test_captured_and_eager_rows_are_told_apart() -> None:
    captured = custom_all_reduce(raw_all_reduce([0.005]), "sglang")
    eager = custom_all_reduce(raw_all_reduce([0.03], "SGLang_CustomAllReduce_eager"), "sglang")
    one_kind = custom_all_reduce(raw_all_reduce([0.003], "TRTLLM"), "trtllm")
    assert [bool(rows["in_graph"].item()) for rows in (captured, eager, one_kind)] == [
        True,
        False,
        True,
    ]


def test_a_row_slower_than_larger_messages_is_a_glitch() -> None:
    seconds = np.array([29e-6, 56e-6, 34e-6, 33e-6, 40e-6])
    assert is_glitch(seconds).tolist() == [False, True, False, False, False]


def test_cleaned_rows_never_fall_and_lose_glitches() -> None:
    rows = cleaned(custom_all_reduce(raw_all_reduce([0.029, 0.056, 0.034, 0.033, 0.040]), "sglang"))
    assert rows["message_bytes"].tolist() == [2048, 8192, 16384, 32768]
    assert (np.diff(rows["seconds"]) >= 0).all()
    assert rows["seconds"].iloc[1] == pytest.approx(np.sqrt(34e-6 * 33e-6))


def test_nccl_rows_of_half_precision_stand_for_all() -> None:
    raw = pd.DataFrame(
        {
            "version": "2.29.2",
            "op_name": ["alltoall", "all_gather", "alltoall"],
            "kernel_source": "NCCL",
            "nccl_dtype": ["half", "half", "int8"],
            "num_gpus": 8,
            "message_size": 256,
            "latency": 0.007,
        }
    )
    assert nccl(raw)["op"].tolist() == ["all_to_all", "all_gather"]
    assert nccl(raw)["message_bytes"].tolist() == [512, 512]


def test_versions_are_compared_by_number() -> None:
    older, newer = (
        KernelTable("h200_sxm", "comm", "sglang", version, "wideep_deepep_ll")
        for version in ("0.5.6.post2", "0.5.12")
    )
    assert version_key(newer) > version_key(older)


@needs_wheel
@pytest.mark.parametrize("gpu", ["h100-sxm", "h200-sxm", "b200-sxm", "b300-sxm"])
def test_bus_bandwidth_is_that_of_the_link_only_if_sizes_are_elements(gpu: str) -> None:
    rows = all_reduce_rows(gpu.replace("-", "_"), "sglang")
    largest = rows[(rows["gpus"] == 8) & rows["in_graph"]].iloc[-1]
    bus_bytes_per_s = 2 * 7 / 8 * largest["message_bytes"] / largest["seconds"]
    assert 0.7 < bus_bytes_per_s / (load_gpu(gpu).nvlink_bytes_per_s or 0.0) < 1.1


@needs_wheel
def test_the_eager_glitch_of_the_h200_is_gone() -> None:
    rows = all_reduce_rows("h200_sxm", "sglang")
    eager = rows[(rows["gpus"] == 8) & ~rows["in_graph"]]
    assert eager.loc[eager["message_bytes"] <= 2**20, "seconds"].max() < 40e-6


@needs_wheel
def test_every_collective_has_rows_for_every_number_of_gpus() -> None:
    found = nccl_rows("b300_sxm").groupby("op")["gpus"].unique()
    assert set(found.index) == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
    assert all(set(gpus) == {2, 4, 8} for gpus in found)


# --- dispatch and combine -----------------------------------------------------------------------


def raw_deepep(**changes: object) -> pd.DataFrame:
    columns: dict[str, object] = {
        "version": "0.5.12",
        "kernel_source": "deepep",
        "node_num": 1,
        "hidden_size": 7168,
        "num_token": [1, 8],
        "num_topk": 8,
        "num_experts": 256,
        "dispatch_avg_t_us": [9.0, 11.0],
        "combine_avg_t_us": [12.0, 14.0],
    }
    return pd.DataFrame({**columns, **changes})


def test_deepep_microseconds_become_seconds_of_two_phases() -> None:
    rows = deepep(raw_deepep(), "low_latency", 8)
    seconds = rows.groupby("op")["seconds"].apply(list)
    assert seconds["dispatch"] == pytest.approx([9e-6, 11e-6])
    assert seconds["combine"] == pytest.approx([12e-6, 14e-6])
    assert rows.groupby("op")["payload"].first().to_dict() == {"dispatch": "fp8", "combine": "bf16"}


def test_models_of_few_experts_are_left_out() -> None:
    assert deepep(raw_deepep(num_experts=[256, 8]), "low_latency", 8)["tokens"].tolist() == [1, 1]


def test_only_the_default_number_of_sms_stands_for_normal_kernels() -> None:
    raw = raw_deepep().drop(columns=["dispatch_avg_t_us", "combine_avg_t_us"])
    for op in ("dispatch", "combine"):
        raw = raw.assign(**{f"{op}_sms": [20, 4], f"{op}_transmit_us": 30.0, f"{op}_notify_us": 2})
    rows = deepep(raw, "normal", 8)
    assert rows["tokens"].tolist() == [1, 1]
    assert rows["seconds"].tolist() == pytest.approx([32e-6, 32e-6])


def test_a_mode_whose_dispatch_times_the_host_is_flagged() -> None:
    raw = pd.DataFrame(
        {
            "version": "0.24.0",
            "kernel_source": "deepep",
            "op_name": "moe_a2a",
            "comm_backend": ["deepep_ht", "deepep_ht", "deepep_ll"],
            "phase": ["dispatch", "combine", "dispatch"],
            "comm_dtype": "default",
            "ep_size": 8,
            "node_num": 1,
            "hidden_size": 7168,
            "topk": 8,
            "num_experts": 256,
            "num_tokens": 16,
            "latency": [255.0, 38.0, 12.0],
        }
    )
    rows = moe_a2a(raw, "vllm")
    assert rows.groupby("mode")["launch_bound"].all().to_dict() == {
        "normal": True,
        "low_latency": False,
    }
    assert rows["seconds"].max() == pytest.approx(255e-6)


@needs_wheel
def test_vllm_and_trtllm_tables_are_launch_bound_and_deepeps_are_not() -> None:
    for backend in ("vllm", "trtllm"):
        assert moe_a2a_rows("h200_sxm", backend)["launch_bound"].all()
    rows = expert_rows("h200_sxm")
    fastest = rows[rows["op"] == "dispatch"].groupby("mode")["seconds"].min()
    assert fastest["low_latency"] < 15e-6
    assert fastest["normal"] < 40e-6


@needs_wheel
def test_gb200_rows_are_among_the_four_gpus_of_a_tray() -> None:
    assert set(expert_rows("gb200")["gpus"]) == {4}
    assert fit_comm.fitted("gb200", "sglang")["comm"]["nvlink_gpus"] == 72


# --- the fit ------------------------------------------------------------------------------------


@needs_wheel
def test_held_out_messages_and_shapes_are_within_ten_per_cent_in_the_median() -> None:
    errors = fit_comm.held_out_errors("h200_sxm", "sglang")
    inside = errors[errors["regime"] == "interpolation"]
    assert set(inside["operator"]) == {
        *("all_reduce", "all_gather", "reduce_scatter", "all_to_all"),
        *("expert_dispatch", "expert_combine"),
    }
    assert (inside["median"] <= 0.10).all()
    assert (inside["p90"] <= 0.25).all()


@needs_wheel
def test_shipped_rows_are_given_back() -> None:
    tables, fitted = fit_comm.tables("h200_sxm", "vllm"), fit_comm.fitted("h200_sxm", "vllm")
    model = CommModel.from_tables(tables, fitted, load_gpu("h200-sxm"))
    rows = tables["all_reduce"]
    captured = rows[rows["in_graph"] & (rows["gpus"] == 8)]
    predicted = model.all_reduce(8, captured["message_bytes"].to_numpy(dtype=np.float64))
    assert predicted.seconds == pytest.approx(captured["seconds"].to_numpy(), rel=2e-3)
    assert predicted.source == "imported"
