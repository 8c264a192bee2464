"""A fleet as a plan: what to start, what it was found to do, what it costs. JSON and back.

Everything that an exporter needs is a value here, none is left to an engine's default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from tonnage.sim.domain import BadInputError, IntegritySpec, ParallelLayout

PoolRole = Literal["prefill", "decode", "serve"]
_NOT_WATCHED = IntegritySpec()
_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its interval of 95 %; no bounds where the runs were too few to tell."""

    __pydantic_config__ = _STRICT

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def upper(self) -> float:
        """The bound that an objective is compared with; the value where there is none."""
        return self.value if self.high is None else self.high

    def overlaps(self, other: Estimate) -> bool:
        """Tell whether the two cannot be told apart: their intervals meet."""
        low, high = self.value if self.low is None else self.low, self.upper
        other_low = other.value if other.low is None else other.low
        return low <= other.upper and other_low <= high


@dataclass(frozen=True, slots=True)
class PlannedSpeculation:
    """Speculative decoding of a pool; `draft`: mtp, eagle3, free, or a model's name or path."""

    __pydantic_config__ = _STRICT

    draft: str
    draft_tokens: int
    accept_length: float
    accept_distribution: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedPool:
    """Identical instances of one role, and all that starts them.

    `max_running_requests` is that of an instance, all attention-DP ranks together; `chunk_tokens`
    the prompt tokens of one step; `max_model_tokens` the longest request, prompt and answer.
    """

    __pydantic_config__ = _STRICT

    role: PoolRole
    gpu: str
    instances: int
    layout: ParallelLayout
    weights: str
    kv: str
    mem_fraction: float
    max_running_requests: int
    max_model_tokens: int
    page_tokens: int
    chunk_tokens: int
    kv_tokens: int  # of an instance, as the memory model has it
    gpu_hour_usd: float
    speculation: PlannedSpeculation | None = None
    integrity: IntegritySpec = _NOT_WATCHED

    @property
    def gpus(self) -> int:
        """GPUs of the whole pool."""
        return self.instances * self.layout.gpus


@dataclass(frozen=True, slots=True)
class PlannedObjective:
    """An objective of the scenario, and what the plan was found to reach."""

    __pydantic_config__ = _STRICT

    name: str  # such as ttft_p95
    limit_s: float
    reached: Estimate
    met: bool  # the bound of the interval is within the limit


@dataclass(frozen=True, slots=True)
class PlanFigures:
    """What the fleet does under the scenario's load; `simulated`: by events, not by closed form.

    Per GPU means all GPUs of the fleet. What a kind of load has not is None.
    """

    __pydantic_config__ = _STRICT

    simulated: bool
    replications: int
    output_tokens_per_s: Estimate
    output_tokens_per_s_per_gpu: Estimate
    output_tokens_per_s_per_user: Estimate  # 1 / TPOT, the median's
    usd_per_hour: float
    usd_per_million_output_tokens: Estimate
    input_tokens_per_s: Estimate | None = None
    ttft_p95_s: Estimate | None = None
    tpot_p95_s: Estimate | None = None
    cache_hit_share: float | None = None
    objectives: tuple[PlannedObjective, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanProvenance:
    """Where the figures come from, as every report of the tool says it."""

    __pydantic_config__ = _STRICT

    profile: str
    source: Literal["measured", "imported", "scaled", "datasheet"]
    version: str
    seed: int
    assumptions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedRouter:
    """How requests are spread over instances, as the scenario's `router`."""

    __pydantic_config__ = _STRICT

    policy: str
    affinity: str = "none"


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """A fleet that meets the objectives, or comes nearest to them.

    `needs`: what it asks of an engine that no stock one does; empty: it can be started today.
    `link`: the kind of path between prefill and decode, None where one pool does both.
    """

    __pydantic_config__ = _STRICT

    name: str
    model: str
    engine: str
    engine_version: str
    pools: tuple[PlannedPool, ...]
    router: PlannedRouter
    figures: PlanFigures
    binds: str
    seed: int
    provenance: PlanProvenance
    link: str | None = None
    prefix_cache: bool = True
    host_cache_bytes: float = 0.0
    needs: tuple[str, ...] = ()

    @property
    def launchable(self) -> bool:
        """Whether stock engines can start it."""
        return not self.needs

    @property
    def gpus(self) -> int:
        """GPUs of the fleet."""
        return sum(pool.gpus for pool in self.pools)

    @property
    def feasible(self) -> bool:
        """Whether every objective is met by its bound."""
        return all(one.met for one in self.figures.objectives)

    def pool(self, role: str) -> PlannedPool | None:
        """Return the pool of a role, None where the fleet has none."""
        return next((pool for pool in self.pools if pool.role == role), None)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object: every field, `gpus` and `launchable` for readers."""
        fields: dict[str, Any] = _adapter().dump_python(self, mode="json")
        for pool in fields["pools"]:  # a set has no order, and the same plan is the same text
            pool["integrity"]["covers"] = sorted(pool["integrity"]["covers"])
        return {**fields, "gpus": self.gpus, "launchable": self.launchable}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "plan") -> FleetPlan:
        """Read the JSON object back; BadInputError names the `source` and the field."""
        fields = {key: data[key] for key in data if key not in ("gpus", "launchable")}
        try:
            return _adapter().validate_python(fields)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"]) or "the plan"
            message = f"{source}: {field}: {first['msg']}; write it again with tonnage plan"
            raise BadInputError(message) from error


@cache
def _adapter() -> TypeAdapter[FleetPlan]:
    return TypeAdapter(FleetPlan)
