"""The pools of a scenario, built: model, memory, scheduler and step times of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from tonnage.scenarios.schema import Scenario
from tonnage.scenarios.schema_pools import PoolSection, Role
from tonnage.sim.cost.draft import SpeculatingExecutor, step_executor
from tonnage.sim.cost.step_time import StepExecutor
from tonnage.sim.domain import EngineSpec, GpuSpec, ModelSpec, PoolSpec
from tonnage.sim.engine.fleet import Deployment, PoolPlan
from tonnage.sim.model.draft import draft_of
from tonnage.sim.model.engine_rules import (
    captured_batch_sizes,
    default_chunk_tokens,
    default_max_prefill_tokens,
    default_max_running_requests,
    default_page_tokens,
    default_speculative_running_requests,
)
from tonnage.sim.model.kv import KvShape, stage_kv_shapes
from tonnage.sim.model.memory import PoolMemory, pool_memory
from tonnage.sim.model.requantise import with_weights
from tonnage.sim.results.run import RunResult
from tonnage.sim.serving.build import SchedulerSpec
from tonnage.sim.serving.policy import policy_for
from tonnage.sim.serving.scheduler import Limits


@dataclass(frozen=True, slots=True)
class BuiltPool:
    """One pool: what it is, the model that it loads, its GPU, and what fits."""

    spec: PoolSpec
    model: ModelSpec  # with the pool's weights
    gpu: GpuSpec
    memory: PoolMemory


def built_pools(scenario: Scenario) -> dict[Role, BuiltPool]:
    """Build every pool; raises BadInputError for a layout the model cannot have.

    Raises InfeasibleError for what does not fit.
    """
    model = scenario.model_spec()
    return {
        role: _built_pool(scenario, role, section, model)
        for role, section in scenario.pools.named().items()
    }


def _built_pool(
    scenario: Scenario, role: Role, section: PoolSection, model: ModelSpec
) -> BuiltPool:
    engine, gpu = scenario.engine_spec(), scenario.gpu_spec(role)
    loaded = with_weights(model, section.weights)
    page_tokens = section.page_tokens or default_page_tokens(engine, loaded, gpu, section.kv)
    ranks = section.attention_dp
    running = section.max_running_requests
    speculation = scenario.speculation_spec(role)
    if running is None and speculation is not None:
        running = default_speculative_running_requests(engine)
    spec = PoolSpec(
        role=role,
        instances=section.instances,
        layout=section.layout(),
        weights=section.weights,
        kv_format=section.kv,
        page_tokens=page_tokens,
        chunk_tokens=section.chunk_tokens or default_chunk_tokens(engine, gpu),
        max_running_requests=running or default_max_running_requests(engine, gpu, loaded) * ranks,
        speculation=speculation,
    )
    fitted = pool_memory(loaded, gpu, engine, spec)
    if running is None:  # the engine's own limit follows from the pool that its memory leaves
        per_rank = default_max_running_requests(engine, gpu, loaded, fitted.kv_tokens_per_rank)
        spec = replace(spec, max_running_requests=per_rank * ranks)
    return BuiltPool(spec, loaded, gpu, fitted)


def deployment_of(scenario: Scenario, pools: dict[Role, BuiltPool]) -> Deployment:
    """Return what the engine runs."""
    plans = {str(role): _plan(scenario, pool) for role, pool in pools.items()}
    prefill = pools.get("prefill")
    if prefill is None:
        return Deployment(plans, scenario.router.policy, None, None)
    shapes = stage_kv_shapes(
        prefill.model, prefill.spec.layout, prefill.spec.kv_format, scenario.engine_spec().name
    )
    return Deployment(
        plans, scenario.router.policy, scenario.link_spec(), wire_bytes_per_gpu(shapes)
    )


def _plan(scenario: Scenario, pool: BuiltPool) -> PoolPlan:
    spec, engine = pool.spec, scenario.engine_spec()
    scheduling = SchedulerSpec(
        kv_tokens=pool.memory.kv_tokens,
        page_tokens=spec.page_tokens,
        limits=Limits(_step_tokens(engine, pool), spec.max_running_requests),
        policy=policy_for(engine.name, engine.version),
        extra_tokens=_extra_tokens(pool.memory),
        ranks=spec.layout.attention_dp,
        stages=spec.layout.pp,
        speculation=spec.speculation,
        seed=scenario.seed,
    )
    return PoolPlan(
        role=spec.role,
        instances=spec.instances,
        scheduling=scheduling,
        longest_request_tokens=pool.memory.longest_request_tokens,
        executor=executor_of(scenario, pool),
        restore_s=_restore_s(pool),
    )


def numbered(deployment: Deployment, run: RunResult) -> tuple[dict[int, str], dict[int, int]]:
    """Return name and KV pages of the instances that ran, numbered as the engine does."""
    labels: dict[int, str] = {}
    pages: dict[int, int] = {}
    for role, busy_s in run.busy_s.items():
        scheduling = deployment.pools[role].scheduling
        for index in range(len(busy_s)):
            pages[len(labels)] = scheduling.ranks * scheduling.page_pool().capacity_pages
            labels[len(labels)] = f"{role} {index}"
    return labels, pages


def executor_of(scenario: Scenario, pool: BuiltPool) -> StepExecutor | SpeculatingExecutor:
    """Return what predicts the steps of a pool."""
    spec, engine = pool.spec, scenario.engine_spec()
    query_tokens = 1 if spec.speculation is None else spec.speculation.query_tokens
    per_rank = max(1, spec.max_running_requests // spec.layout.attention_dp)
    captured: tuple[int, ...] = ()
    if spec.role != "prefill":
        captured = captured_batch_sizes(engine, pool.gpu, spec.layout.tp, per_rank, query_tokens)
    draft = draft_of(pool.model, spec.speculation)
    return step_executor(
        pool.model, spec.layout, pool.gpu, spec.kv_format, engine.name, captured, draft
    )


def _step_tokens(engine: EngineSpec, pool: BuiltPool) -> int:
    """Return the prompt tokens of one step: a chunk, but no more than all prompts may have."""
    return min(pool.spec.chunk_tokens, default_max_prefill_tokens(engine, pool.gpu))


def _restore_s(pool: BuiltPool) -> Callable[[int], float]:
    """Return the time of KV from host memory: every GPU reads its share over PCIe."""
    s_per_token = pool.memory.kv_bytes_per_token / pool.gpu.pcie_bytes_per_s
    return lambda tokens: tokens * s_per_token


def _extra_tokens(fitted: PoolMemory) -> int:
    """Return what windows and states of one request take, in tokens of the growing layers."""
    extra = 0.0
    for stage in fitted.stages:
        growing = stage.shape.growing_bytes_per_token
        windows = sum(window * size for window, size in stage.shape.windows)
        if growing:
            extra = max(extra, (windows + stage.shape.state_bytes) / growing)
    return int(np.ceil(extra))


def wire_bytes_per_gpu(shapes: list[KvShape]) -> Callable[[int], float]:
    """Return the bytes that a GPU of the fullest stage sends for a prompt of so many tokens.

    As `KvShape.request_bytes` with pages of one token, for one number: it is asked per request.
    """

    def stage_bytes(shape: KvShape, tokens: int) -> float:
        windows = sum(min(tokens, window) * size for window, size in shape.windows)
        return tokens * shape.growing_bytes_per_token + windows + shape.state_bytes

    def wire_bytes(tokens: int) -> float:
        return max(stage_bytes(shape, tokens) for shape in shapes)

    return wire_bytes
