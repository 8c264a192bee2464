"""The pools of a scenario, built: model, memory, scheduler and step times of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from tonnage.handoff import End, Terms, handoff_of
from tonnage.prefix_caches import cache_spec
from tonnage.scenarios.schema import Scenario
from tonnage.scenarios.schema_outages import outages_spec
from tonnage.scenarios.schema_pools import PoolSection, Role
from tonnage.sim.cost.step_time import StepPredictor
from tonnage.sim.domain import EngineSpec, GpuSpec, ModelSpec, PoolSpec
from tonnage.sim.engine.fleet import Deployment, PoolPlan
from tonnage.sim.model.engine_rules import (
    default_chunk_tokens,
    default_max_prefill_tokens,
    default_max_running_requests,
    default_page_tokens,
    default_speculative_running_requests,
)
from tonnage.sim.model.memory import LoadedLayouts, PoolMemory, pool_memory
from tonnage.sim.model.requantise import with_weights
from tonnage.sim.results.run import RunResult
from tonnage.sim.serving.build import SchedulerSpec
from tonnage.sim.serving.policy import Policy, policy_for
from tonnage.sim.serving.scheduler import Limits
from tonnage.step_times import StepTimes, step_times


@dataclass(frozen=True, slots=True)
class BuiltPool:
    """One pool: what it is, the model that it loads, its GPU, and what fits."""

    spec: PoolSpec
    model: ModelSpec  # with the pool's weights
    gpu: GpuSpec
    memory: PoolMemory


def built_pools(scenario: Scenario, layouts: LoadedLayouts | None = None) -> dict[Role, BuiltPool]:
    """Build every pool; raises BadInputError for a layout the model cannot have.

    Raises InfeasibleError for what does not fit; `layouts` as in `pool_memory`.
    """
    model = scenario.model_spec()
    return {
        role: _built_pool(scenario, role, section, model, layouts)
        for role, section in scenario.pools.named().items()
    }


def _built_pool(
    scenario: Scenario,
    role: Role,
    section: PoolSection,
    model: ModelSpec,
    layouts: LoadedLayouts | None,
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
        integrity=section.integrity.spec(),
    )
    fitted = pool_memory(loaded, gpu, engine, spec, layouts)
    if running is None:  # the engine's own limit follows from the pool that its memory leaves
        per_rank = default_max_running_requests(engine, gpu, loaded, fitted.kv_tokens_per_rank)
        spec = replace(spec, max_running_requests=per_rank * ranks)
    return BuiltPool(spec, loaded, gpu, fitted)


def token_role(pools: dict[Role, BuiltPool]) -> Role:
    """Return the pool that holds requests while they generate."""
    return "serve" if "serve" in pools else "decode"


def deployment_of(
    scenario: Scenario, pools: dict[Role, BuiltPool], times: dict[Role, StepTimes]
) -> Deployment:
    """Return what the engine runs."""
    plans = {str(role): _plan(scenario, pool, times[role].executor) for role, pool in pools.items()}
    handoff = None
    if "prefill" in pools:
        ends = [_end(pools[role]) for role in ("prefill", "decode")]
        handoff = handoff_of(Terms.of(scenario), *ends)
    return Deployment(
        plans,
        scenario.routing_spec(),
        handoff,
        clients=scenario.clients.spec(),
        outages=outages_spec(scenario.outages),
        faults=scenario.fault_specs(len(next(iter(pools.values())).model.layers)),
    )


def _end(pool: BuiltPool) -> End:
    spec = pool.spec
    return End(pool.model, spec.layout, spec.kv_format, pool.gpu, spec.integrity, spec.page_tokens)


def _plan(scenario: Scenario, pool: BuiltPool, executor: StepPredictor) -> PoolPlan:
    spec, engine = pool.spec, scenario.engine_spec()
    policy = policy_for(engine.name, engine.version)
    scheduling = SchedulerSpec(
        kv_tokens=pool.memory.kv_tokens,
        page_tokens=spec.page_tokens,
        limits=Limits(_step_tokens(engine, pool, policy), spec.max_running_requests),
        policy=policy.for_ranks(spec.layout.attention_dp),
        extra_tokens=_extra_tokens(pool.memory),
        ranks=spec.layout.attention_dp,
        stages=spec.layout.pp,
        speculation=spec.speculation,
        seed=scenario.seed,
        cache=cache_spec(scenario, spec, pool.model, pool.gpu, executor),
        integrity=spec.integrity,
    )
    return PoolPlan(
        role=spec.role,
        instances=spec.instances,
        scheduling=scheduling,
        longest_request_tokens=pool.memory.longest_request_tokens,
        executor=executor,
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


def times_of(scenario: Scenario, pools: dict[Role, BuiltPool]) -> dict[Role, StepTimes]:
    """Return what predicts the steps of every pool, and where its times come from."""
    return {
        role: step_times(scenario, pool.spec, pool.model, pool.gpu) for role, pool in pools.items()
    }


def _step_tokens(engine: EngineSpec, pool: BuiltPool, policy: Policy) -> int:
    """Return the prompt tokens of a rank's step: a chunk, but no more than all prompts may have.

    SGLang limits the two apart; in the others the chunk is the whole step.
    """
    chunk = policy.rank_chunk_tokens(pool.spec.chunk_tokens, pool.spec.layout.attention_dp)
    if engine.name != "sglang":
        return chunk
    return min(chunk, default_max_prefill_tokens(engine, pool.gpu))


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
