"""The figures of one point of a load, from one run of it."""

from __future__ import annotations

from typing import Any

from tonnage.pools import BuiltPool, token_role
from tonnage.scenarios.schema import Scenario
from tonnage.scenarios.schema_pools import Role
from tonnage.sim.results import summary
from tonnage.sim.results.cache import cache_figures
from tonnage.sim.results.cost import Gpus, cost
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
    cache = cache_figures(run)
    if cache:
        figures["cache"] = cache
    if resident and point.concurrency is not None:
        figures["resident_requests"] = run.peak_requests
    if not resident:
        met = summary.objectives_met(run, scenario.objectives())
        if met:
            figures["slo"] = met
    price = scenario.price.spec()
    if price is not None:
        figures["cost"] = cost(price, gpus, rates)
    return figures


def _gpus(pools: dict[Role, BuiltPool], *, resident: bool) -> Gpus:
    """Return whose GPUs a figure per GPU, or per dollar, divides by."""
    decode = pools[token_role(pools)].spec
    if resident:  # the curve of one decode instance, whatever else the scenario names
        return Gpus(fleet=decode.layout.gpus, prefill=0, decode=decode.layout.gpus)
    prefill = pools["prefill"].spec.gpus if "prefill" in pools else 0
    return Gpus(sum(pool.spec.gpus for pool in pools.values()), prefill, decode.gpus)
