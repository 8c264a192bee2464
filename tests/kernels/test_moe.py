"""Grouped GEMMs and the routing that feeds them: skewed, empty and single experts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.kernels.compare import output_errors, row_error
from tonnage.kernels.gemm_specs import GEMM_KERNELS, OUT_ERROR, expected_experts
from tonnage.kernels.ops import moe_gemm_fp8, moe_gemm_int4
from tonnage.kernels.ops.fp8_scales import Fp8Operands
from tonnage.kernels.ops.gemm_int4 import weight_of
from tonnage.kernels.ops.gemm_int4_reference import dequantised
from tonnage.kernels.ops.moe_gemm_reference import grouped
from tonnage.kernels.ops.moe_routing import blocks_max, combine, route, skewed_expert_ids
from tonnage.kernels.quantise import fp8
from tonnage.kernels.quantise.int4 import dequantise_int4, quantise_int4
from tonnage.kernels.spec import Axes, Inputs, KernelSpec
from tonnage.sim.domain import BadInputError

SPECS = {spec.name: spec for spec in GEMM_KERNELS if spec.name.startswith("moe")}
CASES = [
    pytest.param(spec, axes, id=f"{spec.name}-{axes['tokens']}-tokens-{axes['experts']}-experts")
    for spec in SPECS.values()
    for axes in spec.examples
]
TOKENS_129: Axes = {"tokens": 129, "experts": 3, "top_k": 2, "n": 80, "k": 128, "skew_percent": 300}


def generator_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- routing ------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None, database=None)
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(0, 40),
    experts=st.integers(1, 12),
    top_k=st.integers(1, 4),
    skew=st.floats(0, 4),
    block_m=st.sampled_from([1, 16, 64]),
)
def test_every_row_is_in_one_block_of_its_expert(
    seed: int, tokens: int, experts: int, top_k: int, skew: float, block_m: int
) -> None:
    top_k = min(top_k, experts)
    ids = skewed_expert_ids(tokens, experts, top_k, skew, generator_of(seed))
    routing = route(ids, experts, block_m)
    rows, flat = tokens * top_k, ids.flatten()
    sorted_rows = routing.sorted_rows.view(-1, block_m)
    used = int(routing.used_blocks)
    assert used == int(((flat.bincount(minlength=experts) + block_m - 1) // block_m).sum())
    assert used <= routing.blocks == blocks_max(rows, experts, block_m)
    real = sorted_rows < rows
    assert torch.equal(sorted_rows[real].sort().values, torch.arange(rows, dtype=torch.int32))
    assert bool((sorted_rows[~real] == rows).all())
    assert not bool(real[used:].any())
    assert bool(real[:used].any(1).all())
    for block in range(used):
        found = sorted_rows[block][real[block]]
        assert bool((flat[found.long()] == routing.block_experts[block]).all())
        assert bool((found.diff() > 0).all())


@settings(max_examples=15, deadline=None, database=None)
@given(seed=st.integers(0, 2**31), skew=st.floats(0, 3))
def test_a_token_goes_to_different_experts(seed: int, skew: float) -> None:
    ids = skewed_expert_ids(50, 9, 4, skew, generator_of(seed))
    assert int(ids.min()) >= 0
    assert int(ids.max()) < 9
    assert bool((ids.sort(1).values.diff(dim=1) > 0).all())


def test_skew_fills_few_experts() -> None:
    shares = []
    for skew in (0.0, 1.0, 3.0):
        counts = skewed_expert_ids(2000, 16, 2, skew, generator_of(1)).flatten().bincount()
        shares.append(float(counts.max() / counts.sum()))
    assert shares[0] < 0.08 < 0.12 < shares[1] < 0.45 < shares[2] <= 0.5


@pytest.mark.parametrize(("skew_percent", "within"), [(0, 0.03), (100, 0.1)])
def test_the_expected_experts_are_those_drawn(skew_percent: int, within: float) -> None:
    axes = {"tokens": 24, "experts": 64, "top_k": 4, "skew_percent": skew_percent}
    drawn = [
        len(skewed_expert_ids(24, 64, 4, skew_percent / 100, generator_of(seed)).unique())
        for seed in range(60)
    ]
    assert expected_experts(axes) == pytest.approx(sum(drawn) / len(drawn), rel=within)


def test_routing_refuses_what_is_no_routing() -> None:
    with pytest.raises(BadInputError, match="top_k = 5 of 4 experts"):
        skewed_expert_ids(1, 4, 5, 0.0, generator_of(0))
    with pytest.raises(BadInputError, match=r"expert_ids must be \[tokens, top_k\]"):
        route(torch.zeros(4), 4, 16)


# --- products -----------------------------------------------------------------------------------


def prepared(name: str, axes: Axes, seed: int = 0, ids: torch.Tensor | None = None) -> Inputs:
    inputs = SPECS[name].make_inputs(axes, seed)
    if ids is not None:
        inputs["expert_ids"] = ids
    return SPECS[name].prepare(inputs, "triton")


@pytest.mark.parametrize(("spec", "axes"), CASES)
def test_the_products_are_those_of_the_reference(spec: KernelSpec, axes: Axes) -> None:
    inputs = spec.prepare(spec.make_inputs(axes, seed=3), "triton")
    errors = output_errors(spec, spec.run(inputs), spec.reference(inputs))
    assert errors["out"] <= spec.tolerances["out"]


@pytest.mark.parametrize("name", SPECS)
def test_the_widest_tile(name: str) -> None:
    inputs = prepared(name, TOKENS_129)
    assert inputs["block_m"] == (64 if name.endswith("g32") else 128)
    expected = SPECS[name].reference(inputs)["out"]
    assert row_error(SPECS[name].run(inputs)["out"], expected) <= OUT_ERROR


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("busy", [0, 5])
def test_one_busy_expert_and_the_others_empty(name: str, busy: int) -> None:
    axes = {"tokens": 20, "experts": 6, "top_k": 1, "n": 48, "k": 128, "skew_percent": 0}
    inputs = prepared(name, axes, ids=torch.full((20, 1), busy, dtype=torch.int32))
    expected = SPECS[name].reference(inputs)["out"]
    assert row_error(SPECS[name].run(inputs)["out"], expected) <= OUT_ERROR


@pytest.mark.parametrize("name", SPECS)
def test_no_tokens_give_no_rows(name: str) -> None:
    inputs = prepared(name, {**TOKENS_129, "tokens": 0})
    assert SPECS[name].run(inputs)["out"].shape == (0, 80)


def test_k_may_end_inside_a_step() -> None:
    name = "moe_gemm_fp8_row"
    inputs = prepared(name, {**TOKENS_129, "tokens": 9, "k": 208})
    expected = SPECS[name].reference(inputs)["out"]
    assert row_error(SPECS[name].run(inputs)["out"], expected) <= OUT_ERROR


def test_an_fp8_layer_of_experts_is_weighted_and_summed() -> None:
    """Two grouped GEMMs with one routing: tokens to choices, choices back to tokens."""
    random = generator_of(2)
    tokens, experts, top_k, hidden, wide = 9, 4, 2, 128, 256
    ids = skewed_expert_ids(tokens, experts, top_k, 1.0, random)
    weights = torch.rand(tokens * top_k, generator=random)
    routing = route(ids, experts, 16)
    x, x_scale = fp8.quantise_groups(torch.randn(tokens, hidden, generator=random))
    up, up_scale = fp8.quantise_blocks(torch.randn(experts, wide, hidden, generator=random))
    down, down_scale = fp8.quantise_blocks(torch.randn(experts, hidden, wide, generator=random))

    inner = moe_gemm_fp8.moe_gemm_fp8(Fp8Operands(x, up, x_scale, up_scale, "block"), routing)
    y, y_scale = fp8.quantise_groups(inner)
    operands = Fp8Operands(y, down, y_scale, down_scale, "block")
    out = combine(moe_gemm_fp8.moe_gemm_fp8(operands, routing.by_choice, weights), top_k)

    per_choice = grouped(
        fp8.dequantise_groups(y, y_scale),
        fp8.dequantise_blocks(down, down_scale),
        ids.reshape(-1, 1),
    )
    expected = (per_choice * weights.double()[:, None]).view(tokens, top_k, hidden).sum(1)
    assert row_error(out, expected) <= 2 * OUT_ERROR  # of choices that may cancel, rounded each


def test_int4_rows_are_weighted() -> None:
    name = "moe_gemm_int4_g128"
    inputs = prepared(name, {**TOKENS_129, "tokens": 9})
    weights = torch.rand(18, generator=generator_of(0))
    routing = route(inputs["expert_ids"], 3, 16)
    out = moe_gemm_int4.moe_gemm_int4(inputs["x"], weight_of(inputs), routing, weights)
    expected = grouped(inputs["x"], dequantised(inputs), inputs["expert_ids"])
    assert row_error(out, expected * weights.double()[:, None]) <= OUT_ERROR


def test_experts_in_groups_of_64_run_though_they_do_not_ship() -> None:
    random = generator_of(0)
    weight = quantise_int4(torch.randn(3, 32, 256, generator=random), 64)
    x, ids = (
        torch.randn(5, 256, generator=random).bfloat16(),
        torch.tensor([[0], [2], [2], [0], [2]]),
    )
    out = moe_gemm_int4.moe_gemm_int4(x, weight, route(ids, 3, 16))
    assert row_error(out, grouped(x, dequantise_int4(weight), ids)) <= OUT_ERROR


# --- refusals -----------------------------------------------------------------------------------


def test_a_routing_of_other_tokens_is_refused() -> None:
    inputs = prepared("moe_gemm_fp8_block", {**TOKENS_129, "tokens": 3})
    operands = Fp8Operands.of(inputs, "block")
    routing = route(torch.zeros(4, 2), 3, 16)
    with pytest.raises(BadInputError, match="x has 3 rows, the routing 8 rows of 2 choices"):
        moe_gemm_fp8.moe_gemm_fp8(operands, routing)
    routing = route(inputs["expert_ids"], 3, 16)
    with pytest.raises(BadInputError, match=r"row_weights must be float32 \[6\], not \[3\]"):
        moe_gemm_fp8.moe_gemm_fp8(operands, routing, torch.ones(3))
    with pytest.raises(BadInputError, match="block_m = 48 has no tile; route with 16, 32, 64, 128"):
        moe_gemm_fp8.moe_gemm_fp8(operands, route(inputs["expert_ids"], 3, 48))


def test_experts_with_one_scale_are_refused() -> None:
    inputs = prepared("moe_gemm_fp8_block", {**TOKENS_129, "tokens": 3})
    inputs |= {"x_scale": torch.ones(1), "w_scale": torch.ones(3, 1)}
    with pytest.raises(BadInputError, match="experts have row or block scales, not tensor"):
        moe_gemm_fp8.moe_gemm_fp8(
            Fp8Operands.of(inputs, "tensor"), route(inputs["expert_ids"], 3, 16)
        )


def test_experts_with_zero_points_are_refused() -> None:
    weight = quantise_int4(torch.randn(3, 16, 128), symmetric=False)
    with pytest.raises(BadInputError, match="INT4 experts must be symmetric"):
        moe_gemm_int4.moe_gemm_int4(
            torch.ones(2, 128).bfloat16(), weight, route(torch.zeros(2, 1), 3, 16)
        )
