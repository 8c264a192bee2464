"""A fleet as a DynamoGraphDeployment: a frontend that routes, and a component per pool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tonnage.sim.domain import BadInputError
from tonnage.sim.export.checks import refuse, remarks
from tonnage.sim.export.commands import Command, checked, engine_command, needs_router
from tonnage.sim.export.context import ExportContext, slug
from tonnage.sim.export.flags import FlagTable, Option, argument_list, dynamo_data, flag_table
from tonnage.sim.export.kubernetes import Manifest, words_of
from tonnage.sim.planning.fleet_plan import FleetPlan, PlannedPool
from tonnage.sim.units import version_key

_SESSION_IDLE_S = 3600


def dynamo_manifests(plan: FleetPlan, context: ExportContext) -> tuple[list[Manifest], list[str]]:
    """Return the deployment and the remarks; BadInputError for what the engine cannot do."""
    data = dynamo_data()
    brought = data["engines"].get(plan.engine, plan.engine_version)
    table = flag_table(plan.engine, brought)
    refuse(plan, table, context)
    told = remarks(plan, table, context)
    if version_key(brought) != version_key(plan.engine_version):
        told.insert(
            0,
            f"Dynamo {data['version']} brings {plan.engine} {brought}, the plan is for "
            f"{plan.engine_version}: the flags are those of {brought}",
        )
    frontend, routing_remarks = _frontend(plan, data)
    components = [frontend, *(_component(plan, pool, table, context) for pool in plan.pools)]
    deployment: Manifest = {
        "apiVersion": data["api_version"],
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": slug(plan)},
        "spec": {"backendFramework": plan.engine, "components": components},
    }
    return [deployment], [*told, *routing_remarks]


def _frontend(plan: FleetPlan, data: Mapping[str, Any]) -> tuple[Manifest, list[str]]:
    options, told = _routing(plan, data)
    options = [Option("--http-port", str(data["port"])), *options]
    command = Command(("python3", "-m", "dynamo.frontend"), tuple(options))
    words = checked(command, argument_list(data["arguments"])).words()
    container = _container(plan, data, words)
    return {
        "name": "frontend",
        "type": "frontend",
        "replicas": 1,
        "podTemplate": {"spec": {"containers": [container]}},
    }, told


def _routing(plan: FleetPlan, data: Mapping[str, Any]) -> tuple[list[Option], list[str]]:
    """Return the routing mode for the plan's policy and affinity, and what it does otherwise."""
    if not needs_router(plan):
        return [], []
    asked, told = plan.router.policy, []
    mode = data["policies"].get(asked)
    if mode is None:
        mode = data["nearest"].get(asked)
        if mode is None:
            known = ", ".join((*data["policies"], *data["nearest"]))
            raise BadInputError(f"router.policy: {asked!r} is none of {known}")
        told.append(f"router.policy {asked}: Dynamo has no such mode; {mode} stands for it")
    if plan.router.affinity == "prefix":
        mode = data["prefix_affinity"]
        told.append("affinity prefix: Dynamo follows cached prefixes instead of a hash")
    options = [Option("--router-mode", mode)]
    if mode == "kv":  # as the planned router does, from what was sent, not from workers' events
        options.append(Option("--no-router-kv-events"))
    if plan.router.affinity == "session":
        options.append(Option(data["session_affinity"], str(_SESSION_IDLE_S)))
        told.append(f"affinity session: Dynamo forgets a session after {_SESSION_IDLE_S} idle s")
    return options, told


def _component(
    plan: FleetPlan, pool: PlannedPool, table: FlagTable, context: ExportContext
) -> Manifest:
    data, nodes = dynamo_data(), context.nodes(pool)
    words = words_of(_worker(plan, pool, table, context).words())
    container = _container(plan, data, words)
    gpus = str(pool.layout.gpus // nodes)
    container["resources"] = {
        "limits": {"nvidia.com/gpu": gpus},
        "requests": {"nvidia.com/gpu": gpus},
    }
    component: Manifest = {
        "name": pool.role,
        "type": "worker" if pool.role == "serve" else pool.role,
        "replicas": pool.instances,
        "podTemplate": {"spec": {"containers": [container]}},
    }
    if nodes > 1:  # the operator tells every pod its place
        component["multinode"] = {"nodeCount": nodes}
    return component


def _worker(
    plan: FleetPlan, pool: PlannedPool, table: FlagTable, context: ExportContext
) -> Command:
    """Return what starts a worker: the engine's flags behind Dynamo's program."""
    data = dynamo_data()
    command = checked(engine_command(plan, pool, table, context), table.arguments)
    model, *options = command.options
    model = Option(data["model_flag"][plan.engine], model.value, model.variable)
    transfer = data["kv_transfer"].get(plan.engine)
    if transfer is not None:
        options = [
            Option(one.flag, transfer) if one.flag.endswith("-transfer-backend") else one
            for one in options
        ]
        if pool.role != "serve":  # the other pool's pods look for the bootstrap server from outside
            bootstrap = table.data["bootstrap"]
            options.append(Option(bootstrap["flag"], str(bootstrap["port"])))
            options.append(Option("--host", "0.0.0.0"))
    elif pool.role != "serve":
        mode = Command((), (Option("--disaggregation-mode", pool.role),))
        options += checked(mode, argument_list(data["arguments"])).options
    return Command(("python3", "-m", f"dynamo.{plan.engine}"), (model, *options))


def _container(plan: FleetPlan, data: Mapping[str, Any], words: list[str]) -> Manifest:
    return {
        "name": "main",
        "image": data["image"].format(engine=plan.engine),
        "command": words[:3],
        "args": words[3:],
        "env": [_token()],
    }


def _token() -> Manifest:
    secret = {"name": "huggingface", "key": "token", "optional": True}
    return {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": secret}}
