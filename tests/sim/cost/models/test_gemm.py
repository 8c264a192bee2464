"""Dense products from rows: between knots, beyond them, for formats without rows."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.scenarios.catalogue import load_gpu
from tonnage.sim.cost.models.gemm import GemmForm, GemmModel
from tonnage.sim.cost.models.quantise import QuantiseModel
from tonnage.sim.model.formats import number_format

GPU = load_gpu("h200-sxm")
M, WIDTHS = (1, 16, 64, 256, 1024, 8192), (256, 1024, 4096, 16384)
FORM = {"t0_s": 3e-6, "bytes_per_s": 4e12, "flops_per_s": 8e14, "sharpness": 3.0}
FITTED = {
    "gemm": {
        "formats": {
            "bf16": {"form": FORM, "interval": [0.9, 1.1], "outside_interval": [0.8, 1.3]},
            "fp8": {
                "form": {**FORM, "flops_per_s": 16e14, "quantised_per_s": 1e12},
                "interval": [0.85, 1.2],
                "outside_interval": [0.7, 1.5],
            },
        },
        "scaled_interval": [0.7, 2.0],
        "decoded_interval": [0.6, 2.5],
        "decoded_bytes_per_s": 3e12,
    }
}


def true_seconds(name: str, m: float, n: int, k: int) -> float:
    """Return seconds that the form misses by a factor that is a power of the sizes."""
    form = GemmForm(**FITTED["gemm"]["formats"][name]["form"])
    formed = form.seconds(number_format(name).matrix_bytes(n, k), m, n, k)
    return float(formed * 1.3 * (n / 1024) ** 0.05 * (k / 1024) ** -0.04)


def table() -> pd.DataFrame:
    rows = [
        (name, m, n, k, true_seconds(name, m, n, k))
        for name, m, n, k in product(("bf16", "fp8"), M, WIDTHS, WIDTHS)
    ]
    return pd.DataFrame(rows, columns=["format", "m", "n", "k", "seconds"])


def model() -> GemmModel:
    return GemmModel.from_tables({"gemm": table()}, FITTED, GPU)


def test_a_row_is_given_back() -> None:
    predicted = model().seconds("bf16", 64, 4096, 1024)
    assert predicted.seconds == pytest.approx(true_seconds("bf16", 64, 4096, 1024))
    assert (predicted.source, predicted.inside) == ("imported", True)
    assert (predicted.low, predicted.high) == (0.9, 1.1)


def test_a_shape_between_the_knots_follows_the_form() -> None:
    predicted = model().seconds("fp8", 200, 6000, 3000)
    assert predicted.seconds == pytest.approx(true_seconds("fp8", 200, 6000, 3000), rel=0.01)


def test_beyond_the_grid_the_edge_holds_with_a_wider_interval() -> None:
    at_edge = true_seconds("bf16", 8192, 16384, 4096)
    form = GemmForm(**FORM)
    edge_factor = at_edge / form.seconds(2 * 16384 * 4096, 8192, 16384, 4096)
    predicted = model().seconds("bf16", 30000, 60000, 4096)
    expected = edge_factor * form.seconds(2 * 60000 * 4096, 30000, 60000, 4096)
    assert predicted.seconds == pytest.approx(float(expected), rel=0.01)
    assert not predicted.inside
    assert (predicted.low, predicted.high) == (0.8, 1.3)


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(64, 40000),
    k=st.integers(64, 40000),
    name=st.sampled_from(["bf16", "fp8", "int4_g128"]),
)
def test_more_rows_never_take_less(n: int, k: int, name: str) -> None:
    noisy = table()
    noise = np.random.default_rng(3).normal(0.0, 0.3, len(noisy))
    noisy = noisy.assign(seconds=noisy["seconds"] * np.exp(noise))
    rows = np.geomspace(1, 1e6, 400)
    predicted = GemmModel.from_tables({"gemm": noisy}, FITTED, GPU).seconds(name, rows, n, k)
    assert (np.diff(predicted.seconds) >= 0).all()


def test_an_array_and_its_numbers_agree() -> None:
    rows = np.array([[0.5, 1.0], [777.0, 1e5]])
    one = model()
    many = one.seconds("bf16", rows, 2048, 2048)
    assert many.seconds == pytest.approx(
        np.array([[one.seconds("bf16", m, 2048, 2048).seconds for m in line] for line in rows])
    )
    assert not many.inside


def test_the_roofline_is_the_datasheets() -> None:
    weights_s = 2 * 4096 * 4096 / GPU.memory_bandwidth_bytes_per_s
    roofline_s = model().seconds("bf16", 1, 4096, 4096).roofline_s
    assert roofline_s == pytest.approx(weights_s, rel=0.01)
    flops_s = 2 * 8192 * 4096 * 4096 / GPU.dense_flops_per_s["bf16"]
    assert model().seconds("bf16", 8192, 4096, 4096).roofline_s == pytest.approx(flops_s)


# --- formats without rows -----------------------------------------------------------------------


def test_int4_streams_a_quarter_of_the_bytes_and_multiplies_as_bf16() -> None:
    one = model()
    few, many = (one.seconds("int4_g128", m, 16384, 16384) for m in (1, 8192))
    bf16_few, bf16_many = (one.seconds("bf16", m, 16384, 16384) for m in (1, 8192))
    assert (few.source, few.low, few.high) == ("scaled", 0.6, 2.5)
    # 4.125 of 16 bits at 3 of 4 TB/s, beside a launch of 3 us
    assert few.seconds == pytest.approx(bf16_few.seconds * 4.125 / 16 * 4 / 3, rel=0.05)
    assert many.seconds == pytest.approx(bf16_many.seconds, rel=0.01)


def test_fp16_has_bf16s_time_and_interval_but_says_scaled() -> None:
    fp16, bf16 = (model().seconds(name, 64, 4096, 4096) for name in ("fp16", "bf16"))
    assert fp16.seconds == bf16.seconds
    assert (fp16.source, fp16.high) == ("scaled", bf16.high)


def test_fp8_block_is_scaled_from_fp8_when_it_has_no_rows() -> None:
    scaled, fp8 = (model().seconds(name, 64, 4096, 4096) for name in ("fp8_block", "fp8"))
    assert scaled.source == "scaled"
    assert scaled.seconds == pytest.approx(fp8.seconds, rel=0.01)


def test_a_slower_precision_multiplies_longer() -> None:
    slow = replace(GPU, dense_flops_per_s={**GPU.dense_flops_per_s, "int8": 1e14})
    fast, slowed = (
        GemmModel.from_tables({"gemm": table()}, FITTED, gpu).seconds("int8", 8192, 8192, 8192)
        for gpu in (GPU, slow)
    )
    assert slowed.seconds > 10 * fast.seconds


def test_scaling_to_quantised_activations_adds_the_kernel_that_quantises() -> None:
    only_bf16 = {"gemm": {**FITTED["gemm"], "formats": {"bf16": FITTED["gemm"]["formats"]["bf16"]}}}
    quantise = {"t0_s": 2e-6, "quantised_per_s": 1e12}
    without, added = (
        GemmModel.from_tables({"gemm": table()}, fitted, GPU).seconds("fp8", 1, 256, 256)
        for fitted in (only_bf16, {**only_bf16, "quantise": quantise})
    )
    factor = true_seconds("bf16", 1, 256, 256) / float(
        GemmForm(**FORM).seconds(2 * 256 * 256, 1, 256, 256)
    )
    assert added.seconds - without.seconds == pytest.approx(2e-6 * factor, rel=0.01)


def test_without_rows_the_datasheet_answers_and_says_so() -> None:
    predicted = GemmModel.from_tables({}, {}, GPU).seconds("bf16", 1, 4096, 4096)
    assert (predicted.source, predicted.inside) == ("datasheet", False)
    assert predicted.seconds == predicted.roofline_s
    assert predicted.high > 2


# --- quantising ---------------------------------------------------------------------------------


def quantise_table() -> pd.DataFrame:
    rows = [(m, k, 2e-6 + 1.2 * m * k / 1e12) for m, k in product(M, WIDTHS)]
    return pd.DataFrame(rows, columns=["m", "k", "seconds"])


def test_quantising_is_read_between_and_beyond_its_rows() -> None:
    fitted = {"quantise": {"t0_s": 2e-6, "quantised_per_s": 1e12, "interval": [0.9, 1.1]}}
    one = QuantiseModel.from_tables({"quantise": quantise_table()}, fitted, GPU)
    inside, beyond = one.seconds(4096, 16384), one.seconds(65536, 16384)
    assert inside.seconds == pytest.approx(2e-6 + 1.2 * 4096 * 16384 / 1e12, rel=0.02)
    assert beyond.seconds == pytest.approx(8 * one.seconds(8192, 16384).seconds, rel=0.02)
    assert (inside.inside, beyond.inside) == (True, False)


def test_quantising_without_rows_is_the_datasheets_traffic() -> None:
    predicted = QuantiseModel.from_tables({}, {}, GPU).seconds(1024, 4096)
    assert predicted.seconds == pytest.approx(3 * 1024 * 4096 / GPU.memory_bandwidth_bytes_per_s)
    assert predicted.source == "datasheet"
