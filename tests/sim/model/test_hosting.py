"""Which GPUs can host a model: every layout it can have, and the right first choice."""

from __future__ import annotations

import pytest

from tonnage.scenarios.catalogue import load_gpu, load_model
from tonnage.sim.domain import EngineSpec, ParallelLayout
from tonnage.sim.model.hosting import GPU_COUNTS, Fit, Guest, best, fits, layouts, nearest
from tonnage.sim.model.layout import layout_problem
from tonnage.sim.model.requantise import with_weights

SGLANG = EngineSpec("sglang", "0.5.23")


def guest(name: str, weights: str = "native", kv: str = "bf16", tokens: int = 8192) -> Guest:
    return Guest(with_weights(load_model(name), weights), weights, kv, tokens, SGLANG)


def test_layouts_cover_the_gpus_and_stay_within_a_node() -> None:
    asked, gpu = guest("kimi-k2.6"), load_gpu("gb200")  # four GPUs a node
    for count in GPU_COUNTS:
        found = list(layouts(asked, gpu, count))
        assert found
        assert len(found) == len(set(found))
        for layout in found:
            assert layout.gpus == count
            assert layout.tp <= gpu.gpus_per_node
            assert layout_problem(asked.model, layout) is None


def test_a_dense_model_is_not_replicated() -> None:
    found = list(layouts(guest("llama-3.1-70b"), load_gpu("h200-sxm"), 8))
    assert found == [ParallelLayout(tp, 8 // tp) for tp in (8, 4, 2, 1)]
    # Its eight kv heads leave nothing to share; a latent is shared by all ranks.
    wide = list(layouts(guest("kimi-k2.6"), load_gpu("h200-sxm"), 8))
    assert {layout.dcp for layout in wide if layout.tp == 8} == {1, 8}


def test_ep_is_the_smallest_that_leaves_groups_whole() -> None:
    """MiniMax's experts are 1,536 wide in blocks of 128: eight tensor ranks cut them."""
    found = {
        layout.tp: layout.ep for layout in layouts(guest("minimax-m2.5"), load_gpu("h200-sxm"), 8)
    }
    assert found[4] == 1
    assert found[8] > 1


def row(gpus: int, layout: ParallelLayout, requests: int, longest: int = 10_000) -> Fit:
    return Fit("x", gpus, layout, requests > 0, 0, 0, 0, longest, requests, 0.9, 0.0)


def test_the_first_choice_has_few_gpus_then_few_stages_then_many_requests() -> None:
    chained = row(4, ParallelLayout(2, 2), 90)
    plain = row(4, ParallelLayout(4), 10)
    replicated = row(4, ParallelLayout(4, 1, 4, 4), 40)
    shared = row(4, ParallelLayout(4, dcp=4), 160)
    large = row(8, ParallelLayout(8), 500)
    small = row(2, ParallelLayout(2), 0)
    assert best([large, shared, chained, plain, replicated, small]) == replicated
    assert best([shared, large]) == shared
    assert best([small]) is None


def test_the_nearest_holds_most_or_lacks_least() -> None:
    rows = fits(guest("kimi-k2.6"), [load_gpu("rtx-4090")])
    least = min(rows, key=lambda one: one.deficit_bytes_per_gpu * one.gpus)
    assert nearest(rows) == least
    loads = [row(4, ParallelLayout(4), 0, 500), row(8, ParallelLayout(8), 0, 900)]
    assert nearest(loads) == loads[1]
    assert nearest([]) is None


@pytest.mark.parametrize("name", ["gpt-oss-120b", "glm-5.2", "qwen3-32b"])
def test_a_longer_context_is_hosted_by_no_more_layouts(name: str) -> None:
    gpus = [load_gpu("h100-sxm")]
    short, long = (fits(guest(name, tokens=tokens), gpus) for tokens in (1024, 40_960))
    for few, many in zip(long, short, strict=True):
        assert few.layout == many.layout
        assert few.hosts <= many.hosts
        assert few.max_concurrency <= many.max_concurrency
        assert few.hosts == (few.loads and few.longest_request_tokens >= 40_960)
