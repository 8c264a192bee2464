"""The products that an engine launches, against shapes known from SGLang traces."""

from __future__ import annotations

import pytest

from tonnage.scenarios.catalogue import load_model, model_names
from tonnage.sim.cost.fused import fused_products
from tonnage.sim.cost.operators import matrix_products
from tonnage.sim.domain import ParallelLayout, Role


def shapes(name: str, layout: ParallelLayout) -> dict[str, tuple[int, int, int]]:
    return {
        f"{product.role.value}.{product.name}": (
            product.out_features,
            product.in_features,
            count,
        )
        for product, count in fused_products(load_model(name), layout, "sglang")
    }


def test_kimi_on_eight_gpus_launches_the_shapes_of_the_trace_study() -> None:
    """2112 x 7168 (q_a and kv_a), 1536 x 1536 (q_b of 8 heads), 7168 x 1024 (o of 8 heads)."""
    found = shapes("kimi-k2.6", ParallelLayout(tp=8))
    assert found["attention.fused_qkv_a_proj"] == (2112, 7168, 61)
    assert found["attention.q_b_proj"] == (1536, 1536, 61)
    assert found["attention.o_proj"] == (7168, 1024, 61)
    assert found["shared_expert.gate_up_proj"] == (512, 7168, 60)
    assert found["head.lm_head"] == (20480, 7168, 1)


def test_gqa_projections_are_one_product_and_kv_heads_are_not_split_beyond_their_number() -> None:
    """32 query and 8 kv heads of 128: over 16 ranks, 2 query heads and one kv head each."""
    found = shapes("llama-3.1-8b", ParallelLayout(tp=16))
    assert found["attention.qkv_proj"] == (2 * 128 + 2 * 128, 4096, 32)


@pytest.mark.parametrize("name", model_names())
@pytest.mark.parametrize("layout", [ParallelLayout(), ParallelLayout(tp=8)])
def test_merging_loses_no_weight(name: str, layout: ParallelLayout) -> None:
    model = load_model(name)
    merged = sum(
        count * product.out_features * product.in_features
        for product, count in fused_products(model, layout, "sglang")
    )
    apart = sum(
        product.count * product.parameters
        for product in matrix_products(model, layout, "sglang")
        if product.tensor.role is not Role.ROUTED_EXPERT
    )
    assert merged == pytest.approx(apart, rel=1e-3)
