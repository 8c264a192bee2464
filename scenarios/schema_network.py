"""The `link` and `router` sections: how KV gets from pool to pool, and requests to instances."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from tonnage.scenarios.link_presets import LINK_PRESETS
from tonnage.scenarios.schema_base import (
    Bandwidth,
    Number,
    Positive,
    Seconds,
    Section,
    Text,
    Whole,
    WholeOrZero,
    did_you_mean,
    field_error,
    shown,
)
from tonnage.sim.domain import BadInputError, GpuSpec, LinkSpec
from tonnage.sim.serving.hash_ring import VIRTUAL_NODES
from tonnage.sim.serving.router import Affinity, PolicyName, RoutingSpec, regions_of
from tonnage.sim.serving.router_policies import CacheRules

# What a full instance is in SGLang's `prefix_hash`; its `consistent_hashing` knows none.
_PREFIX_LOAD_FACTOR = 1.25
_RULES = CacheRules()
_AUTO = PlainSerializer(lambda value: "auto" if value is None else value)


def _auto(value: object) -> object:
    return None if value == "auto" else value


def _flag(value: object) -> object:
    if value is None or isinstance(value, bool):
        return value
    raise field_error("", f"{shown(value)} is not true, false or auto")


AutoBandwidth = Annotated[Bandwidth | None, BeforeValidator(_auto), _AUTO]
AutoFlag = Annotated[bool | None, BeforeValidator(_flag), BeforeValidator(_auto), _AUTO]
AutoFactor = Annotated[Annotated[Number, Field(ge=1)] | None, BeforeValidator(_auto), _AUTO]


class LinkSection(Section):
    """The path of KV from prefill to decode.

    `preset`: a measured link, which takes the place of `kind`, `bandwidth`, `per` and `setup`.
    `bandwidth`: one direction, `per` gpu or for all GPUs of a node together; auto is the
    datasheet's rate of that kind. `efficiency`: the share of it that transfers get. `setup` passes
    before the first byte of every part. `overlap`: chunks leave as they are computed; auto where
    the engine does so. `convert`: who changes the format of the KV where the pools' formats differ.
    """

    kind: Literal["nvlink", "rdma", "nvmeof", "tcp", "pcie"] = "rdma"
    preset: Text | None = None
    bandwidth: AutoBandwidth = None
    per: Literal["gpu", "node"] = "gpu"
    efficiency: Annotated[Positive, Field(le=1)] = 1.0
    setup: Seconds = 0.0
    overlap: AutoFlag = None
    convert: Literal["sender", "receiver"] = "receiver"

    @model_validator(mode="before")
    @classmethod
    def _put_in_the_preset(cls, data: Any) -> Any:
        name = data.get("preset") if isinstance(data, dict) else None
        if not isinstance(name, str):
            return data
        preset = LINK_PRESETS.get(name)
        if preset is None:
            raise field_error(
                "preset", f"there is no {name!r}; {did_you_mean(name, list(LINK_PRESETS))}"
            )
        return data | {
            "kind": preset.kind,
            "bandwidth": preset.node_bandwidth_bytes_per_s,
            "per": "node",
            "setup": preset.setup_s,
        }

    def spec(self, sender: GpuSpec, receiver: GpuSpec) -> LinkSpec:
        """Return the path between GPUs of two pools; raises BadInputError without a rate."""
        source = "given"
        if self.preset is not None:
            source = f"{self.preset}: {LINK_PRESETS[self.preset].source}"
        elif self.bandwidth is None:
            source = "datasheet"
        return LinkSpec(self.kind, self._rate(sender), self.setup, self._rate(receiver), source)

    def _rate(self, gpu: GpuSpec) -> float:
        """Return bytes per second and GPU."""
        if self.bandwidth is None:
            return self.efficiency * self._datasheet_rate(gpu)
        gpus = gpu.gpus_per_node if self.per == "node" else 1
        return self.efficiency * self.bandwidth / gpus

    def _datasheet_rate(self, gpu: GpuSpec) -> float:
        known = {
            "nvlink": gpu.nvlink_bytes_per_s,
            "rdma": gpu.network_bytes_per_s,
            "pcie": gpu.pcie_bytes_per_s,
        }
        rate = known.get(self.kind)
        if rate is None:
            presets = [name for name, one in LINK_PRESETS.items() if one.kind == self.kind]
            choice = f", or a preset: {', '.join(presets)}" if presets else ""
            raise BadInputError(
                f"bandwidth: that of {self.kind} on {gpu.name} is not known; give it, such as "
                f"10GB/s{choice}"
            )
        return rate


def _lists_of_instances(value: object) -> object:
    if not isinstance(value, dict):
        raise field_error("", f"{shown(value)} is no mapping; write it like {{decode: [0]}}")
    return {role: one if isinstance(one, list | tuple) else (one,) for role, one in value.items()}


class RouterSection(Section):
    """How a region, and the next instance of a pool in it, are chosen.

    `prefill`, `decode`: policies of these pools; else `policy`. `affinity`: what makes requests
    return to one instance; `load_factor`: of the mean load, beyond which that one is full (auto:
    never for sessions, 1.25 for prefixes). `cache_threshold`, `balance_abs`, `balance_rel` and
    `tree_tokens` belong to cache_aware. Sessions without an affinity key hop between `regions` with
    `hop_probability` per request. `down`: instances that are not there, such as {decode: [0]}.
    `no_instance`: what becomes of requests while some pool has no instance that is up.
    """

    policy: PolicyName = "token_aware"
    prefill: PolicyName | None = None
    decode: PolicyName | None = None
    affinity: Affinity = "none"
    load_factor: AutoFactor = None
    prefix_tokens: Whole = 256
    virtual_nodes: Whole = VIRTUAL_NODES
    cache_threshold: Annotated[Number, Field(ge=0, le=1)] = _RULES.threshold
    balance_abs: WholeOrZero = _RULES.balance_abs
    balance_rel: Annotated[Number, Field(ge=1)] = _RULES.balance_rel
    tree_tokens: Whole = _RULES.tree_tokens
    regions: Whole = 1
    hop_probability: Annotated[Number, Field(ge=0, le=1)] = 0.0
    down: Annotated[dict[str, tuple[WholeOrZero, ...]], BeforeValidator(_lists_of_instances)] = (
        Field(default={})
    )
    no_instance: Literal["reject", "wait"] = Field(
        default="reject", exclude_if=lambda choice: choice == "reject"
    )

    def check(self, instances: Mapping[str, int]) -> None:
        """Raise where the pools, given as instances by role, cannot be routed to like that."""
        for role, count in instances.items():
            if count < self.regions:
                problem = f"{self.regions}, but the {role} pool has {count} instances to put there"
                raise field_error("router.regions", problem)
            if len(set(self.down.get(role, ()))) == count:
                raise field_error(f"router.down.{role}", "no instance is left")
        for role, gone in self.down.items():
            if role not in instances:
                raise field_error(f"router.down.{role}", "there is no such pool")
            beyond = [index for index in gone if index >= instances[role]]
            if beyond:
                problem = f"there is no instance {beyond[0]}; they are 0 to {instances[role] - 1}"
                raise field_error(f"router.down.{role}", problem)
        if not any(self._is_served(instances, region) for region in range(self.regions)):
            raise field_error("router.down", "no region is left with an instance of every pool")

    def _is_served(self, instances: Mapping[str, int], region: int) -> bool:
        return all(
            set(regions_of(count, self.regions)[region]) - set(self.down.get(role, ()))
            for role, count in instances.items()
        )

    def spec(self) -> RoutingSpec:
        """Return the rules."""
        given = {"prefill": self.prefill, "decode": self.decode}
        factor = self.load_factor
        if factor is None and self.affinity == "prefix":
            factor = _PREFIX_LOAD_FACTOR
        return RoutingSpec(
            policy=self.policy,
            policies={role: policy for role, policy in given.items() if policy is not None},
            affinity=self.affinity,
            prefix_tokens=self.prefix_tokens,
            load_factor=factor,
            virtual_nodes=self.virtual_nodes,
            cache=CacheRules(
                self.cache_threshold, self.balance_abs, self.balance_rel, self.tree_tokens
            ),
            regions=self.regions,
            hop_probability=self.hop_probability,
            down={role: tuple(sorted(set(gone))) for role, gone in self.down.items()},
            waits=self.no_instance == "wait",
        )
