"""Manifests: valid for Kubernetes, and the pods get the words of the plan."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

import tonnage
from tests.sim.export.plans import PLANS, with_pool
from tests.sim.export.schemas import DYNAMO_GRAPH_DEPLOYMENT, LEADER_WORKER_SET
from tonnage.sim.domain import ParallelLayout
from tonnage.sim.export.flags import Option, argument_list
from tonnage.sim.planning.fleet_plan import FleetPlan

KUBERNETES = "1.33"
Manifest = dict[str, Any]


def manifests(plan: FleetPlan, to: Any = "kubernetes", **options: Any) -> list[Manifest]:
    return list(yaml.safe_load_all(tonnage.export(plan, to, **options).text))


def of_kind(found: list[Manifest], kind: str) -> list[Manifest]:
    return [one for one in found if one["kind"] == kind]


def named(found: list[Manifest], kind: str, ending: str) -> Manifest:
    return next(one for one in of_kind(found, kind) if one["metadata"]["name"].endswith(ending))


def validate(manifest: Manifest) -> None:
    """Raise where Kubernetes, or the operator that owns the kind, would refuse it."""
    if manifest["kind"] == "LeaderWorkerSet":
        jsonschema.validate(manifest, LEADER_WORKER_SET)
        group = manifest["spec"]["leaderWorkerTemplate"]
        templates = [group["leaderTemplate"], group["workerTemplate"]]
    elif manifest["kind"] == "DynamoGraphDeployment":
        jsonschema.validate(manifest, DYNAMO_GRAPH_DEPLOYMENT)
        templates = [one["podTemplate"] for one in manifest["spec"]["components"]]
    else:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
        return
    for template in templates:
        own = {"apiVersion": "v1", "kind": "PodTemplate", "template": template}
        kubernetes_validate.validate(own, KUBERNETES, strict=True)


@pytest.mark.parametrize("to", ["kubernetes", "dynamo"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_every_manifest_is_valid(plan: FleetPlan, to: str) -> None:
    found = manifests(plan, to)
    assert found
    for manifest in found:
        validate(manifest)


def test_the_check_sees_a_field_that_is_not_there() -> None:
    deployment = of_kind(manifests(PLANS["kimi-agents"]), "Deployment")[0]
    deployment["spec"]["template"]["spec"]["containers"][0]["arguments"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(deployment)
    fleet = manifests(PLANS["glm-long"], "dynamo")[0]
    fleet["spec"]["services"] = {}
    with pytest.raises(jsonschema.ValidationError):
        validate(fleet)


def engine_of(manifest: Manifest) -> Manifest:
    template = manifest["spec"].get("template")
    group = manifest["spec"].get("leaderWorkerTemplate", {})
    pod = template or group["leaderTemplate"]
    return dict(pod["spec"]["containers"][0])


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_pods_get_the_flags_of_the_pinned_engine(plan: FleetPlan) -> None:
    arguments = argument_list({"sglang": "sglang-0.5.23", "vllm": "vllm-0.33.0"}[plan.engine])
    found = manifests(plan)
    for pool in plan.pools:
        own = [one for one in found if one["metadata"]["name"].endswith(f"-{pool.role}")]
        # What LeaderWorkerSet puts in for its variable is a whole number.
        words = [one.replace("$(LWS_WORKER_INDEX)", "0") for one in engine_of(own[0])["args"]]
        pairs = dict(pairwise(words))
        assert own[0]["spec"]["replicas"] == pool.instances
        for flag in (word for word in words if word.startswith("--")):
            value = pairs.get(flag, "")
            switch = value.startswith("--") or flag == words[-1]
            assert arguments.problem(Option(flag, None if switch else value)) is None


def test_an_instance_of_one_node_is_a_deployment_of_its_gpus() -> None:
    found = manifests(PLANS["llama-chat"])
    deployment = next(
        one for one in of_kind(found, "Deployment") if "serve" in str(one["metadata"])
    )
    container = engine_of(deployment)
    assert deployment["spec"]["replicas"] == 2
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    assert container["image"] == "vllm/vllm-openai:v0.33.0"
    assert container["command"] == ["vllm", "serve"]
    pod = deployment["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}


def test_an_instance_over_nodes_is_a_leader_worker_set() -> None:
    sets = {
        one["metadata"]["name"]: one
        for one in of_kind(manifests(PLANS["glm-long"]), "LeaderWorkerSet")
    }
    assert set(sets) == {"glm-long-prefill", "glm-long-decode"}
    group = sets["glm-long-decode"]["spec"]["leaderWorkerTemplate"]
    assert sets["glm-long-decode"]["spec"]["replicas"] == 2
    assert group["size"] == 2
    for template in (group["leaderTemplate"], group["workerTemplate"]):
        container = template["spec"]["containers"][0]
        pairs = dict(pairwise(container["args"]))
        assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}  # of a node
        assert pairs["--node-rank"] == "$(LWS_WORKER_INDEX)"
        assert pairs["--dist-init-addr"] == "$(LWS_LEADER_ADDRESS):20000"


def test_vllm_workers_have_no_server_of_their_own() -> None:
    group = of_kind(manifests(PLANS["llama-apart"]), "LeaderWorkerSet")[0]
    templates = group["spec"]["leaderWorkerTemplate"]
    leader, worker = (
        templates[f"{one}Template"]["spec"]["containers"][0] for one in ("leader", "worker")
    )
    assert "--headless" not in leader["args"]
    assert "--headless" in worker["args"]
    assert "startupProbe" not in worker


def test_only_leaders_are_found_by_services_and_router() -> None:
    found = manifests(PLANS["glm-long"])
    group = named(found, "LeaderWorkerSet", "-decode")["spec"]["leaderWorkerTemplate"]
    service, router = named(found, "Service", "-decode"), named(found, "Deployment", "-router")
    words = router["spec"]["template"]["spec"]["containers"][0]["args"]
    selected = [f"{key}={value}" for key, value in service["spec"]["selector"].items()]
    start = words.index("--decode-selector") + 1
    assert words[start : start + 2] == selected
    leader, worker = (
        group[one]["metadata"]["labels"] for one in ("leaderTemplate", "workerTemplate")
    )
    assert service["spec"]["selector"].items() <= leader.items()
    assert not service["spec"]["selector"].items() <= worker.items()


def test_the_router_may_see_pods_and_knows_the_bootstrap_port() -> None:
    found = manifests(PLANS["kimi-agents"])
    role = of_kind(found, "Role")[0]
    assert role["rules"][0]["verbs"] == ["get", "list", "watch"]
    router = next(
        one for one in of_kind(found, "Deployment") if "router" in one["metadata"]["name"]
    )
    pod = router["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == of_kind(found, "ServiceAccount")[0]["metadata"]["name"]
    prefill = next(
        one for one in of_kind(found, "Deployment") if "prefill" in one["metadata"]["name"]
    )
    annotations = prefill["spec"]["template"]["metadata"]["annotations"]
    ports = dict(pairwise(engine_of(prefill)["args"]))
    assert annotations["sglang.ai/bootstrap-port"] == ports["--disaggregation-bootstrap-port"]


def test_a_gpu_without_a_known_label_is_told() -> None:
    plan = with_pool(PLANS["kimi-agents"], "decode", gpu="gb200", layout=ParallelLayout(tp=4))
    found = tonnage.export(plan, "kubernetes")
    assert any("pools.decode.gpu gb200: select its nodes" in one for one in found.remarks)


def test_kubernetes_expands_no_variable_of_a_name() -> None:
    plan = replace(PLANS["kimi-agents"], model="a$(HF_TOKEN)b")
    for to in ("kubernetes", "dynamo"):
        text = tonnage.export(plan, to, checkpoints={"prefill": "x$(HF_TOKEN)", "decode": "y"}).text
        assert "a$$(HF_TOKEN)b" in text
        assert '"x$$(HF_TOKEN)"' in text


def test_dynamo_has_a_component_per_pool_and_the_engines_it_brings() -> None:
    deployment = manifests(PLANS["glm-long"], "dynamo")[0]
    components = {one["name"]: one for one in deployment["spec"]["components"]}
    assert set(components) == {"frontend", "prefill", "decode"}
    assert components["decode"]["type"] == "decode"
    assert components["decode"]["replicas"] == 2
    assert components["decode"]["multinode"] == {"nodeCount": 2}
    main = components["decode"]["podTemplate"]["spec"]["containers"][0]
    assert main["name"] == "main"
    assert main["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    pairs = dict(pairwise(main["args"]))
    assert main["command"] == ["python3", "-m", "dynamo.sglang"]
    assert (pairs["--host"], pairs["--disaggregation-transfer-backend"]) == ("0.0.0.0", "nixl")
    assert pairs["--dp-size"] == "16"  # SGLang 0.5.21 counts attention-DP ranks so
    assert "--enable-dp-attention" in main["args"]
    brought = argument_list("sglang-0.5.21").arguments
    flags = [word for word in main["args"] if word.startswith("--")]
    assert [flag for flag in flags if flag not in brought] == []
    remarks = tonnage.export(PLANS["glm-long"], "dynamo").remarks
    assert any("Dynamo 1.6.1 brings sglang 0.5.21" in one for one in remarks)


@pytest.mark.parametrize(
    ("policy", "affinity", "words", "told"),
    [
        ("round_robin", "none", ["--router-mode", "round-robin"], ""),
        ("cache_aware", "none", ["--router-mode", "kv", "--no-router-kv-events"], ""),
        ("token_aware", "none", ["--router-mode", "least-loaded"], "router.policy token_aware"),
        (
            "random",
            "session",
            ["--router-mode", "random", "--router-session-affinity-ttl-secs", "3600"],
            "affinity session",
        ),
        ("random", "prefix", ["--router-mode", "kv", "--no-router-kv-events"], "affinity prefix"),
    ],
)
def test_dynamo_routes_as_planned_or_says_how(
    policy: str, affinity: str, words: list[str], told: str
) -> None:
    plan = PLANS["kimi-agents"]
    plan = replace(plan, router=replace(plan.router, policy=policy, affinity=affinity))
    found = tonnage.export(plan, "dynamo")
    frontend = next(iter(yaml.safe_load_all(found.text)))["spec"]["components"][0]
    assert frontend["podTemplate"]["spec"]["containers"][0]["args"][2:] == words
    assert any(told in one for one in found.remarks)


def test_what_has_no_known_checkpoint_is_named_and_can_be_given() -> None:
    plan = PLANS["glm-long"]
    assert "FILL-IN-DECODE-MODEL" in tonnage.export(plan, "kubernetes").text
    given = tonnage.export(plan, "kubernetes", checkpoints={"decode": "/models/glm int4"})
    assert "FILL-IN" not in given.text
    assert '"/models/glm int4"' in given.text
    assert not any("checkpoint" in one for one in given.remarks)


@pytest.mark.parametrize(
    "word", ["on", "y", "No", "null", "1e3", "0x10", "12:30", "=", "8", "~", ""]
)
def test_words_that_yaml_would_change_are_quoted(word: str) -> None:
    plan = replace(PLANS["kimi-agents"], model=f"{word}")
    text = tonnage.export(plan, "kubernetes", checkpoints={"prefill": "p", "decode": "d"}).text
    assert f'- "{word}"' in text
    args = engine_of(next(iter(yaml.safe_load_all(text))))["args"]
    assert args[args.index("--served-model-name") + 1] == word
