"""Rows become tables, tables a profile, and the models give back what was measured."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.calibrate.measured_rows import TINY, measured_row, measured_rows, usual_seconds
from tonnage.calibrate.grid import grid
from tonnage.calibrate.held_out import slowdown
from tonnage.calibrate.own_profile import profile_of
from tonnage.calibrate.own_tables import random_experts, tables_of
from tonnage.calibrate.points import Point
from tonnage.calibrate.wanted import wanted_of
from tonnage.scenarios.catalogue import load_gpu
from tonnage.sim.cost.measured import MeasuredExecutor
from tonnage.sim.cost.models.attention import AttentionShape
from tonnage.sim.cost.operator_models import operator_models
from tonnage.sim.cost.profile import Profile, load_profile, write_profile
from tonnage.sim.domain import BadInputError, PromptChunk, Step

CPU = load_gpu("cpu")
DAY = date(2026, 11, 30)


def points_of(*names: str) -> tuple[Point, ...]:
    sizes = replace(TINY, rows=(1, 4, 16, 64, 256), tokens=(1, 4, 16, 64, 256))
    sizes = replace(sizes, batches=(1, 4, 16), contexts=(1, 128, 512), generic_widths=(256, 1024))
    sizes = replace(sizes, prompts=((1, 64), (1, 256), (4, 64)), generic_latent_heads=(4, 16))
    return grid(wanted_of(names, "cpu"), sizes, CPU, on_gpu=False).points


@pytest.fixture(scope="module")
def points() -> tuple[Point, ...]:
    return points_of("laptop", "laptop-gqa")


@pytest.fixture(scope="module")
def profile(points: tuple[Point, ...]) -> Profile:
    return profile_of(measured_rows(points), "cpu", day=DAY)


# --- tables -------------------------------------------------------------------------------------


def row(kernel: str, seconds: float, **axes: int) -> Any:
    return measured_row(Point(kernel, axes, 0.0, 0.0, graph=False), seconds)


def test_a_product_of_fp8_includes_quantising_its_activations() -> None:
    rows = [
        row("gemm_fp8_row", 3e-5, m=4, n=256, k=128),
        row("quantise_fp8_row", 1e-5, m=4, k=128),
        row("quantise_fp8_row", 7e-5, m=4, k=512),
    ]
    gemm = tables_of(rows, "1")["gemm"]
    assert gemm["format"].tolist() == ["fp8"]
    assert gemm["seconds"].tolist() == pytest.approx([4e-5])


def test_experts_of_a_rank_are_named_by_their_full_width_and_random_ones_only_tested() -> None:
    sizes = {"experts": 8, "top_k": 2, "hidden": 256, "inter": 64, "ways": 4}
    rows = [
        row("experts_int4_g32", 2e-4, tokens=4, balanced=1, **sizes),
        row("experts_int4_g32", 3e-4, tokens=4, balanced=0, **sizes),
    ]
    (moe,) = tables_of(rows, "1")["moe"].to_dict("records")
    assert (moe["format"], moe["inter"], moe["tp"], moe["ep"]) == ("int4", 256, 4, 1)
    assert (moe["routing"], moe["source"], moe["seconds"]) == ("balanced", "measured", 2e-4)
    assert random_experts(rows)["seconds"].tolist() == [3e-4]


def test_latent_prefill_stands_under_every_kv_format_and_the_first_widths_hold() -> None:
    axes = {"batch": 1, "heads": 8, "prefix_tokens": 0, "new_tokens": 64}
    rows = [
        row("mla_prefill", 1e-4, key=128, value=64, **axes),
        row("mla_prefill", 9e-4, key=192, value=128, **axes),
    ]
    table = tables_of(rows, "1")["attention_prefill"]
    assert sorted(table["kv_format"]) == ["bf16", "fp8_e4m3"]
    assert set(table["seconds"]) == {1e-4}


def test_pages_copies_writes_and_launches_have_tables_of_their_own() -> None:
    rows = [
        row("tag_check", 1e-5, requests=4, pages=64, ragged=0),
        row("mla_write_fp8", 2e-5, tokens=16, page_tokens=64),
        row("gqa_write_fp8", 3e-5, tokens=16, page_tokens=64, kv_heads=4, head_dim=64),
        row("kv_copy_fp8", 4e-5, requests=2, tokens=8, row=576, page_tokens=64),
        row("noop", 1e-7),
        row("norm", 5e-6, rows=4, width=512),
    ]
    tables = tables_of(rows, "1")
    assert tables["page_tags"].to_dict("records") == [{"requests": 4, "pages": 64, "seconds": 1e-5}]
    assert tables["kv_write"]["width"].tolist() == [576, 512]
    assert tables["kv_copy"]["tokens"].tolist() == [16]
    assert tables["launch"]["in_graph"].tolist() == [False]
    assert tables["small_ops"].to_dict("records") == [
        {"op": "norm", "width": 512, "rows": 4, "seconds": 5e-6}
    ]


# --- profile ------------------------------------------------------------------------------------


def test_what_was_measured_is_what_the_models_predict(
    points: tuple[Point, ...], profile: Profile, tmp_path: Path
) -> None:
    place = tmp_path / "cpu.profile"
    write_profile(profile, place)
    models = operator_models(load_profile(place), CPU)
    for point in points:
        axes, wanted = point.axes, usual_seconds(point)
        if point.kernel in ("gemm_bf16", "gemm_int4_g128"):
            name = point.kernel.removeprefix("gemm_")
            found = models.gemm.seconds(name, axes["m"], axes["n"], axes["k"])
            assert found.source == "measured"
        elif point.kernel == "experts_bf16" and axes["balanced"]:
            sizes = (axes["hidden"], axes["inter"], axes["experts"], axes["top_k"], 1, 1)
            found = models.moe.curve("bf16", sizes, "balanced").estimate(axes["tokens"])
            assert found.source == "measured"
        elif point.kernel == "mla_decode_fp8":
            shape = AttentionShape("mla", "fp8_e4m3", axes["heads"], 1, 576)
            found = models.decode.seconds(shape, axes["batch"], float(axes["context_tokens"]))
        else:
            continue
        assert found.inside
        assert float(np.asarray(found.seconds)) == pytest.approx(wanted, rel=0.02)


def test_every_operator_of_the_models_rests_on_measured_rows(profile: Profile) -> None:
    models = operator_models(profile, CPU)
    for wanted in wanted_of(("laptop", "laptop-gqa"), "cpu"):
        (kv_format,) = wanted.kv_formats
        executor = MeasuredExecutor(
            wanted.model, wanted.layout, CPU, kv_format, "sglang", models, (1, 2, 4, 8, 16)
        )
        for step in (_decode_step(8, 200), _prompt_step(256)):
            constants = ("small_kernels", "sampling", "small_operators")
            times = [one for one in executor.times(step) if one.name not in constants]
            assert len(times) > 4
            assert {one.name for one in times if not one.inside} == set()
            assert {one.source for one in times} <= {"measured", "imported"}


def _decode_step(requests: int, context: int) -> Step:
    return Step(np.full(requests, context), float(requests * context), ())


def _prompt_step(tokens: int) -> Step:
    return Step(np.zeros(0, dtype=np.int64), 0.0, (PromptChunk(tokens, 0),))


def test_the_header_says_on_what_and_when_it_was_measured(profile: Profile) -> None:
    header = profile.header
    assert (header.name, header.gpu, header.engine) == ("cpu-tonnage", "cpu", "tonnage")
    assert (header.source, header.date) == ("measured", "2026-11-30")
    assert header.fitted["machine"]["threads"] == 1
    assert "1 thread of a CPU" in header.notes[0]
    assert "measured on 2026-11-30" in header.notes[0]
    assert "all_reduce" in header.missing
    for operator in ("gemm", "moe", "attention_decode", "attention_prefill"):
        assert header.errors[operator]
    assert header.errors["gemm"]["bf16"]["held_out"] == "whole weights (n, k)"
    assert header.residuals["gemm"]["bf16"]


def test_left_out_shapes_of_a_smooth_machine_are_predicted_well(profile: Profile) -> None:
    assert profile.header.errors["gemm"]["bf16"]["median"] < 0.15
    assert profile.header.errors["attention_decode"]["gqa/bf16"]["median"] < 0.25


def test_the_same_rows_give_the_same_profile(points: tuple[Point, ...], profile: Profile) -> None:
    again = profile_of(measured_rows(points), "cpu", day=DAY)
    assert again.header == profile.header


def test_no_rows_make_no_profile() -> None:
    with pytest.raises(BadInputError, match="nothing was measured"):
        profile_of([], "cpu")


def test_fits_of_gpus_start_where_they_did() -> None:
    assert slowdown(load_gpu("h200-sxm").memory_bandwidth_bytes_per_s) == 1.0
    assert slowdown(load_gpu("l40s").memory_bandwidth_bytes_per_s) == 1.0
    assert slowdown(CPU.memory_bandwidth_bytes_per_s) == pytest.approx(100.0)
