"""The GEMM importer refuses what is no kernel time, and the fit keeps its promises on real rows."""

from __future__ import annotations

from importlib import util

import numpy as np
import pandas as pd
import pytest

from tonnage.calibrate import fit_gemm, fit_quantise
from tonnage.calibrate.imports.gemm import (
    COLUMNS,
    gemm_rows,
    int4_expert_bytes_per_s,
    launch_bound_formats,
    normalised,
    quantise_rows,
)
from tonnage.sim.cost.models.gemm import GemmModel
from tonnage.sim.domain import BadInputError

needs_wheel = pytest.mark.skipif(
    util.find_spec("aiconfigurator_core") is None, reason="aiconfigurator-core is not installed"
)


def raw_row(**changes: object) -> dict[str, object]:
    row: dict[str, object] = {
        "framework": "SGLang",
        "version": "0.5.14",
        "kernel_source": "linear",
        "gemm_dtype": "bfloat16",
        "m": 16,
        "n": 1024,
        "k": 2048,
        "latency": 0.010,
    }
    return {**row, **changes}


def raw(*rows: dict[str, object]) -> pd.DataFrame:
    return pd.DataFrame(list(rows))


# --- rows ---------------------------------------------------------------------------------------


def test_milliseconds_become_seconds_and_names_become_ours() -> None:
    frame = normalised(raw(raw_row(gemm_dtype="fp8_block")), "sglang")
    row = frame.iloc[0]
    assert row["seconds"] == pytest.approx(10e-6)
    assert (row["format"], row["source_framework"], row["kernel"]) == (
        "fp8_block",
        "sglang",
        "linear",
    )
    assert list(frame.columns) == [*COLUMNS, "launch_bound"]


def test_rows_of_no_time_are_dropped() -> None:
    frame = normalised(raw(raw_row(latency=0.0), raw_row(latency=-1.0, m=8), raw_row(m=4)), "vllm")
    assert frame["m"].tolist() == [4]


def test_of_doubled_rows_the_median_holds() -> None:
    doubled = [raw_row(latency=latency) for latency in (0.010, 0.012, 0.040)]
    frame = normalised(raw(*doubled, raw_row(m=1, latency=0.009)), "sglang")
    assert frame.sort_values("m")["seconds"].tolist() == pytest.approx([9e-6, 12e-6])


def test_an_unknown_number_format_is_refused_not_guessed() -> None:
    with pytest.raises(BadInputError, match="gemm_dtype int3_wo"):
        normalised(raw(raw_row(gemm_dtype="int3_wo")), "vllm")


def test_weight_only_int8_is_no_format_of_ours() -> None:
    assert normalised(raw(raw_row(gemm_dtype="int8_wo")), "trtllm").empty


def test_a_table_that_times_the_host_is_flagged_by_its_small_products() -> None:
    small = {"m": 1, "n": 256, "k": 256}
    frame = normalised(
        raw(
            raw_row(**small, latency=0.003),
            raw_row(**small, latency=0.155, gemm_dtype="fp8_block"),
            raw_row(m=4096, n=8192, k=8192, latency=0.5, gemm_dtype="fp8_block"),
        ),
        "vllm",
    )
    flagged = frame.groupby("format")["launch_bound"].all()
    assert flagged.to_dict() == {"bf16": False, "fp8_block": True}


def test_a_large_product_may_take_long() -> None:
    frame = normalised(raw(raw_row(m=16, n=16384, k=16384, latency=0.2)), "sglang")
    assert launch_bound_formats(frame) == []


# --- the repair of one pair's series ------------------------------------------------------------


def series(seconds: list[float], m: list[int]) -> pd.DataFrame:
    return pd.DataFrame({"n": 1024, "k": 1024, "m": m, "seconds": seconds})


