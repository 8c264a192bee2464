"""The scenario: what a user asks, as a checked value. `load.py` reads it from YAML.

Every field has a default. Durations, sizes and bandwidths take text with a unit and are SI inside.
A value whose feature is not there is refused, never ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, model_validator

from tonnage.scenarios.catalogue import load_gpu, load_model
from tonnage.scenarios.profiles import ProfileChoice, choose_profile, is_path, profile_paths
from tonnage.scenarios.schema_base import (
    AutoFraction,
    AutoText,
    PositiveSeconds,
    Seconds,
    Section,
    Text,
    WholeOrZero,
    did_you_mean,
    field_error,
)
from tonnage.scenarios.schema_cache import CacheSection
from tonnage.scenarios.schema_clients import ClientsSection
from tonnage.scenarios.schema_faults import FaultList, check_faults
from tonnage.scenarios.schema_network import LinkSection, RouterSection
from tonnage.scenarios.schema_outages import OutageList, check_outages
from tonnage.scenarios.schema_plan import PlanSection
from tonnage.scenarios.schema_pools import PoolSection, PoolsSection, Role
from tonnage.scenarios.schema_price import PriceSection
from tonnage.scenarios.schema_traffic import TrafficSection
from tonnage.scenarios.trace_files import find_trace
from tonnage.sim.domain import (
    BadInputError,
    EngineSpec,
    GpuSpec,
    LinkSpec,
    ModelSpec,
    Objective,
    SpeculationSpec,
)
from tonnage.sim.serving.data_faults import FaultSpec
from tonnage.sim.serving.policy import policy_for
from tonnage.sim.serving.router import RoutingSpec
from tonnage.sim.traffic.lengths import LengthDistribution
from tonnage.sim.traffic.spec import SessionSpec, SessionTrace, TraceSource, TrafficSpec

# The versions whose rules were read: what `version: auto` means.
ENGINE_VERSIONS = {"sglang": "0.5.23", "vllm": "0.33", "trtllm": "1.3"}

_METRICS = ("ttft", "tpot", "itl", "e2e")
_QUANTILES = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}
_OBJECTIVES = {
    f"{metric}_{name}": (metric, quantile)
    for metric in _METRICS
    for name, quantile in _QUANTILES.items()
}
_NO_KEYS = ("closed", "resident", "poisson", "gamma")  # nothing but lengths
_PATH_LIKE = re.compile(r"[/\\]|\.(json|ya?ml)$")


def _known_objectives(value: object) -> object:
    for key in value if isinstance(value, dict) else ():
        if key not in _OBJECTIVES:
            raise field_error(
                str(key), f"unknown objective; {did_you_mean(str(key), list(_OBJECTIVES))}"
            )
    return value


def _known_profile(value: str) -> str:
    if value in ("auto", "datasheet") or is_path(value):
        return value
    known = ["auto", "datasheet", *profile_paths()]
    if value not in known:
        mend = did_you_mean(value, known)
        raise field_error("", f"{value!r} is no profile; {mend} (or a path, such as ./{value})")
    return value


class EngineSection(Section):
    """The serving engine whose memory and scheduling rules hold."""

    name: Literal["sglang", "vllm", "trtllm"] = "sglang"
    version: AutoText = None
    mem_fraction: AutoFraction = None
    mem_fraction_source: Literal["given", "fitted"] = "given"
    # How tokens choose experts, and what the engine itself adds to every step.
    routing: Literal["uniform", "balanced", "power_law_1.01", "power_law_1.2"] = "uniform"
    step_overhead: Seconds = 0.0
    # What the engine makes of its kernels, fitted on measured serving runs; or kernels alone.
    terms: Literal["none", "fitted"] = "none"

    def spec(self) -> EngineSpec:
        """Return the engine with its version filled in."""
        source = "auto" if self.mem_fraction is None else self.mem_fraction_source
        version = self.version or ENGINE_VERSIONS[self.name]
        return EngineSpec(self.name, version, self.mem_fraction, source)


class Scenario(Section):
    """A deployment, the traffic it meets, and what is asked of it."""

    name: Text = "scenario"
    description: Text = ""
    model: Text = "kimi-k2.6"
    gpu: Text = "h200-sxm"
    engine: EngineSection = EngineSection()
    traffic: TrafficSection = TrafficSection()
    pools: PoolsSection = PoolsSection(serve=PoolSection(kv="fp8_e4m3"))
    link: LinkSection = LinkSection()
    router: RouterSection = RouterSection()
    cache: CacheSection = CacheSection()
    slo: Annotated[dict[str, PositiveSeconds], BeforeValidator(_known_objectives)] = Field(
        default={}
    )
    price: PriceSection = PriceSection()
    # Left out of a resolved scenario where nothing of it was asked for.
    plan: PlanSection = Field(default=PlanSection(), exclude_if=lambda plan: plan == PlanSection())
    clients: ClientsSection = Field(
        default=ClientsSection(), exclude_if=lambda clients: clients == ClientsSection()
    )
    outages: OutageList = Field(default=(), exclude_if=lambda outages: not outages)
    faults: FaultList = Field(default=(), exclude_if=lambda faults: not faults)
    profile: Annotated[Text, AfterValidator(_known_profile)] = "auto"
    seed: WholeOrZero = 0
    # Partial scenarios by name, merged over this one by `load.load_variants`.
    variants: dict[str, dict[str, Any]] = Field(default={}, exclude=True)

    _source: str = PrivateAttr(default="scenario")
    _folder: Path = PrivateAttr(default=Path())

    @model_validator(mode="after")
    def _pools_fit_the_traffic(self) -> Scenario:
        pools, kind = self.pools, self.traffic.kind
        if kind == "resident":
            if pools.decode is None:
                raise field_error(
                    "pools.decode", "kind resident holds its requests in a decode pool"
                )
        elif pools.serve is None:
            for role in ("prefill", "decode"):
                if getattr(pools, role) is None:
                    problem = f"missing; kind {kind} needs prefill and decode, or serve alone"
                    raise field_error(f"pools.{role}", problem)
        return self

    @model_validator(mode="after")
    def _can_be_routed_and_sent(self) -> Scenario:
        self.router.check({role: pool.instances for role, pool in self.pools.named().items()})
        if self.router.affinity != "none" and self.traffic.kind in _NO_KEYS:
            problem = f"requests of kind {self.traffic.kind} belong to no session and share no"
            raise field_error("router.affinity", f"{problem} prefix; use none, or other traffic")
        if self.link.overlap and not self._sends_early_by_rule():
            problem = f"{self.engine.name} gives decode pages after the prompt, so no part of it"
            raise field_error("link.overlap", f"{problem} can leave before; use auto or false")
        return self

    @model_validator(mode="after")
    def _has_the_cache_of_its_engine(self) -> Scenario:
        if self.engine.name != "sglang" and self.cache.policy == "lfu":
            problem = f"{self.engine.name} evicts what was used least recently"
            raise field_error("cache.policy", f"{problem}; use lru")
        return self

    @model_validator(mode="after")
    def _has_pools_to_pay_for(self) -> Scenario:
        if self.price.split == "pools" and self.pools.prefill is None:
            problem = "no pool computes prompts alone, so they have no cost of their own"
            raise field_error("price.split", f"{problem}; use output, or pools.prefill")
        if self.traffic.shape is not None and self.price.mean_load() is not None:
            field = "price.utilisation" if self.price.day is None else "price.day"
            problem = "the offered rate follows traffic.shape already"
            raise field_error(field, f"{problem}, so it would count twice; remove one of them")
        return self

    @model_validator(mode="after")
    def _can_fail_like_that(self) -> Scenario:
        check_outages(
            self.outages,
            {role: pool.instances for role, pool in self.pools.named().items()},
            resident=self.traffic.kind == "resident",
            waits=self.router.no_instance == "wait",
            gives_up=self.traffic.timeout is not None or self.clients.deadline is not None,
        )
        check_faults(
            self.faults,
            {role: pool.instances for role, pool in self.pools.named().items()},
            resident=self.traffic.kind == "resident",
            loads=self.cache.gpu and self.cache.host > 0,
        )
        breaker = self.clients.breaker
        if breaker is not None and breaker.scope == "instance" and self.traffic.kind == "resident":
            problem = "kind resident has one instance, and nobody chooses; use scope pool"
            raise field_error("clients.breaker.scope", problem)
        if self.clients.deadline is not None and self.traffic.kind == "resident":
            problem = "kind resident has requests that never arrive, so no client waits"
            raise field_error("clients.deadline", f"{problem}; set it to null, or use kind closed")
        return self

    def came_from(self, source: str, folder: Path) -> Scenario:
        """Remember the file that messages name and the folder that relative paths start from."""
        self._source, self._folder = source, folder
        return self

    def origin(self) -> tuple[str, Path]:
        """Return the file that messages name and the folder that relative paths start from."""
        return self._source, self._folder

    # --- domain values --------------------------------------------------------------------------

    def objectives(self) -> tuple[Objective, ...]:
        """Return the latency objectives of `slo`."""
        return tuple(Objective(*_OBJECTIVES[key], limit_s) for key, limit_s in self.slo.items())

    def link_spec(self) -> LinkSpec:
        """Return the handoff path, between the GPUs of the pools that it joins."""
        roles = list(self.pools.named())
        with self._naming("link.bandwidth"):
            return self.link.spec(self.gpu_spec(roles[0]), self.gpu_spec(roles[-1]))

    def sends_early(self) -> bool:
        """Return whether the KV of a prompt leaves chunk by chunk."""
        return self._sends_early_by_rule() if self.link.overlap is None else self.link.overlap

    def _sends_early_by_rule(self) -> bool:
        engine = self.engine.spec()
        return policy_for(engine.name, engine.version).allocates_before_prefill

    def routing_spec(self) -> RoutingSpec:
        """Return how requests are spread over instances."""
        return self.router.spec()

    def fault_specs(self, layers: int) -> tuple[FaultSpec, ...]:
        """Return the faults of data, for a model of so many layers."""
        roles = list(self.pools.named())
        return tuple(fault.spec(roles, layers) for fault in self.faults)

    def engine_spec(self) -> EngineSpec:
        """Return the engine with its version filled in."""
        return self.engine.spec()

    def model_spec(self) -> ModelSpec:
        """Load the model: a shipped name, or a path that may start from the scenario's folder."""
        with self._naming("model"):
            return load_model(self._beside(self.model))

    def gpu_spec(self, role: Role) -> GpuSpec:
        """Load the GPU of a pool: its own, or the scenario's."""
        own = self.pools.named()[role].gpu
        with self._naming("gpu" if own is None else f"pools.{role}.gpu"):
            return load_gpu(self._beside(own or self.gpu))

    def profile_choice(self, role: Role) -> ProfileChoice:
        """Choose the profile that a pool's predictions rest on, and say why; reads no tables."""
        gpu = self.gpu_spec(role)
        with self._naming("profile"):
            return choose_profile(self.profile, gpu, self.engine.name, self._folder)

    def speculation_spec(self, role: Role) -> SpeculationSpec | None:
        """Return how a pool speculates, None where it does not; loads its draft model."""
        section = self.pools.named()[role].speculation
        with self._naming(f"pools.{role}.speculation.draft"):
            return section.spec(self.model_spec(), lambda name: load_model(self._beside(name)))

    def traffic_spec(self) -> TrafficSpec:
        """Return the traffic; reads the files of `file` lengths and finds the trace."""
        traffic = self.traffic
        return TrafficSpec(
            kind=traffic.kind,
            concurrency=traffic.concurrency,
            rates_per_s=traffic.rate_per_s or (),
            coefficient_of_variation=traffic.coefficient_of_variation,
            input_tokens=self._length("input_tokens"),
            output_tokens=self._length("output_tokens"),
            requests=traffic.requests,
            timeout_s=traffic.timeout,
            output_limit_tokens=traffic.output_limit_tokens,
            trace=self._trace() if traffic.kind == "trace" else None,
            shape=traffic.day_shape(),
            sessions=self._sessions(),
        )

    def _length(self, name: Literal["input_tokens", "output_tokens"]) -> LengthDistribution:
        length = self.traffic.input_tokens if name == "input_tokens" else self.traffic.output_tokens
        with self._naming(f"traffic.{name}"):
            return length.distribution(self._folder)

    def _trace(self) -> TraceSource:
        traffic = self.traffic
        assert traffic.path is not None  # TrafficSection asks for it
        with self._naming("traffic.path"):
            path = find_trace(traffic.path, self._folder)
        return TraceSource(path, traffic.format, traffic.rate_scale, traffic.limit)

    def _sessions(self) -> SessionSpec | SessionTrace | None:
        section = self.traffic.session
        if section is None:
            return None
        if section.path is None:
            with self._naming("traffic.session"):
                return section.spec(self._folder)
        with self._naming("traffic.session.path"):
            return SessionTrace(find_trace(section.path, self._folder), section.count)

    def _beside(self, name: str) -> str:
        """Return the path of a file beside the scenario; a shipped name is left as it is."""
        path = self._folder / name
        return str(path) if _PATH_LIKE.search(name) and path.exists() else name

    @contextmanager
    def _naming(self, field: str) -> Iterator[None]:
        """Put the file and the field before the message of a domain error."""
        try:
            yield
        except BadInputError as error:
            text = str(error).removeprefix(f"{field.rpartition('.')[2]}: ")
            raise BadInputError(f"{self._source}: {field}: {text}") from error

    def resolved(self) -> dict[str, Any]:
        """Return every field with its value, in SI; as a scenario file it says the same."""
        data = self.model_dump(mode="json")
        data["engine"]["version"] = self.engine.spec().version
        return data
