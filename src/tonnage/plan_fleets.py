"""From a candidate to a scenario that `simulate` runs, and to the plan that is reported."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from tonnage.assumptions import assumptions_of
from tonnage.plan_quality import FormatJudge
from tonnage.plan_runs import PlannedLoad, RunFigures, estimate, figure
from tonnage.plan_space import PoolConfig, Setting, described
from tonnage.pools import BuiltPool, built_pools, times_of
from tonnage.scenarios.load import parse_scenario
from tonnage.scenarios.prices import gpu_hour_usd
from tonnage.scenarios.schema import Scenario
from tonnage.scenarios.schema_pools import Role
from tonnage.sim.cost.operator_times import weakest
from tonnage.sim.domain import BadInputError
from tonnage.sim.planning.fleet_plan import (
    Estimate,
    FleetPlan,
    PlanFigures,
    PlannedObjective,
    PlannedPool,
    PlannedRouter,
    PlannedSpeculation,
    PlanProvenance,
)
from tonnage.sim.planning.stock_engines import STOCK_ROUTERS, lacks
from tonnage.sim.results.summary import objective_name

_S_PER_HOUR = 3600
_MILLION = 1e6


@dataclass(frozen=True, slots=True)
class Fleet:
    """One candidate: configurations with their instances, a router, what the pools share."""

    pools: tuple[tuple[PoolConfig, int], ...]
    router: str
    setting: Setting

    @property
    def text(self) -> str:
        """Name it in a line."""
        parts = [f"{count} x {described(config)}" for config, count in self.pools]
        many = any(count > 1 for _, count in self.pools)
        return " + ".join(parts) + (f", {self.router}" if many else "")


def fleet_scenario(scenario: Scenario, fleet: Fleet, load: PlannedLoad) -> Scenario:
    """Return the scenario with the pools, the router and the load of a plan."""
    data = fleet_data(scenario, fleet, load)
    source, folder = scenario.origin()
    return parse_scenario(data, source, folder)


def fleet_data(scenario: Scenario, fleet: Fleet, load: PlannedLoad) -> dict[str, Any]:
    """Return the fields of that scenario, as its file has them."""
    data = scenario.model_dump(mode="json", exclude_unset=True)
    data.pop("plan", None)
    named = scenario.pools.named()
    data["pools"] = {
        config.role: config.section(named.get(config.role), count).model_dump(
            mode="json", exclude_unset=True
        )
        for config, count in fleet.pools
    }
    if fleet.setting.mem_fraction is not None:
        data.setdefault("engine", {})["mem_fraction"] = fleet.setting.mem_fraction
    if fleet.setting.host_cache_bytes:
        data.setdefault("cache", {})["host"] = fleet.setting.host_cache_bytes
    router = {
        key: value
        for key, value in data.get("router", {}).items()
        if key not in ("prefill", "decode", "down")
    }
    data["router"] = {**router, "policy": fleet.router}
    if "prefill" not in data["pools"] and data.get("price", {}).get("split") == "pools":
        data["price"]["split"] = "output"  # one pool: prompts have no GPUs of their own
    data["traffic"] = _traffic(data.get("traffic", {}), load)
    return data


def _traffic(traffic: dict[str, Any], load: PlannedLoad) -> dict[str, Any]:
    point, spec = load.point, load.traffic
    if spec.trace is not None:
        return {**traffic, "rate_scale": spec.trace.rate_scale}
    if point.concurrency is None:
        return {**traffic, "rate_per_s": [point.rate_per_s]}
    changed = {key: value for key, value in traffic.items() if key != "rate_per_s"}
    changed["concurrency"] = [point.concurrency]  # sessions at a rate are planned as users
    if spec.kind == "closed":
        changed["requests"] = max(spec.requests, 4 * point.concurrency)
    return changed


def check_plannable(scenario: Scenario) -> None:
    """Refuse what a plan cannot be made for: no objective, several regions."""
    source = scenario.origin()[0]
    engine = scenario.engine.name
    if engine not in STOCK_ROUTERS:
        raise BadInputError(
            f"{source}: engine.name: nothing here starts {engine}, so no fleet is planned for it; "
            f"use {' or '.join(STOCK_ROUTERS)}"
        )
    if not scenario.slo:
        raise BadInputError(
            f"{source}: slo: a plan needs an objective to meet, such as --set slo.ttft_p95=5s"
        )
    if scenario.router.regions > 1:
        raise BadInputError(
            f"{source}: router.regions: a plan is for one region; plan each by itself with its load"
        )


def fleet_plan(
    scenario: Scenario, fleet: Fleet, load: PlannedLoad, runs: Sequence[RunFigures], binds: str
) -> FleetPlan:
    """Return the plan of a fleet from its simulated runs."""
    own = fleet_scenario(scenario, fleet, load)
    pools = built_pools(own)
    planned = tuple(_pool(own, role, pool) for role, pool in pools.items())
    engine = own.engine_spec()
    router = PlannedRouter(own.router.policy, own.router.affinity)
    return FleetPlan(
        name=scenario.name,
        model=scenario.model,
        engine=engine.name,
        engine_version=engine.version,
        pools=planned,
        router=router,
        figures=plan_figures(scenario, planned, runs),
        binds=binds,
        seed=scenario.seed,
        provenance=_provenance(scenario, own, pools, load),
        link=own.link.kind if len(planned) > 1 else None,
        prefix_cache=own.cache.gpu,
        host_cache_bytes=own.cache.host,
        needs=tuple(lacks(engine.name, planned, router)),
    )


def stock_lacks(scenario: Scenario, fleet: Fleet, built: Sequence[BuiltPool]) -> tuple[str, ...]:
    """Return what a fleet needs that stock engines lack, before it is simulated."""
    pools = [
        _planned(scenario, config.role, pool, count)
        for (config, count), pool in zip(fleet.pools, built, strict=True)
    ]
    router = PlannedRouter(fleet.router, scenario.router.affinity)
    return tuple(lacks(scenario.engine_spec().name, tuple(pools), router))


def _pool(own: Scenario, role: Role, pool: BuiltPool) -> PlannedPool:
    return _planned(own, role, pool, pool.spec.instances)


def _planned(own: Scenario, role: Role, pool: BuiltPool, instances: int) -> PlannedPool:
    spec, fitted = pool.spec, pool.memory
    section = own.pools.named().get(role)
    speculation = None
    if spec.speculation is not None and section is not None:
        speculation = PlannedSpeculation(
            draft=section.speculation.draft or spec.speculation.draft,
            draft_tokens=spec.speculation.draft_tokens,
            accept_length=spec.speculation.accept_length,
            accept_distribution=spec.speculation.accept_probabilities,
        )
    return PlannedPool(
        role=role,
        gpu=pool.gpu.name,
        instances=instances,
        layout=spec.layout,
        weights=spec.weights,
        kv=spec.kv_format,
        mem_fraction=fitted.mem_fraction,
        max_running_requests=spec.max_running_requests,
        max_model_tokens=min(pool.model.max_context_tokens, fitted.longest_request_tokens),
        page_tokens=spec.page_tokens,
        chunk_tokens=spec.chunk_tokens,
        kv_tokens=fitted.kv_tokens,
        gpu_hour_usd=gpu_hour_usd(own, pool.gpu.name),
        speculation=speculation,
        integrity=spec.integrity,
    )


def plan_figures(
    scenario: Scenario, pools: Sequence[PlannedPool], runs: Sequence[RunFigures]
) -> PlanFigures:
    """Return what the runs measured, with their intervals."""
    gpus = sum(pool.gpus for pool in pools)
    usd = sum(pool.gpus * pool.gpu_hour_usd for pool in pools)
    rate = figure(runs, "output_tokens_per_s")
    slow = figure(runs, "tpot_p50_s")
    hits = [run.cache_hit_share for run in runs if run.cache_hit_share is not None]
    return PlanFigures(
        simulated=True,
        replications=len(runs),
        output_tokens_per_s=rate,
        output_tokens_per_s_per_gpu=_scaled(rate, 1 / gpus),
        output_tokens_per_s_per_user=_inverse(slow, 1.0),
        usd_per_hour=usd,
        usd_per_million_output_tokens=_inverse(rate, usd / _S_PER_HOUR * _MILLION),
        input_tokens_per_s=figure(runs, "input_tokens_per_s"),
        ttft_p95_s=_finite(estimate(runs, "ttft_p95")),
        tpot_p95_s=_finite(estimate(runs, "tpot_p95")),
        cache_hit_share=sum(hits) / len(hits) if hits else None,
        objectives=objectives_reached(scenario, runs),
    )


def objectives_reached(
    scenario: Scenario, runs: Sequence[RunFigures]
) -> tuple[PlannedObjective, ...]:
    """Return every objective with what the runs reached; met where the bound is within it."""
    found = []
    for one in scenario.objectives():
        name = objective_name(one)
        reached = estimate(runs, name)
        met = reached.upper <= one.limit_s
        found.append(PlannedObjective(name, one.limit_s, _bounded(reached), met))
    return tuple(found)


_LONGEST_S = 1e9  # stands for "never" in a file, which knows no infinity


def _bounded(reached: Estimate) -> Estimate:
    return reached if math.isfinite(reached.value) else Estimate(_LONGEST_S)


def _finite(reached: Estimate) -> Estimate | None:
    return reached if math.isfinite(reached.value) else None


def _scaled(one: Estimate, factor: float) -> Estimate:
    low, high = one.low, one.high
    return Estimate(
        one.value * factor,
        None if low is None else low * factor,
        None if high is None else high * factor,
    )


def _inverse(one: Estimate, factor: float) -> Estimate:
    """Return `factor / one`; a bound that would be divided by nothing is left out."""
    if not (math.isfinite(one.value) and one.value > 0):
        return Estimate(0.0)
    high = factor / one.low if one.low is not None and one.low > 0 else None
    low = factor / one.high if one.high is not None else None
    return Estimate(factor / one.value, low, high)


def _provenance(
    scenario: Scenario, own: Scenario, pools: dict[Role, BuiltPool], load: PlannedLoad
) -> PlanProvenance:
    times = times_of(own, pools)
    steps = [text for one in times.values() for text in one.assumptions]
    formats = _format_assumptions(scenario, pools)
    assumptions = dict.fromkeys(
        (*assumptions_of(own, pools), *steps, *_plan_assumptions(own, load), *formats)
    )
    return PlanProvenance(
        profile=", ".join(dict.fromkeys(one.profile for one in times.values())),
        source=weakest([one.source for one in times.values()]),
        version=version("tonnage"),
        seed=own.seed,
        assumptions=tuple(assumptions),
    )


def _plan_assumptions(own: Scenario, load: PlannedLoad) -> list[str]:
    lines = [f"plan: {load_text(load)}, headroom included; the first requests are not measured"]
    if load.traffic.kind == "sessions":
        lines.append(
            "plan: every session is met somewhere in its middle, its context in the caches; drawn "
            "ones share text in blocks of 256 tokens"
        )
    if load.session_rate_per_s is not None:
        lines.append(
            f"plan: {load.session_rate_per_s:g} sessions/s are taken for the users that they are "
            "at once, by Little's law with 5 s for an answer; a slower fleet has more"
        )
    if own.cache.host:
        lines.append("plan: host memory for prefixes costs nothing beside the GPUs")
    return lines


def _format_assumptions(scenario: Scenario, pools: dict[Role, BuiltPool]) -> Iterator[str]:
    """Yield what weights must be made, and what their formats and KV's may cost in quality."""
    judge, model = FormatJudge(scenario), scenario.model_spec()
    for pool in pools.values():
        weights = pool.spec.weights
        if weights not in ("native", model.native_weight_format):
            yield (
                f"weights: {model.name} is released in {model.native_weight_format}; a checkpoint "
                f"in {weights} has to be found or made"
            )
        yield from judge.flags(weights, pool.spec.kv_format)


def load_text(load: PlannedLoad) -> str:
    """Name the load of a plan, such as `71 sessions`."""
    point = load.point
    if load.traffic.trace is not None:
        return f"the trace at {load.traffic.trace.rate_scale:g} times its rate"
    if point.concurrency is None:
        return f"{point.rate_per_s:g} {'sessions' if load.traffic.sessions else 'requests'}/s"
    what = "sessions" if load.traffic.kind == "sessions" else "users"
    return f"{point.concurrency} {what}"
