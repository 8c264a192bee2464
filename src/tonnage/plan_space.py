"""The search space of a plan: every pool configuration of a scenario, built once, in figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product

from tonnage.plan_quality import FormatJudge
from tonnage.plan_transfer import pair_transfer
from tonnage.pools import BuiltPool, built_pools, times_of
from tonnage.scenarios.catalogue import gpu_names, load_gpu
from tonnage.scenarios.prices import gpu_hour_usd
from tonnage.scenarios.profiles import profile_paths
from tonnage.scenarios.schema import Scenario
from tonnage.scenarios.schema_integrity import IntegritySection
from tonnage.scenarios.schema_plan import PlanSection
from tonnage.scenarios.schema_pools import (
    KvFormat,
    PoolSection,
    PoolsSection,
    Role,
    SpeculationSection,
    WeightFormat,
)
from tonnage.sim.cost.operator_times import OperatorTime
from tonnage.sim.cost.step_time import StepPredictor
from tonnage.sim.domain import (
    BadInputError,
    GpuSpec,
    InfeasibleError,
    ModelSpec,
    ParallelLayout,
    Step,
)
from tonnage.sim.model.engine_rules import default_chunk_tokens, default_max_prefill_tokens
from tonnage.sim.model.formats import checkpoint_bytes
from tonnage.sim.model.kv import kv_bytes_per_token
from tonnage.sim.model.memory import LoadedLayouts, requests_held
from tonnage.sim.model.requantise import is_moe, with_weights
from tonnage.sim.planning.candidates import PairTransfer, PoolOption, RouterOption
from tonnage.sim.planning.pool_model import DecodeTimes, PromptTimes
from tonnage.sim.planning.stock_engines import STOCK_ROUTERS
from tonnage.sim.planning.workload import Workload
from tonnage.sim.serving.policy import policy_for
from tonnage.sim.serving.router import PolicyName
from tonnage.sim.units import format_bytes

_SMALLER = 0.98  # of the native bytes: what does not save that much is no reason to quantise
_TRIED_FORMATS: tuple[WeightFormat, ...] = ("fp8_block", "int4_g32", "nvfp4")
_COMPUTES = {"fp8_block": "fp8", "nvfp4": "fp4"}  # the rate that a GPU must have; INT4 needs none
_NO_SPECULATION = SpeculationSection()


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """One configuration of a pool, without its replicas; None is the engine's own rule."""

    role: Role
    gpu: str
    layout: ParallelLayout
    weights: WeightFormat
    kv: KvFormat
    chunk_tokens: int | None = None
    speculates: bool = False

    def section(self, base: PoolSection | None, instances: int) -> PoolSection:
        """Return the section of a scenario that has it; what is not searched comes from `base`."""
        layout = self.layout
        speculation = base.speculation if base is not None and self.speculates else _NO_SPECULATION
        return PoolSection(
            instances=instances,
            gpu=self.gpu,
            tp=layout.tp,
            pp=layout.pp,
            ep=layout.ep,
            attention_dp=layout.attention_dp,
            dcp=layout.dcp,
            weights=self.weights,
            kv=self.kv,
            chunk_tokens=self.chunk_tokens,
            speculation=speculation,
            integrity=IntegritySection() if base is None else base.integrity,
        )


@dataclass(frozen=True, slots=True)
class Setting:
    """What all pools of a fleet share: the engine's fraction, and the host memory for prefixes."""

    mem_fraction: float | None
    host_cache_bytes: float


