"""The prefix cache of a pool, from a scenario: what its tiers hold, and how fast they are read."""

from __future__ import annotations

import numpy as np

from tonnage.scenarios.schema import Scenario
from tonnage.sim.cost.step_time import StepPredictor
from tonnage.sim.domain import (
    GpuSpec,
    ModelSpec,
    ParallelLayout,
    PoolSpec,
    PromptChunk,
    Step,
)
from tonnage.sim.model.kv import kv_bytes_per_token
from tonnage.sim.serving.prefix_cache import CacheSpec
from tonnage.sim.serving.tiers import HierarchySpec, TierSpec

_NO_CONTEXTS = np.zeros(0, dtype=np.int64)


def cache_spec(
    scenario: Scenario, pool: PoolSpec, model: ModelSpec, gpu: GpuSpec, executor: StepPredictor
) -> CacheSpec | None:
    """Return how the prompts of a pool share their KV; None where none are computed or shared."""
    section = scenario.cache
    if not section.gpu or pool.role == "decode":
        return None
    engine = scenario.engine_spec().name
    return CacheSpec(
        eviction=section.policy,
        stores="scheduled" if engine == "vllm" else "computed",
        tiers=_tiers(scenario, pool, model, gpu, executor) if section.host else None,
    )


def _tiers(
    scenario: Scenario, pool: PoolSpec, model: ModelSpec, gpu: GpuSpec, executor: StepPredictor
) -> HierarchySpec:
    """Return the tiers of one instance.

    Each holds one copy of a token's KV, also where every GPU has one (MLA under TP), as SGLang
    0.5.23 does (`mem_cache/mla_host_dedup.py`). The host is read over PCIe and the store over the
    network, by every GPU for itself; NVMe by the instance.
    """
    section = scenario.cache
    of_model = kv_bytes_per_token(model, ParallelLayout(), pool.kv_format)
    of_gpu = kv_bytes_per_token(model, pool.layout, pool.kv_format)

    def tier(size_bytes: float, s_per_token: float, latency_s: float) -> TierSpec:
        return TierSpec(int(size_bytes / of_model), s_per_token, latency_s, of_model)

    nvme, store = section.nvme, section.store
    store_bytes_per_s = section.store_bandwidth or gpu.network_bytes_per_s
    return HierarchySpec(
        host=tier(section.host, of_gpu / gpu.pcie_bytes_per_s, section.host_latency),
        nvme=tier(nvme, of_model / section.nvme_bandwidth, section.nvme_latency) if nvme else None,
        store=tier(store, of_gpu / store_bytes_per_s, section.store_latency) if store else None,
        write=section.write,
        prefetch=section.prefetch_spec(),
        loads=section.load,
        recompute_s_per_token=_recompute_s_per_token(pool, executor),
    )


def _recompute_s_per_token(pool: PoolSpec, executor: StepPredictor) -> float:
    """Return what computing a token takes in a full step at the beginning of a prompt."""
    step = Step(_NO_CONTEXTS, 0, (PromptChunk(pool.chunk_tokens, 0),))
    return float(executor.run(step, 1)[0]) / pool.chunk_tokens
