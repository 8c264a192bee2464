"""The grid holds what the models' layers run, off-by-one sizes and generic shapes, each once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tonnage.calibrate.grid import EXPERTS, PRODUCTS, Grid, grid
from tonnage.calibrate.machines import catalogue_name, device_kind
from tonnage.calibrate.own import split_names
from tonnage.calibrate.points import Point, grouped
from tonnage.calibrate.sizes import CPU_QUICK, GPU_FULL, sizes_for
from tonnage.calibrate.wanted import wanted_of
from tonnage.scenarios.catalogue import load_gpu
from tonnage.sim.cost.fused import fused_products
from tonnage.sim.domain import BadInputError, GqaAttention, MlaAttention, Role


def planned(*names: str, device: str = "cpu", gpu: str = "cpu") -> Grid:
    wanted = wanted_of(names, device)
    return grid(wanted, sizes_for(device, quick=True), load_gpu(gpu), device == "cuda")


@pytest.mark.parametrize("name", ["laptop", "laptop-gqa"])
def test_every_product_of_a_scenario_is_measured_at_every_batch_that_decode_has(name: str) -> None:
    points = {(one.kernel, tuple(one.axes.items())) for one in planned(name).points}
    for one in wanted_of((name,), "cpu"):
        for product, _ in fused_products(one.model, one.layout, "sglang"):
            kernel, _ = PRODUCTS[product.format]
            for m in (1, 8, 17, 64, 65, 129, 256, 257):
                axes = {"m": m, "n": product.out_features, "k": product.in_features}
                assert (kernel, tuple(axes.items())) in points


def test_experts_and_attention_are_measured_in_the_formats_of_the_pools() -> None:
    points = planned("laptop").points
    kernels = {one.kernel for one in points}
    formats = {
        tensor.format
        for one in wanted_of(("laptop",), "cpu")
        for layer in one.model.layers
        for tensor in layer.weights
        if tensor.role is Role.ROUTED_EXPERT
    }
    assert formats == {"bf16", "int4_g128"}
    assert {EXPERTS[name] for name in formats} <= kernels
    heads = {
        layer.attention.heads
        for one in wanted_of(("laptop",), "cpu")
        for layer in one.model.layers
        if isinstance(layer.attention, MlaAttention)
    }
    for kernel in ("mla_decode_fp8", "mla_decode_bf16", "mla_prefill", "latent_products"):
        assert heads <= {one.axes["heads"] for one in points if one.kernel == kernel}
    assert {"tag_check", "mla_write_fp8", "kv_copy_fp8", "noop"} <= kernels


def test_no_shape_of_laptop_gqa_is_in_the_default_grid() -> None:
    (wanted,) = wanted_of(("laptop-gqa",), "cpu")
    points = planned().points
    weights = {(one.axes["n"], one.axes["k"]) for one in points if "n" in one.axes}
    products = [product for product, _ in fused_products(wanted.model, wanted.layout, "sglang")]
    assert not weights & {(one.out_features, one.in_features) for one in products}
    attention = wanted.model.layers[0].attention
    assert isinstance(attention, GqaAttention)
    shapes = {
        (one.axes["heads"], one.axes["kv_heads"])
        for one in points
        if one.kernel.startswith("gqa_decode")
    }
    assert shapes
    assert (attention.heads, attention.kv_heads) not in shapes


def test_every_point_is_there_once_and_within_the_sizes() -> None:
    points = planned("laptop", "laptop-gqa").points
    identities = [one.identity for one in points]
    assert len(set(identities)) == len(identities)
    assert all(one.estimate_s <= CPU_QUICK.call_s_most for one in points)
    assert all(one.held_bytes <= load_gpu("cpu").memory_bytes / 8 for one in points)


def test_points_share_inputs_along_one_axis_and_the_largest_holds_them_all() -> None:
    def product(m: int, n: int) -> Point:
        return Point("gemm_bf16", {"m": m, "n": n, "k": 64}, float(m), 0.0)

    groups = grouped([product(16, 8), product(1, 8), product(4, 32), product(16, 8)])
    assert [[one.axes["m"] for one in group.points] for group in groups] == [[1, 16], [4]]
    assert groups[0].largest == {"m": 16, "n": 8, "k": 64}


def test_a_rank_of_a_large_model_is_cut_and_pages_go_to_millions() -> None:
    wanted = wanted_of(("kimi-k2.6:tp8",), "cuda")
    assert wanted[0].layout.tp == 8
    points = grid(wanted, GPU_FULL, load_gpu("h200-sxm"), on_gpu=True).points
    experts = [one for one in points if one.kernel == "experts_int4_g32"]
    assert {one.axes["inter"] for one in experts} >= {256}
    assert {one.axes["ways"] for one in experts} >= {8}
    pages = [
        one.axes["requests"] * one.axes["pages"] for one in points if one.kernel == "tag_check"
    ]
    assert min(pages) < 1000 < 4e6 < max(pages)
    launches = [one.graph for one in points if one.kernel == "noop"]
    assert launches == [False, True]


def test_formats_without_a_kernel_are_named() -> None:
    assert planned("gpt-oss-20b").unserved == ("mxfp4",)
    assert planned("laptop").unserved == ()


def test_generic_experts_come_in_the_formats_of_the_models() -> None:
    sizes = replace(CPU_QUICK, generic_experts=((8, 2, 256, 256),))
    wanted = wanted_of(("laptop-gqa",), "cpu")  # has none: the generic formats
    points = grid(wanted, sizes, load_gpu("cpu"), on_gpu=False).points
    assert {one.kernel for one in points if one.kernel.startswith("experts_")} == {
        EXPERTS[name] for name in sizes.generic_formats
    }


# --- names --------------------------------------------------------------------------------------


def test_models_are_named_between_commas_or_again_and_each_counts_once() -> None:
    assert split_names(["laptop, laptop-gqa", "laptop"]) == ("laptop", "laptop-gqa", "laptop")
    assert wanted_of(("laptop", "laptop"), "cpu") == wanted_of(("laptop",), "cpu")
    assert wanted_of((), "cpu") == wanted_of(("laptop",), "cpu")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("lptop", "model: there is no model named 'lptop'; did you mean 'laptop'?"),
        ("laptop-gqa:tp7", "layout.tp: 7"),
        ("kimi-k2.6:tp3", "layout.tp: 3"),
    ],
)
def test_a_wrong_model_or_layout_is_refused(name: str, told: str) -> None:
    with pytest.raises(BadInputError) as caught:
        wanted_of((name,), "cpu")
    assert told in str(caught.value)


def test_a_device_is_a_cpu_or_a_cuda_gpu_of_the_catalogue() -> None:
    assert device_kind("cuda:1") == "cuda"
    assert catalogue_name("cpu", "AMD EPYC") == "cpu"
    assert catalogue_name("cuda", "NVIDIA H200") == "h200-sxm"
    assert catalogue_name("cuda", "NVIDIA GB200") == "gb200"
    assert catalogue_name("cuda", "NVIDIA H200", "h20-141g") == "h20-141g"
    with pytest.raises(BadInputError, match="use cpu, cuda, or cuda:1"):
        device_kind("tpu")
    with pytest.raises(BadInputError, match="Quadro is not in the catalogue; say --gpu NAME"):
        catalogue_name("cuda", "Quadro")
    with pytest.raises(BadInputError, match="did you mean 'h200-sxm'"):
        catalogue_name("cuda", "NVIDIA H200", "h200")
