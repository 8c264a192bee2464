"""The figures of one point of a load, from one run of it."""

from __future__ import annotations

from typing import Any

from tonnage.pools import BuiltPool, token_role
from tonnage.scenarios.prices import price_of
from tonnage.scenarios.schema import Scenario
from tonnage.scenarios.schema_pools import Role
from tonnage.sim.results import summary
from tonnage.sim.results.cache import cache_figures
from tonnage.sim.results.cost import Gpus, cost
from tonnage.sim.results.integrity import WatchedPool, integrity_figures
from tonnage.sim.results.run import RunResult
from tonnage.sim.traffic.spec import LoadPoint


def point_figures(
    scenario: Scenario, pools: dict[Role, BuiltPool], point: LoadPoint, run: RunResult
) -> dict[str, Any]:
    """Return one entry of `points` in the JSON object, without its intervals."""
    resident = scenario.traffic.kind == "resident"
    gpus = _gpus(pools, resident=resident)
    rates = summary.throughput(run, gpus.fleet, resident=resident)
    figures: dict[str, Any] = {
        "concurrency": point.concurrency,
        "rate_per_s": point.rate_per_s,
        "gpus": gpus.fleet,
        "makespan_s": run.makespan_s,
        "throughput": rates,
        "latency": summary.latency(run, resident=resident),
        "requests": summary.request_counts(run.records),
        "wasted_tokens": summary.wasted_tokens(run.records),
    }
    figures |= summary.attempt_figures(run)
    cache = cache_figures(run)
    if cache:
        figures["cache"] = cache
    figures["integrity"] = integrity_figures(run, _watched(pools))
    if resident and point.concurrency is not None:
        figures["resident_requests"] = run.peak_requests
    if not resident:
        met = summary.objectives_met(run, scenario.objectives())
        if met:
            figures["slo"] = met
    price = price_of(scenario)
    if price is not None:
        figures["cost"] = cost(price, gpus, rates)
    return figures


def _watched(pools: dict[Role, BuiltPool]) -> dict[str, WatchedPool]:
    """Return the pools as the checks of their pages see them."""
    watched: dict[str, WatchedPool] = {}
    for role, pool in pools.items():
        spec, ranks = pool.spec, pool.spec.layout.attention_dp
        pages = pool.memory.kv_tokens // ranks // spec.page_tokens
        watched[role] = WatchedPool(spec.integrity, spec.page_tokens, pages, spec.instances * ranks)
    return watched


def _gpus(pools: dict[Role, BuiltPool], *, resident: bool) -> Gpus:
    """Return whose GPUs a figure per GPU, or per dollar, divides by."""
    decode = pools[token_role(pools)].spec
    if resident:  # the curve of one decode instance, whatever else the scenario names
        return Gpus(fleet=decode.layout.gpus, prefill=0, decode=decode.layout.gpus)
    prefill = pools["prefill"].spec.gpus if "prefill" in pools else 0
    return Gpus(sum(pool.spec.gpus for pool in pools.values()), prefill, decode.gpus)
