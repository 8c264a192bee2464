"""The prefix cache of a pool, from a scenario: what its tiers hold, and how fast they are read."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tonnage.scenarios.schema import Scenario
from tonnage.sim.cost.check_prices import check_prices
from tonnage.sim.cost.handoff_checks import load_check_s
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


def cache_assumptions(scenario: Scenario) -> Iterator[str]:
    """Yield what is taken for granted where prompts share prefixes, or could."""
    section, given = scenario.cache, scenario.cache.model_fields_set
    if not section.gpu:
        if scenario.traffic.kind in ("trace", "sessions"):
            yield "no prefix cache: what prompts repeat is computed again; cache.gpu: true keeps it"
        return
    policy = section.policy.upper()
    yield f"prefix cache: free KV pages keep prefixes, {policy}; it was empty at the start"
    if not section.host:
        return
    yield "cache tiers: writing takes no time; each holds one copy of a token's KV"
    yield "cache tiers: loads are compared with computing as many tokens from the front, alone"
    if section.nvme and "nvme_bandwidth" not in given:
        yield f"cache tiers: nvme read at {section.nvme_bandwidth / 1e9:g} GB/s (assumed)"
    if section.store and section.store_bandwidth is None:
        yield "cache tiers: store read at the datasheet's rate of the GPU's network"


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
    linear_s, squared_s = _recompute_s(pool, model, executor)
    of_gpu = kv_bytes_per_token(model, pool.layout, pool.kv_format)

    checked_s = load_check_s(pool.integrity, check_prices(gpu, ways=pool.layout.attention_tp))

    def tier(size_bytes: float, s_per_token: float, latency_s: float) -> TierSpec:
        return TierSpec(int(size_bytes / of_model), s_per_token, latency_s + checked_s, of_model)

    nvme, store = section.nvme, section.store
    store_bytes_per_s = section.store_bandwidth or gpu.network_bytes_per_s
    return HierarchySpec(
        host=tier(section.host, of_gpu / gpu.pcie_bytes_per_s, section.host_latency),
        nvme=tier(nvme, of_model / section.nvme_bandwidth, section.nvme_latency) if nvme else None,
        store=tier(store, of_gpu / store_bytes_per_s, section.store_latency) if store else None,
        write=section.write,
        prefetch=section.prefetch_spec(),
        loads=section.load,
        recompute_s_per_token=linear_s,
        recompute_s_per_token_squared=squared_s,
    )


def _recompute_s(pool: PoolSpec, model: ModelSpec, executor: StepPredictor) -> tuple[float, float]:
    """Return c and d of ``n c + n^2 d``, what computing the first n tokens of a prompt takes.

    From a full step at the beginning of a prompt and one at the end of the longest: attention reads
    all that is before a token, so what a step takes grows with it.
    """
    tokens = pool.chunk_tokens
    past = max(model.max_context_tokens - tokens, tokens)
    first_s, last_s = (
        float(executor.run(Step(_NO_CONTEXTS, 0, (PromptChunk(tokens, before),)), 1)[0])
        for before in (0, past)
    )
    squared_s = max(last_s - first_s, 0.0) / (2 * past * tokens)
    return first_s / tokens - tokens * squared_s, squared_s
