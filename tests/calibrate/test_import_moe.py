"""The importer of routed experts flags what does not measure its label; the fit holds."""

from __future__ import annotations

from importlib import util

import numpy as np
import pandas as pd
import pytest

from tonnage.calibrate.fit_moe import datasheet, intervals
from tonnage.calibrate.imports import wheel
from tonnage.calibrate.imports.moe import COLUMNS, FLAGS, KEY, moe_rows, normalised
from tonnage.calibrate.moe_errors import between_knots, held_out_experts, moe_model
from tonnage.calibrate.moe_form_fit import fit_forms, without_untuned
from tonnage.calibrate.moe_rows import (
    CURVE,
    FAMILY,
    catalogue_families,
    engine_rows,
    lent_rows,
    scaled_rows,
    thinned,
    usable,
)
from tonnage.sim.domain import BadInputError

needs_wheel = pytest.mark.skipif(
    util.find_spec("aiconfigurator_core") is None, reason="aiconfigurator-core is not installed"
)

KIMI, GLM = (7168, 2048, 384, 8), (6144, 2048, 256, 8)
DEEPSEEK = (7168, 2048, 256, 8)


def raw_row(**changes: object) -> dict[str, object]:
    row: dict[str, object] = {
        "framework": "SGLang",
        "version": "0.5.14",
        "kernel_source": "sglang_fused_moe_triton",
        "moe_dtype": "fp8_block",
        "num_tokens": 32,
        "hidden_size": 6144,
        "inter_size": 2048,
        "topk": 8,
        "num_experts": 256,
        "moe_tp_size": 8,
        "moe_ep_size": 1,
        "distribution": "balanced",
        "latency": 0.393,
    }
    return {**row, **changes}


def imported(
    *rows: dict[str, object], backend: str = "sglang", version: str = "0.5.14"
) -> pd.DataFrame:
    return normalised(pd.DataFrame(rows), backend, version)


def sizes(family: tuple[int, int, int, int]) -> dict[str, object]:
    names = ("hidden_size", "inter_size", "num_experts", "topk")
    return dict(zip(names, family, strict=True))


# --- rows ---------------------------------------------------------------------------------------


def test_rows_come_in_seconds_and_keep_where_they_are_from() -> None:
    row = imported(raw_row()).iloc[0]
    assert list(row.index) == list(COLUMNS)
    assert row["seconds"] == pytest.approx(393e-6)
    assert (row["source_framework"], row["source_version"]) == ("sglang", "0.5.14")
    assert (row["kernel"], row["routing"]) == ("sglang_fused_moe_triton", "balanced")
    assert row["flag"] == ""


def test_the_width_stays_that_of_a_whole_expert_and_the_split_stands_beside_it() -> None:
    row = imported(raw_row(moe_tp_size=8, moe_ep_size=4)).iloc[0]
    assert (row["inter"], row["tp"], row["ep"]) == (2048, 8, 4)


def test_failed_measurements_are_dropped() -> None:
    rows = imported(*(raw_row(latency=t, num_tokens=i) for i, t in enumerate((0.0, -1.0, 0.2), 1)))
    assert rows["tokens"].tolist() == [3]


def test_of_several_rows_with_one_key_the_median_holds() -> None:
    rows = imported(*(raw_row(latency=t) for t in (0.30, 0.36, 0.31)))
    assert rows["seconds"].tolist() == [pytest.approx(310e-6)]


def test_two_kernels_for_the_same_experts_stay_apart() -> None:
    rows = imported(
        raw_row(moe_dtype="nvfp4", kernel_source="moe_torch_flow_cutlass", latency=0.2),
        raw_row(moe_dtype="nvfp4", kernel_source="moe_torch_flow_min_latency", latency=0.1),
        backend="trtllm",
        version="1.3.0rc20",
    )
    flags = dict(zip(rows["kernel"], rows["flag"], strict=True))
    assert flags == {"moe_torch_flow_cutlass": "other_backend", "moe_torch_flow_min_latency": ""}


def test_cutlass_alone_is_what_an_engine_has() -> None:
    raw = raw_row(moe_dtype="nvfp4", kernel_source="moe_torch_flow_cutlass", latency=0.2)
    assert imported(raw, backend="trtllm", version="1.3.0rc20")["flag"].tolist() == [""]


def test_int4_keeps_no_group_and_other_formats_take_our_names() -> None:
    rows = imported(raw_row(moe_dtype="int4_wo"), raw_row(moe_dtype="w4a16_mxfp4"))
    assert set(rows["format"]) == {"int4", "mxfp4"}


