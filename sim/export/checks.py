"""What an engine cannot do: refused, or told as a remark that stands in the file."""

from __future__ import annotations

from tonnage.sim.domain import BadInputError
from tonnage.sim.export.context import ExportContext
from tonnage.sim.export.flags import FlagTable
from tonnage.sim.export.settings import checkpoint, draft_kind, requests_per_rank
from tonnage.sim.planning.fleet_plan import FleetPlan, PlannedPool
from tonnage.sim.units import version_key

_OTHERWISE = "or export it to csv, markdown or html"
_COUNTS = (
    "instances",
    "max_running_requests",
    "max_model_tokens",
    "page_tokens",
    "chunk_tokens",
)


def refuse(plan: FleetPlan, table: FlagTable, context: ExportContext) -> None:
    """Raise BadInputError for a plan that the engine would not start, or would start wrongly."""
    if plan.needs:
        asked = "; ".join(plan.needs)
        raise BadInputError(
            f"needs: {asked}: no stock {plan.engine} has it; export the launchable plan "
            f"(--which launchable), {_OTHERWISE}"
        )
    _refuse_shape(plan)
    for pool in plan.pools:
        _refuse_numbers(pool)
    _refuse_handoff(plan, table, context)
    for pool in plan.pools:
        _refuse_layout(pool, table, context)
        _refuse_drafting(pool, table)
        context.nodes(pool)


def remarks(plan: FleetPlan, table: FlagTable, context: ExportContext) -> list[str]:
    """Return what the started fleet does otherwise than the plan says, or needs beside it."""
    told = [_version_remark(table)]
    for pool in plan.pools:
        told += _tracker_remarks(plan, pool, table, context)
        told += _checkpoint_remarks(plan, pool, table, context)
        told.append(_rank_remark(pool, table))
    if plan.link == "rdma":
        told.append("link rdma: the hosts need their RDMA devices; without them it is slower")
    if context.model is None:
        told.append(f"model {plan.model}: not at hand here, so flags were not checked against it")
    return [one for one in told if one]


# --- refused ------------------------------------------------------------------------------------


def _refuse_shape(plan: FleetPlan) -> None:
    roles = sorted(pool.role for pool in plan.pools)
    if roles not in (["serve"], ["decode", "prefill"]):
        raise BadInputError(
            f"pools: {', '.join(roles) or 'none'}; a fleet is one serve pool, or one prefill and "
            "one decode pool"
        )


def _refuse_numbers(pool: PlannedPool) -> None:
    """Raise for what a file written by hand may hold and no engine takes."""
    if not 0 < pool.mem_fraction < 1:
        raise BadInputError(
            f"pools.{pool.role}.mem_fraction: {pool.mem_fraction}; write a share between 0 and 1"
        )
    for name in _COUNTS:
        if getattr(pool, name) < 1:
            value = getattr(pool, name)
            raise BadInputError(f"pools.{pool.role}.{name}: {value}; write 1 or more")


def _refuse_handoff(plan: FleetPlan, table: FlagTable, context: ExportContext) -> None:
    prefill, decode = plan.pool("prefill"), plan.pool("decode")
    if prefill is None or decode is None:
        return
    if prefill.kv != decode.kv:
        _cannot(
            table,
            f"pools.decode.kv: {decode.kv}, but prefill keeps {prefill.kv}",
            "mixed_kv",
            "give both pools one format (plan.kv)",
        )
    if prefill.page_tokens != decode.page_tokens:
        _cannot(
            table,
            f"pools.decode.page_tokens: {decode.page_tokens}, prefill has {prefill.page_tokens}",
            "mixed_pages",
            "give both pools one page size",
        )
    if plan.link is None or not _sends_over(plan.link, table):
        raise BadInputError(
            f"link: {plan.link}: {plan.engine} sends KV over no such path; plan with link.kind "
            f"rdma, tcp, nvlink or pcie, {_OTHERWISE}"
        )
    if table.engine == "vllm" and not _vllm_sends(decode, context):
        _cannot(table, f"pools.decode.layout.dcp: {decode.layout.dcp}", "dcp_disaggregated")


def _sends_over(link: str, table: FlagTable) -> bool:
    transfer = table.data.get("transfer")
    return link in transfer["links"] if transfer else table.value_of("link", link) is not None


def _vllm_sends(pool: PlannedPool, context: ExportContext) -> bool:
    """Tell whether NIXL moves KV that `dcp` ranks share."""
    dcp = pool.layout.dcp
    latent = context.model is None or context.model.latent_attention
    return dcp == 1 or (latent and dcp == pool.layout.attention_tp)


