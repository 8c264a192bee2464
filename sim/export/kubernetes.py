"""A fleet as Kubernetes objects: Deployments, LeaderWorkerSets over several nodes, the router."""

from __future__ import annotations

from typing import Any

from tonnage.sim.export.checks import refuse, remarks
from tonnage.sim.export.commands import (
    Routing,
    checked,
    engine_command,
    needs_router,
    router_command,
    routing,
)
from tonnage.sim.export.context import ExportContext, slug
from tonnage.sim.export.flags import FlagTable, Option, flag_table, kubernetes_data
from tonnage.sim.planning.fleet_plan import FleetPlan, PlannedPool

Manifest = dict[str, Any]
_NAME, _ROLE = "app.kubernetes.io/name", "app.kubernetes.io/component"
_START_S = 20
_STARTS = 180  # an hour: large checkpoints load for long


def kubernetes_manifests(
    plan: FleetPlan, context: ExportContext
) -> tuple[list[Manifest], list[str]]:
    """Return the objects and the remarks; BadInputError for what the engine cannot do."""
    table = flag_table(plan.engine, plan.engine_version)
    refuse(plan, table, context)
    told = remarks(plan, table, context)
    objects: list[Manifest] = []
    for pool in plan.pools:
        objects += [_workload(plan, pool, table, context), _service(plan, pool.role, table)]
        if pool.gpu not in kubernetes_data()["gpu_products"]:
            told.append(
                f"pools.{pool.role}.gpu {pool.gpu}: select its nodes yourself (nodeSelector)"
            )
    if needs_router(plan):
        route = routing(plan, table.data["router"])
        told += route.remarks
        objects += _router(plan, table, route)
    if plan.link == "rdma":
        told.append("link rdma: give the pods your cluster's RDMA resource and IPC_LOCK")
    return objects, told


def labels(plan: FleetPlan, role: str) -> dict[str, str]:
    """Return the labels of a role's pods."""
    return {_NAME: slug(plan), _ROLE: role}


def words_of(words: list[str]) -> list[str]:
    """Return words that Kubernetes leaves as they are: it would expand `$(NAME)`."""
    return [word.replace("$(", "$$(") for word in words]


# --- a pool -------------------------------------------------------------------------------------


def _workload(
    plan: FleetPlan, pool: PlannedPool, table: FlagTable, context: ExportContext
) -> Manifest:
    nodes, name = context.nodes(pool), f"{slug(plan)}-{pool.role}"
    command = checked(engine_command(plan, pool, table, context), table.arguments)
    words = words_of(command.words())
    leader = _pod(plan, pool, table, context, [*words, *_network(pool, table)])
    if nodes == 1:
        spec: Manifest = {
            "replicas": pool.instances,
            "selector": {"matchLabels": labels(plan, pool.role)},
            "template": leader,
        }
        return _object("apps/v1", "Deployment", name, labels(plan, pool.role), spec)
    group = _group_words(nodes, table)
    follower = [table.data["nodes"]["follower"]] if table.data["nodes"]["follower"] else []
    main = leader["spec"]["containers"][0]
    main["args"] = [*main["args"], *group]
    worker_words = [*words, *_network(pool, table), *group, *follower]
    worker = _pod(plan, pool, table, context, worker_words, leads=False)
    spec = {
        "replicas": pool.instances,
        "startupPolicy": "LeaderCreated",
        "leaderWorkerTemplate": {
            "size": nodes,
            "restartPolicy": "RecreateGroupOnPodRestart",
            "leaderTemplate": leader,
            "workerTemplate": worker,
        },
    }
    kind = ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")
    return _object(*kind, name, labels(plan, pool.role), spec)


def _network(pool: PlannedPool, table: FlagTable) -> list[str]:
    words = ["--host", "0.0.0.0", "--port", str(table.data["port"])]
    bootstrap = table.data.get("bootstrap")
    if bootstrap is not None and pool.role == "prefill":
        words += [bootstrap["flag"], str(bootstrap["port"])]
    return words


def _group_words(nodes: int, table: FlagTable) -> list[str]:
    """Return what tells a pod its place in the group; LeaderWorkerSet sets the variables."""
    flags = table.data["nodes"]
    address = "$(LWS_LEADER_ADDRESS)"
    if flags["port"] is not None:
        address += f":{flags['port']}"
    rank = [flags["rank"], "$(LWS_WORKER_INDEX)"]
    return [flags["count"], str(nodes), *rank, flags["address"], address]


