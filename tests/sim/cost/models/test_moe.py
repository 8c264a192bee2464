"""Routed experts from rows: at knots and between, unmeasured shapes, routings, formats."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.scenarios.catalogue import load_gpu
from tonnage.sim.cost.experts import busiest_rank_experts, busiest_rank_rows
from tonnage.sim.cost.models.moe import MoeModel
from tonnage.sim.cost.models.moe_form import MEASURED_ROUTINGS, ROUTINGS, MoeForm, MoeShape
from tonnage.sim.domain import BadInputError, MoeMlp

GPU = load_gpu("h200-sxm")
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
EXPERTS = {"kimi": (7168, 2048, 384, 8), "glm": (6144, 2048, 256, 8), "qwen": (2048, 768, 128, 8)}
LAYOUTS = ((1, 1), (8, 1), (1, 8))
FORM = {
    "t0_s": 2e-5,
    "bytes_per_s": 4e12,
    "flops_per_s": 8e14,
    "sharpness": 3.0,
    "row_bytes_per_s": 2e12,
    "expert_s": 1e-9,
}
SLOW_FORM = {**FORM, "bytes_per_s": 2e12}
POOLS = [("bf16", "triton"), ("fp8_block", "triton"), ("fp8_block", "cutlass"), ("int4", "marlin")]
INTERVALS = {
    "measured_interval": [0.95, 1.06],
    "inside_interval": [0.9, 1.1],
    "outside_interval": [0.8, 1.3],
    "scaled_interval": [0.7, 1.4],
}
FITTED: dict[str, Any] = {
    "moe": {
        "pools": [
            {"format": name, "kernel": kernel, "form": SLOW_FORM if kernel == "cutlass" else FORM}
            for name, kernel in POOLS
        ],
        "formats": {name: INTERVALS for name, _ in POOLS},
        "stand_in_intervals": {"8": [0.6, 1.5]},
    }
}


def off_form(shape: MoeShape) -> float:
    """A factor between measured and form that drifts with the sizes."""
    return 1.2 * (shape.hidden / 4096) ** 0.1 * (shape.experts / shape.ep / 128) ** -0.05


def true_seconds(
    name: str, tokens: float, shape: MoeShape, routing: str, kernel: str = "triton"
) -> float:
    form = MoeForm(**(SLOW_FORM if kernel == "cutlass" else FORM))
    skew = 1.0 if routing == "balanced" else 1.15
    formed = float(form.seconds(shape, shape.expert_bytes(name), tokens, routing))
    return formed * skew * off_form(shape)


def rows(experts: tuple[str, ...] = tuple(EXPERTS)) -> pd.DataFrame:
    found = []
    for (name, kernel), expert, layout, routing, tokens in product(
        POOLS, experts, LAYOUTS, MEASURED_ROUTINGS, TOKENS
    ):
        if kernel in ("triton", "cutlass") and (kernel == "cutlass") != (expert == "qwen"):
            continue
        shape = MoeShape(*EXPERTS[expert], *layout)
        seconds = true_seconds(name, tokens, shape, routing, kernel)
        source = "scaled" if name == "int4" and expert == "glm" else "imported"
        sizes = (*EXPERTS[expert], *layout)
        found.append((name, kernel, *sizes, routing, tokens, seconds, source))
    sizes_names = ["hidden", "inter", "experts", "top_k", "tp", "ep"]
    columns = ["format", "kernel", *sizes_names, "routing", "tokens", "seconds", "source"]
    return pd.DataFrame(found, columns=columns).sample(frac=1.0, random_state=0)


def model(experts: tuple[str, ...] = tuple(EXPERTS)) -> MoeModel:
    return MoeModel.from_tables({"moe": rows(experts)}, FITTED, GPU)


def kimi(tp: int = 8, ep: int = 1) -> MoeShape:
    return MoeShape(*EXPERTS["kimi"], tp, ep)


KIMI = (*EXPERTS["kimi"], 8, 1)


# --- measured experts ---------------------------------------------------------------------------


@pytest.mark.parametrize("routing", MEASURED_ROUTINGS)
def test_a_row_is_given_back(routing: str) -> None:
    predicted = model().seconds("fp8_block", 256, *KIMI, routing)
    assert predicted.seconds == pytest.approx(true_seconds("fp8_block", 256, kimi(), routing))
    assert (predicted.source, predicted.inside) == ("imported", True)
    assert (predicted.low, predicted.high) == (0.95, 1.06)


@pytest.mark.parametrize("tokens", [40, 48, 56])
def test_balance_fills_up_between_the_rows_where_it_does_in_truth(tokens: int) -> None:
    """At 48 tokens all 384 experts are touched; rows at 16 and 64 show no such corner."""
    predicted = model().seconds("fp8_block", tokens, *KIMI, "balanced").seconds
    truth = true_seconds("fp8_block", tokens, kimi(), "balanced")
    assert predicted == pytest.approx(truth, rel=0.01)


def test_numbers_and_arrays_agree() -> None:
    tokens = np.array([[0.5, 1.0, 3.0], [100.0, 5000.0, 3e6]])
    one = model()
    together = one.seconds("fp8_block", tokens, *KIMI)
    apart = [[float(one.seconds("fp8_block", t, *KIMI).seconds) for t in row] for row in tokens]
    np.testing.assert_allclose(together.seconds, apart)
    assert not together.inside


def test_no_tokens_at_all_give_no_times() -> None:
    empty = model().seconds("fp8_block", np.empty(0), *KIMI)
    assert np.shape(empty.seconds) == np.shape(empty.roofline_s) == (0,)


def test_beyond_the_rows_the_edge_holds_and_the_interval_widens() -> None:
    predicted = model().seconds("fp8_block", 65536, *KIMI, "balanced")
    truth = true_seconds("fp8_block", 65536, kimi(), "balanced")
    assert predicted.seconds == pytest.approx(truth, rel=0.01)
    assert not predicted.inside
    assert (predicted.low, predicted.high) == (0.8, 1.3)


@settings(deadline=None, max_examples=60)
@given(
    first=st.floats(1, 1e7),
    more=st.floats(1, 4),
    routing=st.sampled_from(ROUTINGS),
    layout=st.sampled_from([*LAYOUTS, (2, 4)]),
    name=st.sampled_from(["bf16", "fp8_block", "int4_g32", "nvfp4", "int8"]),
)
def test_more_tokens_never_take_less_time(
    first: float, more: float, routing: str, layout: tuple[int, int], name: str
) -> None:
    one = MODEL.seconds(name, first, *EXPERTS["glm"], *layout, routing).seconds
    two = MODEL.seconds(name, first * more, *EXPERTS["glm"], *layout, routing).seconds
    assert two >= one * (1 - 1e-12)


MODEL = model()


# --- uniform routing ----------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 8, 32, 200])
def test_uniform_routing_is_balance_that_touches_as_many_experts(tokens: int) -> None:
    touched = 384 * (1 - (1 - 8 / 384) ** tokens)
    uniform = MODEL.seconds("fp8_block", tokens, *KIMI, "uniform").seconds
    alike = MODEL.seconds("fp8_block", min(touched / 8, 48), *KIMI, "balanced").seconds
    rows_only = (
        MODEL.seconds("fp8_block", max(tokens, 48), *KIMI, "balanced").seconds
        / MODEL.seconds("fp8_block", 48, *KIMI, "balanced").seconds
    )
    assert uniform == pytest.approx(alike * rows_only, rel=1e-3)


def test_uniform_is_the_default_and_lies_under_balance_until_all_experts_are_touched() -> None:
    few = MODEL.seconds("fp8_block", 32, *KIMI)
    assert few == MODEL.seconds("fp8_block", 32, *KIMI, "uniform")
    assert few.seconds < 0.85 * MODEL.seconds("fp8_block", 32, *KIMI, "balanced").seconds
    many = MODEL.seconds("fp8_block", 8192, *KIMI).seconds
    assert many == pytest.approx(MODEL.seconds("fp8_block", 8192, *KIMI, "balanced").seconds)


def test_expert_parallel_ranks_wait_for_the_busiest() -> None:
    """Its experts at few tokens, its rows at many, as `sim/cost/experts.py` counts them."""
    mlp, sizes = MoeMlp(384, 8, 2048), (*EXPERTS["kimi"], 1, 8)
    few = MODEL.seconds("fp8_block", 8, *sizes).seconds
    as_many = busiest_rank_experts(mlp, 8, 8)
    alike = MODEL.seconds("fp8_block", as_many, *sizes, "balanced").seconds
    assert few == pytest.approx(alike, rel=1e-2)
    assert few > 1.2 * MODEL.seconds("fp8_block", 8, *sizes, "balanced").seconds
    many = MODEL.seconds("fp8_block", 4096, *sizes).seconds
    busiest = MODEL.seconds(
        "fp8_block", busiest_rank_rows(mlp, 8, 4096), *sizes, "balanced"
    ).seconds
    assert many == pytest.approx(busiest, rel=1e-2)


def test_an_unknown_routing_is_refused() -> None:
    with pytest.raises(BadInputError, match=r"routing 'zipf': use one of uniform, balanced"):
        MODEL.seconds("fp8_block", 8, *KIMI, "zipf")


def test_more_expert_ranks_than_experts_are_refused() -> None:
    with pytest.raises(BadInputError, match="ep must be at most"):
        MODEL.seconds("fp8_block", 8, 2048, 768, 128, 8, 1, 256)


# --- experts without rows -----------------------------------------------------------------------


def test_another_layout_of_measured_experts_is_interpolated() -> None:
    predicted = MODEL.seconds("int4", 64, *EXPERTS["kimi"], 2, 2, "balanced")
    truth = true_seconds("int4", 64, kimi(2, 2), "balanced")
    assert predicted.seconds == pytest.approx(truth, rel=0.1)


def test_experts_between_measured_ones_have_the_interval_of_held_out_ones() -> None:
    one = model(("kimi", "glm"))
    shape = MoeShape(6656, 2048, 320, 8, 8, 1)
    predicted = one.seconds("bf16", 64, *shape.family, 8, 1, "balanced")
    assert predicted.seconds == pytest.approx(true_seconds("bf16", 64, shape, "balanced"), rel=0.05)
    assert (predicted.source, predicted.inside) == ("imported", True)
    assert (predicted.low, predicted.high) == (0.9, 1.1)


def test_experts_beyond_measured_ones_have_a_wider_interval() -> None:
    predicted = MODEL.seconds("bf16", 64, 8192, 4096, 512, 8, 8, 1, "balanced")
    assert (predicted.low, predicted.high) == (0.8, 1.3)
    assert not predicted.inside


def test_unmeasured_experts_run_the_first_kernel_of_the_profile() -> None:
    """The other kernel, which one expert shape ran on, reads half as fast."""
    shape = MoeShape(5120, 1536, 160, 8, 8, 1)
    predicted = MODEL.seconds("fp8_block", 64, *shape.family, 8, 1, "balanced")
    assert predicted.seconds == pytest.approx(
        true_seconds("fp8_block", 64, shape, "balanced"), rel=0.1
    )


# --- formats without rows -----------------------------------------------------------------------


def test_rows_lent_by_another_table_say_so() -> None:
    predicted = MODEL.seconds("int4_g128", 64, *EXPERTS["glm"], 8, 1)
    assert (predicted.source, predicted.inside) == ("scaled", False)
    assert (predicted.low, predicted.high) == (0.7, 1.4)


def test_int4_groups_share_rows_and_smaller_ones_may_take_longer() -> None:
    """Group 32 holds 4.5 bits a weight, group 128 holds 4.125."""
    fine, coarse = (MODEL.seconds(f"int4_g{group}", 64, *KIMI) for group in (32, 128))
    assert fine.seconds == coarse.seconds
    assert coarse.source == "imported"
    assert fine.high == pytest.approx(coarse.high * 4.5 / 4.125)
    assert fine.low == coarse.low


def test_a_format_without_rows_is_scaled_by_its_bytes() -> None:
    """FP8 by tensor takes FP8 blocks' rows; their scales are the only difference."""
    blocks = MODEL.seconds("fp8_block", 64, *KIMI, "balanced")
    tensor = MODEL.seconds("fp8", 64, *KIMI, "balanced")
    assert tensor.seconds == pytest.approx(blocks.seconds, rel=1e-3)
    assert tensor.source == "scaled"
    assert (tensor.low, tensor.high) == (0.6, 1.5)
    assert not tensor.inside


