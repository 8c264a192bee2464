"""vLLM's count of a hybrid pool, against what its logs print, to the last digit they show."""

from __future__ import annotations

import pytest

from tonnage.scenarios.catalogue import load_model
from tonnage.sim.domain import ParallelLayout
from tonnage.sim.model.kv import stage_kv_shapes
from tonnage.sim.model.vllm_groups import HybridPool, hybrid_pool, is_hybrid

GIB = 2.0**30


def _pool(
    model: str, gib: float, longest: int, *, tp: int = 1, kv: str = "fp8_e4m3", chunk: int = 8192
) -> HybridPool:
    layout = ParallelLayout(tp=tp)
    size = gib * GIB
    return hybrid_pool(
        load_model(model), layout, kv, size, longest_tokens=longest, chunk_tokens=chunk
    )


def test_window_layers_of_gemma_are_charged_a_window_and_a_chunk() -> None:
    """Printed on an H200 with 64.68 GiB: 626,949 tokens (redhat-performance/configiq issue 112)."""
    pool = _pool("gemma-4-31b", 64.68, 262_144, kv="bf16")
    assert pool.groups == 6  # 10 full layers, five times 10 sliding ones
    assert round(pool.tokens) == 626_949


def test_the_chunk_decides_how_many_requests_of_gemma_fit() -> None:
    """Printed with 51.62 GiB and 131,072 tokens: 33.42 requests; a larger chunk holds fewer."""
    assert round(_pool("gemma-4-26b-a4b", 51.62, 131_072, chunk=2048).max_concurrency, 2) == 33.42
    assert _pool("gemma-4-26b-a4b", 51.62, 131_072, chunk=8192).max_concurrency < 25


@pytest.mark.parametrize(
    ("model", "gib", "tp", "printed"),
    [  # vLLM 0.24.0, club-3090 issue 652; talos-argocd-proxmox pull request 1995
        ("qwen3.5-35b-a3b", 6.01, 1, (569_878, 4.35)),
        ("qwen3.5-27b", 4.99, 2, (302_921, 2.31)),
    ],
)
def test_linear_layers_take_two_blocks_of_state_per_group(
    model: str, gib: float, tp: int, printed: tuple[int, float]
) -> None:
    pool = _pool(model, gib, 131_072, tp=tp)
    assert pool.tokens == pytest.approx(printed[0], abs=1)
    assert round(pool.max_concurrency, 2) == printed[1]


def test_blocks_are_as_large_as_a_state() -> None:
    """Printed with 21.43 GiB, an older way: 467,712 tokens of one group, 11.79 requests."""
    pool = _pool("qwen3.5-122b-a10b", 21.43, 131_072)
    assert pool.block_tokens == 4176
    assert pool.tokens_per_group == 467_712
    assert round(pool.max_concurrency, 2) == 11.79


def test_equal_kinds_make_two_groups() -> None:
    """gpt-oss-120b with 5.38 GiB printed 78,384 tokens of one group (hf-mem issue 60)."""
    pool = _pool("gpt-oss-120b", 5.38, 131_072, kv="bf16")
    assert pool.groups == 2
    assert pool.tokens_per_group == pytest.approx(78_384, rel=0.001)


@pytest.mark.parametrize("model", ["qwen3-14b", "kimi-k2.6", "glm-5.2"])
def test_models_whose_layers_all_keep_every_token_are_not_hybrid(model: str) -> None:
    assert not is_hybrid(load_model(model))


def test_a_long_request_tends_to_the_layers_that_keep_it() -> None:
    """Windows and states do not grow: in the limit a pool holds its bytes over their rate."""
    model, longest = load_model("gemma-4-31b"), 2**26
    pool = _pool("gemma-4-31b", 512.0, longest, kv="bf16")
    (shape,) = stage_kv_shapes(model, ParallelLayout(), "bf16", "vllm")
    assert pool.tokens == pytest.approx(512 * GIB / shape.growing_bytes_per_token, rel=0.01)
