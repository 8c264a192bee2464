"""The memory of one GPU of a pool, item by item, whether or not it fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tonnage.sim.domain import (
    EngineSpec,
    GpuSpec,
    ModelSpec,
    ParallelLayout,
    PoolSpec,
    Role,
)
from tonnage.sim.model.budget import Budget, gpu_budget
from tonnage.sim.model.draft import DraftSpec, draft_of
from tonnage.sim.model.formats import checkpoint_bytes
from tonnage.sim.model.kv import KvShape, stage_kv_shapes
from tonnage.sim.model.layout import check_layout
from tonnage.sim.model.memory_draft import Stages, stages_with_draft
from tonnage.sim.model.weights import StageWeights, stage_weights


@dataclass(frozen=True, slots=True)
class StageKv:
    """The KV pool of one GPU of a pipeline stage, and what a request stores in it."""

    pool_bytes: float
    shape: KvShape


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """The memory of one GPU of a pool, and what an instance can hold.

    The byte figures are those of the pipeline stage that binds; weights, activations, graphs, other
    and KV add up to the GPU's memory. A rank is an attention-DP rank: `attention_tp` GPUs (times
    the stages) that hold the same requests. `kv_bytes_per_token` is per GPU, at long context. A
    draft's weights and KV are in the figures; `draft_weights_bytes_per_gpu` is its part of the
    weights. `deficit_bytes_per_gpu` is what is missing for one page of KV; 0 when it fits.
    """

    model: str
    role: str
    gpu: str
    gpu_memory_bytes: float
    layout: ParallelLayout
    checkpoint_bytes_per_gpu: float
    weights_bytes_per_gpu: float
    draft_weights_bytes_per_gpu: float
    weights_by_role: Mapping[Role, float] = field(hash=False)
    replicated_bytes_per_gpu: Mapping[str, float] = field(hash=False)
    activation_bytes: float
    graph_bytes: float
    other_bytes: float
    kv_bytes_per_gpu: float
    kv_bytes_per_token: float
    kv_tokens: int
    kv_tokens_per_rank: int
    longest_request_tokens: int
    page_tokens: int
    mem_fraction: float
    mem_fraction_source: str
    mem_fraction_most: float
    deficit_bytes_per_gpu: float
    stages: tuple[StageKv, ...]
    assumptions: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether the weights leave room for any KV."""
        return self.deficit_bytes_per_gpu == 0


@dataclass(frozen=True, slots=True)
class LoadedLayout:
    """What the stages of a layout load and store, whatever the GPU: made once, used for many."""

    stages: Stages
    checkpoint_bytes: int


def loaded_layout(model: ModelSpec, engine: EngineSpec, pool: PoolSpec) -> LoadedLayout:
    """Return what the pool's layout loads of a model that is already in its weight format."""
    draft = draft_of(model, pool.speculation)
    return LoadedLayout(_stages(model, pool, engine.name, draft), checkpoint_bytes(model))


def estimate_pool_memory(
    model: ModelSpec,
    gpu: GpuSpec,
    engine: EngineSpec,
    pool: PoolSpec,
    layout: LoadedLayout | None = None,
) -> PoolMemory:
    """Return what fits without raising: a pool that does not fit has a deficit and no tokens.

    `model` is already in the pool's weight format. `layout`: what `loaded_layout` returned for the
    same model, layout, engine and KV format, where one has it.
    """
    check_layout(model, pool.layout, f"pools.{pool.role}", engine.name)
    budget = gpu_budget(model, gpu, engine, pool)
    draft = draft_of(model, pool.speculation)
    layout = layout or loaded_layout(model, engine, pool)
    loaded = layout.stages
    stages = tuple(
        StageKv(max(0.0, budget.kv_share * (budget.static_bytes - stage.total_bytes)), shape)
        for stage, shape in zip(loaded.weights, loaded.shapes, strict=True)
    )
    tokens = [_pool_tokens(stage, pool.page_tokens, model) for stage in stages]
    margins = [budget.static_bytes - stage.total_bytes for stage in loaded.weights]
    # The stage with the fewest tokens binds; where none has any, the one that lacks most bytes.
    index = min(range(len(stages)), key=lambda index: (tokens[index], margins[index]))
    binding = _Binding(
        stages,
        index,
        loaded.weights[index],
        loaded.draft_bytes[index],
        tokens[index],
        layout.checkpoint_bytes,
    )
    memory = _assemble(model, gpu, pool, budget, binding)
    return memory if draft is None else _assuming(memory, draft)