def test_fp4_weights_are_taken_with_fp8_activations_where_both_are_there() -> None:
    wide, narrow = raw_row(moe_dtype="w4a16_mxfp4"), raw_row(moe_dtype="w4a8_mxfp4_mxfp8")
    rows = imported(wide | {"latency": 0.4}, narrow | {"latency": 0.2})
    assert (rows["format"].tolist(), rows["seconds"].tolist()) == (["mxfp4"], [pytest.approx(2e-4)])
    assert imported(wide)["format"].tolist() == ["mxfp4"]


@pytest.mark.parametrize(
    ("column", "value"), [("moe_dtype", "int3_wo"), ("distribution", "zipf_2.0")]
)
def test_formats_and_routings_that_were_not_read_are_refused(column: str, value: str) -> None:
    with pytest.raises(BadInputError, match=rf"moe: {column} {value}: not one of"):
        imported(raw_row(**{column: value}))


# --- rows that do not measure their label -------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "version", "flag"),
    [
        ("sglang", "0.5.14", "grouped_top_k"),
        ("vllm", "0.24.0", "grouped_top_k"),
        ("sglang", "0.5.10", ""),
        ("trtllm", "1.3.0rc20", ""),
    ],
)
def test_deepseeks_experts_behind_a_grouped_top_k_are_flagged(
    backend: str, version: str, flag: str
) -> None:
    row = raw_row(**sizes(DEEPSEEK))
    assert imported(row, backend=backend, version=version)["flag"].tolist() == [flag]


def test_experts_without_a_gate_are_flagged_under_every_engine() -> None:
    row = raw_row(**sizes((2688, 1856, 128, 6)))
    for backend, version in (("sglang", "0.5.14"), ("vllm", "0.24.0"), ("trtllm", "1.3.0rc20")):
        assert imported(row, backend=backend, version=version)["flag"].item() == "two_matrices"


def test_slow_kernels_are_flagged() -> None:
    fp8 = raw_row(
        moe_dtype="fp8",
        kernel_source="vllm_modeloptfp8moe_flashinfer_cutlass_flashinferexperts",
    )
    assert imported(fp8, backend="vllm", version="0.24.0")["flag"].item() == "slow_kernel"
    int4 = raw_row(moe_dtype="int4_wo", kernel_source="vllm_marlin_int4_moe")
    assert imported(int4, backend="vllm", version="0.19.0")["flag"].item() == "slow_kernel"
    assert imported(int4, backend="vllm", version="0.24.0")["flag"].item() == ""


def test_flagged_rows_stand_for_nothing() -> None:
    rows = imported(raw_row(), raw_row(**sizes(DEEPSEEK)))
    assert set(rows["flag"]) == {"", "grouped_top_k"}
    assert usable(rows)["hidden"].tolist() == [6144]


# --- what the flags and routings rest on, in the package ----------------------------------------


def curve(rows: pd.DataFrame, family: tuple[int, int, int, int], **wanted: object) -> pd.Series:
    """Return the seconds of one curve by tokens."""
    chosen = (rows[FAMILY] == np.array(family)).all(axis=1)
    for name, value in wanted.items():
        chosen &= rows[name] == value
    return rows[chosen].set_index("tokens")["seconds"]


@needs_wheel
def test_balance_is_slow_at_few_tokens_and_fast_at_many() -> None:
    rows = moe_rows("h200_sxm", "sglang")
    place = {"format": "int4", "tp": 8, "ep": 1}
    balanced, first, second = (
        curve(rows, KIMI, routing=routing, **place)
        for routing in ("balanced", "power_law_1.01", "power_law_1.2")
    )
    assert [round(1e6 * one[32]) for one in (balanced, first, second)] == [290, 199, 184]
    assert balanced[1024] < first[1024] < second[1024]


@needs_wheel
def test_deepseeks_balanced_rows_touch_half_the_experts_and_crowd_few_ranks() -> None:
    rows = moe_rows("h200_sxm", "sglang")
    place = {"format": "fp8_block", "routing": "balanced", "tp": 1}
    whole = [curve(rows, family, ep=1, **place)[32] for family in (DEEPSEEK, GLM)]
    assert whole[0] < 0.65 * whole[1]  # though each of its experts is larger
    spread = [curve(rows, family, ep=64, **place)[16384] for family in (DEEPSEEK, GLM)]
    assert spread[0] > 4 * spread[1]
    older = moe_rows("h200_sxm", "sglang", "0.5.10")
    whole = [curve(older, family, ep=1, **place)[32] for family in (DEEPSEEK, GLM)]
    assert whole[0] == pytest.approx(7168 / 6144 * whole[1], rel=0.05)


