"""A plan in words: the lines that stand at the head of every file, every number among them."""

from __future__ import annotations

from collections.abc import Iterator

from tonnage.sim.export.settings import one_line
from tonnage.sim.planning.fleet_plan import Estimate, FleetPlan, PlanFigures, PlannedPool

Figure = tuple[str, Estimate]


def number(value: float | int) -> str:
    """Return a number as text: whole ones as they are, others to six digits."""
    return str(int(value)) if float(value).is_integer() else f"{value:.6g}"


def estimate_text(estimate: Estimate) -> str:
    """Return a figure with its interval where it has one."""
    if estimate.low is None or estimate.high is None:
        return number(estimate.value)
    return f"{number(estimate.value)} ({number(estimate.low)} to {number(estimate.high)})"


def summary_lines(plan: FleetPlan, remarks: list[str]) -> list[str]:
    """Return what the plan is, what it was found to do, and what to know before it is started."""
    lines = [title(plan), *map(pool_text, plan.pools), _around(plan)]
    lines.append(f"{_how(plan.figures)}:")
    lines += [f"  {name}: {estimate_text(value)}" for name, value in figure_rows(plan.figures)]
    lines += [f"  {text}" for text in _objective_texts(plan.figures)]
    lines.append(f"What binds: {plan.binds}.")
    lines.append(provenance_text(plan))
    lines += [f"Assumed: {text}" for text in plan.provenance.assumptions]
    lines += [f"Needs what no stock engine has: {text}" for text in plan.needs]
    lines += [f"Mind: {text}." for text in remarks]
    return [f"{_indent(line)}{one_line(line)}" for line in lines]


def title(plan: FleetPlan) -> str:
    """Return the plan's name, model, engine, size and price."""
    price = number(plan.figures.usd_per_hour)
    return (
        f"{plan.name}: {plan.model} on {plan.engine} {plan.engine_version}, {plan.gpus} GPUs, "
        f"{price} USD/h"
    )


def pool_text(pool: PlannedPool) -> str:
    """Return one pool as a sentence."""
    layout = pool.layout
    text = (
        f"{pool.role}: {_counted(pool.instances, 'instance')} of {layout.gpus} {pool.gpu} "
        f"(tp {layout.tp}, pp {layout.pp}, ep {layout.ep}, attention_dp {layout.attention_dp}, "
        f"dcp {layout.dcp}); weights {pool.weights}, KV {pool.kv}; memory fraction "
        f"{pool.mem_fraction!r}, {pool.max_running_requests} running requests of at most "
        f"{pool.max_model_tokens} tokens, pages of {pool.page_tokens}, chunks of "
        f"{pool.chunk_tokens}; {pool.kv_tokens} KV tokens an instance; "
        f"{number(pool.gpu_hour_usd)} USD a GPU-hour"
    )
    if pool.speculation is not None:
        one = pool.speculation
        text += (
            f"; {one.draft} drafts {one.draft_tokens} tokens, {number(one.accept_length)} accepted"
        )
        if one.accept_distribution:
            text += f" ({', '.join(map(number, one.accept_distribution))})"
    integrity = pool.integrity
    if integrity.tracker != "none":
        text += f"; integrity {integrity.tracker}, every {integrity.every_steps} steps"
    if integrity.handoff_checksum:
        text += "; checksum at the handoff"
    return text + "."


def figure_rows(figures: PlanFigures) -> Iterator[Figure]:
    """Yield what the fleet does, by name with its unit; what is unknown is left out."""
    yield "output tokens/s", figures.output_tokens_per_s
    yield "output tokens/s/GPU (all GPUs)", figures.output_tokens_per_s_per_gpu
    yield "output tokens/s/user", figures.output_tokens_per_s_per_user
    if figures.input_tokens_per_s is not None:
        yield "input tokens/s", figures.input_tokens_per_s
    if figures.ttft_p95_s is not None:
        yield "TTFT p95, s", figures.ttft_p95_s
    if figures.tpot_p95_s is not None:
        yield "TPOT p95, s", figures.tpot_p95_s
    if figures.cache_hit_share is not None:
        yield "prompt tokens found in the cache, share", Estimate(figures.cache_hit_share)
    yield "USD per hour", Estimate(figures.usd_per_hour)
    yield "USD per million output tokens", figures.usd_per_million_output_tokens


def provenance_text(plan: FleetPlan) -> str:
    """Return where the figures come from."""
    source = plan.provenance
    return (
        f"Figures: tonnage {source.version}, profile {source.profile} ({source.source}), "
        f"seed {source.seed}; plan seed {plan.seed}."
    )


def _around(plan: FleetPlan) -> str:
    """Return router, link and caches."""
    text = f"Router {plan.router.policy}, affinity {plan.router.affinity}; "
    text += f"KV over {plan.link}; " if plan.link is not None else ""
    text += f"prefix cache {'on' if plan.prefix_cache else 'off'}"
    if plan.host_cache_bytes:
        text += f", {number(plan.host_cache_bytes)} bytes of host memory an instance"
    return text + "."


def _how(figures: PlanFigures) -> str:
    if not figures.simulated:
        return f"Found by closed form, {_counted(figures.replications, 'replication')}"
    return f"Found by simulation, {_counted(figures.replications, 'replication')}"


def _objective_texts(figures: PlanFigures) -> Iterator[str]:
    for one in figures.objectives:
        verdict = "met" if one.met else "not met"
        yield (
            f"objective {one.name} {number(one.limit_s)} s: {verdict}, "
            f"{estimate_text(one.reached)} s"
        )


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _indent(line: str) -> str:
    return "  " if line.startswith("  ") else ""
