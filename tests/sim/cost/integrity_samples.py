"""Checks and steps that several tests of their cost share."""

from __future__ import annotations

import numpy as np

from tonnage.scenarios.catalogue import load_gpu, load_model
from tonnage.sim.cost.check_prices import CheckPrices, check_prices
from tonnage.sim.cost.integrity import StepCheck, Watched, step_check
from tonnage.sim.domain import IntegritySpec, ParallelLayout, PromptChunk, Step

H200 = load_gpu("h200-sxm")
LLAMA = load_model("llama-3.1-8b")
BATCHED = IntegritySpec("batched")
NONE = np.zeros(0, dtype=np.int64)


def check(
    spec: IntegritySpec = BATCHED,
    *,
    page_tokens: int = 64,
    layout: ParallelLayout | None = None,
    prices: CheckPrices | None = None,
    model: str = "llama-3.1-8b",
) -> StepCheck:
    """Return the check of a pool of H200s."""
    layout = layout or ParallelLayout()
    prices = prices or check_prices(H200, ways=layout.attention_tp)
    found = step_check(spec, load_model(model), layout, page_tokens, prices)
    assert found is not None
    return found


def decoding(requests: int, context: float, *, captured: bool = True) -> Watched:
    """Return so many requests of equal contexts, in one step."""
    return Watched(float(requests), np.array([requests * context]), requests, 1, 0, 0, captured)


def prompting(new_tokens: int, past_tokens: int = 0) -> Watched:
    """Return one prompt chunk."""
    return Watched(0.0, np.zeros(1), 0.0, 1, past_tokens, new_tokens, False)


def decode(contexts: list[int]) -> Step:
    """Return a step of decoding requests."""
    return Step(np.array(contexts, dtype=np.int64), sum(contexts), ())


def prefill(new_tokens: int, past_tokens: int = 0) -> Step:
    """Return a step of one prompt chunk."""
    return Step(NONE, 0, (PromptChunk(new_tokens, past_tokens),))
