"""The formats of an export: what each is called, and the one file that it makes of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from tonnage.sim.domain import BadInputError
from tonnage.sim.export.checks import remarks as engine_remarks
from tonnage.sim.export.commands import needs_router, routing
from tonnage.sim.export.context import ExportContext, slug
from tonnage.sim.export.dynamo import dynamo_manifests
from tonnage.sim.export.flags import engines, flag_table
from tonnage.sim.export.kubernetes import kubernetes_manifests
from tonnage.sim.export.report import FrontPoints, html_report
from tonnage.sim.export.shell import shell_script
from tonnage.sim.export.summary import summary_lines
from tonnage.sim.export.tables import csv_text, markdown_text
from tonnage.sim.planning.fleet_plan import FleetPlan

Format = Literal["sglang", "vllm", "dynamo", "kubernetes", "csv", "markdown", "html"]
FORMATS: tuple[Format, ...] = get_args(Format)
_ENDINGS: dict[Format, str] = {
    "sglang": "sglang.sh",
    "vllm": "vllm.sh",
    "dynamo": "dynamo.yaml",
    "kubernetes": "kubernetes.yaml",
    "csv": "csv",
    "markdown": "md",
    "html": "html",
}


@dataclass(frozen=True, slots=True)
class Rendered:
    """A file: its text, or the manifests that a YAML file holds behind `head` as comments."""

    file_name: str
    remarks: tuple[str, ...]
    text: str | None = None
    head: tuple[str, ...] = ()
    manifests: tuple[dict[str, Any], ...] = ()


def rendered(
    plan: FleetPlan, to: Format, context: ExportContext, front: FrontPoints = ()
) -> Rendered:
    """Return the plan in a format; BadInputError for what the engine asked for cannot do."""
    name = f"{slug(plan)}.{_ENDINGS[to]}"
    if to in ("dynamo", "kubernetes"):
        make = dynamo_manifests if to == "dynamo" else kubernetes_manifests
        manifests, told = make(plan, context)
        head = tuple(summary_lines(plan, told))
        return Rendered(name, tuple(told), None, head, tuple(manifests))
    if to in ("sglang", "vllm"):
        if plan.engine != to:
            raise BadInputError(
                f"--to {to}: the plan is for {plan.engine}; export it to {plan.engine}, or plan "
                f"with engine.name={to}"
            )
        text, told = shell_script(plan, context)
        return Rendered(name, tuple(told), text)
    told = _remarks(plan, context)
    if to == "csv":
        return Rendered(name, tuple(told), csv_text(plan))
    page = markdown_text(plan, told) if to == "markdown" else html_report(plan, told, front)
    return Rendered(name, tuple(told), page)


def _remarks(plan: FleetPlan, context: ExportContext) -> list[str]:
    """Return what the engine would do otherwise; nothing is known of an engine without flags."""
    if plan.engine not in engines():
        return []
    table = flag_table(plan.engine, plan.engine_version)
    told = engine_remarks(plan, table, context)
    return [*told, *routing(plan, table.data["router"]).remarks] if needs_router(plan) else told
