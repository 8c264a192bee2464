"""Compare a kernel's outputs with its reference: one measure, for tests, benchmarks and CI."""

from __future__ import annotations

import torch

from tonnage.kernels.spec import KernelSpec, Outputs


def row_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the worst element's error relative to itself or its row's RMS, whichever is larger.

    The row is the last dimension, so a small row cannot hide behind a large one; a NaN or any
    difference in a row of zeros is infinite.
    """
    if actual.shape != expected.shape:
        raise ValueError(f"shape {tuple(actual.shape)} against {tuple(expected.shape)}")
    if expected.numel() == 0:
        return 0.0
    found, wanted = actual.double().cpu(), expected.double().cpu()
    rms = wanted.square().mean(-1, keepdim=True).sqrt() if wanted.dim() else wanted.abs()
    error = (found - wanted).abs() / torch.maximum(wanted.abs(), rms)
    error[found == wanted] = 0.0
    return float(error.nan_to_num(nan=torch.inf, posinf=torch.inf).max())


def same_bytes(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Say whether two tensors have the same type, shape and bytes."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    left, right = (t.cpu().contiguous().view(torch.uint8) for t in (actual, expected))
    return torch.equal(left, right)


def output_errors(spec: KernelSpec, actual: Outputs, expected: Outputs) -> dict[str, float]:
    """Return every output's error: infinite where the same bytes were asked for and differ."""
    if set(actual) != set(spec.tolerances) or set(expected) != set(spec.tolerances):
        raise ValueError(f"{spec.name} gave {sorted(actual)}, not {sorted(spec.tolerances)}")
    errors = {}
    for name, tolerance in spec.tolerances.items():
        if tolerance == 0.0:
            errors[name] = 0.0 if same_bytes(actual[name], expected[name]) else float("inf")
        else:
            errors[name] = row_error(actual[name], expected[name])
    return errors
