"""Kernels are data: listed without torch, counted in closed form, compared with one measure."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tonnage.kernels.compare import row_error, same_bytes
from tonnage.kernels.registry import KERNELS, by_name, kernel
from tonnage.kernels.spec import LaunchConfig


def test_the_inventory_loads_neither_torch_nor_triton() -> None:
    code = (
        "import sys, tonnage.kernels.registry as r; print(len(r.KERNELS),"
        " [m for m in ('torch', 'triton', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split(" ", 1) == [str(len(KERNELS)), "[]\n"]


def test_an_unknown_kernel_is_told_which_there_are() -> None:
    with pytest.raises(KeyError, match=r"no kernel 'gqa'; there are .*gqa_decode_fp8"):
        kernel("gqa")


def test_a_name_is_used_once() -> None:
    with pytest.raises(ValueError, match="one name"):
        by_name((KERNELS["noop"], KERNELS["noop"]))


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_says_what_it_costs_and_ships(name: str) -> None:
    spec = KERNELS[name]
    for axes in spec.examples:
        assert spec.flops(axes) >= 0
        assert spec.bytes(axes) >= 0
    if "triton" in spec.runs:
        configs = spec.configs()
        assert configs
        assert len({config.name for config in configs}) == len(configs)
        assert all({90, 100} & set(config.instruction) for config in configs)


@pytest.mark.parametrize("name", KERNELS)
def test_inputs_are_fresh_and_follow_their_seed(name: str) -> None:
    spec = KERNELS[name]
    one, same, other = (spec.make_inputs(spec.examples[-1], seed) for seed in (1, 1, 2))
    tensors = [key for key, value in one.items() if isinstance(value, torch.Tensor)]
    assert all(same_bytes(one[key], same[key]) for key in tensors)
    assert any(not same_bytes(one[key], other[key]) for key in tensors)


def test_bytes_of_decode_attention_are_those_of_its_tensors() -> None:
    axes = {"batch": 2, "heads": 8, "kv_heads": 2, "head_dim": 64, "context_tokens": 128}
    axes |= {"page_tokens": 64, "ragged": 0}
    spec = kernel("gqa_decode_fp8")
    inputs = spec.make_inputs(axes, seed=0)
    rows = 2 * 128  # live rows of the cache
    row_bytes = inputs["key_cache"][0, 0].nbytes + inputs["value_cache"][0, 0].nbytes
    pages = 2 * 2 * 4
    assert spec.bytes(axes) == rows * row_bytes + 2 * inputs["queries"].nbytes + pages
    assert spec.flops(axes) == 2 * 8 * 128 * 2 * (64 + 64)


def test_bytes_of_mla_decode_are_those_of_its_rows() -> None:
    axes = {"batch": 1, "heads": 16, "context_tokens": 64, "page_tokens": 64, "ragged": 0}
    ends = 16 * (576 + 512) * 2
    assert kernel("mla_decode_fp8").bytes(axes) == 64 * 576 + ends + 4
    assert kernel("mla_decode_bf16").bytes(axes) == 64 * 1152 + ends + 4


def test_flops_of_prefill_count_the_pairs_that_see_each_other() -> None:
    axes = {"batch": 1, "heads": 3, "kv_heads": 1, "head_dim": 64, "prefix_tokens": 5}
    axes |= {"new_tokens": 7, "page_tokens": 16, "ragged": 0}
    pairs = sum(5 + token + 1 for token in range(7))
    assert kernel("gqa_prefill_bf16").flops(axes) == pairs * 3 * 2 * (64 + 64)


def test_bytes_of_the_writes_are_what_goes_in_and_out() -> None:
    axes = {"tokens": 10, "page_tokens": 16}
    assert kernel("mla_write_fp8").bytes(axes) == 10 * (576 * 2 + 576 + 8)
    assert kernel("dsa_write_fp8").bytes(axes) == 10 * (576 * 2 + 512 + 4 * 4 + 64 * 2 + 8)


def test_the_error_is_of_the_worst_element_against_its_row() -> None:
    expected = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e-6, 1e-6]])
    assert row_error(expected, expected) == 0.0
    off = expected.clone()
    off[2, 0] *= 1.5  # a small row is not hidden by a large one
    assert row_error(off, expected) == pytest.approx(0.5)
    off = expected.clone()
    off[1, 0] = 1e-30
    assert row_error(off, expected) == float("inf")
    off[1, 0] = torch.nan
    assert row_error(off, expected) == float("inf")


def test_a_spill_budget_needs_its_reason() -> None:
    with pytest.raises(ValueError, match="needs its reason"):
        LaunchConfig("k", "n", {}, {}, 4, 2, (), {90: None}, stack_bytes_max=8)