@needs_wheel
def test_int4_of_glm_is_in_an_older_version_alone_and_its_other_source_is_slow() -> None:
    now = moe_rows("h200_sxm", "sglang")
    place = {"format": "int4", "routing": "balanced", "tp": 8, "ep": 1}
    assert curve(now, GLM, **place).empty
    older = curve(moe_rows("h200_sxm", "sglang", "0.5.10"), GLM, **place)
    slow = curve(moe_rows("h200_sxm", "vllm", "0.19.0"), GLM, **place)
    assert 2.0 < (slow / older).median() < 4.0


@needs_wheel
def test_the_flagged_fp8_kernel_is_several_times_slower_than_fp8_blocks() -> None:
    rows = moe_rows("h200_sxm", "vllm")
    place = {"routing": "balanced", "tp": 8, "ep": 1}
    slow = curve(rows, GLM, format="fp8", flag="slow_kernel", **place)
    blocks = curve(rows, GLM, format="fp8_block", **place)
    assert slow[64] > 4 * blocks[64]


@needs_wheel
def test_doubled_keys_become_one() -> None:
    table = wheel.kernel_tables("h200_sxm", "moe", "sglang", "0.5.10", "moe")[0]
    names = (*KEY, "kernel")
    rows = moe_rows("h200_sxm", "sglang", "0.5.10")
    assert not rows.duplicated(list(names)).any()
    raw = wheel.read_table(table, ("latency",), RAW_COLUMNS)
    assert len(raw) - len(rows) == 8505


RAW_COLUMNS = (
    *("framework", "version", "device", "op_name", "kernel_source", "moe_dtype", "num_tokens"),
    *("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size"),
    "distribution",
)


@needs_wheel
def test_every_flag_is_found_somewhere() -> None:
    found: set[str] = set()
    for gpu, backend in (("h200_sxm", "sglang"), ("h200_sxm", "vllm"), ("b200_sxm", "trtllm")):
        found |= set(moe_rows(gpu, backend)["flag"])
    assert found == {"", *FLAGS}


# --- rows that are lent, thinned, cleaned -------------------------------------------------------


def many(family: tuple[int, int, int, int], factor: float, **changes: object) -> pd.DataFrame:
    """Return usable rows of one family whose seconds rise with tokens."""
    rows = [
        raw_row(**{**sizes(family), "num_tokens": 2**i, "latency": factor * 2.0**i, **changes})
        for i in range(4)
    ]
    return usable(imported(*rows))


def test_lent_rows_are_scaled_by_the_ratio_on_common_experts() -> None:
    own = many(KIMI, 0.9)
    lender = pd.concat([many(KIMI, 1.0), many(GLM, 2.0)])
    lent = scaled_rows(own, lender)
    assert set(map(tuple, lent[FAMILY].to_numpy().tolist())) == {GLM}
    assert lent["seconds"].tolist() == pytest.approx([1.8e-3, 3.6e-3, 7.2e-3, 14.4e-3])
    assert set(lent["source"]) == {"scaled"}


def test_a_layout_without_common_rows_is_not_lent() -> None:
    lender = pd.concat([many(KIMI, 1.0), many(GLM, 2.0, moe_ep_size=64)])
    assert scaled_rows(many(KIMI, 0.9), lender).empty


def test_usable_curves_never_fall() -> None:
    rows = [raw_row(num_tokens=2**i, latency=t) for i, t in enumerate((0.10, 0.14, 0.12, 0.3))]
    kept = usable(imported(*rows))
    assert (np.diff(kept["seconds"]) >= 0).all()
    assert kept["measured_s"].tolist() == pytest.approx([1e-4, 1.4e-4, 1.2e-4, 3e-4])


def test_every_catalogue_family_is_known() -> None:
    assert {KIMI, GLM, DEEPSEEK, (2880, 2880, 128, 4)} <= catalogue_families()


@needs_wheel
def test_untuned_curves_are_found_in_one_table_and_hardly_any_in_another() -> None:
    tuned = engine_rows("h200_sxm", "vllm")
    assert len(without_untuned(tuned)) > 0.995 * len(tuned)
    rows = engine_rows("h200_sxm", "trtllm")
    fp8 = rows[rows["format"] == "fp8"]
    kept = without_untuned(fp8)
    assert 0.05 < 1 - len(kept) / len(fp8) < 0.15
    slow = curve(fp8, (5120, 8192, 16, 1), routing="balanced", tp=1, ep=1)
    assert len(slow)
    assert curve(kept, (5120, 8192, 16, 1), routing="balanced", tp=1, ep=1).empty