def _refuse_layout(pool: PlannedPool, table: FlagTable, context: ExportContext) -> None:
    layout, field = pool.layout, f"pools.{pool.role}"
    if context.model is not None and pool.max_model_tokens > context.model.max_context_tokens:
        most = context.model.max_context_tokens
        raise BadInputError(
            f"{field}.max_model_tokens: {pool.max_model_tokens}; the model has positions for {most}"
        )
    if table.engine == "vllm":
        if pool.chunk_tokens < requests_per_rank(pool):
            _cannot(
                table,
                f"{field}.chunk_tokens: {pool.chunk_tokens} for {requests_per_rank(pool)} requests",
                "chunk_requests",
                "plan with more (plan.chunk_tokens)",
            )
        if layout.ep not in (1, layout.tp):
            _cannot(
                table,
                f"{field}.layout.ep: {layout.ep} of {layout.tp} ranks",
                "ep_between",
                "plan with ep 1 or ep = tp",
            )
        if layout.dcp > 1 and not _vllm_shares_heads(pool, context):
            _cannot(table, f"{field}.layout.dcp: {layout.dcp}", "dcp_heads", "plan with dcp 1")
    elif pool.role != "decode" and pool.chunk_tokens // layout.attention_dp % pool.page_tokens:
        per_rank = pool.chunk_tokens // layout.attention_dp
        _cannot(
            table,
            f"{field}.chunk_tokens: {per_rank} of a rank, in pages of {pool.page_tokens}",
            "chunk_pages",
            "plan with a multiple of it (plan.chunk_tokens)",
        )


def _vllm_shares_heads(pool: PlannedPool, context: ExportContext) -> bool:
    if context.model is None or context.model.latent_attention or not context.model.kv_heads:
        return True
    heads, ranks = context.model.kv_heads, pool.layout.attention_tp
    return ranks > heads and pool.layout.dcp <= ranks // heads


def _refuse_drafting(pool: PlannedPool, table: FlagTable) -> None:
    if pool.speculation is None:
        return
    field, kind = f"pools.{pool.role}.speculation.draft", draft_kind(pool.speculation)
    shown = f"{field}: {pool.speculation.draft}"
    if kind == "free":
        _cannot(table, shown, "draft_free", "plan with mtp, eagle3 or a draft model")
    if table.engine != "sglang":
        return
    if kind == "model" and pool.layout.attention_dp > 1:
        _cannot(table, shown, "draft_model_attention_dp", "plan with mtp or eagle3")
    if kind != "mtp" and pool.layout.pp > 1:
        _cannot(table, shown, "draft_pipeline", "plan with pp 1 (plan.pp), or with mtp")


def _cannot(table: FlagTable, found: str, what: str, mend: str = "plan without it") -> None:
    engine = f"{table.engine} {table.version}"
    raise BadInputError(f"{found}: {engine}: {table.cannot(what)}; {mend}, {_OTHERWISE}")


# --- told ---------------------------------------------------------------------------------------


def _version_remark(table: FlagTable) -> str:
    if version_key(table.version) == version_key(table.listed_version):
        return ""
    return f"flags were checked against {table.engine} {table.listed_version}, not {table.version}"


def _tracker_remarks(
    plan: FleetPlan, pool: PlannedPool, table: FlagTable, context: ExportContext
) -> list[str]:
    told, tracker = [], pool.integrity.tracker
    field, cannot = f"pools.{pool.role}.integrity", table.data["cannot"]
    latent = context.model is not None and context.model.latent_attention
    if tracker == "batched":
        told.append(f"{field}.tracker batched: {plan.engine} {cannot['tracker_batched']}")
    if tracker == "canary" and table.value_of("canary", "on") is None:
        told.append(f"{field}.tracker canary: {plan.engine} {cannot['tracker_canary']}")
    elif tracker == "canary" and latent:
        told.append(f"{field}.tracker canary: {cannot['canary_latent_attention']}")
    if pool.integrity.handoff_checksum and "handoff_checksum" in cannot:
        told.append(f"{field}.handoff_checksum: {plan.engine} {cannot['handoff_checksum']}")
    return [f"{one}: the fleet runs without it" for one in told]


def _checkpoint_remarks(
    plan: FleetPlan, pool: PlannedPool, table: FlagTable, context: ExportContext
) -> list[str]:
    told = []
    if checkpoint(pool, table, context) is None:
        option = f"--checkpoint {pool.role}=PATH"
        told.append(
            f"pools.{pool.role}.weights {pool.weights}: name a checkpoint of {plan.model} in it: "
            f"{option}"
        )
    asks = pool.speculation is not None and draft_kind(pool.speculation) != "mtp"
    if asks and f"{pool.role}.draft" not in context.checkpoints:
        told.append(
            f"pools.{pool.role}.speculation.draft: name its checkpoint: "
            f"--checkpoint {pool.role}.draft=PATH"
        )
    return told


def _rank_remark(pool: PlannedPool, table: FlagTable) -> str:
    ranks, most = pool.layout.attention_dp, pool.max_running_requests
    if most % ranks == 0:
        return ""
    return (
        f"pools.{pool.role}.max_running_requests {most}: {table.engine} gives each of {ranks} "
        f"ranks {max(1, most // ranks)}"
    )
