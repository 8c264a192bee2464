"""Plans made by hand for the tests of the exporters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tonnage.sim.domain import IntegritySpec, ParallelLayout
from tonnage.sim.planning.fleet_plan import (
    Estimate,
    FleetPlan,
    PlanFigures,
    PlannedObjective,
    PlannedPool,
    PlannedRouter,
    PlannedSpeculation,
    PlanProvenance,
)

_FIGURES = PlanFigures(
    simulated=True,
    replications=5,
    output_tokens_per_s=Estimate(2187.5, 2101.25, 2263.75),
    output_tokens_per_s_per_gpu=Estimate(136.719, 131.328, 141.484),
    output_tokens_per_s_per_user=Estimate(34.1875, 33.5, 34.875),
    usd_per_hour=56.32,
    usd_per_million_output_tokens=Estimate(7.15175, 6.91083, 7.44531),
    input_tokens_per_s=Estimate(17920.5, 17213.75, 18545.25),
    ttft_p95_s=Estimate(4.125, 3.875, 4.375),
    tpot_p95_s=Estimate(0.03125, 0.0305, 0.03225),
    cache_hit_share=0.6875,
    objectives=(
        PlannedObjective("ttft_p95", 5.0, Estimate(4.125, 3.875, 4.375), True),
        PlannedObjective("tpot_p95", 0.04, Estimate(0.03125, 0.0305, 0.03225), True),
    ),
)
_PROVENANCE = PlanProvenance(
    profile="h200-sxm sglang 0.5.14",
    source="imported",
    version="0.1.0",
    seed=11,
    assumptions=("fractions are the engine's defaults", "prompts share no prefix"),
)


def pool(role: Any, **changes: Any) -> PlannedPool:
    """Return a pool of H200s, eight to an instance."""
    usual: dict[str, Any] = {
        "role": role,
        "gpu": "h200-sxm",
        "instances": 1,
        "layout": ParallelLayout(tp=8),
        "weights": "native",
        "kv": "fp8_e4m3",
        "mem_fraction": 0.871,
        "max_running_requests": 96,
        "max_model_tokens": 131072,
        "page_tokens": 64,
        "chunk_tokens": 8192,
        "kv_tokens": 1372160,
        "gpu_hour_usd": 3.52,
    }
    return PlannedPool(**{**usual, **changes})


def fleet(**changes: Any) -> FleetPlan:
    """Return a plan around the pools given."""
    usual: dict[str, Any] = {
        "name": "kimi-agents",
        "model": "kimi-k2.6",
        "engine": "sglang",
        "engine_version": "0.5.23",
        "router": PlannedRouter("cache_aware"),
        "figures": _FIGURES,
        "binds": "tpot_p95",
        "seed": 7,
        "provenance": _PROVENANCE,
    }
    plan = FleetPlan(**{**usual, **changes})
    usd = sum(one.gpus * one.gpu_hour_usd for one in plan.pools)
    return replace(plan, figures=replace(plan.figures, usd_per_hour=usd))


def colocated_vllm() -> FleetPlan:
    """Two instances of Llama on a node, speculating with a draft model, returning by session."""
    serve = pool(
        "serve",
        instances=2,
        layout=ParallelLayout(tp=4),
        gpu="h100-sxm",
        weights="fp8",
        page_tokens=16,
        mem_fraction=0.92,
        max_running_requests=256,
        max_model_tokens=65536,
        kv_tokens=903424,
        gpu_hour_usd=2.49,
        speculation=PlannedSpeculation("llama-3.1-8b", 3, 2.375, (0.25, 0.3, 0.275, 0.175)),
    )
    return fleet(
        name="llama-chat",
        model="llama-3.1-70b",
        engine="vllm",
        engine_version="0.33.0",
        pools=(serve,),
        router=PlannedRouter("round_robin", "session"),
        host_cache_bytes=68719476736.0,
    )


def disaggregated_sglang() -> FleetPlan:
    """Kimi apart: prefill by attention-DP ranks, decode with a checksum at the handoff."""
    prefill = pool(
        "prefill",
        instances=2,
        layout=ParallelLayout(tp=8, ep=8, attention_dp=8),
        max_running_requests=64,
    )
    decode = pool("decode", integrity=IntegritySpec(handoff_checksum=True), mem_fraction=0.929)
    return fleet(pools=(prefill, decode), link="rdma")


def two_nodes_per_instance() -> FleetPlan:
    """GLM on sixteen GPUs an instance, INT4 weights in decode, MTP."""
    prefill = pool("prefill", instances=1, layout=ParallelLayout(tp=8, pp=2), chunk_tokens=16384)
    decode = pool(
        "decode",
        instances=2,
        layout=ParallelLayout(tp=16, ep=16, attention_dp=16),
        weights="int4_g32",
        max_running_requests=512,
        speculation=PlannedSpeculation("mtp", 3, 2.5),
    )
    return fleet(
        name="glm-long",
        model="glm-5.2",
        pools=(prefill, decode),
        router=PlannedRouter("token_aware"),
        link="nvlink",
        prefix_cache=False,
    )


def disaggregated_vllm() -> FleetPlan:
    """Llama apart under vLLM, a pool over two nodes of four GPUs each."""
    prefill = pool("prefill", instances=2, layout=ParallelLayout(tp=4), page_tokens=16)
    decode = pool("decode", layout=ParallelLayout(tp=8, attention_dp=2, pp=2), page_tokens=16)
    return fleet(
        name="llama-apart",
        model="llama-3.1-70b",
        engine="vllm",
        engine_version="0.33.0",
        pools=(prefill, decode),
        router=PlannedRouter("least_requests"),
        link="rdma",
    )


PLANS = {
    "llama-chat": colocated_vllm(),
    "kimi-agents": disaggregated_sglang(),
    "glm-long": two_nodes_per_instance(),
    "llama-apart": disaggregated_vllm(),
}


def with_pool(plan: FleetPlan, role: str, **changes: Any) -> FleetPlan:
    """Return the plan with one of its pools changed."""
    pools = tuple(replace(one, **changes) if one.role == role else one for one in plan.pools)
    return replace(plan, pools=pools)
