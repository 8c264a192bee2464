"""Strict schemas of the custom resources that exports make.

LeaderWorkerSet: kubernetes-sigs/lws, api/leaderworkerset/v1/leaderworkerset_types.go. Dynamo:
ai-dynamo/dynamo, deploy/operator/api/v1beta1 (dynamographdeployment_types.go,
dynamocomponentdeployment_types.go, common.go). Their fields, enumerations and patterns, and nothing
else; pod templates are those of Kubernetes and are checked as such.
"""

from __future__ import annotations

from typing import Any

_METADATA = {
    "type": "object",
    "required": ["name"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "pattern": r"^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}
_POD_TEMPLATE = {"type": "object", "required": ["spec"]}

LEADER_WORKER_SET: dict[str, Any] = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "additionalProperties": False,
    "properties": {
        "apiVersion": {"const": "leaderworkerset.x-k8s.io/v1"},
        "kind": {"const": "LeaderWorkerSet"},
        "metadata": _METADATA,
        "spec": {
            "type": "object",
            "required": ["leaderWorkerTemplate"],
            "additionalProperties": False,
            "properties": {
                "replicas": {"type": "integer", "minimum": 0},
                "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
                "rolloutStrategy": {"type": "object"},
                "networkConfig": {"type": "object"},
                "leaderWorkerTemplate": {
                    "type": "object",
                    "required": ["workerTemplate"],
                    "additionalProperties": False,
                    "properties": {
                        "leaderTemplate": _POD_TEMPLATE,
                        "workerTemplate": _POD_TEMPLATE,
                        "size": {"type": "integer", "minimum": 1},
                        "restartPolicy": {
                            "enum": [
                                "Default",
                                "RecreateGroupOnPodRestart",
                                "RecreateGroupAfterStart",
                                "None",
                            ]
                        },
                        "subGroupPolicy": {"type": "object"},
                        "volumeClaimTemplates": {"type": "array"},
                    },
                },
            },
        },
    },
}

_COMPONENT = {
    "type": "object",
    "required": ["name", "podTemplate"],
    "additionalProperties": False,
    "properties": {
        "name": {
            "type": "string",
            "minLength": 1,
            "maxLength": 63,
            "pattern": r"^[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?$",
        },
        "type": {"enum": ["frontend", "worker", "prefill", "decode", "planner", "epp"]},
        "runtimeVersionOverride": {"type": "string"},
        "globalDynamoNamespace": {"type": "boolean"},
        "podTemplate": _POD_TEMPLATE,
        "replicas": {"type": "integer", "minimum": 0},
        "minAvailable": {"type": "integer", "minimum": 1},
        "multinode": {
            "type": "object",
            "required": ["nodeCount"],
            "additionalProperties": False,
            "properties": {"nodeCount": {"type": "integer", "minimum": 2}},
        },
        "sharedMemorySize": {"type": "string"},
        "modelRef": {"type": "object"},
    },
}

DYNAMO_GRAPH_DEPLOYMENT: dict[str, Any] = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "additionalProperties": False,
    "properties": {
        "apiVersion": {"const": "nvidia.com/v1beta1"},
        "kind": {"const": "DynamoGraphDeployment"},
        "metadata": _METADATA,
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "annotations": {"type": "object"},
                "labels": {"type": "object"},
                "env": {"type": "array"},
                "backendFramework": {"enum": ["sglang", "vllm", "trtllm"]},
                "components": {"type": "array", "maxItems": 25, "items": _COMPONENT},
            },
        },
    },
}