def test_a_spike_does_not_lift_its_neighbours() -> None:
    rows = series([5e-6, 25e-6, 5e-6, 5e-6, 5e-6, 6e-6], [1, 2, 4, 8, 16, 32])
    repaired = fit_gemm.repaired_seconds(rows)
    assert (np.diff(repaired) >= 0).all()
    assert repaired[2] < 6.5e-6


def test_an_odd_m_yields_to_the_padded_one() -> None:
    repaired = fit_gemm.repaired_seconds(series([10e-6, 12e-6, 10.5e-6, 11e-6], [64, 65, 128, 256]))
    assert repaired[2] == pytest.approx(10.6e-6, rel=0.02)


def test_rising_rows_are_left_alone() -> None:
    rising = [1e-6, 2e-6, 3e-6, 9e-6]
    assert fit_gemm.repaired_seconds(series(rising, [1, 16, 32, 64])) == pytest.approx(rising)


# --- the installed tables -----------------------------------------------------------------------


@needs_wheel
def test_vllm_fp8_block_is_refused_and_trtllm_stands_for_it() -> None:
    rows = gemm_rows("h200_sxm", "vllm")
    assert set(rows.loc[rows["launch_bound"], "format"]) == {"fp8_block"}
    engine = fit_gemm.engine_rows("h200_sxm", "vllm")
    sources = engine.groupby("format")["source_framework"].unique()
    assert {name: list(source) for name, source in sources.items()} == {
        "bf16": ["vllm"],
        "fp8": ["vllm"],
        "fp8_block": ["trtllm"],
    }


@needs_wheel
def test_sglang_bf16_comes_from_the_cleaner_table_of_the_same_call() -> None:
    rows = fit_gemm.engine_rows("b200_sxm", "sglang")
    sources = rows.groupby("format")["source_framework"].first().to_dict()
    assert sources == {"bf16": "vllm", "fp8": "sglang", "fp8_block": "sglang", "nvfp4": "sglang"}


@needs_wheel
def test_quantise_rows_of_no_time_are_dropped() -> None:
    rows = quantise_rows("h200_sxm", "vllm")
    assert (rows["seconds"] > 0).all()
    assert set(rows["op"]) == {"quantise", "scale"}


@needs_wheel
def test_int4_experts_stream_below_the_memory_bandwidth() -> None:
    rate = int4_expert_bytes_per_s("h200_sxm")
    assert rate is not None
    assert 0.5 < rate / 4.8e12 < 1.0


@needs_wheel
def test_held_out_pairs_are_predicted_within_the_target() -> None:
    errors = fit_gemm.held_out_errors("h100_sxm", "vllm")
    inside = errors[(errors["operator"] == "gemm") & (errors["regime"] == "interpolation")]
    assert set(inside["format"]) == {"bf16", "fp8", "fp8_block"}
    assert (inside["median"] <= 0.06).all()
    assert (inside["p90"] <= 0.25).all()
    assert {"operator", "format", "gpu", "engine", "held_out", "n", "low", "high"} <= set(errors)


@needs_wheel
def test_the_thinned_table_gives_back_its_own_rows() -> None:
    gpu = "h100_sxm"
    tables, fitted = fit_gemm.tables(gpu, "vllm"), fit_gemm.fitted(gpu, "vllm")
    model = GemmModel.from_tables(tables, fitted, fit_gemm.datasheet(gpu))
    rows = tables["gemm"].sample(50, random_state=1)
    predicted = [
        model.seconds(row.format, float(row.m), int(row.n), int(row.k)) for row in rows.itertuples()
    ]
    assert [one.seconds for one in predicted] == pytest.approx(rows["seconds"].tolist(), rel=1e-3)
    assert {(one.source, one.inside) for one in predicted} == {("imported", True)}


@needs_wheel
def test_quantising_is_predicted_between_the_widths() -> None:
    fit = fit_quantise.fit_quantise("h200_sxm")
    assert fit.errors["median"].item() <= 0.06
    assert fit.fitted["t0_s"] < 5e-6
