"""Numeric errors of formats: brute force over every code, hand-made tensors, known behaviour."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tonnage.kernels.quantise.errors import (
    KV_FORMATS,
    WEIGHT_FORMATS,
    numeric_error,
    synthetic,
    tensor_shape,
)
from tonnage.kernels.quantise.nvfp4 import E2M1_VALUES

GAUSSIAN = synthetic(64, 1024, 0.0, 1.0)
FEW = synthetic(64, 1024, 0.001, 20.0)
MANY = synthetic(64, 1024, 0.01, 20.0)


def relative(error: np.ndarray, exact: np.ndarray) -> float:
    return float(np.sqrt((error**2).sum() / (exact**2).sum()))


def nearest(values: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Return the nearest code of each value, by looking at all of them."""
    return codes[np.abs(values[..., None] - codes).argmin(-1)]


def test_fp8_is_the_nearest_of_all_its_codes() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    codes = codes[np.isfinite(codes)]
    exact = GAUSSIAN[:4].numpy().astype(np.float64)
    found = numeric_error(GAUSSIAN[:4], KV_FORMATS["fp8_e4m3, scale 1"])
    assert found is not None
    assert found.relative_rms == pytest.approx(
        relative(nearest(exact, codes) - exact, exact), rel=1e-5
    )


def test_fp8_errs_by_what_three_bits_of_mantissa_do() -> None:
    """Rounding by at most half of 2^-3 of the power of two below, evenly: 2^-3 / sqrt(12) of it.

    Over one octave of values spread evenly, whose root mean square is sqrt(7 / 3) of the power.
    """
    octave = torch.linspace(1.0, 2.0, 64 * 1024 + 1)[:-1].reshape(64, 1024)
    found = numeric_error(octave, KV_FORMATS["fp8_e4m3, scale 1"])
    assert found is not None
    assert found.relative_rms == pytest.approx(2**-3 / np.sqrt(12) / np.sqrt(7 / 3), rel=0.01)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4_is_the_nearest_level_of_its_group(group: int) -> None:
    exact = GAUSSIAN[:16].numpy().astype(np.float64).reshape(16, -1, group)
    scale = torch.tensor(np.abs(exact).max(-1) / 7).to(torch.bfloat16).double().numpy()[..., None]
    stored = np.clip(np.round(exact / scale), -8, 7) * scale
    found = numeric_error(GAUSSIAN[:16], WEIGHT_FORMATS[f"int4_g{group}"])
    assert found is not None
    assert found.relative_rms == pytest.approx(relative(stored - exact, exact), rel=1e-3)


def test_nvfp4_is_the_nearest_of_its_sixteen_values() -> None:
    exact = GAUSSIAN[:16].numpy().astype(np.float64).reshape(16, -1, 16)
    largest = np.abs(exact).max()
    tensor_scale = largest / (448 * 6)
    block = torch.tensor(np.abs(exact).max(-1) / (6 * tensor_scale)).float()
    scale = block.to(torch.float8_e4m3fn).double().numpy()[..., None] * tensor_scale
    codes = np.array([*E2M1_VALUES, *(-value for value in E2M1_VALUES)])
    stored = nearest(exact / scale, codes) * scale
    found = numeric_error(GAUSSIAN[:16], WEIGHT_FORMATS["nvfp4"])
    assert found is not None
    assert found.relative_rms == pytest.approx(relative(stored - exact, exact), rel=1e-3)


def error_of(values: torch.Tensor, label: str) -> float:
    found = numeric_error(values, WEIGHT_FORMATS[label])
    assert found is not None
    return found.ordinary_rms


def test_larger_groups_suffer_more_and_from_outliers_most() -> None:
    for values in (GAUSSIAN, FEW, MANY):
        by_group = [error_of(values, f"int4_g{group}") for group in (32, 64, 128)]
        assert by_group == sorted(by_group)
    for label in ("int4_g32", "int4_g64", "int4_g128", "nvfp4"):
        errors = [error_of(values, label) for values in (GAUSSIAN, FEW, MANY)]
        assert errors == sorted(errors)
        assert errors[-1] > 1.5 * errors[0]
    # FP8 has its own exponent for every value: an outlier does not cost its neighbours anything.
    assert error_of(MANY, "fp8_channel") == pytest.approx(
        error_of(GAUSSIAN, "fp8_channel"), rel=0.05
    )


def test_values_beyond_fp8_are_counted_and_clipped() -> None:
    values = torch.ones(16, 1024)
    values[0, :4] = 10_000.0
    assert tensor_shape(values).beyond_fp8_share == 4 / values.numel()
    unscaled = numeric_error(values, KV_FORMATS["fp8_e4m3, scale 1"])
    scaled = numeric_error(values, KV_FORMATS["fp8_e4m3, scale per row"])
    assert unscaled is not None
    assert scaled is not None
    assert unscaled.relative_rms > 0.9
    assert unscaled.worst_row_rms > unscaled.relative_rms
    assert scaled.relative_rms < 0.03


def test_a_scale_per_tensor_flushes_what_is_small() -> None:
    values = torch.full((16, 1024), 1e-4)
    values[0, 0] = 448.0
    found = numeric_error(values, WEIGHT_FORMATS["fp8"])
    assert found is not None
    assert found.flushed_share == pytest.approx(1.0, abs=1e-3)
    assert found.ordinary_rms == pytest.approx(1.0)


def test_nothing_but_zeros_has_no_error() -> None:
    zeros = torch.zeros(16, 1024)
    for trip in WEIGHT_FORMATS.values():
        found = numeric_error(zeros, trip)
        assert found is not None
        assert (found.relative_rms, found.worst_row_rms, found.flushed_share) == (0.0, 0.0, 0.0)
    assert tensor_shape(zeros).peak_over_rms == 0.0


def test_a_shape_that_a_format_refuses_has_no_error() -> None:
    odd = torch.ones(16, 96)  # no multiple of 128, nor of 64
    refused = {label for label, trip in WEIGHT_FORMATS.items() if numeric_error(odd, trip) is None}
    assert refused == {"fp8_block", "int4_g32", "int4_g64", "int4_g128", "nvfp4"}


def test_outliers_are_as_many_as_were_asked_for() -> None:
    assert tensor_shape(GAUSSIAN).outlier_share == 0.0
    # A value made 20 times larger is beyond 6 times the rms unless it was small before.
    assert 0.0003 < tensor_shape(FEW).outlier_share < 0.001
    assert torch.equal(synthetic(8, 64, 0.1, 3.0, seed=7), synthetic(8, 64, 0.1, 3.0, seed=7))
