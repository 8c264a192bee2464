"""Decode attention is right however the context is split, stored or cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tonnage.kernels.compare import row_error
from tonnage.kernels.ops.gqa_decode import gqa_decode
from tonnage.kernels.ops.mla_decode import mla_decode
from tonnage.kernels.ops.split_plan import SPLITS_MAX, split_count
from tonnage.kernels.registry import KERNELS, kernel
from tonnage.kernels.spec import Inputs

Decode = Callable[..., torch.Tensor]
DECODES: list[Any] = [
    pytest.param("gqa_decode_bf16", gqa_decode, id="gqa-bf16"),
    pytest.param("gqa_decode_fp8", gqa_decode, id="gqa-fp8"),
    pytest.param("mla_decode_bf16", mla_decode, id="mla-bf16"),
    pytest.param("mla_decode_fp8", mla_decode, id="mla-fp8"),
]
TOLERANCE = 1e-2


def inputs_of(name: str, seed: int, **sizes: int) -> Inputs:
    axes = {"heads": 8, "kv_heads": 1, "head_dim": 64, **sizes}
    spec = kernel(name)
    return spec.make_inputs({axis: axes[axis] for axis in spec.axes}, seed)


@pytest.mark.parametrize("splits", [2, 7])
@pytest.mark.parametrize(("name", "decode"), DECODES)
def test_splits_do_not_change_the_answer(name: str, decode: Decode, splits: int) -> None:
    # seven splits leave some of these contexts' splits without a token
    inputs = inputs_of(name, seed=1, batch=2, context_tokens=129, page_tokens=16, ragged=0)
    inputs["context_tokens"][1] = 33
    expected = KERNELS[name].reference(inputs)["output"]
    assert row_error(decode(inputs, splits), expected) < TOLERANCE


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize(("name", "decode"), DECODES)
def test_an_empty_request_gives_zeros(name: str, decode: Decode, splits: int) -> None:
    inputs = inputs_of(name, seed=2, batch=3, context_tokens=17, page_tokens=16, ragged=0)
    inputs["context_tokens"][1] = 0
    output = decode(inputs, splits)
    assert not output[1].any()
    assert output[0].any(1).all()


@pytest.mark.parametrize(("name", "decode"), DECODES)
def test_where_the_pages_are_does_not_matter(name: str, decode: Decode) -> None:
    inputs = inputs_of(name, seed=3, batch=2, context_tokens=65, page_tokens=16, ragged=0)
    before = decode(inputs, 1)
    moved = dict(inputs)
    for cache in (key for key in inputs if key.endswith("cache")):
        moved[cache] = inputs[cache].view(torch.uint8).flip(0).view(inputs[cache].dtype)
    last_page = len(moved[cache]) - 1
    moved["page_table"] = torch.where(
        inputs["page_table"] <= last_page, last_page - inputs["page_table"], inputs["page_table"]
    )
    assert torch.equal(decode(moved, 1), before)


@pytest.mark.parametrize("heads", [1, 17, 64])
def test_any_number_of_mla_heads(heads: int) -> None:
    for name in ("mla_decode_bf16", "mla_decode_fp8"):
        inputs = inputs_of(
            name, seed=4, batch=1, heads=heads, context_tokens=17, page_tokens=64, ragged=0
        )
        expected = KERNELS[name].reference(inputs)["output"]
        assert row_error(mla_decode(inputs, 1), expected) < TOLERANCE


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (40, 2)])
def test_any_group_of_heads(heads: int, kv_heads: int) -> None:
    shape = {"heads": heads, "kv_heads": kv_heads, "context_tokens": 65, "page_tokens": 16}
    inputs = inputs_of("gqa_decode_bf16", seed=5, batch=1, ragged=0, **shape)
    expected = KERNELS["gqa_decode_bf16"].reference(inputs)["output"]
    assert row_error(gqa_decode(inputs, 2), expected) < TOLERANCE


@pytest.mark.parametrize(("name", "decode"), [DECODES[1], DECODES[3]])
def test_a_query_beyond_fp16_stays_finite(name: str, decode: Decode) -> None:
    inputs = inputs_of(name, seed=6, batch=1, context_tokens=17, page_tokens=16, ragged=0)
    inputs["queries"][0, 0, 0] = 3e38
    assert decode(inputs, 1).isfinite().all()


def test_splits_fill_the_gpu_once_and_no_more() -> None:
    assert split_count(programs=8, context_tokens_max=100_000, resident=132) == 16
    assert split_count(programs=8 * 64, context_tokens_max=100_000, resident=132) == 1
    assert split_count(programs=1, context_tokens_max=600, resident=132) == 3
    assert split_count(programs=1, context_tokens_max=10**6, resident=1000) == SPLITS_MAX
    assert split_count(programs=1, context_tokens_max=0, resident=132) == 1
