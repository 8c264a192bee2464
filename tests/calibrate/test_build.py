"""A profile is put together from its parts, the same bytes every time."""

from __future__ import annotations

from datetime import date
from importlib import util
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tonnage.calibrate.build import (
    build_profile,
    errors_by_operator,
    plain_columns,
    residual_counts,
)
from tonnage.sim.cost.profile import HEADER_FILE, write_profile
from tonnage.sim.domain import BadInputError

needs_wheel = pytest.mark.skipif(
    util.find_spec("aiconfigurator_core") is None, reason="aiconfigurator-core is not installed"
)
DAY = date(2026, 11, 30)


def test_categories_become_text_and_rows_are_numbered_from_zero() -> None:
    table = pd.DataFrame({"format": pd.Categorical(["a", "b"]), "m": [1, 2]}, index=[7, 9])
    plain = plain_columns(table)
    assert plain["format"].tolist() == ["a", "b"]
    assert not isinstance(plain["format"].dtype, pd.CategoricalDtype)
    assert plain.index.tolist() == [0, 1]


def row(regime: str, median: float, **changed: object) -> dict[str, object]:
    fields = {"operator": "gemm", "format": "fp8", "held_out": regime, "n": 5, "p90": 0.5}
    return {**fields, "regime": regime, "median": median, "low": 0.81234, "high": 1.2, **changed}


def test_extrapolation_stands_inside_the_figures_of_its_format() -> None:
    rows = [row("extrapolation", 0.3), row("interpolation", 0.1), row("extrapolation", 0.2, n=6)]
    rows[2]["format"] = "nvfp4"
    found = errors_by_operator(pd.DataFrame(rows))["gemm"]
    assert found["fp8"]["regime"] == "interpolation"
    assert found["fp8"]["median"] == 0.1
    assert found["fp8"]["interval"] == [0.812, 1.2]
    assert found["fp8"]["extrapolation"]["median"] == 0.3
    assert found["nvfp4"]["regime"] == "extrapolation"
    assert found["nvfp4"]["n"] == 6


@needs_wheel
@pytest.mark.parametrize(
    ("gpu", "engine", "told"),
    [
        ("h20", "sglang", "gpu: aiconfigurator-core has no timings of 'h20'; it has a100-80g"),
        ("h200-sxm", "tgi", "engine: 'tgi': use one of sglang, vllm, trtllm"),
    ],
)
def test_what_the_package_lacks_is_refused(gpu: str, engine: str, told: str) -> None:
    with pytest.raises(BadInputError, match=told):
        build_profile(gpu, engine)


@needs_wheel
def test_the_same_day_gives_the_same_bytes_and_missing_tables_are_named(tmp_path: Path) -> None:
    for name in ("one", "two"):
        profile = build_profile("h200-sxm", "sglang", day=DAY, only=["comm"])
        write_profile(profile, tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert {HEADER_FILE, "all_reduce.parquet"} <= set(files)
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    assert profile.header.date == "2026-11-30"
    assert profile.header.engine_version == "0.5.14"
    assert {"gemm", "moe", "attention_decode"} <= set(profile.header.missing)
    assert set(profile.header.errors) >= {"all_reduce"}


@needs_wheel
def test_residuals_count_every_row_and_an_unfit_row_lies_in_the_last_bin() -> None:
    profile = build_profile("h200-sxm", "sglang", day=DAY, only=["comm"])
    rows = profile.tables["all_reduce"]
    counts = residual_counts(profile, [("all_reduce", rows)])["all_reduce"]
    assert sum(map(sum, counts.values())) == len(rows)
    middle = len(counts["all_reduce/graph"]) // 2
    for of_format in counts.values():  # the table is shipped whole: rows are met, or nearly
        assert sum(of_format[middle - 4 : middle + 4]) >= 0.9 * sum(of_format)
    slow = rows.assign(seconds=np.float64(1.0))
    counts = residual_counts(profile, [("all_reduce", slow)])["all_reduce"]
    assert all(of_format[-1] == sum(of_format) for of_format in counts.values())
