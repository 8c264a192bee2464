"""A pool as settings in no engine's words; the flag tables turn them into flags."""

from __future__ import annotations

from typing import Any

from tonnage.sim.export.context import ExportContext
from tonnage.sim.export.flags import FlagTable, Option
from tonnage.sim.planning.fleet_plan import FleetPlan, PlannedPool, PlannedSpeculation

_GB, _GIB = 10**9, 2**30
_DRAFT_KINDS = ("mtp", "eagle3", "free")


def pool_settings(
    plan: FleetPlan, pool: PlannedPool, table: FlagTable, context: ExportContext
) -> dict[str, Any]:
    """Return every setting of a pool; what is None or absent gets no flag."""
    layout = pool.layout
    settings: dict[str, Any] = {
        "model": _to_load(checkpoint(pool, table, context), pool, "MODEL"),
        "served_name": one_line(plan.model),
        "tp": layout.tp,
        "attention_tp": layout.attention_tp,
        "pp": layout.pp,
        "ep": layout.ep,
        "expert_parallel": layout.ep > 1,
        "attention_dp": layout.attention_dp,
        "has_attention_dp": layout.attention_dp > 1,
        "dcp": layout.dcp,
        "mem_fraction": repr(pool.mem_fraction),
        "max_running_requests": pool.max_running_requests,
        "max_running_requests_per_rank": requests_per_rank(pool),
        "max_model_tokens": pool.max_model_tokens,
        "page_tokens": pool.page_tokens,
        "chunk_tokens": pool.chunk_tokens,
        "kv": pool.kv,
        "online_weights": online_weights(pool, table, context),
    }
    if pool.role != "decode":
        settings |= _cache(plan, pool, context)
    if pool.role != "serve":
        settings |= _handoff(plan, pool, table, settings)
    if watches_tokens(pool, table, context):
        settings["canary"] = "on"
    if pool.speculation is not None and pool.role != "prefill":
        settings |= _drafting(pool, pool.speculation, context)
    return settings


def checkpoint(pool: PlannedPool, table: FlagTable, context: ExportContext) -> str | None:
    """Return what the pool loads, None where no checkpoint in its format is known."""
    own = context.checkpoints.get(pool.role)
    if own is not None:
        return own
    native = context.model is not None and pool.weights == context.model.native_weights
    loads_native = native or pool.weights == "native" or online_weights(pool, table, context)
    return context.native_checkpoint if loads_native else None


def online_weights(pool: PlannedPool, table: FlagTable, context: ExportContext) -> str | None:
    """Return how a BF16 checkpoint is quantised while it is loaded, None where it is not."""
    if pool.role in context.checkpoints:  # the user's own is in its format already
        return None
    if context.model is None or context.model.native_weights != "bf16":
        return None
    found = table.data["online_weights"].get(pool.weights)
    return None if found is None else str(found)


def watches_tokens(pool: PlannedPool, table: FlagTable, context: ExportContext) -> bool:
    """Tell whether the pool asks for a KV canary that the engine has for this model."""
    asked = pool.integrity.tracker == "canary" and table.value_of("canary", "on") is not None
    return asked and not (context.model is not None and context.model.latent_attention)


def requests_per_rank(pool: PlannedPool) -> int:
    """Return the running requests of one attention-DP rank, at least one."""
    return max(1, pool.max_running_requests // pool.layout.attention_dp)


def draft_kind(speculation: PlannedSpeculation) -> str:
    """Return mtp, eagle3, free, or model for a draft model by name or path."""
    return speculation.draft if speculation.draft in _DRAFT_KINDS else "model"


def one_line(text: str) -> str:
    """Return a text as one line without control characters, safe in a comment."""
    return " ".join("".join(one if one.isprintable() else " " for one in text).split())


def _to_load(path: str | None, pool: PlannedPool, what: str) -> Option:
    """Return a checkpoint that the user may replace by a variable; the table has its flag."""
    return Option("", path, f"{pool.role.upper()}_{what}")


def _cache(plan: FleetPlan, pool: PlannedPool, context: ExportContext) -> dict[str, Any]:
    found: dict[str, Any] = {
        "prefix_cache": plan.prefix_cache,
        "no_prefix_cache": not plan.prefix_cache,
    }
    if plan.host_cache_bytes:
        holders, ranks = _host_pools(pool, context), pool.layout.attention_dp
        found |= {
            "host_cache": True,
            "host_cache_gb_per_pool": max(1, round(plan.host_cache_bytes / holders / _GB)),
            "host_cache_gib_per_rank": f"{plan.host_cache_bytes / ranks / _GIB:.6g}",
        }
    return found


def _host_pools(pool: PlannedPool, context: ExportContext) -> int:
    """Return how many pools of an instance's host memory SGLang makes.

    One per GPU; of a latent, which every GPU of an attention group has, one per group (SGLang
    0.5.23 `srt/mem_cache/mla_host_dedup.py`).
    """
    latent = context.model is not None and context.model.latent_attention
    return pool.layout.attention_dp * pool.layout.pp if latent else pool.layout.gpus


def _handoff(
    plan: FleetPlan, pool: PlannedPool, table: FlagTable, settings: dict[str, Any]
) -> dict[str, Any]:
    transfer = table.data.get("transfer")
    if transfer is None:
        return {
            "disaggregation_mode": pool.role,
            "link": plan.link,
            # One side alone sums for nobody.
            "handoff_checksum": any(one.integrity.handoff_checksum for one in plan.pools),
        }
    sends = {"kv_connector": transfer["connector"], "kv_role": transfer["roles"][pool.role]}
    gib = settings.get("host_cache_gib_per_rank")
    if gib is None:
        return {"kv_transfer": sends}
    # vLLM's own option for host memory would take the place of the connector that sends.
    keeps = {
        "kv_connector": transfer["offload_connector"],
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": round(float(gib) * _GIB)},
    }
    both = {
        "kv_connector": transfer["multi_connector"],
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [sends, keeps]},
    }
    return {"kv_transfer": both, "host_cache_gib_per_rank": None}


def _drafting(
    pool: PlannedPool, speculation: PlannedSpeculation, context: ExportContext
) -> dict[str, Any]:
    kind, tokens = draft_kind(speculation), speculation.draft_tokens
    path = context.checkpoints.get(f"{pool.role}.draft")
    return {
        "draft": kind,
        "draft_model": None if kind == "mtp" else _to_load(path, pool, "DRAFT_MODEL"),
        "draft_tokens": tokens,
        "draft_width": 1,
        "verified_tokens": tokens + 1,
    }