def test_fp4_on_a_gpu_without_fp4_takes_the_rows_of_weights_decoded_to_bf16() -> None:
    predicted = MODEL.seconds("nvfp4", 64, *KIMI, "balanced").seconds
    int4 = MODEL.seconds("int4_g128", 64, *KIMI, "balanced").seconds
    assert int4 < predicted < 1.12 * int4  # 4.5 bits a weight, not 4.125


def test_a_profile_without_experts_answers_from_the_datasheet() -> None:
    predicted = MoeModel.from_tables({}, {}, GPU).seconds("fp8_block", 4096, *KIMI, "balanced")
    assert predicted.source == "datasheet"
    assert predicted.seconds == pytest.approx(float(predicted.roofline_s))
    flop = 4096 * 8 * 6 * 7168 * 2048 / 8
    assert (
        predicted.seconds == pytest.approx(flop / GPU.dense_flops_per_s["fp8"], rel=0.3)
        or predicted.seconds > flop / GPU.dense_flops_per_s["fp8"]
    )


def test_few_tokens_on_the_datasheet_move_the_touched_weights() -> None:
    predicted = MoeModel.from_tables({}, {}, GPU).seconds("bf16", 1, *KIMI, "balanced")
    weights = 8 * 3 * 7168 * 2048 / 8 * 2
    assert predicted.seconds == pytest.approx(weights / GPU.memory_bandwidth_bytes_per_s, rel=0.01)
