"""A plan as a table: every field in a CSV, and a page of Markdown."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from typing import Any

from tonnage.sim.export.settings import one_line
from tonnage.sim.export.summary import (
    estimate_text,
    figure_rows,
    number,
    provenance_text,
    title,
)
from tonnage.sim.planning.fleet_plan import Estimate, FleetPlan, PlannedPool

_COLUMNS = ("field", "value", "low", "high")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what spreadsheets would compute
_ESTIMATE = {"value", "low", "high"}


def csv_text(plan: FleetPlan) -> str:
    """Return one row per field of the plan, by dotted name; figures with their interval."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(_COLUMNS)
    writer.writerows(_rows(plan.to_dict(), ""))
    return stream.getvalue()


def _rows(value: Any, name: str) -> Iterator[tuple[str, ...]]:
    if isinstance(value, Mapping) and set(value) == _ESTIMATE:
        yield (name, *(_cell(value[key]) for key in ("value", "low", "high")))
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _rows(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _rows(inner, f"{name}.{index}")
    else:
        yield (name, _cell(value), "", "")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    text = str(value)
    return f"'{text}" if text.startswith(_FORMULA) else text


def markdown_text(plan: FleetPlan, remarks: list[str]) -> str:
    """Return a page: pools, figures, objectives, where they come from, what to mind."""
    parts = [f"# {_escaped(title(plan))}", *_pools(plan), *_figures(plan), *_around(plan)]
    if remarks:
        parts += ["## To mind", "\n".join(f"- {_escaped(text)}" for text in remarks)]
    return "\n\n".join(parts) + "\n"


def pool_rows(plan: FleetPlan) -> list[tuple[str, ...]]:
    """Return the pools side by side: a row per property, a column per pool."""
    rows = [("", *(pool.role for pool in plan.pools))]
    columns = [_pool_column(pool) for pool in plan.pools]
    rows += [(name, *(column[name] for column in columns)) for name in columns[0]]
    return rows


def _pool_column(pool: PlannedPool) -> dict[str, str]:
    layout, one = pool.layout, pool.speculation
    drafts = "none"
    if one is not None:
        shares = ", ".join(map(number, one.accept_distribution))
        drafts = f"{one.draft}, {one.draft_tokens} tokens, {number(one.accept_length)} accepted"
        drafts += f" ({shares})" if shares else ""
    integrity = pool.integrity.tracker
    if integrity != "none":
        integrity += f", every {pool.integrity.every_steps} steps"
    if pool.integrity.handoff_checksum:
        integrity += ", checksum at the handoff"
    return {
        "GPU": pool.gpu,
        "Instances": str(pool.instances),
        "GPUs an instance": str(layout.gpus),
        "Tensor parallel": str(layout.tp),
        "Pipeline stages": str(layout.pp),
        "Expert parallel": str(layout.ep),
        "Attention data parallel": str(layout.attention_dp),
        "Decode context parallel": str(layout.dcp),
        "Weights": pool.weights,
        "KV": pool.kv,
        "Memory fraction": repr(pool.mem_fraction),
        "Running requests": str(pool.max_running_requests),
        "Tokens a request, at most": str(pool.max_model_tokens),
        "Page, tokens": str(pool.page_tokens),
        "Chunk, tokens": str(pool.chunk_tokens),
        "KV tokens an instance": str(pool.kv_tokens),
        "USD a GPU-hour": number(pool.gpu_hour_usd),
        "Speculation": drafts,
        "Integrity": integrity,
    }


def figure_table(plan: FleetPlan) -> list[tuple[str, ...]]:
    """Return what the fleet does: a row per figure with its interval."""
    figures = plan.figures
    rows = [
        ("Figure", "Value"),
        *((name, estimate_text(one)) for name, one in figure_rows(figures)),
    ]
    return [*rows, ("Replications", str(figures.replications)), ("What binds", plan.binds)]


def objective_table(plan: FleetPlan) -> list[tuple[str, ...]]:
    """Return the objectives: limit, what was reached, whether the interval's bound is within."""
    rows: list[tuple[str, ...]] = [("Objective", "Limit, s", "Reached, s", "Met")]
    for one in plan.figures.objectives:
        met = "yes" if one.met else "no"
        rows.append((one.name, number(one.limit_s), estimate_text(one.reached), met))
    return rows


def around_table(plan: FleetPlan) -> list[tuple[str, ...]]:
    """Return router, link, caches, seed and what the plan needs of an engine."""
    cache = "on" if plan.prefix_cache else "off"
    rows: list[tuple[str, ...]] = [
        ("Setting", "Value"),
        ("Router policy", plan.router.policy),
        ("Affinity", plan.router.affinity),
        ("KV path", plan.link or "none"),
        ("Prefix cache", cache),
        ("Host memory for KV, bytes an instance", number(plan.host_cache_bytes)),
        ("Seed", str(plan.seed)),
    ]
    return rows + [("Needs what no stock engine has", text) for text in plan.needs]


def _pools(plan: FleetPlan) -> list[str]:
    return ["## Pools", _table(pool_rows(plan))]


def _figures(plan: FleetPlan) -> list[str]:
    how = "simulated" if plan.figures.simulated else "in closed form"
    parts = [f"## Figures, {how}", _table(figure_table(plan))]
    if plan.figures.objectives:
        parts += ["## Objectives", _table(objective_table(plan))]
    return parts


def _around(plan: FleetPlan) -> list[str]:
    parts = ["## Around the pools", _table(around_table(plan)), _escaped(provenance_text(plan))]
    if plan.provenance.assumptions:
        assumed = "\n".join(f"- {_escaped(text)}" for text in plan.provenance.assumptions)
        parts += ["## Assumed", assumed]
    return parts


def _table(rows: list[tuple[str, ...]]) -> str:
    head, *rest = ["| " + " | ".join(_escaped(cell) for cell in row) + " |" for row in rows]
    line = "|" + "---|" * len(rows[0])
    return "\n".join([head, line, *rest])


def _escaped(text: str) -> str:
    """Return a text whose characters Markdown takes for themselves."""
    return "".join(f"\\{one}" if one in "\\`*_[]<>|#" else one for one in one_line(text))


def interval_bounds(estimate: Estimate) -> tuple[float, float]:
    """Return the bounds of an interval, the value itself where there is none."""
    low = estimate.value if estimate.low is None else estimate.low
    return low, estimate.upper