@dataclass(slots=True)
class Space:
    """Pool configurations in figures, by setting and role, and why others are not there."""

    scenario: Scenario
    workload: Workload
    judge: FormatJudge = field(init=False)
    options: dict[tuple[Setting, Role], list[PoolOption]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)  # description to the reason
    _executors: dict[PoolConfig, StepPredictor] = field(default_factory=dict)
    _prompts: dict[tuple[PoolConfig, int], PromptTimes] = field(default_factory=dict)
    _decodes: dict[PoolConfig, DecodeTimes] = field(default_factory=dict)
    _built: dict[tuple[Setting, PoolConfig], BuiltPool] = field(default_factory=dict)
    _transfers: dict[tuple[object, ...], PairTransfer] = field(default_factory=dict)
    _layouts: LoadedLayouts = field(default_factory=dict)
    _checkpoints: dict[str, float] = field(default_factory=dict)  # bytes by weight format

    def __post_init__(self) -> None:
        """Make the judge of formats."""
        self.judge = FormatJudge(self.scenario)

    def add(self, setting: Setting, config: PoolConfig) -> None:
        """Build a configuration and time its steps; remember why where it cannot be."""
        if self._smaller_was_refused(config):
            return
        try:
            option = self._option(setting, config)
        except InfeasibleError as error:
            self.refused[described(config)] = str(error).partition(";")[0]
            return
        except BadInputError:  # a layout that the model cannot have
            return
        self.options.setdefault((setting, config.role), []).append(option)

    def _smaller_was_refused(self, config: PoolConfig) -> bool:
        """Tell whether the same with smaller steps did not fit: larger ones need more room."""
        if config.role == "decode":
            return False
        chunks = _chunks(self.scenario, load_gpu(config.gpu))
        smaller = chunks[: chunks.index(config.chunk_tokens)]
        return any(described(replace(config, chunk_tokens=one)) in self.refused for one in smaller)

    def _check_weights(self, config: PoolConfig) -> None:
        """Refuse what is plainly too large, without working out what would fit instead."""
        if config.weights not in self._checkpoints:
            loaded = with_weights(self.scenario.model_spec(), config.weights)
            self._checkpoints[config.weights] = checkpoint_bytes(loaded)
        per_gpu = self._checkpoints[config.weights] / config.layout.gpus
        memory_bytes = load_gpu(config.gpu).memory_bytes
        if per_gpu > memory_bytes:
            raise InfeasibleError(
                f"{format_bytes(per_gpu)} of weights per GPU in {format_bytes(memory_bytes)}"
            )

    def _option(self, setting: Setting, config: PoolConfig) -> PoolOption:
        costs = self.judge.refusal(config.weights, config.kv)
        if costs is not None:
            raise InfeasibleError(costs)
        self._check_weights(config)
        pool, one = self._pool(setting, config)
        fitted, spec = pool.memory, pool.spec
        longest = self.workload.longest_tokens
        if setting.mem_fraction is not None and setting.mem_fraction > fitted.mem_fraction_most:
            raise InfeasibleError(
                f"mem_fraction {setting.mem_fraction:g} leaves no room for activations and graphs "
                f"(at most {fitted.mem_fraction_most:.3f})"
            )
        if fitted.longest_request_tokens < min(longest, pool.model.max_context_tokens):
            raise InfeasibleError(
                f"a request of {longest:,} tokens does not fit "
                f"({fitted.longest_request_tokens:,} do)"
            )
        held = max(1, round(self.workload.held_tokens))
        running = min(requests_held(fitted, held), spec.max_running_requests)
        of_model = kv_bytes_per_token(pool.model, ParallelLayout(), spec.kv_format)
        computes, decodes = config.role != "decode", config.role != "prefill"
        return PoolOption(
            config=config,
            role=config.role,
            gpus=spec.layout.gpus,
            usd_per_hour=gpu_hour_usd(self.scenario, config.gpu) * spec.layout.gpus,
            kv_tokens=fitted.kv_tokens,
            concurrency=running,
            prompt=self._prompt_times(one, config, pool) if computes else None,
            decode=self._decode_times(one, config, pool) if decodes else None,
            host_tokens=int(setting.host_cache_bytes / of_model) if computes else 0,
            decode_ranks=spec.layout.attention_dp,
        )

    def _pool(self, setting: Setting, config: PoolConfig) -> tuple[BuiltPool, Scenario]:
        """Build the pool alone, out of a copy of the scenario that has no other."""
        base = self.scenario.pools.named().get(config.role)
        engine = self.scenario.engine
        if setting.mem_fraction is not None:
            engine = engine.model_copy(
                update={"mem_fraction": setting.mem_fraction, "mem_fraction_source": "given"}
            )
        pools = PoolsSection(**{config.role: config.section(base, 1)})
        one = self.scenario.model_copy(update={"engine": engine, "pools": pools})
        if (setting, config) not in self._built:
            self._built[setting, config] = built_pools(one, self._layouts)[config.role]
        return self._built[setting, config], one

    def built(self, setting: Setting, config: PoolConfig) -> BuiltPool:
        """Return the pool of a configuration that was added."""
        return self._built[setting, config]

    def _executor(self, one: Scenario, config: PoolConfig, pool: BuiltPool) -> StepPredictor:
        """Return what predicts the steps; the chunk size does not matter to it."""
        key = replace(config, chunk_tokens=None)
        if key not in self._executors:
            self._executors[key] = times_of(one, {config.role: pool})[config.role].executor
        return self._executors[key]

    def times(self, setting: Setting, config: PoolConfig, step: Step) -> list[OperatorTime]:
        """Return every operator of one step of a configuration that was added."""
        pool, one = self._pool(setting, config)
        return self._executor(one, config, pool).times(step)

    def _prompt_times(self, one: Scenario, config: PoolConfig, pool: BuiltPool) -> PromptTimes:
        engine, layout = one.engine_spec(), pool.spec.layout
        policy = policy_for(engine.name, engine.version)
        chunk = policy.rank_chunk_tokens(pool.spec.chunk_tokens, layout.attention_dp)
        chunk = max(1, min(chunk, default_max_prefill_tokens(engine, pool.gpu)))
        key = replace(config, role="prefill", chunk_tokens=None, speculates=False)
        if (key, chunk) not in self._prompts:
            executor = self._executor(one, config, pool)
            self._prompts[key, chunk] = PromptTimes.measured(executor, layout, chunk)
        return self._prompts[key, chunk]

    def _decode_times(self, one: Scenario, config: PoolConfig, pool: BuiltPool) -> DecodeTimes:
        speculation = pool.spec.speculation
        key = replace(config, role="decode", chunk_tokens=None)
        if key not in self._decodes:
            self._decodes[key] = DecodeTimes.measured(
                self._executor(one, config, pool),
                pool.spec.layout,
                self.workload.decode_context_tokens,
                1 if speculation is None else speculation.query_tokens,
                1.0 if speculation is None else speculation.accept_length,
            )
        return self._decodes[key]

    def transfer(self, setting: Setting, first: PoolConfig, second: PoolConfig) -> PairTransfer:
        """Return how the KV of a prompt gets from one configuration to the other."""
        key = tuple((one.gpu, replace(one.layout, ep=1), one.kv) for one in (first, second))
        if key not in self._transfers:
            ends = self.built(setting, first), self.built(setting, second)
            self._transfers[key] = pair_transfer(self.scenario, self.workload, *ends)
        if not self.scenario.sends_early():
            return self._transfers[key]
        chunk_tokens = self.built(setting, first).spec.chunk_tokens
        return replace(self._transfers[key], tail_tokens=chunk_tokens)