def _pod(
    plan: FleetPlan,
    pool: PlannedPool,
    table: FlagTable,
    context: ExportContext,
    words: list[str],
    *,
    leads: bool = True,
) -> Manifest:
    """Return the template of a pod of an instance; only a leader answers requests."""
    gpus = pool.layout.gpus // context.nodes(pool)
    programs = len(table.data["program"])
    port = table.data["port"]
    container: Manifest = {
        "name": "engine",
        "image": table.data["image"].format(version=table.version),
        "command": words[:programs],
        "args": words[programs:],
        "env": _environment(pool, table),
        "resources": {
            "limits": {"nvidia.com/gpu": str(gpus)},
            "requests": {"nvidia.com/gpu": str(gpus)},
        },
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    if leads:
        health = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": _START_S}
        container["ports"] = [{"name": "http", "containerPort": port}]
        container["startupProbe"] = {**health, "failureThreshold": _STARTS}
        container["readinessProbe"] = health
    spec: Manifest = {
        "containers": [container],
        "volumes": [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}],
    }
    product = kubernetes_data()["gpu_products"].get(pool.gpu)
    if product is not None:
        spec["nodeSelector"] = {"nvidia.com/gpu.product": product}
    role = pool.role if leads else f"{pool.role}-worker"
    metadata: Manifest = {"labels": labels(plan, role)}
    annotation = table.data["router"]["bootstrap_annotation"]
    if leads and annotation is not None and pool.role == "prefill":
        metadata["annotations"] = {annotation: str(table.data["bootstrap"]["port"])}
    return {"metadata": metadata, "spec": spec}


def _environment(pool: PlannedPool, table: FlagTable) -> list[Manifest]:
    token = {"name": "huggingface", "key": "token", "optional": True}
    environment: list[Manifest] = [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": token}}]
    transfer = table.data.get("transfer")
    if transfer is not None and pool.role != "serve":
        own = {"fieldRef": {"fieldPath": "status.podIP"}}
        environment.append({"name": transfer["host_variable"], "valueFrom": own})
        environment.append({"name": transfer["port_variable"], "value": str(transfer["port"])})
    return environment


# --- the router ---------------------------------------------------------------------------------


def _router(plan: FleetPlan, table: FlagTable, route: Routing) -> list[Manifest]:
    """Return the router and what lets it see the pods of its namespace."""
    name, own = f"{slug(plan)}-router", labels(plan, "router")
    data = table.data["router"]
    reads = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    binding = {
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name}],
    }
    rbac = "rbac.authorization.k8s.io/v1"
    deployment = {
        "replicas": 1,
        "selector": {"matchLabels": own},
        "template": {"metadata": {"labels": own}, "spec": _router_pod(plan, table, route, name)},
    }
    ports = [{"name": "http", "port": 80, "targetPort": data["port"]}]
    return [
        _object("v1", "ServiceAccount", name, own),
        _object(rbac, "Role", name, own) | {"rules": [reads]},
        _object(rbac, "RoleBinding", name, own) | binding,
        _object("apps/v1", "Deployment", name, own, deployment),
        _object("v1", "Service", name, own, {"selector": own, "ports": ports}),
    ]


def _router_pod(plan: FleetPlan, table: FlagTable, route: Routing, account: str) -> Manifest:
    data = table.data["router"]
    words = router_command(table, [*_discovery(plan, table), *route.options]).words()
    words += ["--host", "0.0.0.0", "--port", str(data["port"])]
    install = f"pip install --quiet {data['package']}=={data['version']}"
    namespace = {"fieldRef": {"fieldPath": "metadata.namespace"}}
    container = {
        "name": "router",
        "image": kubernetes_data()["router_image"],
        "command": ["sh", "-c", f'{install} && exec "$@"', "sh"],
        "args": words,
        "env": [{"name": "POD_NAMESPACE", "valueFrom": namespace}],
        "ports": [{"name": "http", "containerPort": data["port"]}],
        "readinessProbe": {"tcpSocket": {"port": "http"}, "periodSeconds": _START_S},
    }
    return {"serviceAccountName": account, "containers": [container]}


def _discovery(plan: FleetPlan, table: FlagTable) -> list[Option]:
    options = [
        Option("--service-discovery"),
        Option("--service-discovery-port", str(table.data["port"])),
        Option("--service-discovery-namespace", "$(POD_NAMESPACE)"),
    ]
    if len(plan.pools) > 1:
        options.append(Option(table.data["router"]["disaggregated"]))
    for pool in plan.pools:
        flag = "--selector" if pool.role == "serve" else f"--{pool.role}-selector"
        pairs = tuple(f"{key}={value}" for key, value in labels(plan, pool.role).items())
        options.append(Option(flag, None, None, pairs))
    return options


def _service(plan: FleetPlan, role: str, table: FlagTable) -> Manifest:
    own, port = labels(plan, role), table.data["port"]
    ports = [{"name": "http", "port": port, "targetPort": port}]
    return _object("v1", "Service", f"{slug(plan)}-{role}", own, {"selector": own, "ports": ports})


def _object(
    version: str, kind: str, name: str, own: dict[str, str], spec: Manifest | None = None
) -> Manifest:
    found: Manifest = {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": name, "labels": dict(own)},
    }
    return found if spec is None else found | {"spec": spec}
