"""The CPU backend of every registered kernel against its reference, and its parts."""

from __future__ import annotations

import pytest
import torch

from tonnage.kernels.compare import output_errors, row_error
from tonnage.kernels.cpu import attention, formats, gemm_int4, linear
from tonnage.kernels.cpu.backend import NONE, PREPARES, RUNS
from tonnage.kernels.dense_specs import DENSE_KERNELS
from tonnage.kernels.registry import KERNELS
from tonnage.kernels.spec import Axes, KernelSpec, load

CASES = [
    pytest.param(spec, axes, id=f"{spec.name}-{number}")
    for spec in KERNELS.values()
    for number, axes in enumerate(spec.examples)
]


def wrong_outputs(
    spec: KernelSpec, axes: Axes, seed: int, backend: str = "cpu"
) -> dict[str, float]:
    """Return the outputs whose error is beyond the kernel's own bound."""
    made = spec.make_inputs(axes, seed)
    expected = spec.reference(made)
    outputs = spec.run(spec.prepare(made, backend), backend)
    errors = output_errors(spec, outputs, expected)
    return {name: error for name, error in errors.items() if error > spec.tolerances[name]}


@pytest.mark.parametrize(("spec", "axes"), CASES)
def test_it_equals_the_reference(spec: KernelSpec, axes: Axes) -> None:
    if spec.name in NONE:
        pytest.skip(NONE[spec.name])
    assert "cpu" in spec.runs, "give it a CPU backend, or the reason why there is none"
    assert wrong_outputs(spec, axes, seed=11) == {}


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("name", ["gqa_prefill_bf16", "gqa_prefill_fp8"])
def test_prefill_is_right_on_either_kind_of_cpu(
    monkeypatch: pytest.MonkeyPatch, name: str, native: bool
) -> None:
    monkeypatch.setattr(attention, "multiplies_bf16", lambda: native)
    monkeypatch.setattr(attention, "PREFILL_ROWS", 50)
    spec = KERNELS[name]
    assert wrong_outputs(spec, spec.examples[2], seed=5) == {}


@pytest.mark.parametrize("spec", DENSE_KERNELS, ids=lambda spec: spec.name)
def test_dense_products_of_torch_are_right(spec: KernelSpec) -> None:
    assert [wrong_outputs(spec, axes, 3, "torch") for axes in spec.examples] == [{}] * len(
        spec.examples
    )


def test_names_are_those_of_the_registry_and_of_functions() -> None:
    assert {*RUNS, *NONE} <= set(KERNELS)
    assert not set(RUNS) & set(NONE)
    assert all(callable(load(dotted)) for dotted in (*RUNS.values(), *PREPARES.values()))


def test_running_again_gives_the_same() -> None:
    spec = KERNELS["kv_copy_fp8"]
    inputs = spec.prepare(spec.make_inputs(spec.examples[1], 3), "cpu")
    first = {name: value.clone() for name, value in spec.run(inputs, "cpu").items()}
    assert output_errors(spec, spec.run(inputs, "cpu"), first) == {"target": 0.0}


def test_all_e4m3_codes_are_decoded_exactly() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    pairs = torch.stack((codes, codes.flip(0)), -1).flatten()
    expected = pairs.view(torch.float8_e4m3fn).float()
    found = formats.decode_e4m3(pairs)
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert int(found.isnan().sum()) == 4


def test_all_int4_levels_are_decoded_exactly() -> None:
    levels = torch.randint(16, (5, 64), dtype=torch.uint8, generator=torch.Generator())
    packed = levels[:, 0::2] | (levels[:, 1::2] << 4)
    assert torch.equal(formats.decode_int4(packed), levels.float() - 8)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("m", [1, 2, 3, 17, 65])
@pytest.mark.parametrize("n", [16, 128, 200])
def test_a_dense_product_is_right_on_either_kind_of_cpu(
    monkeypatch: pytest.MonkeyPatch, native: bool, m: int, n: int
) -> None:
    monkeypatch.setattr(linear, "multiplies_bf16", lambda: native)
    random = torch.Generator().manual_seed(m + n)
    x, w = (torch.randn(rows, 96, generator=random).bfloat16() for rows in (m, n))
    assert row_error(linear.linear(x, w), x.double() @ w.double().mT) < 1e-2


@pytest.mark.parametrize("m", [gemm_int4.FUSED_M_MAX, gemm_int4.FUSED_M_MAX + 1])
def test_packed_and_decoded_int4_agree(m: int) -> None:
    spec = KERNELS["gemm_int4_g128_zp"]
    assert wrong_outputs(spec, {"m": m, "n": 272, "k": 256}, seed=m) == {}


def test_groups_hold_every_request_with_a_context_once() -> None:
    tokens = torch.tensor([5, 0, 1000, 990, 700, 4, 0, 1])
    groups = list(attention.groups_of(tokens, row_bytes=8))
    assert sorted(request for group in groups for request in group) == [0, 2, 3, 4, 5, 7]
    assert groups[0] == [2, 3]
    lengths = [[int(tokens[request]) for request in group] for group in groups]
    assert all(min(one) >= attention.SHORTEST_SHARE * max(one) for one in lengths)


def test_groups_keep_their_gathered_rows_small() -> None:
    tokens = torch.full((10,), 1000)
    row_bytes = attention.GATHERED_BYTES_MAX // 3000
    groups = list(attention.groups_of(tokens, row_bytes))
    assert [len(group) for group in groups] == [3, 3, 3, 1]


def test_a_batch_of_empty_requests_attends_to_nothing() -> None:
    spec = KERNELS["gqa_decode_fp8"]
    inputs = spec.make_inputs(spec.examples[1], 0)
    inputs["context_tokens"].zero_()
    assert not spec.run(inputs, "cpu")["output"].any()
