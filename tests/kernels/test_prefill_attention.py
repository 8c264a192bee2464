"""Prefill attention sees the prefix, itself and nothing later."""

from __future__ import annotations

import pytest
import torch

from tonnage.kernels.compare import row_error
from tonnage.kernels.ops.gqa_decode import gqa_decode
from tonnage.kernels.registry import kernel
from tonnage.kernels.spec import Inputs

SHAPE = {"heads": 2, "kv_heads": 1, "head_dim": 64, "page_tokens": 16, "ragged": 0}


def prefill_inputs(cache: str, prefix: int, new: int, batch: int = 1, seed: int = 1) -> Inputs:
    axes = {**SHAPE, "batch": batch, "prefix_tokens": prefix, "new_tokens": new}
    return kernel(f"gqa_prefill_{cache}").make_inputs(axes, seed)


def prefill(inputs: Inputs, cache: str = "bf16") -> torch.Tensor:
    output: torch.Tensor = kernel(f"gqa_prefill_{cache}").run(inputs)["output"]
    return output


@pytest.mark.parametrize("cache", ["bf16", "fp8"])
@pytest.mark.parametrize(("prefix", "new"), [(0, 17), (129, 1), (63, 65), (64, 128)])
def test_any_prefix_and_any_chunk(cache: str, prefix: int, new: int) -> None:
    inputs = prefill_inputs(cache, prefix, new)
    expected = kernel(f"gqa_prefill_{cache}").reference(inputs)["output"]
    assert row_error(prefill(inputs, cache), expected) < 1e-2


def test_each_head_reads_its_kv_head() -> None:
    spec = kernel("gqa_prefill_bf16")
    axes = {**SHAPE, "heads": 6, "kv_heads": 3, "batch": 1, "prefix_tokens": 3, "new_tokens": 17}
    inputs = spec.make_inputs(axes, seed=2)
    assert row_error(prefill(inputs), spec.reference(inputs)["output"]) < 1e-2


def test_later_tokens_change_nothing() -> None:
    inputs = prefill_inputs("bf16", prefix=17, new=65)
    before = prefill(inputs)
    page = int(inputs["page_table"][0, 81 // 16])  # the last token's
    for cache in ("key_cache", "value_cache"):
        inputs[cache][page, 81 % 16] = 100.0
    after = prefill(inputs)
    assert torch.equal(after[:-1], before[:-1])
    assert not torch.equal(after[-1], before[-1])


def test_one_new_token_is_a_decode_step() -> None:
    inputs = prefill_inputs("bf16", prefix=64, new=1, batch=2)
    decoded = gqa_decode({**inputs, "context_tokens_max": 65}, splits=1)
    torch.testing.assert_close(prefill(inputs), decoded, rtol=1e-2, atol=1e-3)


def test_a_request_without_new_tokens_is_left_out() -> None:
    inputs = prefill_inputs("bf16", prefix=16, new=17, batch=3)
    whole = prefill(inputs).view(3, 17, 2, 64)
    kept = torch.tensor([0, 17, 17, 34], dtype=torch.int32)
    inputs["queries"] = torch.cat([inputs["queries"][:17], inputs["queries"][34:]])
    inputs["context_tokens"][1] = 0
    inputs["query_start"] = kept
    without = prefill(inputs).view(2, 17, 2, 64)
    assert torch.equal(without, whole[[0, 2]])
