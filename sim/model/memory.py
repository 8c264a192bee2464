"""What fits on the GPUs of a pool: weights, KV tokens, concurrency, the longest request."""

from __future__ import annotations

from tonnage.sim.domain import EngineSpec, GpuSpec, InfeasibleError, ModelSpec, PoolSpec
from tonnage.sim.model.draft import draft_of
from tonnage.sim.model.layout import check_layout
from tonnage.sim.model.memory_advice import infeasible_message, infeasible_problem
from tonnage.sim.model.memory_draft import check_draft_layout
from tonnage.sim.model.memory_estimate import (
    LoadedLayout,
    PoolMemory,
    estimate_pool_memory,
    loaded_layout,
    longest_request_tokens,
)
from tonnage.sim.units import format_bytes

__all__ = [
    "LoadedLayouts",
    "PoolMemory",
    "check_request_fits",
    "estimate_pool_memory",
    "max_concurrency",
    "pool_memory",
    "requests_held",
]

LoadedLayouts = dict[tuple[object, ...], LoadedLayout]


def pool_memory(
    model: ModelSpec,
    gpu: GpuSpec,
    engine: EngineSpec,
    pool: PoolSpec,
    layouts: LoadedLayouts | None = None,
) -> PoolMemory:
    """Return what fits; raise InfeasibleError with deficit and mend when the weights do not.

    `model` is already in the pool's weight format. `layouts`: what pools of this model load, kept
    by a search that tries many; it needs no mends either. Raises BadInputError for a layout that
    the model or the pool's draft cannot have.
    """
    draft = draft_of(model, pool.speculation)
    if draft is not None:
        field = f"pools.{pool.role}.speculation.draft"
        check_draft_layout(draft, pool.layout, field, engine.name)
    layout = None if layouts is None else _kept(layouts, model, engine, pool)
    memory = estimate_pool_memory(model, gpu, engine, pool, layout)
    if not memory.fits and layouts is not None:
        raise InfeasibleError(infeasible_problem(memory, model, gpu, pool))
    if not memory.fits:
        raise InfeasibleError(infeasible_message(memory, model, gpu, engine, pool))
    return memory


def _kept(
    layouts: LoadedLayouts, model: ModelSpec, engine: EngineSpec, pool: PoolSpec
) -> LoadedLayout:
    """Return what a pool loads, from `layouts` where one like it was there before."""
    check_layout(model, pool.layout, f"pools.{pool.role}", engine.name)
    key = (pool.weights, pool.layout, pool.kv_format, pool.speculation)
    if key not in layouts:
        layouts[key] = loaded_layout(model, engine, pool)
    return layouts[key]


def max_concurrency(memory: PoolMemory, tokens_per_request: int) -> int:
    """Return how many requests that hold so many tokens fit an instance, in whole pages.

    Windows and states are counted. The engine's limit on running requests is a separate bound.
    """
    held = []
    for stage in memory.stages:
        request_bytes = float(stage.shape.request_bytes(tokens_per_request, memory.page_tokens))
        if request_bytes > 0:  # a stage without attention layers holds any number
            held.append(int(stage.pool_bytes // request_bytes))
    return min(held, default=0) * memory.layout.attention_dp


def requests_held(memory: PoolMemory, tokens_per_request: int) -> float:
    """Return how many such requests fill an instance, parts of one counted: for means."""
    held = []
    for stage in memory.stages:
        request_bytes = float(stage.shape.request_bytes(tokens_per_request, memory.page_tokens))
        if request_bytes > 0:
            held.append(stage.pool_bytes / request_bytes)
    return min(held, default=0.0) * memory.layout.attention_dp


def check_request_fits(memory: PoolMemory, tokens: int) -> None:
    """Raise InfeasibleError when one request of that many tokens exceeds the pool of a rank."""
    most_tokens = longest_request_tokens(memory.stages, memory.page_tokens, tokens)
    if most_tokens == tokens:
        return
    needed_bytes = max(
        float(stage.shape.request_bytes(tokens, memory.page_tokens)) for stage in memory.stages
    )
    raise InfeasibleError(
        f"pools.{memory.role}: one request of {tokens:,} tokens needs {format_bytes(needed_bytes)} "
        f"of KV per GPU and {format_bytes(memory.kv_bytes_per_gpu)} is there; at most "
        f"{most_tokens:,} tokens fit"
    )