# --- what the fit promises ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def vllm_rows() -> pd.DataFrame:
    own = engine_rows("h200_sxm", "vllm")
    return own[own["format"].isin(["fp8_block", "int4"])]


@needs_wheel
def test_held_out_experts_are_predicted_within_the_targets(vllm_rows: pd.DataFrame) -> None:
    rows = vllm_rows[vllm_rows["format"] == "fp8_block"]
    knots = thinned(rows)
    errors = held_out_experts(rows, knots, fit_forms(knots), datasheet("h200_sxm"))
    inside = errors[errors["regime"] == "interpolation"].iloc[0]
    assert inside["n"] > 10_000
    assert inside["median"] < 0.05
    assert inside["p90"] < 0.20
    assert inside["low"] < 1 < inside["high"]


@needs_wheel
def test_shipped_experts_are_predicted_between_the_knots(vllm_rows: pd.DataFrame) -> None:
    knots = thinned(vllm_rows)
    errors = between_knots(vllm_rows, knots, fit_forms(knots), datasheet("h200_sxm"))
    assert set(errors["format"]) == {"fp8_block", "int4"}
    assert (errors["median"] < 0.06).all()
    assert (errors["p90"] < 0.25).all()


@needs_wheel
def test_glms_int4_experts_are_lent_to_vllm_and_say_so(vllm_rows: pd.DataFrame) -> None:
    int4 = vllm_rows[vllm_rows["format"] == "int4"]
    lent = lent_rows(int4, "h200_sxm", "vllm")
    assert GLM in set(map(tuple, lent[FAMILY].to_numpy().tolist()))
    assert set(lent["source_version"]) == {"0.5.10"}
    assert set(lent["kernel"]) == set(int4["kernel"])
    knots = thinned(pd.concat([int4, lent]))
    rates = datasheet("h200_sxm")
    predicted = moe_model(knots, fit_forms(knots), rates).seconds("int4_g128", 32, *GLM, 8, 1)
    assert predicted.source == "scaled"
    own = moe_model(knots, fit_forms(knots), rates).seconds("int4_g32", 32, *KIMI, 8, 1)
    assert own.source == "imported"


@needs_wheel
def test_deepseeks_experts_are_predicted_from_their_neighbours(vllm_rows: pd.DataFrame) -> None:
    """Their own rows are flagged; they are GLM's, a sixth larger."""
    fp8 = vllm_rows[vllm_rows["format"] == "fp8_block"]
    knots = thinned(fp8)
    model = moe_model(knots, fit_forms(knots), datasheet("h200_sxm"))
    for tokens in (8, 64, 512, 8192):
        ours, glms = (
            model.seconds("fp8_block", tokens, *family, 8, 1) for family in (DEEPSEEK, GLM)
        )
        assert ours.seconds == pytest.approx(7168 / 6144 * float(glms.seconds), rel=0.08)
        assert (ours.source, ours.inside) == ("imported", True)


@needs_wheel
def test_the_usual_kernel_is_the_one_that_ran_most_catalogue_experts() -> None:
    """On B200 SGLang ran ten FP8-block shapes on one kernel and six on another."""
    rows = moe_rows("b200_sxm", "sglang")
    knots = thinned(usable(rows[rows["format"] == "fp8_block"]))
    kernels = [kernel for _, kernel in fit_forms(knots)]
    assert kernels == ["sglang_flashinfer_trtllm_moe", "sglang_fused_moe_triton"]


@needs_wheel
def test_what_ships_is_small_and_has_one_row_per_place(vllm_rows: pd.DataFrame) -> None:
    knots = thinned(vllm_rows)
    assert not knots.duplicated([*CURVE, "tokens"]).any()
    assert len(knots) < 0.5 * len(vllm_rows)


def test_intervals_widen_with_distance() -> None:
    errors = pd.DataFrame(
        [
            ("moe_between_knots", "bf16", "interpolation", 0.96, 1.05),
            ("moe", "bf16", "interpolation", 0.9, 1.2),
            ("moe", "bf16", "extrapolation", 0.95, 1.4),
            ("moe_lent", "int4", "extrapolation", 0.7, 1.3),
        ],
        columns=["operator", "format", "regime", "low", "high"],
    )
    assert intervals(errors, "bf16") == {
        "measured_interval": [0.96, 1.05],
        "inside_interval": [0.9, 1.2],
        "outside_interval": [0.9, 1.4],
        "scaled_interval": [0.7, 1.3],
    }
