"""How far a format moves the values of a tensor: quantised by the kernels' own quantisers, back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt

import torch

from tonnage.kernels.quantise import fp8, int4, nvfp4
from tonnage.sim.domain import BadInputError

OUTLIER_RMS = 6.0  # an outlier is larger than so many times the root mean square of its tensor
RoundTrip = Callable[[torch.Tensor], torch.Tensor]  # f32 [rows, k] to f32 [rows, k]


@dataclass(frozen=True, slots=True)
class NumericError:
    """Errors of one tensor in one format, relative to the root mean square of the same values.

    `ordinary_rms`: of the values that are no outliers, whose group an outlier may share.
    `worst_row_rms`: of the row that suffers most. `flushed_share`: values that became 0.
    """

    relative_rms: float
    ordinary_rms: float
    worst_row_rms: float
    flushed_share: float


@dataclass(frozen=True, slots=True)
class TensorShape:
    """What a tensor is like; FP8 with scale 1 clips the share `beyond_fp8_share`."""

    rms: float
    peak_over_rms: float
    outlier_share: float
    beyond_fp8_share: float


def _int4_trip(group: int) -> RoundTrip:
    return lambda values: int4.dequantise_int4(int4.quantise_int4(values, group))


# As engines store weights: a scale per tensor, output channel, block or group.
WEIGHT_FORMATS: dict[str, RoundTrip] = {
    "fp8": lambda values: fp8.dequantise_tensor(*fp8.quantise_tensor(values)),
    "fp8_channel": lambda values: fp8.dequantise_rows(*fp8.quantise_rows(values)),
    "fp8_block": lambda values: fp8.dequantise_blocks(*fp8.quantise_blocks(values)),
    "int4_g32": _int4_trip(32),
    "int4_g64": _int4_trip(64),
    "int4_g128": _int4_trip(128),
    "nvfp4": lambda values: nvfp4.dequantise_nvfp4(nvfp4.quantise_nvfp4(values)),
}
# As engines store KV: as it is (a checkpoint without KV scales runs with scale 1), or scaled; the
# latent of sparse MLA has a scale per 128.
KV_FORMATS: dict[str, RoundTrip] = {
    "fp8_e4m3, scale 1": lambda values: fp8.to_e4m3(values).float(),
    "fp8_e4m3, scale per tensor": WEIGHT_FORMATS["fp8"],
    "fp8_e4m3, scale per row": WEIGHT_FORMATS["fp8_channel"],
    "fp8_e4m3, scale per 128": lambda values: fp8.dequantise_groups(*fp8.quantise_groups(values)),
}


def numeric_errors(
    values: torch.Tensor, trips: Mapping[str, RoundTrip]
) -> dict[str, NumericError | None]:
    """Return the errors of round trips of `[rows, k]`; None where a format refuses the shape."""
    exact = values.float()
    before = _Exact(exact, _outliers(exact), _row_energy(exact))
    return {label: _error(before, trip) for label, trip in trips.items()}


def numeric_error(values: torch.Tensor, trip: RoundTrip) -> NumericError | None:
    """Return the errors of one round trip."""
    return numeric_errors(values, {"": trip})[""]


@dataclass(frozen=True, slots=True)
class _Exact:
    """A tensor before it is quantised: f32 `[rows, k]`, its outliers, sums of squares by row."""

    values: torch.Tensor
    outliers: torch.Tensor
    energies: torch.Tensor


def _error(exact: _Exact, trip: RoundTrip) -> NumericError | None:
    try:
        stored = trip(exact.values)
    except BadInputError:
        return None
    error = stored - exact.values
    squares, of_outliers = error.square(), exact.outliers
    errors = squares.sum(-1, dtype=torch.float64)
    outlying = float(squares[of_outliers].sum(dtype=torch.float64))
    outlying_energy = float(exact.values[of_outliers].square().sum(dtype=torch.float64))
    rows = errors[exact.energies > 0] / exact.energies[exact.energies > 0]
    total, energy = float(errors.sum()), float(exact.energies.sum())
    return NumericError(
        relative_rms=_ratio(total, energy),
        ordinary_rms=_ratio(max(0.0, total - outlying), energy - outlying_energy),
        worst_row_rms=sqrt(float(rows.amax())) if len(rows) else 0.0,
        flushed_share=int(((stored == 0) & (exact.values != 0)).sum()) / stored.numel(),
    )


def tensor_shape(values: torch.Tensor) -> TensorShape:
    """Return the root mean square, the peak over it, and the share of outliers."""
    rms = _rms(values)
    return TensorShape(
        rms=rms,
        peak_over_rms=float(values.abs().amax()) / rms if rms else 0.0,
        outlier_share=int(_outliers(values).sum()) / values.numel(),
        beyond_fp8_share=int((values.abs() > fp8.E4M3_MAX).sum()) / values.numel(),
    )


def _outliers(values: torch.Tensor) -> torch.Tensor:
    return values.abs() > OUTLIER_RMS * _rms(values)


def _rms(values: torch.Tensor) -> float:
    return sqrt(float(_row_energy(values).sum()) / values.numel())


def _row_energy(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of each row, f64."""
    return values.square().sum(-1, dtype=torch.float64)


def _ratio(error: float, energy: float) -> float:
    """Return the error's root mean square over that of the values; 0 where there are none."""
    return sqrt(error / energy) if energy > 0 else 0.0


def synthetic(
    rows: int, columns: int, outlier_share: float, outlier_scale: float, seed: int = 0
) -> torch.Tensor:
    """Return Gaussian values `[rows, columns]`, a share of them at random made larger."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator)
    chosen = torch.rand(rows, columns, generator=generator) < outlier_share
    return torch.where(chosen, values * outlier_scale, values)
