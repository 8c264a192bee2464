"""Parts of a step against their references, and inputs cut for a point against fresh ones."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
# Imports of what needs torch come after the skip where there is none.

from tonnage.kernels import compare  # noqa: E402
from tonnage.kernels.part_specs import PART_KERNELS  # noqa: E402
from tonnage.kernels.point_timing import (  # noqa: E402
    PointTimer,
    _cut_of,
    backend_of,
    measured_kernels,
)
from tonnage.kernels.provenance import provenance  # noqa: E402
from tonnage.kernels.spec import KernelSpec  # noqa: E402
from tonnage.kernels.timing import Method  # noqa: E402

EXAMPLES = [(spec, axes) for spec in PART_KERNELS for axes in spec.examples]


@pytest.mark.parametrize(
    ("spec", "axes"), EXAMPLES, ids=[f"{spec.name}-{axes}" for spec, axes in EXAMPLES]
)
def test_a_part_gives_what_its_reference_gives(spec: KernelSpec, axes: Any) -> None:
    inputs = spec.prepare(spec.make_inputs(axes, 0, "cpu"), "cpu")
    errors = compare.output_errors(spec, spec.run(inputs, "cpu"), spec.reference(inputs))
    assert all(errors[name] <= bound for name, bound in spec.tolerances.items())
    assert spec.flops(axes) > 0
    assert spec.bytes(axes) > 0


def test_experts_in_turn_touch_all_of_them_and_as_often() -> None:
    spec = measured_kernels()["experts_bf16"]
    sizes = {"experts": 8, "top_k": 2, "hidden": 64, "inter": 64, "ways": 1}
    ids = spec.make_inputs({"tokens": 12, **sizes, "balanced": 1}, 0, "cpu")["ids"]
    assert torch.bincount(ids.flatten()).tolist() == [3] * 8
    drawn = spec.make_inputs({"tokens": 12, **sizes, "balanced": 0}, 0, "cpu")["ids"]
    assert all(len(set(row)) == 2 for row in drawn.tolist())


_EXPERTS = {"experts": 4, "top_k": 2, "hidden": 128, "inter": 128, "ways": 1, "balanced": 1}
_PAGED = {"page_tokens": 16, "ragged": 0}
# kernel, the largest axes, those of the point
CUTS: list[tuple[str, dict[str, int], dict[str, int]]] = [
    ("gemm_bf16", {"m": 32, "n": 144, "k": 256}, {"m": 5}),
    ("gemm_int4_g128", {"m": 65, "n": 144, "k": 256}, {"m": 17}),
    ("gemm_fp8_row", {"m": 32, "n": 144, "k": 256}, {"m": 1}),
    ("gemm_fp8_block", {"m": 32, "n": 144, "k": 256}, {"m": 17}),
    ("experts_int4_g128", {"tokens": 16, **_EXPERTS}, {"tokens": 3}),
    (
        "gqa_decode_fp8",
        {"batch": 3, "heads": 4, "kv_heads": 2, "head_dim": 64, "context_tokens": 80, **_PAGED},
        {"context_tokens": 33},
    ),
    (
        "mla_decode_bf16",
        {"batch": 2, "heads": 2, "context_tokens": 64, **_PAGED},
        {"context_tokens": 1},
    ),
]


@pytest.mark.parametrize(("name", "largest", "less"), CUTS, ids=[one[0] for one in CUTS])
def test_inputs_cut_for_a_point_give_what_the_reference_gives(
    name: str, largest: dict[str, int], less: dict[str, int]
) -> None:
    spec = measured_kernels()[name]
    cut = _cut_of(name)
    assert cut is not None
    inputs = cut(spec.prepare(spec.make_inputs(largest, 0, "cpu"), "cpu"), {**largest, **less})
    found, wanted = spec.run(inputs, "cpu"), spec.reference(inputs)
    errors = compare.output_errors(spec, found, wanted)
    assert all(errors[key] <= bound for key, bound in spec.tolerances.items())
    (axis, value) = next(iter(less.items()))
    if axis != "context_tokens":
        assert len(next(iter(found.values()))) == value


def test_points_of_one_weight_are_timed_on_one_set_of_inputs() -> None:
    method = Method(samples=3, sample_s=1e-5, budget_s=0.01, warm_ups=1)
    timer = PointTimer(method, provenance("cpu", 1))
    largest = {"m": 64, "n": 128, "k": 128}
    kept = []
    for m in (1, 64):
        axes = {**largest, "m": m}
        row = timer.measure("gemm_int4_g128", axes, largest, cold=True, graph=False)
        assert row is not None
        assert (row.axes, row.backend, row.graph) == (axes, "cpu", False)
        assert row.timing.seconds_median > 0
        assert row.flops == 2 * m * 128 * 128
        kept.append(timer._kept[1])
    assert kept[0] is kept[1]
    assert "levels" not in kept[0][0]
    assert kept[0][0]["x"].shape == (64, 128)


def test_a_device_without_a_kernel_says_so() -> None:
    timer = PointTimer(Method(samples=3), provenance("cpu", 1))
    axes = {"m": 1, "n": 128, "k": 128}
    assert timer.measure("gemm_nvfp4", axes, axes, cold=True, graph=False) is None
    assert backend_of(measured_kernels()["gemm_bf16"], "cuda") == "torch"
    assert backend_of(measured_kernels()["gqa_decode_bf16"], "cuda") == "triton"
