"""The busiest expert-parallel rank, against routing drawn token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.sim.cost.experts import busiest_rank_experts, busiest_rank_rows
from tonnage.sim.cost.operators import experts_touched
from tonnage.sim.domain import MoeMlp


def draw_busiest(mlp: MoeMlp, ep: int, tokens: int, trials: int) -> tuple[float, float]:
    """Return the mean rows and mean touched experts of the rank with the most of them."""
    rng = np.random.default_rng([mlp.experts, ep, tokens])
    rows, touched = [], []
    for _ in range(trials):
        order = rng.random((tokens, mlp.experts)).argpartition(mlp.top_k - 1, axis=1)
        counts = np.bincount(order[:, : mlp.top_k].ravel(), minlength=mlp.experts)
        by_rank = counts.reshape(ep, -1)
        rows.append(by_rank.sum(axis=1).max())
        touched.append((by_rank > 0).sum(axis=1).max())
    return float(np.mean(rows)), float(np.mean(touched))


@pytest.mark.parametrize("tokens", [1, 4, 32, 256])
@pytest.mark.parametrize(("experts", "top_k", "ep"), [(384, 8, 8), (256, 8, 16), (128, 4, 2)])
def test_rows_and_experts_of_the_busiest_rank_match_drawn_routing(
    experts: int, top_k: int, ep: int, tokens: int
) -> None:
    mlp = MoeMlp(experts, top_k, 128)
    rows, touched = draw_busiest(mlp, ep, tokens, 40_000 // (tokens + 20))
    # The formulas are off by up to 3 % for a single token, and the draws by a sampling error.
    assert busiest_rank_rows(mlp, ep, tokens) == pytest.approx(rows, rel=0.03)
    assert busiest_rank_experts(mlp, ep, tokens) == pytest.approx(touched, rel=0.04)


shapes = st.sampled_from([(8, 2), (128, 4), (256, 8), (384, 8)])


@given(shapes, st.sampled_from([1, 2, 4, 8]), st.integers(1, 5000))
def test_the_busiest_rank_has_no_less_than_the_mean_and_never_less_for_more_tokens(
    shape: tuple[int, int], ep: int, tokens: int
) -> None:
    mlp = MoeMlp(*shape, 128)
    local = mlp.experts // ep
    rows = busiest_rank_rows(mlp, ep, tokens)
    touched = busiest_rank_experts(mlp, ep, tokens)
    assert tokens * mlp.top_k / ep <= rows <= tokens * min(mlp.top_k, local)
    assert experts_touched(mlp, tokens) / ep <= touched * (1 + 1e-12)
    assert touched <= min(local, rows * (1 + 1e-9))
    assert busiest_rank_rows(mlp, ep, tokens + 1) >= rows
    assert busiest_rank_experts(mlp, ep, tokens + 1) >= touched * (1 - 1e-12)


def test_without_expert_parallelism_there_is_no_busiest_rank() -> None:
    mlp = MoeMlp(384, 8, 128)
    assert busiest_rank_rows(mlp, 1, 32) == 256
    assert busiest_rank_experts(mlp, 1, 32) == pytest.approx(experts_touched(mlp, 32))


def test_with_many_tokens_the_excess_is_that_of_normal_loads() -> None:
    """The largest of 8 standard normals is 1.4236 on average."""
    mlp, tokens = MoeMlp(256, 8, 128), 1_000_000
    deviation = (tokens * (256 - 8) / 255) ** 0.5
    excess = busiest_rank_rows(mlp, 8, tokens) - tokens
    assert excess / deviation == pytest.approx(1.4236, rel=0.001)