# --- what is tried ------------------------------------------------------------------------------


def settings_of(scenario: Scenario) -> list[Setting]:
    """Return the combinations of what all pools of a fleet share."""
    plan = scenario.plan
    fractions = [scenario.engine.mem_fraction if one is None else one for one in plan.mem_fraction]
    hosts = (scenario.cache.host,) if plan.host_cache is None else plan.host_cache
    return [Setting(*one) for one in product(dict.fromkeys(fractions), dict.fromkeys(hosts))]


def routers_of(scenario: Scenario) -> list[RouterOption]:
    """Return the routers that are tried: the scenario's own, and a stock engine's."""
    router = scenario.router
    shares = scenario.cache.gpu and scenario.traffic.kind in ("trace", "sessions")
    names = scenario.plan.routers or _routers(scenario, shares=shares)
    return [
        RouterOption(name, returns=shares and (name == "cache_aware" or router.affinity != "none"))
        for name in names
    ]


def _routers(scenario: Scenario, *, shares: bool) -> tuple[PolicyName, ...]:
    """Return the policy of the scenario and a stock one, which comes first: it wins a tie."""
    known = STOCK_ROUTERS[scenario.engine.name]
    stock: PolicyName = "round_robin"
    if "cache_aware" in known:
        stock = "cache_aware" if shares else "power_of_two"
    own = scenario.router.policy
    return (own,) if own in known else (stock, own)


