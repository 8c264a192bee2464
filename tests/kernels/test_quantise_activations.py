"""The kernels that quantise activations give torch's bytes."""

from __future__ import annotations

import pytest
import torch

from tonnage.kernels.compare import output_errors, same_bytes
from tonnage.kernels.gemm_specs import ACTIVATION_KERNELS
from tonnage.kernels.ops import quantise_activations
from tonnage.kernels.quantise import fp8
from tonnage.kernels.spec import Axes, KernelSpec
from tonnage.sim.domain import BadInputError

CASES = [
    pytest.param(spec, axes, id=f"{spec.name}-{axes['m']}x{axes['k']}")
    for spec in ACTIVATION_KERNELS
    for axes in spec.examples
]


@pytest.mark.parametrize(("spec", "axes"), CASES)
def test_the_bytes_are_torchs(spec: KernelSpec, axes: Axes) -> None:
    inputs = spec.make_inputs(axes, seed=3)
    errors = output_errors(spec, spec.run(inputs), spec.reference(inputs))
    assert set(errors.values()) == {0.0}


def test_every_bf16_is_quantised_as_torch_does() -> None:
    codes = torch.arange(0x7F80, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    x = torch.cat((codes, -codes)).reshape(-1, 128)  # all that are finite
    found, wanted = quantise_activations.quantise_groups(x), fp8.quantise_groups(x)
    assert all(same_bytes(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("scales", ["row", "block"])
def test_bytes_are_those_of_the_tensors(scales: str) -> None:
    spec = next(spec for spec in ACTIVATION_KERNELS if spec.name.endswith(scales))
    inputs = spec.make_inputs({"m": 48, "k": 256}, seed=0)
    written = sum(tensor.nbytes for tensor in spec.run(inputs).values())
    assert spec.bytes({"m": 48, "k": 256}) == inputs["x"].nbytes + written


def test_no_rows_give_no_rows() -> None:
    codes, scales = quantise_activations.quantise_groups(torch.empty(0, 256).bfloat16())
    assert (codes.shape, scales.shape) == ((0, 256), (2, 0))
    codes, scales = quantise_activations.quantise_rows(torch.empty(0, 256).bfloat16())
    assert (codes.shape, scales.shape) == ((0, 256), (0,))


def test_other_activations_are_refused() -> None:
    with pytest.raises(BadInputError, match="k = 192 must be a positive multiple of 128"):
        quantise_activations.quantise_groups(torch.ones(2, 192).bfloat16())
    with pytest.raises(BadInputError, match="k = 24 must be a positive multiple of 16"):
        quantise_activations.quantise_rows(torch.ones(2, 24).bfloat16())
    with pytest.raises(BadInputError, match=r"must be contiguous bfloat16, not torch\.float32"):
        quantise_activations.quantise_rows(torch.ones(2, 32))