def _stages(model: ModelSpec, pool: PoolSpec, engine: str, draft: DraftSpec | None) -> Stages:
    weights = stage_weights(model, pool.layout, engine)
    shapes = stage_kv_shapes(model, pool.layout, pool.kv_format, engine)
    stages = Stages(weights, shapes, [0.0] * len(weights))
    if draft is None:
        return stages
    return stages_with_draft(stages, model, draft, pool.layout, pool.kv_format, engine)


def _assuming(memory: PoolMemory, draft: DraftSpec) -> PoolMemory:
    return replace(memory, assumptions=memory.assumptions + draft.assumptions)


def _pool_tokens(stage: StageKv, page_tokens: int, model: ModelSpec) -> int:
    """Return the tokens of one rank, whole pages; windows and states are not yet taken off."""
    growing_bytes = stage.shape.growing_bytes_per_token
    if growing_bytes == 0:
        # Only states: as many full contexts as there are states.
        request_bytes = float(stage.shape.request_bytes(model.max_context_tokens, page_tokens))
        held = stage.pool_bytes // request_bytes if request_bytes else 0.0
        return int(held) * model.max_context_tokens
    aligned = page_tokens * stage.shape.dcp
    return int(stage.pool_bytes / growing_bytes) // aligned * aligned


def longest_request_tokens(stages: tuple[StageKv, ...], page_tokens: int, most_tokens: int) -> int:
    """Return the tokens, `most_tokens` at most, of the longest request that every stage holds."""

    def holds(tokens: int) -> bool:
        return all(
            float(stage.shape.request_bytes(tokens, page_tokens)) <= stage.pool_bytes
            for stage in stages
        )

    if holds(most_tokens):
        return most_tokens
    low, high = 0, most_tokens
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


@dataclass(frozen=True, slots=True)
class _Binding:
    stages: tuple[StageKv, ...]
    index: int  # of the stage that binds
    weights: StageWeights
    draft_bytes: float  # of the weights
    tokens_per_rank: int
    checkpoint_bytes: int


def _assemble(
    model: ModelSpec, gpu: GpuSpec, pool: PoolSpec, budget: Budget, binding: _Binding
) -> PoolMemory:
    stage, weights = binding.stages[binding.index], binding.weights
    page_bytes = float(stage.shape.request_bytes(1, pool.page_tokens))
    left_bytes = budget.static_bytes - weights.total_bytes
    missing_bytes = page_bytes / budget.kv_share - left_bytes
    unused_bytes = (1 - budget.kv_share) * max(0.0, left_bytes)
    deficit_bytes = max(0.0, missing_bytes) if binding.tokens_per_rank == 0 else 0.0
    return PoolMemory(
        model=model.name,
        role=pool.role,
        gpu=gpu.name,
        gpu_memory_bytes=gpu.memory_bytes,
        layout=pool.layout,
        checkpoint_bytes_per_gpu=binding.checkpoint_bytes / pool.layout.gpus,
        weights_bytes_per_gpu=weights.total_bytes,
        draft_weights_bytes_per_gpu=binding.draft_bytes,
        weights_by_role=weights.by_role,
        replicated_bytes_per_gpu=weights.replicated,
        activation_bytes=budget.activation_bytes,
        graph_bytes=budget.graph_bytes,
        other_bytes=budget.other_bytes + unused_bytes,
        kv_bytes_per_gpu=stage.pool_bytes,
        kv_bytes_per_token=stage.shape.growing_bytes_per_token,
        kv_tokens=binding.tokens_per_rank * pool.layout.attention_dp,
        kv_tokens_per_rank=binding.tokens_per_rank,
        longest_request_tokens=longest_request_tokens(
            binding.stages, pool.page_tokens, model.max_context_tokens
        ),
        page_tokens=pool.page_tokens,
        mem_fraction=budget.mem_fraction,
        mem_fraction_source=budget.mem_fraction_source,
        mem_fraction_most=budget.fraction_most,
        deficit_bytes_per_gpu=deficit_bytes,
        stages=binding.stages,
        assumptions=budget.assumptions,
    )