def configs_of(scenario: Scenario, role: Role) -> Iterator[PoolConfig]:
    """Yield every configuration of a role."""
    plan, model = scenario.plan, scenario.model_spec()
    section = scenario.pools.named().get(role) or scenario.pools.named().get("decode")
    offers = section is not None and section.speculation.draft_tokens > 0 and role != "prefill"
    for name in plan_gpus(scenario):
        gpu = load_gpu(name)
        layouts = list(_layouts(plan, gpu, moe=is_moe(model)))
        weights = _weights(plan, model, gpu)
        chunks = _chunks(scenario, gpu) if role != "decode" else (None,)
        for layout, weight, kv, chunk, speculates in product(
            layouts, weights, plan.kv, chunks, (False, True) if offers else (False,)
        ):
            yield PoolConfig(role, name, layout, weight, kv, chunk, speculates)


def _chunks(scenario: Scenario, gpu: GpuSpec) -> tuple[int | None, ...]:
    """Return the chunk sizes that differ on a GPU, the engine's own as None.

    The smallest first: what does not fit with it does not with a larger one either.
    """
    own = default_chunk_tokens(scenario.engine_spec(), gpu)
    wanted = {one or own for one in scenario.plan.chunk_tokens}
    return tuple(None if one == own else one for one in sorted(wanted))


def plan_gpus(scenario: Scenario) -> tuple[str, ...]:
    """Return the GPUs that are tried: those named, or the scenario's and its class with a price.

    A class is a GPU of the same interconnect for which the engine has measured kernels.
    """
    if scenario.plan.gpus is not None:
        return tuple(dict.fromkeys(scenario.plan.gpus))
    own = scenario.gpu_spec(next(iter(scenario.pools.named())))
    timed = set(profile_paths())
    found = [scenario.gpu]
    for name in gpu_names():
        gpu = load_gpu(name)
        if (gpu.nvlink_bytes_per_s is None) != (own.nvlink_bytes_per_s is None):
            continue
        if name == scenario.gpu or f"{name}-{scenario.engine.name}" not in timed:
            continue
        try:
            gpu_hour_usd(scenario, name)
        except BadInputError:  # no price, so it cannot be compared
            continue
        found.append(name)
    return tuple(found)


def _layouts(plan: PlanSection, gpu: GpuSpec, *, moe: bool) -> Iterator[ParallelLayout]:
    node = gpu.gpus_per_node
    widths = plan.tp or tuple(2**n for n in range(node.bit_length()) if 2**n <= node)
    for tp in widths:
        # Stages are for models that no node holds: only whole nodes are chained.
        stages = plan.pp if tp == max(widths) else tuple(pp for pp in plan.pp if pp == 1)
        experts = _ways(plan.expert_parallel, tp) if moe else (1,)
        for pp, ep, ranks in product(stages, experts, _ways(plan.attention_dp, tp)):
            if tp * pp <= plan.max_gpus:
                yield ParallelLayout(tp, pp, ep, ranks)


def _ways(choice: str, tp: int) -> tuple[int, ...]:
    if choice == "never" or tp == 1:
        return (1,)
    return (tp,) if choice == "always" else (1, tp)


def _weights(plan: PlanSection, model: ModelSpec, gpu: GpuSpec) -> tuple[WeightFormat, ...]:
    """Return the weight formats: those named, or native and what makes it smaller on that GPU."""
    if plan.weights is not None:
        return tuple(dict.fromkeys(plan.weights))
    native = checkpoint_bytes(model)
    found: list[WeightFormat] = ["native"]
    for name in _TRIED_FORMATS:
        rate = _COMPUTES.get(name)
        if rate is not None and rate not in gpu.dense_flops_per_s:
            continue
        if checkpoint_bytes(with_weights(model, name)) < _SMALLER * native:
            found.append(name)
    return tuple(found)


def described(config: PoolConfig) -> str:
    """Say what a configuration is, such as `decode H200-SXM TP8 EP8 native fp8_e4m3`."""
    layout = config.layout
    parts = [config.role, config.gpu, f"TP{layout.tp}"]
    parts += [f"PP{layout.pp}"] if layout.pp > 1 else []
    parts += [f"EP{layout.ep}"] if layout.ep > 1 else []
    parts += [f"DP{layout.attention_dp}"] if layout.attention_dp > 1 else []
    parts += [f"{config.weights} weights", f"{config.kv} KV"]
    parts += [f"chunks of {config.chunk_tokens}"] if config.chunk_tokens is not None else []
    parts += ["speculating"] if config.speculates else []
    return " ".join(parts)
